"""A metric is a number per test point and a reduction; resampling the points gives its bootstrap interval.

An interval tells what another test set of the same size would have changed. It says nothing about another seed or
another training set: for those, train again.

The reductions take how often each point occurs in each of R replicates, so that one sort or one matrix product
serves a whole block of replicates. That is why AUROC is written out here; the tests hold it to scikit-learn's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from bnn_pyro.errors import UserError
from bnn_pyro.predictive import Prediction

__all__ = ["Estimate", "Evaluation", "Metric", "Undefined", "auroc_of", "bootstrap", "in_order", "intervals", "mean_of",
           "resample", "targets"]  # fmt: skip

Targets = Tensor | np.ndarray | Sequence[float]
Reduction = Callable[[np.ndarray], np.ndarray]  # counts (R, B) -> (R,)

#: Entries of the largest array of one block of replicates (8 MB in float64).
BLOCK = 2**20


class Undefined(UserError):
    """The metric has no value on these data, such as an AUROC where the test set holds one class."""


class Estimate(NamedTuple):
    """A metric's value and its bootstrap interval."""

    value: float
    low: float
    high: float


class Evaluation(dict[str, Estimate]):
    """Metric name -> Estimate.

    notes       why a metric was left out, by its name
    replicates  {name: (R,)}, the value on each of R resampled test sets. Evaluations of equally many points resample
                the same ones, so that replicates of two predictions for the same points are pairs
    """

    def __init__(
        self,
        estimates: Mapping[str, Estimate],
        notes: Mapping[str, str],
        replicates: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        super().__init__(estimates)
        self.notes = dict(notes)
        self.replicates = dict(replicates or {})

    def flat(self) -> dict[str, float]:
        """{"nll": …, "nll_low": …, "nll_high": …, …}: what metrics.json holds."""
        ends = {"": "value", "_low": "low", "_high": "high"}
        return {name + end: getattr(e, which) for name, e in self.items() for end, which in ends.items()}


@dataclass(frozen=True)
class Metric:
    """One metric; call it with (prediction, y) for its value as a float.

    points       (prediction, checked y as a numpy array (B,)) -> (B, …) float64
    reduce       (points, counts (R, B)) -> (R,): the value in each replicate, NaN where it has none
    description  what it is, with its units and conventions, for tables
    better       "lower", "higher", or "nominal": the nearer to ``nominal`` the better
    biased       a sum of absolute values (the ECEs). Each replicate carries the sampling noise twice, so that its raw
                 percentile interval can lie wholly above the value: it is moved back by mean(replicates) − value
    """

    points: Callable[[Prediction, np.ndarray], np.ndarray]
    reduce: Callable[[np.ndarray, np.ndarray], np.ndarray]
    description: str
    better: Literal["lower", "higher", "nominal"] = "lower"
    nominal: float | None = field(default=None, kw_only=True)
    biased: bool = field(default=False, kw_only=True)

    def __call__(self, prediction: Prediction, y: Targets) -> float:
        """The value on all points. Raises UserError for a bad y, and (as Undefined) where there is no value."""
        points = self.summarise(prediction, y)
        return float(self.reduce(points, np.ones((1, len(points))))[0])

    def summarise(self, prediction: Prediction, y: Targets) -> np.ndarray:
        """The numbers per point, (B, …), all finite; the same errors as a call."""
        points = self.points(prediction, targets(prediction, y))
        finite = np.isfinite(points).reshape(len(points), -1).all(1)
        if not finite.all():
            row = int(np.argmin(finite))
            if np.isnan(points[row]).any():
                raise UserError(f"the prediction is NaN at row {row}; retrain with a smaller learning rate")
            raise Undefined(f"infinite at row {row}: {self.description}")
        return points


def targets(prediction: Prediction, y: Targets) -> np.ndarray:
    """Labels (int64) or target values (float64), (B,), checked against the prediction.

    Raises UserError: not numbers, not one per point, NaN or infinite, or a label that is none of 0 … K−1.
    """
    try:
        y = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"y must hold numbers, one per predicted point: {error}") from None
    if y.shape != (len(prediction),):
        raise UserError(
            f"y has shape {y.shape}, but the prediction is for {len(prediction)} points; pass one value each"
        )
    if len(y) == 0:
        raise UserError("there is nothing to score: the prediction has 0 points")
    if not np.isfinite(y).all():
        row = int(np.argmin(np.isfinite(y)))
        raise UserError(f"y is {y[row]} at row {row}; leave such rows out of prediction and y")
    if not prediction.has_classes:
        return y
    classes = prediction.mean.shape[1]
    bad = (y != np.floor(y)) | (y < 0) | (y >= classes)
    if bad.any():
        row = int(np.argmax(bad))
        raise UserError(f"label {y[row]:g} at row {row} is none of the classes 0 to {classes - 1} of this prediction")
    return y.astype(np.int64)


