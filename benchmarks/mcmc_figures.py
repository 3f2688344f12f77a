"""``benchmarks/mcmc.py figures``: what mean-field SVI and Markov chains believe, side by side; and who is how fast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from mcmc_posteriors import METHOD_TITLES, posterior
from mcmc_problems import PROBLEMS, Problem
from mcmc_speed import HERE

import bnn_pyro as bp
from bnn_pyro.inference import METHODS

__all__ = ["draw"]

FIGURES = HERE / "figures"
DRAWS = 2000


def draw(runs: Path) -> None:
    """All of them, from posteriors in ``runs`` (fitted there where they are not)."""
    network, curve = PROBLEMS["breast-cancer"](), PROBLEMS["toy-curve"]()
    maps(network, runs).savefig(FIGURES / "mcmc-maps.png", dpi=100)
    bands(curve, runs).savefig(FIGURES / "mcmc-bands.png", dpi=100)


def shown() -> dict[str, str]:
    """The methods in the pictures, and their titles."""
    names = ("svi", "svi-converged", "nuts", "chees")
    return {name: METHOD_TITLES[name] for name in names if name.split("-")[0] in METHODS}


def maps(problem: Problem, runs: Path) -> Figure:
    """Decision boundary above, epistemic uncertainty below, a column a method, colours alike within a row."""
    data, grid, methods = problem.data, bp.plots.grid(problem.data, num=120, margin=0.25), shown()
    predictions = {n: bp.predict(posterior(n, problem, runs), grid.x, num_draws=DRAWS) for n in methods}
    most = max(p.epistemic.max().item() for p in predictions.values())
    figure = Figure(figsize=(3.5 * len(methods) + 0.8, 7.2), layout="constrained")
    axes = figure.subplots(2, len(methods), sharex=True, sharey=True, squeeze=False)
    for k, (name, title) in enumerate(methods.items()):
        top, bottom = axes[:, k]
        bp.plots.decision_boundary(predictions[name], grid, data.x_train, data.y_train, ax=top)
        bp.plots.epistemic_map(predictions[name], grid, data.x_train, data.y_train, ax=bottom)
        bottom.collections[0].set_clim(0, most)
        top.set(title=title, xlabel="")
        bottom.set(title="")
        for ax in (top, bottom):
            ax.get_legend().remove()
            if k + 1 < len(methods):
                ax.collections[0].colorbar.remove()
            if k:
                ax.set_ylabel("")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, markerscale=1.3)
    return figure


def bands(problem: Problem, runs: Path) -> Figure:
    """The predictive band of each method, axes alike."""
    data, methods = problem.data, shown()
    x = bp.plots.line(data, -3, 3)
    figure = Figure(figsize=(3.6 * len(methods), 3.5), layout="constrained")
    axes = np.ravel(figure.subplots(1, len(methods), sharey=True))
    for k, (ax, (name, title)) in enumerate(zip(axes, methods.items(), strict=True)):
        bp.plots.predictive_band(bp.predict(posterior(name, problem, runs), x, num_draws=DRAWS), x, data, ax=ax)
        ax.set_title(title)
        ax.get_legend().remove()
        if k:
            ax.set_ylabel("")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    return figure
