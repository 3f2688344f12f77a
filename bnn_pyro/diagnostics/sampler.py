"""What a sampler says of itself: energies, divergences, trees that grew too deep, chains that got stuck."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.special import ndtri

from bnn_pyro.diagnostics.chain_statistics import LEAST_DRAWS, bfmi, ess_mean
from bnn_pyro.posterior import Posterior

__all__ = ["sampler_series", "sampler_statistics", "stuck_chains"]

#: A chain is in a poor mode where its mean log joint density lies so far below that of the others that among all chains
#: one that never mixed would do so with this probability, and this many Monte-Carlo standard errors.
CHANCE, CERTAIN = 1e-3, 5.0
#: Draws of a chain from which on it has a BFMI of its own.
LONG = 100


def sampler_series(posterior: Posterior) -> dict[str, np.ndarray]:
    """{name: (C, D)} of what the sampler kept, in float64; "lp" is the log joint density whatever it is called."""
    if posterior.chains is None:
        return {}
    shape = tuple(next(iter(posterior.chains.values())).shape[:2])
    found = {n: v.double().cpu().numpy() for n, v in posterior.stats.items() if tuple(v.shape) == shape}
    if "lp" not in found and "log_joint" in found:
        found["lp"] = found["log_joint"]
    return found


def sampler_statistics(series: Mapping[str, np.ndarray], settings: Mapping[str, object]) -> dict[str, float]:
    """Numbers of a whole run: divergences, divergent_chains, acceptance_mean, bfmi_min, max_tree_share.

    settings: those of the method; ``max_tree_depth`` (or ``max_steps``) is where trajectories were cut.
    """
    found: dict[str, float] = {}
    if "diverging" in series:
        found["divergences"] = float(series["diverging"].sum())
        found["divergent_chains"] = float((series["diverging"] > 0).any(1).sum())
    if "acceptance_rate" in series:
        found["acceptance_mean"] = float(np.nanmean(series["acceptance_rate"]))
    if "energy" in series and np.isfinite(fractions := _mixing(series["energy"])).any():
        found["bfmi_min"] = float(np.nanmin(fractions))
    if (share := _cut_share(series, settings)) is not None:
        found["max_tree_share"] = share
    return found


def _mixing(energy: np.ndarray) -> np.ndarray:
    """BFMI of every chain; of all short ones together, as one by one they would tell mostly noise, and too little."""
    if energy.shape[1] >= LONG:
        return bfmi(energy)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (
            np.array([np.square(np.diff(energy, axis=1)).mean() / energy.var()]) if energy.shape[1] > 1 else energy[:0]
        )


def _cut_share(series: Mapping[str, np.ndarray], settings: Mapping[str, object]) -> float | None:
    """The share of trajectories that went on to the very limit; None where there is none."""
    depth, steps = settings.get("max_tree_depth"), settings.get("max_steps")
    each = max(1, int(settings.get("thin") or 1))  # transitions that a draw's n_steps are of
    if depth is not None and "tree_depth" in series:
        return float((series["tree_depth"] >= depth).mean())
    if depth is not None and "n_steps" in series:
        return float((series["n_steps"] >= each * (2 ** int(depth) - 1)).mean())
    if steps is not None and "n_steps" in series:
        return float((series["n_steps"] >= each * int(steps)).mean())
    return None


def stuck_chains(log_joint: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
    """(C,) bool: chains that never move, and chains that are caught in a poor mode.

    log_joint: (C, D) of the draws, nats, or None.   weights: (M, C, D), some of them.

    In equilibrium all chains have the same distribution of log joint densities, for networks about a constant minus
    half a χ² of as many degrees of freedom as there are weights; the means of chains then differ by their Monte-Carlo
    error. A chain is caught whose mean lies below the median of the others' means by more than 3.5 (of 4 chains; 4.8 of
    512) of the others' standard deviations, so that the whole of it is where they hardly ever go, and by ``CERTAIN``
    standard errors. These standard deviations are within the other chains and, as short ones do not see it all,
    between their means (robustly, by the median absolute deviation). A poor mode may still be part of the posterior:
    what is said is that chains do not travel between it and the others.
    """
    num, draws = weights.shape[1:]
    if draws < LEAST_DRAWS:
        return np.zeros(num, dtype=bool)
    stuck = (np.ptp(weights, axis=2) == 0).all(0)
    if log_joint is None:
        return stuck
    finite = np.isfinite(log_joint).all(1)
    stuck |= ~finite
    moving = np.flatnonzero(~stuck)
    if len(moving) < 2:
        return stuck
    own, far = log_joint[moving], -ndtri(CHANCE / len(moving))
    mean, sd = own.mean(1), own.std(1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = sd / np.sqrt(np.maximum(ess_mean(own[:, None, :]), 1.0))
    for i, chain in enumerate(moving):
        others = np.arange(len(moving)) != i
        gap = np.median(mean[others]) - mean[i]
        noise = np.hypot(error[i], np.median(error[others]))
        between = 1.4826 * np.median(np.abs(mean[others] - np.median(mean[others])))
        stuck[chain] = gap > far * np.hypot(np.median(sd[others]), between) and gap > CERTAIN * noise
    return stuck
