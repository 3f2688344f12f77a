"""A posterior beside what is known: exact posteriors, densities and gradients, and a stored reference posterior.

All from plain arrays, the evidence of the checks. Outputs are the network's means in target units, or the log-odds of
classes. Bars are two standard errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from numpy.typing import ArrayLike

from bnn_pyro.diagnostics.draws import even
from bnn_pyro.errors import UserError
from bnn_pyro.plots.layout import Panels, floats, legend_below, panel, panels
from bnn_pyro.plots.style import BAYES, DASHED, DATA, HATCH, REFERENCE, WRONG, drawn, look, tint

__all__ = ["batch_objectives", "draw_errors", "exact_intervals", "finite_differences", "mixture_densities",
           "reference_coverage", "reference_outputs", "standard_errors", "two_weights"]  # fmt: skip

#: Quantities that are named where they are off; shares of the exact posterior that contours hold.
NAMED, HELD = 3, (0.5, 0.8, 0.95)
#: Outputs that are drawn, evenly among all: more would cover each other.
MAX_OUTPUTS = 150


# -- exact -------------------------------------------------------------------------------------------------------------
@drawn
def standard_errors(labels: Sequence[str], z: ArrayLike, bound: float, *, ax: Axes | None = None) -> Axes:
    """By how many standard errors each average is off what it should be; what is off most is named.

    labels (M,): a kind, a space, and the rest ("mean of weight 1 …"): kinds have their own markers.   z (M,): signed, 0
    where right within tolerance.   bound: beyond which one of the M counts as off; the shaded side.
    """
    off = (np.abs(np.nan_to_num(np.asarray(z, dtype=float), posinf=np.inf, neginf=-np.inf)) > bound).sum()
    ax = draw_errors(panel(ax, 6.4, 3.2), labels, [_kind(label) for label in labels], z, bound)
    ax.set_ylabel("off the exact value\n(standard errors)")
    ax.set_title(f"{off} of {len(labels)} beyond ±{bound:.1f} (shaded), where chance puts one in 1,000 times")
    return legend_below(ax, 3)


def draw_errors(ax: Axes, labels: Sequence[str], kinds: Sequence[str], z: ArrayLike, bound: float) -> Axes:
    """Numbers z (M,) that should be standard Normal, with a marker for each kind; those furthest beyond are named."""
    z, kinds = np.nan_to_num(np.asarray(z, dtype=float), posinf=np.inf, neginf=-np.inf), np.array(kinds)
    reach = max(1.3 * bound, min(1.15 * np.abs(z).max(initial=0.0), 6 * bound))
    shown = np.clip(z, -0.97 * reach, 0.97 * reach)
    for side in (-1, 1):
        ax.axhspan(side * bound, side * reach, color="0.93", linewidth=0)
        ax.axhline(side * bound, **DASHED)
    ax.axhline(0, color=REFERENCE, linewidth=0.8)
    for k, kind in enumerate(dict.fromkeys(kinds)):
        at = np.flatnonzero(kinds == kind)
        ax.plot(at + 1, shown[at], **look(k, linestyle=""), label=kind)
    for i in np.argsort(-np.abs(z))[:NAMED]:
        if abs(z[i]) > bound:
            side, aside = ("left", 7) if i < 0.6 * len(z) else ("right", -7)
            place = dict(xytext=(aside, 0), textcoords="offset points", ha=side, va="center")
            ax.annotate(labels[i].split(" (")[0], (i + 1, shown[i]), size=7, **place)
    ax.set(xlim=(0, len(z) + 1), ylim=(-reach, reach), xlabel="quantity")
    return ax


def _kind(label: str) -> str:
    """ "variance of weight 3 …" -> "variance of a weight": what a quantity is, without which one."""
    words = label.split(" (")[0].split(" of mini-batches")[0]
    return re.sub(r"(weights?|input) \d+( and \d+)?", r"\1", words).removesuffix(" at input")


@drawn
def exact_intervals(
    exact_mean: ArrayLike,
    exact_sd: ArrayLike,
    mean: ArrayLike,
    sd: ArrayLike,
    levels: ArrayLike,
    coverage: ArrayLike,
    weight_coverage: ArrayLike,
    *,
    axes: Panels = None,
) -> np.ndarray:
    """95 % intervals of the network's output at new inputs, exact and the method's (left); what those hold (right).

    exact_mean, exact_sd, mean, sd (B,): in units of the target, drawn about the exact mean.   levels (L,): nominal.
    coverage, weight_coverage (L,): shares of the exact posterior of outputs, and of weights.
    """
    exact_mean, exact_sd, mean, sd = floats(exact_mean, exact_sd, mean, sd)
    axes = panels(axes, 2, 2, (3.9, 3.2))
    at, color = np.arange(1, len(mean) + 1), {"color": "0.86", "edgecolor": REFERENCE}
    axes[0].bar(at, 2 * 1.96 * exact_sd, 0.62, bottom=-1.96 * exact_sd, **color, linewidth=0.6, label="exact 95 %")
    axes[0].errorbar(at, mean - exact_mean, 1.96 * sd, color=BAYES, fmt="o", label="the method's 95 %")
    axes[0].axhline(0, color=REFERENCE, linewidth=0.8)
    axes[0].margins(y=0.08)
    axes[0].set(xticks=at, xlabel="new input", ylabel="output less its exact mean\n(units of the target)")
    axes[0].set_title(f"standard deviation: {np.mean(sd / exact_sd):.2f} of the exact one")
    legend_below(axes[0], 2)
    _coverage(axes[1], levels, {"outputs": coverage, "weights": weight_coverage})
    return axes


@drawn
def two_weights(
    axis_1: ArrayLike,
    axis_2: ArrayLike,
    density: ArrayLike,
    draws: ArrayLike,
    names: Sequence[str] = ("first weight", "second weight"),
    *,
    ax: Axes | None = None,
) -> Axes:
    """An exact posterior of two weights with a method's draws on top.

    axis_1 (n,), axis_2 (m,), density (n, m): the posterior on a grid, lines hold 50, 80 and 95 %.   draws (S, 2).
    """
    first, second, density, draws = floats(axis_1, axis_2, density, draws)
    ordered = np.sort(density.ravel())[::-1]
    held = np.cumsum(ordered) / ordered.sum()
    heights = [ordered[np.searchsorted(held, share)] for share in reversed(HELD)]
    ax = panel(ax, 4.6, 4.0)
    greys = [tint("#000000", s) for s in (0.08, 0.18, 0.32)]
    ax.contourf(first, second, density.T, levels=[*heights, ordered[0] * 1.001], colors=greys)
    style = dict(colors=REFERENCE, linewidths=0.8, linestyles=[":", "--", "-"])
    lines = ax.contour(first, second, density.T, levels=heights, **style).legend_elements()[0][::-1]
    for handle, share in zip(lines, HELD, strict=True):
        handle.set_label(f"holds {100 * share:.0f} % (exact)")
    points = ax.plot(*draws.T, ".", markersize=2.6, color=BAYES, alpha=0.55, label="draws of the method")
    inside = np.nonzero(density > heights[0])
    for axis, grid, where, own in zip("xy", (first, second), inside, draws.T, strict=True):
        ends = [*grid[where], *np.quantile(own, (0.01, 0.99))]
        margin = 0.12 * np.ptp(ends)
        ax.set(**{f"{axis}lim": (min(ends) - margin, max(ends) + margin)})
    ax.set(xlabel=f"weight {names[0]}", ylabel=f"weight {names[1]}")
    return legend_below(ax, 2, handles=[*lines, *points])


@drawn
def mixture_densities(
    log_density: ArrayLike, log_of_mean: ArrayLike, mean_of_log: ArrayLike, exact: ArrayLike, *, ax: Axes | None = None
) -> Axes:
    """Log densities of targets as ``predict`` has them, against the exact posterior predictive; (B,) each, nats.

    log_of_mean: by hand, from the same draws.   mean_of_log: what averaging log-probabilities would give, never more.
    """
    log_density, by_hand, wrong, exact = floats(log_density, log_of_mean, mean_of_log, exact)
    ax = panel(ax, 5.2, 3.6)
    _diagonal(ax, exact.min(), exact.max(), "exact")
    ax.plot(exact, wrong, "x", color=WRONG, label="mean of the logs (wrong)")
    ax.plot(exact, by_hand, "o", markersize=8, mfc="none", color=DATA, label="log of the mean")
    ax.plot(exact, log_density, "o", markersize=3.5, color=BAYES, label="predict")
    ax.set(xlabel="log p(y | x, D), exact (nats)", ylabel="log p(y | x, D) (nats)")
    return legend_below(ax, 2)


@drawn
def batch_objectives(
    batch_sizes: ArrayLike,
    elbo: ArrayLike,
    elbo_error: ArrayLike,
    estimators: Sequence[str] = (),
    variance: ArrayLike = (),
    variance_error: ArrayLike = (),
    *,
    axes: Panels = None,
) -> np.ndarray:
    """The objective by the size of mini-batches (left), and the variance of its gradient by estimator (right).

    batch_sizes, elbo, elbo_error (M,): rows, nats; the first is all rows.   variance, variance_error (E,): as shares
    of the first estimator's.
    """
    sizes, elbo, error, share, spread = floats(batch_sizes, elbo, elbo_error, variance, variance_error)
    axes = panels(axes, 2, 2, (3.9, 3.0))
    at, two = np.arange(len(sizes)), 2 * error
    axes[0].axhspan(elbo[0] - two[0], elbo[0] + two[0], color="0.9", linewidth=0, label="all rows, ± 2 s.e.")
    axes[0].errorbar(at, elbo, two, fmt="o", color=BAYES, label="mean, ± 2 s.e.")
    axes[0].set_xticks(at, [f"{size:,.0f}" for size in sizes])
    axes[0].ticklabel_format(axis="y", useOffset=False)
    axes[0].set(xlim=(-0.5, len(at) - 0.5), xlabel="rows of a mini-batch", ylabel="objective (nats)")
    legend_below(axes[0], 2)
    if not len(share):
        axes[1].set_axis_off()
        return axes
    two = [np.minimum(2 * spread, 0.9 * share), 2 * spread]
    bars = axes[1].barh(estimators, share, 0.6, xerr=two, color=tint(BAYES, 0.5), edgecolor=BAYES, hatch=HATCH)
    axes[1].bar_label(bars, [f"{v:,.0f}" if v >= 10 else f"{v:.2g}" for v in share], padding=4, size=8)
    axes[1].axvline(1, **DASHED)
    axes[1].invert_yaxis()
    axes[1].set(xscale="log", xlim=(0.5 * share.min(), 6 * max(share.max(), 1.0)))
    axes[1].set_xlabel("variance of the gradient, of the first one's")
    axes[1].xaxis.set_minor_locator(NullLocator())
    return axes


@drawn
def finite_differences(gradient: ArrayLike, finite_difference: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """Entries of the gradient of the log joint density against central differences of the density, (K,) each."""
    gradient, differences = (v.ravel() for v in floats(gradient, finite_difference))
    largest = max(np.abs([gradient, differences]).max(initial=0), 1e-12)
    ax = panel(ax, 4.2, 3.6)
    _diagonal(ax, -1.1 * largest, 1.1 * largest, "equal")
    ax.plot(differences, gradient, "o", mfc="none", color=BAYES, label="an entry")
    ax.set_title(f"at most {np.abs(gradient - differences).max() / largest:.1g} of the largest entry apart")
    ax.set(xlabel="finite difference (nats per unit)", ylabel="gradient (nats per unit)")
    return legend_below(ax, 2)


# -- a stored reference ------------------------------------------------------------------------------------------------
@drawn
def reference_outputs(
    reference_mean: ArrayLike,
    mean: ArrayLike,
    reference_sd: ArrayLike,
    sd: ArrayLike,
    *,
    mean_floor: ArrayLike = 0.0,
    sd_floor: ArrayLike = 0.0,
    unit: str = "target units",
    axes: Panels = None,
) -> np.ndarray:
    """Mean against mean (left) and standard deviation against standard deviation (right) of every output; axes (2,).

    The reference is across, the method up; on the dashed diagonal they are the same, below it on the right the method
    is too sure. Bars (the floors): two Monte-Carlo standard errors of the difference. Of many outputs 150 are drawn.

    All arrays of one shape, the floors broadcast to it.   unit: of the outputs, for the axes.
    """
    arrays = np.broadcast_arrays(*floats(reference_mean, mean, mean_floor, reference_sd, sd, sd_floor))
    if not arrays[0].size:
        raise UserError("there are no outputs to draw")
    kept = np.argsort(arrays[0], axis=None, kind="stable")[even(arrays[0].size, MAX_OUTPUTS)]
    arrays = [a.ravel()[kept] for a in arrays]
    axes = panels(axes, 2, 2, (3.9, 3.7))
    style = dict(fmt="o", markersize=3.5, mfc=tint(BAYES, 0.35), ecolor=tint(BAYES, 0.45), capsize=0)
    for ax, title, what, pair in zip(
        axes, ("Means", "Spreads"), ("mean", "standard deviation"), (arrays[:3], arrays[3:]), strict=True
    ):
        across, up, floor = pair
        ends = [*across, *up, *([0.0] if title == "Spreads" else [])]
        _diagonal(ax, min(ends), max(ends))
        ax.errorbar(across, up, floor, color=BAYES, **style)
        ax.set_aspect("equal", "datalim")
        ax.set(xlabel=f"reference: posterior {what} ({unit})", ylabel=f"method: posterior {what}", title=title)
    return axes


def _diagonal(ax: Axes, low: float, high: float, label: str | None = None) -> None:
    ax.plot([low, high], [low, high], **DASHED, label=label)


@drawn
def reference_coverage(
    levels: ArrayLike, coverage: ArrayLike, error: ArrayLike | None = None, *, ax: Axes | None = None
) -> Axes:
    """How much of the reference the method's central intervals hold, against how much they should; (L,) shares.

    error: standard errors (L,) of the shares. Below the dashed line the method is too sure.
    """
    return _coverage(panel(ax, 4.2, 3.4), levels, {"outputs": coverage}, error)


def _coverage(ax: Axes, levels: ArrayLike, shares: Mapping[str, ArrayLike], error: ArrayLike | None = None) -> Axes:
    """Shares of a posterior that central intervals of a method hold, in %, against those that they should."""
    levels = 100 * np.asarray(levels, dtype=float)
    bars = None if error is None else 200 * np.asarray(error, dtype=float)
    _diagonal(ax, 0, 100, "as they should")
    for k, (label, share) in enumerate(shares.items()):
        ax.errorbar(levels, 100 * np.asarray(share, dtype=float), bars, **look(k), label=label)
    ax.set(xlim=(levels.min() - 10, 100), ylim=(0, 102), xticks=levels, xlabel="nominal coverage of an interval, %")
    ax.set_ylabel("share of the posterior\nthat it holds, %")
    return legend_below(ax, 3)
