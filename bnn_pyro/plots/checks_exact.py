"""A posterior beside what is known: exact posteriors, densities and gradients, and a stored reference posterior.

Each takes the evidence of a check: arrays by name. Outputs are the network's means in target units, or the log-odds of
classes. Bars are two standard errors.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from bnn_pyro.diagnostics.draws import even
from bnn_pyro.plots.layout import Panel, Panels, floats, legend_below, panel, panels
from bnn_pyro.plots.style import BAYES, DASHED, DATA, REFERENCE, WRONG, drawn, look, tint

#: What a check leaves for its figures, by name; see ``evidence`` in each.
Evidence = Mapping[str, Any]

#: Quantities that are named where they are off; shares of the exact posterior that contours hold.
NAMED, HELD = 3, (0.5, 0.8, 0.95)
#: Outputs that are drawn, evenly among all: more would cover each other.
MAX_OUTPUTS = 150


def picked(evidence: Evidence, names: str) -> list[np.ndarray]:
    """The arrays of these names, which spaces separate, in double precision."""
    return floats(*(evidence[name] for name in names.split()))


# -- exact -------------------------------------------------------------------------------------------------------------
@drawn
def standard_errors(evidence: Evidence, *, ax: Panel = None) -> Axes:
    """By how many standard errors each average is off what it should be; what is off most is named.

    labels (M,): a kind, a space, and the rest ("mean of weight 1 …"): kinds have their own markers.   z (M,): signed, 0
    where right within tolerance.   bound: beyond which one of the M counts as off; the shaded side.
    """
    labels, z, bound = (evidence[name] for name in ("labels", "z", "bound"))
    off = (np.abs(np.asarray(z, dtype=float)) > bound).sum()
    ax = draw_errors(panel(ax, 6.4, 3.2), labels, [_kind(label) for label in labels], z, bound)
    ax.set_ylabel("off the exact value\n(standard errors)")
    ax.set_title(f"{off} of {len(labels)} beyond ±{bound:.1f} (shaded), where chance puts one in 1,000 times")
    return legend_below(ax, 3)


def draw_errors(ax: Axes, labels: Sequence[str], kinds: Sequence[str], z: ArrayLike, bound: float) -> Axes:
    """Numbers z (M,) that should be standard Normal, with a marker for each kind; those furthest beyond are named."""
    z, kinds = np.nan_to_num(np.asarray(z, dtype=float), posinf=np.inf, neginf=-np.inf), np.array(kinds)
    reach = max(1.3 * bound, min(1.15 * np.abs(z).max(initial=0.0), 6 * bound))
    clipped = np.clip(z, -0.97 * reach, 0.97 * reach)
    for side in (-1, 1):
        ax.axhspan(side * bound, side * reach, color="0.93", linewidth=0)
        ax.axhline(side * bound, **DASHED)
    ax.axhline(0, color=REFERENCE, linewidth=0.8)
    for k, kind in enumerate(dict.fromkeys(kinds)):
        at = np.flatnonzero(kinds == kind)
        ax.plot(at + 1, clipped[at], **look(k, linestyle=""), label=kind)
    for i in np.argsort(-np.abs(z))[:NAMED]:
        if abs(z[i]) > bound:
            side, aside = ("left", 7) if i < 0.6 * len(z) else ("right", -7)
            place = dict(xytext=(aside, 0), textcoords="offset points", ha=side, va="center")
            ax.annotate(labels[i].split(" (")[0], (i + 1, clipped[i]), size=7, **place)
    ax.set(xlim=(0, len(z) + 1), ylim=(-reach, reach), xlabel="quantity")
    return ax


def _kind(label: str) -> str:
    """ "variance of weight 3 …" -> "variance of a weight": what a quantity is, without which one."""
    words = label.split(" (")[0].split(" of mini-batches")[0]
    return re.sub(r"(weights?|input) \d+( and \d+)?", r"\1", words).removesuffix(" at input")


@drawn
def exact_intervals(evidence: Evidence, *, ax: Panel = None) -> Axes:
    """95 % intervals of the network's output at new inputs, exact and the method's.

    exact_mean, exact_sd, mean, sd (B,): in units of the target, drawn about the exact mean.
    """
    exact_mean, exact_sd, mean, sd = picked(evidence, "exact_mean exact_sd mean sd")
    ax = panel(ax, 5.2, 3.4)
    at, style = np.arange(1, len(mean) + 1), dict(color="0.86", edgecolor=REFERENCE, linewidth=0.6)
    ax.bar(at, 2 * 1.96 * exact_sd, 0.62, bottom=-1.96 * exact_sd, **style, label="exact 95 %")
    ax.errorbar(at, mean - exact_mean, 1.96 * sd, color=BAYES, fmt="o", label="the method's 95 %")
    ax.axhline(0, color=REFERENCE, linewidth=0.8)
    ax.margins(y=0.08)
    ax.set(xticks=at, xlabel="new input", ylabel="output less its exact mean\n(units of the target)")
    ax.set_title(f"standard deviation: {np.mean(sd / exact_sd):.2f} of the exact one")
    return legend_below(ax, 2)


@drawn
def two_weights(evidence: Evidence, problem: str, *, ax: Panel = None) -> Axes:
    """An exact posterior of two weights with a method's draws on top.

    PROBLEM_axis_1 (n,), PROBLEM_axis_2 (m,), PROBLEM_density (n, m): on a grid; lines hold 50, 80 and 95 % of it.
    PROBLEM_draws (S, 2), PROBLEM_names.
    """
    evidence = {what.removeprefix(f"{problem}_"): value for what, value in evidence.items()}
    first, second, density, draws = picked(evidence, "axis_1 axis_2 density draws")
    names = evidence["names"]
    ordered = np.sort(density.ravel())[::-1]
    mass = np.cumsum(ordered) / ordered.sum()
    heights = [ordered[np.searchsorted(mass, share)] for share in reversed(HELD)]
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
def mixture_densities(evidence: Evidence, *, ax: Panel = None) -> Axes:
    """Log densities of targets as ``predict`` has them, against the exact posterior predictive; (B,) each, nats.

    log_density: of ``predict``.   exact: of the posterior predictive.   log_of_mean: by hand, from the same draws.
    mean_of_log: what averaging log-probabilities would give, never more.
    """
    log_density, by_hand, wrong, exact = picked(evidence, "log_density log_of_mean mean_of_log exact")
    ax = panel(ax, 5.2, 3.6)
    _diagonal(ax, exact.min(), exact.max(), "exact")
    ax.plot(exact, wrong, "x", color=WRONG, label="mean of the logs (wrong)")
    ax.plot(exact, by_hand, "o", markersize=8, mfc="none", color=DATA, label="log of the mean")
    ax.plot(exact, log_density, "o", markersize=3.5, color=BAYES, label="predict")
    ax.set(xlabel="log p(y | x, D), exact (nats)", ylabel="log p(y | x, D) (nats)")
    return legend_below(ax, 2)


@drawn
def batch_objectives(evidence: Evidence, *, ax: Panel = None) -> Axes:
    """The objective by the size of mini-batches.

    batch_sizes, elbo, elbo_error (M,): rows, nats; the first is all rows.
    """
    sizes, elbo, error = picked(evidence, "batch_sizes elbo elbo_error")
    ax = panel(ax, 4.2, 3.0)
    at, two = np.arange(len(sizes)), 2 * error
    ax.axhspan(elbo[0] - two[0], elbo[0] + two[0], color="0.9", linewidth=0, label="all rows, ± 2 s.e.")
    ax.errorbar(at, elbo, two, fmt="o", color=BAYES, label="mean, ± 2 s.e.")
    ax.set_xticks(at, [f"{size:,.0f}" for size in sizes])
    ax.ticklabel_format(axis="y", useOffset=False)
    ax.set(xlim=(-0.5, len(at) - 0.5), xlabel="rows of a mini-batch", ylabel="objective (nats)")
    return legend_below(ax, 2)


@drawn
def finite_differences(evidence: Evidence, *, ax: Panel = None) -> Axes:
    """Entries of the gradient of the log joint density against central differences of the density, (K,) each."""
    gradient, differences = picked(evidence, "gradient finite_difference")
    largest = max(np.abs([gradient, differences]).max(initial=0), 1e-12)
    ax = panel(ax, 4.2, 3.6)
    _diagonal(ax, -1.1 * largest, 1.1 * largest, "equal")
    ax.plot(differences, gradient, "o", mfc="none", color=BAYES, label="an entry")
    ax.set_title(f"at most {np.abs(gradient - differences).max() / largest:.1g} of the largest entry apart")
    ax.set(xlabel="finite difference (nats per unit)", ylabel="gradient (nats per unit)")
    return legend_below(ax, 2)


# -- a stored reference ------------------------------------------------------------------------------------------------
@drawn
def reference_outputs(evidence: Evidence, *, axes: Panels = None) -> np.ndarray:
    """Mean against mean (left) and standard deviation against standard deviation (right) of every output; axes (2,).

    The reference is across, the method up; on the dashed diagonal they are the same, below it on the right the method
    is too sure. Bars (the floors): two Monte-Carlo standard errors of the difference. Of many outputs 150 are drawn.

    reference_mean, mean, mean_floor, reference_sd, sd, sd_floor: all of one shape.   task, target: of the data.
    """
    arrays = picked(evidence, "reference_mean mean mean_floor reference_sd sd sd_floor")
    unit = "log-odds" if evidence["task"] == "classification" else f"mean of {evidence['target']}"
    picks = np.argsort(arrays[0], axis=None, kind="stable")[even(arrays[0].size, MAX_OUTPUTS)]
    arrays = [a.ravel()[picks] for a in arrays]
    axes = panels(axes, 2, 2, (3.9, 3.7))
    style = dict(fmt="o", markersize=3.5, mfc=tint(BAYES, 0.35), ecolor=tint(BAYES, 0.45), capsize=0)
    sides = (("Means", "mean", *arrays[:3]), ("Spreads", "standard deviation", *arrays[3:]))
    for ax, (title, what, across, up, floor) in zip(axes, sides, strict=True):
        ends = [*across, *up, *([0.0] if title == "Spreads" else [])]
        _diagonal(ax, min(ends), max(ends))
        ax.errorbar(across, up, floor, color=BAYES, **style)
        ax.set_aspect("equal", "datalim")
        ax.set(xlabel=f"reference: posterior {what} ({unit})", ylabel=f"method: posterior {what}", title=title)
    return axes


def _diagonal(ax: Axes, low: float, high: float, label: str | None = None) -> None:
    ax.plot([low, high], [low, high], **DASHED, label=label)


@drawn
def reference_coverage(evidence: Evidence, *, ax: Panel = None) -> Axes:
    """How much of the reference the method's central intervals hold, against how much they should.

    levels, coverage, coverage_error (L,): shares. Below the dashed line the method is too sure.
    """
    levels, coverage, error = (100 * values for values in picked(evidence, "levels coverage coverage_error"))
    ax = panel(ax, 4.2, 3.4)
    _diagonal(ax, 0, 100, "as they should")
    ax.errorbar(levels, coverage, 2 * error, **look(0), label="outputs")
    ax.set(xlim=(levels.min() - 10, 100), ylim=(0, 102), xticks=levels, xlabel="nominal coverage of an interval, %")
    ax.set_ylabel("share of the posterior\nthat it holds, %")
    return legend_below(ax, 3)
