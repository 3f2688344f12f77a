"""Pictures of a regression: the predictive band over one input, and predicted against observed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.errors import UserError
from bnn_pyro.metrics.metric import Targets, targets
from bnn_pyro.plots.mesh import one_feature
from bnn_pyro.plots.style import (
    BAYES,
    DATA,
    EPISTEMIC,
    GOOD,
    HATCH,
    REFERENCE,
    WRONG,
    drawn,
    legend_below,
    need,
    panel,
    tint,
)
from bnn_pyro.predictive import Prediction

__all__ = ["predicted_observed", "predictive_band"]

#: Central shares of the fan and the strength of their tints.
SHARES = {0.95: 0.16, 0.80: 0.30, 0.50: 0.46}


@drawn
def predictive_band(
    prediction: Prediction,
    x: Tensor,
    data: Dataset | None = None,
    *,
    truth: Callable[[Tensor], Tensor] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Median and central 50, 80 and 95 % of y over one input, and, hatched, the central 95 % of the mean curves.

    The fan is the total uncertainty of a new observation; the hatched band is the epistemic part, what the draws
    disagree on. Far from the data they coincide where the network knows that it knows nothing.

    x: (B, 1) the standardised inputs of the prediction (``plots.line``), or (B,) without data.
    data: its training points are drawn, its units used, and the range without data shaded.
    truth: the true function of raw inputs, if known.
    """
    need(prediction, "regression", "a predictive band")
    if data is not None:
        one_feature(data.schema)
        x = data.schema.unstandardise(x.cpu())
    x = torch.as_tensor(x).detach().cpu().double().reshape(-1)
    if len(x) != len(prediction):
        raise UserError(f"x has {len(x)} points, but the prediction is for {len(prediction)}")
    order = x.argsort()
    x, prediction = x[order], prediction[order]
    ax = panel(ax)
    for share, strength in SHARES.items():
        low, high = prediction.quantile([(1 - share) / 2, (1 + share) / 2])
        ax.fill_between(x, low, high, color=tint(BAYES, strength), linewidth=0, label=f"{share:.0%} of new y (total)")
    if prediction.num_draws > 1:
        tails = torch.tensor([0.025, 0.975], dtype=torch.float64)
        low, high = prediction.locs.double().quantile(tails, dim=0)
        ax.fill_between(
            x, low, high, facecolor="none", edgecolor=EPISTEMIC, hatch=HATCH, linewidth=0, alpha=0.9,
            label="95% of mean curves (epistemic)",
        )  # fmt: skip
        ax.plot(x, low, "--", x, high, "--", color=EPISTEMIC, linewidth=1.2)
    ax.plot(x, prediction.quantile(0.5)[0], color=tint(BAYES, 1.0), label="median")
    if truth is not None:
        limits = ax.get_ylim()  # those of the prediction: the truth may run off
        ax.plot(x, truth(x), color=GOOD, linestyle=(0, (1, 1.2)), linewidth=2, label="truth")
        ax.set_ylim(limits)
    name, target = "x", "y"
    if data is not None:
        name, target = (data.schema.features or ("x",))[0], data.schema.target
        _training_points(ax, data, x)
    ax.set(xlabel=name, ylabel=target, xlim=(x[0].item(), x[-1].item()))
    legend_below(ax, columns=2)
    return ax


def _training_points(ax: Axes, data: Dataset, x: Tensor) -> None:
    seen = data.schema.unstandardise(data.x_train.cpu())[:, 0].double()
    many = len(seen) > 200
    ax.plot(
        seen, data.y_train.cpu(), "o", color=DATA, markersize=2.5 if many else 5, markeredgecolor="white",
        markeredgewidth=0.3 if many else 0.8, alpha=0.6 if many else 1, label="training data", zorder=4,
    )  # fmt: skip
    low, high = seen.min().item(), seen.max().item()
    label = "outside the training data"
    for start, stop in ((x[0].item(), low), (high, x[-1].item())):
        if stop > start:
            ax.axvspan(start, stop, color="0.92", linewidth=0, zorder=0, label=label)
            ax.axvline(high if start == high else low, color="0.55", linestyle=":", linewidth=1)
            label = None


@drawn
def predicted_observed(
    prediction: Prediction, y: Targets, schema: Schema | None = None, *, most: int = 200, ax: Axes | None = None
) -> Axes:
    """Predictive median with its central 95 % interval against what was observed; the title counts the hits.

    Points whose interval misses the target are crosses.

    y: (B,) in target units.
    most: how many of the points to draw, evenly from the smallest to the largest y; the title is about all of them.
    """
    need(prediction, "regression", "predicted against observed")
    y = targets(prediction, y)
    low, middle, high = prediction.quantile([0.025, 0.5, 0.975]).double().numpy()
    hit = (low <= y) & (y <= high)
    shown = np.argsort(y, kind="stable")[np.linspace(0, len(y) - 1, min(most, len(y))).round().astype(int)]
    ax = panel(ax, 4.6, 4.4)
    for which, colour, marker, label in ((hit, BAYES, "o", "covers"), (~hit, WRONG, "X", "misses")):
        if not which.any():
            continue
        rows = shown[which[shown]]
        ax.errorbar(
            y[rows], middle[rows], [middle[rows] - low[rows], high[rows] - middle[rows]], fmt=marker, color=colour,
            ecolor=tint(colour, 0.5), elinewidth=1, markersize=4 if marker == "o" else 6, markeredgecolor="white",
            markeredgewidth=0.5, label=f"95% interval {label} the target",
        )  # fmt: skip
    ax.axline((y[0], y[0]), slope=1, color=REFERENCE, linestyle="--", linewidth=1, zorder=1)
    target = schema.target if schema is not None else "y"
    ax.set(xlabel=f"observed {target}", ylabel=f"predicted {target}")
    few = "" if len(shown) == len(y) else f" ({len(shown)} drawn)"
    ax.set_title(f"{hit.mean():.1%} of {len(y):,} targets in their 95% interval{few}")
    legend_below(ax, columns=2)
    return ax
