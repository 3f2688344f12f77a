"""MNIST: a point estimate, posteriors of its last layer by several methods, and an ensemble, all on the same split.

    python benchmarks/last_layer.py cnn --seed 0 1 2 3 4 --runs /tmp/last-layer

50,000 training images; 10,000 held out, by which training stops early and settings were chosen; the official 10,000
test images are scored with 100 draws at temperature 1. Fitted posteriors are kept in ``--runs`` and taken up again from
there; figures are appended to ``benchmarks/results/last_layer.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

import bnn_pyro as bp
from bnn_pyro.datasets import load_inputs, noise_images

RESULTS = Path(__file__).parent / "results" / "last_layer.json"


def data_for(rows: int | None) -> bp.Dataset:
    """MNIST with 10,000 images held out; ``rows`` of the others to train on."""
    return bp.load_data("mnist", limit=rows)


def cnn(data: bp.Dataset, seed: int, runs: Path) -> bp.Posterior:
    """The point estimate, from ``runs`` if it is there."""
    return bp.fit("convnet", data, seed=seed, out=runs / f"cnn-{len(data.x_train)}-{seed}", resume=True)


def score(posterior: bp.Posterior, data: bp.Dataset) -> dict:
    """Metrics on validation and test rows, and OOD AUROC."""
    inside = bp.predict(posterior, data.x_test, num_draws=100)
    found = {name: round(e.value, 5) for name, e in bp.metrics.evaluate(inside, data.y_test, bootstrap=200).items()}
    found["ece_floor"] = round(bp.metrics.ece_floor(inside).mean, 5)
    held_out = bp.metrics.evaluate(bp.predict(posterior, data.x_val, num_draws=100), data.y_val, bootstrap=2)
    found["validation"] = {name: round(held_out[name].value, 5) for name in ("error", "nll", "ece")}
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
    return {
        "recipe": recipe,
        "seed": seed,
        "rows": about["rows"]["train"],
        **figures,
        "settings": {**about["entry_settings"], **about["method_settings"]},
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
    parser.add_argument("recipe", nargs="+", choices=["cnn"])
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--rows", type=int, help="training images (50,000)")
    parser.add_argument("--runs", type=Path, default=Path("runs/last-layer"), help="where posteriors are kept")
    args = parser.parse_args()
    data = data_for(args.rows)
    for seed in args.seed:
        posterior = cnn(data, seed, args.runs)
        append(line("cnn", seed, posterior, metrics=score(posterior, data)))


if __name__ == "__main__":
    main()
