"""A bounded number of draws of any posterior, and statistics of its sampler or its training.

These are energies, divergences, trajectories cut at their maximal length, stuck chains, and a rising objective.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyro
import torch
from scipy.special import ndtri
from torch import Tensor

from bnn_pyro.diagnostics.convergence import MIN_CHAIN_DRAWS, bfmi, ess_mean
from bnn_pyro.isolation import isolated
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict

#: Kinds of draws and their description; the kind depends on what the posterior holds, not on the method.
KINDS = {
    "chains": "draws of Markov chains",
    "members": "one draw of each of several networks, trained apart: no chain, and no posterior to converge to",
    "point": "one network: a point estimate",
    "approximation": "independent draws of an approximation q(w), as one chain: R-hat says nothing of how good it is",
}
#: Largest number of values that a prediction holds at once: 64 MB in float32.
BLOCK = 2**24
#: Largest number of multiplications of one step of a diagnosis, which take seconds.
WORK = 5e10
#: Of :func:`stuck_chains`: the probability of calling any chain stuck by chance, and the number of Monte-Carlo standard
#: errors by which a stuck chain must differ.
CHANCE, CERTAIN = 1e-3, 5.0


def kind(posterior: Posterior) -> str:
    """A key of ``KINDS``."""
    if posterior.chains is None:
        return "approximation"
    chains, draws = sized(posterior)
    points = "point" if chains == 1 else "members"
    return "chains" if draws > 1 or posterior.stats else points


def sized(posterior: Posterior, num_draws: int = 0) -> tuple[int, int]:
    """(C, D), the numbers of chains and of draws per chain that are stored; (1, num_draws) for a guide."""
    return (1, num_draws) if posterior.chains is None else tuple(next(iter(posterior.chains.values())).shape[:2])


def stride(posterior: Posterior, most: int) -> int:
    """The smallest k such that every k-th draw of every chain makes at most ``most`` draws, or one per chain."""
    chains, draws = sized(posterior)  # (1, 0) for a guide
    return max(1, math.ceil(draws / max(1, most // chains)))


def thinned(posterior: Posterior, most: int) -> Posterior:
    """The posterior with every k-th draw of every chain, see :func:`stride`; a guide is returned unchanged."""
    if (step := stride(posterior, most)) == 1:
        return posterior
    stats = {name: value[:, ::step] for name, value in posterior.stats.items()}
    return replace(posterior, chains={site: w[:, ::step] for site, w in posterior.chains.items()}, stats=stats)


def as_chain(posterior: Posterior, draws: Mapping[str, Tensor]) -> Posterior:
    """A posterior of these draws, {site: (S, *shape)}, as one chain."""
    return replace(posterior, guide=None, chains={site: w.unsqueeze(0) for site, w in draws.items()}, stats={})


def even(num: int, most: int) -> np.ndarray:
    """At most ``most`` of 0 … num − 1, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, num - 1, min(num, max(most, 1))).round().astype(int))


def rows_within(posterior: Posterior, num: int, draws: int, numbers: float) -> np.ndarray:
    """Evenly spaced rows of ``num``, such that draws × rows is at most ``numbers`` and the work at most ``WORK``."""
    return even(num, int(min(numbers / draws, WORK / (draws * posterior.num_weights))))


