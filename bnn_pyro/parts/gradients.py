"""Draws of X A for a random matrix A, its variance and its KL, each with gradients of its own: few passes over A.

    LocalLinear      A ~ Normal(M, V)         V given
    FreeLinear       A ~ Normal(M, exp L)     and, with the layer's output, KL(A ‖ Normal(0, s)) at next to no cost
    DropoutLinear    A ~ Normal(M, α M²)
    LocalConv2d      A ~ Normal(M, V)         X ∗ A, a convolution with A as its kernels

With G the gradient of the output, std its standard deviation and R = G·ε / (2·std) the gradient of its variance (0
where that is 0, its symmetric derivative: there the output does not depend on V, or ε averages it away):

    dM = Xᵀ G      dV = (X²)ᵀ R      dX = G Mᵀ + 2·X·(R Vᵀ)

X (…, B, D); A (D, H), or (D + 1, H) with ``bias``: its last row is then the weights of a 1 that joins every row of X.
Output sample_shape + (…, B, H). A layer has many times more weights than activations of a mini-batch: so V is computed
again for the gradients, which are added to within the product that makes them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["DropoutLinear", "FreeLinear", "LocalConv2d", "LocalLinear", "kl_log_uniform", "kl_normal"]


class LocalLinear(torch.autograd.Function):
    """A ~ Normal(M, V)."""

    @staticmethod
    def forward(ctx, X: Tensor, M: Tensor, V: Tensor, bias: bool, sample_shape: torch.Size) -> Tensor:
        """A draw."""
        output, ratio = _draw(X, M, V, bias, sample_shape)
        ctx.save_for_backward(X, M, V, ratio)
        ctx.bias = bias
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, G: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for X, M, V."""
        X, M, V, ratio = ctx.saved_tensors
        needs = ctx.needs_input_grad
        G, R = _rows(G, ratio, X)
        d_X = _to_inputs(G, R, X, M, V, ctx.bias) if needs[0] else None
        d_M = _to_weights(X, G, torch.empty_like(M), ctx.bias) if needs[1] else None
        d_V = _to_weights(X.square(), R, torch.empty_like(V), ctx.bias) if needs[2] else None
        return d_X, d_M, d_V, None, None


