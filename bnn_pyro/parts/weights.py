"""Distributions of one layer's weights, each a whole array at once, and the KLs between them.

    NormalWeights    wᵢ ~ Normal(μᵢ, σᵢ)        a free σ for every weight; also the Normal priors
    DropoutWeights   wᵢ ~ Normal(μᵢ, α μᵢ²)     Gaussian dropout of variance α as a posterior
    LogUniform       p(w) ∝ ∏ 1/|wᵢ|            the prior that makes sense of dropout

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

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import Independent, Normal, register_kl

__all__ = ["DropoutWeights", "KLNormal", "LogUniform", "NormalWeights", "kl_log_uniform", "log_alpha"]


class _Weights(dist.TorchDistribution):
    """One event: the whole array. Its batch shape is () except in a plate of draws."""

    arg_constraints: dict = {}  # noqa: RUF012

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        """Reals, as one event."""
        return constraints.independent(constraints.real, len(self.event_shape))

    def _flat(self, value: Tensor) -> Tensor:
        """(…, *event shape) -> (…, numbers)."""
        return value.flatten(value.dim() - len(self.event_shape)) if self.event_shape else value.unsqueeze(-1)


class NormalWeights(_Weights):
    """Independent Normals. loc, scale: (*shape), event shape all of it."""

    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, batch_shape: torch.Size = torch.Size()) -> None:  # noqa: B008
        self.loc, self.scale = loc, scale
        super().__init__(batch_shape, loc.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """The means, (*shape)."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """The variances, (*shape)."""
        return self.scale.square()

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> NormalWeights:
        """Independent copies."""
        return NormalWeights(self.loc, self.scale, torch.Size(batch_shape))

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Draws of shape sample_shape + batch_shape + event_shape."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        return torch.addcmul(self.loc, self.scale, torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of the whole array in nats."""
        return self._flat(Normal(self.loc, self.scale, validate_args=False).log_prob(value)).sum(-1)


class DropoutWeights(NormalWeights):
    """Normal(μ, α μ²). loc: (*shape); alpha: positive, broadcasts against loc."""

    def __init__(self, loc: Tensor, alpha: Tensor, batch_shape: torch.Size = torch.Size()) -> None:  # noqa: B008
        self.loc, self.alpha = loc, alpha
        dist.TorchDistribution.__init__(self, batch_shape, loc.shape, validate_args=False)

    @property
    def scale(self) -> Tensor:
        """√α |μ|, (*shape)."""
        return self.alpha.sqrt() * self.loc.abs()

    @property
    def variance(self) -> Tensor:
        """α μ², (*shape), without a square root whose gradient the square would undo."""
        return self.alpha * self.loc.square()

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> DropoutWeights:
        """Independent copies."""
        return DropoutWeights(self.loc, self.alpha, torch.Size(batch_shape))


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


def kl_log_uniform(log_alpha: Tensor) -> Tensor:
    """KL(Normal(μ, αμ²) ‖ log-uniform) of one weight in nats, 0 at α = ∞; elementwise in log α."""
    k1, k2, k3 = 0.63576, 1.87320, 1.48695
    return k1 * torch.sigmoid(-k2 - k3 * log_alpha) + 0.5 * F.softplus(-log_alpha)


def log_alpha(loc: Tensor, scale: Tensor) -> Tensor:
    """log α = log σ²/μ²; a mean of 0 counts as 10⁻⁸."""
    return 2 * scale.log() - (loc.square() + 1e-16).log()


class KLNormal(torch.autograd.Function):
    """Σ KL(Normal(μ, σ) ‖ Normal(m, s)) in nats and its gradients, in as few passes over the weights as there can be.

        KL = ½((σ² + (μ − m)²)/s² − 1) − log σ + log s      dμ = (μ − m)/s²      dσ = σ/s² − 1/σ

    μ and σ have one shape, m and s broadcast against it.
    """

    @staticmethod
    def forward(ctx, mean: Tensor, scale: Tensor, prior_mean: Tensor, prior_scale: Tensor) -> Tensor:
        """A scalar."""
        ctx.save_for_backward(mean, scale, prior_mean, prior_scale)
        gap, ratio = ((mean - prior_mean) / prior_scale).flatten(), (scale / prior_scale).flatten()
        return 0.5 * (ratio.dot(ratio) + gap.dot(gap) - ratio.numel()) - ratio.log_().sum()

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for the four."""
        mean, scale, prior_mean, prior_scale = ctx.saved_tensors
        needs, precision = ctx.needs_input_grad, g / prior_scale.square()
        d_mean = (mean - prior_mean).mul_(precision) if needs[0] or needs[2] else None
        d_scale = torch.addcdiv(scale * precision, -g, scale) if needs[1] else None
        d_prior_mean = -d_mean.sum_to_size(prior_mean.shape) if needs[2] else None
        d_prior_scale = None
        if needs[3]:
            squares = (scale.square() + (mean - prior_mean).square()) / prior_scale.square()
            d_prior_scale = (g * (1 - squares) / prior_scale).sum_to_size(prior_scale.shape)
        return d_mean, d_scale, d_prior_mean, d_prior_scale


@register_kl(NormalWeights, NormalWeights)
def _kl_normals(q: NormalWeights, p: NormalWeights) -> Tensor:
    if q.event_shape != p.event_shape:
        raise ValueError(
            f"guide and model have weights of other shapes at one site: {tuple(q.event_shape)} and "
            f"{tuple(p.event_shape)}"
        )
    return KLNormal.apply(q.loc, q.scale, p.loc, p.scale)


@register_kl(NormalWeights, LogUniform)
def _kl_free(q: NormalWeights, p: LogUniform) -> Tensor:
    return kl_log_uniform(log_alpha(q.loc, q.scale)).sum()


@register_kl(DropoutWeights, LogUniform)
def _kl_dropout(q: DropoutWeights, p: LogUniform) -> Tensor:
    """By α itself: the means do not enter, and each α is shared by as many weights."""
    return kl_log_uniform(q.alpha.log()).sum() * (q.loc.numel() / q.alpha.numel())


@register_kl(Independent, LogUniform)
def _kl_independent(q: Independent, p: LogUniform) -> Tensor:
    if not isinstance(q.base_dist, Normal) or q.event_shape != p.event_shape:
        raise NotImplementedError
    return p._flat(kl_log_uniform(log_alpha(q.base_dist.loc, q.base_dist.scale))).sum(-1)
