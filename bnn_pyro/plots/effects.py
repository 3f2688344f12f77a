"""What predictions on a table rest on: the importance of its columns, and how the output changes with each of them."""

import numpy as np
from matplotlib.axes import Axes

from bnn_pyro.explanation import Explanation
from bnn_pyro.plots.layout import Panel, Panels, legend_outside, panel, panels
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
def partial_dependence(explanation: Explanation, *, axes: Panels = None) -> np.ndarray:
    """Mean output over the rows by the value of one column, a panel each: median and central 90 % of the draws.

    explanation: of ``bp.explain``; of many classes the five that are most probable on average are drawn.
    """
    effects = explanation.dependence
    average = np.mean([outputs.mean((0, 1)) for _, outputs in effects.values()], axis=0)
    names = {k: explanation.outputs[k] for k in np.sort(np.argsort(-average, kind="stable")[:MOST_OUTPUTS])}
    axes = panels(axes, len(effects), 3, (2.7, 2.4), (0.3, 0.3), least=4.4, sharey=True)
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
