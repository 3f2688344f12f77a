"""What the fits of a sweep say together: means with errors on each data set, the best, and what is told from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnn_pyro.metrics import METRICS
from bnn_pyro.runs.sweep_folder import FAILED, FINISHED
from bnn_pyro.runs.sweep_statistics import Difference, Mean, Values, mean_of, paired, worse_than_best
from bnn_pyro.reports.tables import NOT_CLEAR

__all__ = ["BEST", "OPEN", "WORSE", "Contest", "OnData", "Row", "summarise"]

#: What is said of a recipe beside the best.
BEST, OPEN, WORSE = "best", NOT_CLEAR, "worse"
#: Splits whose test rows are drawn at random from all rows, so that they overlap.
RESAMPLED = ("random", "given")
#: Half a 95 % interval in standard errors.
HALF = 1.96
#: {a fit's name: {metric: (R,), its value on R resamples of the test rows}}.
Replicates = Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Row:
    """One recipe on one data set.

    finished, failed, asked  numbers of fits     seconds  of training, a fit     metrics  {metric: its mean}
    """

    recipe: str
    finished: int
    failed: int
    asked: int
    seconds: Mean
    metrics: Mapping[str, Mean]


@dataclass(frozen=True)
class Contest:
    """One metric on one data set: who has the best mean, and the differences of the others to it, in pairs."""

    best: str
    differences: Mapping[str, Difference]
    worse: frozenset[str]

    def verdict(self, recipe: str) -> str:
        """BEST, WORSE or OPEN; "" for one that was not compared."""
        if recipe == self.best:
            return BEST if self.differences else ""
        return "" if recipe not in self.differences else WORSE if recipe in self.worse else OPEN


@dataclass(frozen=True)
class OnData:
    """Everything about one data set.

    task      "" where no fit is finished        rows   (training, test) rows of a split, mean over the fits
    splits, seeds  how many the finished fits have
    kind      how its splits are made: random, given, own test part
    values    {metric: {recipe: {(split, seed): value}}}
    contests  of the metrics that have a better and a worse
    """

    name: str
    task: str
    rows: tuple[float, float]
    splits: int
    seeds: int
    kind: str
    values: Mapping[str, Mapping[str, Values]]
    recipes: Sequence[Row]
    contests: Mapping[str, Contest]

    @property
    def share(self) -> float:
        """n_test/n_train where splits overlap, else 0: see :func:`statistics.mean_of`."""
        return self.rows[1] / self.rows[0] if self.kind in RESAMPLED and self.splits > 1 and self.rows[0] else 0.0

    @property
    def over(self) -> str:
        """What the ± is over, as a sentence."""
        each = f", each the mean of its {self.seeds} seeds" if self.seeds > 1 else ""
        if self.splits > 1 and self.share:
            plain = math.sqrt(1 + self.splits * self.share)
            return (
                f"± is the standard error of the mean over {self.splits} {self.kind} splits of the same rows{each}. "
                f"The splits overlap, so the variance is taken as var · (1/{self.splits} + n_test/n_train), with "
                f"n_test/n_train = {self.share:.2g} (Nadeau & Bengio 2003); a plain sd/√{self.splits} would be "
                f"{plain:.2g} times smaller, too small. Every split has other test rows: the error includes theirs."
            )
        if self.splits > 1:
            return (
                f"± is the standard error of the mean over {self.splits} divisions into training and validation "
                f"rows{each}. The test rows are the same in each: what others would change is added, by a bootstrap."
            )
        if self.seeds > 1:
            return (
                f"± is the standard error of the mean over {self.seeds} seeds on one split: what another start would "
                "change and, by a bootstrap, other test rows. It says nothing of other training rows: add splits."
            )
        return (
            "One fit each: there is no standard error, and nothing can be told apart. More seeds or splits would tell."
        )

    @property
    def sources(self) -> str:
        """What the standard errors include."""
        what = [word for word, num in (("seeds", self.seeds), ("splits", self.splits)) if num > 1]
        return f"variation over {' and '.join(what)} and the finite number of test rows"

    def to_dict(self) -> dict[str, Any]:
        """For sweep.json; what is not a number is None."""
        return {
            "data": self.name,
            "task": self.task,
            "splits": self.splits,
            "seeds": self.seeds,
            "n_test/n_train": _plain(self.share),
            "error_over": self.over,
            "recipes": {
                row.recipe: {
                    "finished": row.finished,
                    "failed": row.failed,
                    "asked": row.asked,
                    "seconds": _table(row.seconds),
                    "metrics": {name: _table(mean) for name, mean in row.metrics.items()},
                }
                for row in self.recipes
            },
            "best": {
                metric: {
                    "recipe": contest.best,
                    "differences": {
                        name: _table(d) | {"verdict": contest.verdict(name)} for name, d in contest.differences.items()
                    },
                }
                for metric, contest in self.contests.items()
            },
        }


def summarise(fits: Sequence[Mapping[str, Any]], replicates: Replicates | None = None) -> list[OnData]:
    """fits: what sweep.json says of each, see ``SweepFolder.outcome``; data sets and recipes in their order there.

    replicates: for the error over test rows that all fits share. A fit that an earlier version scored has none: the
    error is then that of unpaired fits, from their intervals, which is too large.
    """
    names = dict.fromkeys(fit["data"] for fit in fits)
    return [_on_data(name, [fit for fit in fits if fit["data"] == name], replicates or {}) for name in names]


def _on_data(name: str, fits: Sequence[Mapping[str, Any]], replicates: Replicates) -> OnData:
    finished = [fit for fit in fits if fit["status"] == FINISHED]
    task = finished[0]["task"] if finished else ""
    rows = [fit["rows"] for fit in finished]
    mean_rows = tuple(sum(r[part] for r in rows) / max(len(rows), 1) for part in ("train", "test"))
    splits = len({fit["split"] for fit in finished})
    recipes = list(dict.fromkeys(fit["recipe"] for fit in fits))
    values = {
        metric: found
        for metric in METRICS.get(task, {})
        if (found := {r: v for r in recipes if (v := _values(finished, r, metric))})
    }
    kind = finished[0]["split_kind"] if finished else ""
    empty = OnData(name, task, mean_rows, splits, len({f["seed"] for f in finished}), kind, values, [], {})
    rows_of = _TestRows(finished, replicates, kind in RESAMPLED)
    table = [
        Row(
            recipe,
            sum(fit["recipe"] == recipe for fit in finished),
            sum(fit["recipe"] == recipe and fit["status"] == FAILED for fit in fits),
            sum(fit["recipe"] == recipe for fit in fits),
            mean_of({(f["split"], f["seed"]): f["seconds"] for f in finished if f["recipe"] == recipe}),
            {
                metric: mean_of(by[recipe], empty.share, rows_of.variance(metric, by, recipe))
                for metric, by in values.items()
                if recipe in by
            },
        )
        for recipe in recipes
    ]
    contests = {
        metric: _contest(metric, by, METRICS[task][metric].better == "lower", empty.share, rows_of)
        for metric, by in values.items()
        if _ranked(task, metric)
    }
    return OnData(**{**vars(empty), "recipes": table, "contests": contests})


def _values(fits: Sequence[Mapping[str, Any]], recipe: str, metric: str) -> dict[tuple[int, int], float]:
    return {
        (fit["split"], fit["seed"]): fit["metrics"][metric]
        for fit in fits
        if fit["recipe"] == recipe and metric in fit["metrics"]
    }


def _ranked(task: str, metric: str) -> bool:
    """Whether less or more of it is better; narrower intervals are better only where coverage is right."""
    return METRICS[task][metric].better != "nominal" and not metric.startswith("width")


class _TestRows:
    """The finished fits of one data set, for the variance of their means over other test rows."""

    def __init__(self, finished: Sequence[Mapping[str, Any]], replicates: Replicates, resampled: bool) -> None:
        self.fits = {(fit["recipe"], (fit["split"], fit["seed"])): fit for fit in finished}
        self.replicates, self.resampled = replicates, resampled

    def variance(self, metric: str, by: Mapping[str, Values], recipe: str, other: str = "") -> float:
        """Of a recipe's mean, or of the difference of two in pairs; 0 where splits have test rows of their own."""
        names = [recipe, other] if other else [recipe]
        units = [unit for unit in by[recipe] if all(unit in by[name] for name in names)]
        if self.resampled and len({split for split, _ in units}) > 1:
            return 0.0
        fits = [[self.fits[name, unit] for unit in units] for name in names]
        held = [self.replicates.get(fit["name"], {}).get(metric) for group in fits for fit in group]
        if any(r is None or r.shape != held[0].shape for r in held):
            return sum(float(np.mean([_interval_error(fit, metric) for fit in group])) ** 2 for group in fits)
        means = [np.mean(held[k * len(units) : (k + 1) * len(units)], axis=0) for k in range(len(names))]
        return float(np.nanvar(means[0] - means[1] if other else means[0], ddof=1))


def _interval_error(fit: Mapping[str, Any], metric: str) -> float:
    """The standard error of one fit over test rows, from its interval; NaN where it has none."""
    low, high = (fit["metrics"].get(f"{metric}_{end}", math.nan) for end in ("low", "high"))
    return (high - low) / (2 * HALF)


def _contest(metric: str, by: Mapping[str, Values], lower: bool, share: float, rows_of: _TestRows) -> Contest:
    """The best is one of those with the most fits: one that failed on the hard splits would look better than it is."""
    most = max(map(len, by.values()))
    whole = {recipe: mean_of(values).value for recipe, values in by.items() if len(values) == most}
    best = (min if lower else max)(whole, key=whole.__getitem__)
    differences = {
        recipe: paired(values, by[best], share, rows_of.variance(metric, by, recipe, best))
        for recipe, values in by.items()
        if recipe != best and values.keys() & by[best].keys()
    }
    return Contest(best, differences, frozenset(worse_than_best(differences, lower=lower)))


def _table(numbers: Mean | Difference) -> dict[str, float | None]:
    return {name: _plain(value) for name, value in numbers._asdict().items()}


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value
