"""How training went: the objective and its parts, what the validation rows said, and a sampler's own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bnn_pyro.errors import UserError
from bnn_pyro.plots.style import BAYES, CONTRAST, DATA, REFERENCE, drawn, legend_below, panels

__all__ = ["draw_curve", "sampler_trace", "training_curves"]

#: What a trace may hold, (name, label): the objective, and the parts that it is made of.
_OBJECTIVES = (("elbo", "ELBO"), ("log_joint", "log joint density"))
_PARTS = (("log_likelihood", "log likelihood"), ("kl", "KL to the prior"), ("log_prior", "log prior density"))
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

    A third panel has the NLL of the validation rows where training was watched by them: marked is the lowest, whose
    weights early stopping keeps. Where single epochs are noisy, the strong line is a running median and the faint one
    the values themselves. A steep start is cut off so that the rest can be read; the picture says so. Parts too far
    apart for one axis are drawn as changes to their last values, which the legend tells.

    trace: ``posterior.trace``.

    Raises UserError where the trace has neither an ELBO nor a log joint density.
    """
    objective = [(trace[name], label) for name, label in _OBJECTIVES if trace.get(name)]
    if not objective:
        holds = ", ".join(trace) or "nothing"
        raise UserError(f"a training curve needs 'elbo' or 'log_joint'; this trace holds {holds}")
    parts = [(trace[name], label) for name, label in _PARTS if trace.get(name)]
    epoch = _epochs(trace, len(objective[0][0]))
    validation = trace.get("validation_nll")
    axes = panels(axes, 1, 3 if validation else 2, 9.6 if validation else 7.6, 3.1)
    changes = _apart([np.asarray(values, dtype=float) for values, _ in parts])
    if changes:
        parts = [(np.asarray(v, dtype=float) - v[-1], f"{label} {_plus(-v[-1])}") for v, label in parts]
    for ax, curves, colours in zip(axes, (objective, parts), ([BAYES], CONTRAST), strict=False):
        for (values, label), colour, dash in zip(curves, colours, ("-", "--"), strict=False):
            _curve(ax, epoch, np.asarray(values, dtype=float), label, colour, dash if ax is axes[1] else "-")
        _cut_the_start(ax, [np.asarray(values, dtype=float) for values, _ in curves])
        ax.set(xlabel="epoch", ylabel="nats, all training rows")
        ax.grid(axis="y", color="0.9")
    axes[0].set_title(f"{objective[0][1]} (higher is better)")
    if trace.get("kl"):
        axes[1].set_title("= log likelihood − KL to the prior")
    else:
        axes[1].set_title("its parts, against their last values" if changes else "its parts")
    legend_below(axes[1], columns=1 if changes else 2)
    if validation:
        nll = np.asarray(validation, dtype=float)
        _curve(axes[2], epoch, nll, "validation rows", BAYES, "-")
        _cut_the_start(axes[2], [nll])
        _kept(axes[2], epoch, nll)
        axes[2].set(xlabel="epoch", ylabel="NLL, nats per validation row", title="NLL of validation rows")
        axes[2].grid(axis="y", color="0.9")
        legend_below(axes[2], columns=1)
    return axes


