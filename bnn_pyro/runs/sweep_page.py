"""What a sweep found, for a terminal and as one HTML page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from bnn_pyro.metrics import METRICS
from bnn_pyro.reports.ranking import CLEAR, SOURCES
from bnn_pyro.reports.page import Picture, sweep_html
from bnn_pyro.runs.sweep_folder import FAILED, FINISHED
from bnn_pyro.runs.sweep_plan import STRIDE
from bnn_pyro.runs.sweep_statistics import ALPHA, Difference, Mean
from bnn_pyro.runs.sweep_summary import OPEN, WORSE, Contest, OnData
from bnn_pyro.reports.tables import HEADLINE, SHARES, Cell, plain_table
from bnn_pyro.reports.tables import Row as TableRow

__all__ = ["failures_of", "sweep_page", "sweep_sentences", "sweep_text", "told"]

#: Characters of a line in a terminal, and how many failures are told there.
WIDTH, MOST = 110, 10
READING = (
    f"{SOURCES} The standard errors here include both; `compare` has one fit each, so only that of the test rows.",
    "The best is the recipe with the best mean among those with the most fits. Another is called worse where the mean "
    "of its paired differences to the best, over the same splits and seeds, is at least "
    f"{CLEAR:.0f} of its standard errors, and a one-sided t-test rejects equality at {ALPHA:.2f} / (number of others). "
    f"The recipe that is best in truth is so called worse in at most {ALPHA:.0%} of such tables, for each metric "
    "(comparisons with the best, Hsu 1984; variances of overlapping splits by Nadeau & Bengio 2003).",
    "“No clear difference” is not “equal”: with few seeds, splits or test rows only large differences are clear.",
    "There is no mean rank over data sets: it would weigh a difference that is chance as much as a large one, and "
    "change with the other recipes in the sweep. The overview counts only clear differences.",
    f"The seed of a fit is that of the SPEC + {STRIDE} · split: splits begin with other weights, so that what a start "
    "does to the result is in the error over splits.",
    "A coverage or an interval width has no best: a coverage is good where it is near its nominal value, and a width "
    "where it is small with a coverage that is right.",
)


def failures_of(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, error) of the fits that failed."""
    return [(fit["name"], fit["error"]) for fit in results["fits"] if fit["status"] == FAILED]


