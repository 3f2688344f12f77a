"""A user's own network: copied, with parameters selected by name, and called with many draws of them at once.

The user's module is never changed. Frozen parameters become buffers of the copy: its remaining parameters are the
latent sites, and the archive of a posterior contains the buffers.
"""

import copy
import difflib
import fnmatch
import importlib
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import vmap
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_leaves

from bnn_pyro.errors import UserError, first_line, refusing, unknown
from bnn_pyro.parts.nets import on_copy, tensors_of, users_code, with_weights


def own_copy(module: nn.Module) -> nn.Module:
    """A copy of the user's module, on the CPU.

    Raises UserError for a module that cannot be copied or called with other weights, and for one without parameters or
    with parameters that are lazy, not registered or not float32.
    """
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    module = module.module if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel) else module
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(f"{name} is TorchScript, which takes no other weights; give the nn.Module itself")
    for key, value in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(value, UninitializedParameter | UninitializedBuffer):
            raise UserError(f"'{key}' of {name} is lazy and has no shape yet; call the module once with inputs before")
        if value.is_meta:
            raise UserError(f"'{key}' of {name} is on the meta device and has no values; make the module on another")
    for key, value in module.named_parameters():
        if value.dtype != torch.float32:
            way = f"use {name}.float()" if value.is_floating_point() else "make it a buffer, or parameters of its parts"
            raise UserError(f"parameter '{key}' of {name} is {value.dtype}, and inputs are float32; {way}")
        if not value.numel():
            raise UserError(f"parameter '{key}' of {name} has no numbers; leave it out")
    if (where := next(_unregistered(module), None)) is not None:
        raise UserError(f"'{where}' of {name} holds parameters that are not registered, which nobody would train; use "
                        "nn.Parameter, nn.ParameterList, nn.ModuleList or nn.ModuleDict")  # fmt: skip
    if next(module.parameters(), None) is None:
        raise UserError(f"{name} has no parameters, and nothing to infer")
    with users_code(f"{name} cannot be copied by copy.deepcopy (torch.nn.utils.parametrizations.weight_norm and "
                    "spectral_norm are copied, torch.nn.utils' not; pruned layers after prune.remove; what a pass "
                    "has left on a module, such as attention maps, is to be None)"):  # fmt: skip
        copied = copy.deepcopy(module).cpu()
    for part in copied.modules():  # replace compiled parts, in which hooks and samplers do not see every call
        part._modules.update({key: own._orig_mod for key, own in part._modules.items() if hasattr(own, "_orig_mod")})
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.register_forward_pre_hook(_check_index)
            part.sparse = part.scale_grad_by_freq = False  # their gradients would be sparse or rescaled
        padded = getattr(part, "padding_idx", None) is not None and not hasattr(part, "padding_row")
        if padded and type(part).forward is nn.Embedding.forward:
            part.register_buffer("padding_row", part.weight[part.padding_idx].detach().clone(), persistent=False)
            part.register_forward_hook(_with_padding, with_kwargs=True)
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():  # of torch.export
            if node.target is torch.ops.aten.embedding.default:
                node.args = node.args[:2]  # without padding_idx: the padding row is like any other weight
                part.recompile()
    return copied


def _with_padding(layer: nn.Embedding, args: tuple, named: dict[str, Tensor], output: Tensor) -> Tensor:
    """A forward hook that keeps the padding row of the user's module, which is not a weight and has no gradient."""
    index, row = (*args, *named.values())[0], layer.padding_row
    return output if row is None else torch.where((index == layer.padding_idx)[..., None], row, output)


