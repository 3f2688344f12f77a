"""How every picture looks, and where its axes come from.

Colours have meanings, and no picture relies on colour alone: line styles, markers and hatches tell the same story in
greyscale. The settings hold while a picture is drawn; matplotlib's global ones are left as they were.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import matplotlib
import numpy as np
import seaborn
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from bnn_pyro.errors import UserError
from bnn_pyro.predictive import Prediction

__all__ = ["BAYES", "CONTRAST", "DATA", "EPISTEMIC", "GOOD", "HATCH", "LINES", "MARKERS", "POINT", "REFERENCE",
           "WRONG", "class_names", "drawn", "figure", "legend_below", "need", "panel", "panels", "tint"]  # fmt: skip

_PALETTE = list(seaborn.color_palette("colorblind").as_hex())
BAYES, POINT = _PALETTE[0], _PALETTE[1]  #: the Bayesian network (blue), the deterministic one (orange)
EPISTEMIC, GOOD, WRONG = _PALETTE[3], _PALETTE[2], _PALETTE[3]
CONTRAST = [_PALETTE[1], _PALETTE[2], _PALETTE[4], _PALETTE[3]]  #: the second, third, … thing in one picture
DATA, REFERENCE = "0.1", "0.35"  #: observations; diagonals and nominal values
HATCH = "////"
LINES = ["-", "--", "-.", ":"]
MARKERS = ["o", "^", "s", "D", "v", "P", "X", "*"]

_SETTINGS = {
    "figure.dpi": 110,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "hatch.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "image.interpolation": "nearest",
}


@contextlib.contextmanager
def _settled() -> Iterator[None]:
    """The settings above. What a notebook switches on with its first figure, drawing by itself, stays on."""
    with matplotlib.rc_context(_SETTINGS):
        yield
        interactive = matplotlib.is_interactive()
    matplotlib.interactive(interactive)


#: Decorator of every picture: the settings above while it draws.
drawn = _settled()


def figure(width: float, height: float) -> Figure:
    """An empty figure, inches. A plain object that nobody has to close; a notebook gets a pyplot one and shows it."""
    if "ipykernel" in sys.modules:
        from matplotlib import pyplot

        return pyplot.figure(figsize=(width, height), layout="constrained")
    return Figure(figsize=(width, height), layout="constrained")


def panel(ax: Axes | None, width: float = 5.2, height: float = 3.6) -> Axes:
    """The axes given, or those of a new figure."""
    return figure(width, height).add_subplot() if ax is None else ax


def panels(axes: Sequence[Axes] | None, rows: int, columns: int, width: float, height: float, **grid) -> np.ndarray:
    """rows·columns axes, flat: those given, or those of a new figure.

    Raises UserError where another number was given.
    """
    if axes is None:
        return figure(width, height).subplots(rows, columns, squeeze=False, **grid).ravel()
    flat = np.ravel(np.asarray(axes, dtype=object))
    if len(flat) != rows * columns:
        raise UserError(f"this picture draws on {rows * columns} axes, but {len(flat)} were given; or pass axes=None")
    return flat


def legend_below(ax: Axes, columns: int = 3, below: float = 34, **options) -> None:
    """The legend under the x label, where it covers nothing; ``below`` in points."""
    place = ax.transAxes + ScaledTranslation(0, -below / 72, ax.figure.dpi_scale_trans)
    ax.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=place, ncols=columns, borderaxespad=0, **options
    )


def tint(colour: str, strength: float) -> tuple[float, float, float]:
    """The colour mixed with white; opaque, so that it prints alike over whatever lies below."""
    return tuple(1 - strength * (1 - c) for c in to_rgb(colour))


def class_names(prediction: Prediction, schema: object | None = None) -> list[str]:
    """Names of the K classes: the schema's, else 0 … K−1."""
    classes = prediction.mean.shape[1]
    return list(schema.classes) if schema is not None and schema.classes else [str(k) for k in range(classes)]


def need(prediction: Prediction, task: str, what: str) -> None:
    """Raises UserError where the prediction is of the other task."""
    if prediction.task != task:
        raise UserError(f"{what} is a picture of a {task} prediction, but this is a {prediction.task} one")
