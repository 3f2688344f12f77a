"""Maps over two input features: what the network says, and where it does not know."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from bnn_pyro.errors import UserError
from bnn_pyro.plots.mesh import Grid
from bnn_pyro.plots.style import MARKERS, class_names, drawn, legend_below, need, panel
from bnn_pyro.predictive import Prediction

__all__ = ["decision_boundary", "epistemic_map"]


@drawn
def decision_boundary(
    prediction: Prediction,
    grid: Grid,
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    label: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Predictive probability of a class over two features, with the data and the contour where it is 0.5.

    prediction: at ``grid.x``.
    x, y: standardised inputs (B, *input_shape) and labels (B,) to draw, or neither.
    label: which class; by default class 1 of two, and of more the probability of the most probable one, with the
        boundaries between classes in place of the contour.
    """
    need(prediction, "classification", "a decision boundary")
    names = class_names(prediction, grid.schema)
    label = 1 if label is None and len(names) == 2 else label
    if label is not None and not 0 <= label < len(names):
        raise UserError(f"there is no class {label}; the classes are 0 to {len(names) - 1}")
    probs = grid.shaped(prediction.mean)
    values = probs.max(-1) if label is None else probs[..., label]
    what = "probability of the most probable class" if label is None else f"P({grid.schema.target} = {names[label]})"
    ax = panel(ax, 5.6, 4.3)
    _colour(ax, grid, values, what, "cividis", (0 if label is not None else 1 / len(names), 1))
    _boundary(ax, grid, probs, label, "white")
    _data(ax, grid, x, y, names)
    ax.set_title("predictive probability")
    return ax


@drawn
def epistemic_map(
    prediction: Prediction,
    grid: Grid,
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Epistemic uncertainty over two features, with the data and the 0.5 boundary (dashed).

    Mutual information of label and weights in nats; of a regression, the standard deviation of the mean in target
    units. Bright is where more data would help; it is not where classes overlap.

    prediction: at ``grid.x``. x, y: as for ``decision_boundary``; a regression's y is not used.
    """
    ax = panel(ax, 5.6, 4.3)
    if not prediction.has_classes:
        what = f"epistemic standard deviation of {grid.schema.target}"
        values = grid.shaped(prediction.epistemic.sqrt())
        names, y = ["data"], None if x is None else np.zeros(len(x))
    else:
        what, values = "mutual information of label and weights, nats", grid.shaped(prediction.epistemic)
        names = class_names(prediction, grid.schema)
    _colour(ax, grid, values, what, "viridis", (0, max(values.max(), 1e-9)))
    if prediction.has_classes:
        _boundary(ax, grid, grid.shaped(prediction.mean), 1 if len(names) == 2 else None, "white")
    _data(ax, grid, x, y, names)
    ax.set_title("epistemic uncertainty")
    return ax


def _colour(ax: Axes, grid: Grid, values: np.ndarray, what: str, colours: str, limits: tuple[float, float]) -> None:
    low, high = limits
    image = ax.pcolormesh(
        grid.first, grid.second, values, cmap=colours, vmin=low, vmax=high, shading="gouraud", rasterized=True
    )
    ax.figure.colorbar(image, ax=ax, label=what, pad=0.02)
    first, second = grid.names
    ax.set(xlabel=first, ylabel=second)
    ax.set(xlim=(grid.first[0], grid.first[-1]), ylim=(grid.second[0], grid.second[-1]))


def _boundary(ax: Axes, grid: Grid, probs: np.ndarray, label: int | None, colour: str) -> None:
    """The 0.5 contour of a class; without a label, where the most probable class changes."""
    margins = []
    if label is not None:
        margins = [probs[..., label] - 0.5]
    else:
        for k in range(probs.shape[-1]):
            margins.append(probs[..., k] - np.delete(probs, k, axis=-1).max(-1))
    for margin in margins:
        if margin.min() < 0 < margin.max():  # matplotlib warns of a contour that is nowhere
            # Dark under white: seen on bright and on dark ground alike.
            ax.contour(grid.first, grid.second, margin, [0], colors="black", linewidths=3)
            ax.contour(grid.first, grid.second, margin, [0], colors=colour, linewidths=1.4, linestyles="dashed")


def _data(ax: Axes, grid: Grid, x: Tensor | None, y: Tensor | None, names: list[str]) -> None:
    if x is None or y is None:
        return
    points, y = grid.points(x), torch.as_tensor(y).cpu().numpy()
    shades = np.linspace(1, 0, max(len(names), 2))
    size = 18 if len(points) > 150 else 26
    for k, name in enumerate(names):
        some = points[y == k]
        ax.scatter(
            some[:, 0], some[:, 1], size, marker=MARKERS[k % len(MARKERS)], facecolor=str(shades[k]),
            edgecolor="black" if shades[k] > 0.5 else "white", linewidth=0.6, label=name, zorder=3,
        )  # fmt: skip
    legend_below(ax, columns=min(len(names), 5), markerscale=1.3)
