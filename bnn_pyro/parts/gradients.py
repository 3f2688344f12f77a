"""Draws of X A for a random matrix A with a mean and a variance, with gradients that need few passes over A.

    local_linear     A ~ Normal(M, V)             draws of X A
    FreeLinear       A ~ Normal(M, exp L)         draws of X A, and KL(A ‖ Normal(0, s)) at little extra cost
    local_conv2d     A ~ Normal(M, V)             draws of X ∗ A, a convolution with A as its kernels
    DrawNormals      A ~ Normal(M, softplus ρ)    draws of A itself for many layers, and the sums for its KL

G is the gradient of the output, std the output's standard deviation, and R = G·ε / (2·std) the gradient of its
variance. Where std is 0, R is set to 0: there the output does not depend on V, or the expectation over ε is 0.

    dM = Xᵀ G      dV = (X²)ᵀ R      dX = G Mᵀ + 2·X·(R Vᵀ)

X (…, B, D); A (D, H), or (D + 1, H) with ``bias``, whose last row is added to the product. The output has the shape
sample_shape + (…, B, H). The backward pass of ``FreeLinear`` computes V again, to save memory, and adds in place.
"""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from threading import Thread

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def local_linear(X: Tensor, M: Tensor, V: Tensor, bias: bool, sample_shape: torch.Size) -> Tensor:
    """Draws of X A, A ~ Normal(M, V)."""
    return _Noisy.apply(*_moments(X, M, V, bias), sample_shape)


def local_conv2d(X: Tensor, M: Tensor, V: Tensor, geometry: tuple, sample_shape: torch.Size) -> Tensor:
    """Draws of X ∗ A, sample_shape + (B, out, H', W'), A ~ Normal(M, V), with independent noise at each position.

    X: (B, C, H, W).   M, V: (C·kh·kw, out), or one more row with biases.   geometry: (out, C, kh, kw), stride, padding.
    """
    shape, stride, padding = geometry
    mean = F.conv2d(X, *_kernel(M, shape), stride=stride, padding=padding)
    return _Noisy.apply(mean, F.conv2d(X.square(), *_kernel(V, shape), stride=stride, padding=padding), sample_shape)


class _Noisy(torch.autograd.Function):
    """mean + √variance · ε, of shape sample_shape + mean.shape; both arguments are overwritten."""

    @staticmethod
    def forward(ctx, mean: Tensor, variance: Tensor, sample_shape: torch.Size) -> Tensor:
        output, ratio = _add_noise(mean, variance, sample_shape)
        ctx.save_for_backward(ratio)
        ctx.shape = mean.shape
        if output is mean:
            ctx.mark_dirty(mean)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, G: Tensor) -> tuple[Tensor | None, ...]:
        return G.sum_to_size(ctx.shape), (G * ctx.saved_tensors[0]).sum_to_size(ctx.shape), None


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
        output, ratio = _add_noise(*_moments(X, M, V, bias), sample_shape)
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
        shape, weights = X.shape[:-1] + G.shape[-1:], slice(len(M) - ctx.bias)
        rows = X.reshape(-1, X.shape[-1])  # with the sum over the draws of one input
        G, R = (t.sum_to_size(shape).reshape(-1, shape[-1]) for t in (G, G * ratio))
        V = L.exp() if ctx.needs_input_grad[0] else None
        d_X = None if V is None else (R @ V[weights].mT).mul_(rows).mul_(2).addmm_(G, M[weights].mT).view(X.shape)
        d_M = _to_weights(rows, G, M * (g * precision), ctx.bias, add=True)
        d_L = _to_weights(rows.square(), R, torch.empty_like(L), ctx.bias)
        V = L.exp() if V is None else V  # after X², which is large in the first layer, has been freed
        return d_X, d_M, d_L.add_(0.5 * g * precision).mul_(V).sub_(0.5 * g), None, None, None


