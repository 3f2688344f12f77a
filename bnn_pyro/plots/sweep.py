"""Many fits at once: every run's or recipe's score with its interval (a forest plot), and what a setting does to it.

Both are drawn from plain numbers. A recipe's colour says where it stands beside the best, and so does its marker.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from bnn_pyro.errors import UserError
from bnn_pyro.plots.layout import Panels, legend_outside, panels
from bnn_pyro.plots.style import BAYES, CONTRAST, DASHED, GOOD, MARKERS, REFERENCE, drawn, look, tint

#: How a mean is drawn by what is said of its recipe: marker, colour of its edge, filling, words.
KINDS = {
    "best": ("D", BAYES, BAYES, "best mean"),
    "first": ("D", BAYES, BAYES, "the first run"),
    "better": ("^", GOOD, GOOD, "better"),
    "no clear difference": ("o", BAYES, "white", "no clear difference"),
    "worse": ("s", CONTRAST[0], CONTRAST[0], "worse"),
    "": ("o", REFERENCE, REFERENCE, "value with its error"),
}
#: Metrics that are drawn, with their units; the tables have all.
LABELS = {
    "error": "error, % of test rows",
    "rmse": "RMSE, target units",
    "nrmse": "RMSE, standard deviations",
    "label_error": "wrong labels, %",
    "nll": "NLL, nats per test row",
    "crps": "CRPS, target units",
    "ece": "ECE",
    "coverage_95": "coverage of 95 % intervals, %",
}
#: Characters of a recipe's name on a line.
WIDE = 30
#: Inches that a legend needs.
MIN_WIDTH = 5.4
#: A scale is logarithmic where its values span more than so many times.
SPAN = 30


class Scores(NamedTuple):
    """One recipe on one data set: the metric of each fit, its mean and standard error (NaN for none), and its standing.

    error  also (below, above), how far an interval reaches from the mean
    kind   a key of ``KINDS``
    """

    points: Sequence[float]
    mean: float
    error: float | tuple[float, float]
    kind: str = ""


@drawn
def sweep_points(
    scores: Mapping[str, Mapping[str, Scores]],
    label: str | None = None,
    *,
    nominal: float | None = None,
    axes: Panels = None,
) -> np.ndarray:
    """Recipes up, a metric across: a mark for every fit, each recipe's mean ± its standard error; a panel a data set.

    scores: {data set: {recipe: scores}}.   label: of the metric, with its unit; None: a panel is a metric, not data.
    nominal: where the metric should be.

    Raises UserError where there is nothing to draw.
    """
    recipes = _recipes(scores)
    names = [textwrap.fill(name, WIDE) for name in recipes]
    lines = sum(1 + 0.55 * name.count("\n") for name in names)
    wide = 0.075 * max(len(line) for name in names for line in name.split("\n"))
    cell = 2.9, 0.95 + 0.3 * max(lines, 2)
    axes = panels(axes, len(scores), 3, cell, (wide, 0.35), least=MIN_WIDTH, sharey=True)
    for ax, (data, by) in zip(axes, scores.items(), strict=True):
        for name, one in by.items():
            row, (marker, colour, filling, words) = recipes.index(name), KINDS[one.kind]
            if len(one.points) > 1:
                beside = row + 0.24 + 0.1 * ((np.arange(len(one.points)) % 3) - 1)  # under the mean, few cover others
                ax.plot(one.points, beside, "|", color=tint(colour, 0.75), markersize=6, zorder=2, label="one fit")
            error, style = np.array([one.error], dtype=float).T, dict(mfc=filling, markersize=6, label=words)
            ax.errorbar(
                one.mean, row - 0.12, xerr=None if np.isnan(error).any() else error, fmt=marker, color=colour, **style
            )
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


def _recipes(by_data: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Every recipe once, in the order in which they come."""
    recipes = list(dict.fromkeys(name for by in by_data.values() for name in by))
    if not recipes:
        raise UserError("there is no fit to draw")
    return recipes


def _scaled(ax: Axes, values: Iterable[float]) -> None:
    """A logarithmic axis where one recipe is so far off that the others would fall together; it may be negative."""
    low, middle, high = np.min(values), np.median(values), np.max(values)
    if low > 0 and high / low > SPAN:
        ax.set_xscale("log")
    elif high - low > SPAN * (middle - low) > 0:
        ax.set_xscale("symlog", linthresh=max(abs(low), abs(middle)), linscale=3)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(4))


@drawn
def sweep_settings(
    lines: Mapping[str, Mapping[str, Mapping[float, Scores]]], setting: str, label: str, *, axes: Panels = None
) -> np.ndarray:
    """A metric (up) by a setting (across), its mean ± standard error with a line for each recipe; a panel a data set.

    lines: {data set: {recipe: {value of the setting: scores}}}.   setting, label: names of the axes, with units.

    Raises UserError where there is nothing to draw, or more recipes than can be told apart.
    """
    recipes = _recipes(lines)
    if len(recipes) > len(MARKERS):
        raise UserError(f"{len(recipes)} lines cannot be told apart; draw at most {len(MARKERS)}")
    margin = 0, 0.25 * -(-len(recipes) // 2) + 0.1
    axes = panels(axes, len(lines), 3, (3.3, 2.75), margin, least=MIN_WIDTH)
    for ax, (data, by) in zip(axes, lines.items(), strict=True):
        for name in (name for name in recipes if name in by):
            x = sorted(by[name])
            mean, error = np.array([[by[name][value].mean, by[name][value].error] for value in x]).T
            style = look(recipes.index(name), label=textwrap.fill(name, 44))
            ax.errorbar(x, mean, np.nan_to_num(error), **style, elinewidth=1.1)
        every = sorted({value for line in by.values() for value in line})
        if every[0] > 0 and every[-1] / every[0] >= 8:
            ax.set_xscale("log")
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(ScalarFormatter())
        if len(every) <= 8:
            ax.set_xticks(every, [f"{value:g}" for value in every])
        ax.set(title=data, xlabel=setting)
    axes[0].figure.supylabel(label)
    return legend_outside(axes, 2)
