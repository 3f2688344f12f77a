"""Metrics of class probabilities. Probabilities are averaged over the draws before they are scored, in float64.

Calibration bins are right-closed, (i/15, (i+1)/15], so that a confidence of exactly 1 lies in the last bin. On finitely
many rows even a perfectly calibrated model has an ECE above 0: :func:`ece_floor` estimates how large it would be.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import entr
from sklearn import metrics as sklearn_metrics

from bnn_pyro.errors import UserError, check_known
from bnn_pyro.metrics.metric import BLOCK, Evaluation, Metric, Targets, Undefined, intervals, mean_of, targets, tied
from bnn_pyro.predictive import Prediction

#: Number of calibration bins, as in Guo et al. 2017.
BINS = 15
#: Number of test sets that :func:`ece_floor` simulates.
REPLICATES = 1000


def mean_probs(prediction: Prediction) -> np.ndarray:
    """The predictive class probabilities (B, K), float64, normalised, because rounding near 1 would create ties."""
    probs = prediction.probs.mean(0, dtype=torch.float64).numpy()
    return probs / probs.sum(1, keepdims=True)


def _entropy(prediction: Prediction) -> np.ndarray:
    """Total predictive entropy H[E p] in nats, (B,), float64."""
    return entr(mean_probs(prediction)).sum(1)


def _right(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    return (mean_probs(prediction).argmax(1) == y).astype(np.float64)


def _in_bins(confidence: np.ndarray, value: np.ndarray, bins: int = BINS) -> np.ndarray:
    """(…, bins): each value in the column of the equal-width bin that its confidence lies in; 0 in other columns."""
    index = np.clip(np.searchsorted(np.linspace(0.0, 1.0, bins + 1), confidence, side="left") - 1, 0, bins - 1)
    return np.where(index[..., None] == np.arange(bins), np.asarray(value)[..., None], 0.0)


def _top_label(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    """(B, 2): the confidence in the most probable class, and that confidence minus 1 if the class is correct."""
    confidence = mean_probs(prediction).max(1)
    return np.stack([confidence, confidence - _right(prediction, y)], 1)


def _class_gaps(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    """(p_k − 1{y = k}) / K in the bin of p_k, for each class k: (B, K · bins)."""
    probs = mean_probs(prediction)
    classes = probs.shape[1]
    return (_in_bins(probs, probs - np.eye(classes)[y]) / classes).reshape(len(y), -1)


def _sum_of_gaps(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.abs(mean_of(points, counts)).sum(1)


def _equal_mass_ece(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    bins = np.array_split(in_order(points, counts), min(BINS, len(points)), axis=1)
    return sum(np.abs(b.sum(1)) for b in bins) / len(points)


class Reliability(NamedTuple):
    """Edges (bins + 1,) and, for each bin, mean confidence, accuracy (both NaN if the bin is empty) and count."""

    edges: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray


def reliability(prediction: Prediction, y: Targets, bins: int = BINS, *, of: int | None = None) -> Reliability:
    """The numbers of a reliability diagram. The ECE is Σ count/B · |accuracy − confidence| over the non-empty bins.

    of: if a class is given, its probability and its frequency replace the confidence and accuracy of the top label.
    """
    if bins < 1:
        raise UserError(f"a reliability diagram needs at least 1 bin, got {bins}")
    y, probs = targets(prediction, y), mean_probs(prediction)
    confidence, right = (probs.max(1), _right(prediction, y)) if of is None else (probs[:, of], y == of)
    count, total, right = (_in_bins(confidence, v, bins).sum(0) for v in (np.ones(len(y)), confidence, right))
    with np.errstate(invalid="ignore"):
        return Reliability(np.linspace(0.0, 1.0, bins + 1), total / count, right / count, count.astype(np.int64))


class Floor(NamedTuple):
    """The ECE of a perfectly calibrated model: its mean and its 95 % quantile over test sets."""

    mean: float
    quantile_95: float


def ece_floor(prediction: Prediction) -> Floor:
    """The noise floor of the ECE: that of a perfectly calibrated model with the same confidences and number of points.

    It is simulated: the top label of each point is correct with a probability that equals its confidence.
    """
    rng, confidence = np.random.default_rng(0), mean_probs(prediction).max(1)
    columns = _in_bins(confidence, np.ones_like(confidence))
    sample = []
    for start in range(0, REPLICATES, rows := max(1, BLOCK // len(confidence))):
        right = rng.random((min(rows, REPLICATES - start), len(confidence))) < confidence
        sample.append(np.abs((confidence - right) @ columns).sum(1) / len(confidence))
    values = np.concatenate(sample)
    return Floor(float(values.mean()), float(np.quantile(values, 0.95)))


def in_order(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """points (B, 2) = (key, value): each replicate's values sorted by key, (R, B); equal keys share their mean."""
    key, value = points.T
    size, total = tied(key, counts, counts * value)
    shared = np.divide(total, size, out=np.zeros_like(total), where=size > 0)
    return np.repeat(shared.ravel(), size.ravel().astype(np.int64)).reshape(counts.shape)


