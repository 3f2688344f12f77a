"""The README's figure: what a Bayesian and a deterministic network claim to know, near the data and far from them.

The posterior of the curve is sampled by NUTS: that of mean-field SVI is far too narrow in the gap.

python -m benchmarks.figures.readme
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

import bnn_pyro as bp

TARGET = Path(__file__).with_name("readme.png")
FEATURES = ["mean radius", "mean texture"]


def main() -> None:
    """Fit both networks on two data sets and draw four panels."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.3), layout="constrained")
    data = bp.load_data("toy-curve")
    network = dict(hidden=(32,), prior="normal:3", noise=1.0)
    posterior = bp.fit(bp.MeanField(**network), data, bp.NUTS(warmup=300, draws=250), seed=0)
    x = bp.plots.line(data, -4, 4)
    bp.plots.predictive_band(bp.predict(posterior, x, num_draws=1000), x, data, ax=axes[0])
    point = bp.predict(bp.fit(bp.MLP(**network), data, bp.MAP(epochs=3000, lr=0.01), seed=0), x)
    axes[0].plot(data.schema.unstandardise(x)[:, 0], point.mean, color="black", linestyle="-.")
    axes[0].text(-3.9, 21, "dash-dotted: the deterministic network", fontsize=8)
    axes[0].set(title="six points: less is known outside them", ylim=(-25, 25))

    data = bp.load_data("breast-cancer", features=FEATURES)
    network = bp.MeanField(hidden=(5, 5), activation="tanh", prior="fan-in:1.5")
    posterior = bp.fit(network, data, bp.SVI(epochs=450, lr=0.02), seed=0)
    mesh = bp.plots.grid(data, margin=0.25)
    prediction = bp.predict(posterior, mesh.x, num_draws=300)
    bp.plots.decision_boundary(prediction, mesh, data.x_test, data.y_test, ax=axes[1])
    bp.plots.epistemic_map(prediction, mesh, data.x_test, data.y_test, ax=axes[2])
    axes[1].set_title("breast cancer: P(malignant)")
    axes[2].set_title("and what the draws disagree on")
    figure.savefig(TARGET, dpi=90)
    print(TARGET)


if __name__ == "__main__":
    main()
