"""Layers of a user's network that no weight of the posterior reaches: computed once for a row, not for every draw.

    f(x, w) = head(φ(x), w),    φ(x): the outputs of those layers that the rest of the network takes, and x if it does

Such a layer is called once, requires no gradient at weights that do, and returns the same in training mode.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bnn_pyro.datasets.rows import is_large
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import CHUNK_NUMBERS, CHUNK_ROWS
from bnn_pyro.parts.nets import in_mode, outputs_seen, with_weights
from bnn_pyro.parts.own_module import calling, norm_layers

#: Rows by which the layers are found.
PROBE = 7
#: What tells no value of a tensor.
_FORM = {getattr(Tensor, name) for name in ("size", "dim", "__len__", "numel", "is_floating_point")}
_FORM |= {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device", "dtype", "requires_grad", "is_cuda")}


class _Plan(NamedTuple):
    """shapes: {path of a layer: that of its output for a row}, "" of x.   used: those in φ(x), in its order."""

    shapes: Mapping[str, torch.Size]
    used: tuple[str, ...]

    #: Numbers of each part of φ(x).
    sizes = property(lambda self: [self.shapes[path].numel() for path in self.used])


class _Given(nn.Module):
    """In place of a layer: returns, once, what it was given."""

    value: Tensor | None = None

    def forward(self, *_: object, **__: object) -> Tensor | None:
        value, self.value = self.value, None
        return value


class _Uses(TorchFunctionMode):
    """Which of the tensors that were noted a result depends on, as far as by more than their form."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, tuple[set[str], object]] = {}  # with the tensor, as another may get its id
        self.used: set[str] = set()  # by values that left torch, or changes in place

    def note(self, path: str, value: object) -> None:
        self.sources[id(value)] = {path}, value

    def of(self, values: object) -> set[str]:
        return set().union(*(self.sources[id(leaf)][0] for leaf in tree_leaves(values) if id(leaf) in self.sources))

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result, given = func(*args, **(kwargs or {})), (args, kwargs)
        if func not in _FORM and (sources := self.of(given)):
            known, leaves = {id(leaf) for leaf in tree_leaves(given)}, tree_leaves(result)
            if not all(isinstance(leaf, Tensor) and id(leaf) not in known for leaf in leaves):
                self.used |= sources
            self.sources |= {id(leaf): (sources, leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        return result


def without_frozen_layers(
    model: nn.Module, *inputs: Tensor, training: bool = False, report: Callable[[int, int], None] | None = None
) -> tuple[nn.Module, list[Tensor]] | None:
    """(the model on features, the features (N, F) of each of the inputs); None: no such layers, or too large features.

    model: a ``BayesianNet`` of a user's network.   inputs: (N, *input_shape).   training: whether the head will train.
    report: called as report(rows done, of how many) of each.
    """
    net, modes, x = model.net, (False, True)[: 1 + training], inputs[0]
    able = model.still and model.statistics is None and not isinstance(net, GraphModule)  # whose copies have no hooks
    if not able or not len(x) or not all(isinstance(one, Tensor) for one in inputs):
        return None
    rows = x[:PROBE].to(next(net.parameters()).device)
    with suppress(Exception), isolated(0), calling(net):  # whatever the user's code raises
        found = [_constant(net, rows, mode) for mode in modes]
        same = [path for path, value in found[0].items() if all(path in f and _close(f[path], value) for f in found)]
        shapes = {p: found[0][p].shape[1:] for p in same if not any(p.startswith(f"{other}.") for other in same)}
        own, uses = copy.deepcopy(net, {id(value): value for value in (*net.parameters(), *net.buffers())}), _Uses()
        for path in shapes:
            owner, _, child = path.rpartition(".")
            own.get_submodule(owner)._modules[child] = _Given()
        with own.register_forward_pre_hook(lambda _, args: uses.note("", args[0]), prepend=True), torch.no_grad():
            own.register_forward_pre_hook(_give, prepend=True)
            own._plan = every = _Plan({**shapes, "": x.shape[1:]}, (*shapes, ""))
            z = _features(net, None, every, rows)
            for mode in modes:
                with outputs_seen(own, lambda path, f: uses.note(path, f) if path in shapes else None), uses:
                    uses.used |= uses.of(_output(own, {}, z, mode))
        plan = own._plan = every._replace(used=tuple(path for path in every.used if path in uses.used))
        if not shapes.keys() & plan.used or is_large((len(x), sum(plan.sizes))):
            return None
        z = torch.cat([_features(net, own, plan, part) for part in rows.split(2)])  # in other batches
        with torch.no_grad():  # at other weights too, as some have no gradient
            w = {name: p * (1 + 0.1 * torch.randn_like(p)) for name, p in net.named_parameters()}
            if all(_close(_output(own, w, z, mode), _output(net, w, rows, mode)) for mode in modes):
                head = copy.copy(model)
                head._modules, head.still = {**model._modules, "net": own}, ()
                return head, [_features(net, own, plan, x, report) for x in inputs]
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5 * max(1.0, b.abs().max().item()))


def _output(net: nn.Module, w: Mapping[str, Tensor], x: Tensor, training: bool) -> Tensor:
    with isolated(0), in_mode(net, training=training), in_mode(*norm_layers(net).values(), training=False):
        return with_weights(net, w, x.clone())


def _constant(net: nn.Module, x: Tensor, training: bool) -> dict[str, Tensor]:
    """{path: output} of layers that are called once and return numbers for each row that no parameter reaches."""
    seen: dict[str, list[Tensor | None]] = {}

    def record(path: str, value: object) -> None:
        mine = path and isinstance(value, Tensor) and value.dtype == torch.float32 and value.shape[:1] == x.shape[:1]
        seen.setdefault(path, []).append(value.clone() if mine and not value.requires_grad else None)

    with torch.enable_grad(), outputs_seen(net, record):
        _output(net, {name: p.detach().requires_grad_() for name, p in net.named_parameters()}, x, training)
    return {path: values[0] for path, values in seen.items() if len(values) == 1 and values[0] is not None}


@torch.no_grad()
def _features(
    net: nn.Module, head: nn.Module | None, plan: _Plan, x: Tensor, report: Callable[[int, int], None] | None = None
) -> Tensor:
    """φ(x), (N, F), where the network is, a few rows at a time.

    Raises ValueError where the head gives other outputs of them in another order: a layer may be for some rows alone.
    """
    device, size = next(net.parameters()).device, max(1, min(CHUNK_ROWS, CHUNK_NUMBERS // max(1, x.shape[1:].numel())))
    whole = torch.empty(len(x), sum(plan.sizes), device=device)
    for start in range(0, len(x), size):
        rows = x[start : start + size].to(device)
        seen = {"": rows.clone()}

        def record(path: str, value: object, seen: dict[str, Tensor] = seen) -> None:
            if path and path in plan.used:
                seen[path] = value.clone()  # which the next layer may change in place

        with outputs_seen(net, record), calling(net):
            f = _output(net, {}, rows, training=False)
        whole[start : start + size] = z = torch.cat([seen[path].flatten(1) for path in plan.used], 1)
        if head is not None and not _close(_output(head, {}, z.flip(0), training=False).flip(0), f):
            raise ValueError("the head on features is another function")
        if report is not None:
            report(start + len(rows), len(x))
    return whole


def _give(net: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook: the layers' outputs in their places, the network's own x in place of features (B, F)."""
    z, plan = args[0], net._plan
    parts = dict(zip(plan.used, z.split(plan.sizes, -1), strict=True))
    for path, shape in plan.shapes.items():
        part = parts[path].reshape(len(z), *shape).clone() if path in parts else z.new_zeros(()).expand(len(z), *shape)
        if path:
            net.get_submodule(path).value = part  # its own memory, as a layer may change it in place
    return (part, *args[1:])