def auroc_of(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """points (B, 2) = (score, 1 if positive): P(a positive scores above a negative), ties counting ½; (R,)."""
    score, positive = points.T
    above, below = tied(score, counts * positive, counts * (1 - positive))
    wins = (above * (np.cumsum(below, 1) - below / 2)).sum(1)
    pairs = above.sum(1) * below.sum(1)
    return np.divide(wins, pairs, out=np.full_like(wins, np.nan), where=pairs > 0)


def _log_odds(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    if (probs := mean_probs(prediction)).shape[1] != 2:
        raise Undefined(f"AUROC is for 2 classes, but this prediction has {probs.shape[1]}")
    if len(np.unique(y)) < 2:
        raise Undefined(f"AUROC needs both classes in y, but every label is {y[0]}")
    log_probs = np.log(np.maximum(probs, 1e-300))
    return np.stack([log_probs[:, 1] - log_probs[:, 0], y], 1)


def _risks(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.cumsum(in_order(points, counts), 1) / np.arange(1, len(points) + 1)


def selective_risk(prediction: Prediction, y: Targets) -> tuple[np.ndarray, np.ndarray]:
    """(coverage 1/B … 1, error rate of that share of points with the lowest total entropy), each (B,); ties share."""
    points = aurc.summarise(prediction, y)
    return np.arange(1, len(points) + 1) / len(points), _risks(points, np.ones((1, len(points))))[0]


def confusion_matrix(prediction: Prediction, y: Targets) -> np.ndarray:
    """Counts (K, K): row the true class, column the most probable one."""
    y, probs = targets(prediction, y), mean_probs(prediction)
    return sklearn_metrics.confusion_matrix(y, probs.argmax(1), labels=range(probs.shape[1]))


error = Metric(lambda p, y: 1 - _right(p, y), mean_of, "share of points whose most probable class is wrong", share=True)
accuracy = Metric(_right, mean_of, "share of points whose most probable class is right", "higher", share=True)
_BRIER = "squared error of the probabilities, summed over the classes (0 to 2)"
brier = Metric(lambda p, y: np.square(mean_probs(p) - np.eye(p.mean.shape[1])[y]).sum(1), mean_of, _BRIER)
_RPS = "ranked probability score: Σ_k (P(Y ≤ k) − 1{y ≤ k})², the CRPS in steps of one class"
rps = Metric(
    lambda p, y: np.square(mean_probs(p).cumsum(1) - (y[:, None] <= np.arange(p.mean.shape[1]))).sum(1), mean_of, _RPS
)
_ECE, _WIDTH = "difference of confidence and accuracy: expected calibration error", f"{BINS} equal-width bins"
# confidence − correct of the top label, in its bin: (B, bins). The ECE is Σ_bins |mean over points|.
ece = Metric(lambda p, y: _in_bins(*_top_label(p, y).T), _sum_of_gaps, f"{_ECE}, top label, {_WIDTH}", biased=True)
adaptive_ece = Metric(_top_label, _equal_mass_ece, f"expected calibration error by {BINS} equal-mass bins", biased=True)
classwise_ece = Metric(_class_gaps, _sum_of_gaps, f"expected calibration error of each class, {_WIDTH}", biased=True)
_AUROC = "chance that a row of the second class gets a higher probability of it than one of the first (ROC curve)"
auroc = Metric(_log_odds, auroc_of, _AUROC, "higher")
_AURC = "mean error rate of the rows that remain if the most uncertain ones are left out, over all their numbers"
aurc = Metric(lambda p, y: np.stack([_entropy(p), 1 - _right(p, y)], 1), lambda w, n: _risks(w, n).mean(1), _AURC)


def _mutual_information(prediction: Prediction) -> np.ndarray:
    if prediction.num_draws == 1:
        raise Undefined("mutual information needs more than one draw: it measures how much draws disagree")
    parts = (part.double().numpy() for part in prediction.probs.split(1000, dim=1))
    aleatoric = [entr(p / p.sum(-1, keepdims=True)).sum(-1).mean(0) for p in parts]
    return np.maximum(_entropy(prediction) - np.concatenate(aleatoric), 0.0)


#: Uncertainty scores, Prediction -> (B,). 1 − max p is the sum of the other probabilities, which avoids rounding.
SCORES = {"total_entropy": _entropy, "max_prob": lambda p: np.sort(mean_probs(p), 1)[:, :-1].sum(1),
          "mutual_information": _mutual_information}  # fmt: skip


def ood_auroc(inside: Prediction, outside: Prediction, score: str = "total_entropy") -> float:
    """P(an out-of-distribution point scores above an in-distribution one), where a tie counts ½.

    score: "total_entropy" (H[E p]), "max_prob" (1 − max p) or "mutual_information" (epistemic part).
    Raises UserError for an unknown score, for predictions without points or with NaN, and for the mutual information of
    a single draw.
    """
    points = _points(inside, outside, score)
    return float(auroc_of(points, np.ones((1, len(points))))[0])


def ood_table(inside: Prediction, outside: Prediction, **resampling: Any) -> Evaluation:
    """Score name -> AUROC with its interval; inside and outside points are resampled independently of each other.

    resampling: ``bootstrap``, ``seed`` and ``confidence``, as for ``evaluate``.
    """
    points, notes = {}, {}
    for score in SCORES:
        try:
            points[score] = _points(inside, outside, score)
        except Undefined as reason:
            notes[score] = str(reason)
    reductions = {score: partial(auroc_of, p) for score, p in points.items()}
    table = intervals(reductions, sizes=(len(inside), len(outside)), **resampling)
    table.notes.update(notes)
    return table


def _points(inside: Prediction, outside: Prediction, score: str) -> np.ndarray:
    check_known("uncertainty score", SCORES, score)
    parts = []
    for name, prediction, positive in (("inside", inside, 0.0), ("outside", outside, 1.0)):
        if len(prediction) == 0:
            raise UserError(f"there are no {name} points to score")
        if np.isnan(values := SCORES[score](prediction)).any():
            raise UserError(f"the {name} prediction is NaN at row {int(np.argmax(np.isnan(values)))}")
        parts.append(np.stack([values, np.full(len(values), positive)], 1))
    return np.concatenate(parts)
