"""What chains of draws look like, from plain arrays: C chains of D draws of M quantities.

With hundreds of chains a few are drawn as lines, from the one with the lowest mean to that with the highest, over the
range of all; every picture says how many it shows.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike
from scipy.stats import rankdata
from torch import Tensor

from bnn_pyro.diagnostics.draws import even
from bnn_pyro.errors import UserError
from bnn_pyro.plots.layout import Panel, legend_below, panel, panels
from bnn_pyro.plots.style import DATA, LINES, drawn, look, readable

#: Chains that are drawn as lines; of more, so many, evenly chosen by their means.
MOST_CHAINS = 8
#: Rows of a rank plot at most: with more chains, neighbours share a row.
MOST_ROWS = 64
#: Draws of a row and bin of a rank plot that are expected, so that a bin says something.
PER_BIN = 8
#: Quantities that a picture shows at most.
MOST_TRACES = 6


@drawn
def trace_ranks(
    values: ArrayLike, labels: Sequence[str], *, diverging: ArrayLike | None = None, unit: str = "value"
) -> np.ndarray:
    """Trace (left) and ranks (right) of each quantity, axes (2·M,); Vehtari et al. 2021, arXiv:1903.08008, figure 5.

    Ranks of all draws together, one row a chain (or a few neighbours of hundreds): a row of one colour says that the
    chain visits low and high values as often as the others do. Crosses below mark divergent draws.

    values: (C, D, M), the first 6 of M are shown.   diverging: (C, D), 0 or 1.   unit: of the values, for the axis.
    """
    values = np.asarray(values, dtype=float)
    if values.ndim != 3 or values.shape[2] != len(labels):
        raise UserError(f"values must be (chains, draws, {len(labels)} quantities), got the shape {values.shape}")
    chains, _, every = values.shape
    num = min(MOST_TRACES, every)
    axes = panels(2 * num, 2, (3.9, 1.25), (0, 0.75), width_ratios=(3, 2))
    for left, right, label, one in zip(axes[::2], axes[1::2], labels, np.moveaxis(values, 2, 0), strict=False):
        _lines(left, one)
        _mark(left, np.zeros((1, 1)) if diverging is None else np.asarray(diverging))
        left.set_title(label if len(label) <= 44 else f"{label[:43]}…", size=8.5, loc="left")
        left.yaxis.set_major_locator(MaxNLocator(3))
        left.set_ylabel(unit, size=8)
        _ranks(right, one)
    for ax in axes[:-2]:
        ax.tick_params(labelbottom=False)
    few = "" if num == every else f"; {num} of {every} quantities"
    axes[-2].set_xlabel(f"kept draw ({min(MOST_CHAINS, chains)} of {chains} chains{few})", size=8)
    axes[-1].set_xlabel("rank of the draw, in % of all draws", size=8)
    return axes


@drawn
def chain_traces(stats: Mapping[str, Tensor], *, ax: Panel = None) -> Axes:
    """Log joint density in nats of every kept draw, one line a chain; crosses below are divergent transitions.

    stats: ``posterior.stats``, {name: (C, D)}.   Raises UserError where it has no log joint density ("lp").
    """
    if "lp" not in stats:
        raise UserError("this posterior has no log joint density of its draws")
    values, title = stats["lp"].double().cpu().numpy(), ""
    ax = panel(ax, 7.6, 2.9)
    _lines(ax, values)
    if "diverging" in stats:
        title = f"{int(stats['diverging'].sum()):,} of {values.size:,} transitions divergent; "
        _mark(ax, stats["diverging"].cpu().numpy())
    ax.set(xlabel="kept draw", ylabel="log joint density, nats")
    ax.set_title(f"{title}mean {readable(values.mean())}, sd {values.std():.1f}")
    return legend_below(ax, 5)


def _lines(ax: Axes, values: np.ndarray) -> None:
    """One line a chain; of many, a few over the range of all, from the lowest mean to the highest."""
    draw, chains = np.arange(1, values.shape[1] + 1), values.shape[0]
    picks = np.sort(values.mean(1).argsort(kind="stable")[even(chains, MOST_CHAINS)])
    if chains > len(picks):
        low, high = np.nanquantile(values, (0.05, 0.95), axis=0)
        ax.fill_between(draw, low, high, color="0.85", linewidth=0, label=f"5–95 % of {chains} chains")
    for k, c in enumerate(picks):
        style = look(k, linestyle=LINES[k // 5], marker="o" if len(draw) == 1 else None)
        ax.plot(draw, values[c], **style, linewidth=0.7, label=f"chain {c}")
    ax.set_xlim(1, max(2, len(draw)))
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _mark(ax: Axes, diverging: np.ndarray) -> None:
    at = np.flatnonzero(diverging.any(0)) + 1
    if len(at):
        ax.plot(at, np.full(len(at), 0.03), "x", color=DATA, transform=ax.get_xaxis_transform(), label="divergent")


def _ranks(ax: Axes, values: np.ndarray) -> None:
    """A map of how often each chain has ranks of all, in multiples of what is expected."""
    chains = len(values)
    share = (rankdata(values, axis=None).reshape(values.shape) - 0.5) / values.size
    rows = np.array_split(share, min(chains, MOST_ROWS))
    bins = int(np.clip(min(r.size for r in rows) // PER_BIN, 2, 20))
    edges = np.linspace(0, 1, bins + 1)
    counts = [np.histogram(r, edges)[0] / (r.size / bins) for r in rows]
    mesh = ax.pcolormesh(100 * edges, np.arange(len(rows) + 1) - 0.5, counts, cmap="PuOr_r", vmin=0, vmax=2)
    bar = ax.figure.colorbar(mesh, ax=ax, ticks=[0, 1, 2], pad=0.02, aspect=12)
    bar.ax.set_yticklabels(["0", "1 ×", "2 ×"], size=7)
    ax.set(ylim=(len(rows) - 0.5, -0.5), yticks=range(chains) if chains <= MOST_CHAINS else [])
    ax.xaxis.set_major_locator(MaxNLocator(4))
    each = -(-chains // len(rows))
    ax.set_ylabel("chain" if each == 1 else f"rows of ≤{each} chains", size=8)
    ax.set_title("ranks, times the expected", size=8.5, loc="left")
