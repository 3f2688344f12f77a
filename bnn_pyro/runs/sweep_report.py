"""The report of a sweep, for a terminal and as one HTML page: every recipe's mean scores on every data set, and who is
worse than the best."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bnn_pyro.metrics import METRICS
from bnn_pyro.reports.page import Picture, sweep_html
from bnn_pyro.reports.ranking import CLEAR, SOURCES
from bnn_pyro.reports.tables import HEADLINE, SHARES, Cell, Row, plain_table
from bnn_pyro.runs.sweep_statistics import ALPHA, OPEN, WORSE, Comparison, DatasetSummary, Difference, Mean
from bnn_pyro.runs.sweep_tasks import FAILED, FINISHED, SEED_STEP

__all__ = ["error_sources", "summary_sentences", "sweep_page", "sweep_text"]

#: Characters of a line in a terminal, and how many failures are printed there.
WIDTH, MAX_FAILURES = 110, 10
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
    f"The seed of a fit is that of the sweep + {SEED_STEP} · split: splits begin with other weights, so that what a "
    "start does to the result is in the error over splits.",
    "A coverage or an interval width has no best: a coverage is good where it is near its nominal value, and a width "
    "where it is small with a coverage that is right.",
)


def sweep_text(results: Mapping[str, Any], summaries: Sequence[DatasetSummary]) -> str:
    """A table a data set with what its errors are over, and what failed."""
    parts = []
    for data in summaries:
        metrics = _headline(data)
        rows = [
            [name, *(_cell(data, metric, name) for metric in metrics), _fits(recipe), _seconds(recipe.seconds)]
            for name, recipe in data.recipes.items()
        ]
        parts.append(f"\n{data.name}\n{plain_table(['', *metrics, 'fits', 'seconds a fit'], rows)}")
        parts.append(textwrap.fill(error_sources(data), WIDTH))
    failed = [f"failed: {whose}: {error}" for whose, error in _failures(results)]
    more = [f"… and {len(failed) - MAX_FAILURES} more, in the report"] if len(failed) > MAX_FAILURES else []
    return "\n".join([*parts, *([""] if failed else []), *failed[:MAX_FAILURES], *more])


def sweep_page(results: Mapping[str, Any], summaries: Sequence[DatasetSummary], pictures: Sequence[Picture]) -> str:
    """sweep.html."""
    recipes = list(dict.fromkeys(fit["recipe"] for fit in results["fits"]))
    states = Counter(fit["status"] for fit in results["fits"])
    left = states.total() - states[FINISHED] - states[FAILED]
    counts = [f"{states[FINISHED]:,} of {_count(states.total(), 'fit')}"]
    counts += [f"{num:,} {what}" for num, what in ((states[FAILED], "failed"), (left, "not made yet")) if num]
    facts = {name: ", ".join(f"{k} {v}" for k, v in value.items() if v) if isinstance(value, Mapping) else str(value)
             for name, value in results["facts"].items() if value}  # fmt: skip
    return sweep_html(
        title=f"Sweep {results['name']}",
        subtitle=f"{_count(len(recipes), 'recipe')} · {_count(len(summaries), 'data set')} · {' · '.join(counts)}",
        summary=[text for data in summaries for text in summary_sentences(data)] or ["No fit is finished."],
        failures=_failures(results),
        overviews=list(_overviews(summaries, recipes)) if len(summaries) > 1 else [],
        sections=[_section(data) for data in summaries],
        figures=pictures,
        reading=READING,
        facts=list(facts.items()),
        spec=results["spec"],
    )


def _failures(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(whose, error): the fits of a recipe on a data set that failed alike are one entry."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for fit in results["fits"]:
        if fit["status"] == FAILED:
            groups.setdefault((fit["recipe"], fit["data"], fit["error"]), []).append(fit["name"])
    return [
        (names[0] if len(names) == 1 else f"{recipe} on {data}, {len(names)} fits", error)
        for (recipe, data, error), names in groups.items()
    ]


# -- sentences ---------------------------------------------------------------------------------------------------------
def error_sources(data: DatasetSummary) -> str:
    """What the ± is over, as a sentence."""
    each = f", each the mean of its {data.seeds} seeds" if data.seeds > 1 else ""
    if data.splits > 1 and data.share:
        factor = math.sqrt(1 + data.splits * data.share)
        return (
            f"± is the standard error of the mean over {data.splits} {data.kind} splits of the same rows{each}. "
            f"The splits overlap, so the variance is taken as var · (1/{data.splits} + n_test/n_train), with "
            f"n_test/n_train = {data.share:.2g} (Nadeau & Bengio 2003); a plain sd/√{data.splits} would be "
            f"{factor:.2g} times smaller, too small. Every split has other test rows: the error includes theirs."
        )
    if data.splits > 1:
        return (
            f"± is the standard error of the mean over {data.splits} divisions into training and validation "
            f"rows{each}. The test rows are the same in each: what others would change is added, by a bootstrap."
        )
    if data.seeds > 1:
        return (
            f"± is the standard error of the mean over {data.seeds} seeds on one split: what another start would "
            "change and, by a bootstrap, other test rows. It says nothing of other training rows: add splits."
        )
    if not data.task:
        return "No fit is finished."
    return "One fit each: there is no standard error, and nothing can be told apart. More seeds or splits would tell."


def summary_sentences(data: DatasetSummary) -> list[str]:
    """Who is best on a data set and who is worse, a sentence for each headline metric."""
    return [f"{data.name}, {metric}: {_sentence(data, metric, data.comparisons[metric])}" for metric in _headline(data)]


def _sentence(data: DatasetSummary, metric: str, comparison: Comparison) -> str:
    best = f"{comparison.best} has the best mean, {_number(data.recipes[comparison.best].metrics[metric], metric)}"
    others = {kind: [n for n in comparison.differences if comparison.verdict(n) == kind] for kind in (OPEN, WORSE)}
    varied = [word for word, num in (("seeds", data.seeds), ("splits", data.splits)) if num > 1]
    sources = f"variation over {' and '.join(varied)} and the finite number of test rows"
    if not comparison.differences:
        return f"{best}."
    if not others[OPEN]:
        rest = "all others are" if len(others[WORSE]) > 1 else f"{others[WORSE][0]} is"
        return f"{best}, and {rest} worse by more than {sources} explain."
    if not varied:
        return f"{best}; one fit each shows no clear difference."
    if not others[WORSE]:
        return f"{best}; no other differs clearly from it, given {sources}."
    worse = f"worse by more than {sources} explain: {', '.join(others[WORSE])}"
    return f"{best}; no clear difference: {', '.join(others[OPEN])}; {worse}."


# -- tables ------------------------------------------------------------------------------------------------------------
def _headline(data: DatasetSummary) -> list[str]:
    return [metric for metric in HEADLINE.get(data.task, ()) if metric in data.values]


def _overviews(summaries: Sequence[DatasetSummary], recipes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A table for each headline metric: recipes by data sets, and on how many a recipe is worse than the best."""
    for place in (1, 0):
        shown = [(data, HEADLINE[data.task][place]) for data in summaries if data.task]
        shown = [(data, metric) for data, metric in shown if metric in data.values]
        metrics = list(dict.fromkeys(metric for _, metric in shown))
        rows = []
        for recipe in recipes:
            verdicts = [data.verdict(metric, recipe) for data, metric in shown]
            compared = len(verdicts) - verdicts.count("")
            count = Cell(f"{verdicts.count(WORSE)} of {compared}" if compared else "–")
            rows.append(Row(recipe, "", [*(_cell(data, metric, recipe) for data, metric in shown), count]))
        columns = [f"{data.name}: {metric}" if len(metrics) > 1 else data.name for data, metric in shown]
        if shown:
            yield {"title": " or ".join(metrics), "columns": [*columns, "worse on"], "rows": rows}


