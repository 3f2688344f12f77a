"""A posterior beside what is known exactly: linear regression, two weights on a grid, mixtures, gradients.

All from plain arrays, the evidence of the checks of ``trust``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter
from numpy.typing import ArrayLike

from bnn_pyro.plots.style import (
    BAYES,
    CONTRAST,
    DATA,
    HATCH,
    MARKERS,
    REFERENCE,
    WRONG,
    drawn,
    legend_below,
    panel,
    panels,
    tint,
)

__all__ = ["batch_objectives", "exact_intervals", "finite_differences", "mixture_densities", "standard_errors",
           "two_weights"]  # fmt: skip

#: Quantities that are named where they are off; shares of the exact posterior that contours hold.
NAMED, HELD = 3, (0.5, 0.8, 0.95)


@drawn
def standard_errors(labels: Sequence[str], z: ArrayLike, bound: float, *, ax: Axes | None = None) -> Axes:
    """By how many standard errors each average is off what it should be; what is off most is named.

    labels (M,): a kind, a space, and the rest ("mean of weight 1 …"): kinds have their own markers.   z (M,): signed, 0
    where right within tolerance.   bound: beyond which one of the M counts as off; the shaded side.
    """
    z = np.nan_to_num(np.asarray(z, dtype=float), posinf=np.inf, neginf=-np.inf)
    ax = panel(ax, 6.4, 3.2)
    reach = max(1.3 * bound, min(1.15 * np.abs(z).max(initial=0.0), 6 * bound))
    shown = np.clip(z, -0.97 * reach, 0.97 * reach)
    for side in (-1, 1):
        ax.axhspan(side * bound, side * reach, color="0.93", linewidth=0)
        ax.axhline(side * bound, color=REFERENCE, linestyle="--", linewidth=1.0)
    ax.axhline(0, color=REFERENCE, linewidth=0.8)
    kinds = list(dict.fromkeys(_kind(label) for label in labels))
    colours = [BAYES, *CONTRAST, DATA]
    for k, kind in enumerate(kinds):
        at = np.array([i for i, label in enumerate(labels) if _kind(label) == kind])
        look = dict(color=colours[k % len(colours)], marker=MARKERS[k % len(MARKERS)], markersize=5)
        ax.plot(at + 1, shown[at], linestyle="none", label=kind, **look)
    for i in np.argsort(-np.abs(z))[:NAMED]:
        if abs(z[i]) > bound:
            right = i < 0.6 * len(z)
            name, place, aside = labels[i].split(" (")[0], (i + 1, shown[i]), (7 if right else -7, 0)
            side = "left" if right else "right"
            ax.annotate(name, place, aside, textcoords="offset points", ha=side, va="center", size=7)
    ax.set(xlim=(0, len(z) + 1), ylim=(-reach, reach))
    ax.set(xlabel="quantity", ylabel="off the exact value\n(standard errors)")
    far = int((np.abs(z) > bound).sum())
    ax.set_title(f"{far} of {len(z)} beyond ±{bound:.1f} (shaded), where chance puts one in 1,000 times", size=9)
    legend_below(ax, columns=3)
    return ax


@drawn
def exact_intervals(
    exact_mean: ArrayLike,
    exact_sd: ArrayLike,
    found_mean: ArrayLike,
    found_sd: ArrayLike,
    levels: ArrayLike,
    coverage: ArrayLike,
    weight_coverage: ArrayLike,
    *,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """95 % intervals of the network's output at new inputs, exact and found (left); what found ones hold (right).

    exact_mean, exact_sd, found_mean, found_sd (B,): in units of the target, drawn about the exact mean.   levels (L,):
    nominal.   coverage, weight_coverage (L,): the share of the exact posterior that central intervals of the method
    hold, of outputs and of weights.
    """
    centre, exact_sd, found_mean, found_sd = (
        np.asarray(v, float) for v in (exact_mean, exact_sd, found_mean, found_sd)
    )
    axes = panels(axes, 1, 2, 7.8, 3.2)
    at = np.arange(1, len(centre) + 1)
    axes[0].bar(at, 2 * 1.96 * exact_sd, 0.62, bottom=-1.96 * exact_sd, color="0.86", edgecolor=REFERENCE,
                linewidth=0.6, label="exact 95 %")  # fmt: skip
    look = dict(color=BAYES, fmt="o", markersize=4, capsize=3, linewidth=1.6, label="the method's 95 %")
    axes[0].errorbar(at, found_mean - centre, 1.96 * found_sd, **look)
    axes[0].axhline(0, color=REFERENCE, linewidth=0.8)
    axes[0].margins(y=0.08)
    axes[0].set(xlabel="new input", ylabel="output less its exact mean\n(units of the target)")
    axes[0].xaxis.set_major_locator(FixedLocator(at))
    axes[0].set_title(f"standard deviation: {np.mean(found_sd / exact_sd):.2f} of the exact one", size=9)
    legend_below(axes[0], columns=2)
    nominal = 100 * np.asarray(levels, float)
    axes[1].plot([0, 100], [0, 100], color=REFERENCE, linestyle="--", linewidth=1.0, label="as they should")
    axes[1].plot(
        nominal, 100 * np.asarray(weight_coverage), color=CONTRAST[0], marker="s", linestyle="-.", label="weights"
    )
    axes[1].plot(nominal, 100 * np.asarray(coverage), color=BAYES, marker="o", label="outputs")
    axes[1].set(xlim=(40, 100), ylim=(0, 102), xlabel="nominal coverage of an interval",
                ylabel="share of the exact posterior\nthat it holds")  # fmt: skip
    axes[1].xaxis.set_major_locator(FixedLocator(nominal))
    for axis in (axes[1].xaxis, axes[1].yaxis):
        axis.set_major_formatter(PercentFormatter(decimals=0))
    legend_below(axes[1], columns=3)
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

    axis_1 (n,), axis_2 (m,), density (n, m): the posterior on a grid.   draws (S, 2).   Lines hold 50, 80 and 95 % of
    the exact posterior.
    """
    first, second, density, draws = (np.asarray(v, float) for v in (axis_1, axis_2, density, draws))
    ax = panel(ax, 4.6, 4.0)
    ordered = np.sort(density.ravel())[::-1]
    held = np.cumsum(ordered) / ordered.sum()
    heights = [ordered[np.searchsorted(held, share)] for share in reversed(HELD)]
    colours = [tint("#000000", s) for s in (0.08, 0.18, 0.32)]
    ax.contourf(first, second, density.T, levels=[*heights, ordered[0] * 1.001], colors=colours)
    lines = ax.contour(first, second, density.T, levels=heights, colors=REFERENCE, linewidths=0.8,
                       linestyles=[":", "--", "-"])  # fmt: skip
    ax.plot(
        *draws.T, linestyle="none", marker=".", markersize=2.6, color=BAYES, alpha=0.55, label="draws of the method"
    )
    inside = np.argwhere(density > heights[0])
    (low_1, low_2), (high_1, high_2) = inside.min(0), inside.max(0)
    for set_limits, axis, low, high, drawn_ in (
        (ax.set_xlim, first, low_1, high_1, draws[:, 0]),
        (ax.set_ylim, second, low_2, high_2, draws[:, 1]),
    ):
        ends = min(axis[low], np.quantile(drawn_, 0.01)), max(axis[high], np.quantile(drawn_, 0.99))
        room = 0.12 * (ends[1] - ends[0])
        set_limits(ends[0] - room, ends[1] + room)
    handles = [*lines.legend_elements()[0][::-1], *ax.get_lines()[-1:]]
    words = [*(f"holds {100 * share:.0f} % (exact)" for share in HELD), "draws of the method"]
    ax.set(xlabel=f"weight {names[0]}", ylabel=f"weight {names[1]}")
    _legend(ax, handles, words)
    return ax


