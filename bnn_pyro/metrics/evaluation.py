"""Metrics of a real target, in its own units; all metrics of a task at once; and paired differences.

Of the mixture over the draws, never of a matched Gaussian.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from bnn_pyro.errors import UserError, unknown
from bnn_pyro.metrics import classification
from bnn_pyro.metrics.metric import Estimate, Evaluation, Metric, Targets, Undefined, intervals, mean_of, targets
from bnn_pyro.predictive import Prediction

__all__ = ["METRICS", "bits", "coverage_50", "coverage_90", "coverage_95", "crps", "evaluate", "nll", "paired", "pit",
           "rmse", "width_95"]  # fmt: skip

T = TypeVar("T", float, np.ndarray, torch.Tensor)


# -- real targets ------------------------------------------------------------------------------------------------------
def _squared_error(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    return np.square(prediction.locs.mean(0, dtype=torch.float64).numpy() - y)


def _root_mean(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.sqrt(mean_of(points, counts))


def _crps(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    return prediction.crps(torch.from_numpy(y)).numpy()


def _steps(prediction: Prediction, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P(Y ≤ y), P(Y < y)), each (B,): the same where Y is continuous."""
    below, at = (share.mean(-2) for share in prediction.component_below(torch.from_numpy(y)))
    return (below + at).numpy(), below.numpy()


def pit(prediction: Prediction, y: Targets) -> np.ndarray:
    """Probability integral transform P(Y ≤ y) of each point, (B,): uniform on (0, 1) if calibrated.

    Of counts P(Y < y) + ½ P(Y = y): uniform but for their steps.
    """
    return sum(_steps(prediction, targets(prediction, y))) / 2


def _covered(share: float, prediction: Prediction, y: np.ndarray) -> np.ndarray:
    upper, lower = _steps(prediction, y)
    return (np.maximum(lower - 0.5, 0.5 - upper) <= share / 2).astype(np.float64)


def _coverage(share: float) -> Metric:
    text = f"share of targets inside the central {share:.0%} interval"
    return Metric(partial(_covered, share), mean_of, text, "nominal", nominal=share)


def _width(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    low, high = prediction.quantile([0.025, 0.975]).double().numpy()
    return high - low


rmse = Metric(_squared_error, _root_mean, "root mean squared error of the predictive mean, target units")
crps = Metric(_crps, mean_of, "continuous ranked probability score of the mixture, target units")
coverage_50, coverage_90, coverage_95 = _coverage(0.50), _coverage(0.90), _coverage(0.95)
width_95 = Metric(_width, mean_of, "mean width of the central 95% interval, target units")


# -- all metrics -------------------------------------------------------------------------------------------------------
def _nll(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    return -prediction.log_prob(torch.from_numpy(y)).double().numpy()


nll = Metric(_nll, mean_of, "negative log predictive density of the mixture over draws, nats per point")

METRICS: dict[str, dict[str, Metric]] = {
    "classification": {
        "error": classification.error,
        "accuracy": classification.accuracy,
        "nll": nll,
        "brier": classification.brier,
        "ece": classification.ece,
        "adaptive_ece": classification.adaptive_ece,
        "classwise_ece": classification.classwise_ece,
        "auroc": classification.auroc,
        "aurc": classification.aurc,
    },
    "regression": {
        "rmse": rmse,
        "nll": nll,
        "crps": crps,
        "coverage_50": coverage_50,
        "coverage_90": coverage_90,
        "coverage_95": coverage_95,
        "width_95": width_95,
    },
}


def evaluate(
    prediction: Prediction, y: Targets, *, bootstrap: int = 1000, seed: int = 0, confidence: float = 0.95
) -> Evaluation:
    """Every metric of the prediction's task with its bootstrap interval; ``.flat()`` gives the JSON-able form.

    y: (B,) labels 0 … K−1, or targets in their own units.
    bootstrap: replicates, the same resampled points for all metrics.
    A metric without a value on these data is left out, see ``.notes``; values on resampled points: ``.replicates``.
    Raises UserError for a bad y, or where the prediction is NaN.
    """
    y = targets(prediction, y)
    table, points, notes = METRICS[prediction.task], {}, {}
    for name, metric in table.items():
        try:
            points[name] = metric.summarise(prediction, y)
        except Undefined as reason:
            notes[name] = str(reason)
    biased = {name for name in points if table[name].biased}
    reductions = {name: partial(table[name].reduce, p) for name, p in points.items()}
    settings = {"bootstrap": bootstrap, "seed": seed, "confidence": confidence}
    found = intervals(reductions, (len(y),), biased=biased, **settings)
    found.notes.update(notes)
    # An absolute value stays one: only the biased metrics' intervals are moved, and could fall below 0.
    found.update({name: found[name]._replace(low=max(found[name].low, 0.0)) for name in biased})
    return found


def paired(
    metric: str | Metric,
    prediction_a: Prediction,
    prediction_b: Prediction,
    y: Targets,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Estimate:
    """metric(a) − metric(b) on the same points, which are resampled together: far sharper than two intervals.

    metric: a name in METRICS[task], or a Metric.
    Raises UserError for an unknown name, predictions of other lengths or tasks, or where either has no value.
    """
    if prediction_a.task != prediction_b.task:
        raise UserError(f"cannot compare a {prediction_a.task} with a {prediction_b.task} prediction")
    if isinstance(metric, str):
        table = METRICS[prediction_a.task]
        if metric not in table:
            raise unknown(f"{prediction_a.task} metric", metric, table)
        metric = table[metric]
    a, b = metric.summarise(prediction_a, y), metric.summarise(prediction_b, y)

    def difference(counts: np.ndarray) -> np.ndarray:
        return metric.reduce(a, counts) - metric.reduce(b, counts)

    biased = {"difference"} if metric.biased else ()
    settings = {"bootstrap": bootstrap, "seed": seed, "confidence": confidence}
    return intervals({"difference": difference}, (len(a),), biased=biased, **settings)["difference"]


def bits(nats: T) -> T:
    """An entropy, information or log-density in bits."""
    return nats / math.log(2)
