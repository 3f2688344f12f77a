"""How training went: the objective and its parts, what the validation rows said, and a sampler's own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from bnn_pyro.errors import UserError
from bnn_pyro.plots.layout import legend_below, panel, panels
from bnn_pyro.plots.style import BAYES, CONTRAST, DASHED, DATA, LINES, REFERENCE, drawn, readable

__all__ = ["objective", "sampler_trace", "training_curves"]

#: What a trace may hold, {name: label}: the objective, and the parts that it is made of.
_OBJECTIVES = {"elbo": "ELBO", "log_joint": "log joint density"}
_PARTS = {"log_likelihood": "log likelihood", "kl": "KL to the prior", "log_prior": "log prior density"}
#: What a stochastic-gradient sampler may leave behind, (name, axis label, title).
_SAMPLER = (
    ("kinetic_temperature", "kinetic temperature", "1 where the momenta are in equilibrium"),
    ("step_size", "step size", "step size"),
    ("validation_nll", "NLL, nats per validation row", "ensemble so far, on validation rows"),
    ("log_joint", "nats, all training rows", "log joint density"),
)
#: Parts that lie further apart than so many of their own ranges are drawn as changes.
APART = 3


@drawn
def training_curves(trace: Mapping[str, Sequence[float]], *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Objective (left) and its parts (right) per epoch, in nats of the whole training set; axes (2,), or (3,).

    A third panel has the NLL of the validation rows, if there are any: marked is the lowest, whose weights early
    stopping keeps. A strong line is a running median of the faint one. A steep start is cut off, and the picture says
    so. Parts too far apart for one axis are drawn as changes to their last values, which the legend tells.

    trace: ``posterior.trace``.   Raises UserError where it has neither an ELBO nor a log joint density.
    """
    curves, parts = (
        {label: np.asarray(trace[name], dtype=float) for name, label in names.items() if trace.get(name)}
        for names in (_OBJECTIVES, _PARTS)
    )
    if not curves:
        raise UserError(
            f"a training curve needs 'elbo' or 'log_joint'; this trace holds {', '.join(trace) or 'nothing'}"
        )
    name, values = next(iter(curves.items()))
    epoch, nll = _epochs(trace, len(values)), np.asarray(trace.get("validation_nll") or [], dtype=float)
    axes = panels(axes, 1, 3 if len(nll) else 2, 9.6 if len(nll) else 7.6, 3.1)
    _curves(axes[0], epoch, {name: values}, "nats, all training rows", title=f"{name} (higher is better)")
    changes = _apart(list(parts.values()))
    if changes:
        parts = {f"{label} {'−' if v[-1] > 0 else '+'} {readable(abs(v[-1]))}": v - v[-1] for label, v in parts.items()}
    title = "its parts, against their last values" if changes else "its parts"
    title = "= log likelihood − KL to the prior" if trace.get("kl") else title
    _curves(axes[1], epoch, parts, "nats, all training rows", CONTRAST, title=title)
    legend_below(axes[1], 1 if changes else 2)
    if len(nll):
        _curves(
            axes[2], epoch, {"validation rows": nll}, "NLL, nats per validation row", title="NLL of validation rows"
        )
        best = int(np.nanargmin(nll))  # the first of equals
        label = f"lowest: epoch {epoch[best]:g}, {nll[best]:.4f} nats"
        axes[2].plot(epoch[best], nll[best], "D", color=DATA, markersize=6, zorder=4, label=label)
        axes[2].axvline(epoch[best], color=DATA, linestyle=":", linewidth=1)
        legend_below(axes[2], 1)
    return axes


