"""A metric consists of numbers per test point and a reduction; resampling the points gives its bootstrap interval.

An interval shows the variation over test sets of the same size, not over seeds or training sets. A reduction takes the
number of times that each point occurs in each of R replicates, so that one sort or product serves all replicates.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor

from bnn_pyro.errors import UserError, refusing
from bnn_pyro.parts.decisions import BLOCK
from bnn_pyro.predictive import Prediction

Targets = Tensor | np.ndarray | Sequence[float]
Reduction = Callable[[np.ndarray], np.ndarray]  # counts (R, B) -> (R,)


class Undefined(UserError):
    """The metric has no value on these data, such as an AUROC of a test set with a single class."""


class Estimate(NamedTuple):
    """A metric's value and its interval."""

    value: float
    low: float
    high: float

    def flat(self, name: str) -> dict[str, float]:
        """{name, name_low, name_high: the numbers}."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


class Evaluation(dict[str, Estimate]):
    """Metric name -> Estimate.

    notes       {name: why the metric was left out}
    replicates  {name: (R,)}, the value on each of R resampled test sets. With the same seed and number of points the
                resampled points are the same, so that the replicates of two predictions for the same points are pairs
    """

    def __init__(self, replicates: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.notes: dict[str, str] = {}
        self.replicates = dict(replicates)

    def __missing__(self, name: str) -> Estimate:
        raise Undefined(self.notes[name])

    def flat(self) -> dict[str, float]:
        """{"nll": …, "nll_low": …, "nll_high": …, …}, as in metrics.json."""
        return {key: value for name, estimate in self.items() for key, value in estimate.flat(name).items()}


@dataclass(frozen=True)
class Metric:
    """One metric; call it with (prediction, y) for its value as a float.

    points       (prediction, checked y as a numpy array (B,)) -> (B, …) float64
    reduce       (points, counts (R, B)) -> (R,): the value in each replicate, NaN where it has none
    description  what is measured, with units and conventions, for tables
    better       whether "lower" or "higher" values are better; "nominal": values near a nominal value
    biased       whether it is a sum of absolute values (an ECE). Resampling adds sampling noise a second time, so that
                 the raw percentile interval can lie above the value: it is shifted by value − mean(replicates)
    share        whether the points are 0 or 1 and the value is their mean: ``evaluate`` gives it an exact interval
    """

    points: Callable[[Prediction, np.ndarray], np.ndarray]
    reduce: Callable[[np.ndarray, np.ndarray], np.ndarray]
    description: str
    better: Literal["lower", "higher", "nominal"] = "lower"
    biased: bool = field(default=False, kw_only=True)
    share: bool = field(default=False, kw_only=True)

    def __call__(self, prediction: Prediction, y: Targets) -> float:
        """The value on all points. Raises UserError for a bad y, and (as Undefined) where there is no value."""
        points = self.summarise(prediction, y)
        return float(self.reduce(points, np.ones((1, len(points))))[0])

    def summarise(self, prediction: Prediction, y: Targets) -> np.ndarray:
        """The numbers per point, (B, …), all finite. Raises the same errors as a call."""
        points = self.points(prediction, targets(prediction, y))
        if not (finite := np.isfinite(points).reshape(len(points), -1).all(1)).all():
            row = int(np.argmin(finite))
            if np.isnan(points[row]).any():
                raise UserError(f"the prediction is NaN at row {row}; retrain with a smaller learning rate")
            raise Undefined(f"infinite at row {row}: {self.description}")
        return points


def targets(prediction: Prediction, y: Targets) -> np.ndarray:
    """Labels (int64) or target values (float64), (B,) or (B, T), checked against the prediction.

    Raises UserError unless y holds one finite number for each point (and target), and each is possible: a class is one
    of 0 … K−1, a label 0 or 1, and a count a whole number of 0 or more.
    """
    with refusing("y must hold numbers, one for each point (of classes their places): {error}", TypeError, ValueError):
        y = np.array(y.detach().cpu().numpy() if isinstance(y, Tensor) else y, dtype=np.float64)
    num = len(prediction)
    if y.shape != (shape := tuple(prediction.components.batch_shape[1:])):
        each = "one value" if len(shape) == 1 else f"{shape[1]} values"
        raise UserError(f"y has shape {y.shape}, but the prediction is for {num} points; pass {each} each")
    if num == 0:
        raise UserError("there is nothing to score: the prediction has 0 points")
    if not np.isfinite(y).all():
        row = int(np.argmin(np.isfinite(y).reshape(num, -1).all(1)))
        raise UserError(f"y is {y[row]} at row {row}; leave such rows out of prediction and y")
    if prediction.task == "labels" and (other := ((y != 0) & (y != 1)).any(1)).any():
        raise UserError(f"y is {y[int(other.argmax())]} at row {int(other.argmax())}, and labels are 0 or 1")
    discrete = prediction.is_discrete and not prediction.has_classes
    if discrete and (other := (y < 0) | (y != np.floor(y))).any():
        raise UserError(f"y is {y[other][0]:g} at row {int(other.argmax())}, and counts are whole numbers of 0 or more")
    if not prediction.has_classes:
        return y
    classes = prediction.mean.shape[1]
    if (bad := (y != np.floor(y)) | (y < 0) | (y >= classes)).any():
        row = int(np.argmax(bad))
        raise UserError(f"label {y[row]:g} at row {row} is none of the classes 0 to {classes - 1} of this prediction")
    return y.astype(np.int64)


def mean_of(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean over the points of each replicate, (R,) or (R, …)."""
    return counts @ points / len(points)


