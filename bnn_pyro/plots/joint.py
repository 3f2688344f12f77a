"""Pictures of two checks of samplers: the joint distribution test, and the step-size bias of SGHMC and SGLD."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from scipy.stats import norm

from bnn_pyro.plots.style import BAYES, CONTRAST, LINES, MARKERS, REFERENCE, drawn, legend_below, panel, panels, tint

__all__ = ["joint_quantiles", "joint_z_scores", "step_size_bias"]

#: Quantities whose quantiles are drawn: those that are furthest off.
SHOWN = 3

#: Standard errors beyond which the axis of z-scores is no longer linear.
LINEAR = 6.0


@drawn
def joint_z_scores(z: ArrayLike, bound: float, quantities: Sequence[str], *, ax: Axes | None = None) -> Axes:
    """How many standard errors each quantity is off the joint distribution, in its mean and in its variance.

    z: (M, 2).   bound: what all of |z| stay below with probability 1 − 10⁻³ where the sampler is right.
    """
    z = np.asarray(z, dtype=float)
    ax = panel(ax, 5.6, 1.2 + 0.165 * len(z))
    rows = np.arange(len(z))[::-1]
    ax.axvspan(-bound, bound, color=tint(REFERENCE, 0.22), lw=0, label="right, with probability 0.999")
    ax.axvline(0, color=REFERENCE, lw=0.8)
    for side, (name, colour) in enumerate((("mean", BAYES), ("variance", CONTRAST[0]))):
        off = np.abs(z[:, side]) > bound
        place = rows + 0.15 - 0.3 * side
        look = dict(s=20, marker=MARKERS[side], edgecolors=colour, linewidths=1.1)
        ax.scatter(z[off, side], place[off], facecolors=colour, **look)
        ax.scatter(z[~off, side], place[~off], facecolors="white", label=name, **look)
    if off_scale := float(np.abs(z).max()) > LINEAR:
        ax.set_xscale("symlog", linthresh=LINEAR, linscale=1.5)
    widest = max(1.3 * bound, (1.5 if off_scale else 1.1) * float(np.abs(z).max()))
    ticks = [t for t in (-1000, -100, -10, -5, 0, 5, 10, 100, 1000) if abs(t) <= widest]
    ax.set_xticks(ticks, [f"{t}".replace("-", "−") for t in ticks])
    ax.minorticks_off()
    ax.set_yticks(rows, list(quantities), size=7)
    ax.set(xlim=(-widest, widest), ylim=(-0.8, len(z) - 0.2), xlabel="off the joint distribution, standard errors")
    ax.grid(axis="y", lw=0.3, color="0.9")
    ax.tick_params(axis="y", length=0)
    legend_below(ax, columns=2)
    return ax


@drawn
def joint_quantiles(
    levels: ArrayLike,
    scores: ArrayLike,
    z: ArrayLike,
    drift: ArrayLike,
    drift_error: ArrayLike,
    quantities: Sequence[str],
    *,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """The quantities that are furthest off: quantiles against those of the joint distribution, and drift by sweep.

    levels (Q,), scores (Q, M): quantiles of the standard Normal, and of the chains' normal scores.
    z (M, 2), drift and drift_error (sweeps, M, 2).
    """
    levels, scores, z, drift, drift_error = map(np.asarray, (levels, scores, z, drift, drift_error))
    axes = panels(axes, 1, 2, 7.4, 3.4)
    worst = np.argsort(-np.abs(z).max(1))[:SHOWN]
    colours = [BAYES, *CONTRAST]
    axes[0].axhline(0, color=REFERENCE, ls="--", lw=1, label="the joint distribution")
    for i, q in enumerate(worst):
        look = dict(color=colours[i], ls=LINES[i])
        axes[0].plot(levels, scores[:, q] - levels, label=quantities[q], **look)
        side = int(np.abs(z[q]).argmax())
        sweeps = np.arange(1, len(drift) + 1) + 0.12 * (i - 1)
        values, error = drift[:, q, side], 2 * drift_error[:, q, side]
        axes[1].errorbar(
            sweeps, values, error, marker=MARKERS[i], ms=3.5, capsize=1.5, lw=1.1,
            label=f"{('mean', 'variance')[side]} of {quantities[q]}", **look,
        )  # fmt: skip
    widest = max(0.5, 1.15 * float(np.abs(scores[:, worst] - levels[:, None]).max()))
    axes[0].set(ylim=(-widest, widest), xlabel="quantile of the joint distribution (normal scores)",
                ylabel="chains' quantile\nminus that (sd)")  # fmt: skip
    tail = norm.ppf([0.01, 0.5, 0.99])
    axes[0].set_xticks([-2, -1, 0, 1, 2])
    axes[0].set_xlim(tail[0], tail[-1])
    axes[1].axhline(0, color=REFERENCE, ls="--", lw=1)
    axes[1].set(xlabel="sweep (transition, then new targets)", ylabel="shift (sd, or variances)\n± 2 s.e.")
    axes[1].xaxis.get_major_locator().set_params(integer=True)
    for ax in axes:
        legend_below(ax, columns=1)
    return axes


@drawn
def step_size_bias(
    lr: ArrayLike,
    bias: ArrayLike,
    error: ArrayLike,
    grid_lr: ArrayLike,
    grid_exact: ArrayLike,
    *,
    largest_lr: float,
    own_lr: float | None = None,
    own_bias: float | None = None,
    order: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Relative excess of the variances against the step size, with what the recursion has, and slope 1.

    lr, bias, error (3,): as measured, ± 2 standard errors.   grid_lr, grid_exact (G,): exact.   largest_lr: where it
    explodes.   own_lr, own_bias: what was asked for.   order: of the measured line, with its standard error.
    """
    lr, bias, error, grid_lr, grid_exact = map(np.asarray, (lr, bias, error, grid_lr, grid_exact))
    ax = panel(ax)
    ax.plot(grid_lr, grid_exact, color=REFERENCE, ls="-", lw=1.2, label="exact, by the recursion")
    first = grid_exact[0] * grid_lr / grid_lr[0]
    ax.plot(grid_lr, first, color=REFERENCE, ls=":", lw=1.2, label="slope 1")
    shown = bias > 0
    low = np.minimum(2 * error, 0.95 * bias)[shown]
    name = "measured, ± 2 s.e." + (f" (slope {order[0]:.2f} ± {order[1]:.2f})" if order else "")
    ax.errorbar(lr[shown], bias[shown], [low, 2 * error[shown]], color=BAYES, ls="none", marker="o", ms=5, capsize=2.5,
                label=name)  # fmt: skip
    if own_lr is not None and own_bias is not None and np.isfinite(own_bias):
        ax.plot(own_lr, own_bias, color=CONTRAST[0], marker="s", ms=6, ls="none", mfc="white", mew=1.5,
                label=f"the step asked for, lr {own_lr:g}")  # fmt: skip
    ax.axvline(largest_lr, color=CONTRAST[3], ls="--", lw=1.2, label="explodes from here on")
    ax.set(xscale="log", yscale="log", xlabel="step size, lr  (η = lr / N for SGHMC, lr / 2N for SGLD)",
           ylabel="excess of the variance\n(share of the posterior's)")  # fmt: skip
    legend_below(ax, columns=2)
    return ax
