"""A user's own network: taken as a copy, its parameters chosen by name, many draws of them in one call.

The user's module is never changed. Parameters that are to stay as they are become buffers of the copy, so that the
parameters that are left are the latent sites, and a posterior's archive has the rest.
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
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_leaves

from bnn_pyro.errors import UserError, first_line, refusing, unknown
from bnn_pyro.parts.nets import on_copy, tensors_of, users_code, with_weights


def own_copy(module: nn.Module) -> nn.Module:
    """A copy of the user's module, on the CPU.

    Raises UserError where it cannot be copied or called with other weights, or has no parameters, lazy ones, ones that
    are not registered, or ones of another type than float32.
    """
    module = getattr(module, "_orig_mod", module)  # what torch.compile wraps
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
    for part in copied.modules():  # compiled parts too: hooks and samplers must see what they call
        part._modules.update({key: own._orig_mod for key, own in part._modules.items() if hasattr(own, "_orig_mod")})
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.register_forward_pre_hook(_check_index)
            part.sparse = part.scale_grad_by_freq = False  # no gradient of the function, or not as optimisers take it
        padded = getattr(part, "padding_idx", None) is not None and not hasattr(part, "padding_row")
        if padded and type(part).forward is nn.Embedding.forward:
            part.register_buffer("padding_row", part.weight[part.padding_idx].detach().clone(), persistent=False)
            part.register_forward_hook(_with_padding, with_kwargs=True)
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():  # of torch.export
            if node.target is torch.ops.aten.embedding.default:
                node.args = node.args[:2]  # the padding row is a weight as any other
                part.recompile()
    return copied


def _with_padding(layer: nn.Embedding, args: tuple, named: dict[str, Tensor], output: Tensor) -> Tensor:
    """The padding row as it was in the user's module: it is no weight, and torch gives it no gradient."""
    index, row = (*args, *named.values())[0], layer.padding_row
    return output if row is None else torch.where((index == layer.padding_idx)[..., None], row, output)


def _check_index(layer: nn.Embedding | nn.EmbeddingBag, args: tuple[Any, ...]) -> None:
    """Raises IndexError for a number that an embedding has not: on a GPU torch ends the whole process at one."""
    for index in args[:1]:
        if index.is_floating_point() and type(layer).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward):
            raise UserError("an nn.Embedding takes whole numbers; give whole numbers in a tuple: bp.dataset((ids,), y)")
        with suppress(RuntimeError):  # vmap over the rows lets no values be read
            low, high = map(int, index.aminmax())
            if not 0 <= low <= high < layer.num_embeddings:
                raise IndexError(f"{low if low < 0 else high} is none of its {layer.num_embeddings} numbers")


def imported(text: str) -> Callable[..., Any]:
    """``"package.module:function"`` -> the function, by importing it.   Raises UserError where there is no such."""
    file, colon, name = text.partition(":")
    if not (colon and name):
        raise UserError(f"'{text}' is no package.module:function, nor a network's file, which would end in .pt2")
    with users_code(f"there is no {text}"):
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
        try:
            found = operator.attrgetter(name)(importlib.import_module(file))
        finally:
            sys.path.remove(os.getcwd())
    if not callable(found):
        raise UserError(f"{text} is {type(found).__name__}, not a function")
    return found


def _unregistered(module: nn.Module) -> Iterator[str]:
    """Attributes, of the module or its parts, with parameters as plain tensors or in lists, tuples and dicts."""
    known, torchs = {id(p) for p in module.parameters()}, vars(nn.Module())
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            for item in () if key in torchs else tree_leaves(value):
                own = item.parameters() if isinstance(item, nn.Module) else (item,)
                if any(isinstance(p, Tensor) and p.requires_grad and p.is_leaf and id(p) not in known for p in own):
                    yield f"{path}.{key}".lstrip(".")


def freeze(net: nn.Module, names: Iterable[str]) -> None:
    """Make these parameters of a copy buffers, under all names of each."""
    chosen = {id(net.get_parameter(name)) for name in names}
    for part in net.modules():
        for key in [key for key, value in part._parameters.items() if id(value) in chosen]:
            part.register_buffer(key, part._parameters.pop(key).detach())


