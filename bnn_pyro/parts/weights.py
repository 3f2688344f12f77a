"""Distributions of one layer's weights, each a whole array at once, and the KLs between them.

    NormalWeights    wᵢ ~ Normal(μᵢ, σᵢ)        a free σ for every weight, given as σ
    FreeWeights      the same, given as log σ²   a parameter on the whole real line
    DropoutWeights   wᵢ ~ Normal(μᵢ, α μᵢ²)     Gaussian dropout of variance α as a posterior
    CentredNormal    wᵢ ~ Normal(0, s)          a prior, s one number or one a row
    LogUniform       p(w) ∝ ∏ 1/|wᵢ|            the prior that makes sense of dropout

Layers have millions of weights, and what a training step costs beside its matrix products is passes over such arrays:
hence closed forms with gradients of their own here, in terms of the variance, which is what a layer needs.

Gaussian dropout of variance α is a q whose noise is in proportion to the mean (Kingma, Salimans & Welling 2015,
arXiv:1506.02557, section 3); α is learned for a whole layer, for each input unit of it, or for each weight. Under the
log-uniform prior its KL depends on α alone, falls as α grows, and is known up to a constant: here by the
approximation of Molchanov, Ashukha & Vetrov 2017 (arXiv:1701.05369, equation 14), which for α from 10⁻⁴ to 100 lies
within 0.008 nats a weight of the integral, with the constant that makes it 0 at α = ∞. With a free σ the same prior
turns most weights into pure noise (α → ∞): sparse variational dropout.

The log-uniform prior is improper (it has no samples, and no evidence that an ELBO could bound: Hron et al. 2018,
arXiv:1807.01969), so an ELBO under it compares fits of one model and nothing else.
"""

from __future__ import annotations

import copy
from functools import cached_property

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import Normal, register_kl

from bnn_pyro.parts.local_linear import DropoutLinear, FreeLinear, LocalLinear
from bnn_pyro.parts.weight_kl import KLNormal, kl_log_uniform

__all__ = [
    "CentredNormal",
    "DropoutWeights",
    "FreeWeights",
    "KLNormal",
    "LogUniform",
    "NormalWeights",
    "kl_log_uniform",
    "log_alpha",
]


