"""Deterministic networks, which are plain ``nn.Module``s, and functions that call, describe and compare modules.

:class:`Linear` takes weights with leading draw dimensions (S, out, in) as well as one set (out, in), so that
``torch.func.functional_call`` runs many draws of an :class:`MLP` in one call. Activations of convolutions have the
channels-last memory format, in which pooling and the noise of local layers are several times faster on a CPU.
"""

import ctypes
import hashlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError, check_known, first_line

ACTIVATIONS = dict(relu=F.relu, tanh=torch.tanh, sigmoid=torch.sigmoid, leaky_relu=F.leaky_relu, gelu=F.gelu)

#: Bytes of free memory that glibc keeps, and of the largest block that it keeps (its limit is 32 MiB).
KEPT_MEMORY, KEPT_BLOCK = 256 << 20, 32 << 20

#: (name, layer, function applied to its output or None).
Stage = tuple[str, nn.Module, Callable[[Tensor], Tensor] | None]


@contextmanager
def in_mode(*modules: nn.Module, training: bool) -> Iterator[None]:
    """Set training or evaluation mode of every submodule, and restore the previous modes on exit."""
    changed = [part for module in modules for part in module.modules() if part.training != training]
    for part in changed:
        part.training = training
    try:
        yield
    finally:
        for part in changed:
            part.training = not training


@cache
def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next forward pass, as pages that are new to a process are slow.

    By default it may return all of it to the system after every pass. Settings of the user take precedence.
    """
    if sys.platform == "linux" and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        with suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-3, KEPT_BLOCK)  # M_MMAP_THRESHOLD
            mallopt(-1, KEPT_MEMORY)  # M_TRIM_THRESHOLD


@contextmanager
def users_code(context: str) -> Iterator[None]:
    """Convert exceptions in a user's code, except out-of-memory errors, to a UserError that begins with ``context``."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UserError(f"{context}: {first_line(error)}") from error


@contextmanager
def on_copy(x: Tensor, name: str) -> Iterator[Tensor]:
    """A copy of rows x for a pass through the network ``name``.   Raises UserError if the pass changes the copy."""
    rows = x.clone()
    yield rows
    if not torch.equal(rows, x):
        raise UserError(f"{name} changes its inputs in place; let it work on a copy (x = x.clone())")


@contextmanager
def outputs_seen(module: nn.Module, record: Callable[[str, object], None]) -> Iterator[None]:
    """Call ``seen(path, output)`` with what each submodule returns."""
    parts = module.named_modules()
    hooks = [part.register_forward_hook(lambda _, __, output, path=path: record(path, output)) for path, part in parts]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def with_weights(net: nn.Module, w: Mapping[str, Tensor], x: Tensor) -> Any:
    """The outputs for x with these weights and buffers; shared ones are given by the first of their names."""
    first: dict[int, str] = {}
    every: dict[str, Tensor] = {}  # one name per layer: functional_call with tied names would not restore all of them
    for path, part in net.named_modules():
        for key, value in (*part._parameters.items(), *part._buffers.items()):
            full = f"{path}.{key}".lstrip(".")
            if (name := first.setdefault(id(value), full)) in w:
                every[full] = w[name]
    return functional_call(net, every, (x,), tie_weights=False)


def blank_row(net: nn.Module, schema: Schema) -> Tensor:
    """Zeros (1, *input_shape). If the net fails for zeros as integer or bool inputs, as for lengths, these are 1."""
    zeros = torch.zeros(1, *schema.input_shape)
    if any(part.is_whole for part in schema.input_parts):
        with in_mode(net, training=False), torch.no_grad():
            try:
                net(zeros)
            except Exception:  # errors of the user's code are reported by a later pass with real rows
                are_whole = [p.is_whole or p.is_bool for p in schema.input_parts for _ in range(math.prod(p.shape))]
                return torch.tensor([are_whole], dtype=zeros.dtype)
    return zeros


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module's state_dict; quantised layers and ``get_extra_state`` add other objects to it."""
    return {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}


def weights_digest(net: nn.Module) -> str:
    """SHA-256 of a module's parameters and buffers, the first 16 hex digits."""
    digest = hashlib.sha256()
    for name, value in tensors_of(net).items():
        digest.update(name.encode() + _bytes(value))
    return digest.hexdigest()[:16]


