"""Dropout as a distribution of weights: columns of W, the inputs of its layer, removed at random."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

from bnn_pyro.parts.guides import PointMass

__all__ = ["DroppedColumns", "DroppedInputs"]


class DroppedColumns(dist.TorchDistribution):
    """W · diag(z / (1 − p)), zⱼ ~ Bernoulli(1 − p): a whole column of W (out, in) is 0, or divided by 1 − p.

    Mean W, variance W² p / (1 − p). One z for all rows of an input batch, so that a draw is one function of x.

    weight: W (out, in).   rate: p, in [0, 1).
    """

    arg_constraints: dict = {}  # noqa: RUF012
    support = constraints.independent(constraints.real, 2)
    has_rsample = True

    def __init__(self, weight: Tensor, rate: float, batch_shape: torch.Size = torch.Size()) -> None:  # noqa: B008
        self.weight, self.rate = weight, rate
        super().__init__(batch_shape, weight.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """W."""
        return self.weight.expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        """W² p / (1 − p)."""
        return self.mean.square() * (self.rate / (1 - self.rate))

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> DroppedColumns:
        """Independent masks."""
        return DroppedColumns(self.weight, self.rate, torch.Size(batch_shape))

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Draws of shape sample_shape + batch_shape + (out, in), each with a mask of its own."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape[-1:]
        return self._masked(torch.rand(shape, device=self.weight.device) >= self.rate)

    def _masked(self, kept: Tensor) -> Tensor:
        return self.weight * (kept.to(self.weight.dtype) / (1 - self.rate)).unsqueeze(-2)

    def log_prob(self, value: Tensor) -> Tensor:
        """log P(W = value) in nats, the probability of the masks that give ``value``: a mass, as Pyro's Delta has."""
        kept = (value != 0).any(-2)
        chosen = (self.weight != 0).any(-2)  # a column of zeros says nothing of its mask
        log_kept, log_dropped = math.log1p(-self.rate), math.log(self.rate) if self.rate else -math.inf
        mass = torch.where(chosen, torch.where(kept, log_kept, log_dropped), 0.0).sum(-1)
        possible = (value == self._masked(kept)).all(-1).all(-1)
        return torch.where(possible, mass, -math.inf)


class DroppedInputs(PointMass):
    """q(w) of MC dropout: weight matrices with dropped columns, everything else where it is.

    initial: {site: value} before training.   rates: {weight matrix: dropout rate of its layer's inputs}.
    """

    def __init__(self, initial: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        super().__init__(initial)
        self.rates = dict(rates)

    def _site(self, name: str, loc: Tensor) -> dist.TorchDistribution:
        rate = self.rates.get(name, 0.0)
        return DroppedColumns(loc, rate) if rate else super()._site(name, loc)
