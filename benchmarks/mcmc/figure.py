"""``python -m benchmarks.mcmc --figure``: effective draws a second of every sampler, a panel a problem."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.mcmc.problems import TITLES
from benchmarks.mcmc.samplers import SAMPLERS
from benchmarks.mcmc.tables import median, runs_of
from benchmarks.provenance import ROOT

__all__ = ["draw"]


def draw() -> None:
    """The worst of the 50 points filled, their median open."""
    found = runs_of()
    names = [s for s in SAMPLERS if any((problem, s) in found for problem in TITLES)]
    figure = Figure(figsize=(12, 1.0 + 0.27 * len(names)), layout="constrained")
    for ax, (problem, title) in zip(figure.subplots(1, len(TITLES), sharey=True), TITLES.items(), strict=True):
        for k, sampler in enumerate(names):
            if runs := found.get((problem, sampler)):
                low, high = (median(runs, f"ess_{n}_per_second") for n in ("min", "median"))
                colour, marker = ("C0", "o") if sampler.startswith(("nuts", "chees")) else ("0.35", "s")
                ax.plot([low, high], [k, k], color=colour, linewidth=1)
                ax.plot(low, k, marker, color=colour, label="the worst of 50 points")
                ax.plot(high, k, marker, color=colour, markerfacecolor="white", label="their median")
        ax.set(xscale="log")
        ax.set_title(title, fontsize=10)
        ax.set_yticks(range(len(names)), [f"{SAMPLERS[s].title.replace('`', '')} ({s})" for s in names])
        ax.grid(axis="x", color="0.9")
    ax.invert_yaxis()
    figure.axes[1].set_xlabel("effective draws a second of the whole run")
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(ROOT / "benchmarks" / "figures" / "mcmc-speed.png", dpi=100)