def _bytes(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def constants(net: nn.Module) -> dict[str, str]:
    """{path: digest} of what is not in the state_dict: tensors, and plain numbers and texts of a user's classes."""
    digests, torchs = {}, vars(nn.Module())
    for path, part in net.named_modules():
        values = {key: value for key, value in vars(part).items() if key not in torchs}
        for key, value in (values | {key: part._buffers[key] for key in part._non_persistent_buffers_set}).items():
            plain = isinstance(value, Tensor) and not (isinstance(value, nn.Parameter) or value.is_meta)
            if plain and value.layout == torch.strided and not value.is_quantized:
                digests[f"{path}.{key}".lstrip(".")] = hashlib.sha256(_bytes(value)).hexdigest()[:16]
            elif isinstance(value, int | float | str) and key[0] != "_" and type(part).__module__[:6] != "torch.":
                digests[f"{path}.{key}".lstrip(".")] = hashlib.sha256(repr(value).encode()).hexdigest()[:16]
    return digests


def layers_digest(net: nn.Module) -> str:
    """SHA-256 of a module's layers as torch prints them, without addresses, the first 16 hex digits."""
    return hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", repr(net)).encode()).hexdigest()[:16]


def described(net: nn.Module) -> dict[str, str]:
    """The description that identifies a user's module: its class, and digests of its layers and its weights."""
    return {"kind": "module", "class": type(net).__name__, "layers": layers_digest(net), "weights": weights_digest(net)}


class Linear(nn.Linear):
    """y = x Wᵀ + b, for x (…, B, in) and W (out, in) or (S, out, in); b (out) or (S, out). Returns (…, B, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x, broadcasting over the draws' dimensions."""
        if self.weight.dim() == 2:
            return F.linear(x, self.weight, self.bias)
        y = self.weight @ x.mT  # with few outputs, as in a last layer, two to three times as fast as x @ Wᵀ
        return (y if self.bias is None else y.add_(self.bias.unsqueeze(-1))).mT


class _Net(nn.Module):
    """The fully connected layers at the end of every network, with dropout of their inputs in training mode.

    In training mode each input of a layer is 0 with probability rate, and divided by 1 − rate otherwise, with a
    separate mask for every row (Srivastava et al. 2014). A subclass has ``_to_layers(x)``: inputs of the first layer.
    exposure: whether the last column of x is an exposure, whose logarithm is added to the output.
    """

    exposure = False

    def __init__(self, activation: str) -> None:
        super().__init__()
        check_known("activation", ACTIVATIONS, activation)
        self.activation = ACTIVATIONS[activation]

    def _add_layers(self, widths: Sequence[int], bias: bool, rates: Sequence[float]) -> None:
        self.layers = nn.ModuleList(Linear(i, o, bias=bias) for i, o in pairwise(widths))
        self.rates = tuple(rates)

    def stages(self) -> list[Stage]:
        """The network as a chain: (name, layer, what follows it), in order. Dropout is not part of it."""
        last = len(self.layers) - 1
        return [(f"layers.{i}", layer, None if i == last else self.activation) for i, layer in enumerate(self.layers)]

    def features(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> inputs of the last layer (B, F), or (S, B, F) if weights or x have S draws."""
        x = self._to_layers(x)
        for layer, rate in zip(self.layers[:-1], self.rates[:-1], strict=True):
            x = self.activation(layer(self._drop(x, rate)))
        return self._drop(x, self.rates[-1])

    def forward(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> (B, outputs), or (S, B, outputs) if weights or x have S draws."""
        return self.add_exposure(self.layers[-1](self.features(x)), x)

    def add_exposure(self, f: Tensor, x: Tensor) -> Tensor:
        """The output f (…, B, outputs), plus log exposure if x has one."""
        return f + x[..., -1:].clamp_min(1e-30).log() if self.exposure else f

    def _drop(self, x: Tensor, rate: float) -> Tensor:
        return F.dropout(x, rate) if self.training and rate else x


class MLP(_Net):
    """A fully connected network; inputs are flattened.

    input_shape: shape of one input.   hidden: widths of the hidden layers; () is a linear model.
    outputs: width of the last layer.  activation: a key of ``ACTIVATIONS``.  bias: in every layer, or in none.
    dropout: (rate of the inputs, rate of every hidden unit), in [0, 1).   exposure: see :class:`_Net`.
    tails: ``Schema.x_tails``, the inputs whose asinh is another input.   Raises UserError for an unknown activation.
    """

    takes_draws = True

    def __init__(
        self, input_shape: Sequence[int], hidden: Sequence[int], outputs: int, activation: str = "relu",
        bias: bool = True, dropout: tuple[float, float] = (0.0, 0.0), exposure: bool = False, tails: Sequence = (),
    ) -> None:  # fmt: skip
        super().__init__(activation)
        self.input_dims, self.exposure, self.tails = len(input_shape), exposure, tails
        widths = [int(torch.Size(input_shape).numel()) - exposure + len(tails), *hidden, outputs]
        self._add_layers(widths, bias, [dropout[0], *(dropout[1] for _ in hidden)])

    def enter(self, x: Tensor) -> Tensor:
        """The inputs of the first layer: (B, *input_shape) -> (B, inputs)."""
        x = x.flatten(-self.input_dims)
        x = x[..., :-1] if self.exposure else x
        if not self.tails:
            return x
        features, a, b, c, d = (x.new_tensor(column) for column in zip(*self.tails, strict=True))
        return torch.cat([x, (((x[..., features.long()] - a) / b).asinh() - c) / d], -1)

    _to_layers = enter


class ConvNet(_Net):
    """Convolutions, each followed by 2 × 2 max-pooling and the activation, then fully connected layers.

    input_shape: (channels, height, width).   channels: output channels of each convolution, one or more.
    hidden: widths of the hidden layers after the convolutions.   kernel, padding: of every convolution, in pixels.
    dropout: rate of the inputs of every fully connected layer.   The other arguments are those of :class:`MLP`.
    Raises UserError for inputs that are not images, for too small images, and for an unknown activation.
    """

    def __init__(
        self, input_shape: Sequence[int], channels: Sequence[int], hidden: Sequence[int], outputs: int,
        activation: str = "relu", bias: bool = True, kernel: int = 3, padding: int = 1, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(activation)
        if len(input_shape) != 3:
            raise UserError("a convolutional network takes images (channels, height, width), not inputs of shape "
                            f"{tuple(input_shape)}; take a fully connected variant, such as hidden-layer")  # fmt: skip
        height, width = input_shape[1:]
        for _ in channels:
            height, width = ((n + 2 * padding - kernel + 1) // 2 for n in (height, width))
        if min(height, width) < 1:
            raise UserError(f"images of {input_shape[1]} × {input_shape[2]} pixels are too small for {len(channels)} "
                            f"convolutions (kernel {kernel}, padding {padding}), each followed by 2 × 2 pooling; "
                            "take fewer channels, a smaller kernel or more padding")  # fmt: skip
        all_channels = [input_shape[0], *channels]
        pairs = pairwise(all_channels)
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, kernel, padding=padding, bias=bias) for i, o in pairs)
        self._add_layers([all_channels[-1] * height * width, *hidden, outputs], bias, [dropout] * (len(hidden) + 1))

    def enter(self, x: Tensor) -> Tensor:
        """The inputs of the first layer: x (…, B, C, H, W) in the channels-last memory format."""
        return x.movedim(-3, -1).clone(memory_format=torch.contiguous_format).movedim(-1, -3)

    def _pool(self, x: Tensor) -> Tensor:
        """(…, C, H, W) -> (…, C, H/2, W/2). Pooling before the activation is faster, with the same result."""
        return self.activation(F.max_pool2d(x.flatten(0, -4), 2)).unflatten(0, x.shape[:-3])

    def _pool_flat(self, x: Tensor) -> Tensor:
        """(…, C, H, W) -> (…, C·H/2·W/2)."""
        return self._pool(x).flatten(-3)

    def stages(self) -> list[Stage]:
        """The network as a chain: (name, layer, what follows it), in order. Dropout is not part of it."""
        first = zip(self.convolutions, [*repeat(self._pool, len(self.convolutions) - 1), self._pool_flat], strict=True)
        return [*((f"convolutions.{i}", *stage) for i, stage in enumerate(first)), *super().stages()]

    def _to_layers(self, x: Tensor) -> Tensor:
        h = self.enter(x).flatten(0, -4)
        for layer in self.convolutions:
            h = self._pool(layer(h))
        return h.flatten(1).unflatten(0, x.shape[:-3])
