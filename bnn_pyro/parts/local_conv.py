"""Local reparametrization of a convolution: its output sampled position by position instead of its weights.

    W ~ Normal(M, V)        mean = X ∗ M        variance = X² ∗ V        pre-activation = mean + √variance · ε

Each position has exactly the distribution that sampled weights give it. **Not exact** is the rest: positions of one row
share their weights, so that under sampled weights they are correlated, and ε is drawn here for each of them by itself.
What looks at several positions (a pooling, the next layer) sees other joint noise, and an ELBO made of this layer is no
bound on the evidence of the network over its weights. The usual way to train such layers all the same: Molchanov,
Ashukha & Vetrov 2017 (arXiv:1701.05369, section 4.4), Shridhar, Laumann & Liwicki 2019 (arXiv:1901.02731).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor

from bnn_pyro.parts.local_layer import LocalLayer

__all__ = ["Conv2dLayer", "LocalConv2d"]

Pair = tuple[int, int]


class Conv2dLayer(LocalLayer):
    """The output of a Bayesian convolution: X (…, B, C, H, W) to non_linearity of (…, B, out, H', W').

    weights: of event shape (C·kh·kw, out), or (C·kh·kw + 1, out) whose last row are the biases.
    kernel_size, stride, padding: (height, width) of each, as ``nn.Conv2d`` has them.
    non_linearity: of (…, out, H', W'), may change these three dimensions; the event shape is what it makes of them.

    Raises ValueError where the shapes do not fit.
    """

    def __init__(
        self,
        X: Tensor,
        weights: dist.TorchDistribution,
        kernel_size: Pair,
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        non_linearity: Callable[[Tensor], Tensor] | None = None,
        KL_factor: float = 1.0,
    ) -> None:
        rows, out = weights.event_shape
        fan_in = X.shape[-3] * kernel_size[0] * kernel_size[1] if X.dim() > 3 else -1
        if rows not in (fan_in, fan_in + 1):
            raise ValueError(
                f"X must be (…, B, C, H, W) with C·{kernel_size[0]}·{kernel_size[1]} = {rows}, or one less with a "
                f"bias, for these weights; got {tuple(X.shape)}"
            )
        size = zip(X.shape[-2:], padding, kernel_size, stride, strict=True)
        height, width = (1 + (n + 2 * p - k) // s for n, p, k, s in size)
        if min(height, width) < 1:
            raise ValueError(f"a kernel of {kernel_size} does not fit into {tuple(X.shape[-2:])}, padding {padding}")
        self.geometry = (out, X.shape[-3], *kernel_size), stride, padding
        event_shape = _shape_after(non_linearity, (out, height, width))
        super().__init__(X, weights, event_shape, 3, non_linearity, KL_factor)

    def pre_activation(self, sample_shape: torch.Size) -> Tensor:
        """Draws of X ∗ W, sample_shape + (…, B, out, H', W')."""
        X = self.X.flatten(0, -4)
        sampled = LocalConv2d.apply(X, self.weights.mean, self.weights.variance, self.geometry, sample_shape)
        return sampled.unflatten(len(sample_shape), self.batch_shape)


@lru_cache(maxsize=256)
def _shape_after(non_linearity: Callable[[Tensor], Tensor] | None, shape: tuple[int, ...]) -> torch.Size:
    """The shape of one row's activations, without computing any."""
    if non_linearity is None:
        return torch.Size(shape)
    return non_linearity(torch.empty(1, *shape, device="meta")).shape[1:]


class LocalConv2d(torch.autograd.Function):
    """Pre-activations mean + √variance·ε and their gradients: two convolutions forward, two transposed ones back.

    With G the gradient of the output and R = G·ε/√variance (0 where that is 0, its symmetric derivative: see
    ``LocalLinear``), and dM(G), dX(G; M) the gradients of a convolution with weights M:

        dM = dM(G)      dV = ½ dM(R) at X²      dX = dX(G; M) + X·dX(R; V)

    Kept for it are the inputs and ε/√variance, one number for every number of the output.
    """

    @staticmethod
    def forward(
        ctx, X: Tensor, A_mean: Tensor, A_variance: Tensor, geometry: tuple, sample_shape: torch.Size
    ) -> Tensor:
        """Sample; X (B, C, H, W), A_mean and A_variance (C·kh·kw + bias, out), output sample_shape + (B, out, …)."""
        shape, stride, padding = geometry
        mean = F.conv2d(X, *_kernel(A_mean, shape), stride=stride, padding=padding)
        std = F.conv2d(X.square(), *_kernel(A_variance, shape), stride=stride, padding=padding)
        std.clamp_min_(0).sqrt_()  # an algorithm that is not a plain sum may leave a 0 a little below it
        ratio = _noise(std, sample_shape)
        output = torch.addcmul(mean, std, ratio) if sample_shape else mean.addcmul_(std, ratio)
        ratio.div_(std).nan_to_num_(0.0, 0.0, 0.0)
        ctx.save_for_backward(X, A_mean, A_variance, ratio)
        ctx.geometry, ctx.extra = geometry, len(sample_shape)
        return output

    @staticmethod
    def backward(ctx, G: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for X, A_mean, A_variance."""
        X, A_mean, A_variance, ratio = ctx.saved_tensors
        R = G * ratio
        if ctx.extra:  # many draws of one input: their gradients add
            G, R = G.flatten(0, ctx.extra - 1).sum(0), R.flatten(0, ctx.extra - 1).sum(0)
        needs = ctx.needs_input_grad
        d_X, d_mean = _backward(G, X, A_mean, ctx.geometry, needs[0], needs[1])
        d_square, d_variance = _backward(R, X.square(), A_variance, ctx.geometry, needs[0], needs[2])
        d_X = d_X.addcmul_(X, d_square) if needs[0] else None
        d_variance = d_variance.mul_(0.5) if needs[2] else None
        return d_X, d_mean, d_variance, None, None


def _kernel(A: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """The joined weights (C·kh·kw + bias, out) as those of a convolution: (out, C, kh, kw) and (out) or None."""
    fan_in = shape[1] * shape[2] * shape[3]
    weight = A[:fan_in].mT.reshape(shape).contiguous(memory_format=torch.channels_last)
    return weight, A[fan_in] if len(A) > fan_in else None


def _noise(like: Tensor, sample_shape: torch.Size) -> Tensor:
    """Standard Normals of shape sample_shape + like's, laid out in memory as it is: mixed layouts cost ten times."""
    B, C, H, W = like.shape
    last = like.is_contiguous(memory_format=torch.channels_last)
    shape = (*sample_shape, B, H, W, C) if last else (*sample_shape, B, C, H, W)
    noise = torch.randn(shape, dtype=like.dtype, device=like.device)
    return noise.movedim(-1, -3) if last else noise


def _backward(
    G: Tensor, X: Tensor, A: Tensor, geometry: tuple, to_input: bool, to_weights: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a convolution for its input and its joined weights."""
    shape, stride, padding = geometry
    weight, bias = _kernel(A, shape)
    has_bias = bias is not None
    d_X, d_weight, d_bias = torch.ops.aten.convolution_backward(
        G, X, weight, list(bias.shape) if has_bias else None, stride, padding, (1, 1), False, (0, 0), 1,
        [to_input, to_weights, to_weights and has_bias],
    )  # fmt: skip
    if not to_weights:
        return d_X, None
    rows = d_weight.flatten(1).mT
    return d_X, torch.cat([rows, d_bias[None]]) if has_bias else rows.contiguous()