class _Weights(dist.TorchDistribution):
    """One event: the whole array. Its batch shape is () except in a plate of draws."""

    arg_constraints: dict = {}  # noqa: RUF012

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        """Reals, as one event."""
        return constraints.independent(constraints.real, len(self.event_shape))

    def linear(
        self, X: Tensor, bias: bool, sample_shape: torch.Size, prior_scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Draws of X A for A of this distribution, (D, H), by local reparametrization: see ``local_linear``.

        prior_scale: of a zero-mean Normal prior, () or (D, 1). The second is KL(A ‖ prior), or None where it is no
        cheaper here than by itself.
        """
        return LocalLinear.apply(X, self.mean, self.variance, bias, sample_shape), None

    def _flat(self, value: Tensor) -> Tensor:
        """(…, *event shape) -> (…, numbers)."""
        return value.flatten(value.dim() - len(self.event_shape)) if self.event_shape else value.unsqueeze(-1)


class _NormalArray(_Weights):
    """Independent Normals of any parametrisation: ``loc``, ``variance`` and ``log_variance``, all (*shape)."""

    has_rsample = True
    loc: Tensor
    variance: Tensor
    log_variance: Tensor

    @property
    def mean(self) -> Tensor:
        """The means, (*shape)."""
        return self.loc

    @property
    def scale(self) -> Tensor:
        """The standard deviations, (*shape)."""
        return self.variance.sqrt()

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> _NormalArray:
        """Independent copies."""
        new = copy.copy(self)
        new._batch_shape = torch.Size(batch_shape)
        return new

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Draws of shape sample_shape + batch_shape + event_shape."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        return torch.addcmul(self.loc, self.scale, torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of the whole array in nats."""
        return self._flat(Normal(self.loc, self.scale, validate_args=False).log_prob(value)).sum(-1)


class NormalWeights(_NormalArray):
    """Independent Normals. loc, scale: (*shape), event shape all of it."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self._scale = loc, scale
        super().__init__(torch.Size(), loc.shape, validate_args=False)

    @property
    def scale(self) -> Tensor:
        """The standard deviations, (*shape)."""
        return self._scale

    @property
    def variance(self) -> Tensor:
        """The variances, (*shape)."""
        return self._scale.square()

    @property
    def log_variance(self) -> Tensor:
        """log σ², (*shape)."""
        return 2 * self._scale.log()


class FreeWeights(_NormalArray):
    """Independent Normals. loc, log_variance: (*shape), event shape all of it."""

    def __init__(self, loc: Tensor, log_variance: Tensor) -> None:
        self.loc, self.log_variance = loc, log_variance
        super().__init__(torch.Size(), loc.shape, validate_args=False)

    @cached_property
    def variance(self) -> Tensor:
        """The variances, (*shape); once, where both the layer and the KL ask for them."""
        return self.log_variance.exp()

    def linear(
        self, X: Tensor, bias: bool, sample_shape: torch.Size, prior_scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Draws of X A, and the KL where the prior's scale is known."""
        output, kl = FreeLinear.apply(X, self.loc, self.log_variance, prior_scale, bias, sample_shape)
        return output, None if prior_scale is None else kl


class DropoutWeights(_NormalArray):
    """Normal(μ, α μ²). loc: (*shape); alpha: positive, broadcasts against loc."""

    def __init__(self, loc: Tensor, alpha: Tensor) -> None:
        self.loc, self.alpha = loc, alpha
        super().__init__(torch.Size(), loc.shape, validate_args=False)

    @property
    def variance(self) -> Tensor:
        """α μ², (*shape)."""
        return _DropoutVariance.apply(self.loc, self.alpha)

    @property
    def log_variance(self) -> Tensor:
        """log α μ², (*shape)."""
        return self.alpha.log() + self.loc.square().log()

    def linear(
        self, X: Tensor, bias: bool, sample_shape: torch.Size, prior_scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Draws of X A."""
        return DropoutLinear.apply(X, self.loc, self.alpha, bias, sample_shape), None


class _DropoutVariance(torch.autograd.Function):
    """V = α μ²      dμ = 2 α μ dV      dα = Σ μ² dV"""

    @staticmethod
    def forward(ctx, loc: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(loc, alpha)
        return loc.square().mul_(alpha)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        loc, alpha = ctx.saved_tensors
        g = g * loc
        d_alpha = g.flatten().dot(loc.flatten()) if alpha.dim() == 0 else (g * loc).sum_to_size(alpha.shape)
        return g.mul_(2 * alpha), d_alpha


class CentredNormal(_Weights):
    """w ~ Normal(0, scale). scale: broadcasts against shape, (D, 1) for one a row."""

    has_rsample = True

    def __init__(self, scale: Tensor, shape: torch.Size, batch_shape: torch.Size = torch.Size()) -> None:  # noqa: B008
        self.scale = scale
        super().__init__(batch_shape, shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Zeros, (*shape)."""
        return self.scale.new_zeros(()).expand(self.event_shape)

    @property
    def variance(self) -> Tensor:
        """(*shape)."""
        return self.scale.square().expand(self.event_shape)

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> CentredNormal:
        """Independent copies."""
        return CentredNormal(self.scale, self.event_shape, torch.Size(batch_shape))

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Draws of shape sample_shape + batch_shape + event_shape."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        return self.scale * torch.randn(shape, dtype=self.scale.dtype, device=self.scale.device)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of the whole array in nats."""
        return self._flat(Normal(0.0, self.scale, validate_args=False).log_prob(value)).sum(-1)


class LogUniform(_Weights):
    """p(w) ∝ ∏ 1/|wᵢ|: improper, so it has an unnormalised density and no samples."""

    def __init__(self, shape: torch.Size, batch_shape: torch.Size = torch.Size()) -> None:  # noqa: B008
        super().__init__(batch_shape, shape, validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> LogUniform:
        """Independent copies."""
        return LogUniform(self.event_shape, torch.Size(batch_shape))

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Refused: NotImplementedError."""
        raise NotImplementedError("the log-uniform prior is improper and has no samples")

    def log_prob(self, value: Tensor) -> Tensor:
        """−Σ log|w| in nats, up to the constant that an improper density does not have."""
        return -self._flat(value.abs().log()).sum(-1)


def log_alpha(q: _NormalArray) -> Tensor:
    """log α = log σ²/μ² of every weight; a mean of 0 counts as 10⁻⁸."""
    return q.log_variance - (q.loc.square() + 1e-16).log()


@register_kl(_NormalArray, _NormalArray)
def _kl_normals(q: _NormalArray, p: _NormalArray) -> Tensor:
    if q.event_shape != p.event_shape:
        raise ValueError(
            f"guide and model have weights of other shapes at one site: {tuple(q.event_shape)} and "
            f"{tuple(p.event_shape)}"
        )
    return KLNormal.apply(q.loc, q.variance, q.log_variance, p.loc, p.scale)


@register_kl(_NormalArray, CentredNormal)
def _kl_centred(q: _NormalArray, p: CentredNormal) -> Tensor:
    return KLNormal.apply(q.loc, q.variance, q.log_variance, None, p.scale)


@register_kl(_NormalArray, LogUniform)
def _kl_free(q: _NormalArray, p: LogUniform) -> Tensor:
    return kl_log_uniform(log_alpha(q)).sum()


@register_kl(DropoutWeights, LogUniform)
def _kl_dropout(q: DropoutWeights, p: LogUniform) -> Tensor:
    """By α itself: the means do not enter, and each α is shared by as many weights."""
    return kl_log_uniform(q.alpha.log()).sum() * (q.loc.numel() / q.alpha.numel())
