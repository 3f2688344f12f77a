"""Checks by simulation: ranks of the truth, the joint distribution test, and the bias of a step size.

Each takes the evidence of a check: arrays by name. Ranks (Q, R) are whole numbers 0 … draws, of Q quantities in R
simulated data sets.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from scipy.stats import binom, norm

from bnn_pyro.checks.sbc_ranks import band, ecdf_difference
from bnn_pyro.plots.checks_exact import Evidence, draw_errors, picked
from bnn_pyro.plots.layout import Panel, Panels, legend_below, legend_outside, panel, panels
from bnn_pyro.plots.style import BAYES, CONTRAST, DASHED, HATCH, REFERENCE, drawn, look, tint

#: Panels of a picture at most, and in a row.
MAX_PANELS, ACROSS = 12, 4
#: Bars of a histogram at most, and data sets that each should have.
BARS, PER_BAR = 20, 4
#: Densities above are cut off, so that one bad quantity does not flatten the others.
HIGHEST = 5.0
#: The band of one bar, and that of a whole curve by itself.
CHANCE = 0.05
#: Quantities whose quantiles are drawn: those that are furthest off.
SHOWN = 3


# -- ranks -------------------------------------------------------------------------------------------------------------
@drawn
def rank_histograms(evidence: Evidence, *, axes: Panels = None) -> np.ndarray:
    """Ranks of the truth among the draws, a panel a quantity; bars in the band are what uniform ranks look like.

    A valley: draws too narrow.  A hill: too wide.  A slope: to one side. The band holds 95 % of the bars.

    ranks (Q, R), labels (Q,), draws; the first 12 quantities are shown.
    """
    draws, total = evidence["draws"], np.shape(evidence["ranks"])[-1]
    ranks, axes = _rank_panels(evidence["ranks"], evidence["labels"], f"density ({total} data sets)", axes)
    bars = max(2, min(BARS, draws + 1, total // PER_BAR))
    edges = np.ceil(np.arange(bars + 1) * (draws + 1) / bars).astype(int)  # ranks from one to below the next
    place, share = edges / (draws + 1), np.diff(edges) / (draws + 1)
    low, high = binom.ppf([[CHANCE / 2], [1 - CHANCE / 2]], total, share) / (total * share)
    heights = [np.diff(np.searchsorted(np.sort(order), edges)) / (total * share) for order in ranks]
    for ax, height in zip(axes, heights, strict=True):
        band_look = dict(color=tint(REFERENCE, 0.22), lw=0, step="post", label="95 % of the bars of uniform ranks")
        ax.fill_between(place, np.r_[low, low[-1]], np.r_[high, high[-1]], **band_look)
        ax.axhline(1, **DASHED, label="uniform")
        shown = ax.bar(place[:-1], height, share, align="edge", facecolor=tint(BAYES, 0.55), edgecolor="white", lw=0.5)
        for bar in np.array(shown, dtype=object)[(height < low) | (height > high)]:
            bar.set(facecolor=BAYES, hatch=HATCH)
        ax.set(xlim=(0, 1), ylim=(0, min(HIGHEST, 1.08 * max(np.max(heights), high.max()))))
        if height.max() > HIGHEST:
            ax.set_title(f"up to {height.max():.0f}", size=7, loc="right")
    return legend_outside(axes, 3)


@drawn
def rank_ecdfs(evidence: Evidence, *, axes: Panels = None) -> np.ndarray:
    """Empirical minus uniform distribution function of the ranks, with simultaneous bands; a panel a quantity.

    Uniform ranks leave the inner band anywhere at all in 5 % of such panels, the outer one with chance ``shown``.
    A line that goes up, then down: draws too narrow. The other way round: too wide. All above: the truth lies low.

    ranks (Q, R), labels (Q,), draws; the first 12 quantities are shown.   p (Q, 3): of the tests of the ECDF, location
    and width, corrected for all of them; the least is in the titles.
    """
    least, level = np.min(evidence["p"], 1), evidence["shown"]
    labels = [f"{label}\np = {p:.2g}" for label, p in zip(evidence["labels"], least, strict=True)]
    ranks, axes = _rank_panels(evidence["ranks"], labels, "ECDF − uniform", axes)
    bands = {level: f"all but {level:.1g} of uniform ranks", CHANCE: "95 % of them"}
    for ax, order in zip(axes, ranks, strict=True):
        draw_ecdf_difference(ax, order, evidence["draws"], bands)
    reach = max(np.abs(ax.get_ylim()).max() for ax in axes)
    axes[0].set_ylim(-reach, reach)  # of all: they share it
    return legend_outside(axes, 3)


def draw_ecdf_difference(ax: Axes, ranks: np.ndarray, draws: int, bands: Mapping[float, str]) -> bool:
    """Empirical minus uniform distribution function of ranks (R,), thick where it leaves the first band: does it?

    bands: {chance with which uniform ranks leave it anywhere: label}, the widest first.
    """
    difference = ecdf_difference(ranks, draws)
    for k, (chance, label) in enumerate(bands.items(), 1):
        u, low, high = band(len(ranks), draws, chance)
        ax.fill_between(u, low - u, high - u, color=tint(REFERENCE, 0.15 * k), lw=0, label=label)
        if k == 1:
            outside = (difference < low - u - 1e-12) | (difference > high - u + 1e-12)
    ax.axhline(0, **DASHED)
    ax.plot(u, np.where(outside, difference, np.nan), color=CONTRAST[0], lw=4.5, label="outside")
    ax.plot(u, difference, color=BAYES, lw=1.4)
    ax.set_xlim(0, 1)
    return bool(outside.any())


def _rank_panels(ranks: np.ndarray, labels: Sequence[str], what: str, axes: Panels) -> tuple[np.ndarray, np.ndarray]:
    """The ranks that are shown, and an axes for each."""
    ranks = ranks[:MAX_PANELS]
    axes = panels(axes, len(ranks), ACROSS, (2.1, 1.75), (0.5, 0.6), sharex=True, sharey=True)
    for ax, label in zip(axes, labels, strict=False):
        ax.set_title(label, size=8.5, loc="left")
        ax.set_xticks([0, 0.5, 1], ["  lowest", "", "highest  "], size=7)
        ax.tick_params(labelbottom=True)
    axes[0].figure.supxlabel("rank of the truth")
    axes[0].figure.supylabel(what)
    return ranks, axes


@drawn
def interval_coverage(evidence: Evidence, *, ax: Panel = None) -> Axes:
    """Share of the truths that central intervals hold, a row a quantity, with 95 % intervals of that share.

    Each marker has a dashed line where it should be: left of it, intervals are too narrow, right of it too wide.

    levels (I,), labels (Q,), coverage and its standard error coverage_error (Q, I); the first 12 quantities are shown.
    """
    levels, coverage, error = picked(evidence, "levels coverage coverage_error")
    rows = np.arange(min(len(coverage), MAX_PANELS))
    ax = panel(ax, 6.4, 0.32 * len(rows) + 1.5)
    for i, level in enumerate(levels):
        share, style = coverage[rows, i], look(i, linestyle="")
        reach = np.minimum(1.96 * error[rows, i], [share, 1 - share])
        ax.axvline(level, color=style["color"], ls="--", lw=1)
        aside = 0.16 * (i - (len(levels) - 1) / 2)
        ax.errorbar(share, rows + aside, xerr=reach, **style, elinewidth=1.2, label=f"{100 * level:.0f} % intervals")
    ax.set_yticks(rows, evidence["labels"][:MAX_PANELS])
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.01), xlabel="share of the truths inside (dashed: what the intervals say)")
    return legend_below(ax, len(levels))


# -- the joint distribution --------------------------------------------------------------------------------------------
@drawn
def joint_z_scores(evidence: Evidence, *, ax: Panel = None) -> Axes:
    """How many standard errors each quantity is off the joint distribution, in its mean and in its variance.

    What is off most is named.   quantities (M,), z (M, 2).   bound: what all of |z| stay below with probability
    1 − 10⁻³ where the sampler is right; beyond it is shaded.
    """
    quantities, z, bound = (evidence[name] for name in ("quantities", "z", "bound"))
    kinds = [kind for kind in ("mean", "variance") for _ in quantities]
    names = [f"{kind} of {name}" for kind, name in zip(kinds, [*quantities, *quantities], strict=True)]
    title = f"{(np.abs(z) > bound).sum()} of {np.size(z)} beyond ±{bound:.1f}"
    ax = draw_errors(panel(ax, 6.4, 3.2), names, kinds, np.transpose(z).ravel(), bound)
    ax.set(ylabel="off the joint distribution\n(standard errors)", title=title)
    return legend_below(ax, 2)


@drawn
def joint_quantiles(evidence: Evidence, *, axes: Panels = None) -> np.ndarray:
    """The quantities that are furthest off: quantiles against those of the joint distribution, and drift by sweep.

    levels (Q,), scores (Q, M): quantiles of the standard Normal, and of the chains' normal scores.
    quantities (M,), z (M, 2), drift and drift_error (sweeps, M, 2).
    """
    levels, scores, z, drift, drift_error = picked(evidence, "levels scores z drift drift_error")
    quantities = evidence["quantities"]
    axes = panels(axes, 2, 2, (3.7, 3.4))
    worst = np.argsort(-np.abs(z).max(1))[:SHOWN]
    axes[0].axhline(0, **DASHED, label="the joint distribution")
    axes[1].axhline(0, **DASHED)
    for i, q in enumerate(worst):
        side, sweeps = int(np.abs(z[q]).argmax()), np.arange(1, len(drift) + 1) + 0.12 * (i - 1)
        axes[0].plot(levels, scores[:, q] - levels, **look(i, marker=None), label=quantities[q])
        label = f"{('mean', 'variance')[side]} of {quantities[q]}"
        axes[1].errorbar(sweeps, drift[:, q, side], 2 * drift_error[:, q, side], **look(i), lw=1.1, label=label)
    widest = max(0.5, 1.15 * float(np.abs(scores[:, worst] - levels[:, None]).max()))
    axes[0].set(ylim=(-widest, widest), xlim=norm.ppf([0.01, 0.99]), xticks=[-2, -1, 0, 1, 2])
    axes[0].set(xlabel="quantile of the joint distribution (normal scores)", ylabel="chains' quantile\nminus that (sd)")
    axes[1].set(xlabel="sweep (transition, then new targets)", ylabel="shift (sd, or variances)\n± 2 s.e.")
    axes[1].xaxis.get_major_locator().set_params(integer=True)
    return legend_below(axes, 1)


# -- the step size -----------------------------------------------------------------------------------------------------
@drawn
def step_size_bias(evidence: Evidence, *, ax: Panel = None) -> Axes:
    """Relative excess of the variances against the step size, with what the recursion has, and slope 1.

    lr, bias, error (L,): as measured, ± 2 standard errors.   grid_lr, grid_exact (G,): exact.   largest_lr: where it
    explodes.   own_lr, own_bias: those of the method.   order, order_error: of the measured line.
    """
    lr, bias, error, grid_lr, grid_exact = picked(evidence, "lr bias error grid_lr grid_exact")
    own_lr, own_bias = evidence["own_lr"], evidence["own_bias"]
    ax = panel(ax)
    ax.plot(grid_lr, grid_exact, color=REFERENCE, lw=1.2, label="exact, by the recursion")
    ax.plot(grid_lr, grid_exact[0] * grid_lr / grid_lr[0], color=REFERENCE, ls=":", lw=1.2, label="slope 1")
    positive, two = bias > 0, np.stack([np.minimum(2 * error, 0.95 * bias), 2 * error])
    label = f"measured, ± 2 s.e. (slope {evidence['order']:.2f} ± {evidence['order_error']:.2f})"
    ax.errorbar(lr[positive], bias[positive], two[:, positive], color=BAYES, fmt="o", label=label)
    if np.isfinite(own_bias):
        own_look = dict(color=CONTRAST[0], mfc="white", mew=1.5, label=f"the step asked for, lr {own_lr:g}")
        ax.plot(own_lr, own_bias, "s", **own_look)
    ax.axvline(evidence["largest_lr"], color=CONTRAST[3], ls="--", lw=1.2, label="explodes from here on")
    ax.set(xscale="log", yscale="log", xlabel="step size, lr  (η = lr / N for SGHMC, lr / 2N for SGLD)")
    ax.set_ylabel("excess of the variance\n(share of the posterior's)")
    return legend_below(ax, 2)
