"""A frozen network that computes features, and a model with a Bayesian last layer on these features.

    φ(x) = net(x) / c          c the root mean square of the training rows' features
    w ~ p(w)    f = W φ(x) + b    y ~ likelihood(f)

The network runs in evaluation mode and without gradients; ``zoo.LastLayer`` documents which networks are supported and
which inputs they take. Torchvision networks lose their last linear layer, and their inputs are normalised as for
ImageNet. No file is unpickled.
"""

import copy
import hashlib
import json
import math
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from bnn_pyro.datasets.dataset import Dataset, InputPart, Schema
from bnn_pyro.errors import UserError, check_known, refusing
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.nets import in_mode, users_code, weights_digest
from bnn_pyro.parts.priors import BayesianNet

#: The most numbers and rows of the inputs in one call of the network, to limit the memory of its activations.
CHUNK_NUMBERS, CHUNK_ROWS = 2**21, 512
#: The inputs of a user's own network: standardised as in ``data.x_train``, or in the units of the raw data.
INPUTS = ("standardised", "raw")
#: Number of rows for ``check_scale``, and the largest KL divergence in nats per channel without a warning.
COMPARED, OFF = 512, 1.0


#: Called as report(rows done, rows in total).
Report = Callable[[int, int], None]


def row_blocks(x: Tensor, report: Report | None = None) -> Iterator[slice]:
    """Slices of the rows of x for separate calls of a network, with a report after each of them."""
    size = max(1, min(CHUNK_ROWS, CHUNK_NUMBERS // max(1, x.shape[1:].numel())))
    for start in range(0, len(x), size):
        yield slice(start, start + size)
        if report is not None:
            report(min(start + size, len(x)), len(x))


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A network that ends in its features, and information about it.

    net          inputs -> features, (B, *input_shape) -> (B, …)
    description  JSON values that identify the network, or from which it can be created again
    schema       of the data that it was trained on, whose standardised inputs it takes. If None, the network takes raw
                 inputs, or standardised inputs of the data in use if ``description["inputs"]`` is "standardised"
    head         weight (K, F) and bias (K,) or None of the last layer that it was trained with; None if there is none
    rows         digests of the rows that it was trained on; None if unknown
    """

    net: nn.Module
    description: Mapping[str, Any]
    schema: Schema | None = None
    head: tuple[Tensor, Tensor | None] | None = None
    rows: Tensor | None = None

    #: "raw" or "standardised".
    inputs = property(lambda self: "standardised" if self.schema is not None else self.description.get("inputs", "raw"))

    def taking(self, inputs: str) -> Self:
        """The same network for "raw" or "standardised" inputs. Raises UserError if it cannot take this kind."""
        if inputs != self.inputs and self.description["kind"] not in ("module", "file"):
            name = f"the backbone ({in_words(self.description)})"
            raise UserError(f"{name} takes {self.inputs} inputs; leave 'inputs' out")
        if inputs == self.inputs:
            return self
        # Old archives have descriptions without "inputs", which means raw: the description of raw must stay the same.
        about = {k: v for k, v in self.description.items() if k != "inputs"}
        return replace(self, description=about if inputs == "raw" else about | {"inputs": inputs})


class Backbone(nn.Module):
    """φ: standardised inputs (B, *input_shape) -> features (B, F), with a mean square of 1 on the training rows."""

    def __init__(self, pretrained: Pretrained, schema: Schema) -> None:
        super().__init__()
        reason = f"the backbone {type(pretrained.net).__name__} cannot be copied ({{error}})"
        message = f"{reason}; give it as a TorchScript or torch.export file"
        with refusing(message), torch.no_grad():  # copies of TorchScript record operations
            self.net = copy.deepcopy(pretrained.net).cpu()
        for parameter in self.net.parameters():  # a TorchScript module has no method requires_grad_
            parameter.requires_grad_(False)
        self.description = pretrained.description
        where = next((p.device for p in (*self.net.parameters(), *self.net.buffers())), None)
        self.register_buffer("scale", torch.tensor(1.0, device=where))
        self._schema, self._own = schema, None if pretrained.inputs == "raw" else pretrained.schema or schema
        ones = [part.is_whole or part.is_bool for part in schema.input_parts for _ in range(math.prod(part.shape))]
        blank = torch.tensor(ones).float() if ones else torch.zeros(schema.input_shape)  # 1 is a valid length or mask
        self.num_features = self._features(torch.stack([blank, blank]).to(where)).shape[1]

    def forward(self, x: Tensor, report: Report | None = None) -> Tensor:
        """Features of x, on the device of the network, computed for a few rows at a time.

        report: called as report(rows done, rows in total).
        Raises UserError if the network fails for these inputs, or if its features are not finite.
        """
        features = torch.empty(len(x), self.num_features, device=self.scale.device)
        for block in row_blocks(x, report):
            features[block] = self._features(x[block].to(self.scale.device))
        return features

    @torch.no_grad()
    def _features(self, x: Tensor) -> Tensor:
        name, schema, trained = f"the backbone ({in_words(self.description)})", self._schema, self._own
        shapes = ", ".join(f"{part.name} {part.shape}" for part in schema.input_parts) or tuple(x.shape)
        with users_code(f"{name} does not take inputs of shape {shapes}"), in_mode(self.net, training=False):
            if trained is None or (schema.x_shift, schema.x_scale) != (trained.x_shift, trained.x_scale):
                raw = schema.unstandardise(x)
                x = raw if trained is None else trained.standardise(raw)
            own_network = self.description["kind"] not in ("run", "untrained")
            features = called(self.net, schema, x) if own_network else self.net(x)
        shape = tuple(features.shape) if isinstance(features, Tensor) else ()
        if len(shape) < 2 or shape[0] != len(x) or not features[0].numel():
            got, rows = shape or type(features).__name__, len(x)
            raise UserError(f"{name} must give features of shape ({rows}, F) for {rows} rows, and gave {got}")
        if not bool(torch.isfinite(features).all()):
            raise UserError(f"{name} gave features that are not finite")
        return features.flatten(1).to(torch.float32) / self.scale


def unpack(parts: Sequence[InputPart], _: nn.Module, args: tuple[Tensor, ...], kwargs: dict) -> tuple[tuple, dict]:
    """A forward pre-hook that splits the input into the module's arguments, by position if their names are numbers."""
    named, pieces = {}, args[0].split([math.prod(part.shape) for part in parts], -1)
    for part, piece in zip(parts, pieces, strict=True):
        value = piece.reshape(*piece.shape[:-1], *part.shape)
        named[part.name] = value.to(torch.int64) if part.is_whole else value.bool() if part.is_bool else value
    if all(name.isdigit() for name in named):
        return (*named.values(), *args[1:]), kwargs
    return args[1:], {**kwargs, **named}


class OnFeatures(nn.Module):
    """p(y, w | x): a Bayesian last layer, ``head``, on the features of a frozen ``backbone``."""

    def __init__(self, backbone: Backbone, head: BayesianNet) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    initial = property(lambda self: self.head.initial)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Draw w, then the site "y" for inputs x (B, *input_shape); y (B,) observes it."""
        return self.head(self.backbone(x), y)


def in_words(description: Mapping[str, Any]) -> str:
    """A backbone's description as text for error messages."""
    return " ".join(str(description[k]) for k in ("kind", "entry", "name", "class", "path") if k in description)


def called(net: nn.Module, schema: Schema, x: Tensor) -> Tensor:
    """Call a user's module on rows x (B, *input_shape), which may contain several inputs of the module."""
    x = x.clone()  # the module may change its inputs in place
    args, named = unpack(schema.input_parts, net, (x,), {}) if schema.input_parts else ((x,), {})
    return net(*args, **named)


def check_scale(net: nn.Module, data: Dataset, scale: str, name: str, variant: str, hooked: bool = False) -> None:
    """Warn if a trained network takes inputs of this ``scale`` ("standardised", "raw") and seems trained on others.

    The mean and variance of the inputs of its first batch normalisation on training rows are compared with the running
    ones, by KL(Normal ‖ Normal), averaged over channels. Networks without batch normalisation are not checked.

    hooked: the network takes standardised inputs, which its own hook converts to raw ones.
    """
    x = data.x_train[:COMPARED]
    raw = data.schema.unstandardise(x)
    kinds = {"standardised": x, "raw": raw, "raw / 255": raw / 255, "raw × 255": raw * 255}
    call = partial(called, net, data.schema) if variant == "LastLayer" else net  # else a hook calls ``unpack``
    off = {kind: _off(net, call, data.schema.standardise(v) if hooked else v) for kind, v in kinds.items()}
    best = min(off, key=off.__getitem__)
    if off[scale] > OFF and off[best] < 0.1 * off[scale]:
        way = f"{variant}(…, inputs='{best}')" if best in INPUTS else "data in these units"
        warnings.warn(f"{name} is given {scale} inputs, and its batch normalisation was trained on others, such as "
                      f"{best} ones; give {way} if it was", stacklevel=2)  # fmt: skip


@torch.no_grad()
def _off(net: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """KL divergence in nats of the first batch normalisation's inputs from its running statistics; 0 without one."""
    layers = (part for part in net.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm))
    if (layer := next((part for part in layers if part.num_batches_tracked), None)) is None:
        return 0.0
    inputs: list[Tensor] = []
    try:
        with layer.register_forward_pre_hook(lambda _, args: inputs.extend(args)), in_mode(net, training=False):
            call(x.clone())
        rows = inputs[0].double().transpose(0, 1).flatten(1)
    except Exception:  # the network may fail for this kind of inputs
        return math.inf
    observed = Normal(rows.mean(1), (rows.var(1, correction=0) + layer.eps).sqrt())
    running = Normal(layer.running_mean.double(), (layer.running_var.double() + layer.eps).sqrt())
    return kl_divergence(observed, running).mean().item()


def from_text(text: str) -> Pretrained:
    """The network that ``text`` names. Raises UserError for an unknown file or architecture, or other weights."""
    name, colon, file = text.partition(":")
    if colon and not Path(text).is_file() and not set(name) & set("/\\."):
        return _torchvision(name, Path(file))
    if (path := Path(text).expanduser()).suffix not in (".pt", ".ts", ".pt2"):
        raise UserError(f"the backbone '{text}' is none of: auto, convnet, mlp, the folder of a run of these, a file "
                        "of TorchScript (.pt) or torch.export (.pt2), a torchvision model (resnet18:FILE)")  # fmt: skip
    return _from_file(path)


def from_description(description: Mapping[str, Any]) -> Pretrained:
    """The network of a saved posterior, perhaps without its weights. Raises UserError if it is missing or changed."""
    if description["kind"] == "torchvision":
        return Pretrained(_Torchvision(description["name"]), description)
    if description["kind"] == "module":
        raise UserError(f"the backbone of this posterior is a module of your own ({description['class']}), which no "
                        "archive of tensors holds; take load(folder, entry=LastLayer(backbone=module, …))")  # fmt: skip
    return _from_file(Path(description["path"]), description["sha256"]).taking(description.get("inputs", "raw"))


def _from_file(path: Path, expected: str | None = None) -> Pretrained:
    """The network in a file. Raises UserError if its SHA-256 is not ``expected``."""
    if not path.is_file():
        raise UserError(f"there is no file {path}, a network from torch.export or TorchScript")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if expected not in (None, digest):
        raise UserError(f"the backbone file {path} is not the one that this posterior was made with (SHA-256 "
                        f"{digest[:16]}, then {expected[:16]}); restore the file or train again")  # fmt: skip
    exported = path.suffix == ".pt2"
    kind, writer = ("torch.export", "export.save") if exported else ("TorchScript", "jit.script(module).save")
    with refusing(f"{path} is no whole {kind} file ({{error}}); write it by torch.{writer}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        if exported:
            _refuse_pickles(path)
        net = torch.export.load(path).module() if exported else torch.jit.load(path, map_location="cpu").eval()
    return Pretrained(net, {"kind": "file", "path": str(path.resolve()), "sha256": digest})


def _refuse_pickles(path: Path) -> None:
    """Raise UserError for objects that ``torch.export.load`` would unpickle, and for compiled code."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        configs = [json.loads(archive.read(name)) for name in names if name.endswith("_config.json")]
    if not any(name.endswith("/archive_format") for name in names):
        raise UserError(f"{path} is not in the present format of torch.export.save; write it again with that")
    code = any(part in name for name in names for part in ("custom_obj_", "opaque_obj_", "aotinductor/"))
    if code or any(entry.get("use_pickle") for config in configs for entry in config.get("config", {}).values()):
        raise UserError(f"{path} holds pickled objects or compiled code, which are not read; export tensors only")


class _Torchvision(nn.Module):
    """A torchvision classifier without its last linear layer: pixels in [0, 1], 1 or 3 channels -> features."""

    def __init__(self, name: str) -> None:
        from torchvision import models

        super().__init__()
        check_known("torchvision architecture", models.list_models(module=models), name)
        with isolated(0):  # torchvision draws initial weights
            self.net = models.get_model(name, weights=None)
        if not (last := [key for key, part in self.net.named_modules() if isinstance(part, nn.Linear)]):
            raise UserError(f"torchvision's {name} ends in no linear layer that could be made Bayesian")
        parent, _, child = last[-1].rpartition(".")
        setattr(self.net.get_submodule(parent), child, nn.Identity())
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x.expand(-1, 3, -1, -1) - self.mean) / self.std)


def _torchvision(name: str, file: Path) -> Pretrained:
    module, file = _Torchvision(name), file.expanduser()
    if not file.is_file():
        raise UserError(f"no weights file {file} for torchvision's {name}; save one with torch.save(net.state_dict())")
    with refusing(f"{file} holds no weights of torchvision's {name}: {{error}}"):
        state = torch.load(file, map_location="cpu", weights_only=True)
        if missing := module.net.load_state_dict(state, strict=False).missing_keys:
            raise ValueError(f"it lacks {missing[0]}")
    weights = weights_digest(module.net)
    return Pretrained(module, {"kind": "torchvision", "name": name, "path": str(file.resolve()), "weights": weights})
