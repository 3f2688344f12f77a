"""Several targets per row, independent given the network's output: numbers, or labels that are 0 or 1.

    f (…, B, T·outputs)    y_t ~ the likelihood of one target, with its part of f, its own units and its own noise

The predictive distribution of the targets is dependent, as they share the draws of the weights. The noise of numbers
may be correlated as well (:class:`CorrelatedNoise`).
"""

import math
import operator
import warnings
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, Self

import pyro.distributions as dist
import torch
from torch import Tensor

from bnn_pyro.errors import unknown
from bnn_pyro.parts.components import select
from bnn_pyro.parts.mixtures import MIXTURES, Mixture, NormalMixture
from bnn_pyro.parts.observed import Likelihood


class SeveralMixture(Mixture):
    """p(y | x, D) of T targets a row as S components of batch shape (S, B, T).

    one: the mixture class of a single target.

    ``log_prob`` is the joint density of a row's targets. Mean, uncertainties and quantiles have a last dimension T; for
    labels, the mean is the probability of a 1. ``target(k)`` has all other methods.
    """

    def __new__(cls, components: dist.Distribution, one: type[Mixture] = Mixture) -> Self:
        """The attribute ``task`` is "labels" if the components are Bernoulli, else "targets"."""
        new = object.__new__(cls)
        new.components, new.one = components, one
        new.task = "labels" if isinstance(components, dist.Bernoulli) else "targets"
        return new

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.components, self.one  # for pickle

    def _like(self, components: dist.Distribution) -> Self:
        return type(self)(components, self.one)

    def target(self, k: int | str) -> Mixture:
        """The prediction of one target, by its name or its number from 0; for a label, a prediction of two classes.

        Warns if a conformal guarantee, which is for all targets, is lost. Raises UserError for an unknown target.
        """
        if self.guarantee is not None:
            warnings.warn("target(k) has the model's own intervals; the guaranteed ones, of all targets together, "
                          "are columns of prediction.interval(level)", stacklevel=2)  # fmt: skip
        num, names = self.components.batch_shape[-1], list(self.schema.targets if self.schema else ())
        if k in names:
            return self._one(names.index(k))
        if isinstance(k, str) or not -num <= operator.index(k) < num:
            raise unknown("target", k, [*names, f"0 to {num - 1}"])
        return self._one(operator.index(k))

    def _one(self, k: int) -> Mixture:
        return self.one(select(self.components, (slice(None), slice(None), k)))

    #: The predictions of the T targets.
    each = property(lambda self: [self._one(k) for k in range(self.components.batch_shape[-1])])

    def log_probs(self, y: Tensor) -> Tensor:
        """log p_s(y), (S, B), nats: the sum over the targets. y: (B, T)."""
        return super().log_probs(y).sum(-1)

    def output_values(self) -> Tensor:
        """See :meth:`Mixture.output_values`, (S, B, T) float64: means, or log odds."""
        return torch.cat([one.output_values() for one in self.each], -1)

    #: (B, T): variances, or for labels entropies in nats; see ``Mixture``.
    total = cached_property(lambda self: torch.stack([one.total for one in self.each], -1))
    aleatoric = cached_property(lambda self: torch.stack([one.aleatoric for one in self.each], -1))
    epistemic = cached_property(lambda self: torch.stack([one.epistemic for one in self.each], -1))

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Quantiles of each target, (len(q), B, T)."""
        self._need("targets", "quantile")
        return torch.stack([one.quantile(q) for one in self.each], -1)

    def crps(self, y: Tensor) -> Tensor:
        """The CRPS of each target, (B, T); y: (B, T)."""
        self._need("targets", "crps")
        return torch.stack([one.crps(y[:, k]) for k, one in enumerate(self.each)], -1)


MIXTURES[dist.Independent] = SeveralMixture


class Several(Likelihood):
    """T targets, each with the likelihood ``one``, and separate units, noise and outputs of the network.

    one: the likelihood of a target with shift 0 and scale 1, which is modified.   shift, scale: (T,), of the targets.
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

    initial = property(lambda self: self.one.initial)

    def components(self, f: Tensor) -> dist.Independent:
        """See ``Likelihood``; event shape (T,)."""
        return self.one.components(f.unflatten(-1, (self.num, self.one.outputs))).to_event(1)

    def fitted_noise(self, error: Tensor) -> dict[str, Tensor]:
        """See ``Likelihood``; error: (T,)."""
        return self.one.fitted_noise(error)


