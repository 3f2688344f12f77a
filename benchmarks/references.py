"""Reference posteriors of Bayesian networks, verified in function space: made here, stored in ``bnn_pyro/references``.

    python benchmarks/references.py toy-curve breast-cancer digits-last-layer mnist-160 boston --runs /tmp/references
    python benchmarks/references.py boston --runs /tmp/references --no-store      # sample and print the bar only

Each is sampled twice: 10,000 draws by ChEES-HMC, every chain from a starting point of its own, thinned; and a second
run that shares nothing with it, by NUTS or from other starting points, unthinned. The bar is that of posteriordb (Magnusson
et al. 2024, arXiv:2407.04967), asked of what the network computes, because weights are not identified: 10,000 draws,
R-hat < 1.01, E-BFMI > 0.2, |autocorrelation at lag 1| < 0.05, no divergences; and the means and spreads of the two runs
must agree within their own Monte-Carlo error. What misses a criterion is stored with ``"met": false`` and the numbers.

A run is kept in ``--runs`` (seconds to an hour each) and, when interrupted, goes on from there to the same draws.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bnn_pyro as bp
from bnn_pyro.inference import METHODS
from bnn_pyro.settings import build
from bnn_pyro.zoo import ZOO

#: Draws are thinned so far that neighbours are independent; every chain starts at a draw of the prior of its own.
WIDE = {"chains": 100, "superchains": 100, "draws": 100, "start": "prior"}


@dataclass(frozen=True)
class Recipe:
    """A posterior, and the two runs that sample it.

    variant, entry  of the zoo, with the settings that the posterior depends on
    data            arguments of ``load_data``
    first, second   (method, settings): the run that is stored, and the one that it is compared with
    title           for tables
    """

    title: str
    variant: str
    entry: Mapping[str, Any]
    data: Mapping[str, Any]
    first: tuple[str, Mapping[str, Any]]
    second: tuple[str, Mapping[str, Any]]
    backbone: Mapping[str, Any] = field(default_factory=dict)


RECIPES: dict[str, Recipe] = {
    "toy-curve": Recipe(
        "toy-curve, 1-32-1",
        "mean-field",
        {"hidden": [32], "activation": "relu", "prior": "normal:3", "noise": 1.0},
        {"name_or_path": "toy-curve"},
        ("chees", {**WIDE, "warmup": 600, "thin": 20}),
        ("nuts", {"chains": 8, "warmup": 1000, "draws": 1500, "start": "prior"}),
    ),
    "breast-cancer": Recipe(
        "breast-cancer, two features, 2-5-5-1",
        "mean-field",
        {"hidden": [5, 5], "activation": "tanh", "prior": "fan-in:1.5"},
        {"name_or_path": "breast-cancer", "features": ["mean radius", "mean texture"]},
        ("chees", {**WIDE, "warmup": 600, "thin": 20}),
        ("nuts", {"chains": 8, "warmup": 1000, "draws": 1500, "start": "prior"}),
    ),
    "digits-last-layer": Recipe(
        "digits, last layer of a 64-50-10 network",
        "last-layer",
        {"prior": "fan-in:8"},
        {"name_or_path": "digits"},
        ("chees", {**WIDE, "warmup": 300, "thin": 10}),
        ("nuts", {"chains": 8, "warmup": 300, "draws": 400, "start": "prior"}),
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


def sampled(name: str, which: str, runs: Path) -> bp.Posterior:
    """The first or the second run, from ``runs`` where it is there; ``run.json`` beside it tells what made it."""
    recipe, folder = RECIPES[name], runs / name
    method, settings = getattr(recipe, which)
    data = data_of(recipe)
    entry, place = entry_of(recipe, data, folder), folder / which
    about = place / "run.json"
    if not about.is_file():
        place.mkdir(parents=True, exist_ok=True)
        about.write_text(json.dumps(stamp()))
    seed = 0 if which == "first" else 1
    start = time.perf_counter()
    how = dict(seed=seed, out=place, resume=True, device="cpu", progress=False)
    posterior = bp.fit(entry, data, build(METHODS[method], settings), **how)
    print(f"{name}, {which} run: {time.perf_counter() - start:.0f} s", flush=True)
    return posterior


def stamp() -> dict[str, str]:
    """What a run was made by."""
    here = Path(__file__).parent
    return {
        "command": "python " + " ".join(sys.argv),
        "commit": subprocess.check_output(["git", "describe", "--always", "--dirty"], text=True, cwd=here).strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread, torch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    """Sample, measure, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(RECIPES), metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--runs", type=Path, default=Path("runs/references"), help="where runs are kept")
    parser.add_argument("--no-store", action="store_true", help="sample only")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in RECIPES]:
        parser.error(f"no reference '{unknown[0]}'; there are {', '.join(RECIPES)}")
    torch.set_num_threads(1)
    for name in args.names:
        for which in ("first", "second"):
            sampled(name, which, args.runs)


if __name__ == "__main__":
    main()