class FreeLinear(torch.autograd.Function):
    """A ~ Normal(M, exp L), and KL(A ‖ Normal(0, s)) in nats.

    KL = ½ Σ ((V + M²)/s² − 1 − L) + Σ log s      dM += M/s²      dL = V·(dV + ½/s²) − ½
    """

    @staticmethod
    def forward(
        ctx, X: Tensor, M: Tensor, L: Tensor, s: Tensor, bias: bool, sample_shape: torch.Size
    ) -> tuple[Tensor, Tensor]:
        """A draw and the KL. s: () or (rows of A, 1)."""
        V = L.exp()
        output, ratio = _draw(X, M, V, bias, sample_shape)
        precision = s.square().reciprocal()
        squares = torch.linalg.vector_norm(M, dim=-1, keepdim=True).square_().add_(V.sum(-1, keepdim=True))
        scales = s.log().sum().mul_(M.numel() / s.numel())
        kl = squares.mul_(precision).sum().sub_(L.sum()).sub_(M.numel()).mul_(0.5).add_(scales)
        ctx.save_for_backward(X, M, L, ratio, precision)
        ctx.bias = bias
        return output, kl

    @staticmethod
    @once_differentiable
    def backward(ctx, G: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for X, M, L."""
        X, M, L, ratio, precision = ctx.saved_tensors
        G, R = _rows(G, ratio, X)
        V = L.exp() if ctx.needs_input_grad[0] else None
        d_X = None if V is None else _to_inputs(G, R, X, M, V, ctx.bias)
        d_M = _to_weights(X, G, M * (g * precision), ctx.bias, add=True)
        d_L = _to_weights(X.square(), R, torch.empty_like(L), ctx.bias)
        V = L.exp() if V is None else V  # not before X² has gone again: the first layer's is large
        return d_X, d_M, d_L.add_(0.5 * g * precision).mul_(V).sub_(0.5 * g), None, None, None


class DropoutLinear(torch.autograd.Function):
    """A ~ Normal(M, α M²).      dM += 2 α M dV      dα = Σ M² dV"""

    @staticmethod
    def forward(ctx, X: Tensor, M: Tensor, alpha: Tensor, bias: bool, sample_shape: torch.Size) -> Tensor:
        """A draw. alpha: broadcasts against M."""
        output, ratio = _draw(X, M, M.square().mul_(alpha), bias, sample_shape)
        ctx.save_for_backward(X, M, alpha, ratio)
        ctx.bias = bias
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, G: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for X, M, α."""
        X, M, alpha, ratio = ctx.saved_tensors
        G, R = _rows(G, ratio, X)
        d_X = _to_inputs(G, R, X, M, M.square().mul_(alpha), ctx.bias) if ctx.needs_input_grad[0] else None
        d_M = _to_weights(X.square(), R, torch.empty_like(M), ctx.bias).mul_(M)  # dV·M
        d_alpha = d_M.flatten().dot(M.flatten()) if alpha.dim() == 0 else (d_M * M).sum_to_size(alpha.shape)
        return d_X, _to_weights(X, G, d_M.mul_(2 * alpha), ctx.bias, add=True), d_alpha, None, None


def _draw(X: Tensor, M: Tensor, V: Tensor, bias: bool, sample_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """(draws of X A, ε / 2·std of each)."""
    rows, shape = X.reshape(-1, X.shape[-1]), X.shape[:-1] + M.shape[1:]
    variance = _product(rows.square(), V, bias).view(shape)
    return _add_noise(_product(rows, M, bias).view(shape), variance, sample_shape)


def _add_noise(mean: Tensor, variance: Tensor, sample_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """(draws mean + std·ε of shape sample_shape + mean's, ε / 2·std of each); both arguments are overwritten.

    The noise lies in memory as the variance does: mixed layouts of images cost ten times as much.
    """
    std, shape = variance.sqrt_(), mean.shape
    last = std.dim() == 4 and std.is_contiguous(memory_format=torch.channels_last)
    if last:
        shape = shape[:1] + shape[2:] + shape[1:2]
    ratio = torch.randn(sample_shape + shape, dtype=std.dtype, device=std.device)
    ratio = ratio.movedim(-1, -3) if last else ratio
    output = torch.addcmul(mean, std, ratio) if sample_shape else mean.addcmul_(std, ratio)
    zero = std == 0
    return output, ratio.div_(std.mul_(2)).masked_fill_(zero, 0.0)


def _product(rows: Tensor, A: Tensor, bias: bool) -> Tensor:
    """[rows 1] A."""
    return torch.addmm(A[-1], rows, A[:-1]) if bias else rows @ A


def _rows(G: Tensor, ratio: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    """(G, R) of the output's shape, without its leading sample_shape: many draws of one input add up."""
    R = G * ratio
    extra = G.dim() - X.dim()
    return (G.flatten(0, extra - 1).sum(0), R.flatten(0, extra - 1).sum(0)) if extra else (G, R)


def _to_inputs(G: Tensor, R: Tensor, X: Tensor, M: Tensor, V: Tensor, bias: bool) -> Tensor:
    """dX."""
    if bias:
        M, V = M[:-1], V[:-1]
    rows, G, R = (t.reshape(-1, t.shape[-1]) for t in (X, G, R))
    return (R @ V.mT).mul_(rows).mul_(2).addmm_(G, M.mT).view(X.shape)


def _to_weights(X: Tensor, G: Tensor, out: Tensor, bias: bool, add: bool = False) -> Tensor:
    """out, which becomes, or is added, [X 1]ᵀ G."""
    X, G = X.reshape(-1, X.shape[-1]), G.reshape(-1, G.shape[-1])
    out[: len(out) - bias].addmm_(X.mT, G, beta=1 if add else 0)
    if bias:
        out[-1] = G.sum(0).add_(out[-1]) if add else G.sum(0)
    return out


class LocalConv2d(torch.autograd.Function):
    """X ∗ A: two convolutions forward, two transposed ones back.

    X (B, C, H, W), A (C·kh·kw, out), or one row more, the biases; output sample_shape + (B, out, H', W'). With dM(G)
    and dX(G; M) the gradients of a convolution with weights M:

        dM = dM(G)      dV = dM(R) at X²      dX = dX(G; M) + 2·X·dX(R; V)
    """

    @staticmethod
    def forward(ctx, X: Tensor, M: Tensor, V: Tensor, geometry: tuple, sample_shape: torch.Size) -> Tensor:
        """A draw. geometry: shape (out, C, kh, kw) of the kernels, stride and padding (height, width)."""
        shape, stride, padding = geometry
        mean = F.conv2d(X, *_kernel(M, shape), stride=stride, padding=padding)
        variance = F.conv2d(X.square(), *_kernel(V, shape), stride=stride, padding=padding)
        # An algorithm that is not a plain sum may leave a 0 a little below it.
        output, ratio = _add_noise(mean, variance.clamp_min_(0), sample_shape)
        ctx.save_for_backward(X, M, V, ratio)
        ctx.geometry = geometry
        return output

    @staticmethod
    def backward(ctx, G: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for X, M, V."""
        X, M, V, ratio = ctx.saved_tensors
        G, R = _rows(G, ratio, X)
        needs = ctx.needs_input_grad
        d_X, d_M = _convolution_backward(G, X, M, ctx.geometry, needs[0])
        d_square, d_V = _convolution_backward(R, X.square(), V, ctx.geometry, needs[0])
        return d_X.addcmul_(X, d_square, value=2) if needs[0] else None, d_M, d_V, None, None


def _kernel(A: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """The joined weights (C·kh·kw + bias, out) as those of a convolution: (out, C, kh, kw) and (out) or None."""
    fan_in = shape[1] * shape[2] * shape[3]
    weight = A[:fan_in].mT.reshape(shape).contiguous(memory_format=torch.channels_last)
    return weight, A[fan_in] if len(A) > fan_in else None


def _convolution_backward(
    G: Tensor, X: Tensor, A: Tensor, geometry: tuple, to_inputs: bool
) -> tuple[Tensor | None, Tensor]:
    """Gradients of a convolution for its input and its joined weights."""
    shape, stride, padding = geometry
    weight, bias = _kernel(A, shape)
    biases, needs = None if bias is None else list(bias.shape), [to_inputs, True, bias is not None]
    d_X, d_weight, d_bias = torch.ops.aten.convolution_backward(
        G, X, weight, biases, stride, padding, (1, 1), False, (0, 0), 1, needs
    )
    rows = d_weight.flatten(1).mT
    return d_X, rows.contiguous() if bias is None else torch.cat([rows, d_bias[None]])


def kl_normal(
    mean: Tensor, variance: Tensor, log_variance: Tensor, prior_mean: Tensor | None, prior_scale: Tensor
) -> Tensor:
    """Σ KL(Normal(μ, V) ‖ Normal(m, s²)) in nats: ½ Σ ((V + (μ − m)²)/s² − 1 − log V) + Σ log s.

    mean, variance, log_variance: of one shape (D, H) or any other.   prior_mean, prior_scale: broadcast against it;
    None for a mean of 0.
    """
    gap = mean if prior_mean is None else mean - prior_mean
    each = (gap.square() + variance) / prior_scale.square() - 1 - log_variance
    return 0.5 * each.sum() + prior_scale.log().expand(mean.shape).sum()


K1, K2, K3 = 0.63576, 1.87320, 1.48695  # fitted by Molchanov et al. 2017


def kl_log_uniform(log_alpha: Tensor) -> Tensor:
    """KL(Normal(μ, αμ²) ‖ log-uniform) of one weight in nats, 0 at α = ∞; elementwise in log α.

    The approximation of Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369, equation 14: within 0.008 nats of the
    integral for α from 10⁻⁴ to 100.
    """
    return K1 * torch.sigmoid(log_alpha * -K3 - K2) + 0.5 * F.softplus(-log_alpha)