def _grouped(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(whose, error): the fits of a recipe on a data set that failed alike are told once."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for fit in results["fits"]:
        if fit["status"] == FAILED:
            groups.setdefault((fit["recipe"], fit["data"], fit["error"]), []).append(fit["name"])
    return [
        (names[0] if len(names) == 1 else f"{recipe} on {data}, {len(names)} fits", error)
        for (recipe, data, error), names in groups.items()
    ]


# -- terminal ----------------------------------------------------------------------------------------------------------
def sweep_text(results: Mapping[str, Any], found: Sequence[OnData]) -> str:
    """A table a data set, sentences on the best, and what failed."""
    parts = []
    for on in found:
        metrics = [metric for metric in HEADLINE.get(on.task, ()) if metric in on.values]
        rows = [
            [
                row.recipe,
                *(_spoken_cell(on, metric, row.recipe) for metric in metrics),
                _fits(row.finished, row.asked),
                _seconds(row.seconds),
            ]
            for row in on.recipes
        ]
        parts.append(f"\n{on.name}\n{plain_table(['', *metrics, 'fits', 'seconds a fit'], rows)}")
        parts.append(textwrap.fill(on.over, WIDTH))
    failed = [f"failed: {whose}: {error}" for whose, error in _grouped(results)]
    more = [f"… and {len(failed) - MOST} more, in the report"] if len(failed) > MOST else []
    return "\n".join([*parts, *([""] if failed else []), *failed[:MOST], *more])


def _spoken_cell(on: OnData, metric: str, recipe: str) -> str | None:
    cell = _cell(on, metric, recipe)
    return None if cell is None else str(cell)


# -- HTML --------------------------------------------------------------------------------------------------------------
def sweep_page(results: Mapping[str, Any], found: Sequence[OnData], pictures: Sequence[Picture]) -> str:
    """sweep.html."""
    fits = results["fits"]
    states = {state: sum(fit["status"] == state for fit in fits) for state in dict.fromkeys(f["status"] for f in fits)}
    recipes = list(dict.fromkeys(fit["recipe"] for fit in fits))
    done, failed = states.pop(FINISHED, 0), states.pop(FAILED, 0)
    counts = [f"{done:,} of {len(fits):,} fits", *([f"{failed:,} failed"] if failed else [])]
    open_fits = sum(states.values())
    counts += [f"{open_fits:,} not made yet"] if open_fits else []
    return sweep_html(
        title=f"Sweep {results['name']}",
        subtitle=f"{_count(len(recipes), 'recipe')} · {_count(len(found), 'data set')} · {' · '.join(counts)}",
        summary=[sentence for on in found for sentence in sweep_sentences(on)] or ["No fit is finished."],
        failures=_grouped(results),
        overviews=_overviews(found, recipes) if len(found) > 1 else [],
        sections=[_section(on) for on in found],
        figures=pictures,
        reading=READING,
        facts=[(name, _fact(value)) for name, value in results["facts"].items() if value],
        spec=results["spec"],
    )


def sweep_sentences(on: OnData) -> list[str]:
    """What is told of a data set, a sentence for each headline metric."""
    return [
        f"{on.name}, {metric}: {_sentence(on, metric, on.contests[metric])}"
        for metric in HEADLINE.get(on.task, ())
        if metric in on.contests
    ]


def _sentence(on: OnData, metric: str, contest: Contest) -> str:
    mean = next(row.metrics[metric] for row in on.recipes if row.recipe == contest.best)
    said = f"{contest.best} has the best mean, {told(mean, metric)}"
    if not contest.differences:
        return f"{said}."
    by = {kind: [name for name in contest.differences if contest.verdict(name) == kind] for kind in (OPEN, WORSE)}
    if not by[OPEN]:
        others = "all others are" if len(by[WORSE]) > 1 else f"{by[WORSE][0]} is"
        return f"{said}, and {others} worse by more than {on.sources} explain."
    if on.splits * on.seeds == 1:
        return f"{said}; one fit each shows no clear difference."
    if not by[WORSE]:
        return f"{said}; no other differs clearly from it, given {on.sources}."
    return (
        f"{said}; no clear difference: {', '.join(by[OPEN])}; worse by more than {on.sources} explain: "
        f"{', '.join(by[WORSE])}."
    )


def _overviews(found: Sequence[OnData], recipes: Sequence[str]) -> list[dict[str, Any]]:
    """A table for each headline metric: recipes by data sets, and on how many a recipe is worse than the best."""
    tables = []
    for place in (1, 0):
        metrics = {on.name: HEADLINE[on.task][place] for on in found if on.task}
        shown = [on for on in found if metrics.get(on.name) in on.values]
        if not shown:
            continue
        rows = []
        for recipe in recipes:
            cells = [_cell(on, metrics[on.name], recipe) for on in shown]
            verdicts = [on.contests[metrics[on.name]].verdict(recipe) for on in shown]
            judged = sum(verdict != "" for verdict in verdicts)
            count = f"{verdicts.count(WORSE)} of {judged}" if judged else "–"
            rows.append(TableRow(recipe, "", [*cells, Cell(count)]))
        names = list(dict.fromkeys(metrics[on.name] for on in shown))
        columns = [f"{on.name}: {metrics[on.name]}" if len(names) > 1 else on.name for on in shown]
        tables.append({"title": " or ".join(names), "columns": [*columns, "worse on"], "rows": rows})
    return tables


def _section(on: OnData) -> dict[str, Any]:
    """What the page says of one data set."""
    metrics = [metric for metric in METRICS.get(on.task, {}) if metric in on.values]
    rows = [
        TableRow(
            row.recipe,
            _fits(row.finished, row.asked) + (f", {row.failed} failed" if row.failed else ""),
            [*(_cell(on, metric, row.recipe) for metric in metrics), Cell(_seconds(row.seconds))],
        )
        for row in on.recipes
    ]
    pairs = [
        {
            "title": f"{metric}: differences to {contest.best}",
            "rows": [
                [
                    name,
                    told(d, metric, "+"),
                    str(d.pairs),
                    "–" if math.isnan(d.p) else f"{d.p:.2g}",
                    contest.verdict(name),
                ]
                for name, d in contest.differences.items()
            ],
        }
        for metric in HEADLINE.get(on.task, ())
        if (contest := on.contests.get(metric)) is not None and contest.differences
    ]
    train, test = on.rows
    what = f"{on.task.capitalize()} · {train:,.0f} training rows · {test:,.0f} test rows · " if on.task else ""
    return {
        "name": on.name,
        "under": f"{what}{_count(on.splits, 'split')} · {_count(on.seeds, 'seed')}",
        "over": on.over if on.task else "No fit is finished.",
        "columns": [*(metric.replace("_", " ") for metric in metrics), "seconds a fit"],
        "metrics": [(metric.replace("_", " "), METRICS[on.task][metric].description) for metric in metrics],
        "rows": rows,
        "pairs": pairs,
    }


# -- cells -------------------------------------------------------------------------------------------------------------
def _cell(on: OnData, metric: str, recipe: str) -> Cell | None:
    """Mean ± standard error, and where the recipe stands."""
    mean = next((row.metrics.get(metric) for row in on.recipes if row.recipe == recipe), None)
    if mean is None:
        return None
    contest = on.contests.get(metric)
    value, _, error = told(mean, metric).partition(" ± ")
    return Cell(value, f"± {error}" if error else "", "" if contest is None else contest.verdict(recipe))


def told(mean: Mean | Difference, metric: str, sign: str = "") -> str:
    """ "0.532 ± 0.021": to two digits of the error, or four without one; shares in per cent."""
    unit, word = (100, f" {'pp' if sign else '%'}") if metric in SHARES else (1, "")
    value, error = unit * mean.value, unit * mean.error
    if not error > 0 or not math.isfinite(error):
        return f"{value:{sign}.4g}{word}" + (" ± 0" if error == 0 else "")
    digits = max(0, 1 - math.floor(math.log10(error)))
    if digits > 8:
        return f"{value:{sign}.4g}{word} ± {error:.1g}"
    return f"{value:{sign},.{digits}f}{word} ± {error:,.{digits}f}"


def _seconds(mean: Mean) -> str:
    return "–" if math.isnan(mean.value) else f"{mean.value:.3g}" if mean.value < 1000 else f"{mean.value:,.0f}"


def _fits(finished: int, asked: int) -> str:
    return f"{_count(asked, 'fit')}" if finished == asked else f"{finished} of {_count(asked, 'fit')}"


def _fact(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items() if v) if isinstance(value, Mapping) else str(value)


def _count(num: int, what: str) -> str:
    return f"{num:,} {what}{'' if num == 1 else 's'}"
