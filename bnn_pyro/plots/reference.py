"""A method beside a reference posterior, output by output: means, spreads, and what the method's intervals hold.

All from plain arrays, the evidence of ``checks.reference.Reference``. Outputs are the network's means in target units,
or the log-odds of classes. Bars show what chance alone does: two Monte-Carlo standard errors of the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from bnn_pyro.errors import UserError
from bnn_pyro.plots.style import BAYES, CONTRAST, HATCH, REFERENCE, drawn, legend_below, panel, panels, tint

__all__ = ["reference_band", "reference_coverage", "reference_outputs"]

#: Outputs that are drawn, evenly among all: more would cover each other.
MOST = 150


@drawn
def reference_outputs(
    reference_mean: ArrayLike,
    found_mean: ArrayLike,
    reference_sd: ArrayLike,
    found_sd: ArrayLike,
    *,
    mean_floor: ArrayLike = 0.0,
    sd_floor: ArrayLike = 0.0,
    unit: str = "target units",
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """Mean against mean (left) and standard deviation against standard deviation (right) of every output; axes (2,).

    The reference is across, the method up; on the dashed diagonal they are the same, below it on the right the method
    is too sure. Bars: two Monte-Carlo standard errors of the difference. Of many outputs 150 are drawn.

    All arrays of one shape, the floors broadcast to it.   unit: of the outputs, for the axes.
    """
    shape = np.shape(reference_mean)
    arrays = (reference_mean, found_mean, reference_sd, found_sd, mean_floor, sd_floor)
    flat = [np.broadcast_to(np.asarray(a, dtype=float), shape).ravel() for a in arrays]
    if not len(flat[0]):
        raise UserError("there are no outputs to draw")
    order = np.argsort(flat[0], kind="stable")
    kept = order[np.linspace(0, len(order) - 1, min(len(order), MOST)).round().astype(int)]
    means, mine, sds, my_sds, mean_floors, sd_floors = (a[kept] for a in flat)
    axes = panels(axes, 1, 2, 7.8, 3.7)
    _against(axes[0], means, mine, mean_floors)
    _against(axes[1], sds, my_sds, sd_floors, from_zero=True)
    for ax, what in zip(axes, ("posterior mean", "posterior standard deviation"), strict=True):
        ax.set(xlabel=f"reference: {what} ({unit})", ylabel=f"method: {what}")
    axes[0].set_title("Means")
    axes[1].set_title("Spreads")
    return axes


def _against(ax: Axes, across: np.ndarray, up: np.ndarray, floor: np.ndarray, from_zero: bool = False) -> None:
    low, high = min(across.min(), up.min()), max(across.max(), up.max())
    margin = 0.04 * (high - low or 1.0)
    low, high = (0.0 if from_zero else low - margin), high + margin
    ax.plot([low, high], [low, high], color=REFERENCE, linestyle="--", linewidth=1.2)
    ax.errorbar(
        across, up, yerr=floor, fmt="o", color=BAYES, ecolor=tint(BAYES, 0.45), markersize=3.5, elinewidth=0.9,
        markerfacecolor=tint(BAYES, 0.35), markeredgewidth=0.8,
    )  # fmt: skip
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")


@drawn
def reference_band(
    x: ArrayLike,
    reference_mean: ArrayLike,
    reference_sd: ArrayLike,
    found_mean: ArrayLike,
    found_sd: ArrayLike,
    *,
    label: str = "method",
    names: tuple[str, str] = ("x", "y"),
    ax: Axes | None = None,
) -> Axes:
    """The network's mean ± 2 standard deviations over the draws along one input: reference shaded, method hatched.

    x, …: (B,) or (B, 1), in their own units.   label: of the method.   names: of input and target.

    Raises UserError where there is more than one input.
    """
    x, *rest = (np.asarray(a, dtype=float) for a in (x, reference_mean, reference_sd, found_mean, found_sd))
    if x.size != len(x) or any(a.size != x.size for a in rest):
        raise UserError(f"a band needs one input and one output a point, got {x.shape} and {rest[0].shape}")
    order = np.argsort(x.ravel())
    x, mean, sd, mine, my_sd = (a.ravel()[order] for a in (x, *rest))
    ax = panel(ax, 5.6, 3.7)
    ax.fill_between(x, mean - 2 * sd, mean + 2 * sd, color=tint(REFERENCE, 0.3), linewidth=0, label="reference ± 2 sd")
    ax.plot(x, mean, color=REFERENCE, label="reference, mean")
    ax.fill_between(
        x, mine - 2 * my_sd, mine + 2 * my_sd, facecolor="none", edgecolor=CONTRAST[0], hatch=HATCH, linewidth=0,
        label=f"{label} ± 2 sd",
    )  # fmt: skip
    for edge in (mine - 2 * my_sd, mine + 2 * my_sd):
        ax.plot(x, edge, color=CONTRAST[0], linewidth=1.0)
    ax.plot(x, mine, color=BAYES, linestyle="--", label=f"{label}, mean")
    ax.set(xlabel=names[0], ylabel=names[1], xlim=(x[0], x[-1]))
    legend_below(ax, columns=2)
    return ax


@drawn
def reference_coverage(
    levels: ArrayLike, coverage: ArrayLike, error: ArrayLike | None = None, *, ax: Axes | None = None
) -> Axes:
    """How much of the posterior the method's central intervals hold, beside how much they should; one bar a level.

    levels, coverage, error: (L,) shares; bars of two standard errors. Below the dashed line the method is too sure.
    """
    levels, coverage = (np.asarray(a, dtype=float) for a in (levels, coverage))
    ax = panel(ax, 4.2, 3.4)
    place = np.arange(len(levels))
    ax.bar(place, 100 * coverage, width=0.6, color=tint(BAYES, 0.55), edgecolor=BAYES, label="held by the method's")
    if error is not None:
        two = 200 * np.asarray(error, dtype=float)
        ax.errorbar(place, 100 * coverage, yerr=two, fmt="none", ecolor="0.1", elinewidth=1.0, capsize=3)
    for k, level in enumerate(levels):
        label = "should be" if k == 0 else None
        ax.plot([k - 0.42, k + 0.42], [100 * level] * 2, color=REFERENCE, linestyle="--", label=label)
        ax.annotate(f"{100 * coverage[k]:.0f} %", (k, 3), ha="center", fontsize=8)
    ax.set(xticks=place, ylim=(0, 103), ylabel="share of the posterior, %", xlabel="central interval")
    ax.set_xticklabels([f"{100 * level:.0f} %" for level in levels])
    legend_below(ax, columns=2)
    return ax