def _check_index(layer: nn.Embedding | nn.EmbeddingBag, args: tuple[Any, ...]) -> None:
    """A forward pre-hook that raises IndexError for an invalid index, by which CUDA would end the whole process."""
    for index in args[:1]:
        if index.is_floating_point() and type(layer).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward):
            raise UserError("an nn.Embedding takes whole numbers; give whole numbers in a tuple: bp.dataset((ids,), y)")
        with suppress(RuntimeError):  # values cannot be read inside vmap
            low, high = map(int, index.aminmax())
            if not 0 <= low <= high < layer.num_embeddings:
                raise IndexError(f"{low if low < 0 else high} is none of its {layer.num_embeddings} numbers")


def imported(text: str) -> Callable[..., Any]:
    """Import the function of ``"package.module:function"``.   Raises UserError if it does not exist."""
    file, colon, name = text.partition(":")
    if not (colon and name):
        raise UserError(f"'{text}' is no package.module:function, nor a network's file, which would end in .pt2")
    with users_code(f"there is no {text}"):
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        try:
            function = operator.attrgetter(name)(importlib.import_module(file))
        finally:
            sys.path.remove(os.getcwd())
    if not callable(function):
        raise UserError(f"{text} is {type(function).__name__}, not a function")
    return function


def _unregistered(module: nn.Module) -> Iterator[str]:
    """Paths of attributes that hold parameters without registering them: plain tensors, lists, tuples and dicts."""
    named, torchs = {id(p) for p in module.parameters()}, vars(nn.Module())
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            for item in () if key in torchs else tree_leaves(value):
                parts = item.parameters() if isinstance(item, nn.Module) else (item,)
                if any(isinstance(p, Tensor) and p.requires_grad and p.is_leaf and id(p) not in named for p in parts):
                    yield f"{path}.{key}".lstrip(".")


def freeze(net: nn.Module, names: Iterable[str]) -> None:
    """Turn these parameters of a copy into buffers, under all names of a shared parameter."""
    chosen = {id(net.get_parameter(name)) for name in names}
    for part in net.modules():
        for key in [key for key, value in part._parameters.items() if id(value) in chosen]:
            part.register_buffer(key, part._parameters.pop(key).detach())


def norm_layers(net: nn.Module) -> dict[str, nn.Module]:
    """{path: layer} of the layers that normalise by batch statistics or their running averages."""
    layers = {path: part for path, part in net.named_modules() if isinstance(part, _NormBase)}
    return {k: v for k, v in layers.items() if isinstance(v, _BatchNorm) or v.track_running_stats}


def select(net: nn.Module, text: str, setting: str) -> list[str]:
    """The names of the parameters that a pattern matches, in the module's order.

    text: alternatives separated by "|", each a glob over parameters ("layer4.*", "*.bias"), the path of a submodule
        ("fc") or its class ("Conv2d"); or re:REGEX for whole names.   setting: its name in error messages.
    Raises UserError for an alternative that matches nothing, with the nearest name.
    """
    first: dict[int, str] = {}
    paths: dict[str, set[str]] = {}  # {parameter: its names, and the paths and classes of modules that contain it}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        owners = [".".join(parts[:i]) for i in range(len(parts))]
        names_of = paths.setdefault(first.setdefault(id(parameter), name), set())
        names_of |= {name, *owners[1:], *(type(net.get_submodule(owner)).__name__ for owner in owners)}
    regex, every = text.startswith("re:"), set().union(*paths.values())
    chosen: set[str] = set()
    for pattern in [text[3:]] if regex else [part.strip() for part in text.split("|") if part.strip()]:
        with refusing(f"{setting} '{text}' is no regular expression: {{error}}", re.error):
            glob = re.escape(pattern) if pattern in every else fnmatch.translate(pattern)  # names may have brackets
            fits = re.compile(pattern if regex else glob).fullmatch
        if not (names := {name for name, names_of in paths.items() if any(map(fits, names_of))}):
            raise unknown(f"parameter in {setting}", pattern, difflib.get_close_matches(pattern, every, 8, 0) or every)
        chosen |= names
    return [name for name in paths if name in chosen]


