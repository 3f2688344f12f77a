"""Means over splits and seeds with their standard errors, and paired comparisons of recipes.

The fits with different seeds on one split are averaged first; the mean is over splits, or over seeds if there is one
split. If all splits have the same test rows, the variance over test rows, estimated by bootstrap, is added. Random
splits of the same rows overlap: with n_test and n_train rows, the variance of the mean over J splits is
var · (1/J + n_test/n_train) (Nadeau & Bengio 2003, Inference for the generalization error, Machine Learning 52:239-281,
section 3).
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

#: {name of a fit: {metric: (R,) values on R bootstrap resamples of the test rows}}.
Replicates = Mapping[str, Mapping[str, np.ndarray]]
#: The largest probability that the truly best recipe is called worse than the one with the best mean.
ALPHA = 0.05
#: A clear difference has at least this many standard errors.
CLEAR = 2.0
#: Verdicts on a recipe, compared with the best mean.
BEST, OPEN, WORSE = "best", NOT_CLEAR, "worse"
#: Kinds of splits whose test rows, or groups, are drawn at random, so that splits overlap.
RESAMPLED = ("random", "given", "groups")


class Mean(NamedTuple):
    """A mean and its standard error, which is NaN for a single unit.

    units  number of splits (or of seeds, on one split)    fits  number of values or pairs
    p      for paired differences: one-sided P(T ≥ |value| / error) of Student's t; see :func:`paired`
    """

    value: float
    error: float
    units: int
    fits: int
    p: float = math.nan


@dataclass(frozen=True)
class MetricSummary:
    """One metric on one data set.

    values       one row per (split, seed), one column per recipe    means     {recipe: its mean}
    differences  {recipe: its paired difference to the best one}     verdicts  {recipe: BEST, WORSE or OPEN}
    best         the recipe with the best mean; "" if neither higher nor lower values of the metric are better
    """

    values: pd.DataFrame
    means: Mapping[str, Mean]
    best: str = ""
    differences: Mapping[str, Mean] = field(default_factory=dict)
    verdicts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetSummary:
    """All fits on one data set.

    states    {recipe: number of its fits in each state}
    task      "" if no fit is finished           rows   mean numbers of (training, test) rows of the fits
    splits, seeds  numbers of splits and seeds of the finished fits
    kind      how splits are made, as in the record of ``divide``
    share     n_test/n_train if splits overlap, else 0; see :func:`mean_of`
    seconds   {recipe: mean training time}       metrics  {metric: its summary}, for metrics that any fit has
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

    #: The metrics that sentences of a summary name.
    headline = property(lambda self: {n: self.metrics[n] for n in HEADLINE.get(self.task, ()) if n in self.metrics})

    @property
    def error_sources(self) -> str:
        """A sentence that explains the ±."""
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
        """Return the entry for sweep.json, with None instead of NaN."""
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
    """Return the mean over splits (or, on one split, over seeds) of values with the index (split, seed).

    share: n_test/n_train for random splits of the same rows; 0 if all have the same test rows.
    rows: the variance of the mean over test rows if all splits have the same (NaN if unknown), else 0.
    """
    units = values.groupby(level=0).mean()
    if len(units) < 2:
        units, share = values, 0.0
    error = np.sqrt(units.var() * (1 / len(units) + share) + rows)
    return Mean(float(units.mean()), float(error), len(units), len(values))


def paired(mine: pd.Series, other: pd.Series, share: float = 0.0, rows: float = 0.0) -> Mean:
    """Return the mean of mine − other over the fits that both have: effects of the rows on both of them cancel.

    share, rows: see :func:`mean_of`. The variance over test rows is taken as known, so that the total variance has
    (units − 1) / r² degrees of freedom, where r is the share of the other variance (Welch & Satterthwaite).
    """
    if not (mean := mean_of((mine - other).dropna(), share, rows)).error > 0:
        return mean
    spread = max(1 - rows / mean.error**2, 0.0)
    freedom = (mean.units - 1) / spread**2 if spread else math.inf
    return mean._replace(p=float(stats.t.sf(abs(mean.value) / mean.error, freedom)))


def worse_than_best(differences: Mapping[str, Mean], *, lower: bool) -> set[str]:
    """Return the recipes that are worse, by their differences to the one with the best mean.

    Of R recipes, one is worse if its one-sided p is below ALPHA / (R − 1) and, as in `compare`, its difference is at
    least CLEAR standard errors. The truly best recipe is then called worse with probability at most ALPHA; that the
    best mean is chosen from the data needs no further correction (Hsu 1984, Annals of Statistics 12:1136-1144, by
    Bonferroni's bound).
    """
    bound = ALPHA / max(len(differences), 1)
    return {name for name, d in differences.items()
            if d.p < bound and abs(d.value) >= CLEAR * d.error and (d.value > 0) == lower}  # fmt: skip


def summarise(fits: Sequence[Mapping[str, Any]], replicates: Replicates) -> list[DatasetSummary]:
    """Summarise the entries of sweep.json by data set.   replicates: of the fits, for errors over shared test rows."""
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
        """Return the variance over test rows of a mean or of a paired difference; 0 if each split has its own rows."""
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
        # The best recipe is among those with the most fits: one that failed on hard splits looks better than it is.
        most = max(mean.fits for mean in means.values())
        complete = {recipe: mean.value for recipe, mean in means.items() if mean.fits == most}
        best = (min if better == "lower" else max)(complete, key=complete.__getitem__)
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
