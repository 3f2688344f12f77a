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
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import stats

from bnn_pyro.reports.ranking import CLEAR

__all__ = ["ALPHA", "Difference", "Mean", "Values", "mean_of", "paired", "worse_than_best"]

#: A metric's value by (split, seed).
Values = Mapping[tuple[int, int], float]
#: The chance that the best recipe in truth is told to be worse than the one that looks best.
ALPHA = 0.05


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
    found = mean_of({unit: value - other[unit] for unit, value in mine.items() if unit in other}, share, rows)
    if not found.error > 0:
        return Difference(found.value, found.error, found.fits, found.units, math.nan)
    spread = max(1 - rows / found.error**2, 0.0)
    freedom = (found.units - 1) / spread**2 if spread else math.inf
    p = float(stats.t.sf(abs(found.value) / found.error, freedom))
    return Difference(found.value, found.error, found.fits, found.units, p)


def worse_than_best(differences: Mapping[str, Difference], *, lower: bool) -> set[str]:
    """Who is told to be worse, of the differences to the one with the best mean.

    Of R recipes, one is worse where the one-sided p is below ALPHA / (R − 1) and, as in `compare`, the difference is no
    less than CLEAR standard errors. The best in truth is then told to be
    worse than any other with a chance of at most ALPHA: choosing whom to compare with needs no other correction
    (comparisons with the best, Hsu 1984, Annals of Statistics 12:1136-1144, with Bonferroni's bound).
    """
    bound = ALPHA / max(len(differences), 1)
    return {
        name
        for name, d in differences.items()
        if d.p < bound and abs(d.value) >= CLEAR * d.error and (d.value > 0) == lower
    }