def norm_layers(net: nn.Module) -> dict[str, nn.Module]:
    """{path: layer} of those that normalise by statistics of a batch."""
    layers = {path: part for path, part in net.named_modules() if isinstance(part, _NormBase)}
    return {k: v for k, v in layers.items() if isinstance(v, _BatchNorm) or v.track_running_stats}


def select(net: nn.Module, text: str, setting: str) -> list[str]:
    """The names of the parameters that a pattern matches, in the module's order.

    text: alternatives divided by "|", each a glob over parameters ("layer4.*", "*.bias"), the path of a submodule
        ("fc") or the class of one ("Conv2d"); or re:REGEX for whole names.   setting: what the error calls it.
    Raises UserError for an alternative that matches nothing, with the nearest name.
    """
    first: dict[int, str] = {}
    paths: dict[str, set[str]] = {}  # all that a parameter is known by
    for name, parameter in net.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        owners = [".".join(parts[:i]) for i in range(len(parts))]
        known = paths.setdefault(first.setdefault(id(parameter), name), set())
        known |= {name, *owners[1:], *(type(net.get_submodule(owner)).__name__ for owner in owners)}
    regex, every = text.startswith("re:"), set().union(*paths.values())
    chosen: set[str] = set()
    for pattern in [text[3:]] if regex else [part.strip() for part in text.split("|") if part.strip()]:
        with refusing(f"{setting} '{text}' is no regular expression: {{error}}", re.error):
            glob = re.escape(pattern) if pattern in every else fnmatch.translate(pattern)  # names may have brackets
            fits = re.compile(pattern if regex else glob).fullmatch
        if not (names := {name for name, known in paths.items() if any(map(fits, known))}):
            raise unknown(f"parameter in {setting}", pattern, difflib.get_close_matches(pattern, every, 8, 0) or every)
        chosen |= names
    return [name for name in paths if name in chosen]


def assign(net: nn.Module, texts: str | Mapping[str, str], names: Iterable[str], setting: str) -> dict[str, str]:
    """{parameter: text} by the first matching pattern, or one text. Raises UserError for either without a match."""
    chosen: dict[str, str] = {}
    for pattern, text in ({"*": texts} if isinstance(texts, str) else texts).items():
        if set(matched := select(net, pattern, setting)) <= chosen.keys():
            raise UserError(f"{setting}: all that '{pattern}' matches, one before it has matched; let it stand first")
        chosen |= {name: text for name in matched if name not in chosen}
    if rest := [name for name in names if name not in chosen]:
        raise UserError(f"{setting} says nothing of '{rest[0]}'; add a pattern that matches it, such as '*'")
    return {name: chosen[name] for name in names}


def call_with_draws(net: nn.Module, w: Mapping[str, Tensor], x: Tensor, rows_of_each: bool) -> Tensor:
    """The net's outputs (…, B, outputs) with weights and buffers {name: (…, *shape)}.

    rows_of_each: x is (C, B, *input_shape), with rows of its own for each of C draws.

    By ``vmap`` over the draws; one after the other where that is faster, or (with a warning) the net cannot be mapped.
    """
    if getattr(net, "takes_draws", False):
        return with_weights(net, w, x)
    dims = {name: value.dim() for name, value in (*net.named_parameters(), *net.named_buffers())}
    leads = {name: value.shape[: value.dim() - dims[name]] for name, value in w.items()}
    lead = torch.broadcast_shapes(*leads.values())

    def call(one: Mapping[str, Tensor], x: Tensor) -> Tensor:
        with calling(net):
            f = with_weights(net, one, x)
        for part in net.modules():  # what a pass leaves there, as attention maps, could not be copied or sent
            for key, value in [*vars(part).items()]:
                if isinstance(value, Tensor) and (value.grad_fn is not None or is_functorch_wrapped_tensor(value)):
                    vars(part)[key] = None
        return f

    if not lead:
        return call(w, x)
    flat: dict[str, Tensor] = {}
    for name, value in w.items():
        own = value.shape[len(leads[name]) :]
        one_for_all = not any(value.stride()[: len(leads[name])])  # a point of q, expanded to the draws
        flat[name] = value[(0,) * len(leads[name])] if one_for_all else value.expand(*lead, *own).reshape(-1, *own)
    mapped = {name: 0 if flat[name].dim() > dims[name] else None for name in flat}
    many, problem = x.shape[int(rows_of_each)] >= 16 and x.device.type == "cpu", net.__dict__.get("_not_mapped")
    slow = many and any(isinstance(p, _ConvNd) for p in net.modules())  # by vmap, of convolutions on a CPU
    if not (slow or problem):
        try:
            with _quiet_vmap(x):
                f = vmap(call, in_dims=(mapped, 0 if rows_of_each else None), randomness="different")(flat, x)
            return f.unflatten(0, lead)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what vmap does not support, such as a branch on values
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
    """Such errors of torch are UserErrors; recurrent layers have a gradient out of training mode, unlike cuDNN's."""
    without = torch.is_grad_enabled() and not net.training and any(isinstance(p, nn.RNNBase) for p in net.modules())
    name, flags = type(net).__name__, torch.backends.cudnn.flags(enabled=False) if without else nullcontext()
    index = f"{name} is given an index that it has not, such as one beyond its nn.Embedding: {{error}}"
    primitive = f"this processor cannot run {name} ({{error}}); if its precision is bfloat16, leave that out"
    with refusing(index, IndexError), refusing(primitive, RuntimeError, saying="could not create a primitive"), flags:
        yield