def walk(posterior: Posterior, x: Tensor, num_draws: int, seed: int = 0) -> Iterator[tuple[slice, Prediction]]:
    """(rows, the prediction for them), a few rows at a time, with the same draws for all rows."""
    size = max(1, BLOCK // (num_draws * max(1, len(posterior.schema.classes))))
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        with pyro.validation_enabled(False):  # a draw may not be finite, which a diagnosis reports
            prediction = predict(posterior, x[rows], num_draws=num_draws, seed=seed)
        yield rows, prediction


def stored_or_fresh(
    posterior: Posterior, num_draws: int, seed: int, pick: Callable[[Mapping[str, Tensor]], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """``pick`` of the stored draws {site: (C, D, …)}, or of ``num_draws`` new draws of a guide, as one chain."""
    if posterior.chains is not None:
        return pick(posterior.chains)
    with isolated(seed):
        blocks = [pick(block) for block in posterior.blocks(num_draws)]
    return [torch.cat(column)[None] for column in zip(*blocks, strict=True)]


def even_weights(posterior: Posterior, most: int, num_draws: int) -> tuple[list[str], np.ndarray]:
    """(names, values (M, C, D) float64) of at most ``most`` weights, evenly spaced over the network.

    num_draws: number of draws of a guide; of chains all draws are taken.
    """
    shapes = [(site, tuple(value.shape)) for site, value in posterior.model.initial.items()]
    starts = np.cumsum([0, *(math.prod(shape) for _, shape in shapes)])
    places = even(starts[-1], most)
    pairs = zip(np.searchsorted(starts, places, side="right") - 1, places, strict=True)
    picks = [(shapes[k][0], np.unravel_index(place - starts[k], shapes[k][1])) for k, place in pairs]
    names = [f"{site}[{', '.join(map(str, index))}]".removesuffix("[]") for site, index in picks]
    values = stored_or_fresh(posterior, num_draws, 0, lambda w: [w[site][(..., *index)] for site, index in picks])
    return names, torch.stack(values).detach().cpu().double().numpy()


def sampler_series(posterior: Posterior) -> dict[str, np.ndarray]:
    """{name: (C, D)}: statistics that the sampler stored, by ArviZ's names; "lp" is the log joint density."""
    pairs = posterior.stats.items()
    series = {"lp" if n == "log_joint" else n: v.cpu().numpy() for n, v in pairs if tuple(v.shape) == sized(posterior)}
    for name in series.keys() & {"n_steps", "tree_depth", "superchain"}:
        series[name] = series[name].astype(np.int64)
    if "diverging" in series:
        series["diverging"] = series["diverging"] > 0.5
    deepest = posterior.provenance.get("method_settings", {}).get("max_tree_depth")
    if "tree_depth" in series and deepest is not None:
        series["reached_max_treedepth"] = series["tree_depth"] >= deepest
    return series


def sampler_statistics(
    series: Mapping[str, np.ndarray], settings: Mapping[str, object], trace: Mapping[str, Sequence[float]] | None = None
) -> dict[str, float]:
    """Statistics of a run: divergences, divergent_chains, acceptance_mean, bfmi_min, max_tree_share; and the smaller
    mean kinetic_temperature of the third and the fourth quarter of the run, without steps above the mean step size.

    settings: of the method; ``max_tree_depth`` (or ``max_steps``) is the length at which trajectories were cut.
    """
    statistics: dict[str, float] = {}
    if trace and "kinetic_temperature" in trace:
        pair = (np.asarray(trace[name]) for name in ("kinetic_temperature", "step_size"))
        kinetic, step = (values[len(values) // 2 :] for values in pair)
        kinetic = kinetic[step <= step.mean() * (1 + 1e-9)]
        # It falls while a run has not settled, and stays high if the step size is too large.
        statistics["kinetic_temperature"] = min(float(part.mean()) for part in np.array_split(kinetic, 2) if len(part))
    if "diverging" in series:
        statistics["divergences"] = float(series["diverging"].sum())
        statistics["divergent_chains"] = float((series["diverging"] > 0).any(1).sum())
        statistics |= {"thin": float(settings["thin"])} if settings.get("thin", 1) > 1 else {}
    if "acceptance_rate" in series:
        statistics["acceptance_mean"] = float(np.nanmean(series["acceptance_rate"]))
    each = max(1, int(settings.get("thin") or 1))  # transitions per draw
    if (energy := series.get("energy", np.zeros((0, 0)))).shape[1] > 1 and each == 1:  # thinning raises the BFMI
        with np.errstate(divide="ignore", invalid="ignore"):
            # Short chains are pooled, as the BFMI of a single one would be noisy and biased downwards.
            pooled = np.square(np.diff(energy, axis=1)).mean() / energy.var()
        lowest = float(np.fmin.reduce(bfmi(energy))) if energy.shape[1] >= 100 else float(pooled)
        statistics |= {"bfmi_min": lowest} if np.isfinite(lowest) else {}
    if "cut" in series:
        statistics["max_tree_share"] = float(series["cut"].mean())
    elif "tree_depth" in series and "max_tree_depth" in settings:  # old files: the depth is the largest of a draw's
        shorter = (series["tree_depth"] < settings["max_tree_depth"]).mean()
        statistics["max_tree_share"] = float(1 - shorter ** (1 / each))
    return statistics


def stuck_chains(log_joint: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
    """(C,) bool: chains that never move, and chains that stay in a mode of low density.

    log_joint: (C, D) of the draws, nats, or None.   weights: (M, C, D), some of the weights.

    In equilibrium the chains' mean log joint densities differ by their Monte-Carlo error. A chain is stuck if its mean
    is below the median of the other means by more than ``CERTAIN`` standard errors and by more than 3.5 standard
    deviations (for 4 chains; 4.8 for 512), which combine that within chains with a robust estimate of that between
    chains, as short chains do not explore everything. A poor mode may still be part of the posterior: the result only
    says that chains do not move between it and the others.
    """
    num, draws = weights.shape[1:]
    if draws < MIN_CHAIN_DRAWS:
        return np.zeros(num, dtype=bool)
    stuck = (np.ptp(weights, axis=2) == 0).all(0)
    if log_joint is None:
        return stuck
    stuck |= ~np.isfinite(log_joint).all(1)
    if len(moving := np.flatnonzero(~stuck)) < 2:
        return stuck
    values, far = log_joint[moving], -ndtri(CHANCE / len(moving))
    mean, sd = values.mean(1), values.std(1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = sd / np.sqrt(np.maximum(ess_mean(values[:, None, :]), 1.0))
    for i, chain in enumerate(moving):
        others = np.arange(len(moving)) != i
        gap = np.median(mean[others]) - mean[i]
        noise = np.hypot(error[i], np.median(error[others]))
        between = 1.4826 * np.median(np.abs(mean[others] - np.median(mean[others])))
        stuck[chain] = gap > far * np.hypot(np.median(sd[others]), between) and gap > CERTAIN * noise
    return stuck


def settled(trace: Mapping[str, Sequence[float]], until: float = 1.0) -> float:
    """Rise of the objective, nats, in the tenth of the training before ``until``; 0: noise, NaN below 20 epochs."""
    objective = trace.get("elbo") or trace.get("log_joint") or ()
    if (tenth := len(objective) // 10) < 2 or "kinetic_temperature" in trace:
        return float("nan")
    line = np.asarray(objective, dtype=np.float64)[: round(until * len(objective))]
    before, last = line[-2 * tenth : -tenth], line[-tenth:]
    rise = last.mean() - before.mean()
    noise = np.hypot(before.std(ddof=1), last.std(ddof=1)) / np.sqrt(tenth)
    return float(rise) if rise > max(3 * noise, 1.0, 0.002 * np.ptp(line)) else 0.0