def tied(key: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
    """Sums of each of the values (R, B) over groups of equal keys (B,), in ascending order of key: (R, groups)."""
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.r_[True, key[order][1:] != key[order][:-1]])
    return [np.add.reduceat(v[:, order], starts, axis=1) for v in values]


def share_of(points: np.ndarray, confidence: float = 0.95) -> Estimate:
    """The mean of points (B,) that are 0 or 1, with its exact binomial interval.

    Clopper & Pearson 1934, Biometrika 26:404-413. A bootstrap interval would have no width where all points are equal.
    """
    exact = binomtest(int(points.sum()), len(points)).proportion_ci(confidence, "exact")
    return Estimate(float(points.mean()), float(exact.low), float(exact.high))


def _means(prediction: Prediction) -> np.ndarray:
    """Predictive means (B, T), float64; for labels the probabilities of 1."""
    return prediction.components.mean.double().mean(0).numpy()


def _standard_squares(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    if not (spread := y.std(0)).all():
        raise Undefined(f"target {int(spread.argmin()) + 1} has the same value in every row")
    centred = (y - y.mean(0)) / spread
    return np.stack([np.square((_means(prediction) - y) / spread), centred, np.square(centred)], 1)


def _in_standard_deviations(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """points (B, 3, T) = (squared error, y, y²): the root of the mean over the targets of MSE / variance, (R,)."""
    error, mean, square = np.moveaxis(np.tensordot(counts, points, 1) / len(points), 1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):  # a replicate whose values are all equal has no value
        values = np.sqrt((error / (square - np.square(mean))).mean(1))
    return np.where(np.isfinite(values), values, np.nan)


def _ranked(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    if prediction.has_classes:
        probs = prediction.probs.mean(0, dtype=torch.float64).numpy()
        if probs.shape[1] != 2 or len(np.unique(y)) < 2:
            raise Undefined("average precision is for 2 classes, with rows of both")
        rare = int(2 * y.sum() <= len(y))
        return np.stack([probs[:, [rare]], (y == rare)[:, None]], -1)
    if not y.any(0).all():
        raise Undefined(f"average precision needs a 1 of every label, and label {int(y.any(0).argmin()) + 1} has none")
    return np.stack([_means(prediction), y], -1)


def mean_average_precision(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """points (B, T, 2) = (score, 1 if positive): the mean over the targets of Σ (R_i − R_{i−1}) P_i, (R,).

    R is recall and P precision; equal scores form one step, as in ``sklearn.metrics.average_precision_score``. NaN
    where a replicate has no positive of some target.
    """
    values = []
    for score, positive in np.moveaxis(points, (1, 2), (0, 1)):
        hits, num = tied(-score, counts * positive, counts)
        recalled = hits.cumsum(1)
        total = (hits * recalled / np.maximum(num.cumsum(1), 1)).sum(1)
        values.append(np.divide(total, recalled[:, -1], out=np.full(len(counts), np.nan), where=recalled[:, -1] > 0))
    return np.mean(values, 0)


_RMSE = "root mean squared error of the predictive means, each target in its standard deviations on these rows"
nrmse = Metric(_standard_squares, _in_standard_deviations, _RMSE)
label_error = Metric(lambda p, y: ((_means(p) > 0.5) != y).mean(1), mean_of, "share of labels that are wrong (Hamming)")
_BRIER = "as of two classes, mean over the labels (0 to 2)"
label_brier = Metric(lambda p, y: 2 * np.square(_means(p) - y).mean(1), mean_of, _BRIER)
_AP = "average precision: of two classes of the rarer one, whose share chance would give; of labels the mean (macro)"
average_precision = Metric(_ranked, mean_average_precision, _AP, "higher")


def _ranked_times(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    """(B, 3): rank of the time (at equal times events come first), whether it is an event, rank of the median."""
    time, score = (np.unique(v, return_inverse=True)[1] for v in (np.abs(y), prediction.quantile(0.5)[0].numpy()))
    points = np.stack([2 * time + (y < 0), y > 0, score], 1).astype(np.float64)
    if not concordant(points, np.ones((1, len(y))))[1].any():
        raise Undefined("concordance needs an event before the time of another row")
    return points


def concordant(points: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(pairs in the right order, where equal scores count ½; comparable pairs), each (R,).

    Two rows are comparable if the event of one happened before the time of the other. The smaller of two ranks has a 0
    at the highest bit in which they differ. All pairs that first differ in one bit are counted together, with the rows
    sorted by (higher bits, score), in O(R·B log² B).
    """
    rank, event, score = points.T.astype(np.int64)
    right = pairs = np.zeros(len(counts))
    for bit in range(int(rank.max()).bit_length()):
        block, later = rank >> (bit + 1), (rank >> bit & 1).astype(float)
        order = np.lexsort((score, block))
        block = block[order]
        equal = np.flatnonzero(np.diff(block * len(score) + score[order], prepend=-1))
        first, last = (np.add.reduceat(counts[:, order] * w[order], equal, 1) for w in (event * (1 - later), later))
        before = np.c_[np.zeros(len(counts)), first.cumsum(1)]  # number of events in the groups before each one
        start = np.searchsorted(block[equal], block[equal])  # the first group of the block
        end = np.searchsorted(block[equal], block[equal], side="right")
        right = right + (last * (before[:, :-1] - before[:, start] + first / 2)).sum(1)
        pairs = pairs + (last * (before[:, end] - before[:, start])).sum(1)
    return right, pairs


def _concordance(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    right, pairs = concordant(points, counts)
    return np.divide(right, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)


_C = "Harrell's concordance: of comparable pairs of rows, the share whose medians are in the order of the times"
concordance = Metric(_ranked_times, _concordance, _C, "higher")


def intervals(
    reductions: Mapping[str, Reduction], sizes: Sequence[int], *, biased: Collection[str] = (), bootstrap: int = 1000,
    seed: int = 0, confidence: float = 0.95,
) -> Evaluation:  # fmt: skip
    """Values on all points, with percentile intervals of several reductions over the same resampled points.

    sizes: the number of points; of several groups (inside and outside) that are resampled separately, one number each.
    biased: names of the reductions whose intervals are shifted by their bias, see :class:`Metric`.
    Replicates in which a reduction is NaN (one class drawn) do not count in its interval. If it is NaN on all points or
    in every replicate, it is left out, with a note; indexing by its name raises Undefined.
    Raises UserError for fewer than 2 replicates or a confidence outside (0, 1).
    """
    if bootstrap < 2:
        raise UserError(f"a bootstrap interval needs at least 2 replicates, got {bootstrap}; 1000 is usual")
    if not 0 < confidence < 1:
        raise UserError(f"confidence must lie between 0 and 1, got {confidence}; 0.95 is usual")
    resamples = _resamples(sizes, bootstrap, np.random.default_rng(seed))
    blocks = zip(*([reduce(counts) for reduce in reductions.values()] for counts in resamples), strict=True)
    evaluation = Evaluation(dict(zip(reductions, map(np.concatenate, blocks), strict=True)))
    tail = (1 - confidence) / 2
    for name, reduce in reductions.items():
        value = float(reduce(np.ones((1, sum(sizes))))[0])
        sample = evaluation.replicates[name][~np.isnan(evaluation.replicates[name])]
        if np.isnan(value) or len(sample) == 0:
            evaluation.notes[name] = f"'{name}' has no value on these rows, or on any of {bootstrap} resamples of them"
            del evaluation.replicates[name]
            continue
        low, high = np.quantile(sample, [tail, 1 - tail]) - (sample.mean() - value if name in biased else 0.0)
        evaluation[name] = Estimate(value, float(low), float(high))
    return evaluation


def _resamples(sizes: Sequence[int], replicates: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Blocks (R, Σ sizes) of the number of times that each point is drawn, with replacement within its group."""
    rows = max(1, BLOCK // sum(sizes))
    for start in range(0, replicates, rows):
        count = min(rows, replicates - start)
        first = np.arange(count)[:, None]
        drawn = [(rng.integers(size, size=(count, size)) + size * first).ravel() for size in sizes]
        counts = [np.bincount(d, minlength=count * n).reshape(count, n) for d, n in zip(drawn, sizes, strict=True)]
        yield np.concatenate(counts, axis=1).astype(np.float64)
