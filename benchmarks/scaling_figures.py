"""``benchmarks/scaling.py figures``: what grows how, and measured memory beside its formula.

Writes ``benchmarks/figures/scaling.png`` from ``benchmarks/results/scaling.json``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scale.formulae import expected
from scale.growth import SWEEPS
from scale.store import read
from scale.subjects import SUBJECTS
from scaling_tables import best, sizes_of, sweep_lines
from seaborn import color_palette

from bnn_pyro.plots.style import LINES, MARKERS, REFERENCE, drawn, figure

__all__ = ["draw", "growth"]

FIGURES = Path(__file__).parent / "figures"
#: By their values: "C0" would be looked up when the picture is saved, in the cycle that is the default then.
COLOURS = color_palette("colorblind").as_hex()[:4]
#: Title of a panel, its sweeps (subject, what grows), its axis.
PANELS = (
    ("A step of a network", [("mean-field", "width"), ("hidden-layer", "width"), ("map", "width")], "weights P"),
    ("A fit by many chains", [(name, "chains") for name in ("chees-chains", "chees-net", "sghmc-chains")], "chains C"),
)


def draw() -> None:
    """The picture."""
    growth(read()).savefig(FIGURES / "scaling.png", dpi=110)


@drawn
def growth(found: dict) -> Figure:
    """Seconds by size, two panels; and bytes by formula against bytes measured."""
    made = figure(11, 3.5)
    *left, last = made.subplots(1, 3)
    for ax, (title, sweeps, label) in zip(left, PANELS, strict=True):
        for k, (subject, grows) in enumerate(sweeps):
            sweep = next(s for s in SWEEPS if s[:2] == (subject, grows))
            lines = sweep_lines(found.get("growth", []), *sweep)
            sizes = [sizes_of(line) for line in lines]
            x = [s.weights if grows == "width" else getattr(s, grows) for s in sizes]
            y = [best(line, "whole" if grows == "chains" else "seconds") for line in lines]
            ax.plot(x, y, LINES[k], marker=MARKERS[k], color=COLOURS[k], label=SUBJECTS[subject].title)
        _proportional(ax)
        ax.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds", title=title)
        ax.legend()
    _bytes(last, found)
    return made


def _proportional(ax: Axes) -> None:
    """A line of power 1 through the last point of the first curve."""
    if ax.lines and len(ax.lines[0].get_xdata()) > 1:
        x, y = (np.asarray(v, float) for v in (ax.lines[0].get_xdata(), ax.lines[0].get_ydata()))
        ax.plot(x, y[-1] * x / x[-1], color=REFERENCE, linewidth=0.8, linestyle=":", label="in proportion")


def _bytes(ax: Axes, found: dict) -> None:
    """Peaks against formulae, of all sweeps, within a third shaded."""
    for k, (part, label) in enumerate((("asked", "asked for"), ("growth", "resident"))):
        lines = found.get(part, [])
        x = [expected(line["key"]["subject"], sizes_of(line)) / 1e6 for line in lines]
        y = [best(line, "anonymous") / 1e6 for line in lines]
        ax.plot(x, y, MARKERS[k], color=COLOURS[k], label=label, markersize=4, markerfacecolor="none" if k else None)
    ends = np.array([4, 4000.0])
    ax.plot(ends, ends, color=REFERENCE, linewidth=0.8)
    ax.fill_between(ends, ends / 1.3, ends * 1.3, color="0.9", label="within 30 %")
    ax.set(xscale="log", yscale="log", xlabel="MB by the formula", ylabel="MB at the highest point", title="Memory")
    ax.legend()
