"""Many fits at once: every recipe's score on every data set, and what a setting does to it.

Both are drawn from plain numbers. A recipe's colour says where it stands beside the best, and so does its marker.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from bnn_pyro.errors import UserError
from bnn_pyro.plots.layout import legend_outside, panel_grid
from bnn_pyro.plots.style import BAYES, COLOURS, CONTRAST, DASHED, LINES, MARKERS, REFERENCE, drawn, tint

__all__ = ["Scores", "sweep_points", "sweep_settings"]

#: How a mean is drawn by what is said of its recipe: marker, colour, filled, words.
KINDS = {
    "best": ("D", BAYES, True, "best mean"),
    "no clear difference": ("o", BAYES, False, "no clear difference to the best"),
    "worse": ("s", CONTRAST[0], True, "worse than the best"),
    "": ("o", REFERENCE, True, "mean"),
}
#: Characters of a recipe's name on a line.
WIDE = 30
#: Inches that a legend needs.
MIN_WIDTH = 5.4
#: A scale is logarithmic where its values span more than so many times.
SPAN = 30


class Scores(NamedTuple):
    """One recipe on one data set: the metric of each fit, its mean and standard error (NaN for none), and its standing.

    kind  "best", "no clear difference", "worse" or ""
    """

    points: Sequence[float]
    mean: float
    error: float
    kind: str = ""


@drawn
def sweep_points(
    scores: Mapping[str, Mapping[str, Scores]],
    label: str,
    *,
    nominal: float | None = None,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """Recipes up, a metric across: a mark for every fit, each recipe's mean ± its standard error; a panel a data set.

    scores: {data set: {recipe: scores}}.   label: of the metric, with its unit.   nominal: where the metric should be.

    Raises UserError where there is nothing to draw.
    """
    recipes = _recipes(scores)
    names = [textwrap.fill(name, WIDE) for name in recipes]
    lines = sum(1 + 0.55 * name.count("\n") for name in names)
    wide = 0.075 * max(len(line) for name in names for line in name.split("\n"))
    cell = 2.9, 0.95 + 0.3 * max(lines, 2)
    axes, _ = panel_grid(axes, len(scores), 3, cell, (wide, 0.35), least=MIN_WIDTH, sharey=True)
    place = {name: k for k, name in enumerate(reversed(recipes))}
    for ax, (data, by) in zip(axes, scores.items(), strict=True):
        for name, one in by.items():
            _dots(ax, place[name], one)
        _scaled(ax, by, place)
        if nominal is not None:
            ax.axvline(nominal, **DASHED, zorder=0)
        ax.set(title=data, xlabel=label, ylim=(-0.6, len(recipes) - 0.4))
        ax.set_yticks(list(place.values()), list(reversed(names)))
        ax.grid(axis="y", color="0.9", linewidth=0.7)
        ax.tick_params(axis="y", length=0)
    every = [one for by in scores.values() for one in by.values()]
    _legend(axes[0].figure, {one.kind for one in every}, any(len(one.points) > 1 for one in every), nominal)
    return axes


def _recipes(by_data: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Every recipe once, in the order in which they come."""
    recipes = list(dict.fromkeys(name for by in by_data.values() for name in by))
    if not recipes:
        raise UserError("there is no fit to draw")
    return recipes


def _dots(ax: Axes, row: int, one: Scores) -> None:
    marker, colour, filled, _ = KINDS[one.kind]
    points = np.asarray(one.points, dtype=float)
    if len(points) > 1:
        beside = row - 0.24 + 0.1 * ((np.arange(len(points)) % 3) - 1)  # under the mean, such that few cover others
        ax.plot(points, beside, "|", color=tint(colour, 0.75), markersize=6, markeredgewidth=1.0, zorder=2)
    look = dict(fmt=marker, color=colour, markerfacecolor=colour if filled else "white", markersize=6, zorder=3)
    error = None if math.isnan(one.error) else one.error
    ax.errorbar(one.mean, row + 0.12, xerr=error, elinewidth=1.4, capsize=2.5, **look)


def _scaled(ax: Axes, by: Mapping[str, Scores], place: Mapping[str, int]) -> None:
    """Where one recipe is so far off that the others would fall together: a logarithmic axis, or (where there is none
    for negative values) one that ends before it and says where its mean is."""
    values = np.asarray([value for one in by.values() for value in one.points], dtype=float)
    low, middle, high = values.min(), float(np.median(values)), values.max()
    if low > 0 and high / low > SPAN:
        ax.set_xscale("log")
        return
    ax.xaxis.set_major_locator(MaxNLocator(4))
    end = middle + 4 * (middle - low)
    if low <= 0 and high - low > SPAN * (middle - low) > 0:
        ax.set_xlim(low - 0.1 * (end - low), end)
        for name, one in by.items():
            if one.mean > end:
                look = dict(xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=8)
                ax.annotate(f"{one.mean:,.3g} →", (1, place[name] + 0.12), **look)


def _legend(page: object, kinds: set[str], marks: bool, nominal: float | None) -> None:
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=colour, markerfacecolor=colour if filled else "white",
               markersize=6, label=f"{words} ± its standard error" if marks and not kind else words)
        for kind, (marker, colour, filled, words) in KINDS.items()
        if kind in kinds
    ]  # fmt: skip
    if marks:
        handles.append(Line2D([], [], linestyle="", marker="|", color=REFERENCE, markersize=6, label="one fit"))
    if nominal is not None:
        handles.append(Line2D([], [], color=REFERENCE, linestyle="--", label="where it should be"))
    page.legend(handles=handles, loc="outside lower center", ncols=len(handles), handletextpad=0.3, columnspacing=1.2)


@drawn
def sweep_settings(
    lines: Mapping[str, Mapping[str, Mapping[float, Scores]]],
    setting: str,
    label: str,
    *,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """A metric (up) by a setting (across), its mean ± standard error with a line for each recipe; a panel a data set.

    lines: {data set: {recipe: {value of the setting: scores}}}.   setting, label: names of the axes, with units.

    Raises UserError where there is nothing to draw, or more recipes than can be told apart.
    """
    recipes = _recipes(lines)
    if len(recipes) > len(MARKERS):
        raise UserError(f"{len(recipes)} lines cannot be told apart; draw at most {len(MARKERS)}")
    margin = 0, 0.25 * -(-len(recipes) // 2) + 0.1
    axes, columns = panel_grid(axes, len(lines), 3, (3.3, 2.75), margin, least=MIN_WIDTH)
    for ax, (data, by) in zip(axes, lines.items(), strict=True):
        for k, name in enumerate(recipes):
            if name in by:
                x = sorted(by[name])
                mean, error = np.array([[by[name][value].mean, by[name][value].error] for value in x]).T
                error = np.nan_to_num(error) if np.nan_to_num(error).any() else None
                look = dict(color=COLOURS[k], marker=MARKERS[k], linestyle=LINES[k % len(LINES)], markersize=5)
                words = textwrap.fill(name, 44)
                ax.errorbar(x, mean, yerr=error, capsize=2.5, elinewidth=1.1, label=words, **look)
        every = sorted({value for line in by.values() for value in line})
        if every[0] > 0 and every[-1] / every[0] >= 8:
            ax.set_xscale("log")
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(ScalarFormatter())
        if len(every) <= 8:
            ax.set_xticks(every, [f"{value:g}" for value in every])
        ax.set(title=data, xlabel=setting)
    for ax in axes[::columns]:
        ax.set_ylabel(label)
    if len(recipes) > 1:
        return legend_outside(axes, 2)
    axes[0].figure.suptitle(recipes[0], fontsize=9)
    return axes
