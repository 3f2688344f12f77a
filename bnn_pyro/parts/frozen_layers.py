"""Layers of a user's network that do not depend on the weights of the posterior: computed once, not for every draw.

    f(x, w) = head(φ(x), w),    φ(x): the outputs of the frozen layers that the head uses, and x if it uses x

A layer is frozen if it is called once per pass, its output requires no gradient when all weights of the posterior do,
and the output is the same in training mode.
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
from bnn_pyro.parts.backbone import Report, row_blocks
from bnn_pyro.parts.nets import in_mode, outputs_seen, with_weights
from bnn_pyro.parts.own_module import calling, norm_layers

#: Number of rows for the passes that find the frozen layers.
PROBE = 7
#: Functions of a tensor that do not depend on its values.
_FORM = {getattr(Tensor, name) for name in ("size", "dim", "__len__", "numel", "is_floating_point")}
_FORM |= {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device", "dtype", "requires_grad", "is_cuda")}


class _Plan(NamedTuple):
    """shapes: {path of a frozen layer, or "" for x: shape for one row}.   used: the paths in φ(x), in its order."""

    shapes: Mapping[str, torch.Size]
    used: tuple[str, ...]

    #: The count of numbers in each part of φ(x).
    sizes = property(lambda self: [self.shapes[path].numel() for path in self.used])


class _Given(nn.Module):
    """Replaces a frozen layer, and returns the value that was set for this pass."""

    value: Tensor | None = None

    def forward(self, *_: object, **__: object) -> Tensor | None:
        value, self.value = self.value, None
        return value


class _Uses(TorchFunctionMode):
    """Records which of the noted tensors a result depends on by their values, not just by their shape or dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, tuple[set[str], object]] = {}  # keeps the tensor, so that its id is not reused
        self.used: set[str] = set()  # sources of in-place changes and of results that are not tensors

    def note(self, path: str, value: object) -> None:
        self.sources[id(value)] = {path}, value

    def of(self, values: object) -> set[str]:
        return set().union(*(self.sources[id(leaf)][0] for leaf in tree_leaves(values) if id(leaf) in self.sources))

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result, arguments = func(*args, **(kwargs or {})), (args, kwargs)
        if func not in _FORM and (sources := self.of(arguments)):
            inputs, leaves = {id(leaf) for leaf in tree_leaves(arguments)}, tree_leaves(result)
            if not all(isinstance(leaf, Tensor) and id(leaf) not in inputs for leaf in leaves):
                self.used |= sources
            self.sources |= {id(leaf): (sources, leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        return result


def without_frozen_layers(
    model: nn.Module, *inputs: Tensor, training: bool = False, report: Report | None = None
) -> tuple[nn.Module, list[Tensor]] | None:
    """The model on features, and features (N, F) of each input; None without frozen layers, or for too large features.

    model: a ``BayesianNet`` of a user's network.   inputs: (N, *input_shape).   training: whether the head will train.
    report: called as report(rows done, rows in total) for each of the inputs.
    """
    net, modes, x = model.net, (False, True)[: 1 + training], inputs[0]
    able = model.still and model.statistics is None and not isinstance(net, GraphModule)  # copies of it lose hooks
    if not able or not len(x) or not all(isinstance(one, Tensor) for one in inputs):
        return None
    rows = x[:PROBE].to(next(net.parameters()).device)
    with suppress(Exception), isolated(0), calling(net):  # the user's code may raise any exception
        runs = [_constant(net, rows, mode) for mode in modes]
        same = [path for path, value in runs[0].items() if all(path in f and _close(f[path], value) for f in runs)]
        shapes = {p: runs[0][p].shape[1:] for p in same if not any(p.startswith(f"{other}.") for other in same)}
        copied, uses = copy.deepcopy(net, {id(value): value for value in (*net.parameters(), *net.buffers())}), _Uses()
        for path in shapes:
            owner, _, child = path.rpartition(".")
            copied.get_submodule(owner)._modules[child] = _Given()
        with copied.register_forward_pre_hook(lambda _, args: uses.note("", args[0]), prepend=True), torch.no_grad():
            copied.register_forward_pre_hook(_give, prepend=True)
            copied._plan = every = _Plan({**shapes, "": x.shape[1:]}, (*shapes, ""))
            z = _features(net, None, every, rows)
            for mode in modes:
                with outputs_seen(copied, lambda path, f: uses.note(path, f) if path in shapes else None), uses:
                    uses.used |= uses.of(_output(copied, {}, z, mode))
        plan = copied._plan = every._replace(used=tuple(path for path in every.used if path in uses.used))
        if not shapes.keys() & plan.used or is_large((len(x), sum(plan.sizes))):
            return None
        z = torch.cat([_features(net, copied, plan, part) for part in rows.split(2)])  # must not depend on the batch
        with torch.no_grad():  # compare at other weights, as a weight without gradient may still have an effect
            w = {name: p * (1 + 0.1 * torch.randn_like(p)) for name, p in net.named_parameters()}
            if all(_close(_output(copied, w, z, mode), _output(net, w, rows, mode)) for mode in modes):
                head = copy.copy(model)
                head._modules, head.still = {**model._modules, "net": copied}, ()
                return head, [_features(net, copied, plan, x, report) for x in inputs]
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5 * max(1.0, b.abs().max().item()))


def _output(net: nn.Module, w: Mapping[str, Tensor], x: Tensor, training: bool) -> Tensor:
    with isolated(0), in_mode(net, training=training), in_mode(*norm_layers(net).values(), training=False):
        return with_weights(net, w, x.clone())


def _constant(net: nn.Module, x: Tensor, training: bool) -> dict[str, Tensor]:
    """{path: output} of layers that are called once and whose float32 outputs (B, …) depend on no parameter."""
    outputs: dict[str, list[Tensor | None]] = {}

    def record(path: str, value: object) -> None:
        mine = path and isinstance(value, Tensor) and value.dtype == torch.float32 and value.shape[:1] == x.shape[:1]
        outputs.setdefault(path, []).append(value.clone() if mine and not value.requires_grad else None)

    with torch.enable_grad(), outputs_seen(net, record):
        _output(net, {name: p.detach().requires_grad_() for name, p in net.named_parameters()}, x, training)
    return {path: values[0] for path, values in outputs.items() if len(values) == 1 and values[0] is not None}


@torch.no_grad()
def _features(net: nn.Module, head: nn.Module | None, plan: _Plan, x: Tensor, report: Report | None = None) -> Tensor:
    """φ(x), (N, F), on the device of the network, computed for a few rows at a time.

    Raises ValueError if the head's outputs change with the order of the rows, as a layer may process some rows only.
    """
    device = next(net.parameters()).device
    features = torch.empty(len(x), sum(plan.sizes), device=device)
    for block in row_blocks(x, report):
        rows = x[block].to(device)
        outputs = {"": rows.clone()}

        def record(path: str, value: object, outputs: dict[str, Tensor] = outputs) -> None:
            if path and path in plan.used:
                outputs[path] = value.clone()  # the next layer may change it in place

        with outputs_seen(net, record), calling(net):
            f = _output(net, {}, rows, training=False)
        features[block] = z = torch.cat([outputs[path].flatten(1) for path in plan.used], 1)
        if head is not None and not _close(_output(head, {}, z.flip(0), training=False).flip(0), f):
            raise ValueError("the head on features is another function")
    return features


def _give(net: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook that sets the outputs of the frozen layers, and replaces the features (B, F) by x."""
    z, plan = args[0], net._plan
    parts = dict(zip(plan.used, z.split(plan.sizes, -1), strict=True))
    for path, shape in plan.shapes.items():
        part = parts[path].reshape(len(z), *shape).clone() if path in parts else z.new_zeros(()).expand(len(z), *shape)
        if path:
            net.get_submodule(path).value = part  # a copy, as the next layer may change it in place
    return (part, *args[1:])