@drawn
def mixture_densities(
    log_density: ArrayLike, log_of_mean: ArrayLike, mean_of_log: ArrayLike, exact: ArrayLike, *, ax: Axes | None = None
) -> Axes:
    """Log densities of targets as ``predict`` has them, against the exact posterior predictive; (B,) each, nats.

    log_of_mean: worked out by hand from the same draws, what a mixture is.   mean_of_log: what averaging
    log-probabilities would give, never more than it.
    """
    found, by_hand, wrong, exact = (np.asarray(v, float) for v in (log_density, log_of_mean, mean_of_log, exact))
    ax = panel(ax, 5.2, 3.6)
    ends = np.array([exact.min(), exact.max()])
    ax.plot(ends, ends, color=REFERENCE, linestyle="--", linewidth=1.0, label="exact")
    ax.plot(exact, wrong, linestyle="none", marker="x", color=WRONG, label="mean of the logs (wrong)")
    ax.plot(exact, by_hand, linestyle="none", marker="o", markersize=8, mfc="none", color=DATA, label="log of the mean")
    ax.plot(exact, found, linestyle="none", marker="o", markersize=3.5, color=BAYES, label="predict")
    ax.set(xlabel="log p(y | x, D), exact (nats)", ylabel="log p(y | x, D), found (nats)")
    legend_below(ax, columns=2)
    return ax


