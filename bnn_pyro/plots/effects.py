"""What predictions rest on: columns of a table and how the output changes with each of them; places of an image."""

import numpy as np
from matplotlib.axes import Axes

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.explanation import Explanation, PixelMaps
from bnn_pyro.plots.layout import Panel, figure, legend_outside, panel, panels
from bnn_pyro.plots.points import show_image
from bnn_pyro.plots.style import BAYES, DASHED, drawn, look, tint

#: Columns that are listed, and outputs that are drawn, at most.
MOST_COLUMNS, MOST_OUTPUTS = 15, 5


@drawn
def permutation_importance(explanation: Explanation, *, ax: Panel = None) -> Axes:
    """Rise of the loss where a column is permuted, the largest 15, median and 90 % of draws; of ``bp.explain``."""
    table = explanation.importance.iloc[:MOST_COLUMNS]
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
    """Mean output over the rows by the value of one column, a panel each: median and central 90 % of the draws.

    explanation: of ``bp.explain``; of many classes the five that are most probable on average are drawn.
    """
    effects = explanation.dependence
    average = np.mean([outputs.mean((0, 1)) for _, outputs in effects.values()], axis=0)
    names = {k: explanation.outputs[k] for k in np.sort(np.argsort(-average, kind="stable")[:MOST_OUTPUTS])}
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
                strength = 0.3 if len(names) == 1 else 0.15
                ax.fill_between(at, low, high, color=tint(style["color"], strength), linewidth=0)
                ax.plot(at, middle, **style | {"marker": "o" if len(at) < 8 else None})
        ax.set_xlabel(column)
        if categories:
            long = max(map(len, values)) * len(values) > 24
            ax.set_xticks(at, values, rotation=40 if long else 0, ha="right" if long else "center")
            ax.margins(x=0.15)
    if len(names) > 1:
        return legend_outside(axes, 3)
    axes[0].yaxis.set_major_formatter("{x:,.10g}")
    axes[0].figure.supylabel(names[0])
    return axes


@drawn
def pixel_maps(maps: PixelMaps, schema: Schema) -> np.ndarray:
    """Each image above where it speaks for its class, and where draws disagree on that.

    Blue speaks for the class, red against it. The scales are common to all images.

    maps: of ``bp.explain``.   Returns axes (3, M), of a point (2, M).
    """
    count = len(maps.images)
    rows = 3 if maps.spreads.any() else 2
    axes = figure(1.6 * count + 1.2, 1.67 * rows).subplots(rows, count, squeeze=False)
    most, widest = (max(np.abs(values).max(), 1e-9) for values in (maps.falls, maps.spreads))
    for ax, image, k in zip(axes[0], maps.images, maps.classes, strict=True):
        show_image(ax, image, schema)
        ax.set_title(schema.classes[k])
    panels = (
        (maps.falls, "speaks for it, nats", dict(cmap="RdBu", vmin=-most, vmax=most)),
        (maps.spreads, "sd over draws, nats", dict(cmap="viridis", vmin=0, vmax=widest)),
    )
    for row, (values, label, colours) in zip(axes[1:], panels, strict=False):
        for ax, one in zip(row, values, strict=True):
            shown = ax.imshow(one, **colours)
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set(visible=True, color="0.7")
        ax.figure.colorbar(shown, ax=row[-1], label=label)
    axes[0, 0].figure.suptitle("most probable class, from the most certain image to the most uncertain")
    return axes
