"""Metrics of a real target, in its own units: of the mixture over the draws, never of a matched Gaussian."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.metrics.metric import BLOCK, Metric, Targets, mean_of, targets
from bnn_pyro.predictive import Prediction

__all__ = ["coverage_50", "coverage_90", "coverage_95", "crps", "pit", "rmse", "width_95"]


def _squared_error(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    return np.square(prediction.locs.mean(0, dtype=torch.float64).numpy() - y)


def _root_mean(points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.sqrt(mean_of(points, counts))


def _crps(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    """E|Y − y| − ½ E|Y − Y'|, both in closed form for a mixture of S Gaussians (Grimit et al. 2006, eq. 5)."""
    draws = prediction.num_draws
    scores = []
    for rows in torch.arange(len(y)).split(max(1, BLOCK // draws)):
        loc, scale = prediction.locs[:, rows].double(), prediction.scales[:, rows].double()
        to_y = _mean_distance(torch.from_numpy(y)[rows] - loc, scale).mean(0)
        # Every pair (s, t) of draws by their lag around the circle: (S, B) at a time, and each unordered pair once.
        between = _mean_distance(torch.zeros_like(loc), math.sqrt(2) * scale).sum(0)
        for lag in range(1, draws // 2 + 1):
            distance = _mean_distance(loc - loc.roll(lag, 0), torch.hypot(scale, scale.roll(lag, 0))).sum(0)
            between += distance if 2 * lag == draws else 2 * distance
        scores.append(to_y - between / (2 * draws**2))
    return torch.cat(scores).numpy()


def _mean_distance(loc: Tensor, scale: Tensor) -> Tensor:
    """E|Z| for Z ~ Normal(loc, scale)."""
    z = loc / scale
    return loc * torch.erf(z / math.sqrt(2)) + scale * math.sqrt(2 / math.pi) * torch.exp(-z.square() / 2)


def _pit(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    return prediction.cdf(torch.from_numpy(y)).numpy()


def pit(prediction: Prediction, y: Targets) -> np.ndarray:
    """Probability integral transform P(Y ≤ y) of each point, (B,): uniform on (0, 1) if calibrated."""
    return _pit(prediction, targets(prediction, y))


def _covered(share: float, prediction: Prediction, y: np.ndarray) -> np.ndarray:
    return (np.abs(_pit(prediction, y) - 0.5) <= share / 2).astype(np.float64)


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
