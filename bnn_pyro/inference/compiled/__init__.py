"""The gradient of a log density, traced once and compiled by the machine's C compiler in about a second.

A gradient of 50 weights takes a millisecond as about 200 operators of torch, and a fiftieth of that as C code, which
evaluates one chain after the other, on all cores that OMP_NUM_THREADS allows. ``NotCompiled`` is raised for a model
that is not supported, or without a compiler. Libraries are cached in memory by their source, and traces by what they
depend on, if that is known (:func:`recipe`).
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

#: C code before the gradient, and after it.
PRELUDE, DRIVER = (Path(__file__).with_name(name) for name in ("prelude.h", "driver.c"))
#: Functions that the driver exports: (name, number of pointers, of doubles, and of integers that it takes).
FUNCTIONS = [("leapfrog", 6, 0, 4), ("subtree", 5, 2, 2), ("microcanonical", 11, 0, 4)]
TRACES: dict[bytes, tuple[str, list[Tensor]]] = {}  # a cache {recipe: (source, constants)} of at most KEPT entries


class CompiledGradient:
    """The log density and its gradient in C, with any number of threads.   constants: inputs of the code, y first."""

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
        self.leapfrog(z, None, density, gradient, None, None, steps=0)
        return density, gradient

    def leapfrog(self, *arrays: Tensor | None, steps: int) -> None:
        """In place: z, r (C, P), density (C,), gradient (C, P); inverse_mass (P,), step (C,); float64, contiguous."""
        pointers = [None if array is None else array.data_ptr() for array in arrays]
        self._library.leapfrog(*pointers, steps, len(arrays[0]), self.size, self.threads)

    def microcanonical(self, *arrays: np.ndarray) -> None:
        """In place: z, u (C, P), density (C,), gradient (C, P); scale (C, P); output ΔE (C,); step, steps (C,); shares.

        Optionally noise (C, S, P) and its spread (C,): then u is refreshed before each step, and ΔE is (C, S).
        """
        pointers = [a.__array_interface__["data"][0] for a in arrays]  # faster than a.ctypes
        pointers = pointers if len(arrays) > 9 else [*pointers, None, None]
        self._library.microcanonical(*pointers, len(arrays[8]), *arrays[0].shape, self.threads)

    def subtree(self, *pointers: int, step: float, energy: float, depth: int) -> None:
        """A subtree of NUTS.   pointers: addresses of five arrays of doubles, see ``subtree`` in driver.c."""
        self._library.subtree(*pointers, step, energy, depth, self.size)


def compile_gradient(
    gradient: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], z: Tensor, y: Tensor, same: bytes | None = None
) -> CompiledGradient:
    """Trace ``gradient(z, y)`` for one chain, at z[:1] of z (C, P) float64, write it as C, compile and load it.

    y: targets, which are copied.   same: a :func:`recipe`; code with the same recipe is reused.   Raises NotCompiled.
    """
    if z.device.type != "cpu":
        raise NotCompiled(f"the model is on {z.device}")
    find_compiler()  # fail early, before the trace
    inputs = z[:1], y.clone(memory_format=torch.contiguous_format)
    source, constants = TRACES.pop(same, None) or _trace(gradient, inputs)
    if same is not None:
        TRACES[same] = source, constants  # the most recently used entry is the last
        while len(TRACES) > KEPT:
            del TRACES[next(iter(TRACES))]
    constants = [inputs[1], *constants[1:]]
    return CompiledGradient(load(PRELUDE.read_text() + source + DRIVER.read_text()), constants, z.shape[1])


def recipe(model: nn.Module, *rest: Any) -> bytes | None:
    """A hash of ``rest`` and of what a model's density depends on, except the values of its sites; None if unknown.

    Of parameters only the shapes count, as a network's start is no part of its density (see ``Potential.compile``).
    """
    buffer = BytesIO()
    try:
        _Shapes(buffer).dump((model, rest))
    except Exception:  # whatever a user's class may raise
        return None
    return sha256(buffer.getvalue()).digest()


class _Shapes(cloudpickle.Pickler):
    """Writes parameters as their shapes, and other tensors as a hash of their contents."""

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
        for node in graph.graph.nodes:  # merge equal nodes, such as erf(x) in a gelu and in its derivative
            if node.op == "call_function" and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
                node.replace_all_uses_with(first.setdefault(f"{node.target} {node.args} {node.kwargs}", node))
        graph.graph.eliminate_dead_code()
        return write_c(graph, inputs[1])
    except NotCompiled:
        raise
    except Exception as error:
        raise NotCompiled(f"the model could not be traced ({type(error).__name__}: {error})") from None


def _decompositions() -> dict[Any, Callable]:
    """Decompositions of further operators, beyond those of PyTorch's core set."""
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
        if not x.is_floating_point():  # integers, such as indices, are constants
            return NotImplemented
        places = choose(torch.arange(x.numel()).view(x.shape))
        return x.reshape(-1).gather(0, places.reshape(-1)).view(places.shape)

    def index_put(x: Tensor, index: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
        places = aten.index(torch.arange(x.numel()).view(x.shape), index)
        put = x.reshape(-1).scatter_add if accumulate else x.reshape(-1).scatter
        return put(0, places.reshape(-1), values.expand(places.shape).reshape(-1)).view(x.shape)

    names = """native_layer_norm native_group_norm native_batch_norm _softmax _log_softmax _safe_softmax gelu elu
        hardtanh leaky_relu addmm embedding index_select constant_pad_nd repeat"""
    return {
        **core_aten_decompositions(),
        **get_decompositions([getattr(aten, name) for name in names.split() if hasattr(aten, name)]),
        **{aten.mean.dim: mean, aten.max.dim: max_dim, aten.index_put.default: index_put},
        **{aten.var_mean.correction: var_mean, aten.var.correction: lambda *x, **options: var_mean(*x, **options)[0]},
        aten.full_like.default: lambda x, value, dtype=None, **_: torch.full(x.shape, value, dtype=dtype or x.dtype),
        aten.flip.default: lambda x, dims: taken(x, lambda places: places.flip(dims)),
        aten.index.Tensor: lambda x, index: taken(x, lambda places: aten.index(places, index)),
        aten.softshrink_backward.default: lambda gradient, x, bound: torch.where(x.abs() <= bound, 0.0, gradient),
        aten.hardshrink_backward.default: lambda gradient, x, bound: torch.where(x.abs() <= bound, 0.0, gradient),
    }