# -- reductions: (points, counts (R, B)) -> (R,) -----------------------------------------------------------------------
def mean_of(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean over the points of each replicate, (R,) or (R, …)."""
    return counts @ points / len(points)


def in_order(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """points (B, 2) = (key, value): the values of each replicate in ascending order of the key, (R, B).

    Points of equal keys share their mean value, which is what a random order among them would give on average: a
    saturated network has thousands of ties, and the file's order must not matter.
    """
    key, value = points.T
    order, starts = _ties(key)
    size = np.add.reduceat(counts[:, order], starts, axis=1)
    total = np.add.reduceat(counts[:, order] * value[order], starts, axis=1)
    shared = np.divide(total, size, out=np.zeros_like(total), where=size > 0)
    return np.repeat(shared.ravel(), size.ravel().astype(np.int64)).reshape(counts.shape)


def auroc_of(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """points (B, 2) = (score, 1 if positive): P(a positive scores above a negative), ties counting ½; (R,)."""
    score, positive = points.T
    order, starts = _ties(score)
    above = np.add.reduceat((counts * positive)[:, order], starts, axis=1)
    below = np.add.reduceat((counts * (1 - positive))[:, order], starts, axis=1)
    wins = (above * (np.cumsum(below, 1) - below / 2)).sum(1)
    pairs = above.sum(1) * below.sum(1)
    return np.divide(wins, pairs, out=np.full_like(wins, np.nan), where=pairs > 0)


def _ties(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ascending order of the keys, and where in it each group of equal keys begins."""
    order = np.argsort(key, kind="stable")
    return order, np.flatnonzero(np.r_[True, key[order][1:] != key[order][:-1]])


# -- bootstrap ---------------------------------------------------------------------------------------------------------
def bootstrap(
    reductions: Mapping[str, Reduction],
    sizes: Sequence[int],
    *,
    replicates: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
    biased: Collection[str] = (),
) -> dict[str, Estimate]:
    """Percentile intervals of several reductions from the same resampled points.

    sizes: how many points; more than one number where groups are resampled each by itself (inside and outside).
    biased: which reductions' intervals are moved by their bias, see :class:`Metric`.

    Raises UserError for fewer than 2 replicates or a confidence outside (0, 1).
    """
    samples = resample(reductions, sizes, replicates=replicates, seed=seed)
    return intervals(reductions, samples, sum(sizes), confidence=confidence, biased=biased)


def resample(
    reductions: Mapping[str, Reduction], sizes: Sequence[int], *, replicates: int = 1000, seed: int = 0
) -> dict[str, np.ndarray]:
    """{name: (R,)}: each reduction on R resamples of the points, NaN where it has no value; see :func:`bootstrap`."""
    if replicates < 2:
        raise UserError(f"a bootstrap interval needs at least 2 replicates, got {replicates}; 1000 is usual")
    samples: dict[str, list[np.ndarray]] = {name: [] for name in reductions}
    for counts in _resamples(sizes, replicates, np.random.default_rng(seed)):
        for name, reduce in reductions.items():
            samples[name].append(reduce(counts))
    return {name: np.concatenate(blocks) for name, blocks in samples.items()}


def intervals(
    reductions: Mapping[str, Reduction],
    samples: Mapping[str, np.ndarray],
    num: int,
    *,
    confidence: float = 0.95,
    biased: Collection[str] = (),
) -> dict[str, Estimate]:
    """Values on all ``num`` points, with percentile intervals of the replicates that :func:`resample` drew.

    Replicates in which a reduction is NaN (one class drawn) are left out of its interval.
    """
    if not 0 < confidence < 1:
        raise UserError(f"confidence must lie between 0 and 1, got {confidence}; 0.95 is usual")
    tail = (1 - confidence) / 2
    estimates = {}
    for name, reduce in reductions.items():
        value = float(reduce(np.ones((1, num)))[0])
        sample = samples[name][~np.isnan(samples[name])]
        if len(sample) == 0:
            raise UserError(f"'{name}' has no value in any of {len(samples[name])} replicates; ask for more replicates")
        low, high = np.quantile(sample, [tail, 1 - tail]) - (sample.mean() - value if name in biased else 0.0)
        estimates[name] = Estimate(value, float(low), float(high))
    return estimates


def _resamples(sizes: Sequence[int], replicates: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Blocks (R, Σ sizes) of how often each point was drawn, with replacement within its group."""
    rows = max(1, BLOCK // sum(sizes))
    for start in range(0, replicates, rows):
        count = min(rows, replicates - start)
        yield np.concatenate([_counts(count, size, rng) for size in sizes], axis=1)


def _counts(rows: int, size: int, rng: np.random.Generator) -> np.ndarray:
    drawn = rng.integers(size, size=(rows, size)) + size * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size).astype(np.float64)
