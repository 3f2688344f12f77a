"""Figures of checks: the error of each quantity, and ranks of the truth."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from scipy.stats import norm

from bnn_pyro.checks.check import ALPHA, Finding
from bnn_pyro.checks.sbc_ranks import band
from bnn_pyro.plots.layout import Panel, legend_below, legend_outside, panel, panels
from bnn_pyro.plots.style import BAYES, CONTRAST, DASHED, REFERENCE, drawn, look, tint


@drawn
def standard_errors(findings: Sequence[Finding], *, ax: Panel = None) -> Axes:
    """The difference of each quantity to its expected value in standard errors; the largest differences are named.

    findings: findings with a ``z``. Each first word of ``about`` ("mean of weight 1") has its own marker.
    The shaded range contains any of the quantities by chance with a probability of 1 in 1,000.
    """
    kinds = np.array([f.about.split()[0] for f in findings])
    z = np.nan_to_num([f.z for f in findings], nan=np.inf, posinf=np.inf, neginf=-np.inf)
    bound = norm.isf(ALPHA / (2 * len(z)))
    reach = max(1.3 * bound, min(1.15 * np.abs(z).max(), 6 * bound))
    clipped = np.clip(z, -0.97 * reach, 0.97 * reach)
    ax = panel(ax, 6.4, 3.2)
    for side in (-1, 1):
        ax.axhspan(side * bound, side * reach, color="0.93", linewidth=0)
        ax.axhline(side * bound, **DASHED)
    ax.axhline(0, color=REFERENCE, linewidth=0.8)
    for k, kind in enumerate(dict.fromkeys(kinds)):
        at = np.flatnonzero(kinds == kind)
        ax.plot(at + 1, clipped[at], **look(k, linestyle=""), label=kind)
    for i in np.argsort(-np.abs(z))[:3]:  # the largest are named
        if abs(z[i]) > bound:
            side, aside = ("left", 7) if i < 0.6 * len(z) else ("right", -7)
            place = dict(xytext=(aside, 0), textcoords="offset points", ha=side, va="center")
            ax.annotate(findings[i].about.split(" (")[0], (i + 1, clipped[i]), size=7, **place)
    ax.set(xlim=(0, len(z) + 1), ylim=(-reach, reach), xlabel="quantity", ylabel="standard errors off")
    ax.set_title(f"{(np.abs(z) > bound).sum()} of {len(z)} beyond ±{bound:.1f} (shaded)")
    return legend_below(ax, 4)


@drawn
def rank_ecdfs(evidence: Mapping[str, Any]) -> np.ndarray:
    """Empirical minus uniform distribution function of the ranks, with simultaneous bands; one panel per quantity.

    Uniform ranks leave the inner band in 5 % of such panels, and the outer band with probability ``shown``.
    A curve that rises, then falls: draws are too narrow; falls, then rises: too wide; all above 0: the truth is low.

    evidence: ranks (Q, R), whole numbers 0 … draws, of Q quantities in R simulated data sets, of which the first 12 are
    shown; labels (Q,); p (Q, 3), the corrected p-values of the tests of ECDF, location and width; draws; shown.
    """
    ranks, level = evidence["ranks"][:12], evidence["shown"]
    bands = {level: f"all but {level:.1g} of uniform ranks", 0.05: "95 % of them"}  # each for a whole curve
    axes = panels(len(ranks), 4, (2.1, 1.75), (0.5, 0.6), sharex=True, sharey=True)  # 4 in a row
    for ax, order, label, p in zip(axes, ranks, evidence["labels"], np.min(evidence["p"], 1), strict=False):
        draw_ecdf_difference(ax, order, evidence["draws"], bands)
        ax.set_title(f"{label}\np = {p:.2g}", size=8.5, loc="left")
        ax.set_xticks([0, 0.5, 1], ["  lowest", "", "highest  "], size=7)
        ax.tick_params(labelbottom=True)
    reach = max(np.abs(ax.get_ylim()).max() for ax in axes)
    axes[0].set_ylim(-reach, reach)  # shared by all panels
    axes[0].figure.supxlabel("rank of the truth")
    axes[0].figure.supylabel("ECDF − uniform")
    return legend_outside(axes, 3)


def draw_ecdf_difference(ax: Axes, ranks: np.ndarray, draws: int, bands: Mapping[float, str]) -> bool:
    """Draw the empirical minus the uniform CDF of ranks (R,) on 0 … ``draws``, with ``bands`` {chance: label}.

    Returns whether the curve leaves the first of the bands; it is drawn thick where it does.
    """
    u = np.arange(draws + 2) / (draws + 1)
    difference = np.r_[0.0, np.bincount(ranks, minlength=draws + 1).cumsum() / len(ranks)] - u
    for k, (chance, label) in enumerate(bands.items(), 1):
        _, low, high = band(len(ranks), draws, chance)
        ax.fill_between(u, low - u, high - u, color=tint(REFERENCE, 0.15 * k), lw=0, label=label)
        if k == 1:
            outside = (difference < low - u - 1e-12) | (difference > high - u + 1e-12)
    ax.axhline(0, **DASHED)
    ax.plot(u, np.where(outside, difference, np.nan), color=CONTRAST[0], lw=4.5, label="outside")
    ax.plot(u, difference, color=BAYES, lw=1.4)
    ax.set_xlim(0, 1)
    return bool(outside.any())
