"""MNIST: a point estimate, posteriors of its last layer by several methods, and an ensemble, all on the same split.

    python benchmarks/last_layer.py cnn svi sghmc laplace --seed 0 1 2 3 4 --runs /tmp/last-layer
    python benchmarks/last_layer.py nuts svi-full ensemble --seed 0 --runs /tmp/last-layer

50,000 training images; 10,000 held out, by which training stops early and settings were chosen; the official 10,000
test images are scored with 100 draws at temperature 1. Fitted posteriors are kept in ``--runs`` and taken up again from
there; figures are appended to ``benchmarks/results/last_layer.json``.

    python benchmarks/last_layer.py speed               # needs no data; benchmarks/results/last_layer_speed.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

import bnn_pyro as bp
from bnn_pyro.datasets import load_inputs, noise_images
from bnn_pyro.fitting import tuned
from bnn_pyro.inference import METHODS
from bnn_pyro.settings import build

RESULTS = Path(__file__).parent / "results" / "last_layer.json"


def data_for(rows: int | None) -> bp.Dataset:
    """MNIST with 10,000 images held out; ``rows`` of the others to train on."""
    return bp.load_data("mnist", limit=rows)


#: Recipe -> method, and what differs from the settings of the zoo.
RECIPES: dict[str, tuple[str, dict]] = {
    "svi": ("svi", {}),
    "svi-full": ("svi", {"family": "full", "epochs": 100, "lr": 3e-3}),
    "laplace": ("laplace", {}),
    "laplace-kron": ("laplace", {"structure": "kron"}),
    "sghmc": ("sghmc", {}),
    "sghmc-long": ("sghmc", {"epochs": 4000, "burn_in": 200, "max_draws": 500}),
    "nuts": ("nuts", {}),
}
#: What is different with few training images, where an epoch is a few steps only; the prior by held-out images.
FEW = {
    "cnn": {"epochs": 40, "batch_size": 20, "patience": 10},
    "sghmc": {"prior": "fan-in:8", "epochs": 6000, "batch_size": 0},
    "svi": {"prior": "fan-in:8", "epochs": 1500, "batch_size": 0, "lr": 0.02},
    "laplace": {"prior": "fan-in:8"},
    "nuts": {"prior": "fan-in:8"},
}


def few(data: bp.Dataset, method: str) -> dict:
    """Settings that differ for the number of training images."""
    return FEW.get(method, {}) if len(data.x_train) <= 5000 else {}


def place(runs: Path, recipe: str, data: bp.Dataset, seed: int) -> Path:
    """Where a fitted posterior is kept."""
    return runs / f"{recipe}-{len(data.x_train)}-{seed}"


def cnn(data: bp.Dataset, seed: int, runs: Path) -> bp.Posterior:
    """The point estimate, from ``runs`` if it is there."""
    _, best = tuned("convnet", "mnist")
    how = bp.MAP(**{**best.method, **few(data, "cnn")})
    return bp.fit(bp.ConvNet(**best.entry), data, how, seed=seed, out=place(runs, "cnn", data, seed), resume=True)


def last_layer(recipe: str, data: bp.Dataset, seed: int, runs: Path) -> bp.Posterior:
    """A posterior of the last layer of the CNN of that seed, from ``runs`` if it is there."""
    method, differs = RECIPES[recipe]
    _, best = tuned("last-layer", "mnist", method)
    settings = {**best.entry, **best.method, **few(data, method), **differs}
    fields = bp.LastLayer.__dataclass_fields__
    entry = bp.LastLayer(cnn(data, seed, runs), **{k: v for k, v in settings.items() if k in fields})
    how = build(METHODS[method], {k: v for k, v in settings.items() if k not in fields})
    return bp.fit(entry, data, how, seed=seed, out=place(runs, recipe, data, seed), resume=True)


def ensemble(data: bp.Dataset, runs: Path, members: int = 5) -> bp.Posterior:
    """The point estimates of seeds 0 … members − 1 as a deep ensemble."""
    points = [cnn(data, seed, runs) for seed in range(members)]
    chains = {site: torch.cat([point.chains[site] for point in points]) for site in points[0].chains}
    seconds = sum(point.provenance["seconds"] for point in points)
    provenance = {**points[0].provenance, "method": "ensemble", "seconds": seconds}
    return bp.Posterior(points[0].model, points[0].schema, chains=chains, provenance=provenance)


def score(posterior: bp.Posterior, data: bp.Dataset, point: bp.Posterior | None) -> dict:
    """Metrics on test and validation rows, OOD AUROC, and the paired difference to the point estimate."""
    inside = bp.predict(posterior, data.x_test, num_draws=100)
    found = {name: round(e.value, 5) for name, e in bp.metrics.evaluate(inside, data.y_test, bootstrap=200).items()}
    found["ece_floor"] = round(bp.metrics.ece_floor(inside).mean, 5)
    held_out = bp.metrics.evaluate(bp.predict(posterior, data.x_val, num_draws=100), data.y_val, bootstrap=2)
    found["validation"] = {name: round(held_out[name].value, 5) for name in ("error", "nll", "ece")}
    if point is not None:
        before = bp.predict(point, data.x_test)
        found["minus_point"] = {}
        for name in ("error", "nll"):
            e = bp.metrics.paired(name, inside, before, data.y_test)
            found["minus_point"][name] = [round(v, 6) for v in (e.value, e.low, e.high)]
    outside = {
        "kmnist": load_inputs("kmnist", data.schema),
        "uniform noise": noise_images("uniform", 10_000, data.schema, seed=0),
        "gaussian noise": noise_images("gaussian", 10_000, data.schema, seed=0),
    }
    found["entropy_inside"] = round(inside.total.mean().item(), 5)
    for name, inputs in outside.items():
        prediction = bp.predict(posterior, inputs, num_draws=100)
        table = bp.metrics.ood_table(inside, prediction, bootstrap=2)
        found[name] = {"mean_entropy": round(prediction.total.mean().item(), 5)}
        found[name] |= {k: round(e.value, 5) for k, e in table.items()}
    return found


def line(recipe: str, seed: int, posterior: bp.Posterior, **figures: object) -> dict:
    """One entry of the results file."""
    about = posterior.provenance
    settings = {**about["entry_settings"], **about["method_settings"]}
    return {
        "recipe": recipe,
        "seed": seed,
        "rows": about["rows"]["train"],
        **figures,
        "settings": {k: v for k, v in settings.items() if k != "backbone"},
        "seconds": about["seconds"],
        "command": "python " + " ".join(sys.argv),
        "commit": subprocess.check_output(["git", "describe", "--always", "--dirty"], text=True).strip(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
    }


def append(entry: dict) -> None:
    """Print a line and add it to the results."""
    print(json.dumps(entry), flush=True)
    lines = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    RESULTS.write_text(json.dumps([*lines, entry], indent=1) + "\n")


def main() -> None:
    """Fit, score, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="+", choices=["cnn", *RECIPES, "ensemble", "speed"])
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--rows", type=int, help="training images (50,000)")
    parser.add_argument("--runs", type=Path, default=Path("runs/last-layer"), help="where posteriors are kept")
    args = parser.parse_args()
    if "speed" in args.recipe:
        if args.recipe != ["speed"]:
            parser.error("speed is measured alone")
        from speed import last_layer as speed

        speed.measure()
        return
    data = data_for(args.rows)
    for recipe in args.recipe:
        for seed in [0] if recipe == "ensemble" else args.seed:
            if recipe == "ensemble":
                posterior = ensemble(data, args.runs)
            else:
                make = cnn if recipe == "cnn" else partial(last_layer, recipe)
                posterior = make(data, seed, args.runs)
            point = None if recipe == "cnn" else cnn(data, seed, args.runs)
            append(line(recipe, seed, posterior, metrics=score(posterior, data, point)))


if __name__ == "__main__":
    main()
