"""How predictions depend on inputs: maps over two features, effects of columns and of regions of an image.

Also the inputs for such predictions: a line over one input feature, or a mesh over two.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap
from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.errors import UserError
from bnn_pyro.explanation import Explanation, PixelMaps
from bnn_pyro.plots.layout import Panel, class_names, figure, legend_below, legend_outside, panel, panels, short
from bnn_pyro.plots.points import show_image
from bnn_pyro.plots.style import BAYES, DASHED, EPISTEMIC, MARKERS, drawn, look, tint
from bnn_pyro.predictive import Prediction

#: Its ends differ from those of cividis, also for the colour-blind.
WHITE_TO_EPISTEMIC = LinearSegmentedColormap.from_list("epistemic", ["white", EPISTEMIC])


@dataclass(frozen=True)
class Grid:
    """A mesh over the two input features of a table; predict at ``x``, standardised inputs (rows·columns, 2).

    first, second  (columns,) values of the horizontal feature and (rows,) of the vertical one, in their own units
    """

    x: Tensor
    first: np.ndarray
    second: np.ndarray
    schema: Schema

    def shaped(self, values: Tensor) -> np.ndarray:
        """Reshape values (rows·columns, …) at ``x`` to (rows, columns, …)."""
        shape = (len(self.second), len(self.first))
        if len(values) != shape[0] * shape[1]:
            raise UserError(f"the prediction has {len(values)} points, but the grid {len(self.x)}; predict at grid.x")
        return values.reshape(*shape, *values.shape[1:]).double().numpy()


def grid(data: Dataset, *, num: int = 100, margin: float = 0.15) -> Grid:
    """A mesh of num × num points over the two features of a table.

    margin: distance that the mesh extends beyond the data, as a share of their range.
    Raises UserError unless the data have two features.
    """
    if tuple(data.schema.input_shape) != (2,):
        raise UserError(f"a map needs two features, but '{data.name}' has inputs of shape {data.schema.input_shape}")
    x = torch.cat([data.x_train, data.x_val, data.x_test]).cpu()
    low, high = x.amin(0), x.amax(0)
    low, high = low - margin * (high - low), high + margin * (high - low)
    steps = low + (high - low) * torch.linspace(0, 1, num)[:, None]  # (num, 2)
    mesh = torch.stack(torch.meshgrid(*steps.T, indexing="xy"), -1)  # (rows, columns, 2)
    return Grid(mesh.flatten(0, 1), *data.schema.unstandardise(steps).T.numpy(), data.schema)


def line(data: Dataset, low: float | None = None, high: float | None = None, *, num: int = 400) -> Tensor:
    """Standardised inputs (num, 1) from ``low`` to ``high``, in the feature's own units.

    By default the range of the training data, extended by half of it on both sides.
    Raises UserError unless the data have one input feature.
    """
    one_feature(data.schema)
    x = data.schema.unstandardise(data.x_train.cpu())
    span = (x.amax() - x.amin()).item()
    low = x.amin().item() - span / 2 if low is None else low
    high = x.amax().item() + span / 2 if high is None else high
    return data.schema.standardise(torch.linspace(low, high, num, dtype=torch.float64)[:, None])


def one_feature(schema: Schema) -> None:
    """Raises UserError unless the inputs are single numbers."""
    if tuple(schema.input_shape) != (1,):
        raise UserError(f"this figure is for one input feature, but the inputs have shape {tuple(schema.input_shape)}")


@drawn
def decision_boundary(
    prediction: Prediction, grid: Grid, x: Tensor | None = None, y: Tensor | None = None, *, ax: Panel = None
) -> Axes:
    """Predictive probability over two features, with the data and the boundaries between classes.

    It is that of the second of two classes, or that of the most probable one of more.

    prediction: at ``grid.x``.   x, y: standardised inputs (B, *input_shape) and labels (B,) to draw, or neither.
    """
    names, probs = class_names(prediction, grid.schema), grid.shaped(prediction.mean)
    values, label = probs.max(-1), "probability of the most probable class"
    if len(names) == 2:
        values, label = probs[..., 1], f"P({grid.schema.target} = {names[1]})"
    ax = _coloured(ax, grid, values, title="predictive probability", label=label, cmap="cividis", vmin=0, vmax=1)
    return _with_data(ax, prediction, grid, x, y)


@drawn
def epistemic_map(
    prediction: Prediction, grid: Grid, x: Tensor | None = None, y: Tensor | None = None, *, ax: Panel = None
) -> Axes:
    """Epistemic uncertainty over two features, with the data and the 0.5 boundary (dashed).

    Mutual information of label and weights in nats; for a regression, the standard deviation of the mean in target
    units. Orange is where more data would help, not where classes overlap. All maps in one figure share a colour range.

    prediction: at ``grid.x``. x, y: as for ``decision_boundary``; a regression's y is not used.
    """
    values, label = grid.shaped(prediction.epistemic), "mutual information, nats"
    if not prediction.has_classes:
        values, label = np.sqrt(values), f"epistemic standard deviation of {grid.schema.target}"
    colours = dict(cmap=WHITE_TO_EPISTEMIC, vmin=0, vmax=max(values.max(), 1e-9), gid=label)
    ax = _coloured(ax, grid, values, title="epistemic uncertainty", label=label, **colours)
    maps = ax.figure.findobj(lambda artist: isinstance(artist, QuadMesh) and artist.get_gid() == label)
    for one in maps:
        one.set_clim(0, max(other.norm.vmax for other in maps))
    return _with_data(ax, prediction, grid, x, y)


def _coloured(ax: Panel, grid: Grid, values: np.ndarray, *, title: str, label: str, **colours: Any) -> Axes:
    ax = panel(ax, 5.6, 4.3)
    image = ax.pcolormesh(grid.first, grid.second, values, shading="gouraud", rasterized=True, **colours)
    ax.figure.colorbar(image, ax=ax, label=label, pad=0.02)
    names = grid.schema.features or ("feature 0", "feature 1")
    ax.set(title=title, xlabel=names[0], ylabel=names[1])
    ax.set(xlim=(grid.first[0], grid.first[-1]), ylim=(grid.second[0], grid.second[-1]))
    return ax


def _with_data(ax: Axes, prediction: Prediction, grid: Grid, x: Tensor | None, y: Tensor | None) -> Axes:
    if prediction.has_classes:
        names, probs = class_names(prediction, grid.schema), grid.shaped(prediction.mean)
        for k in range(1, len(names)):
            margin = probs[..., k] - np.delete(probs, k, axis=-1).max(-1)  # 0 at the boundary of class k
            if margin.min() < 0 < margin.max():  # matplotlib warns of an empty contour
                # White on black lines are visible on bright and dark backgrounds.
                ax.contour(grid.first, grid.second, margin, [0], colors="black", linewidths=3)
                ax.contour(grid.first, grid.second, margin, [0], colors="white", linewidths=1.4, linestyles="dashed")
    else:
        names, y = ["data"], None if x is None else np.zeros(len(x))
    if x is None or y is None:
        return ax
    points, y = grid.schema.unstandardise(x.cpu()).numpy(), torch.as_tensor(y).cpu().numpy()
    for k, (name, shade) in enumerate(zip(names, np.linspace(1, 0, max(len(names), 2)), strict=False)):
        style = dict(marker=MARKERS[k % len(MARKERS)], linewidth=0.6, edgecolor="black" if shade > 0.5 else "white")
        ax.scatter(*points[y == k].T, 18 if len(y) > 150 else 26, label=name, zorder=3, facecolor=str(shade), **style)
    return legend_below(ax, min(len(names), 5), markerscale=1.3)


@drawn
def permutation_importance(explanation: Explanation, *, ax: Panel = None) -> Axes:
    """Rise of the loss if a column is permuted, of the 15 most important ones, by ``bp.explain``: median and 90 %."""
    table = explanation.importance.iloc[:15]
    ax = panel(ax, 5.6, 1.2 + 0.26 * len(table))
    place, middle = np.arange(len(table)), table["importance"].to_numpy()
    bars = np.abs(table[["low", "high"]].to_numpy().T - middle)
    ax.axvline(0, **DASHED)
    ax.errorbar(middle, place, xerr=bars, fmt="o", color=BAYES, ecolor=tint(BAYES, 0.55), elinewidth=3, capsize=0)
    ax.set_yticks(place, [name if len(name) < 30 else f"{name[:28]}…" for name in table.index])
    ax.set(ylim=(len(table) - 0.4, -0.6), xlabel=f"rise of {explanation.loss}")
    few = f"{len(table)} of {len(explanation.importance)} columns; " if len(table) < len(explanation.importance) else ""
    ax.set_title(f"{few}median and 90 % of the draws, {explanation.rows}")
    ax.grid(axis="x", color="0.92")
    return ax


@drawn
def partial_dependence(explanation: Explanation) -> np.ndarray:
    """Mean output over the rows by the value of one column, one panel each: median and central 90 % of the draws.

    explanation: from ``bp.explain``. Of many classes the five most probable ones on average are drawn.
    """
    effects = explanation.dependence
    average = np.mean([outputs.mean((0, 1)) for _, outputs in effects.values()], axis=0)
    names = {k: explanation.outputs[k] for k in np.sort(np.argsort(-average, kind="stable")[:5])}
    axes = panels(len(effects), 3, (2.7, 2.4), (0.3, 0.3), least=4.4, sharey=True)
    for ax, (column, (values, outputs)) in zip(axes, effects.items(), strict=True):
        categories = isinstance(values[0], str)
        at = np.arange(len(values)) if categories else np.asarray(values)
        for k, name in names.items():
            low, middle, high = np.quantile(outputs[..., k], (0.05, 0.5, 0.95), axis=0)
            style = look(k, label=name)
            if categories:
                ax.errorbar(at, middle, (middle - low, high - middle), **style | {"linestyle": ""})
            else:
                ax.fill_between(at, low, high, color=style["color"], alpha=0.3 if len(names) == 1 else 0.2, linewidth=0)
                ax.plot(at, middle, **style | {"marker": "o" if len(at) < 8 else None})
        ax.set_xlabel(column)
        if categories:
            long = max(map(len, values)) * len(values) > 24
            ax.set_xticks(at, values, rotation=40 if long else 0, ha="right" if long else "center")
            ax.margins(x=0.15)
    of = f", {len(names)} of {len(average)} classes" if len(names) < len(average) else ""
    axes[0].figure.supylabel(names[0] if len(names) == 1 else f"probability{of}")
    if len(names) > 1:
        return legend_outside(axes, 3)
    axes[0].yaxis.set_major_formatter("{x:,.10g}")
    return axes


@drawn
def pixel_maps(maps: PixelMaps, schema: Schema) -> np.ndarray:
    """Each image above maps of the evidence of its regions for its class, and of the disagreement of draws on it.

    Blue is evidence for the class, red against it. All images share the colour scales.
    maps: from ``bp.explain``.   Returns axes (3, M), or (2, M) for a point estimate.
    """
    count = len(maps.images)
    rows = 3 if maps.spreads.any() else 2
    axes = figure(1.6 * count + 1.2, 1.67 * rows).subplots(rows, count, squeeze=False)
    most, widest = (max(np.abs(values).max(), 1e-9) for values in (maps.falls, maps.spreads))
    for ax, image, k in zip(axes[0], maps.images, maps.classes, strict=True):
        show_image(ax, image, schema)
        ax.set_title(short(schema.classes[k]))
    panels = (
        (maps.falls, "speaks for it, nats", dict(cmap="RdBu", vmin=-most, vmax=most)),
        (maps.spreads, "sd over draws, nats", dict(cmap="viridis", vmin=0, vmax=widest)),
    )
    for row, (values, label, colours) in zip(axes[1:], panels, strict=False):
        for ax, one in zip(row, values, strict=True):
            image = ax.imshow(one, **colours)
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set(visible=True, color="0.7")
        ax.figure.colorbar(image, ax=row[-1], label=label)
    axes[0, 0].figure.suptitle("most probable class, from the most certain image to the most uncertain")
    return axes