class AutoregressiveNormal(dist.TorchDistribution):
    """Normal(loc, (AᵀA)⁻¹) of T numbers, as the product of factors p(y_t | y_1 … y_{t−1}), batch shape (…, T).

    loc (…, T)    rows (…, T, T): the rows of A, which is lower triangular with a positive diagonal

    ``log_prob`` has one number per factor, whose sum is the log joint density. Mean, variance and draws are of the y_t.
    """

    arg_constraints = {"loc": dist.constraints.real, "rows": dist.constraints.real_vector}  # noqa: RUF012
    support, has_rsample = dist.constraints.real, True

    def __init__(self, loc: Tensor, rows: Tensor, validate_args: bool | None = None) -> None:
        shape = torch.broadcast_shapes(loc.shape, rows.shape[:-1])
        self.loc, self.rows = loc.expand(shape), rows.expand(*shape, loc.shape[-1])
        super().__init__(shape, validate_args=False)

    #: Marginal moments of each number, (…, T).
    mean = property(lambda self: self.loc)
    variance = property(lambda self: self.root.square().sum(-1))

    @property
    def root(self) -> Tensor:
        """A⁻¹ (…, T, T), a root of the covariance."""
        return torch.linalg.solve_triangular(self.rows, torch.eye(self.rows.shape[-1]).to(self.rows), upper=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y_t | y_1 … y_{t−1}), (…, T), nats."""
        z = (self.rows * (value - self.loc).unsqueeze(-2)).sum(-1)
        return self.rows.diagonal(dim1=-2, dim2=-1).log() - 0.5 * (z.square() + math.log(2 * math.pi))

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws (*sample_shape, …, T)."""
        noise = self.loc.new_empty(self._extended_shape(torch.Size(sample_shape))).normal_()
        return self.loc + (self.root @ noise.unsqueeze(-1)).squeeze(-1)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> Self:
        """See ``torch.distributions.Distribution``."""
        return type(self)(self.loc.expand(batch_shape), self.rows)


class CorrelatedMixture(SeveralMixture):
    """Mixture for targets with correlated noise; a single target has Normal noise."""

    def _one(self, k: int) -> Mixture:
        return self.one(dist.Normal(self.components.mean[..., k], self.components.stddev[..., k]))

    @property
    def noise_correlation(self) -> Tensor:
        """Correlations of the noise of the targets, (T, T), averaged over the draws."""
        root = torch.nn.functional.normalize(self.components.root[:, 0], dim=-1)
        return (root @ root.mT).mean(0)


class CorrelatedNoise(Likelihood):
    """y = shift + scale·f + noise, f (…, B, T), where the noise of T numbers has a learned full covariance for all x.

    In units of ``scale`` (T,) the noise is e_t = Σ_{s<t} b_ts e_s + σ_t ε_t, ε standard Normal, with the latent sites
    "log_noise" (T,), log σ_t ~ Normal(-1, 1), and "noise_slopes" (T(T−1)/2,), b_ts ~ Normal(0, 1): the modified
    Cholesky decomposition of Pourahmadi 1999, Biometrika 86:677-690.
    """

    event_dim = 1
    mixture = partial(CorrelatedMixture, one=NormalMixture)

    def __init__(self, shift: Sequence[float], scale: Sequence[float]) -> None:
        super().__init__()
        self.outputs = num = len(shift)
        lower = torch.tril_indices(num, num, -1)
        place = torch.nn.functional.one_hot(lower[0] * num + lower[1], num * num).float()
        for name, value in (("shift", torch.tensor(shift)), ("scale", torch.tensor(scale)), ("place", place)):
            self.register_buffer(name, value, persistent=False)
        slopes = torch.zeros(lower.shape[1])
        self.add_own(log_noise=(torch.full((num,), -1.0), torch.ones(num)), noise_slopes=(slopes, slopes + 1))

    def components(self, f: Tensor) -> dist.Independent:
        """See ``Likelihood``; event shape (T,)."""
        log_noise, slopes = self.own("log_noise"), self.own("noise_slopes")
        lower = (slopes @ self.place.to(slopes.dtype)).unflatten(-1, (self.outputs, self.outputs))
        rows = (torch.eye(self.outputs).to(lower) - lower) * (-log_noise).exp().unsqueeze(-1) / self.scale
        return AutoregressiveNormal(self.shift + self.scale * f, rows).to_event(1)