def _moments(X: Tensor, M: Tensor, V: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """Mean and variance of X A."""
    rows, shape = X.reshape(-1, X.shape[-1]), X.shape[:-1] + M.shape[1:]
    return _product(rows, M, bias).view(shape), _product(rows.square(), V, bias).view(shape)


def _add_noise(mean: Tensor, variance: Tensor, sample_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """(mean + std·ε, ε / (2·std)), with ε in the memory format of the variance; both arguments are overwritten."""
    # Some convolution algorithms return slightly negative numbers for a variance of 0.
    std, shape = variance.clamp_min_(0).sqrt_(), mean.shape
    last = std.dim() == 4 and std.is_contiguous(memory_format=torch.channels_last)
    if last:
        shape = shape[:1] + shape[2:] + shape[1:2]
    ratio = torch.randn(sample_shape + shape, dtype=std.dtype, device=std.device)
    ratio = ratio.movedim(-1, -3) if last else ratio
    output = torch.addcmul(mean, std, ratio) if sample_shape else mean.addcmul_(std, ratio)
    return output, ratio.div_(std.mul_(2)).masked_fill_(std == 0, 0.0)


def _product(rows: Tensor, A: Tensor, bias: bool) -> Tensor:
    """[rows 1] A."""
    return torch.addmm(A[-1], rows, A[:-1]) if bias else rows @ A


def _to_weights(rows: Tensor, G: Tensor, out: Tensor, bias: bool, add: bool = False) -> Tensor:
    """Set ``out`` to [rows 1]ᵀ G, or add this to it."""
    out[: len(out) - bias].addmm_(rows.mT, G, beta=1 if add else 0)
    if bias:
        out[-1] = G.sum(0).add_(out[-1]) if add else G.sum(0)
    return out


def _kernel(A: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """The weight (out, C, kh, kw) and the bias (out) or None of a convolution from A (C·kh·kw + bias, out)."""
    fan_in = shape[1] * shape[2] * shape[3]
    weight = A[:fan_in].mT.reshape(shape).contiguous(memory_format=torch.channels_last)
    return weight, A[fan_in] if len(A) > fan_in else None


#: Count of numbers in a piece of an array, which fits into the processor's cache.
PIECE = 1 << 16


class DrawNormals(torch.autograd.Function):
    """w = μ + σ ε, σ = softplus(ρ), of many arrays; and Σ log σ and Σ (μ² + σ²) of each, for KL(w ‖ Normal(0, s)).

        dμ = dw + 2 b μ        dρ = (dw ε + a/σ + 2 b σ) · sigmoid(ρ)        a, b: the gradients of the two sums

    ``draw_normals.c`` computes this in pieces that fit into the processor's cache, in a quarter of the time of torch's
    operators. It has its own random generator, whose seed is drawn from torch's. The gradients overwrite σ and ε, so
    that only one backward pass is possible. σ and ε are written to the tensors ``spare`` (P,) if there are any, as
    memory that is new to a process is slow.
    """

    @staticmethod
    def forward(ctx, loc: Tensor, rho: Tensor, sizes: list[int], spare: list[Tensor]) -> tuple[Tensor, ...]:
        """(sums of log σ (arrays,), sums of squares (arrays,), a draw of each array). loc, rho: (P,) float32."""
        ctx.sizes = sizes
        ctx.set_materialize_grads(False)
        scale, noise = (spare.pop() if spare else torch.empty_like(loc) for _ in range(2))
        flats, table = (loc, rho, scale, noise), _pieces(PIECE, *sizes)
        draws = [torch.empty_like(part) for part in loc.split(sizes)]
        sums = torch.empty(len(table), 2, dtype=torch.float64)
        key = int(torch.empty((), dtype=torch.int64).random_())
        _call(compiled().draw, flats, draws, table, sums.data_ptr(), key)
        ctx.save_for_backward(*flats)
        return *sums.new_zeros(len(sizes), 2).index_add_(0, table[:, 0], sums).to(loc.dtype).unbind(1), *draws

    @staticmethod
    @once_differentiable
    def backward(ctx, of_logs: Tensor | None, of_squares: Tensor | None, *of_draws: Tensor | None) -> tuple:
        """The gradients of loc and rho.   Raises RuntimeError when called a second time."""
        sizes, ctx.sizes = ctx.sizes, None
        if sizes is None:
            raise RuntimeError("a draw of mean-field weights has one backward pass: differentiate the sum")
        loc, _, scale, noise = flats = ctx.saved_tensors
        table, widths = _pieces(PIECE, *sizes), [len(sizes), len(sizes), *sizes]
        gradients_given = zip(widths, (of_logs, of_squares, *of_draws), strict=True)
        a, b, *own = (loc.new_zeros(n) if one is None else one.contiguous() for n, one in gradients_given)
        _call(compiled().differentiate, flats, own, table, a.data_ptr(), b.data_ptr())
        return noise, scale, None, None


@lru_cache(8)
def _pieces(most: int, *sizes: int) -> Tensor:
    """(pieces, 4): the array of a piece, its start in all arrays together and in its own array, and its length."""
    starts = [0, *itertools.accumulate(sizes)]
    firsts = ((i, first) for i, size in enumerate(sizes) for first in range(0, size, most))
    return torch.tensor([(i, starts[i] + first, first, min(most, sizes[i] - first)) for i, first in firsts])


@cache
def compiled() -> ctypes.CDLL | None:
    """``draw_normals.c`` as a library; None if it cannot be compiled."""
    from bnn_pyro import c_code  # few fits need it

    try:
        library = c_code.load(Path(__file__).with_name("draw_normals.c").read_text())
    except c_code.NotCompiled:
        return None
    pointer, common = ctypes.c_void_p, [*[ctypes.c_void_p] * 6, *[ctypes.c_long] * 3]
    library.draw.argtypes = [*common, pointer, ctypes.c_uint64]
    library.differentiate.argtypes = [*common, pointer, pointer]
    library.draw.restype = library.differentiate.restype = None
    return library


def _call(function: Callable, flats: Sequence[Tensor], arrays: Sequence[Tensor], table: Tensor, *rest: int) -> None:
    """Process all pieces on as many threads as torch uses; C code called by ctypes does not hold Python's lock."""
    addresses = (ctypes.c_void_p * len(arrays))(*(array.data_ptr() for array in arrays))
    pointers = *(flat.data_ptr() for flat in flats), addresses, table.data_ptr()
    num = min(torch.get_num_threads(), len(table))
    own, *others = (partial(function, *pointers, first, num, len(table), *rest) for first in range(num))
    threads = []
    for other in others:
        try:
            (thread := Thread(target=other)).start()
            threads.append(thread)
        except RuntimeError:  # no thread can be started while the interpreter shuts down
            other()
    own()
    for thread in threads:
        thread.join()


K1, K2, K3 = 0.63576, 1.87320, 1.48695  # fitted by Molchanov et al. 2017


def kl_log_uniform(log_alpha: Tensor) -> Tensor:
    """KL(Normal(μ, αμ²) ‖ log-uniform) of one weight in nats, 0 at α = ∞; elementwise in log α.

    By Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369, equation 14: within 0.008 nats for α from 10⁻⁴ to 100.
    """
    return K1 * torch.sigmoid(log_alpha * -K3 - K2) + 0.5 * F.softplus(-log_alpha)
