"""How far predictions are from those of a reference posterior, each number beside what chance alone would show.

Two ways to compare. Whether a sampler that claims the posterior has it: means of :func:`bounded` functions of every
output, which tell a shift and a change of width, against those of all of the reference's draws, within the Monte-Carlo
errors of both. And how far an approximation is off: distances of predictions, and what its intervals cover.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from pyro.distributions import Normal
from scipy.special import expit
from scipy.stats import t

from bnn_pyro.checks.check import ALPHA
from bnn_pyro.checks.reference_posterior import ReferencePosterior, bounded
from bnn_pyro.checks.sbc_ranks import LEVELS
from bnn_pyro.diagnostics.convergence import LEAST_DRAWS, chain_statistics, ess_mean
from bnn_pyro.metrics.distance import quantile_distance, wasserstein
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict

__all__ = ["Compared", "Outputs", "compared", "coverage", "distances_to", "outputs_of", "shift_and_ratio"]

#: Inputs predicted at once; splits in halves that a floor is averaged over; how many of the inputs with stored draws
#: mixtures are compared at: every so many.
BLOCK, SPLITS, THINNED = 25, 4, 4
#: The autocorrelations behind an effective number of draws are added up over some such number of its units: the error
#: that comes of it has that many degrees of freedom less than there are effective draws.
WINDOW = 5
#: d E tanh(z + δ) / dδ at δ = 0 of a standard Normal.
SLOPE = 0.606


@dataclass(frozen=True)
class Outputs:
    """What a posterior predicts at the inputs of a reference. Shapes: C chains of D draws, B, J and K as there.

    values    (C, D, B, J) log-odds, or means in target units
    mean      (B, K) mean class probabilities, or mean of the network
    noise     (C·D,) standard deviations of the observations; empty for classification
    markov    whether draws of a chain depend on one another
    """

    values: np.ndarray
    mean: np.ndarray
    noise: np.ndarray
    markov: bool

    @property
    def flat(self) -> np.ndarray:
        """(C·D, B, J)."""
        return self.values.reshape(-1, *self.values.shape[2:])

    @cached_property
    def effective(self) -> float:
        """Effective number of draws for the mean, the median over the outputs; infinite for a single draw."""
        if len(self.flat) == 1:
            return math.inf
        return float(np.nanmedian(ess_mean(_series(self.values)))) if self.markov else float(len(self.flat))

    def rhat(self) -> float:
        """The largest R-hat of the outputs; NaN for a single chain, or for independent draws."""
        if not self.markov or len(self.values) < 2:
            return math.nan
        return float(np.nanmax(chain_statistics(_series(self.values)).rhat))


class Compared(NamedTuple):
    """Whether the draws are of the reference's posterior.

    p          of the output that is furthest off, corrected for how many there are
    z          (2, B, J) differences in standard errors, of :func:`bounded`
    visible    shift of the mean, in posterior standard deviations, that would have been seen at the median output
    """

    p: float
    z: np.ndarray
    visible: float


def outputs_of(posterior: Posterior, reference: ReferencePosterior, draws: int) -> Outputs:
    """All draws of chains, or so many of a guide, at the reference's inputs."""
    chains = posterior.chains
    shape = (1, draws) if chains is None else tuple(next(iter(chains.values())).shape[:2])
    outputs, means, noise = [], [], np.zeros(0)
    for part in torch.from_numpy(reference.x).split(BLOCK):
        prediction = predict(posterior, part, num_draws=shape[0] * shape[1])
        outputs.append(prediction.mixture.output_values().numpy().astype(np.float32))
        if not prediction.has_classes:
            means.append(prediction.locs.double().mean(0)[:, None])
            noise = prediction.scales[:, 0].double().numpy()
        else:
            means.append(prediction.probs.double().mean(0))
    values = np.concatenate(outputs, 1).reshape(*shape, len(reference.x), -1)
    return Outputs(values, torch.cat(means).numpy(), noise, chains is not None and shape[1] >= LEAST_DRAWS)


def compared(outputs: Outputs, reference: ReferencePosterior) -> Compared:
    """Every output's mean and width against the reference's, within the Monte-Carlo errors of both.

    A single draw has no error: p is NaN.
    """
    values = bounded(outputs.values.astype(np.float64), reference.centre, reference.spread)
    mean = values.mean((1, 2))
    if len(outputs.flat) == 1:
        return Compared(math.nan, (mean - reference.expected) / reference.error, math.inf)
    if outputs.markov:
        count = np.stack([ess_mean(_series(v)).reshape(reference.centre.shape) for v in values])
        freedom = np.maximum(count / WINDOW, 1.0)
    else:
        count = np.full(mean.shape, float(len(outputs.flat)))
        freedom = count - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.hypot(values.std((1, 2)) / np.sqrt(count), reference.error)
        z = np.nan_to_num((mean - reference.expected) / error, nan=math.inf)
    p = min(1.0, float((2 * t.sf(np.abs(z), freedom)).min()) * z.size)
    limit = t.isf(ALPHA / (2 * z.size), np.nan_to_num(freedom[0], nan=1.0))
    return Compared(p, z, float(np.nanmedian(limit * error[0]) / SLOPE))