def assign(net: nn.Module, texts: str | Mapping[str, str], names: Iterable[str], setting: str) -> dict[str, str]:
    """{parameter: text} by the first matching pattern, or one text. UserError for a name or pattern without a match."""
    chosen: dict[str, str] = {}
    for pattern, text in ({"*": texts} if isinstance(texts, str) else texts).items():
        if set(matched := select(net, pattern, setting)) <= chosen.keys():
            raise UserError(f"{setting}: patterns before '{pattern}' match all of its parameters; put it first")
        chosen |= {name: text for name in matched if name not in chosen}
    if unmatched := [name for name in names if name not in chosen]:
        raise UserError(f"{setting} has no pattern for '{unmatched[0]}'; add one that matches it, such as '*'")
    return {name: chosen[name] for name in names}


def call_with_draws(net: nn.Module, w: Mapping[str, Tensor], x: Tensor, rows_of_each: bool) -> Tensor:
    """The net's outputs (…, B, outputs) with weights and buffers {name: (…, *shape)}.

    rows_of_each: whether x is (C, B, *input_shape), with different rows for each of C draws.

    The draws are mapped by ``vmap``, or run one after the other if that is faster or (with a warning) ``vmap`` fails.
    """
    if getattr(net, "takes_draws", False):
        return with_weights(net, w, x)
    dims = {name: value.dim() for name, value in (*net.named_parameters(), *net.named_buffers())}
    leads = {name: value.shape[: value.dim() - dims[name]] for name, value in w.items()}
    lead = torch.broadcast_shapes(*leads.values())

    def call(one: Mapping[str, Tensor], x: Tensor) -> Tensor:
        with calling(net):
            f = with_weights(net, one, x)
        for part in net.modules():  # results that a pass stores there, such as attention maps, cannot be copied
            for key, value in [*vars(part).items()]:
                if isinstance(value, Tensor) and (value.grad_fn is not None or is_functorch_wrapped_tensor(value)):
                    vars(part)[key] = None
        return f

    if not lead:
        return call(w, x)
    flat: dict[str, Tensor] = {}
    for name, value in w.items():
        event = value.shape[len(leads[name]) :]
        one_for_all = not any(value.stride()[: len(leads[name])])  # a point, expanded to all draws
        flat[name] = value[(0,) * len(leads[name])] if one_for_all else value.expand(*lead, *event).reshape(-1, *event)
    mapped = {name: 0 if flat[name].dim() > dims[name] else None for name in flat}
    many, problem = x.shape[int(rows_of_each)] >= 16 and x.device.type == "cpu", net.__dict__.get("_not_mapped")
    slow = many and any(isinstance(p, nn.modules.conv._ConvNd) for p in net.modules())  # for vmap on a CPU
    if not (slow or problem):
        try:
            with _quiet_vmap(x):
                f = vmap(call, in_dims=(mapped, 0 if rows_of_each else None), randomness="different")(flat, x)
            return f.unflatten(0, lead)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # vmap does not support every operation, such as branches on values
            problem = first_line(error)
    one = ({k: v if mapped[k] is None else v[s] for k, v in flat.items()} for s in range(lead.numel()))
    f = torch.stack([call(w, x[s] if rows_of_each else x) for s, w in enumerate(one)])
    if problem and "_not_mapped" not in net.__dict__:
        net.__dict__["_not_mapped"] = problem
        warnings.warn(f"{type(net).__name__} runs one draw after the other, which is slower, with the same results: "
                      f"torch's vmap cannot map it ({problem.partition('. ')[0]})", stacklevel=2)  # fmt: skip
    return f.unflatten(0, lead)


