"""A user's own network as a backbone: a module, a TorchScript or torch.export file, or a torchvision architecture.

A network is written as a text: ``model.pt`` (TorchScript), ``model.pt2`` (torch.export), or ``resnet18:weights.pth``
(a torchvision architecture and its weights, whose last linear layer is left out). A module takes the standardised
inputs that a data set holds; a file, written for use without this package, takes inputs in their own units, pixels in
[0, 1]; ``Pretrained.taking`` changes it. Torchvision's take pixels, and are given ImageNet's normalisation. No file is
unpickled.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bnn_pyro.errors import UserError, first_line, unknown
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import Pretrained, weights_digest

__all__ = ["from_description", "from_module", "from_text"]

FILES = (".pt", ".ts", ".pt2")


def from_module(module: nn.Module) -> Pretrained:
    """A module whose output is the features; its inputs are standardised."""
    layers = hashlib.sha256(repr(module).encode()).hexdigest()[:16]  # weights alone do not tell a ReLU from a tanh
    about = {"kind": "module", "class": type(module).__name__, "layers": layers, "weights": weights_digest(module)}
    return Pretrained(module, about).taking("standardised")


def from_text(text: str) -> Pretrained:
    """The network that ``text`` names.

    Raises UserError where there is no such file or architecture, or the weights do not belong to it.
    """
    name, colon, file = text.partition(":")
    if colon and not Path(text).is_file() and not set(name) & set("/\\."):
        return _torchvision(name, Path(file))
    path = Path(text).expanduser()
    if path.suffix not in FILES:
        raise UserError(
            f"the backbone '{text}' is none of: auto, convnet, mlp, the folder of a run of these, a TorchScript file "
            "(.pt), a torch.export file (.pt2), or a torchvision architecture with a weights file (resnet18:FILE)"
        )
    return _from_file(path)


def from_description(description: Mapping[str, Any]) -> Pretrained:
    """The network of a saved posterior; its weights, where the posterior holds them, are put in afterwards.

    Raises UserError where it is needed and not there, or is another one by now.
    """
    if description["kind"] == "torchvision":
        return Pretrained(_Torchvision(description["name"]), description)
    if description["kind"] == "module":
        raise UserError(
            f"this posterior stands on a module of your own ({description['class']}), which an archive of tensors "
            "cannot hold; pass it: load(folder, entry=LastLayer(backbone=module, …))"
        )
    found = _from_file(Path(description["path"]), description["sha256"])
    return found.taking(description.get("inputs", "raw"))


def _from_file(path: Path, expected: str | None = None) -> Pretrained:
    """The network in a file, which is not read where it is another one than ``expected``."""
    if not path.is_file():
        raise UserError(f"no backbone file {path}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if expected not in (None, digest):
        raise UserError(
            f"the backbone file {path} is not the one that this posterior was made with (SHA-256 {digest[:16]}, then "
            f"{expected[:16]}); restore the file or train again"
        )
    return Pretrained(_read(path), {"kind": "file", "path": str(path.resolve()), "sha256": digest})


def _read(path: Path) -> nn.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated; its files are still about
            if path.suffix == ".pt2":
                _refuse_pickles(path)
                return torch.export.load(path).module()
            return torch.jit.load(path, map_location="cpu").eval()
    except UserError:
        raise
    except Exception as error:
        kind = "torch.export" if path.suffix == ".pt2" else "TorchScript"
        raise UserError(
            f"{path} is no {kind} file that can be read ({first_line(error)}); write it with "
            + ("torch.export.save" if path.suffix == ".pt2" else "torch.jit.script(module).save")
        ) from None


def _refuse_pickles(path: Path) -> None:
    """Refuse what ``torch.export.load`` would unpickle, or run: custom objects, tensor subclasses, compiled code."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        configs = [json.loads(archive.read(name)) for name in names if name.endswith("_config.json")]
    if not any(name.endswith("/archive_format") for name in names):
        raise UserError(f"{path} has the format of an older torch; write it again with torch.export.save")
    loaded = [entry for config in configs for entry in config.get("config", {}).values()]
    if any(part in name for name in names for part in ("custom_obj_", "opaque_obj_", "aotinductor/")) or any(
        entry.get("use_pickle") for entry in loaded
    ):
        raise UserError(f"{path} holds pickled objects or compiled code, which are not read; export tensors only")


class _Torchvision(nn.Module):
    """A torchvision classifier without its last linear layer: pixels in [0, 1], one channel or three -> features."""

    def __init__(self, name: str) -> None:
        from torchvision import models

        super().__init__()
        if name not in models.list_models(module=models):
            raise unknown("torchvision architecture", name, models.list_models(module=models))
        with isolated(0):  # it draws initial weights
            self.net = models.get_model(name, weights=None)
        last = [key for key, part in self.net.named_modules() if isinstance(part, nn.Linear)]
        if not last:
            raise UserError(f"torchvision's {name} ends in no linear layer that could be made Bayesian")
        parent, _, child = last[-1].rpartition(".")
        setattr(self.net.get_submodule(parent), child, nn.Identity())
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x.expand(-1, 3, -1, -1) - self.mean) / self.std)


def _torchvision(name: str, file: Path) -> Pretrained:
    whole = _Torchvision(name)
    file = file.expanduser()
    if not file.is_file():
        raise UserError(f"no weights file {file} for torchvision's {name}; save one with torch.save(net.state_dict())")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        missing = whole.net.load_state_dict(state, strict=False).missing_keys
    except Exception as error:
        raise UserError(f"{file} holds no weights of torchvision's {name}: {first_line(error)}") from None
    if missing:
        raise UserError(f"{file} holds no weights of torchvision's {name}: it lacks {missing[0]}")
    weights = weights_digest(whole.net)
    return Pretrained(whole, {"kind": "torchvision", "name": name, "path": str(file.resolve()), "weights": weights})
