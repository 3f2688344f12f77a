"""``benchmarks/mcmc.py figures``: what mean-field SVI and Markov chains believe, side by side; and who is how fast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from mcmc_posteriors import METHOD_TITLES, posterior
from mcmc_problems import PROBLEMS, Problem
from mcmc_speed import HERE
from mcmc_tables import PROBLEMS as TITLES
from mcmc_tables import SAMPLERS, median, speed_lines

import bnn_pyro as bp
from bnn_pyro.inference import METHODS

__all__ = ["draw"]

FIGURES = HERE / "figures"
DRAWS = 2000


def draw(runs: Path) -> None:
    """All of them, from posteriors in ``runs`` (fitted there where they are not)."""
    if speed_lines():
        speeds().savefig(FIGURES / "mcmc-speed.png", dpi=100)
    network, curve = PROBLEMS["breast-cancer"](), PROBLEMS["toy-curve"]()
    maps(network, runs).savefig(FIGURES / "mcmc-maps.png", dpi=100)
    bands(curve, runs).savefig(FIGURES / "mcmc-bands.png", dpi=100)


def speeds() -> Figure:
    """Effective draws per second of every sampler, a panel a problem: the worst point filled, the median open."""
    found = speed_lines()
    names = [s for s in SAMPLERS if any((problem, s) in found for problem in TITLES)]
    figure = Figure(figsize=(12, 1.0 + 0.27 * len(names)), layout="constrained")
    for ax, (problem, title) in zip(figure.subplots(1, len(TITLES), sharey=True), TITLES.items(), strict=True):
        for k, sampler in enumerate(names):
            lines = found.get((problem, sampler), [])
            if lines:
                low, high = (median(lines, f"ess_{n}_per_second") for n in ("min", "median"))
                colour, marker = ("C0", "o") if sampler.startswith(("nuts", "chees")) else ("0.35", "s")
                ax.plot([low, high], [k, k], color=colour, linewidth=1)
                ax.plot(low, k, marker, color=colour, label="the worst of 50 points")
                ax.plot(high, k, marker, color=colour, markerfacecolor="white", label="their median")
        ax.set(xscale="log")
        ax.set_title(title, fontsize=10)
        ax.set_yticks(range(len(names)), [label(s, found) for s in names])
        ax.grid(axis="x", color="0.9")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    ax.invert_yaxis()
    figure.axes[1].set_xlabel("effective draws per second of the whole run")
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside lower center", ncols=2, frameon=False)
    return figure


def label(sampler: str, found: dict) -> str:
    """Name and chains."""
    chains = next(lines[0]["chains"] for (_, s), lines in found.items() if s == sampler)
    name = SAMPLERS[sampler].replace("`", "")
    return name if chains == 1 else f"{name}, {chains} chains"


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
