"""Quantities g(w, y) whose distribution under p(w, y | x) tells one joint distribution from another.

Weights alone see little: where the prior is wide beside the posterior, a sampler that is too wide by a half moves them
by nothing. What sees it depends on the data too: the log-likelihood, and the slopes of the log joint, whose scale is
that of the posterior itself (Modrák et al. 2023, arXiv:2211.02383, for such quantities).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pyro
import pyro.poutine as poutine
import torch
from scipy.special import ndtri
from torch import Tensor, nn

from bnn_pyro.inference.log_joint import log_joints
from bnn_pyro.inference.potential import Potential
from bnn_pyro.parts.likelihoods import ReadLikelihood
from bnn_pyro.parts.mixtures import Mixture

__all__ = ["NormalScores", "Quantities", "targets_of"]

#: Weights and rows that are looked at one by one, at most; spread evenly.
WEIGHTS, ROWS = 8, 3

#: Sets of weights evaluated at once.
TOGETHER = 4096


def targets_of(model: nn.Module, x: Tensor, w: Mapping[str, Tensor]) -> Mixture:
    """p(y | x, w) of C sets of weights, of components (C, N)."""
    with torch.no_grad(), pyro.validation_enabled(False), ReadLikelihood() as read, poutine.condition(data=w):
        model(x)
    return read.mixture(read.likelihood)


class Quantities:
    """M numbers of every (w, y), with their names in words.

    potential: of the rows x, in plain coordinates; its targets are exchanged.
    w, y: draws of the joint distribution, which tell how steep the log joint is along each weight.
    """

    def __init__(self, potential: Potential, w: Mapping[str, Tensor], y: Tensor) -> None:
        self.potential, self.scale = potential, None
        picked = _spread(potential.size, WEIGHTS)
        self.picked, self.rows = torch.tensor(picked), torch.tensor(_spread(len(potential.x), ROWS))
        names = [_names(potential)[i] for i in picked]
        pairs = list(pairwise(names))
        self.names = [
            *names,
            *(f"{a} · {b}" for a, b in pairs),
            *(f"slope along {name}" for name in names),
            "squared slopes",
            "log joint",
            "log prior",
            "log-likelihood",
            *(f"prediction of row {n + 1}" for n in self.rows.tolist()),
            "mean target",
        ]
        #: Which of them are slopes.
        self.slopes = [i for i, name in enumerate(self.names) if name.startswith("slope")]
        potential.give(y)
        _, slopes = potential(potential.position(w))
        self.scale = slopes.square().mean(0).clamp_min(1e-300)

    def __call__(self, w: Mapping[str, Tensor], y: Tensor) -> np.ndarray:
        """(C, M) of C sets of weights w {site: (C, *shape)} and targets y (C, N)."""
        blocks = range(0, len(y), TOGETHER)
        parts = [self._block({s: v[a : a + TOGETHER] for s, v in w.items()}, y[a : a + TOGETHER]) for a in blocks]
        return torch.cat(parts).numpy()

    def _block(self, w: Mapping[str, Tensor], y: Tensor) -> Tensor:
        potential = self.potential
        potential.give(y)
        z = potential.position(w)
        log_joint, slopes = potential(z)
        with torch.no_grad(), pyro.validation_enabled(False):
            prior, likelihood = log_joints(potential.model, w, potential.x, y)
        seen = targets_of(potential.model, potential.x, w)
        seen = seen.probs[..., 0] if seen.has_classes else seen.components.mean
        chosen = z[:, self.picked]
        columns = [chosen, chosen[:, 1:] * chosen[:, :-1], slopes[:, self.picked]]
        columns += [(slopes.square() / self.scale).mean(1), log_joint, prior, likelihood]
        columns += [seen[:, self.rows], y.double().mean(1)]
        return torch.cat([c.double().reshape(len(y), -1) for c in columns], 1)


class NormalScores:
    """Values as the standard Normal would have them, by their ranks in a sample of the right distribution.

    A test of means needs tails that are not heavy; ranks have none, whatever the prior.
    """

    def __init__(self, sample: np.ndarray) -> None:
        self.sorted = np.sort(sample, 0)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """(S, M) -> (S, M)."""
        num = len(self.sorted)
        ranks = [
            0.5 * (np.searchsorted(column, v, "left") + np.searchsorted(column, v, "right"))
            for column, v in zip(self.sorted.T, values.T, strict=True)
        ]
        return ndtri((np.stack(ranks, 1) / num).clip(0.5 / num, 1 - 0.5 / num))


def _spread(size: int, most: int) -> list[int]:
    """At most so many of the numbers below ``size``, evenly spaced."""
    return sorted({int(i) for i in np.linspace(0, size - 1, min(size, most)).round()})


def _names(potential: Potential) -> list[str]:
    """One for every number of z."""
    return [
        f"{site}[{', '.join(map(str, place))}]" if place else site
        for site, shape in potential.free.items()
        for place in np.ndindex(*shape)
    ]
