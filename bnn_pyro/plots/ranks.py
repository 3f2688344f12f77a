"""Whether ranks are uniform: histograms, differences of distribution functions, and coverage; of simulated data sets.

All from the evidence of a calibration check: ranks (Q, R), whole numbers 0 … L, of Q quantities in R data sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from scipy.stats import binom

from bnn_pyro.checks.sbc_ranks import band, ecdf_difference
from bnn_pyro.errors import UserError
from bnn_pyro.plots.style import (
    BAYES,
    CONTRAST,
    HATCH,
    MARKERS,
    REFERENCE,
    drawn,
    legend_below,
    panel,
    panels,
    tint,
)

__all__ = ["interval_coverage", "rank_ecdfs", "rank_histograms"]

#: Panels of a picture at most, and in a row.
MOST, ACROSS = 12, 4
#: Bars of a histogram at most, and data sets that each should have.
BARS, PER_BAR = 20, 4
#: Densities above are cut off, and written on their bars.
HIGHEST = 5.0
#: The band of one bar, and that of a whole curve by itself.
CHANCE = 0.05


@drawn
def rank_histograms(
    ranks: ArrayLike, draws: int, labels: Sequence[str], *, axes: Sequence[Axes] | None = None
) -> np.ndarray:
    """Ranks of the truth among the draws, a panel a quantity; bars in the band are what uniform ranks look like.

    A valley: draws too narrow.  A hill: too wide.  A slope: to one side. The band holds 95 % of the bars.

    ranks: (Q, R), 0 … ``draws``; the first 12 are shown.   Raises UserError where labels and ranks do not match.
    """
    ranks, axes = _panels(ranks, labels, axes)
    total = ranks.shape[1]
    bars = max(2, min(BARS, draws + 1, total // PER_BAR))
    edges = np.ceil(np.arange(bars + 1) * (draws + 1) / bars).astype(int)  # ranks from one to below the next
    share = np.diff(edges) / (draws + 1)
    place, wide = edges[:-1] / (draws + 1), share
    low, high = binom.ppf([[CHANCE / 2], [1 - CHANCE / 2]], total, share) / (total * share)
    top = 0.0
    for ax, order, label in zip(axes, ranks, labels, strict=False):
        height = np.diff(np.searchsorted(np.sort(order), edges)) / (total * share)
        ax.fill_between(np.r_[place, 1], np.r_[low, low[-1]], np.r_[high, high[-1]], step="post",
                        color=tint(REFERENCE, 0.22), lw=0, label="95 % of the bars of uniform ranks")  # fmt: skip
        ax.axhline(1, color=REFERENCE, ls="--", lw=1, label="uniform")
        outside = (height < low) | (height > high)
        shown = ax.bar(place, height, wide, align="edge", facecolor=tint(BAYES, 0.55), edgecolor="white", lw=0.5)
        for bar, off in zip(shown, outside, strict=True):
            if off:
                bar.set(facecolor=BAYES, hatch=HATCH)
            if bar.get_height() > HIGHEST:
                ax.annotate(f"{bar.get_height():.0f}", (bar.get_x() + bar.get_width() / 2, 0.97 * HIGHEST), size=6.5,
                            ha="center", va="top", bbox={"facecolor": "white", "lw": 0, "pad": 0.6})  # fmt: skip
        ax.set_title(label, size=8.5, loc="left")
        top = max(top, height.max(), high.max())
    for ax in axes:
        ax.set(xlim=(0, 1), ylim=(0, min(HIGHEST, 1.08 * top)))
    _outer(axes, len(labels), "rank of the truth", f"density\n({total} data sets)")
    _one_legend(axes[0])
    return axes


@drawn
def rank_ecdfs(
    ranks: ArrayLike,
    draws: int,
    labels: Sequence[str],
    *,
    shown: float = 1e-3,
    p: ArrayLike | None = None,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """Empirical minus uniform distribution function of the ranks, with simultaneous bands; a panel a quantity.

    Uniform ranks leave the inner band anywhere at all in 5 % of such panels, the outer one with chance ``shown``.
    A falling line through 0 (up, then down): draws too narrow. The other way round: too wide. All above: the truth
    lies low.

    ranks: (Q, R), 0 … ``draws``; the first 12 are shown.   p: (Q,) or (Q, tests), p-values for the titles, the least.

    Raises UserError where labels and ranks do not match.
    """
    ranks, axes = _panels(ranks, labels, axes)
    total = ranks.shape[1]
    bands = [band(total, draws, chance) for chance in (shown, CHANCE)]
    reach = 1.1 * max(
        np.abs(bands[0][1] - bands[0][0]).max(), *(np.abs(ecdf_difference(order, draws)).max() for order in ranks)
    )
    for ax, order, label, row in zip(axes, ranks, labels, range(len(ranks)), strict=False):
        for (u, low, high), strength, name in zip(
            bands, (0.12, 0.3), (f"all but {shown:.1g} of uniform ranks", "95 % of them"), strict=True
        ):
            ax.fill_between(u, low - u, high - u, color=tint(REFERENCE, strength), lw=0, label=name)
        ax.axhline(0, color=REFERENCE, ls="--", lw=1)
        difference = ecdf_difference(order, draws)
        u, low, high = bands[0]
        out = (difference < low - u - 1e-12) | (difference > high - u + 1e-12)
        ax.plot(u, np.where(out, difference, np.nan), color=CONTRAST[0], lw=4.5, label="outside of both")
        ax.plot(u, difference, color=BAYES, lw=1.4)
        least = "" if p is None else f"\np = {np.min(np.atleast_2d(np.asarray(p).T).T[row]):.2g}"
        ax.set_title(f"{label}{least}", size=8.5, loc="left")
        ax.set(xlim=(0, 1), ylim=(-reach, reach))
    _outer(axes, len(labels), "rank of the truth", "ECDF − uniform")
    _one_legend(axes[0])
    return axes


@drawn
def interval_coverage(
    levels: ArrayLike,
    coverage: ArrayLike,
    error: ArrayLike,
    labels: Sequence[str],
    *,
    ax: Axes | None = None,
) -> Axes:
    """Share of the truths that central intervals hold, a row a quantity, with 95 % intervals of that share.

    Each marker has a dashed line where it should be: left of it, intervals are too narrow, right of it too wide.

    levels: (I,).   coverage, error: (Q, I), found and its standard error.   Raises UserError where shapes do not match.
    """
    levels, coverage, error = (np.asarray(a, dtype=float) for a in (levels, coverage, error))
    if coverage.shape != (len(labels), len(levels)) or error.shape != coverage.shape:
        raise UserError(
            f"{len(labels)} labels and {len(levels)} levels need coverage of that shape, got {coverage.shape}"
        )
    shown = labels[:MOST]
    ax = panel(ax, 6.4, 0.32 * len(shown) + 1.5)
    rows = np.arange(len(shown))
    for i, level in enumerate(levels):
        colour, marker = [BAYES, *CONTRAST][i], MARKERS[i]
        found, half = coverage[: len(shown), i], 1.96 * error[: len(shown), i]
        ax.axvline(level, color=colour, ls="--", lw=1)
        reach = np.stack([np.minimum(half, found), np.minimum(half, 1 - found)])
        aside = 0.16 * (i - (len(levels) - 1) / 2)
        ax.errorbar(found, rows + aside, xerr=reach, color=colour, ls="", marker=marker, markersize=5, lw=1.2,
                    capsize=2, label=f"{100 * level:.0f} % intervals")  # fmt: skip
    ax.set_yticks(rows, shown)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.01), xlabel="share of the truths inside (dashed: what the intervals say)")
    legend_below(ax, columns=len(levels))
    return ax


def _panels(ranks: ArrayLike, labels: Sequence[str], axes: Sequence[Axes] | None) -> tuple[np.ndarray, np.ndarray]:
    ranks = np.asarray(ranks)
    if ranks.ndim != 2 or len(ranks) != len(labels):
        raise UserError(f"ranks of shape {ranks.shape} do not go with {len(labels)} labels: (quantities, data sets)")
    ranks = ranks[:MOST]
    across = min(ACROSS, len(ranks))
    down = math.ceil(len(ranks) / across)
    made = panels(axes, down, across, 2.1 * across + 0.5, 1.75 * down + 0.6, sharex=True, sharey=True)
    for ax in made[len(ranks) :]:
        ax.set_visible(False)
    return ranks, made


def _outer(axes: np.ndarray, num: int, x: str, y: str) -> None:
    """Labels at the left and at the foot of every column."""
    num = min(num, MOST)
    across = min(ACROSS, num)
    for i, ax in enumerate(axes[:num]):
        if i % across == 0:
            ax.set_ylabel(y, size=8)
        if i + across >= num:
            ax.set_xlabel(x, size=8)
            ax.tick_params(labelbottom=True)
        ax.set_xticks([0, 0.5, 1], ["  lowest", "", "highest  "], size=7)


def _one_legend(ax: Axes) -> None:
    handles, names = ax.get_legend_handles_labels()
    ax.figure.legend(handles, names, loc="outside lower center", ncols=3)
