"""Metrics of a real target, in its own units: of the mixture over the draws, never of a matched Gaussian."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from bnn_pyro.metrics.metric import Metric, Targets, mean_of, targets
from bnn_pyro.predictive import Prediction

__all__ = ["coverage_50", "coverage_90", "coverage_95", "crps", "pit", "rmse", "width_95"]


def _squared_error(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    return np.square(prediction.locs.mean(0, dtype=torch.float64).numpy() - y)


def _root_mean(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.sqrt(mean_of(points, counts))


def _crps(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    return prediction.mixture.crps(torch.from_numpy(y)).numpy()


def _pit(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    upper, lower = _steps(prediction, y)
    return (lower + upper) / 2


def _steps(prediction: Prediction, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P(Y ≤ y), P(Y < y)), each (B,): the same where Y is continuous."""
    below, at = (share.mean(-2) for share in prediction.mixture.component_below(torch.from_numpy(y)))
    return (below + at).numpy(), below.numpy()


def pit(prediction: Prediction, y: Targets) -> np.ndarray:
    """Probability integral transform P(Y ≤ y) of each point, (B,): uniform on (0, 1) if calibrated.

    Of counts P(Y < y) + ½ P(Y = y): uniform but for their steps.
    """
    return _pit(prediction, targets(prediction, y))


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
