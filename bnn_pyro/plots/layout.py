"""Figures and axes, legends, and formats of numbers and names that several plots share."""

from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from bnn_pyro.plots.style import BAYES, DASHED, tint
from bnn_pyro.predictive import Prediction

#: The axes of a plot with one panel; None: see :func:`panel`.
Panel = Axes | None
#: A width and a height.
Inches = tuple[float, float]
#: Whether figures are made without pyplot, as in reports: they are not shown and need not be closed.
OUTSIDE: ContextVar[bool] = ContextVar("outside", default=False)


def figure(width: float, height: float) -> Figure:
    """An empty figure: pyplot's current one if it is empty, else a new one of this size in inches."""
    if OUTSIDE.get():
        return Figure(figsize=(width, height), layout="constrained")
    if not pyplot.get_fignums() or pyplot.gcf().axes:
        return pyplot.figure(figsize=(width, height), layout="constrained")
    page = pyplot.gcf()
    page.set_layout_engine(page.get_layout_engine() or "constrained")
    return page


def panel(ax: Panel, width: float = 5.2, height: float = 3.6) -> Axes:
    """The given axes, else pyplot's current axes if they are empty, else those of a figure of this size in inches."""
    if ax is None and not OUTSIDE.get() and pyplot.get_fignums() and pyplot.gcf().axes:
        ax = None if pyplot.gca().has_data() else pyplot.gca()
    return figure(width, height).add_subplot() if ax is None else ax


def panels(
    num: int, most: int, cell: Inches, margin: Inches = (0.0, 0.0), *, least: float = 0.0, **grid: Any
) -> np.ndarray:
    """(num,) axes of a new figure, in rows of equal length, with at most ``most`` axes each.

    cell: size of a panel in inches.   margin: size of what is beside all panels.   least: minimal width in inches.
    """
    rows = -(-num // most)
    columns = -(-num // rows)
    page = figure(max(least, columns * cell[0] + margin[0]), rows * cell[1] + margin[1])
    made = page.subplots(rows, columns, squeeze=False, **grid).ravel()
    for ax in made[num:]:
        ax.remove()
    return made[:num]


Drawn = TypeVar("Drawn", Axes, np.ndarray)


def legend_below(axes: Drawn, columns: int = 3, below: float = 34, **options: Any) -> Drawn:
    """A legend below each axes, at a distance of ``below`` points, so that it covers nothing; returns the axes."""
    for ax in np.ravel(np.asarray(axes, dtype=object)):
        place = ax.transAxes + ScaledTranslation(0, -below / 72, ax.figure.dpi_scale_trans)
        where = dict(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=place, borderaxespad=0)
        ax.legend(ncols=columns, **where, **options)
    return axes


def legend_outside(axes: np.ndarray, columns: int) -> np.ndarray:
    """One legend above all panels, with the entries of the first one. Returns the axes."""
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=columns)
    return axes


def calibrated_histogram(ax: Axes, pit: np.ndarray, **labels: str) -> int:
    """Histogram of PIT values; dashed: the expected count if they are uniform. Returns the number of bins."""
    bins = 10 if len(pit) < 500 else 20
    ax.hist(pit, bins, range=(0, 1), color=tint(BAYES, 0.6), edgecolor="white")
    ax.axhline(len(pit) / bins, **DASHED)
    ax.set(xlim=(0, 1), title="uniform if calibrated", **labels)
    ax.yaxis.get_major_locator().set_params(integer=True)
    return bins


def plain_numbers(ax: Axes) -> None:
    """Thousands separators on both axes, no powers of ten; more ticks (1, 2, 5) on a short log scale."""
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter("{x:,.10g}")


def class_names(prediction: Prediction, schema: object | None = None) -> list[str]:
    """Names of the K classes: the schema's, or else 0 … K−1. Raises UserError for a regression."""
    classes = prediction.probs.shape[-1]
    return list(schema.classes) if schema is not None and schema.classes else [str(k) for k in range(classes)]


def short(name: str, most: int = 14) -> str:
    """The name, shortened in the middle to at most ``most`` characters."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[most // 2 + 1 - most :]}"
