"""The figures of a sweep: every recipe's score on every data set, and what a setting of the grid does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bnn_pyro import plots
from bnn_pyro.metrics import METRICS
from bnn_pyro.plots.style import MARKERS
from bnn_pyro.reports.page import Picture
from bnn_pyro.reports.tables import HEADLINE, SHARES
from bnn_pyro.runs.sweep_config import RecipeSpec, setting_text
from bnn_pyro.runs.sweep_statistics import DatasetSummary

__all__ = ["draw_sweep", "numeric_settings"]

#: Metrics that are drawn, with their units; the tables have all.
LABELS = {
    "error": "error, % of test rows",
    "rmse": "RMSE, target units",
    "nll": "NLL, nats per test row",
    "ece": "ECE",
    "coverage_95": "coverage of 95 % intervals, %",
}


class NumericSetting(NamedTuple):
    """A setting to which some recipes' grids give numbers, and {line: {number: name of the recipe}}.

    kind  of a text with one number in it, such as "fan-in:3", what is before the colon; else ""
    """

    key: str
    kind: str
    lines: Mapping[str, Mapping[float, str]]


def draw_sweep(summaries: Sequence[DatasetSummary], recipes: Sequence[RecipeSpec]) -> Iterator[Picture]:
    """A figure a metric, then two for each numeric setting; none where no fit is finished."""
    nominal = {name: m.nominal for by_name in METRICS.values() for name, m in by_name.items()}
    for metric, label in LABELS.items():
        scores = {
            data.name: {recipe: _scores(data, metric, recipe) for recipe in data.values[metric]}
            for data in summaries
            if metric in data.values
        }
        if scores:
            at = None if nominal[metric] is None else nominal[metric] * _unit(metric)
            sentence = "Every mark is a fit; above it the mean of its recipe ± the standard error that the table names."
            axes, name = plots.sweep_points(scores, label, nominal=at), metric.replace("_", "-")
            yield Picture.of(f"sweep-{name}", axes, f"{_title(metric)} by recipe", sentence, wide=len(scores) > 1)
    for setting in numeric_settings(recipes):
        for metric in dict.fromkeys(name for data in summaries for name in HEADLINE.get(data.task, ())):
            yield from _draw_setting(summaries, setting, metric)


def numeric_settings(recipes: Sequence[RecipeSpec]) -> list[NumericSetting]:
    """Settings that have two numbers or more somewhere; one line a table and combination of its other settings."""
    lines: dict[tuple[str, str], dict[str, dict[float, str]]] = {}
    for recipe in recipes:
        for key, value in recipe.grid.items():
            kind, number = _number(value)
            if number is not None:
                others = [f"{k}={setting_text(v)}" for k, v in recipe.grid.items() if k != key]
                line = " ".join([recipe.table, *others])
                lines.setdefault((key, kind), {}).setdefault(line, {})[number] = recipe.name
    return [NumericSetting(*which, by) for which, by in lines.items() if max(map(len, by.values())) > 1]


def _number(value: Any) -> tuple[str, float | None]:
    """("", a number), (what stands before it, the number in a text such as "fan-in:3"), or (…, None)."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "", float(value)
    match = re.fullmatch(r"([a-z-]+):(\d+\.?\d*(?:e[+-]?\d+)?)", value) if isinstance(value, str) else None
    return ("", None) if match is None else (match[1], float(match[2]))


def _draw_setting(summaries: Sequence[DatasetSummary], setting: NumericSetting, metric: str) -> Iterator[Picture]:
    drawn = dict(list(setting.lines.items())[: len(MARKERS)])
    lines = {}
    for data in summaries:
        values = data.values.get(metric, {})
        by_line = {line: {x: _scores(data, metric, name) for x, name in by.items() if name in values}
                   for line, by in drawn.items()}  # fmt: skip
        lines[data.name] = {line: by for line, by in by_line.items() if by}
    lines = {name: by for name, by in lines.items() if by}
    if not lines:
        return
    across = setting.key.replace("_", " ") + (f" ({setting.kind}:…)" if setting.kind else "")
    left = len(setting.lines) - len(drawn)
    sentence = "Means ± standard errors; neighbours share their splits, so that their differences are surer."
    sentence += f" {left} more lines are in the tables." if left else ""
    name = f"sweep-{metric}-by-{setting.key}{'-' + setting.kind if setting.kind else ''}".replace("_", "-")
    axes = plots.sweep_settings(lines, across, LABELS[metric])
    yield Picture.of(name, axes, f"{_title(metric)} by {across}", sentence, wide=len(lines) > 1)


def _scores(data: DatasetSummary, metric: str, recipe: str) -> plots.Scores:
    unit, mean = _unit(metric), data.recipes[recipe].metrics[metric]
    points = [unit * value for value in data.values[metric][recipe].values()]
    return plots.Scores(points, unit * mean.value, unit * mean.error, data.verdict(metric, recipe))


def _unit(metric: str) -> float:
    return 100.0 if metric in SHARES else 1.0


def _title(metric: str) -> str:
    return LABELS[metric].partition(",")[0]
