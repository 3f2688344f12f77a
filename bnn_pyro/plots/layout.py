"""Axes of a picture, its legends, and what several pictures do with their numbers."""

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

#: What a picture of one panel draws on; None makes a new figure.
Panel = Axes | None
#: A width and a height.
Inches = tuple[float, float]
#: Whether pyplot is not to know of figures, as in reports: no window shows them, and nobody has to close them.
OUTSIDE: ContextVar[bool] = ContextVar("outside", default=False)


def figure(width: float, height: float) -> Figure:
    """An empty figure, inches: pyplot's current one where it is empty, else a new one, which is then the current."""
    if OUTSIDE.get():
        return Figure(figsize=(width, height), layout="constrained")
    if not pyplot.get_fignums() or pyplot.gcf().axes:
        return pyplot.figure(figsize=(width, height), layout="constrained")
    page = pyplot.gcf()
    page.set_layout_engine(page.get_layout_engine() or "constrained")
    return page


def panel(ax: Panel, width: float = 5.2, height: float = 3.6) -> Axes:
    """The axes given, else pyplot's current ones where nothing is on them, else those of a figure of so many inches."""
    if ax is None and not OUTSIDE.get() and pyplot.get_fignums() and pyplot.gcf().axes:
        ax = None if pyplot.gca().has_data() else pyplot.gca()
    return figure(width, height).add_subplot() if ax is None else ax


def panels(
    num: int, most: int, cell: Inches, margin: Inches = (0.0, 0.0), *, least: float = 0.0, **grid: Any
) -> np.ndarray:
    """(num,) axes of a new figure, in lines of equal length, at most ``most``.

    cell, margin: inches of one panel, and of all that is beside them.   least: inches of the width at the least.
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
    """A legend under the x label of each axes, ``below`` in points, where it covers nothing; returns the axes."""
    for ax in np.ravel(np.asarray(axes, dtype=object)):
        place = ax.transAxes + ScaledTranslation(0, -below / 72, ax.figure.dpi_scale_trans)
        where = dict(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=place, borderaxespad=0)
        ax.legend(ncols=columns, **where, **options)
    return axes


def legend_outside(axes: np.ndarray, columns: int) -> np.ndarray:
    """One legend for all panels, of the names in the first, above them. Returns the axes."""
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=columns)
    return axes


def calibrated_histogram(ax: Axes, pit: np.ndarray, **labels: str) -> int:
    """Histogram of probabilities that are uniform if calibrated; dashed: what is expected of each of so many bins."""
    bins = 10 if len(pit) < 500 else 20
    ax.hist(pit, bins, range=(0, 1), color=tint(BAYES, 0.6), edgecolor="white")
    ax.axhline(len(pit) / bins, **DASHED)
    ax.set(xlim=(0, 1), title="uniform if calibrated", **labels)
    ax.yaxis.get_major_locator().set_params(integer=True)
    return bins


def plain_numbers(ax: Axes) -> None:
    """Thousands separators on both axes, no powers of ten; of a short log scale 1, 2 and 5 times them."""
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter("{x:,.10g}")


def class_names(prediction: Prediction, schema: object | None = None) -> list[str]:
    """Names of the K classes: the schema's, else 0 … K−1. Raises UserError for a regression."""
    classes = prediction.probs.shape[-1]
    return list(schema.classes) if schema is not None and schema.classes else [str(k) for k in range(classes)]


def short(name: str, most: int = 14) -> str:
    """A name of so many characters at most: both of its ends."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[most // 2 + 1 - most :]}"
