"""Several targets a row, independent given the network's output: numbers, or labels that are 0 or 1.

    f (…, B, T·outputs)    y_t ~ the likelihood of one target, with its part of f, its own units and its own noise

What a draw of the weights says of one target it says of the others: over the draws they depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial

import pyro.distributions as dist
import torch
from torch import Tensor

from bnn_pyro.parts.components import select
from bnn_pyro.parts.decisions import Interval, check_level
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.observed import Likelihood


class SeveralMixture(Mixture):
    """p(y | x, D) of T targets a row as S components of batch shape (S, B, T).

    one: the mixture of a single target.

    ``log_prob`` is the joint density of a row's targets. Mean, uncertainties and quantiles have a last dimension T; of
    labels, the mean is the probability of a 1. Everything else is asked of ``target(k)``.
    """

    def __new__(cls, components: dist.Distribution, one: type[Mixture] = Mixture) -> SeveralMixture:
        """task: "labels" where the components are Bernoulli."""
        new = object.__new__(cls)
        new.components, new.one = components, one
        new.task = "labels" if isinstance(components, dist.Bernoulli) else "targets"
        return new

    def _like(self, components: dist.Distribution) -> SeveralMixture:
        return SeveralMixture(components, self.one)

    def target(self, k: int) -> Mixture:
        """The prediction of one target, counted from 0; of a label, one of two classes."""
        return self.one(select(self.components, (..., k)))

    @property
    def each(self) -> list[Mixture]:
        """The predictions of the T targets."""
        return [self.target(k) for k in range(self.components.batch_shape[-1])]

    def log_probs(self, y: Tensor) -> Tensor:
        """log p_s(y), (S, B), nats: the sum over the targets. y: (B, T)."""
        return super().log_probs(y).sum(-1)

    def output_values(self) -> Tensor:
        """The T numbers by which draws are compared, (S, B, T) float64: means, or log-odds."""
        return torch.cat([one.output_values() for one in self.each], -1)

    #: (B, T): variances, or of labels entropies in nats; see ``Mixture``.
    total = cached_property(lambda self: torch.stack([one.total for one in self.each], -1))
    aleatoric = cached_property(lambda self: torch.stack([one.aleatoric for one in self.each], -1))
    epistemic = cached_property(lambda self: torch.stack([one.epistemic for one in self.each], -1))

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Of each target by itself, (len(q), B, T)."""
        self._need("targets", "quantile")
        return torch.stack([one.quantile(q) for one in self.each], -1)

    def interval(self, level: float = 0.9) -> Interval:
        """The central intervals of each target by itself, low and high (B, T)."""
        check_level(level)
        low, high = self.quantile([(1 - level) / 2, (1 + level) / 2]).double()
        note = f"each target's covers {level:.4g} of new rows if the model is right"
        return Interval(low, high, level, "predictive", note)


class Several(Likelihood):
    """T targets, each with the likelihood ``one``: own units, own noise, its own part of the network's output.

    one: of targets whose shift is 0 and whose scale is 1; it is changed.   shift, scale: (T,), of the targets.
    """

    event_dim = 1

    def __init__(self, one: Likelihood, shift: Sequence[float], scale: Sequence[float]) -> None:
        super().__init__()
        self.one, self.num = one, len(shift)
        self.outputs, self.has_classes, self.own_sites = self.num * one.outputs, one.has_classes, one.own_sites
        self.mixture = partial(SeveralMixture, one=one.mixture)
        for name, values in (("shift", shift), ("scale", scale)):
            if name in vars(one):
                delattr(one, name)
                one.register_buffer(name, torch.tensor(values), persistent=False)
        for name, value in list(one.named_buffers()):
            if name.removesuffix("_loc").removesuffix("_scale") in one.own_sites:
                setattr(one, name, value.repeat(self.num))

    @property
    def initial(self) -> Mapping[str, Tensor]:
        """{own latent site: (T,)}."""
        return self.one.initial

    def components(self, f: Tensor) -> dist.Independent:
        """See ``Likelihood``; event shape (T,)."""
        return self.one.components(f.unflatten(-1, (self.num, self.one.outputs))).to_event(1)

    def fitted_noise(self, error: Tensor) -> dict[str, Tensor]:
        """See ``Likelihood``; error: (T,)."""
        return self.one.fitted_noise(error)
