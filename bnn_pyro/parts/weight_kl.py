"""KLs of a layer's weights in closed form, with gradients of their own, in as few passes over the weights as can be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["KLNormal", "kl_log_uniform"]


class KLNormal(torch.autograd.Function):
    """Σ KL(Normal(μ, V) ‖ Normal(m, s²)) in nats and its gradients, in as few passes over the weights as there can be.

        KL = ½ Σ ((V + (μ − m)²)/s² − 1 − log V) + Σ log s      dμ = (μ − m)/s²      dV = ½/s²      d log V = −½

    mean, variance, log_variance: of one shape (D, H) or any other; the two gradients of V add up where both are made
    of one parameter.   prior_mean, prior_scale: broadcast against it; None for a mean of 0.
    """

    @staticmethod
    def forward(
        ctx, mean: Tensor, variance: Tensor, log_variance: Tensor, prior_mean: Tensor | None, prior_scale: Tensor
    ) -> Tensor:
        """A scalar."""
        gap = mean if prior_mean is None else mean - prior_mean
        ctx.save_for_backward(gap, variance, prior_scale)
        ctx.prior_mean_shape = None if prior_mean is None else prior_mean.shape
        precision = prior_scale.square().reciprocal()
        squares = torch.linalg.vector_norm(gap, dim=-1, keepdim=True).square_() + variance.sum(-1, keepdim=True)
        if prior_scale.dim() and prior_scale.shape[-1] > 1:  # a scale for every weight: no sum over a row before it
            squares = gap.square() + variance
        log_scale = prior_scale.log().expand(mean.shape).sum()
        return 0.5 * ((squares * precision).sum() - mean.numel() - log_variance.sum()) + log_scale

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for the five."""
        gap, variance, prior_scale = ctx.saved_tensors
        needs, precision = ctx.needs_input_grad, g / prior_scale.square()
        d_mean = gap * precision if needs[0] or needs[3] else None
        d_variance = (0.5 * precision).expand(gap.shape) if needs[1] else None
        d_log_variance = (-0.5 * g).expand(gap.shape) if needs[2] else None
        d_prior_mean = -d_mean.sum_to_size(ctx.prior_mean_shape) if needs[3] else None
        d_prior_scale = None
        if needs[4]:
            squares = (variance + gap.square()) / prior_scale.square()
            d_prior_scale = (g * (1 - squares) / prior_scale).sum_to_size(prior_scale.shape)
        return d_mean, d_variance, d_log_variance, d_prior_mean, d_prior_scale


K1, K2, K3 = 0.63576, 1.87320, 1.48695  # fitted by Molchanov et al. 2017


class _KLLogUniform(torch.autograd.Function):
    """k₁ sigmoid(−k₂ − k₃ a) + ½ softplus(−a), a = log α      da = −k₁ k₃ s (1 − s) − ½ sigmoid(−a)"""

    @staticmethod
    def forward(ctx, log_alpha: Tensor) -> Tensor:
        s = torch.sigmoid(log_alpha * -K3 - K2)
        if ctx.needs_input_grad[0]:
            d = torch.sigmoid(-log_alpha).mul_(-0.5).sub_((s - s * s).mul_(K1 * K3))
            ctx.save_for_backward(d)
        return s.mul_(K1).add_(F.softplus(-log_alpha), alpha=0.5)

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


def kl_log_uniform(log_alpha: Tensor) -> Tensor:
    """KL(Normal(μ, αμ²) ‖ log-uniform) of one weight in nats, 0 at α = ∞; elementwise in log α."""
    return _KLLogUniform.apply(log_alpha)