@contextmanager
def _quiet_vmap(x: Tensor) -> Iterator[None]:
    """Without attention's fused kernels, whose gradients cannot be mapped, nor warnings of operations that it loops."""
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
    """The width of the outputs of a network out of training mode, one of ``widths`` ({width: for what}).

    Raises UserError, of ``shape``, where it does not take x (B, *input_shape) or gives others than (B, width).
    """
    name, exported = type(net).__name__, isinstance(net, GraphModule)
    how = " with any number of rows, as of torch.export with dynamic_shapes=({0: torch.export.Dim.AUTO},)" * exported
    with users_code(f"{name} does not take inputs of shape {shape or tuple(x.shape)}{how}"):
        f = net(x)
        if exported:  # it may take the rows of its example only
            net(x[:1])
    real = isinstance(f, Tensor) and f.is_floating_point()
    what = "outputs of shape " + str(tuple(f.shape)) if real else f"a {getattr(f, 'dtype', type(f).__name__)}"
    if not real or f.dim() != 2 or len(f) != len(x) or f.shape[1] not in widths:
        wanted = " or ".join(f"({len(x)}, {width}) for {what}" for width, what in widths.items())
        wanted += "" if isinstance(f, Tensor) else "; return the logits (or the mean) alone"
        raise UserError(f"{name} gives {what} for {len(x)} rows; outputs must be floats of shape {wanted}")
    return f.shape[1]


@torch.no_grad()
def check_pure(net: nn.Module, x: Tensor) -> None:
    """Raises UserError where outputs out of training mode depend on anything but a row of x and the weights."""
    name = type(net).__name__
    before = {key: value.nan_to_num() for key, value in tensors_of(net).items()}
    with on_copy(x, name) as x:
        f = net(x)
    if changed := [key for key, value in tensors_of(net).items() if not torch.equal(value.nan_to_num(), before[key])]:
        raise UserError(f"{name} changes its own '{changed[0]}' out of training mode; make it a function of its inputs")
    share = 1e-3 if x.device.type == "cpu" else 3e-2  # TF32 has 10 bits, and other kernels for other numbers of rows
    tolerance = dict(rtol=share, atol=share / 10 * max(1.0, f.abs().max().item()), equal_nan=True)
    if not torch.allclose(net(x), f, **tolerance):
        raise UserError(f"{name} gives other outputs for the same inputs out of training mode: it is random, or "
                        "remembers calls; dropout must be nn.Dropout, or F.dropout(x, p, self.training)")  # fmt: skip
    if (one := net(x[:1])).shape != f[:1].shape:
        raise UserError(f"{name} gives outputs of shape {tuple(one.shape)} for one row, without the axis of the rows; "
                        "take squeeze(-1), of the last axis alone, for squeeze()")  # fmt: skip
    # First and last: of a recurrent layer that takes rows for time, the first depends on no other.
    if not all(torch.allclose(net(x[i]), f[i], **tolerance) for i in (slice(1), slice(len(x) - 1, None))):
        raise UserError(f"the outputs of {name} for a row depend on the other rows of a batch, out of training mode; "
                        "normalise within a row, or by running statistics; recurrent layers and attention that take "
                        "rows first need batch_first=True")  # fmt: skip