@contextmanager
def calling(net: nn.Module) -> Iterator[None]:
    """Convert some errors to UserErrors; avoid cuDNN's recurrent layers, which have no gradients in evaluation mode."""
    without = torch.is_grad_enabled() and not net.training and any(isinstance(p, nn.RNNBase) for p in net.modules())
    name, flags = type(net).__name__, torch.backends.cudnn.flags(enabled=False) if without else nullcontext()
    index = f"{name} is given an index that it has not, such as one beyond its nn.Embedding: {{error}}"
    primitive = f"this processor cannot run {name} ({{error}}); if its precision is bfloat16, leave that out"
    with refusing(index, IndexError), refusing(primitive, RuntimeError, saying="could not create a primitive"), flags:
        yield


@contextmanager
def _quiet_vmap(x: Tensor) -> Iterator[None]:
    """Disable fused attention, whose gradients vmap does not support, and vmap's warnings about slow operations."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH) if x.is_cuda else nullcontext():
            warnings.filterwarnings("ignore", "There is a performance drop")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@torch.no_grad()
def check_outputs(net: nn.Module, x: Tensor, widths: Mapping[int, str], shape: object = None) -> int:
    """The number of outputs of a network in evaluation mode, one of ``widths`` ({number: purpose}).

    Raises UserError, with ``shape``, if it fails for x (B, *input_shape) or its outputs are not of shape (B, number).
    """
    name, exported = type(net).__name__, isinstance(net, GraphModule)
    remark = " with any number of rows, as of torch.export with dynamic_shapes=({0: torch.export.Dim.AUTO},)" * exported
    with users_code(f"{name} does not take inputs of shape {shape or tuple(x.shape)}{remark}"):
        f = net(x)
        if exported:  # it may be limited to the number of rows of its example
            net(x[:1])
    real = isinstance(f, Tensor) and f.is_floating_point()
    received = "outputs of shape " + str(tuple(f.shape)) if real else f"a {getattr(f, 'dtype', type(f).__name__)}"
    if not real or f.dim() != 2 or len(f) != len(x) or f.shape[1] not in widths:
        needed = " or ".join(f"({len(x)}, {width}) for {purpose}" for width, purpose in widths.items())
        needed += "" if isinstance(f, Tensor) else "; return the logits (or the mean) alone"
        raise UserError(f"{name} gives {received} for {len(x)} rows; outputs must be floats of shape {needed}")
    return f.shape[1]


@torch.no_grad()
def check_pure(net: nn.Module, x: Tensor) -> None:
    """Raise UserError if outputs in evaluation mode depend on anything other than a row of x and the weights."""
    name = type(net).__name__
    before = {key: value.nan_to_num() for key, value in tensors_of(net).items()}
    with on_copy(x, name) as x:
        f = net(x)
    if changed := [key for key, value in tensors_of(net).items() if not torch.equal(value.nan_to_num(), before[key])]:
        raise UserError(f"{name} changes its own '{changed[0]}' out of training mode; make it a function of its inputs")
    share = 1e-3 if x.device.type == "cpu" else 3e-2  # TF32 has 10 bits, and kernels differ by the number of rows
    tolerance = dict(rtol=share, atol=share / 10 * max(1.0, f.abs().max().item()), equal_nan=True)
    if not torch.allclose(net(x), f, **tolerance):
        raise UserError(f"{name} gives other outputs for the same inputs out of training mode: it is random, or "
                        "remembers calls; dropout must be nn.Dropout, or F.dropout(x, p, self.training)")  # fmt: skip
    if (one := net(x[:1])).shape != f[:1].shape:
        raise UserError(f"{name} gives outputs of shape {tuple(one.shape)} for one row, without the axis of the rows; "
                        "take squeeze(-1), of the last axis alone, for squeeze()")  # fmt: skip
    # The first and the last row: if a recurrent layer takes rows as time, the first one does not depend on others.
    if not all(torch.allclose(net(x[i]), f[i], **tolerance) for i in (slice(1), slice(len(x) - 1, None))):
        raise UserError(f"{name}'s outputs for a row depend on the other rows of a batch in evaluation mode; normalise "
                        "within a row or by running statistics; recurrent and attention layers need "
                        "batch_first=True")  # fmt: skip