@drawn
def batch_objectives(
    batch_sizes: ArrayLike,
    elbo: ArrayLike,
    elbo_error: ArrayLike,
    estimators: Sequence[str] = (),
    variance: ArrayLike = (),
    variance_error: ArrayLike = (),
    *,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """The objective by the size of mini-batches (left), and the variance of its gradient by estimator (right).

    batch_sizes, elbo, elbo_error (M,): rows, nats; bars are two standard errors; the first is all rows.   variance,
    variance_error (E,): as a share of the first estimator's; bars are two standard errors.
    """
    axes = panels(axes, 1, 2, 7.8, 3.0)
    sizes, elbo, error = (np.asarray(v, float) for v in (batch_sizes, elbo, elbo_error))
    at = np.arange(len(sizes))
    axes[0].axhspan(
        elbo[0] - 2 * error[0], elbo[0] + 2 * error[0], color="0.9", linewidth=0, label="all rows, ± 2 s.e."
    )
    axes[0].errorbar(at, elbo, 2 * error, fmt="o", color=BAYES, capsize=3, label="mean, ± 2 s.e.")
    axes[0].set_xticks(at, [f"{size:,.0f}" for size in sizes])
    axes[0].ticklabel_format(axis="y", useOffset=False)
    axes[0].set(xlim=(-0.5, len(at) - 0.5), xlabel="rows of a mini-batch", ylabel="objective (nats)")
    legend_below(axes[0], columns=2)
    share, spread = np.asarray(variance, float), np.asarray(variance_error, float)
    if not len(share):
        axes[1].set_axis_off()
        return axes
    where = np.arange(len(share))[::-1]
    axes[1].barh(where, share, 0.6, left=0, color=tint(BAYES, 0.5), edgecolor=BAYES, hatch=HATCH)
    low = np.minimum(2 * spread, 0.9 * share)
    axes[1].errorbar(share, where, xerr=[low, 2 * spread], fmt="none", color=DATA, capsize=3, linewidth=1.2)
    axes[1].axvline(1, color=REFERENCE, linestyle="--", linewidth=1.0)
    for y, value in zip(where, share, strict=True):
        axes[1].annotate(
            f"{value:,.0f}" if value >= 10 else f"{value:.2g}",
            (max(value, 1.0), y),
            (8, 7),
            textcoords="offset points",
            size=8,
            va="center",
        )
    axes[1].set_yticks(where, list(estimators))
    axes[1].set(xscale="log", xlim=(0.5 * share.min(), 6 * max(share.max(), 1.0)),
                xlabel="variance of the gradient, of the first one's")  # fmt: skip
    axes[1].yaxis.set_minor_locator(NullLocator())
    return axes


@drawn
def finite_differences(gradient: ArrayLike, finite_difference: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """Entries of the gradient of the log joint density against central differences of the density, (K,) each."""
    gradient, differences = (np.asarray(v, float).ravel() for v in (gradient, finite_difference))
    ax = panel(ax, 4.2, 3.6)
    reach = 1.1 * max(np.abs(gradient).max(initial=0), np.abs(differences).max(initial=0), 1e-12)
    ax.plot([-reach, reach], [-reach, reach], color=REFERENCE, linestyle="--", linewidth=1.0, label="equal")
    ax.plot(differences, gradient, linestyle="none", marker="o", mfc="none", color=BAYES, label="an entry")
    off = np.abs(gradient - differences).max() / (reach / 1.1)
    ax.set_title(f"at most {off:.1g} of the largest entry apart", size=9)
    ax.set(xlabel="finite difference (nats per unit)", ylabel="gradient (nats per unit)")
    legend_below(ax, columns=2)
    return ax


def _kind(label: str) -> str:
    """ "variance of weight 3 …" -> "variance of a weight": what a quantity is, without which one."""
    words = label.split(" (")[0].split(" of mini-batches")[0]
    return re.sub(r"(weights?|input) \d+( and \d+)?", r"\1", words).removesuffix(" at input")


def _legend(ax: Axes, handles: list, words: list[str]) -> None:
    for handle, word in zip(handles, words, strict=True):
        handle.set_label(word)
    legend_below(ax, columns=2, handles=handles)
