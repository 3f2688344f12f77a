"""How far each posterior of MNIST's last layer is from NUTS on the same weights, in its predictions of the test images.

    python benchmarks/last_layer_reference.py --seed 0 --runs /tmp/last-layer
    python benchmarks/last_layer_reference.py --seed 0 --rows 1000 --runs /tmp/last-layer

Compares what ``benchmarks/last_layer.py`` left in ``--runs``: agreement and total variation with NUTS (Izmailov et al.
2021), the test NLL of both, and R-hat of the class probabilities over chains. 1,000 draws each. Figures go to
``benchmarks/results/last_layer_reference.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from last_layer import RECIPES, cnn, data_for, last_layer, line, place

import bnn_pyro as bp

RESULTS = Path(__file__).parent / "results" / "last_layer_reference.json"
#: Test images whose class probabilities R-hat looks at: the most uncertain ones, and the first.
UNCERTAIN, FIRST = 150, 150
DRAWS = 1000


def convergence(posterior: bp.Posterior, data: bp.Dataset, prediction: bp.Prediction) -> dict:
    """Function-space R-hat and effective sample size over chains, where there are several."""
    if posterior.chains is None or next(iter(posterior.chains.values())).shape[0] < 2:
        return {}
    rows = np.unique(np.r_[prediction.total.argsort(descending=True)[:UNCERTAIN].numpy(), np.arange(FIRST)])
    found = bp.diagnostics.function_space(posterior, data.x_test[rows])
    rhat, ess = found.rhat.numpy().ravel(), found.ess_bulk.numpy().ravel()
    return {
        "rhat_worst": round(found.worst, 4),
        "rhat_median": round(float(np.nanmedian(rhat)), 4),
        "rhat_below_1.01": round(float((rhat < 1.01).mean()), 4),
        "ess_least": round(found.least, 1),
        "ess_median": round(float(np.nanmedian(ess)), 1),
        "functions": len(rhat),
    }


def main() -> None:
    """Compare what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--rows", type=int, help="training images (50,000)")
    parser.add_argument("--runs", type=Path, default=Path("runs/last-layer"), help="where posteriors are kept")
    args = parser.parse_args()
    data = data_for(args.rows)
    for seed in args.seed:
        there = [r for r in RECIPES if (place(args.runs, r, data, seed) / "posterior.json").is_file()]
        posteriors = {r: last_layer(r, data, seed, args.runs) for r in sorted(there, key=lambda r: r != "nuts")}
        posteriors["cnn"] = cnn(data, seed, args.runs)
        reference = None
        for recipe, posterior in posteriors.items():
            prediction = bp.predict(posterior, data.x_test, num_draws=DRAWS, seed=seed)
            reference = reference or prediction
            found = {
                name: [round(v, 6) for v in (e.value, e.low, e.high)]
                for name, e in bp.metrics.distances(prediction, reference).items()
            }
            found["nll"] = round(bp.metrics.nll(prediction, data.y_test), 5)
            found["error"] = round(bp.metrics.error(prediction, data.y_test), 5)
            if recipe == "nuts":
                halves = bp.metrics.distance_floor(prediction)
                found |= {f"{name}_floor": round(e.value, 6) for name, e in halves.items()}
                found["diverging"] = int(posterior.stats["diverging"].sum())
            found |= convergence(posterior, data, prediction)
            entry = line(recipe, seed, posterior, reference=found)
            print(json.dumps(entry), flush=True)
            lines = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
            RESULTS.write_text(json.dumps([*lines, entry], indent=1) + "\n")


if __name__ == "__main__":
    main()
