"""The gradient of a log density, traced once and compiled by the machine's C compiler in about a second.

One gradient of 50 weights takes a millisecond as some two hundred operators of torch, and a fiftieth of that as one
piece of C that runs through the arrays of one chain, chain after chain, on all cores that OMP_NUM_THREADS allows. What
is not supported, or a machine without a compiler, raises ``NotCompiled``. What was compiled is kept in memory: a
library by its source, and the trace by what it depends on, where the caller can say that (:func:`recipe`).
"""

import ctypes
import math
import os
from collections.abc import Callable
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from bnn_pyro.c_code import KEPT, NotCompiled, find_compiler, load
from bnn_pyro.inference.compiled.c_source import write_c

#: What comes before the gradient, in C, and what calls it.
PRELUDE, DRIVER = (Path(__file__).with_name(name) for name in ("prelude.h", "driver.c"))
#: What the driver exports: how many addresses, doubles and whole numbers each takes, in this order.
FUNCTIONS = [("evaluate", 3, 0, 3), ("leapfrog", 6, 0, 4), ("subtree", 5, 2, 2), ("microcanonical", 11, 0, 4)]
#: (Source, constants) by recipe, as many as of libraries.
TRACES: dict[bytes, tuple[str, list[Tensor]]] = {}


class CompiledGradient:
    """The log density and its gradient by C, the same on any number of threads.   constants: what it reads, y first."""

    def __init__(self, library: ctypes.CDLL, constants: list[Tensor], size: int) -> None:
        self._library, self._constants, self.size, self.targets = library, constants, size, constants[0]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        self.threads = int(text) if text.isdigit() and int(text) else cores  # that this process may use
        library.bind((ctypes.c_void_p * len(constants))(*(k.data_ptr() for k in constants)))
        for name, arrays, doubles, numbers in FUNCTIONS:
            types = [ctypes.c_void_p] * arrays + [ctypes.c_double] * doubles + [ctypes.c_long] * numbers
            function = getattr(library, name)
            function.argtypes, function.restype = types, None

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(C, P) float64 -> (C,), (C, P)."""
        z = z.contiguous()
        density, gradient = z.new_empty(len(z)), torch.empty_like(z)
        self._library.evaluate(z.data_ptr(), density.data_ptr(), gradient.data_ptr(), len(z), self.size, self.threads)
        return density, gradient

    def leapfrog(self, *arrays: Tensor, steps: int) -> None:
        """In place: z, r (C, P), density (C,), gradient (C, P); inverse_mass (P,), step (C,); float64, contiguous."""
        self._library.leapfrog(*(array.data_ptr() for array in arrays), steps, len(arrays[0]), self.size, self.threads)

    def microcanonical(self, *arrays: np.ndarray) -> None:
        """z, u (C, P), density (C,), gradient (C, P), in place; scale (C, P), ΔE (C,), set; step, steps (C,), shares.

        With noise (C, S, P) and its spread (C,) after them u is refreshed before each step, and ΔE is (C, S).
        """
        pointers = [a.__array_interface__["data"][0] for a in arrays]  # a.ctypes takes several times as long
        refreshed = pointers[9:] or (None, None)
        self._library.microcanonical(*pointers[:9], *refreshed, len(arrays[8]), *arrays[0].shape, self.threads)

    def subtree(self, *pointers: int, step: float, energy: float, depth: int) -> None:
        """A subtree of NUTS; see the C code for the five arrays of doubles that the addresses are of."""
        self._library.subtree(*pointers, step, energy, depth, self.size)


def compile_gradient(
    gradient: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], z: Tensor, y: Tensor, same: bytes | None = None
) -> CompiledGradient:
    """Trace ``gradient(z, y)`` at z (C, P) float64, for one chain, write it as C, compile and load it.

    y: targets, which are copied.   same: a :func:`recipe`, whose code is then used again.   Raises NotCompiled.
    """
    if z.device.type != "cpu":
        raise NotCompiled(f"the model is on {z.device}")
    find_compiler()  # before the trace, which takes longer
    inputs = z[:1], y.clone(memory_format=torch.contiguous_format)
    source, constants = TRACES.pop(same, None) or _trace(gradient, inputs)
    if same is not None:
        TRACES[same] = source, constants  # the last one used is the last
        while len(TRACES) > KEPT:
            del TRACES[next(iter(TRACES))]
    constants = [inputs[1], *constants[1:]]
    return CompiledGradient(load(PRELUDE.read_text() + source + DRIVER.read_text()), constants, z.shape[1])


def recipe(model: nn.Module, *rest: Any) -> bytes | None:
    """What a model's density depends on besides its sites' values, and ``rest``; None where that cannot be said.

    Parameters count by their shapes alone: where a network starts is no part of its density (else comparison tells).
    """
    buffer = BytesIO()
    try:
        _Shapes(buffer).dump((model, rest))
    except Exception:  # whatever a user's class may raise
        return None
    return sha256(buffer.getvalue()).digest()


class _Shapes(cloudpickle.Pickler):
    """Writes parameters as their shapes, and other tensors by what is in them, wherever they lie."""

    def persistent_id(self, obj: object) -> tuple | None:
        if not isinstance(obj, Tensor):
            return None
        content = b"" if isinstance(obj, nn.Parameter) else obj.detach().cpu().contiguous().numpy().tobytes()
        return type(obj).__name__, str(obj.dtype), tuple(obj.shape), obj.stride(), sha256(content).digest()


def _trace(gradient: Callable[..., tuple[Tensor, Tensor]], inputs: tuple[Tensor, Tensor]) -> tuple[str, list[Tensor]]:
    try:
        with sdpa_kernel(SDPBackend.MATH):  # attention's fused kernels have no C form
            plain = functionalize(make_fx(lambda *inputs: gradient(*inputs))(*inputs))
        graph = make_fx(lambda *inputs: plain(*inputs), decomposition_table=_decompositions())(*inputs)
        first: dict[str, fx.Node] = {}
        for node in graph.graph.nodes:  # what is worked out twice, such as erf(x) of a gelu and of its derivative
            if node.op == "call_function" and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
                node.replace_all_uses_with(first.setdefault(f"{node.target} {node.args} {node.kwargs}", node))
        graph.graph.eliminate_dead_code()
        return write_c(graph, inputs[1])
    except NotCompiled:
        raise
    except Exception as error:
        raise NotCompiled(f"the model could not be traced ({type(error).__name__}: {error})") from None


def _decompositions() -> dict[Any, Callable]:
    """Of operators that PyTorch counts among the core, such as those of normalisation and softmax."""
    aten = torch.ops.aten

    def mean(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
        return x.sum(dim, keepdim) / math.prod(x.shape[d] for d in dim)

    def var_mean(x: Tensor, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        dim = dim or list(range(x.dim()))
        num, middle = math.prod(x.shape[d] for d in dim), mean(x, dim, True)
        return (x - middle).square().sum(dim, keepdim) / (num - correction), middle if keepdim else mean(x, dim)

    def max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        largest, last = x.amax(dim, True), x.shape[dim] - 1
        index = torch.arange(last + 1, dtype=x.dtype).view(-1, *[1] * ((-1 - dim) % x.dim()))
        return x.amax(dim, keepdim), -torch.where(x == largest, -index, -last).amax(dim, keepdim).long()

    def taken(x: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        if not x.is_floating_point():  # where they lie, which is worked out beforehand
            return NotImplemented
        places = choose(torch.arange(x.numel()).view(x.shape))
        return x.reshape(-1).gather(0, places.reshape(-1)).view(places.shape)

    def index_put(x: Tensor, index: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
        places = aten.index(torch.arange(x.numel()).view(x.shape), index)
        put = x.reshape(-1).scatter_add if accumulate else x.reshape(-1).scatter
        return put(0, places.reshape(-1), values.expand(places.shape).reshape(-1)).view(x.shape)

    names = """native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward _softmax
        native_batch_norm native_batch_norm_backward _log_softmax _safe_softmax gelu elu hardtanh leaky_relu addmm
        embedding index_select constant_pad_nd repeat"""
    return {
        **core_aten_decompositions(),
        **get_decompositions([getattr(aten, name) for name in names.split() if hasattr(aten, name)]),
        **{aten.mean.dim: mean, aten.max.dim: max_dim, aten.index_put.default: index_put},
        **{aten.var_mean.correction: var_mean, aten.var.correction: lambda *x, **how: var_mean(*x, **how)[0]},
        aten.full_like.default: lambda x, value, dtype=None, **_: torch.full(x.shape, value, dtype=dtype or x.dtype),
        aten.flip.default: lambda x, dims: taken(x, lambda places: places.flip(dims)),
        aten.index.Tensor: lambda x, index: taken(x, lambda places: aten.index(places, index)),
        aten.softshrink_backward.default: lambda gradient, x, bound: torch.where(x.abs() <= bound, 0.0, gradient),
        aten.hardshrink_backward.default: lambda gradient, x, bound: torch.where(x.abs() <= bound, 0.0, gradient),
    }
