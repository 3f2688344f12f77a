"""What is lost when the weights of the lowest signal-to-noise ratio are removed, and how these ratios are spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from torch import Tensor

from bnn_pyro.errors import UserError
from bnn_pyro.plots.style import BAYES, CONTRAST, LINES, REFERENCE, drawn, legend_below, panel, panels, tint
from bnn_pyro.pruning import LOG_ALPHA, PrunedScore

__all__ = ["pruning_curve", "signal_to_noise"]

_LOSSES = {"error": "error, % of points", "rmse": "RMSE, target units"}
#: A curve that rises by more than this is drawn on a log scale: its flat part is what matters.
STEEP = 4


@drawn
def pruning_curve(
    curve: Sequence[PrunedScore], *, removed: float | None = None, axes: Sequence[Axes] | None = None
) -> np.ndarray:
    """Loss (left) and NLL (right) against the share of weights removed, with 95 % bootstrap intervals; axes (2,).

    The share is on the log scale of what is left, so that 90 %, 95 % and 98 % stand apart.

    curve: of ``pruning.pruning_curve``.   removed: a share to mark, that beyond log α = 3.

    Raises UserError for fewer than two points, or one with no weights left, which has no place on that scale.
    """
    curve = sorted(curve, key=lambda point: point.share)
    if len(curve) < 2 or curve[-1].share >= 1:
        raise UserError("a pruning curve needs two shares or more, each below 1")
    own, axes = axes is None, panels(axes, 1, 2, 7.6, 3.3)
    left = np.array([1 - point.share for point in curve])
    percent = 100 if curve[0].measure == "error" else 1
    losses = [[percent * number for number in point.loss] for point in curve]
    for ax, scores, label in (
        (axes[0], losses, _LOSSES[curve[0].measure]),
        (axes[1], [point.nll for point in curve], "NLL, nats a point"),
    ):
        value, low, high = np.array(scores).T
        ax.fill_between(left, low, high, color=tint(BAYES, 0.25), linewidth=0, label="95% interval over points")
        ax.axhline(value[0], color=REFERENCE, linestyle="--", linewidth=1, label="all weights")
        ax.plot(left, value, color=BAYES, marker="o", markersize=4, label="pruned")
        if removed is not None and 0 < removed < 1:
            ax.axvline(1 - removed, color=CONTRAST[0], linestyle=":", label=f"log α > {LOG_ALPHA:g}: {removed:.1%}")
        ax.set(xscale="log", xlim=(1.08, left[-1] / 1.12), xlabel="weights removed, % (log scale of those left)")
        # The share at the threshold has a line of its own: a tick would run into its neighbour.
        ticks = [point.share for point in curve if removed is None or abs(point.share - removed) > 1e-9]
        ax.set_xticks([1 - share for share in ticks], [f"{100 * share:.3g}" for share in ticks])
        ax.minorticks_off()
        ax.set_ylabel(label)
        if value.min() > 0 and value.max() > STEEP * value.min():
            ax.set(yscale="log", ylim=(0.8 * max(low.min(), value.min() / 2), 1.2 * high.max()))
            ax.set_ylabel(f"{label} (log scale)")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.minorticks_off()
        ax.grid(axis="y", color="0.92")
    if own:
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    else:
        legend_below(axes[1], columns=2)
    return axes


#: dB, the left end of the densities.
FLOOR = -60.0


@drawn
def signal_to_noise(
    ratios: Mapping[str, Tensor],
    *,
    shares: Sequence[float] = (0.5, 0.75, 0.95),
    bins: int = 80,
    ax: Axes | None = None,
) -> Axes:
    """Density of |mean| / standard deviation of the weights in dB, 20 log₁₀, and where each share of them is removed.

    ratios: {site: array} of ``pruning.signal_to_noise``. What lies below −60 dB, a mean of a thousandth of its noise
        (weights of pixels that are always black, say), is in the first bin.
    shares: up to four, marked at their quantiles; log α = 3 is marked besides.
    """
    values = np.concatenate([np.asarray(ratio).ravel() for ratio in ratios.values()])
    db = 20 * np.log10(values.clip(1e-12, 1e12))
    low, high = max(np.quantile(db, 0.005), FLOOR), db.max()
    threshold = -10 * LOG_ALPHA / math.log(10)
    edges = np.linspace(min(low, threshold - 3), max(high, threshold + 3) + 1e-9, bins + 1)
    density = np.histogram(db.clip(edges[0], edges[-1]), edges)[0] / len(db) / np.diff(edges)
    ax = panel(ax, 5.2, 3.6)
    ax.stairs(density, edges, fill=True, color=tint(BAYES, 0.55), label=f"{len(db):,} weights")
    for share, colour, line in zip(shares, CONTRAST, LINES, strict=False):
        ax.axvline(np.quantile(db, share), color=colour, linestyle=line, label=f"{share:.0%} removed")
    beyond = (db < threshold).mean()
    ax.axvline(threshold, color=REFERENCE, linewidth=2.4, label=f"log α = {LOG_ALPHA:g}: {beyond:.1%} below")
    ax.set(xlabel="signal-to-noise ratio |mean| / standard deviation, dB", ylabel="density, 1/dB")
    ax.set(xlim=(edges[0], edges[-1]), ylim=(0, None))
    legend_below(ax, columns=3)
    return ax
