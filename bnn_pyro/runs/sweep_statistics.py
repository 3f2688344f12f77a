"""Means over splits and seeds with their standard errors, and which recipe predicts better than which, in pairs.

What is averaged over are splits where there are several, after a mean over the seeds of each: seeds on one split share
its rows, and count as one. On one split it is its seeds.

The standard error has two sources: the seeds and splits of the fits, and the finite number of test rows. Splits that
each have test rows of their own vary by both. Where all fits have the same test rows, their variation is of seeds (and
of training rows) alone, and the variance over test rows, from bootstrap replicates, is added to it.

Splits made at random of the same rows overlap, so that sd/√J is too small an error of their mean over J splits. With
n_test and n_train rows the variance is taken as var · (1/J + n_test/n_train) instead (Nadeau & Bengio 2003, Inference
for the generalization error, Machine Learning 52:239-281, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from bnn_pyro.metrics import METRICS
from bnn_pyro.reports.ranking import CLEAR
from bnn_pyro.reports.tables import NOT_CLEAR
from bnn_pyro.runs.sweep_tasks import FAILED, FINISHED

__all__ = ["ALPHA", "BEST", "OPEN", "WORSE", "Comparison", "DatasetSummary", "Difference", "Mean", "RecipeSummary",
           "mean_of", "paired", "summarise", "worse_than_best"]  # fmt: skip

#: A metric's value by (split, seed).
Values = Mapping[tuple[int, int], float]
#: {a fit's name: {metric: (R,), its value on R resamples of the test rows}}.
Replicates = Mapping[str, Mapping[str, np.ndarray]]
#: The chance that the recipe that is best in truth is called worse than the one with the best mean.
ALPHA = 0.05
#: How a recipe compares with the best.
BEST, OPEN, WORSE = "best", NOT_CLEAR, "worse"
#: Splits whose test rows are drawn at random from all rows, so that they overlap.
RESAMPLED = ("random", "given")


class Mean(NamedTuple):
    """A mean, and its standard error, NaN where there is one unit alone.

    units  how many splits, or seeds on one split, the error is over      fits  how many values there were
    """

    value: float
    error: float
    units: int
    fits: int


class Difference(NamedTuple):
    """The mean of paired differences, its standard error, the number of pairs, and of units that they are of.

    p  P(T ≥ |value| / error) of Student's t, one-sided, see :func:`paired`; NaN where there is no error
    """

    value: float
    error: float
    pairs: int
    units: int
    p: float


@dataclass(frozen=True)
class RecipeSummary:
    """One recipe on one data set.

    finished, failed, planned  numbers of fits     seconds  of training, a fit     metrics  {metric: its mean}
    """

    finished: int
    failed: int
    planned: int
    seconds: Mean
    metrics: Mapping[str, Mean]


@dataclass(frozen=True)
class Comparison:
    """One metric on one data set: who has the best mean, and the paired differences of the others to it."""

    best: str
    differences: Mapping[str, Difference]
    worse: frozenset[str]

    def verdict(self, recipe: str) -> str:
        """BEST, WORSE or OPEN; "" for one that was not compared."""
        if recipe == self.best:
            return BEST if self.differences else ""
        return "" if recipe not in self.differences else WORSE if recipe in self.worse else OPEN


@dataclass(frozen=True)
class DatasetSummary:
    """All fits on one data set.

    task      "" where no fit is finished        rows   (training, test) rows of a split, mean over the fits
    splits, seeds  how many the finished fits have
    kind      how its splits are made: random, given, own test part
    values    {metric: {recipe: {(split, seed): value}}}
    recipes   {name: its means}
    comparisons  of the metrics that have a better and a worse
    """

    name: str
    task: str
    rows: tuple[float, float]
    splits: int
    seeds: int
    kind: str
    values: Mapping[str, Mapping[str, Values]]
    recipes: Mapping[str, RecipeSummary]
    comparisons: Mapping[str, Comparison]

    @property
    def share(self) -> float:
        """n_test/n_train where splits overlap, else 0: see :func:`mean_of`."""
        return _share(self.kind, self.splits, self.rows)

    def verdict(self, metric: str, recipe: str) -> str:
        """How a recipe compares with the best; "" where the metric has no best."""
        return self.comparisons[metric].verdict(recipe) if metric in self.comparisons else ""

    def to_dict(self) -> dict[str, Any]:
        """For sweep.json; what is not a number is None."""
        recipes = {
            name: {"finished": one.finished, "failed": one.failed, "asked": one.planned,
                   "seconds": _jsonable(one.seconds), "metrics": {k: _jsonable(v) for k, v in one.metrics.items()}}
            for name, one in self.recipes.items()
        }  # fmt: skip
        best = {
            metric: {
                "recipe": comparison.best,
                "differences": {
                    name: _jsonable(d) | {"verdict": comparison.verdict(name)}
                    for name, d in comparison.differences.items()
                },
            }
            for metric, comparison in self.comparisons.items()
        }
        numbers = {"splits": self.splits, "seeds": self.seeds, "n_test/n_train": self.share}
        return {"data": self.name, "task": self.task, **numbers, "recipes": recipes, "best": best}


def mean_of(values: Values, share: float = 0.0, rows: float = 0.0) -> Mean:
    """The mean over splits (or, on one split, over seeds).

    share: n_test/n_train of random splits of the same rows; 0 where the test rows are the same in all.
    rows: the variance of the mean over other test rows where they are the same in all, else 0; NaN where it is unknown.
    """
    splits = sorted({split for split, _ in values})
    if len(splits) > 1:
        units = np.array([np.mean([v for (s, _), v in values.items() if s == split]) for split in splits])
        factor = 1 / len(units) + share
    else:
        units = np.array(list(values.values()))
        factor = 1 / max(len(units), 1)
    if not len(units):
        return Mean(math.nan, math.nan, 0, 0)
    error = math.sqrt(units.var(ddof=1) * factor + rows) if len(units) > 1 else math.nan
    return Mean(float(units.mean()), error, len(units), len(values))


def paired(mine: Values, other: Values, share: float = 0.0, rows: float = 0.0) -> Difference:
    """mine − other where both have a value: what the rows of a split do to both of them cancels.

    share, rows: as for :func:`mean_of`. The variance over test rows is taken as known, so that the sum has
    (units − 1) / r² degrees of freedom, r the other part's share of it (Welch & Satterthwaite).
    """
    mean = mean_of({unit: value - other[unit] for unit, value in mine.items() if unit in other}, share, rows)
    if not mean.error > 0:
        return Difference(mean.value, mean.error, mean.fits, mean.units, math.nan)
    spread = max(1 - rows / mean.error**2, 0.0)
    freedom = (mean.units - 1) / spread**2 if spread else math.inf
    p = float(stats.t.sf(abs(mean.value) / mean.error, freedom))
    return Difference(mean.value, mean.error, mean.fits, mean.units, p)


def worse_than_best(differences: Mapping[str, Difference], *, lower: bool) -> set[str]:
    """Who is worse, of the differences to the one with the best mean.

    Of R recipes, one is worse where the one-sided p is below ALPHA / (R − 1) and, as in `compare`, the difference is no
    less than CLEAR standard errors. The best in truth is then called worse with a chance of at most ALPHA: choosing
    whom to compare with needs no other correction (comparisons with the best, Hsu 1984, Annals of Statistics
    12:1136-1144, with Bonferroni's bound).
    """
    bound = ALPHA / max(len(differences), 1)
    return {
        name
        for name, d in differences.items()
        if d.p < bound and abs(d.value) >= CLEAR * d.error and (d.value > 0) == lower
    }


def summarise(fits: Sequence[Mapping[str, Any]], replicates: Replicates | None = None) -> list[DatasetSummary]:
    """fits: what sweep.json says of each, see ``SweepFolder.outcome``; data sets and recipes in their order there.

    replicates: for the error over test rows that all fits share. A fit that an earlier version scored has none: the
    error is then that of unpaired fits, from their intervals, which is too large.
    """
    names = dict.fromkeys(fit["data"] for fit in fits)
    return [_summarise(name, [fit for fit in fits if fit["data"] == name], replicates or {}) for name in names]


def _summarise(name: str, fits: Sequence[Mapping[str, Any]], replicates: Replicates) -> DatasetSummary:
    finished = {(fit["recipe"], (fit["split"], fit["seed"])): fit for fit in fits if fit["status"] == FINISHED}
    recipes = list(dict.fromkeys(fit["recipe"] for fit in fits))
    first = next(iter(finished.values()), {"task": "", "split_kind": ""})
    task, kind = first["task"], first["split_kind"]
    splits, seeds = ({unit[part] for _, unit in finished} for part in (0, 1))
    train, test = (sum(fit["rows"][part] for fit in finished.values()) / max(len(finished), 1)
                   for part in ("train", "test"))  # fmt: skip
    share = _share(kind, len(splits), (train, test))

    def by_unit(read: Any) -> dict[str, dict[tuple[int, int], float]]:
        """{recipe: {(split, seed): what is read of its fit}}; without None."""
        table = {r: {u: v for (own, u), fit in finished.items() if own == r and (v := read(fit)) is not None}
                 for r in recipes}  # fmt: skip
        return {recipe: values for recipe, values in table.items() if values}

    def over_rows(metric: str, names: Sequence[str]) -> float:
        """The variance over test rows of a recipe's mean, or of the paired difference of two; 0 where splits have test
        rows of their own."""
        units = [u for u in values[metric][names[0]] if all(u in values[metric][name] for name in names)]
        if kind in RESAMPLED and len({split for split, _ in units}) > 1:
            return 0.0
        groups = [[finished[name, unit] for unit in units] for name in names]
        drawn = [[replicates.get(fit["name"], {}).get(metric) for fit in group] for group in groups]
        shapes = {None if r is None else r.shape for group in drawn for r in group}
        if None in shapes or len(shapes) > 1:
            return sum(float(np.mean([_interval_error(fit, metric) for fit in group])) ** 2 for group in groups)
        means = [np.mean(group, axis=0) for group in drawn]
        return float(np.nanvar(means[0] - means[1] if len(names) > 1 else means[0], ddof=1))

    values = {
        metric: by_unit(lambda fit, metric=metric: fit["metrics"].get(metric)) for metric in METRICS.get(task, {})
    }
    values = {metric: by for metric, by in values.items() if by}
    seconds = by_unit(lambda fit: fit["seconds"])
    states = [(fit["recipe"], fit["status"]) for fit in fits]
    table = {
        recipe: RecipeSummary(
            states.count((recipe, FINISHED)),
            states.count((recipe, FAILED)),
            sum(own == recipe for own, _ in states),
            mean_of(seconds.get(recipe, {})),
            {m: mean_of(by[recipe], share, over_rows(m, [recipe])) for m, by in values.items() if recipe in by},
        )
        for recipe in recipes
    }
    comparisons = {}
    for metric, by in values.items():
        better = METRICS[task][metric].better
        if better == "nominal" or metric.startswith("width"):  # narrower is better only where coverage is right
            continue
        # The best is one of those with the most fits: one that failed on the hard splits would look better than it is.
        most = max(map(len, by.values()))
        whole = {r: table[r].metrics[metric].value for r, of_recipe in by.items() if len(of_recipe) == most}
        best = (min if better == "lower" else max)(whole, key=whole.__getitem__)
        differences = {
            recipe: paired(of_recipe, by[best], share, over_rows(metric, [recipe, best]))
            for recipe, of_recipe in by.items()
            if recipe != best and of_recipe.keys() & by[best].keys()
        }
        comparisons[metric] = Comparison(
            best, differences, frozenset(worse_than_best(differences, lower=better == "lower"))
        )
    return DatasetSummary(name, task, (train, test), len(splits), len(seeds), kind, values, table, comparisons)


def _share(kind: str, splits: int, rows: tuple[float, float]) -> float:
    return rows[1] / rows[0] if kind in RESAMPLED and splits > 1 and rows[0] else 0.0


def _interval_error(fit: Mapping[str, Any], metric: str) -> float:
    """The standard error of one fit over test rows, from its 95 % interval; NaN where it has none."""
    low, high = (fit["metrics"].get(f"{metric}_{end}", math.nan) for end in ("low", "high"))
    return (high - low) / (2 * 1.96)


def _jsonable(numbers: Mean | Difference) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in numbers._asdict().items()}
