"""Means over splits and seeds with their standard errors, and which recipe predicts better than which, in pairs.

Means are over splits, after a mean over the seeds of each, which share its rows; on one split, over its seeds. Where
splits have test rows of their own, they vary by these too; where all fits have the same, the variance over test rows,
from bootstrap replicates, is added. Splits made at random of the same rows overlap: with n_test and n_train rows the
variance of a mean over J of them is var · (1/J + n_test/n_train) (Nadeau & Bengio 2003, Inference for the
generalization error, Machine Learning 52:239-281, section 3).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from bnn_pyro.diagnostics.verdicts import jsonable
from bnn_pyro.metrics import METRICS
from bnn_pyro.reports.tables import HEADLINE, NOT_CLEAR
from bnn_pyro.runs.sweep_config import FAILED, FINISHED

#: {a fit's name: {metric: (R,), its value on R resamples of the test rows}}.
Replicates = Mapping[str, Mapping[str, np.ndarray]]
#: The chance that the recipe that is best in truth is called worse than the one with the best mean.
ALPHA = 0.05
#: A difference is clear from so many of its standard errors on.
CLEAR = 2.0
#: How a recipe compares with the best.
BEST, OPEN, WORSE = "best", NOT_CLEAR, "worse"
#: Splits whose test rows, or groups, are drawn at random from all, so that they overlap.
RESAMPLED = ("random", "given", "groups")


class Mean(NamedTuple):
    """A mean, and its standard error, NaN where there is one unit alone.

    units  how many splits, or seeds on one split, the error is over      fits  how many values, or pairs, there were
    p      of paired differences: P(T ≥ |value| / error) of Student's t, one-sided, see :func:`paired`
    """

    value: float
    error: float
    units: int
    fits: int
    p: float = math.nan


@dataclass(frozen=True)
class MetricSummary:
    """One metric on one data set.

    values       a row a (split, seed), a column a recipe      means     {recipe: its mean}
    differences  {recipe: its paired difference to the best}   verdicts  {recipe: BEST, WORSE or OPEN}, if compared
    best         the recipe with the best mean; "" where the metric has no better and worse
    """

    values: pd.DataFrame
    means: Mapping[str, Mean]
    best: str = ""
    differences: Mapping[str, Mean] = field(default_factory=dict)
    verdicts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetSummary:
    """All fits on one data set.

    states    {recipe: how many of its fits have which status}
    task      "" where no fit is finished        rows   (training, test) rows of a split, mean over the fits
    splits, seeds  how many the finished fits have
    kind      how its splits are made, as ``divide`` names it
    share     n_test/n_train where splits overlap, else 0: see :func:`mean_of`
    seconds   {recipe: of training, a fit}       metrics  {metric: its summary}, of those that any fit has
    """

    name: str
    states: Mapping[str, Counter[str]]
    task: str = ""
    rows: tuple[float, float] = (0, 0)
    splits: int = 0
    seeds: int = 0
    kind: str = ""
    share: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, MetricSummary] = field(default_factory=dict)

    #: Those of the metrics that a summary speaks of.
    headline = property(lambda self: {n: self.metrics[n] for n in HEADLINE.get(self.task, ()) if n in self.metrics})

    @property
    def error_sources(self) -> str:
        """What the ± is over, as a sentence."""
        if not self.task:
            return "No fit is finished."
        if self.splits == self.seeds == 1:
            return "One fit each: there is no standard error, and nothing can be told apart. Add seeds or splits."
        each = f", each the mean of its {self.seeds} seeds" if self.seeds > 1 else ""
        over = f"{self.splits} divisions into training and validation rows{each}"
        rows = "The test rows are the same in each: what others would change is added, by a bootstrap."
        if self.splits == 1:
            over = f"{self.seeds} seeds on one split"
            rows += " It says nothing of other training rows: add splits."
        elif self.share:
            over = f"{self.splits} {self.kind.removesuffix('s')} splits of the same rows{each}"
            rows = (f"The splits overlap, so the variance is taken as var · (1/{self.splits} + n_test/n_train), with "
                    f"n_test/n_train = {self.share:.2g} (Nadeau & Bengio 2003). It includes the error of their test "
                    "rows.")  # fmt: skip
        return f"± is the standard error of the mean over {over}. {rows}"

    def to_dict(self) -> dict[str, Any]:
        """For sweep.json; what is not a number is None."""
        recipes = {
            name: {"finished": states[FINISHED], "failed": states[FAILED], "asked": states.total(),
                   "seconds": {"value": self.seconds.get(name)},
                   "metrics": {k: jsonable(m.means[name]._asdict())
                               for k, m in self.metrics.items() if name in m.means}}
            for name, states in self.states.items()
        }  # fmt: skip
        best = {
            metric: {"recipe": m.best, "differences": {name: jsonable(mean._asdict()) | {"verdict": m.verdicts[name]}
                                                       for name, mean in m.differences.items()}}
            for metric, m in self.metrics.items() if m.best
        }  # fmt: skip
        numbers = {"splits": self.splits, "seeds": self.seeds, "n_test/n_train": self.share}
        about = {"data": self.name, "task": self.task, **numbers, "error_over": self.error_sources}
        return about | {"recipes": recipes, "best": best}


def mean_of(values: pd.Series, share: float = 0.0, rows: float = 0.0) -> Mean:
    """The mean over splits (or, on one split, over seeds) of values with the index (split, seed).

    share: n_test/n_train of random splits of the same rows; 0 where the test rows are the same in all.
    rows: the variance of the mean over other test rows where they are the same in all, else 0; NaN where it is unknown.
    """
    units = values.groupby(level=0).mean()
    if len(units) < 2:
        units, share = values, 0.0
    error = np.sqrt(units.var() * (1 / len(units) + share) + rows)
    return Mean(float(units.mean()), float(error), len(units), len(values))


def paired(mine: pd.Series, other: pd.Series, share: float = 0.0, rows: float = 0.0) -> Mean:
    """mine − other where both have a value: what the rows of a split do to both of them cancels.

    share, rows: as for :func:`mean_of`. The variance over test rows is taken as known, so that the sum has
    (units − 1) / r² degrees of freedom, r the other part's share of it (Welch & Satterthwaite).
    """
    if not (mean := mean_of((mine - other).dropna(), share, rows)).error > 0:
        return mean
    spread = max(1 - rows / mean.error**2, 0.0)
    freedom = (mean.units - 1) / spread**2 if spread else math.inf
    return mean._replace(p=float(stats.t.sf(abs(mean.value) / mean.error, freedom)))


def worse_than_best(differences: Mapping[str, Mean], *, lower: bool) -> set[str]:
    """Who is worse, of the differences to the one with the best mean.

    Of R recipes, one is worse where the one-sided p is below ALPHA / (R − 1) and, as in `compare`, the difference is no
    less than CLEAR standard errors. The best in truth is then called worse with a chance of at most ALPHA: choosing
    whom to compare with needs no other correction (Hsu 1984, Annals of Statistics 12:1136-1144, by Bonferroni's bound).
    """
    bound = ALPHA / max(len(differences), 1)
    return {name for name, d in differences.items()
            if d.p < bound and abs(d.value) >= CLEAR * d.error and (d.value > 0) == lower}  # fmt: skip


def summarise(fits: Sequence[Mapping[str, Any]], replicates: Replicates) -> list[DatasetSummary]:
    """fits: what sweep.json says of each, see ``SweepFolder.outcome``; data sets and recipes in their order there.

    replicates: for the error over test rows that all fits share; unknown where one of them has none.
    """
    names = dict.fromkeys(fit["data"] for fit in fits)
    return [_summarise(name, [fit for fit in fits if fit["data"] == name], replicates) for name in names]


def _summarise(name: str, fits: Sequence[Mapping[str, Any]], replicates: Replicates) -> DatasetSummary:
    states: dict[str, Counter[str]] = {}
    for fit in fits:
        states.setdefault(fit["recipe"], Counter()).update([fit["status"]])
    if (done := pd.DataFrame([fit for fit in fits if fit["status"] == FINISHED])).empty:
        return DatasetSummary(name, states)
    task, kind, splits = done["task"].iloc[0], done["split_kind"].iloc[0], done["split"].nunique()
    train, test = pd.DataFrame(list(done["rows"])).mean()[["train", "test"]]
    share = test / train if kind in RESAMPLED and splits > 1 and train else 0.0
    done = done.set_index(["split", "seed", "recipe"])
    scores, names = pd.DataFrame(list(done["metrics"]), done.index), done["name"].unstack()

    def over_rows(metric: str, values: pd.DataFrame) -> float:
        """The variance over test rows of a recipe's mean, or of a paired difference; 0 where each split has its own."""
        units = values.dropna().index
        if kind in RESAMPLED and units.get_level_values(0).nunique() > 1:
            return 0.0
        try:
            means = [np.mean([replicates[fit][metric] for fit in names.loc[units, recipe]], 0) for recipe in values]
        except KeyError:
            return math.nan
        return float(np.nanvar(means[0] - means[1] if len(means) > 1 else means[0], ddof=1))

    metrics = {}
    for metric in (metric for metric in METRICS[task] if metric in scores):
        values = scores[metric].dropna().unstack()
        values = values[[recipe for recipe in states if recipe in values]]
        means = {r: mean_of(values[r].dropna(), share, over_rows(metric, values[[r]])) for r in values}
        metrics[metric] = MetricSummary(values, means)
        better = METRICS[task][metric].better
        if better == "nominal" or metric.startswith("width"):  # narrower is better only where coverage is right
            continue
        # The best is one of those with the most fits: one that failed on the hard splits would look better than it is.
        most = max(mean.fits for mean in means.values())
        whole = {recipe: mean.value for recipe, mean in means.items() if mean.fits == most}
        best = (min if better == "lower" else max)(whole, key=whole.__getitem__)
        differences = {
            recipe: paired(values[recipe], values[best], share, over_rows(metric, values[[recipe, best]]))
            for recipe in values
            if recipe != best and len(values[[recipe, best]].dropna())
        }
        worse = worse_than_best(differences, lower=better == "lower")
        verdicts = {best: BEST} if differences else {}
        verdicts |= {recipe: WORSE if recipe in worse else OPEN for recipe in differences}
        metrics[metric] = MetricSummary(values, means, best, differences, verdicts)
    seconds = done["seconds"].groupby("recipe").mean().to_dict()
    seeds = done.index.get_level_values("seed").nunique()
    return DatasetSummary(name, states, task, (train, test), splits, seeds, kind, share, seconds, metrics)
