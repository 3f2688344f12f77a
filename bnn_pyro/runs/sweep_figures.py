"""The figures of a sweep: every recipe's score on every data set, and what a setting of the grid does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bnn_pyro import plots
from bnn_pyro.metrics import METRICS
from bnn_pyro.plots.style import MARKERS
from bnn_pyro.reports.page import Picture
from bnn_pyro.runs.sweep_spec import Candidate, spoken
from bnn_pyro.runs.sweep_summary import OnData
from bnn_pyro.reports.tables import HEADLINE, SHARES

__all__ = ["draw_sweep"]

#: Metrics that are drawn, with their units; the tables have all.
LABELS = {
    "error": "error, % of test rows",
    "rmse": "RMSE, target units",
    "nll": "NLL, nats per test row",
    "ece": "ECE",
    "coverage_95": "coverage of 95 % intervals, %",
}
MARKS = "Every mark is a fit; above it the mean of its recipe ± the standard error that the table names."


class Setting(NamedTuple):
    """A numeric setting that some recipes' grids go through, and the recipes by line and value.

    kind  of a text with one number in it, such as "fan-in:3", what is before the colon; else ""
    """

    key: str
    kind: str
    lines: Mapping[str, Mapping[float, str]]


def draw_sweep(found: Sequence[OnData], recipes: Sequence[Candidate]) -> list[Picture]:
    """A picture a metric, then two for each numeric setting; none where no fit is finished."""
    pictures = []
    for metric, label in LABELS.items():
        scores = {
            on.name: {row.recipe: _scores(on, metric, row.recipe) for row in on.recipes if metric in row.metrics}
            for on in found
            if metric in on.values
        }
        if scores:
            nominal = next(m.nominal for by in METRICS.values() for name, m in by.items() if name == metric)
            axes = plots.sweep_points(scores, label, nominal=None if nominal is None else nominal * _unit(metric))
            title = f"{label.partition(',')[0]} by recipe"
            pictures.append(Picture.of(f"sweep-{metric.replace('_', '-')}", axes, title, MARKS, wide=len(scores) > 1))
    for setting in numeric_settings(recipes):
        pictures += list(_draw_setting(found, setting))
    return pictures


def _unit(metric: str) -> float:
    return 100.0 if metric in SHARES else 1.0


def _scores(on: OnData, metric: str, recipe: str) -> plots.Scores:
    unit, contest = _unit(metric), on.contests.get(metric)
    mean = next(row.metrics[metric] for row in on.recipes if row.recipe == recipe)
    points = [unit * value for value in on.values[metric][recipe].values()]
    return plots.Scores(points, unit * mean.value, unit * mean.error, contest.verdict(recipe) if contest else "")


# -- settings ----------------------------------------------------------------------------------------------------------
def numeric_settings(recipes: Sequence[Candidate]) -> list[Setting]:
    """Settings that have two numbers or more somewhere; one line a table and combination of its other settings."""
    found: dict[tuple[str, str], dict[str, dict[float, str]]] = {}
    for candidate in recipes:
        for key, value in candidate.grid.items():
            kind, number = _number(value)
            if number is not None:
                others = [f"{k}={spoken(v)}" for k, v in candidate.grid.items() if k != key]
                line = found.setdefault((key, kind), {}).setdefault(" ".join([candidate.table, *others]), {})
                line[number] = candidate.name
    return [
        Setting(key, kind, lines) for (key, kind), lines in found.items() if max(len(by) for by in lines.values()) > 1
    ]


def _number(value: Any) -> tuple[str, float | None]:
    """("", a number), (what stands before it, the number in a text such as "fan-in:3"), or (…, None)."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "", float(value)
    parts = re.fullmatch(r"([a-z-]+):([\d.]+(?:e[+-]?\d+)?)", value) if isinstance(value, str) else None
    try:
        return ("", None) if parts is None else (parts[1], float(parts[2]))
    except ValueError:
        return "", None


def _draw_setting(found: Sequence[OnData], setting: Setting) -> Iterator[Picture]:
    shown = dict(list(setting.lines.items())[: len(MARKERS)])
    left = len(setting.lines) - len(shown)
    across = setting.key.replace("_", " ") + (f" ({setting.kind}:…)" if setting.kind else "")
    for metric in dict.fromkeys(name for on in found if on.task for name in HEADLINE[on.task]):
        lines = {on.name: _lines(on, metric, shown) for on in found if metric in on.values}
        lines = {name: by for name, by in lines.items() if by}
        if not lines:
            continue
        axes = plots.sweep_settings(lines, across, LABELS[metric])
        sentence = "Means ± standard errors; neighbours share their splits, so that their differences are surer." + (
            f" {left} more lines are in the tables." if left else ""
        )
        name = f"sweep-{metric}-by-{setting.key}{'-' + setting.kind if setting.kind else ''}".replace("_", "-")
        yield Picture.of(name, axes, f"{LABELS[metric].partition(',')[0]} by {across}", sentence, wide=len(lines) > 1)


def _lines(on: OnData, metric: str, lines: Mapping[str, Mapping[float, str]]) -> dict[str, dict[float, plots.Scores]]:
    made = {
        line: {x: _scores(on, metric, name) for x, name in by.items() if name in on.values[metric]}
        for line, by in lines.items()
    }
    return {line: by for line, by in made.items() if by}
