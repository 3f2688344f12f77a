"""How far apart two posteriors are where it matters: in their predictions of the same points.

Agreement and total variation of the mean class probabilities (Izmailov, Vikram, Hoffman & Wilson 2021,
arXiv:2104.14421, section 7); for regression the Wasserstein-1 distance of the predictive mixtures. These compare
averages over the draws; ``wasserstein_2`` compares how the draws differ from one another. Of finitely many draws no
distance is 0, not even between two runs of one exact sampler: :func:`distance_floor` tells what would be seen then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bnn_pyro.errors import UserError
from bnn_pyro.metrics.classification import mean_probs
from bnn_pyro.metrics.metric import BLOCK, Estimate, intervals, mean_of
from bnn_pyro.predictive import Prediction

__all__ = ["DISTANCES", "Distance", "agreement", "distance_floor", "distances", "quantile_distance", "total_variation",
           "wasserstein", "wasserstein_2"]  # fmt: skip

#: Points of the grid of one pair of mixtures, over which |F − G| is integrated.
GRID = 512


def _agree(a: Prediction, b: Prediction) -> np.ndarray:
    return (mean_probs(a).argmax(1) == mean_probs(b).argmax(1)).astype(np.float64)


def _variation(a: Prediction, b: Prediction) -> np.ndarray:
    return 0.5 * np.abs(mean_probs(a) - mean_probs(b)).sum(1)


def _transport(a: Prediction, b: Prediction) -> np.ndarray:
    """∫ |F(y) − G(y)| dy by the trapezoid rule, from 8 standard deviations below the lowest component to 8 above."""
    points = max(1, BLOCK // (GRID * max(a.num_draws, b.num_draws)))
    distances = []
    for rows in torch.arange(len(a)).split(points):
        p, q = a[rows], b[rows]
        low = torch.minimum(*((m.locs.double() - 8 * m.scales.double()).amin(0) for m in (p, q)))
        high = torch.maximum(*((m.locs.double() + 8 * m.scales.double()).amax(0) for m in (p, q)))
        y = low + torch.linspace(0, 1, GRID, dtype=torch.float64)[:, None] * (high - low)
        distances.append(torch.trapezoid((p.cdf(y) - q.cdf(y)).abs(), y, dim=0))
    return torch.cat(distances).numpy()


def _spread(a: Prediction, b: Prediction) -> np.ndarray:
    if not a.has_classes:
        return quantile_distance(a.locs.numpy(), b.locs.numpy())
    p, q = a.probs.numpy(), b.probs.numpy()
    classes = [quantile_distance(p[..., k], q[..., k]) for k in range(p.shape[-1])]
    return np.sqrt(0.5 * sum(np.square(c) for c in classes))


@dataclass(frozen=True)
class Distance:
    """Call it with two predictions of the same points for its mean over the points, with its 95 % interval.

    points: (a, b) -> (B,) float64.   task: that it is for; "" is any.
    Raises UserError for predictions of another task, of different numbers of points or classes, or not finite.
    """

    points: Callable[[Prediction, Prediction], np.ndarray]
    name: str
    task: str

    def __call__(self, a: Prediction, b: Prediction, *, bootstrap: int = 1000, seed: int = 0) -> Estimate:
        """The mean over the points, and its interval over ``bootstrap`` resamples of them."""
        if self.task and {a.task, b.task} != {self.task}:
            raise UserError(f"'{self.name}' is for {self.task}; these are {a.task} and {b.task} predictions")
        return _estimates({self.name: self}, a, b, bootstrap, seed)[self.name]


#: Share of points whose most probable class is the same in both.
agreement = Distance(_agree, "agreement", "classification")
#: ½ Σ_k |p_k − q_k| of the mean probabilities, 0 to 1.
total_variation = Distance(_variation, "total_variation", "classification")
#: ∫ |F − G| of the two predictive mixtures, target units (Wasserstein-1): of two Normals with equal scales the distance
#: of their means; exact to a thousandth of the predictive scale.
wasserstein = Distance(_transport, "wasserstein", "regression")
#: (∫₀¹ (F⁻¹(u) − G⁻¹(u))² du)^½ of what single draws predict: means, or probabilities.
#: Unlike the other distances it sees an approximation that is right on average and too sure of it: of two Normals
#: W₂² = (μ − μ')² + (σ − σ')². Over classes (½ Σ_k W₂(p_k, q_k)²)^½, which for two of them is that of either one.
#: Sample against sample, of S draws each, it is some 2.4 standard deviations/√S where they agree.
wasserstein_2 = Distance(_spread, "wasserstein_2", "")

#: By task, those that :func:`distances` takes.
DISTANCES: dict[str, dict[str, Distance]] = {
    "classification": {"agreement": agreement, "total_variation": total_variation},
    "regression": {"wasserstein": wasserstein},
}


def quantile_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The 2-Wasserstein distance of the empirical distributions of a (S, …) and b (S', …), exactly; (…,) float64."""
    a, b = np.sort(a, 0).astype(np.float64), np.sort(b, 0).astype(np.float64)
    n, m = len(a), len(b)
    ends = np.union1d(np.arange(1, n + 1) * m, np.arange(1, m + 1) * n)  # where either quantile function jumps, · n m
    widths = np.diff(ends, prepend=0) / (n * m)
    return np.sqrt(np.tensordot(widths, np.square(a[(ends - 1) // m] - b[(ends - 1) // n]), 1))


def distances(a: Prediction, b: Prediction, *, bootstrap: int = 1000, seed: int = 0) -> dict[str, Estimate]:
    """Every distance of the task, from the same resampled points; the same errors as the single ones."""
    return _estimates(DISTANCES[a.task], a, b, bootstrap, seed)


def distance_floor(prediction: Prediction, *, block: int = 1, splits: int = 20, seed: int = 0) -> dict[str, Estimate]:
    """The distances between two halves of one posterior's draws: mean over random halves, and 95% of them.

    Two posteriors of S draws each cannot be told apart by a distance below that of halves of 2S draws. Total variation
    and Wasserstein fall about as 1/√S: the halves of S draws show √2 times what S draws against S would.

    block: so many successive draws stay together, because those of a Markov chain resemble each other; the length of
        a chain compares chains with chains. For independent draws 1.
    Raises UserError for fewer than two blocks of draws or one split.
    """
    blocks = prediction.num_draws // max(1, block)
    if block < 1 or blocks < 2 or splits < 1:
        raise UserError(
            f"the floor needs two blocks of draws and a split, got {prediction.num_draws} draws in blocks of {block} "
            f"and {splits} splits"
        )
    rng, half, chosen = np.random.default_rng(seed), blocks // 2, DISTANCES[prediction.task]
    means = []
    for _ in range(splits):
        order = rng.permutation(blocks)
        halves = order[:half], order[half : 2 * half]
        rows = [(np.sort(h)[:, None] * block + np.arange(block)).ravel() for h in halves]
        points = _points(chosen, *(prediction.of_draws(torch.from_numpy(r)) for r in rows))
        means.append([values.mean() for values in points.values()])
    columns = zip(chosen, np.transpose(means), strict=True)
    return {name: Estimate(float(v.mean()), *map(float, np.quantile(v, [0.025, 0.975]))) for name, v in columns}


def _points(chosen: Mapping[str, Distance], a: Prediction, b: Prediction) -> dict[str, np.ndarray]:
    if a.task != b.task:
        raise UserError(f"cannot compare a {a.task} with a {b.task} prediction")
    if len(a) != len(b):
        raise UserError(f"the predictions are for {len(a)} and {len(b)} points; predict the same points with both")
    if len(a) == 0:
        raise UserError("there is nothing to compare: the predictions have 0 points")
    if a.has_classes and a.mean.shape != b.mean.shape:
        raise UserError(f"the predictions have {a.mean.shape[1]} and {b.mean.shape[1]} classes")
    points = {name: distance.points(a, b) for name, distance in chosen.items()}
    for values in points.values():
        if not np.isfinite(values).all():
            raise UserError(f"a prediction is not finite at row {int(np.argmin(np.isfinite(values)))}")
    return points


def _estimates(
    chosen: Mapping[str, Distance], a: Prediction, b: Prediction, bootstrap: int, seed: int
) -> dict[str, Estimate]:
    reductions = {name: partial(mean_of, values) for name, values in _points(chosen, a, b).items()}
    return intervals(reductions, (len(a),), bootstrap=bootstrap, seed=seed)
