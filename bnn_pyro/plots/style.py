"""The style of all figures.

Colours have fixed meanings, and line styles, markers or hatches distinguish the same things in greyscale. The settings
apply while a figure is drawn; matplotlib's global settings are not changed.
"""

import functools
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import seaborn
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.text import Text

_PALETTE = list(seaborn.color_palette("colorblind").as_hex())
BAYES, POINT = _PALETTE[0], _PALETTE[1]  #: the Bayesian network (blue), the deterministic one (orange)
EPISTEMIC, GOOD, WRONG = _PALETTE[3], _PALETTE[2], _PALETTE[3]
CONTRAST = [_PALETTE[1], _PALETTE[2], _PALETTE[4], _PALETTE[3]]  #: the second, third, … series of a figure
DATA, REFERENCE = "0.1", "0.35"  #: observations; diagonals and nominal values
DASHED = {"color": REFERENCE, "linestyle": "--", "linewidth": 1}  #: diagonals, thresholds, expected values
HATCH = "////"
LINES = ["-", "--", "-.", ":"]
MARKERS = ["o", "^", "s", "D", "v", "P", "X", "*"]
_COLOURS = [BAYES, *CONTRAST, REFERENCE, DATA, "0.55"]

_SETTINGS = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize", "figure.labelsize", "figure.titlesize"), 9),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "figure.dpi": 110,
    "axes.axisbelow": True,
    "legend.fontsize": 8,
    "legend.handlelength": 2.2,
    "hatch.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2.5,
    "image.interpolation": "nearest",
}


def drawn(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of every plotting function: applies the settings above; ``$`` in names is not parsed as mathematics."""

    @functools.wraps(draw)
    def draw_in_style(*args: Any, **options: Any) -> Any:
        with matplotlib.rc_context(_SETTINGS):
            axes = draw(*args, **options)
            interactive = matplotlib.is_interactive()  # a notebook's first figure switches it on
        matplotlib.interactive(interactive)
        one = isinstance(axes, Axes)  # the rest of its figure may be the user's
        parts = [axes, *(c.colorbar.ax for c in axes.collections if c.colorbar)] if one else [np.ravel(axes)[0].figure]
        for text in (text for part in parts for text in part.findobj(Text)):
            if "$" in text.get_text() and r"\mathdefault" not in text.get_text():  # tick labels
                text.set_parse_math(False)
        return axes

    return draw_in_style


def tint(colour: str, strength: float) -> tuple[float, float, float]:
    """The colour mixed with white; opaque, so that it looks the same on every background."""
    return tuple(1 - strength * (1 - c) for c in to_rgb(colour))


def look(k: int, **changes: Any) -> dict[str, Any]:
    """Colour, line style and marker of the k-th of several series, updated by ``changes``."""
    cycles = {"color": _COLOURS, "linestyle": LINES, "marker": MARKERS}
    return {name: cycle[k % len(cycle)] for name, cycle in cycles.items()} | changes


def readable(value: float) -> str:
    """A number with four significant digits, or all digits before the decimal point."""
    return f"{value:{',.0f' if abs(value) >= 1000 else '.4g'}}".replace("-", "−")