def _section(data: DatasetSummary) -> dict[str, Any]:
    """What the page says of one data set."""
    rows = [
        Row(name, _fits(recipe) + (f", {recipe.failed} failed" if recipe.failed else ""),
            [*(_cell(data, metric, name) for metric in data.values), Cell(_seconds(recipe.seconds))])
        for name, recipe in data.recipes.items()
    ]  # fmt: skip
    pairs = [
        {
            "title": f"{metric}: differences to {comparison.best}",
            "rows": [
                [name, _number(d, metric, "+"), str(d.pairs), "–" if math.isnan(d.p) else f"{d.p:.2g}",
                 comparison.verdict(name)]
                for name, d in comparison.differences.items()
            ],
        }
        for metric, comparison in ((metric, data.comparisons[metric]) for metric in _headline(data))
        if comparison.differences
    ]  # fmt: skip
    rows_text = f"{data.rows[0]:,.0f} training rows · {data.rows[1]:,.0f} test rows"
    return {
        "name": data.name,
        "under": (f"{data.task.capitalize()} · {rows_text} · " if data.task else "")
        + f"{_count(data.splits, 'split')} · {_count(data.seeds, 'seed')}",
        "over": error_sources(data),
        "columns": [*(metric.replace("_", " ") for metric in data.values), "seconds a fit"],
        "metrics": [(metric.replace("_", " "), METRICS[data.task][metric].description) for metric in data.values],
        "rows": rows,
        "pairs": pairs,
    }


def _cell(data: DatasetSummary, metric: str, recipe: str) -> Cell | None:
    """Mean ± standard error, and how the recipe compares with the best."""
    if recipe not in data.values[metric]:
        return None
    value, _, error = _number(data.recipes[recipe].metrics[metric], metric).partition(" ± ")
    return Cell(value, f"± {error}" if error else "", data.verdict(metric, recipe))


def _number(mean: Mean | Difference, metric: str, sign: str = "") -> str:
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


def _fits(recipe: Any) -> str:
    planned = _count(recipe.planned, "fit")
    return planned if recipe.finished == recipe.planned else f"{recipe.finished} of {planned}"


def _count(num: int, what: str) -> str:
    return f"{num:,} {what}{'' if num == 1 else 's'}"
