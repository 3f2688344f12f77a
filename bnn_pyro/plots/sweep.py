"""Forest plot of many fits: the score of every run or recipe with its interval.

The colour and the marker of a recipe show how it compares with the best one.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bnn_pyro.errors import UserError
from bnn_pyro.plots.layout import panels
from bnn_pyro.plots.style import BAYES, CONTRAST, DASHED, GOOD, REFERENCE, drawn, tint

#: {verdict on a recipe: (marker of its mean, edge colour, fill colour, label)}.
KINDS = {
    "best": ("D", BAYES, BAYES, "best mean"),
    "first": ("D", BAYES, BAYES, "the first run"),
    "better": ("^", GOOD, GOOD, "better"),
    "no clear difference": ("o", BAYES, "white", "no clear difference"),
    "worse": ("s", CONTRAST[0], CONTRAST[0], "worse"),
    "": ("o", REFERENCE, REFERENCE, "value with its error"),
}
#: Ratio of the largest to the smallest value above which the scale is logarithmic.
SPAN = 30


class Scores(NamedTuple):
    """Scores of one recipe on one data set.

    points, mean  the metric of each fit, and its mean
    error         standard error (NaN: none), or distances (below, above) of an interval's ends
    kind          a key of ``KINDS``
    """

    points: Sequence[float]
    mean: float
    error: float | tuple[float, float]
    kind: str = ""


@drawn
def sweep_points(
    scores: Mapping[str, Mapping[str, Scores]], label: str | None = None, *, nominal: float | None = None
) -> np.ndarray:
    """A row per recipe, with a mark for every fit and the mean ± its standard error; a panel per data set.

    scores: {data set: {recipe: scores}}.   label: of the metric, with its unit; None: a panel per metric.
    nominal: the correct value of the metric.   Raises UserError if there is nothing to draw.
    """
    if not (recipes := list(dict.fromkeys(name for by in scores.values() for name in by))):
        raise UserError("there is no fit to draw")
    names = [textwrap.fill(name, 30) for name in recipes]
    wide = 0.075 * max(len(line) for name in names for line in name.split("\n"))
    cell = 2.9, 0.95 + 0.34 * max(len(names), 2)
    axes = panels(len(scores), 3, cell, (wide, 0.35), least=5.4, sharey=True)  # wide enough for the legend
    for ax, (data, by) in zip(axes, scores.items(), strict=True):
        for name, one in by.items():
            row, (marker, colour, filling, legend) = recipes.index(name), KINDS[one.kind]
            if len(one.points) > 1:
                beside = row + 0.24 + 0.1 * ((np.arange(len(one.points)) % 3) - 1)  # below the mean, in three rows
                ax.plot(one.points, beside, "|", color=tint(colour, 0.75), markersize=6, zorder=2, label="one fit")
            error, style = np.array([one.error], dtype=float).T, dict(mfc=filling, markersize=6, label=legend)
            bars = None if np.isnan(error).any() else error
            ax.errorbar(one.mean, row - 0.12, xerr=bars, fmt=marker, color=colour, **style)
        _scaled(ax, [value for one in by.values() for value in one.points or (one.mean,)])
        if nominal is not None:
            ax.axvline(nominal, **DASHED, zorder=0, label="where it should be")
        ax.set(title=data if label else "", xlabel=label or data, ylim=(len(recipes) - 0.4, -0.6))
        ax.set_yticks(range(len(recipes)), names)
        ax.grid(axis="y", color="0.9", linewidth=0.7)
        ax.tick_params(axis="y", length=0)
    named = {name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    place = dict(loc="outside lower center", ncols=len(named), handletextpad=0.3, columnspacing=1.2)
    axes[0].figure.legend(named.values(), named, **place)
    return axes


def _scaled(ax: Axes, values: Iterable[float]) -> None:
    """Make the axis logarithmic if others could not be told apart beside an extreme value; values may be negative."""
    low, middle, high = np.min(values), np.median(values), np.max(values)
    if low > 0 and high / low > SPAN:
        ax.set_xscale("log")
    elif high - low > SPAN * (middle - low) > 0:
        ax.set_xscale("symlog", linthresh=max(abs(low), abs(middle)), linscale=3)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(4))
