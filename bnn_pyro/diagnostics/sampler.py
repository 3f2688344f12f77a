"""What a fit says of itself: energies, divergences, trees that grew too deep, stuck chains, an objective that rises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from bnn_pyro.diagnostics.chain_statistics import LEAST_DRAWS, bfmi, ess_mean
from bnn_pyro.posterior import Posterior

__all__ = ["DIVERGENT", "Cause", "causes", "sampler_series", "sampler_statistics", "settled", "stuck_chains"]

#: A chain is in a poor mode where its mean log joint density lies so far below that of the others that among all chains
#: one that never mixed would do so with this probability, and this many Monte-Carlo standard errors.
CHANCE, CERTAIN = 1e-3, 5.0
#: Draws of a chain from which on it has a BFMI of its own.
LONG = 100
#: Share of divergent transitions that matters.
DIVERGENT = 0.01
#: Kinetic temperature from which on momenta are not those of a posterior; mini-batches and short runs bring it to 1.7.
HOT = 1.8
#: Standard deviations of the targets, or nats of log-odds, that no sampler of a posterior spreads over.
RUNAWAY = 1e4
#: Share of trajectories cut short that matters; mean acceptance below which the step size did not settle.
CUT, ACCEPTED = 0.05, 0.4


class Cause(NamedTuple):
    """Why a sampler does not reach the posterior, by its own numbers: what it is about, a clause, what to set."""

    about: str
    clause: str
    remedy: str
    fatal: bool = False


def causes(statistics: Mapping[str, float], stochastic: bool, unit: str) -> list[Cause]:
    """What the sampler's own numbers show, the gravest first; a fatal one leaves no use for the draws.

    statistics: of a ``Diagnosis``.   stochastic: whether proposals are never rejected.   unit: of ``spread_max``.
    """
    names = ("kinetic_temperature", "spread_max", "max_tree_share", "divergences", "acceptance_mean")
    kinetic, spread, cut, diverged, accepted = (statistics.get(name, math.nan) for name in names)
    diverged = diverged / (statistics.get("chains", math.nan) * statistics.get("draws", math.nan))
    smaller = "a step size of a tenth (--set lr=…), or larger batches"
    found = []
    if spread > RUNAWAY:
        clause = f"the draws ran away: the predictions of one point spread over {spread:.1g} times {unit}"
        remedy = smaller if stochastic else "standardised inputs or a narrower prior"
        found.append(Cause("spread", clause, remedy, fatal=True))
    if kinetic < 1 / HOT or kinetic > HOT:
        clause = f"the kinetic temperature is {kinetic:.2g} where 1 is right, so that the step size is too large"
        found.append(Cause("kinetic temperature", clause, smaller, fatal=True))
    if diverged > DIVERGENT:
        clause = f"{diverged:.0%} of the transitions diverged: the step size is too large for them"
        remedy = "a higher target acceptance (--set target_accept=0.95) or a narrower prior"
        found.append(Cause("divergences", clause, remedy))
    if cut > CUT:
        clause = f"{cut:.0%} of the trajectories were cut at their longest allowed length"
        found.append(Cause("trajectories", clause, "a larger max_tree_depth (or max_steps), or standardised inputs"))
    if accepted < ACCEPTED:
        clause = f"only {accepted:.0%} of the proposals were accepted: the step size did not settle"
        found.append(Cause("acceptance", clause, "a longer warm-up (--set warmup=…)"))
    return found


def sampler_series(posterior: Posterior) -> dict[str, np.ndarray]:
    """{name: (C, D)} of what the sampler kept, in float64; "lp" is the log joint density whatever it is called."""
    if posterior.chains is None:
        return {}
    shape = tuple(next(iter(posterior.chains.values())).shape[:2])
    found = {n: v.double().cpu().numpy() for n, v in posterior.stats.items() if tuple(v.shape) == shape}
    if "lp" not in found and "log_joint" in found:
        found["lp"] = found["log_joint"]
    return found


def sampler_statistics(
    series: Mapping[str, np.ndarray], settings: Mapping[str, object], trace: Mapping[str, Sequence[float]] | None = None
) -> dict[str, float]:
    """Numbers of a whole run: divergences, divergent_chains, acceptance_mean, bfmi_min, max_tree_share; and
    kinetic_temperature, the smaller mean of the third and the fourth quarter of the run, but for exploration.

    settings: those of the method; ``max_tree_depth`` (or ``max_steps``) is where trajectories were cut.
    """
    found: dict[str, float] = {}
    if trace and "kinetic_temperature" in trace:
        kinetic, step = (
            np.asarray(trace[name])[len(trace[name]) // 2 :] for name in ("kinetic_temperature", "step_size")
        )
        kinetic = kinetic[step <= step.mean() * (1 + 1e-9)]
        # It falls where a run has not settled yet, and stays high where the step size is too large.
        found["kinetic_temperature"] = min(float(part.mean()) for part in np.array_split(kinetic, 2) if len(part))
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


def settled(trace: Mapping[str, Sequence[float]]) -> float:
    """By how many nats the objective still rose in the last fifth of the training, 0 where that is noise.

    The last tenth of the epochs against the tenth before it; NaN without a trace of an objective, or under 20 epochs.
    """
    objective = trace.get("elbo") or trace.get("log_joint") or ()
    tenth = len(objective) // 10
    if tenth < 2 or "kinetic_temperature" in trace:
        return float("nan")
    line = np.asarray(objective, dtype=np.float64)
    before, last = line[-2 * tenth : -tenth], line[-tenth:]
    rise = last.mean() - before.mean()
    noise = np.hypot(before.std(ddof=1), last.std(ddof=1)) / np.sqrt(tenth)
    return float(rise) if rise > max(3 * noise, 1.0, 0.002 * np.ptp(line)) else 0.0
