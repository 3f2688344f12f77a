"""The draws of any posterior, few enough to work on: thinned evenly, and predicted a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pyro
import torch
from torch import Tensor

from bnn_pyro.isolation import isolated
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict

__all__ = [
    "KINDS",
    "chosen_weights",
    "even",
    "held",
    "kind",
    "rows_at_hand",
    "sized",
    "stride",
    "thinned",
    "walk",
    "weight_count",
]

#: What draws can be, by what a posterior holds; nothing here asks which method made it.
KINDS = {
    "chains": "draws of Markov chains",
    "members": "one draw of each of several networks, trained apart: no chain, and no posterior to converge to",
    "point": "one network: a point estimate",
    "approximation": "independent draws of an approximation q(w), as one chain: R-hat says nothing of how good it is",
}
#: Numbers that one step of the work holds at once, 64 MB in float32.
BLOCK = 2**24
#: Multiplications that one diagnostic may take: seconds.
WORK = 5e10


def kind(posterior: Posterior) -> str:
    """A key of ``KINDS``."""
    if posterior.chains is None:
        return "approximation"
    chains, draws = _shape(posterior.chains)
    if draws > 1 or "acceptance_rate" in posterior.stats:
        return "chains"
    return "point" if chains == 1 else "members"


def sized(posterior: Posterior, num_draws: int) -> tuple[int, int]:
    """(C, D) of the draws at hand; (1, num_draws) where q is sampled afresh."""
    return (1, num_draws) if posterior.chains is None else _shape(posterior.chains)


def _shape(chains: Mapping[str, Tensor]) -> tuple[int, int]:
    return tuple(next(iter(chains.values())).shape[:2])


def weight_count(posterior: Posterior) -> int:
    """P, the number of weights."""
    return sum(value.numel() for value in posterior.model.initial.values())


def stride(posterior: Posterior, most: int) -> int:
    """k: where every k-th draw of every chain is taken, at most ``most`` remain in all, but one a chain."""
    if posterior.chains is None:
        return 1
    chains, draws = _shape(posterior.chains)
    each = max(1, most // chains)
    return max(1, math.ceil(draws / each))


def thinned(posterior: Posterior, most: int) -> Posterior:
    """Every k-th draw of every chain, so that at most ``most`` remain in all, but one a chain; a guide as it is."""
    step = stride(posterior, most)
    if step == 1:
        return posterior
    stats = {name: value[:, ::step] for name, value in posterior.stats.items()}
    return replace(posterior, chains={site: w[:, ::step] for site, w in posterior.chains.items()}, stats=stats)


def even(num: int, most: int) -> np.ndarray:
    """At most ``most`` of 0 … num − 1, evenly chosen, first and last among them."""
    return np.unique(np.linspace(0, num - 1, min(num, max(most, 1))).round().astype(int))


def rows_at_hand(posterior: Posterior, num: int, draws: int, numbers: float) -> np.ndarray:
    """Rows of ``num``, evenly chosen, so that draws × rows stays within ``numbers`` and the work within ``WORK``."""
    return even(num, int(min(numbers / draws, WORK / (draws * weight_count(posterior)))))


def walk(posterior: Posterior, x: Tensor, num_draws: int, seed: int = 0) -> Iterator[tuple[slice, Prediction]]:
    """(rows, the prediction for them), a few rows at a time and all draws: the same ones for all rows."""
    numbers = num_draws * max(1, len(posterior.schema.classes))
    size = max(1, BLOCK // numbers)
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        with pyro.validation_enabled(False):  # a draw may be broken, which is for a diagnosis to say
            prediction = predict(posterior, x[rows], num_draws=num_draws, seed=seed)
        yield rows, prediction


def held(posterior: Posterior, draws: Mapping[str, Tensor]) -> Posterior:
    """A posterior of these draws, {site: (S, *shape)}, as one chain."""
    chains = {site: value.unsqueeze(0) for site, value in draws.items()}
    return replace(posterior, guide=None, chains=chains, stats={})


def chosen_weights(posterior: Posterior, most: int, num_draws: int, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """(names, values (M, C, D)) of at most ``most`` single weights, evenly chosen over the whole network."""
    shapes = {site: tuple(value.shape) for site, value in posterior.model.initial.items()}
    places = even(weight_count(posterior), most)
    names, start = [], 0
    picks: dict[str, np.ndarray] = {}
    for site, shape in shapes.items():
        size = math.prod(shape)
        picks[site] = places[(places >= start) & (places < start + size)] - start
        for i in picks[site]:
            where = ", ".join(map(str, np.unravel_index(int(i), shape))) if shape else ""
            names.append(f"{site}[{where}]" if where else site)
        start += size
    if posterior.chains is not None:
        values = [_pick(posterior.chains[site], pick) for site, pick in picks.items()]
        return names, np.moveaxis(np.concatenate(values, 2), 2, 0)
    blocks = []
    with isolated(seed):
        for block in posterior.blocks(num_draws):
            blocks.append(np.concatenate([_pick(block[site][None], pick)[0] for site, pick in picks.items()], 1))
    return names, np.concatenate(blocks).T[:, None, :]


def _pick(chains: Tensor, places: np.ndarray) -> np.ndarray:
    """Numbers ``places`` (m,) of every flattened draw: (C, D, *shape) -> (C, D, m) float64."""
    flat = chains.flatten(2) if chains.dim() > 2 else chains[..., None]
    return flat[..., torch.from_numpy(places).to(flat.device)].detach().cpu().double().numpy()
