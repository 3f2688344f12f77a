"""How training went: the objective and its two parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from bnn_pyro.errors import UserError
from bnn_pyro.plots.style import BAYES, CONTRAST, drawn, legend_below, panels

__all__ = ["training_curves"]

#: What a trace may hold, (name, label): the objective, and the parts that it is made of.
_OBJECTIVES = (("elbo", "ELBO"), ("log_joint", "log joint density"))
_PARTS = (("log_likelihood", "log likelihood"), ("kl", "KL to the prior"), ("log_prior", "log prior density"))


@drawn
def training_curves(trace: Mapping[str, Sequence[float]], *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Objective (left) and its parts (right) per epoch, in nats of the whole training set; axes (2,).

    trace: ``posterior.trace``. Where single epochs are noisy, the strong line is a running median and the faint one
    the values themselves. A steep start is cut off so that the rest can be read; the picture says so.

    Raises UserError where the trace has neither an ELBO nor a log joint density.
    """
    objective = [(trace[name], label) for name, label in _OBJECTIVES if trace.get(name)]
    if not objective:
        holds = ", ".join(trace) or "nothing"
        raise UserError(f"a training curve needs 'elbo' or 'log_joint'; this trace holds {holds}")
    parts = [(trace[name], label) for name, label in _PARTS if trace.get(name)]
    epoch = np.asarray(trace.get("epoch") or np.arange(1, len(objective[0][0]) + 1), dtype=float)
    axes = panels(axes, 1, 2, 7.6, 3.1)
    for ax, curves, colours in zip(axes, (objective, parts), ([BAYES], CONTRAST), strict=True):
        for (values, label), colour, dash in zip(curves, colours, ("-", "--"), strict=False):
            _curve(ax, epoch, np.asarray(values, dtype=float), label, colour, dash if ax is axes[1] else "-")
        _cut_the_start(ax, [np.asarray(values, dtype=float) for values, _ in curves])
        ax.set(xlabel="epoch", ylabel="nats, all training rows")
        ax.grid(axis="y", color="0.9")
    axes[0].set_title(f"{objective[0][1]} (higher is better)")
    axes[1].set_title("= log likelihood − KL to the prior" if trace.get("kl") else "its parts")
    legend_below(axes[1], columns=2)
    return axes


def _curve(ax: Axes, epoch: np.ndarray, values: np.ndarray, label: str, colour: str, dash: str) -> None:
    window = len(values) // 40 | 1  # odd
    if window >= 3:
        ax.plot(epoch, values, color=colour, alpha=0.3, linewidth=0.7)
        padded = np.pad(values, window // 2, mode="edge")
        values = np.median(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)
    few = len(values) <= 20
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
        text = f"starts at {first:{',.0f' if abs(first) >= 1000 else '.4g'}}".replace("-", "−")
        ax.annotate(text, (0.98, 0.03), xycoords="axes fraction", ha="right", color="0.35", size=8)
