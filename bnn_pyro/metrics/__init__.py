"""Metrics of a Prediction, by task, each with a bootstrap interval over the test points.

``metrics.nll(prediction, y)`` is a float, ``evaluate(prediction, y)`` all that the task has. To add one: a
:class:`Metric` and a line in ``METRICS``. Log-densities and entropies are in nats; ``bits`` converts.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from bnn_pyro.errors import UserError, unknown
from bnn_pyro.metrics.classification import (
    SCORES,
    accuracy,
    adaptive_ece,
    aurc,
    auroc,
    brier,
    classwise_ece,
    confusion_matrix,
    ece,
    ece_floor,
    error,
    ood_auroc,
    ood_table,
    reliability,
    selective_risk,
)
from bnn_pyro.metrics.distance import (
    DISTANCES,
    agreement,
    distance_floor,
    distances,
    total_variation,
    wasserstein,
    wasserstein_2,
)
from bnn_pyro.metrics.metric import Estimate, Evaluation, Metric, Targets, Undefined, mean_of, targets
from bnn_pyro.metrics.metric import bootstrap as _bootstrap
from bnn_pyro.metrics.metric import intervals as _intervals
from bnn_pyro.metrics.metric import resample as _resample
from bnn_pyro.metrics.regression import coverage_50, coverage_90, coverage_95, crps, pit, rmse, width_95
from bnn_pyro.predictive import Prediction

__all__ = [
    "DISTANCES",
    "METRICS",
    "SCORES",
    "Estimate",
    "Evaluation",
    "Metric",
    "Undefined",
    "accuracy",
    "adaptive_ece",
    "agreement",
    "aurc",
    "auroc",
    "bits",
    "brier",
    "classwise_ece",
    "confusion_matrix",
    "coverage_50",
    "coverage_90",
    "coverage_95",
    "crps",
    "distance_floor",
    "distances",
    "ece",
    "ece_floor",
    "error",
    "evaluate",
    "nll",
    "ood_auroc",
    "ood_table",
    "paired",
    "pit",
    "reliability",
    "rmse",
    "selective_risk",
    "total_variation",
    "wasserstein",
    "wasserstein_2",
    "width_95",
]

T = TypeVar("T", float, np.ndarray, torch.Tensor)


def _nll(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    return -prediction.log_prob(torch.from_numpy(y)).double().numpy()


nll = Metric(_nll, mean_of, "negative log predictive density of the mixture over draws, nats per point")

METRICS: dict[str, dict[str, Metric]] = {
    "classification": {
        "error": error,
        "accuracy": accuracy,
        "nll": nll,
        "brier": brier,
        "ece": ece,
        "adaptive_ece": adaptive_ece,
        "classwise_ece": classwise_ece,
        "auroc": auroc,
        "aurc": aurc,
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
    A metric without a value on these data is left out, and the reason is in ``.notes``; the values on the resampled
    points are in ``.replicates``.

    Raises UserError for a bad y, or where the prediction is NaN.
    """
    y = targets(prediction, y)
    table, points, notes = METRICS[prediction.task], {}, {}
    for name, metric in table.items():
        try:
            points[name] = metric.summarise(prediction, y)
        except Undefined as reason:
            notes[name] = str(reason)
    reductions = {name: partial(table[name].reduce, p) for name, p in points.items()}
    replicates = _resample(reductions, (len(y),), replicates=bootstrap, seed=seed)
    biased = {name for name in points if table[name].biased}
    estimates = _intervals(reductions, replicates, len(y), confidence=confidence, biased=biased)
    # An absolute value stays one: only the biased metrics' intervals are moved, and could fall below 0.
    estimates = {n: e._replace(low=max(e.low, 0.0)) if table[n].biased else e for n, e in estimates.items()}
    return Evaluation(estimates, notes, replicates)


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
    table = METRICS[prediction_a.task]
    if isinstance(metric, str):
        if metric not in table:
            raise unknown(f"{prediction_a.task} metric", metric, table)
        metric = table[metric]
    a, b = metric.summarise(prediction_a, y), metric.summarise(prediction_b, y)
    return _bootstrap(
        {"difference": lambda counts: metric.reduce(a, counts) - metric.reduce(b, counts)},
        (len(a),),
        replicates=bootstrap,
        seed=seed,
        confidence=confidence,
        biased={"difference"} if metric.biased else (),
    )["difference"]


def bits(nats: T) -> T:
    """An entropy, information or log-density in bits."""
    return nats / math.log(2)


def __dir__() -> list[str]:
    return sorted(__all__)