def distances_to(outputs: Outputs, reference: ReferencePosterior, seed: int = 0) -> dict[str, tuple[float, float]]:
    """{distance: (its value, what draws of the same posterior would show)}; the mean over the reference's inputs.

    agreement, total_variation (classification) of the mean probabilities; wasserstein (regression), of the predictive
    mixtures, target units; wasserstein2 of what single draws predict, in probability or target units.
    """
    rng, draws = np.random.default_rng(seed), reference.outputs()
    share = math.sqrt(1 / outputs.effective + 1 / len(draws)) / math.sqrt(4 / len(draws))  # of what halves show
    halves = [np.split(rng.permutation(len(draws)), [len(draws) // 2]) for _ in range(SPLITS)]
    known: dict[str, tuple[float, float]] = {}
    if reference.has_classes:
        error = reference.mean_sd * math.sqrt(1 / outputs.effective + 1 / reference.about["draws"])
        noisy = reference.mean + error * rng.standard_normal((50, *error.shape))
        same = reference.mean.argmax(1)
        known["agreement"] = float((outputs.mean.argmax(1) == same).mean()), float((noisy.argmax(2) == same).mean())
        tv = 0.5 * np.abs(outputs.mean - reference.mean).sum(1).mean()
        known["total_variation"] = float(tv), float(0.5 * math.sqrt(2 / math.pi) * error.sum(1).mean())
    else:
        whole = reference.prediction()[::THINNED]
        mine = _mixture(outputs.flat[:, reference.points[::THINNED], 0], outputs.noise)
        two = [wasserstein(whole.of_draws(a), whole.of_draws(b), bootstrap=2).value for a, b in halves]
        known["wasserstein"] = wasserstein(mine, whole, bootstrap=2).value, share * float(np.mean(two))
    two = [_spread_apart(draws[a], draws[b], reference.has_classes) for a, b in halves]
    between = _spread_apart(outputs.flat[:, reference.points], draws, reference.has_classes)
    return known | {"wasserstein2": (between, share * float(np.mean(two)))}


def coverage(outputs: Outputs, reference: ReferencePosterior) -> dict[float, tuple[float, float]]:
    """{level: (share of the reference's draws inside the central intervals of the draws, its Monte-Carlo error)}.

    Of every output at the points with stored draws; the error is that at one of them, since points go together.
    """
    mine, draws = outputs.flat[:, reference.points], reference.outputs()
    number = 1 / outputs.effective + 1 / len(draws)
    shares = {}
    for level in LEVELS:
        low, high = np.quantile(mine, [(1 - level) / 2, (1 + level) / 2], axis=0)
        inside = (draws >= low) & (draws <= high)
        shares[level] = float(inside.mean()), math.sqrt(level * (1 - level) * number)
    return shares


def shift_and_ratio(outputs: Outputs, reference: ReferencePosterior) -> tuple[float, float]:
    """(root mean square difference of the outputs' means, median standard deviation), in those of the posterior."""
    shift = (outputs.flat.mean(0, dtype=np.float64) - reference.centre) / reference.spread
    ratio = outputs.flat.std(0, dtype=np.float64) / reference.spread
    return float(np.sqrt(np.square(shift).mean())), float(np.median(ratio))


def _series(values: np.ndarray) -> np.ndarray:
    """(C, D, …) -> (M, C, D) float64."""
    return np.moveaxis(values.reshape(*values.shape[:2], -1).astype(np.float64), 2, 0)


def _spread_apart(a: np.ndarray, b: np.ndarray, has_classes: bool) -> float:
    """Mean over the points of W₂ of outputs (S, T, J): of probabilities (½ Σ_k W₂²)^½, as ``wasserstein_2`` has it."""
    if not has_classes:
        return float(quantile_distance(a, b).mean())
    square = np.square(quantile_distance(expit(a.astype(np.float64)), expit(b.astype(np.float64))))
    return float(np.sqrt(square[:, 0] if square.shape[1] == 1 else 0.5 * square.sum(1)).mean())


def _mixture(locs: np.ndarray, noise: np.ndarray) -> Prediction:
    """At most 1,000 of the draws, evenly taken."""
    kept = np.linspace(0, len(locs) - 1, min(len(locs), 1000)).round().astype(int)
    locs = torch.from_numpy(locs[kept]).float()
    return Prediction(
        Normal(locs, torch.from_numpy(noise[kept]).float()[:, None].expand(locs.shape), validate_args=False)
    )
