"""Pictures of MNIST's last layer by several methods: an ambiguous digit, some weights, and a growing ensemble.

    python benchmarks/last_layer_figures.py --runs /tmp/last-layer

From what ``benchmarks/last_layer.py`` left in ``--runs`` (seed 0): writes ``benchmarks/figures/last-layer-*.png``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from last_layer import cnn, data_for, last_layer

import bnn_pyro as bp

FIGURES = Path(__file__).parent / "figures"
METHODS = {"SVI, mean-field": "svi", "Laplace": "laplace", "SGHMC": "sghmc-long", "NUTS": "nuts"}


def main() -> None:
    """Draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/last-layer"), help="where posteriors are kept")
    runs = parser.parse_args().runs
    data = data_for(None)
    posteriors = {label: last_layer(recipe, data, 0, runs) for label, recipe in METHODS.items()}
    predictions = {label: bp.predict(p, data.x_test, num_draws=400) for label, p in posteriors.items()}
    reference = predictions["NUTS"]
    row = int(reference.total.argmax())  # chosen by the reference alone: what it is least sure of
    mean = posteriors["NUTS"].chains["layers.0.weight"].mean((0, 1))[7]
    largest = mean.abs().argsort(descending=True)[:5].tolist()
    weights = ["layers.0.bias[7]", *(f"layers.0.weight[7,{k}]" for k in largest)]
    pictures = {
        "digit": bp.plots.method_predictions(predictions, row, x=data.x_test, y=data.y_test, schema=data.schema),
        "weights": bp.plots.weight_posteriors(posteriors, weights),
        "ensemble": bp.plots.growing_ensemble(
            posteriors["SGHMC"], data.x_val, data.y_val, baseline=bp.predict(cnn(data, 0, runs), data.x_val)
        ),
        "uncertain": bp.plots.uncertain_images(reference, data.x_test, data.y_test, data.schema),
        "reliability": bp.plots.reliability(reference, data.y_test),
        "confidence": bp.plots.confidence_histogram(reference, data.y_test),
    }
    for name, axes in pictures.items():
        np.ravel(np.asarray(axes, dtype=object))[0].figure.savefig(FIGURES / f"last-layer-{name}.png", dpi=110)


if __name__ == "__main__":
    main()
