"""The report of a sweep, for a terminal and as one HTML page with figures: every recipe's mean scores on every data
set, who is worse than the best, and what a setting of the grid does."""

import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bnn_pyro import plots
from bnn_pyro.metrics import METRICS
from bnn_pyro.plots.style import MARKERS
from bnn_pyro.plots.sweep import LABELS
from bnn_pyro.reports.page import Picture, render
from bnn_pyro.reports.ranking import CLEAR, SOURCES
from bnn_pyro.reports.tables import HEADLINE, SHARES, Cell, Row, plain_table
from bnn_pyro.runs.folder import OutputFolder
from bnn_pyro.runs.sweep_config import FAILED, FINISHED, SEED_STEP, RunTask, setting_text
from bnn_pyro.runs.sweep_statistics import ALPHA, OPEN, WORSE, DatasetSummary, Mean, MetricSummary

#: Characters of a line in a terminal, and how many failures are printed there.
WIDTH, MAX_FAILURES = 110, 10
#: A number, or a text with one number in it.
NUMERIC = re.compile(r"(?:([a-z-]+):)?(-?\d+\.?\d*(?:e[+-]?\d+)?)")


def sweep_text(results: Mapping[str, Any], summaries: Sequence[DatasetSummary]) -> str:
    """A table a data set with what its errors are over, and what failed."""
    parts = []
    for data in summaries:
        rows = [[row.name, *row.cells, row.description] for row in _rows(data, data.headline)]
        parts.append(f"\n{data.name}\n{plain_table(['', *data.headline, 'seconds a fit', 'fits'], rows)}")
        parts.append(textwrap.fill(data.error_sources, WIDTH))
    failed = [f"failed: {fit['name']}: {fit['error']}" for fit in results["fits"] if fit["status"] == FAILED]
    more = [f"… and {len(failed) - MAX_FAILURES} more, in the report"] if len(failed) > MAX_FAILURES else []
    return "\n".join([*parts, *([""] if failed else []), *failed[:MAX_FAILURES], *more])


def write_report(
    folder: OutputFolder, tasks: Sequence[RunTask], results: Mapping[str, Any], summaries: Sequence[DatasetSummary]
) -> None:
    """sweep.html and its figures; results: what sweep.json holds."""
    figures = [*_metric_figures(summaries), *_setting_figures(summaries, tasks)]
    folder.write_figures(figures)
    states = Counter(fit["status"] for fit in results["fits"])
    recipes = list(dict.fromkeys(fit["recipe"] for fit in results["fits"]))
    counts = [_count(len(recipes), "recipe"), _count(len(summaries), "data set"), _fits(states)]
    page = render(
        "sweep.html.j2",
        title=f"Sweep {results['name']}",
        subtitle=" · ".join(counts),
        failures=[(fit["name"], fit["error"]) for fit in results["fits"] if fit["status"] == FAILED],
        overviews=list(_overviews(summaries, recipes)) if len(summaries) > 1 else [],
        sections=[(data, _rows(data, data.metrics)) for data in summaries],
        figures=figures,
        results=results,
        limits={"alpha": ALPHA, "clear": CLEAR, "seed_step": SEED_STEP, "sources": SOURCES},
        metrics=METRICS,
        count=_count,
        number=_number,
        sentences=summary_sentences,
    )
    folder.write(folder.page, page)


def summary_sentences(data: DatasetSummary) -> dict[str, str]:
    """{headline metric: who is best on a data set, who is worse, and of whom that is not clear}."""
    varied = [word for word, num in (("seeds", data.seeds), ("splits", data.splits)) if num > 1]
    sources = f"variation over {' and '.join(varied)} and the finite number of test rows" if varied else "one fit each"
    sentences = {}
    for metric, found in data.headline.items():
        verdicts = {name: found.verdict(name) for name in found.differences}
        groups = [(kind, [name for name, verdict in verdicts.items() if verdict == kind]) for kind in (WORSE, OPEN)]
        parts = [f"; {kind}: {', '.join(names)}" for kind, names in groups if names]
        best = f"{found.best} has the best mean, {_number(found.means[found.best], metric)}"
        sentences[metric] = f"{best}{''.join(parts)}{f' (given {sources})' if parts else ''}."
    return sentences


