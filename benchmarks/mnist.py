"""MNIST: test metrics and out-of-distribution detection, one recipe and seed a line of results.

    python benchmarks/mnist.py gaussian --seed 0
    python benchmarks/mnist.py hidden-layer variational-dropout dropout --seed 0
    python benchmarks/mnist.py mixture deterministic --seed 0 --validation 10000 --set epochs=30

Trains on the 60,000 training images with the settings of the zoo (chosen on 10,000 of them held out: ``--validation``),
scores the official test set with 100 draws at temperature 1, and appends to ``benchmarks/results/mnist.json``.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

import bnn_pyro as bp
from bnn_pyro.datasets import load_inputs, noise_images
from bnn_pyro.fitting import tuned
from bnn_pyro.inference import METHODS
from bnn_pyro.settings import build
from bnn_pyro.zoo import ZOO

RESULTS = Path(__file__).parent / "results" / "mnist.json"
#: variant, method, and what differs from the zoo's settings for MNIST.
RECIPES = {
    "gaussian": ("mean-field", "svi", {}),
    "mixture": ("mean-field", "svi", {"prior": "scale-mixture:3,0.3,0.5"}),
    "deterministic": ("mlp", "map", {}),
    "hidden-layer": ("hidden-layer", "svi", {}),
    "variational-dropout": ("variational-dropout", "svi", {}),
    "sparse-dropout": ("sparse-dropout", "svi", {}),
    "dropout": ("dropout-mlp", "mc-dropout", {}),
    "convnet": ("bayesian-convnet", "svi", {}),
    "deterministic-1024": ("mlp", "map", {"hidden": (1024, 1024, 1024)}),
}


def train(recipe: str, seed: int, validation: int, changes: dict) -> tuple[bp.Posterior, bp.Dataset]:
    """Fit one recipe on MNIST."""
    variant, method, differs = RECIPES[recipe]
    _, best = tuned(variant, "mnist", method)
    settings = {**best.entry, **differs, **best.method, **changes}
    entry_fields, method_fields = ZOO[variant].__dataclass_fields__, METHODS[method].__dataclass_fields__
    entry = build(ZOO[variant], {k: v for k, v in settings.items() if k in entry_fields})
    how = build(METHODS[method], {k: v for k, v in settings.items() if k in method_fields})
    data = bp.load_data("mnist", validation=validation, seed=0)
    return bp.fit(entry, data, how, seed=seed), data


def score(posterior: bp.Posterior, data: bp.Dataset, validation: int) -> dict:
    """Metrics on the test set (or the validation rows) of the draws and of the mean weights, and OOD AUROC."""
    x, y = (data.x_val, data.y_val) if validation else (data.x_test, data.y_test)
    at_mean = {}
    if posterior.guide is not None:
        prediction = bp.predict(posterior.at_mean_weights(), x, num_draws=1)
        at_mean = {k: round(e.value, 5) for k, e in bp.metrics.evaluate(prediction, y, bootstrap=2).items()}
        at_mean = {k: at_mean[k] for k in ("error", "nll", "ece")}
    inside = bp.predict(posterior, x, num_draws=100)
    found = {name: round(e.value, 5) for name, e in bp.metrics.evaluate(inside, y, bootstrap=200).items()}
    if at_mean:
        found["at_mean_weights"] = at_mean
    found["trace_end"] = {name: line[-1] for name, line in posterior.trace.items()}
    found["ece_floor"] = round(bp.metrics.ece_floor(inside).mean, 5)
    if not validation:
        schema = data.schema
        outside = {
            "kmnist": load_inputs("kmnist", schema),
            "uniform noise": noise_images("uniform", 10_000, schema, seed=0),
            "gaussian noise": noise_images("gaussian", 10_000, schema, seed=0),
        }
        found["entropy_inside"] = round(inside.total.mean().item(), 5)
        for name, inputs in outside.items():
            prediction = bp.predict(posterior, inputs, num_draws=100)
            found[name] = {
                "mean_entropy": round(prediction.total.mean().item(), 5),
                **{k: round(e.value, 5) for k, e in bp.metrics.ood_table(inside, prediction, bootstrap=2).items()},
            }
    return found


def main() -> None:
    """Train, score, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="+", choices=RECIPES)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--validation", type=int, default=0, help="rows held out of the training images and scored")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    args = parser.parse_args()
    changes = dict(text.split("=", 1) for text in args.set)
    for key, value in changes.items():
        try:
            changes[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            changes[key] = value
    for recipe in args.recipe:
        for seed in args.seed:
            posterior, data = train(recipe, seed, args.validation, changes)
            line = {
                "recipe": recipe,
                "seed": seed,
                "validation": args.validation,
                "metrics": score(posterior, data, args.validation),
                "settings": {**posterior.provenance["entry_settings"], **posterior.provenance["method_settings"]},
                "seconds": posterior.provenance["seconds"],
                "command": "python " + " ".join(sys.argv),
                "commit": subprocess.check_output(["git", "describe", "--always", "--dirty"], text=True).strip(),
                "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
                "date": datetime.date.today().isoformat(),
            }
            print(json.dumps(line), flush=True)
            lines = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps([*lines, line], indent=1) + "\n")


if __name__ == "__main__":
    main()