@drawn
def sampler_trace(trace: Mapping[str, Sequence[float]], *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """A stochastic-gradient sampler per epoch: one panel for each number that its trace holds; axes (panels,).

    Kinetic temperature, whose expected value is 1 in equilibrium (dashed): above it the noise of the mini-batches heats
    the chain, so that the step is too large or the noise estimate too small. Step size. NLL in nats per validation row
    of the ensemble stored so far. Log joint density. Draws begin to be stored at the dotted line.

    trace: ``posterior.trace``.

    Raises UserError where the trace is not that of a sampler: it has no kinetic temperature and no step size.
    """
    if not (trace.get("kinetic_temperature") or trace.get("step_size")):
        holds = ", ".join(trace) or "nothing"
        raise UserError(f"a sampler's trace has 'kinetic_temperature' or 'step_size'; this one holds {holds}")
    held = [(name, label, title) for name, label, title in _SAMPLER if np.isfinite(trace.get(name) or [np.nan]).any()]
    rows = 1 if len(held) < 4 else 2
    axes = panels(axes, rows, len(held) // rows, 7.6 if len(held) > 1 else 4.4, 2.8 * rows)
    draws = np.asarray(trace.get("draws") or [], dtype=float)
    for ax, (name, label, title) in zip(axes, held, strict=True):
        values = np.asarray(trace[name], dtype=float)
        epoch = _epochs(trace, len(values))
        _curve(ax, epoch, values, label, BAYES, "-")
        if name == "kinetic_temperature":
            ax.axhline(1, color=REFERENCE, linestyle="--", linewidth=1.2, label="expected: 1")
            late = values[draws > 0] if (draws > 0).any() else values
            title = f"mean {np.nanmean(late):.3f} while draws are stored" if (draws > 0).any() else title
        if name in ("validation_nll", "log_joint"):
            finite = values[np.isfinite(values)]
            _cut_the_start(ax, [finite])
        if name == "step_size":
            ax.set_ylim(0, 1.08 * np.nanmax(values))
        if name == "validation_nll":
            title += f": {values[np.isfinite(values)][-1]:.4f} at last"
        if (draws > 0).any():
            ax.axvline(epoch[draws > 0][0], color=REFERENCE, linestyle=":", linewidth=1.2, label="first stored draw")
        ax.set(xlabel="epoch", ylabel=label)
        ax.set_title(title, size=9)
        ax.grid(axis="y", color="0.9")
    lines = [line for line in axes[0].lines if not line.get_label().startswith("_")]
    if len(lines) > 1:
        axes[0].legend(handles=lines[1:], loc="best")
    return axes


def draw_curve(ax: Axes, epoch: np.ndarray, values: np.ndarray, label: str) -> None:
    """One curve with its running median where it is noisy, and a steep start cut off, which the picture says."""
    _curve(ax, epoch, values, label, BAYES, "-")
    _cut_the_start(ax, [values])
    ax.grid(axis="y", color="0.9")


def _epochs(trace: Mapping[str, Sequence[float]], num: int) -> np.ndarray:
    return np.asarray(trace.get("epoch") or np.arange(1, num + 1), dtype=float)


def _kept(ax: Axes, epoch: np.ndarray, nll: np.ndarray) -> None:
    """Mark the epoch of the lowest NLL, the first of equals, whose weights early stopping keeps."""
    best = int(np.nanargmin(nll))
    label = f"lowest: epoch {epoch[best]:g}, {nll[best]:.4f} nats"
    ax.plot(epoch[best], nll[best], "D", color=DATA, markersize=6, linestyle="none", zorder=4, label=label)
    ax.axvline(epoch[best], color=DATA, linestyle=":", linewidth=1)


def _apart(curves: list[np.ndarray]) -> bool:
    """Whether one axis for all would flatten each of them."""
    if len(curves) < 2:
        return False
    late = [c[len(c) // 10 :] for c in curves]
    return np.ptp(np.concatenate(late)) > APART * max(sum(np.ptp(c) for c in late), 1e-12)


def _plus(value: float) -> str:
    return f"{'+' if value >= 0 else '−'} {_number(abs(value))}"


def _number(value: float) -> str:
    return f"{value:{',.0f' if abs(value) >= 1000 else '.4g'}}".replace("-", "−")


def _curve(ax: Axes, epoch: np.ndarray, values: np.ndarray, label: str, colour: str, dash: str) -> None:
    window = len(values) // 40 | 1  # odd
    if window >= 3:
        ax.plot(epoch, values, color=colour, alpha=0.3, linewidth=0.7)
        padded = np.pad(values, window // 2, mode="edge")
        values = np.median(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)
    few = len(values) <= 20
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.plot(epoch, values, color=colour, linestyle=dash, marker="o" if few else None, markersize=3, label=label)


def _cut_the_start(ax: Axes, curves: list[np.ndarray]) -> None:
    """Limits that show the last 90 % of the epochs, where the first ones would squeeze them into a third or less."""
    late = np.concatenate([c[len(c) // 10 :] for c in curves])
    everything = np.concatenate(curves)
    margin = 0.06 * (np.ptp(late) or 1.0)
    low, high = late.min() - margin, late.max() + margin
    if np.ptp(everything) > 3 * (high - low):
        ax.set_ylim(low, high)
        first = min(c[0] for c in curves)
        first = first if first < low else max(c[0] for c in curves)
        text = f"starts at {_number(first)}"
        place = (0.98, 0.03, "bottom") if first < low else (0.98, 0.97, "top")  # where the cut curve is not
        ax.annotate(text, place[:2], xycoords="axes fraction", ha="right", va=place[2], color="0.35", size=8)
