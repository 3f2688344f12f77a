"""The small convolutional network, with weights that may carry draws: a plain ``nn.Module`` as those of ``nets``.

Activations are laid out channels-last (B, H, W, C in memory, whatever the shape says): pooling and the noise of
``local_conv`` are several times faster there on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnn_pyro.errors import UserError, unknown
from bnn_pyro.parts.nets import ACTIVATIONS, Linear, Stage, dropout_rate

__all__ = ["ConvNet", "check_convolutions"]


class ConvNet(nn.Module):
    """Convolutions, each followed by 2 × 2 max-pooling and the activation, then fully connected layers.

    input_shape: (channels, height, width).   channels: of each convolution, one or more.
    hidden: widths of the layers after them.   outputs: width of the last layer.   activation: a key of ``ACTIVATIONS``.
    bias: in every layer, or in none.   kernel, padding: of every convolution, in pixels.
    dropout: share of the inputs of every fully connected layer that is removed in training mode, as in ``nets.MLP``.

    Raises UserError for inputs that are no images, or images that are too small for it; for an unknown activation.
    """

    takes_draws = True

    def __init__(
        self,
        input_shape: Sequence[int],
        channels: Sequence[int],
        hidden: Sequence[int],
        outputs: int,
        activation: str = "relu",
        bias: bool = True,
        kernel: int = 3,
        padding: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.rate = dropout_rate(dropout)
        if activation not in ACTIVATIONS:
            raise unknown("activation", activation, ACTIVATIONS)
        if len(input_shape) != 3:
            raise UserError(
                f"a convolutional network takes images of shape (channels, height, width), and these inputs have shape "
                f"{tuple(input_shape)}; take a fully connected variant, such as hidden-layer"
            )
        self.activation = ACTIVATIONS[activation]
        sizes = [tuple(input_shape[1:])]  # of the image before each convolution, and after the last pooling
        self.width = 0
        for out in channels:
            inner = [n + 2 * padding - kernel + 1 for n in sizes[-1]]
            self.width = max(self.width, out * inner[0] * inner[1])
            sizes.append((inner[0] // 2, inner[1] // 2))
            if min(sizes[-1]) < 1:
                raise UserError(
                    f"images of {sizes[0][0]} × {sizes[0][1]} pixels are too small for {len(channels)} convolutions "
                    f"(kernel {kernel}, padding {padding}), each followed by 2 × 2 pooling; take fewer channels, a "
                    "smaller kernel or more padding"
                )
        self.convolutions = nn.ModuleList(
            nn.Conv2d(i, o, kernel, padding=padding, bias=bias) for i, o in pairwise([input_shape[0], *channels])
        )
        pixels = sizes[-1][0] * sizes[-1][1]
        widths = [([input_shape[0], *channels][-1]) * pixels, *hidden, outputs]
        self.layers = nn.ModuleList(Linear(i, o, bias=bias) for i, o in pairwise(widths))
        self.width = max(self.width, *widths)

    def enter(self, x: Tensor) -> Tensor:
        """What the first layer takes: the same (…, B, C, H, W), channels last in memory."""
        return x.movedim(-3, -1).clone(memory_format=torch.contiguous_format).movedim(-1, -3)

    def _pool(self, x: Tensor) -> Tensor:
        """(…, C, H, W) -> (…, C, H/2, W/2). Pooled first, the activation has a quarter of the numbers to map."""
        pooled = F.max_pool2d(x.flatten(0, -4), 2)
        return self.activation(pooled).unflatten(0, x.shape[:-3])

    def _pool_flat(self, x: Tensor) -> Tensor:
        """(…, C, H, W) -> (…, C·H/2·W/2)."""
        return self._pool(x).flatten(-3)

    def stages(self) -> list[Stage]:
        """The network as a chain: (name, layer, what follows it), in order."""
        last = len(self.convolutions) - 1
        first = [
            (f"convolutions.{i}", layer, self._pool_flat if i == last else self._pool)
            for i, layer in enumerate(self.convolutions)
        ]
        last = len(self.layers) - 1
        rest = [(f"layers.{i}", layer, None if i == last else self.activation) for i, layer in enumerate(self.layers)]
        return first + rest

    def features(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> what the last layer takes: (B, F), or (S, B, F) where weights or x carry S draws."""
        x = self.enter(x)
        weights = [(layer.weight, layer.bias) for layer in self.convolutions]
        lead = torch.broadcast_shapes(x.shape[:-4], *(W.shape[:-4] for W, _ in weights))
        inputs = repeat(x) if x.dim() == 4 else _per_draw(x, 4, lead)
        # One draw at a time through all convolutions, while what they hand on is in the cache: twice as fast on a CPU
        # as one layer at a time, grouped convolutions included (one for all draws; S times the channels).
        each = [zip(_per_draw(W, 4, lead), _per_draw(b, 1, lead), strict=True) for W, b in weights]
        drawn = [self._convolve(one, w) for one, w in zip(inputs, zip(*each, strict=True), strict=False)]
        x = torch.stack(drawn).unflatten(0, lead) if lead else drawn[0]
        for layer in self.layers[:-1]:
            x = self.activation(layer(self._drop(x)))
        return self._drop(x)

    def forward(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> (B, outputs), or (S, B, outputs) where weights or x carry S draws."""
        return self.layers[-1](self.features(x))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rate) if self.training and self.rate else x

    def _convolve(self, x: Tensor, weights: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
        """(B, C, H, W) -> (B, features) by one draw of the weights."""
        for layer, (W, b) in zip(self.convolutions, weights, strict=True):
            x = self._pool(F.conv2d(x, W, b, layer.stride, layer.padding))
        return x.flatten(-3)


def _per_draw(x: Tensor | None, dims: int, lead: torch.Size) -> Sequence[Tensor | None]:
    """(…, its own dims) as one tensor for each draw, the leading dimensions broadcast to ``lead``."""
    if x is None:
        return [None] * lead.numel()
    own = x.shape[x.dim() - dims :]
    return x.expand(lead + own).reshape(-1, *own).unbind()


def check_convolutions(channels: Sequence[int], kernel: int, padding: int) -> None:
    """Raise UserError where there is no convolution, or the padding is not smaller than the kernel."""
    if not channels:
        raise UserError("channels: one or more numbers, got none; for a network without convolutions take mlp")
    if not 0 <= padding < kernel:
        raise UserError(f"padding must lie between 0 and less than the kernel of {kernel}, got {padding}")
