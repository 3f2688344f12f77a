"""The report of a sweep, as text and as an HTML page: the mean scores of the recipes, and which recipes are worse."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from bnn_pyro import plots
from bnn_pyro.metrics import METRICS
from bnn_pyro.reports import read_texts
from bnn_pyro.reports.page import Picture, render
from bnn_pyro.reports.tables import SHARES, WIDTH, Section, as_text
from bnn_pyro.runs.folder import OutputFolder
from bnn_pyro.runs.sweep_config import FAILED, FINISHED, SEED_STEP
from bnn_pyro.runs.sweep_statistics import ALPHA, CLEAR, OPEN, WORSE, DatasetSummary, Mean, MetricSummary


def sweep_text(results: Mapping[str, Any], summaries: Sequence[DatasetSummary], form: str = "text") -> str:
    """Return a table per data set with what its errors are over, and fits with a problem.   form: see ``as_text``."""
    tables = [(data, as_text(_table(data, data.headline), form)) for data in summaries]
    parts = [f"\n{data.name}\n{table}\n{textwrap.fill(data.error_sources, WIDTH)}" for data, table in tables]
    doubtful = [f"Problem (but counted): {f['name']}: {f['problem']}" for f in results["fits"] if f.get("problem")]
    failed = [f"failed: {fit['name']}: {fit['error']}" for fit in results["fits"] if fit["status"] == FAILED]
    return "\n".join([*parts, "", *doubtful, *failed])


def write_report(folder: OutputFolder, results: Mapping[str, Any], summaries: Sequence[DatasetSummary]) -> None:
    """Write sweep.html and its figures.   results: the content of sweep.json."""
    figures = []
    for metric, label in read_texts("figures")["scores"].items():
        by_data = {data.name: data.metrics[metric] for data in summaries if metric in data.metrics}
        scores = {name: {r: _scores(summary, metric, r) for r in summary.means} for name, summary in by_data.items()}
        if scores:
            sentence = "Every mark is a fit; above it the mean of its recipe ± the standard error that the table names."
            name, title = f"sweep-{metric.replace('_', '-')}", f"{label.partition(',')[0]} by recipe"
            draw = partial(plots.sweep_points, scores, label, nominal=95.0 if metric == "coverage_95" else None)
            figures.append(Picture.of(name, draw, title, sentence, wide=len(scores) > 1))
    folder.write_figures(figures)
    states = Counter(fit["status"] for fit in results["fits"])
    recipes = list(dict.fromkeys(fit["recipe"] for fit in results["fits"]))
    page = render(
        "sweep.html.j2",
        title=f"Sweep {results['name']}",
        subtitle=f"recipes: {len(recipes)} · data sets: {len(summaries)} · {_fits(states)}",
        failures=[(fit["name"], fit["error"]) for fit in results["fits"] if fit["status"] == FAILED],
        overviews=list(_overviews(summaries)) if len(summaries) > 1 else [],
        sections=[(data, _table(data, data.metrics)) for data in summaries],
        figures=figures,
        results=results,
        limits={"alpha": ALPHA, "clear": CLEAR, "seed_step": SEED_STEP},
        sources=read_texts("statistics")["rankings"]["sources"],
        metrics=METRICS,
        number=_number,
        sentences=summary_sentences,
    )
    folder.write(folder.page, page)


def summary_sentences(data: DatasetSummary) -> dict[str, str]:
    """Return {headline metric: a sentence on which recipe is best, and which are worse or not clearly worse}."""
    varied = [name for name, num in (("seeds", data.seeds), ("splits", data.splits)) if num > 1]
    sources = f"variation over {' and '.join(varied)} and the finite number of test rows" if varied else "one fit each"
    sentences = {}
    for metric, summary in data.headline.items():
        groups = {kind: [r for r, verdict in summary.verdicts.items() if verdict == kind] for kind in (WORSE, OPEN)}
        parts = [f"; {kind}: {', '.join(names)}" for kind, names in groups.items() if names]
        mean = _number(summary.means[summary.best], metric)
        alone = len(summary.means) == 1
        best = f"the mean of {summary.best} is {mean}" if alone else f"{summary.best} has the best mean, {mean}"
        sentences[metric] = f"{best}{''.join(parts)}{f' (given {sources})' if parts else ''}."
    return sentences


def _overviews(summaries: Sequence[DatasetSummary]) -> Iterator[Section]:
    """Yield a table per headline metric: recipes by data sets, and on how many of them a recipe is worse."""
    for metric in dict.fromkeys(metric for data in summaries for metric in data.headline):
        by_data = {data.name: data.headline[metric] for data in summaries if metric in data.headline}
        table = pd.DataFrame({name: _cells(summary, metric) for name, summary in by_data.items()})
        verdicts = pd.DataFrame({name: summary.verdicts for name, summary in by_data.items()}).reindex(table.index)
        worse = (verdicts == WORSE).sum(axis=1).astype(str) + " of " + verdicts.notna().sum(axis=1).astype(str)
        yield Section(metric, "", table.assign(**{"worse on": worse}) if len(table) > 1 else table)


def _table(data: DatasetSummary, metrics: Mapping[str, MetricSummary]) -> pd.DataFrame:
    columns = {name: _cells(summary, name) for name, summary in metrics.items()}
    columns["seconds a fit"] = {name: f"{seconds:,.3g}" for name, seconds in data.seconds.items()}
    columns["fits"] = {name: _fits(states) for name, states in data.states.items()}
    return pd.DataFrame(columns, list(data.states))


def _cells(summary: MetricSummary, metric: str) -> dict[str, str]:
    return {r: f"{_number(mean, metric)} {summary.verdicts.get(r, '')}".strip() for r, mean in summary.means.items()}


def _number(mean: Mean, metric: str, sign: str = "") -> str:
    """Return "0.532 ± 0.021", with two digits of the error, which may be missing; shares are in per cent."""
    unit, suffix = (100.0, " pp" if sign else " %") if metric in SHARES else (1.0, "")
    value, error = unit * mean.value, unit * mean.error
    if not (math.isfinite(error) and error > 0 and math.isfinite(value)):
        return f"{value:{sign}.4g}{suffix}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:{sign},.{digits}f}{suffix} ± {error:,.{digits}f}"


def _fits(states: Counter[str]) -> str:
    """Return "6 fits", or if some are missing "4 of 6 fits · 2 failed"."""
    failed = f" · {states[FAILED]:,} failed" if states[FAILED] else ""
    finished = f"{states[FINISHED]:,} of " if states[FINISHED] < states.total() else ""
    return f"{finished}{states.total():,} fit{'s' if states.total() > 1 else ''}{failed}"


def _scores(summary: MetricSummary, metric: str, recipe: str) -> plots.Scores:
    unit, mean = 100.0 if metric in SHARES else 1.0, summary.means[recipe]
    points = (unit * summary.values[recipe].dropna()).tolist()
    return plots.Scores(points, unit * mean.value, unit * mean.error, summary.verdicts.get(recipe, ""))