# -- tables ------------------------------------------------------------------------------------------------------------
def _overviews(summaries: Sequence[DatasetSummary], recipes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A table for each headline metric: recipes by data sets, and on how many a recipe is worse than the best."""
    for metric in dict.fromkeys(metric for data in summaries for metric in data.headline):
        shown = {data.name: data.headline[metric] for data in summaries if metric in data.headline}
        rows = []
        for recipe in recipes:
            verdicts = [found.verdict(recipe) for found in shown.values() if found.verdict(recipe)]
            count = Cell(f"{verdicts.count(WORSE)} of {len(verdicts)}" if verdicts else "–")
            rows.append(Row(recipe, "", [*(_cell(found, metric, recipe) for found in shown.values()), count]))
        yield {"title": metric, "columns": [*shown, "worse on"], "rows": rows}


def _rows(data: DatasetSummary, metrics: Mapping[str, MetricSummary]) -> list[Row]:
    """A row a recipe on one data set: how many fits, these metrics, and the seconds of a fit."""
    return [
        Row(name, _fits(states), [*(_cell(m, k, name) for k, m in metrics.items()), _seconds(data.seconds[name])])
        for name, states in data.states.items()
    ]


def _cell(found: MetricSummary, metric: str, recipe: str) -> Cell | None:
    """Mean ± standard error, and how the recipe compares with the best."""
    if recipe not in found.means:
        return None
    value, _, error = _number(found.means[recipe], metric).partition(" ± ")
    return Cell(value, f"± {error}" if error else "", found.verdict(recipe))


def _number(mean: Mean, metric: str, sign: str = "") -> str:
    """ "0.532 ± 0.021": to two digits of the error, or four without one; shares in per cent."""
    unit, word = _unit(metric), f" {'pp' if sign else '%'}" if metric in SHARES else ""
    value, error = unit * mean.value, unit * mean.error
    if not error > 0 or not math.isfinite(error):
        return f"{value:{sign}.4g}{word}" + (" ± 0" if error == 0 else "")
    digits = max(0, 1 - math.floor(math.log10(error)))
    if digits > 8:
        return f"{value:{sign}.4g}{word} ± {error:.1g}"
    return f"{value:{sign},.{digits}f}{word} ± {error:,.{digits}f}"


def _seconds(mean: Mean) -> Cell | None:
    return None if math.isnan(mean.value) else Cell(f"{mean.value:.3g}" if mean.value < 1000 else f"{mean.value:,.0f}")


def _fits(states: Counter[str]) -> str:
    """ "4 of 6 fits · 2 failed"."""
    planned, failed = _count(states.total(), "fit"), f" · {states[FAILED]:,} failed" if states[FAILED] else ""
    return (planned if states[FINISHED] == states.total() else f"{states[FINISHED]:,} of {planned}") + failed


def _count(num: int, what: str) -> str:
    return f"{num:,} {what}{'' if num == 1 else 's'}"


# -- figures -----------------------------------------------------------------------------------------------------------
def _metric_figures(summaries: Sequence[DatasetSummary]) -> Iterator[Picture]:
    """A figure a metric: every recipe's score on every data set."""
    for metric, label in LABELS.items():
        having = {data.name: data.metrics[metric] for data in summaries if metric in data.metrics}
        scores = {name: {r: _scores(found, metric, r) for r in found.means} for name, found in having.items()}
        if scores:
            nominal = 95.0 if metric == "coverage_95" else None
            sentence = "Every mark is a fit; above it the mean of its recipe ± the standard error that the table names."
            axes, name = plots.sweep_points(scores, label, nominal=nominal), f"sweep-{metric.replace('_', '-')}"
            yield Picture.of(name, axes, f"{label.partition(',')[0]} by recipe", sentence, wide=len(scores) > 1)


def _setting_figures(summaries: Sequence[DatasetSummary], tasks: Sequence[RunTask]) -> Iterator[Picture]:
    """Two figures for each numeric setting: what it does to the headline metrics."""
    headline = dict.fromkeys(metric for data in summaries for metric in HEADLINE.get(data.task, ()))
    for (key, kind), lines in numeric_settings(tasks).items():
        for metric in headline:
            drawn: dict[str, dict[str, dict[float, plots.Scores]]] = {}
            for data, (line, by) in itertools.product(summaries, list(lines.items())[: len(MARKERS)]):
                found = data.metrics.get(metric, MetricSummary({}, {}))
                if scores := {x: _scores(found, metric, name) for x, name in by.items() if name in found.means}:
                    drawn.setdefault(data.name, {})[line] = scores
            if drawn:
                across = key.replace("_", " ") + (f" ({kind}:…)" if kind else "")
                sentence = (
                    "Means ± standard errors; neighbours share their splits, so that their differences are surer."
                )
                if len(lines) > len(MARKERS):
                    sentence += f" {len(lines) - len(MARKERS)} more lines are in the tables."
                name = f"sweep-{metric}-by-{key}{'-' + kind if kind else ''}".replace("_", "-")
                title = f"{LABELS[metric].partition(',')[0]} by {across}"
                axes = plots.sweep_settings(drawn, across, LABELS[metric])
                yield Picture.of(name, axes, title, sentence, wide=len(drawn) > 1)


def numeric_settings(tasks: Sequence[RunTask]) -> dict[tuple[str, str], dict[str, dict[float, str]]]:
    """{(setting, kind): {line: {number: name of the recipe}}} of settings with two numbers or more on some line.

    kind: of a text with one number in it, such as "fan-in:3", what is before the colon; else "".
    A line is a table of the file and a combination of its other settings.
    """
    lines: dict[tuple[str, str], dict[str, dict[float, str]]] = {}
    for task in {task.recipe_name: task for task in tasks}.values():
        for key, value in task.grid.items():
            if match := NUMERIC.fullmatch(setting_text(value)):
                others = [f"{k}={setting_text(v)}" for k, v in task.grid.items() if k != key]
                by_line = lines.setdefault((key, match[1] or ""), {})
                by_line.setdefault(" ".join([task.table, *others]), {})[float(match[2])] = task.recipe_name
    return {which: by for which, by in lines.items() if max(map(len, by.values())) > 1}


def _scores(found: MetricSummary, metric: str, recipe: str) -> plots.Scores:
    unit, mean = _unit(metric), found.means[recipe]
    points = [unit * value for value in found.values[recipe].values()]
    return plots.Scores(points, unit * mean.value, unit * mean.error, found.verdict(recipe))


def _unit(metric: str) -> float:
    return 100.0 if metric in SHARES else 1.0