@drawn
def objective(elbo: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """ELBO in nats of the whole training set per recorded step; its running median where single ones are noisy."""
    elbo = np.asarray(elbo, dtype=float).ravel()
    late = elbo[-max(2, len(elbo) // 10) :]
    title = f"last tenth: mean {late.mean():,.4g}, sd {late.std():.2g}".replace("-", "−")
    ax = panel(ax, 5.2, 3.3)
    _curves(ax, np.arange(1, len(elbo) + 1), {"ELBO": elbo}, "ELBO, nats, all training rows", title=title)
    return ax


@drawn
def sampler_trace(trace: Mapping[str, Sequence[float]], *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """A stochastic-gradient sampler per epoch: one panel for each number that its trace holds; axes (panels,).

    Kinetic temperature, 1 in equilibrium (dashed): above it the step is too large or the noise estimate too small. Step
    size. NLL per validation row of the ensemble stored so far. Draws begin to be stored at the dotted line.

    trace: ``posterior.trace``.   Raises UserError where it has no kinetic temperature and no step size.
    """
    if not (trace.get("kinetic_temperature") or trace.get("step_size")):
        holds = ", ".join(trace) or "nothing"
        raise UserError(f"a sampler's trace has 'kinetic_temperature' or 'step_size'; this one holds {holds}")
    present = [row for row in _SAMPLER if np.isfinite(trace.get(row[0]) or [np.nan]).any()]
    rows = 1 if len(present) < 4 else 2
    axes = panels(axes, rows, len(present) // rows, 7.6 if len(present) > 1 else 4.4, 2.8 * rows)
    stored = np.flatnonzero(np.asarray(trace.get("draws") or [], dtype=float) > 0)
    for ax, (name, label, title) in zip(axes, present, strict=True):
        values = np.asarray(trace[name], dtype=float)
        epoch, cut = _epochs(trace, len(values)), name in ("validation_nll", "log_joint")
        _curves(ax, epoch, {label: values}, label, cut=cut, title=title)
        if name == "kinetic_temperature":
            ax.axhline(1, **DASHED, label="expected: 1")
            if len(stored):
                ax.set_title(f"mean {np.nanmean(values[stored]):.3f} while draws are stored")
        elif name == "step_size":
            ax.set_ylim(0, 1.08 * np.nanmax(values))
        elif name == "validation_nll":
            ax.set_title(f"{title}: {values[np.isfinite(values)][-1]:.4f} at last")
        if len(stored):
            ax.axvline(epoch[stored[0]], color=REFERENCE, linestyle=":", linewidth=1.2, label="first stored draw")
    lines = [line for line in axes[0].lines if not line.get_label().startswith("_")]
    if len(lines) > 1:
        axes[0].legend(handles=lines[1:], loc="best")
    return axes


def _epochs(trace: Mapping[str, Sequence[float]], num: int) -> np.ndarray:
    return np.asarray(trace.get("epoch") or np.arange(1, num + 1), dtype=float)


def _apart(curves: list[np.ndarray]) -> bool:
    """Whether one axis for all would flatten each of them."""
    if len(curves) < 2:
        return False
    late = [c[len(c) // 10 :] for c in curves]
    return np.ptp(np.concatenate(late)) > APART * max(sum(np.ptp(c) for c in late), 1e-12)


def _curves(
    ax: Axes,
    epoch: np.ndarray,
    curves: Mapping[str, np.ndarray],
    ylabel: str,
    colours: Sequence[str] = (BAYES,),
    *,
    title: str,
    cut: bool = True,
) -> None:
    """Curves with their running medians where they are noisy, and a steep start cut off, which the picture says."""
    for (label, values), colour, dash in zip(curves.items(), colours, LINES, strict=False):
        window, marker = len(values) // 40 | 1, "o" if len(values) <= 20 else None  # odd
        if window >= 3:
            ax.plot(epoch, values, color=colour, alpha=0.3, linewidth=0.7)
            padded = np.pad(values, window // 2, mode="edge")
            values = np.median(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)
        ax.plot(epoch, values, color=colour, linestyle=dash, marker=marker, markersize=3, label=label)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if cut:
        _cut_the_start(ax, [values[np.isfinite(values)] for values in curves.values()])
    ax.set(xlabel="epoch", ylabel=ylabel, title=title)
    ax.grid(axis="y", color="0.9")


def _cut_the_start(ax: Axes, curves: list[np.ndarray]) -> None:
    """Limits that show the last 90 % of the epochs, where the first ones would squeeze them into a third or less."""
    late = np.concatenate([c[len(c) // 10 :] for c in curves])
    margin = 0.06 * (np.ptp(late) or 1.0)
    low, high = late.min() - margin, late.max() + margin
    if np.ptp(np.concatenate(curves)) > 3 * (high - low):
        ax.set_ylim(low, high)
        starts = [c[0] for c in curves]
        first, y, va = (min(starts), 0.03, "bottom") if min(starts) < low else (max(starts), 0.97, "top")
        look = dict(xycoords="axes fraction", ha="right", va=va, color="0.35", size=8)  # where the cut curve is not
        ax.annotate(f"starts at {readable(first)}", (0.98, y), **look)
