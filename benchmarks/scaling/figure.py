"""``python -m benchmarks.scaling figure``: what grows how, and measured memory beside its formula."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.provenance import ROOT, Measurements
from benchmarks.scaling.formulae import expected
from benchmarks.scaling.growth import SWEEPS
from benchmarks.scaling.subjects import SUBJECTS
from benchmarks.scaling.tables import best, grown, sizes_of, sweep_lines

__all__ = ["draw"]

#: Title of a panel, its sweeps (subject, what grows), its axis.
PANELS = (
    ("A step of a network", [("mean-field", "width"), ("hidden-layer", "width"), ("map", "width")], "weights P"),
    ("A fit by many chains", [(name, "chains") for name in ("chees-chains", "chees-net", "sghmc-chains")], "chains C"),
)


def draw(path: Path) -> None:
    """Seconds by size, two panels; and bytes by formula against bytes measured."""
    growth, asked = (Measurements(path, part).lines() for part in ("growth", "asked"))
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    *left, last = figure.subplots(1, 3)
    for ax, (title, sweeps, label) in zip(left, PANELS, strict=True):
        for subject, grows in sweeps:
            lines = sweep_lines(growth, *next(s for s in SWEEPS if s[:2] == (subject, grows)))
            y = [best(line, "whole" if grows == "chains" else "seconds") for line in lines]
            ax.plot(grown(lines, grows), y, marker="o", label=SUBJECTS[subject].title)
        ax.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds", title=title)
        ax.legend(fontsize=8)
    for lines, label, face in ((asked, "asked for", None), (growth, "resident", "none")):
        x = [expected(line["key"]["subject"], sizes_of(line)) / 1e6 for line in lines]
        last.plot(x, [best(line, "anonymous") / 1e6 for line in lines], "o", markersize=4, mfc=face, label=label)
    ends = np.array([4, 4000.0])
    last.plot(ends, ends, color="0.4", linewidth=0.8)
    last.fill_between(ends, ends / 1.3, ends * 1.3, color="0.9", label="within 30 %")
    last.set(xscale="log", yscale="log", xlabel="MB by the formula", ylabel="MB at the highest point", title="Memory")
    last.legend(fontsize=8)
    figure.savefig(ROOT / "benchmarks" / "figures" / "scaling.png", dpi=110)
