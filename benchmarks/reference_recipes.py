"""The posteriors of ``benchmarks/references.py``: model, data, inputs that are predicted, and the two runs of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bnn_pyro as bp
from bnn_pyro.inference import METHODS
from bnn_pyro.settings import build
from bnn_pyro.zoo import ZOO

__all__ = ["RECIPES", "Recipe", "data_of", "entry_of", "inputs_of"]

#: Draws are thinned so far that neighbours are independent; every chain starts at a draw of the prior of its own.
WIDE = {"chains": 100, "superchains": 100, "draws": 100, "start": "prior"}


@dataclass(frozen=True)
class Recipe:
    """A posterior, and the two runs that sample it.

    variant, entry  of the zoo, with the settings that the posterior depends on
    data            arguments of ``load_data``
    first, second   (method, settings): the run that is stored, and the one that it is compared with
    backbone        settings of the network that a last layer stands on, and of how it is trained
    inputs          what is predicted: test (rows of it), rows (of test and training), mesh (test and a grid), line
    """

    title: str
    variant: str
    entry: Mapping[str, Any]
    data: Mapping[str, Any]
    first: tuple[str, Mapping[str, Any]]
    second: tuple[str, Mapping[str, Any]]
    backbone: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "test"


RECIPES: dict[str, Recipe] = {
    "toy-curve": Recipe(
        "toy-curve, 1-32-1",
        "mean-field",
        {"hidden": [32], "activation": "relu", "prior": "normal:3", "noise": 1.0},
        {"name_or_path": "toy-curve"},
        ("chees", {**WIDE, "warmup": 600, "thin": 20}),
        ("nuts", {"chains": 8, "warmup": 1000, "draws": 1500, "start": "prior", "cores": 1}),
        inputs="line",
    ),
    "breast-cancer": Recipe(
        "breast-cancer, two features, 2-5-5-1",
        "mean-field",
        {"hidden": [5, 5], "activation": "tanh", "prior": "fan-in:1.5"},
        {"name_or_path": "breast-cancer", "features": ["mean radius", "mean texture"]},
        ("chees", {**WIDE, "warmup": 600, "thin": 20}),
        ("nuts", {"chains": 8, "warmup": 1000, "draws": 1500, "start": "prior", "cores": 1}),
        inputs="mesh",
    ),
    "digits-last-layer": Recipe(
        "digits, last layer of a 64-50-10 network",
        "last-layer",
        {"prior": "fan-in:8"},
        {"name_or_path": "digits"},
        ("chees", {**WIDE, "warmup": 300, "thin": 10}),
        ("nuts", {"chains": 8, "warmup": 300, "draws": 400, "start": "prior", "cores": 1}),
        backbone={"hidden": [50], "prior": "normal:1", "method": {"epochs": 100, "batch_size": 64, "lr": 3e-3}},
    ),
    "mnist-160": Recipe(
        "160 MNIST images, 784-10-10",
        "mean-field",
        {"hidden": [10], "activation": "relu", "prior": "fan-in:1"},
        {"name_or_path": "mnist", "limit": 160},
        ("chees", {**WIDE, "warmup": 400, "thin": 8}),
        ("chees", {"chains": 50, "superchains": 50, "draws": 200, "warmup": 300, "start": "jitter"}),
    ),
    "boston": Recipe(
        "boston housing, split 0, 13-50-1",
        "mean-field",
        {"hidden": [50], "activation": "tanh", "prior": "fan-in:1", "noise": "learned"},
        {
            "name_or_path": "uci/bostonHousing.csv",
            "target": "y",
            "task": "regression",
            "splits": "uci/bostonHousing.splits.npz",
            "split": 0,
        },
        ("chees", {**WIDE, "chains": 40, "superchains": 40, "draws": 250, "warmup": 250, "thin": 4}),
        ("chees", {"chains": 20, "superchains": 20, "draws": 200, "warmup": 250, "start": "jitter"}),
        inputs="rows",
    ),
}


def data_of(recipe: Recipe) -> bp.Dataset:
    """Its data set."""
    return bp.load_data(**recipe.data)


def backbone_of(recipe: Recipe, data: bp.Dataset, folder: Path) -> nn.Module:
    """Pixels in [0, 1] -> features: the hidden layer of a network fitted to its most probable weights."""
    about = dict(recipe.backbone)
    method = METHODS["map"](**about.pop("method"))
    entry = build(ZOO["mlp"], about)
    fitted = bp.fit(entry, data, method, seed=0, out=folder / "backbone", resume=True, device="cpu", progress=False)
    w = {site: value[0].double() for site, value in fitted.draw(1).items()}
    (shift,), (scale,) = data.schema.x_shift, data.schema.x_scale
    layer = nn.Linear(*reversed(w["layers.0.weight"].shape))
    with torch.no_grad():
        layer.weight.copy_(w["layers.0.weight"] / scale)
        layer.bias.copy_(w["layers.0.bias"] - w["layers.0.weight"].sum(1) * shift / scale)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU())


def entry_of(recipe: Recipe, data: bp.Dataset, folder: Path) -> Any:
    """The variant with its settings, on its backbone where it has one."""
    given = {"backbone": backbone_of(recipe, data, folder)} if recipe.backbone else {}
    return build(ZOO[recipe.variant], {**recipe.entry, **given})


def inputs_of(recipe: Recipe, data: bp.Dataset) -> Tensor:
    """(B, *input_shape) standardised inputs that are predicted."""
    if recipe.inputs == "line":
        return data.schema.standardise(torch.linspace(-4, 4, 81, dtype=torch.float64)[:, None])
    if recipe.inputs == "rows":
        return torch.cat([data.x_test[:60], data.x_train[:60]])
    if recipe.inputs == "mesh":
        low, high = data.x_train.amin(0) - 0.5, data.x_train.amax(0) + 0.5
        axes = [torch.linspace(a, b, 12) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
        return torch.cat([data.x_test, torch.cartesian_prod(*axes)])
    return data.x_test[:150]
