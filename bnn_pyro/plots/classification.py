"""Pictures of class probabilities: what is confused, how sure, which draws say what, and when to abstain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import seaborn
from matplotlib.axes import Axes
from torch import Tensor

from bnn_pyro import metrics
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from bnn_pyro.metrics.classification import mean_probs
from bnn_pyro.metrics.metric import Targets, targets
from bnn_pyro.plots.images import split_nats
from bnn_pyro.plots.style import (
    BAYES,
    DATA,
    GOOD,
    HATCH,
    POINT,
    REFERENCE,
    WRONG,
    class_names,
    drawn,
    legend_below,
    need,
    panel,
    panels,
    tint,
)
from bnn_pyro.predictive import Prediction

__all__ = ["confidence_histogram", "confusion_matrix", "draw_boxes", "selective_risk", "softmax_draws"]


#: A confidence that few would question: how many points lie above it, and how many of them are wrong, is told.
SURE = 0.99


@drawn
def confusion_matrix(
    prediction: Prediction, y: Targets, schema: Schema | None = None, *, ax: Axes | None = None
) -> Axes:
    """How many points of each class (row) were given to each class (column); the colour is the share of the row."""
    need(prediction, "classification", "a confusion matrix")
    counts = metrics.confusion_matrix(prediction, y)
    names = class_names(prediction, schema)
    size = 2.2 + 0.36 * len(names) if len(names) <= 20 else 7.5
    ax = panel(ax, size + 1.2, size)
    rows = counts.sum(1, keepdims=True)
    shares = np.divide(counts, rows, out=np.zeros(counts.shape), where=rows > 0)
    annotations = np.where(counts > 0, counts.astype(str), "·") if len(names) <= 20 else False
    seaborn.heatmap(
        shares, ax=ax, vmin=0, vmax=1, cmap="Blues", annot=annotations, fmt="", square=True, linewidths=0.5,
        annot_kws={"size": 8}, cbar_kws={"label": "share of the true class", "shrink": 0.8},
        xticklabels=names, yticklabels=names,
    )  # fmt: skip
    ax.tick_params(axis="y", rotation=0)
    ax.tick_params(axis="x", rotation=90 if max(map(len, names)) > 4 and len(names) > 3 else 0)
    wrong = counts.sum() - np.trace(counts)
    ax.set(xlabel="most probable class", ylabel="true class", title=f"{wrong:,} of {counts.sum():,} wrong")
    return ax


@drawn
def confidence_histogram(prediction: Prediction, y: Targets, *, bins: int = 20, ax: Axes | None = None) -> Axes:
    """How sure the network was where it was right, and where it was wrong (narrow hatched bars); a log scale.

    Lines at the mean confidence and at the accuracy: apart, the network is over- or underconfident.
    """
    need(prediction, "classification", "a confidence histogram")
    y, probs = targets(prediction, y), mean_probs(prediction)
    confidence, right = probs.max(1), probs.argmax(1) == y
    edges = np.linspace(1 / probs.shape[1], 1, bins + 1)
    ax = panel(ax)
    up, _ = np.histogram(confidence[right], edges)
    down, _ = np.histogram(confidence[~right], edges)
    width = edges[1] - edges[0]
    ax.bar(edges[:-1], up, width, align="edge", color=tint(BAYES, 0.7), edgecolor="white", label="right")
    ax.bar(
        edges[:-1] + width / 2, down, 0.55 * width, color=tint(WRONG, 0.35), edgecolor=WRONG, hatch=HATCH, label="wrong"
    )
    ax.set_yscale("log")
    ax.set_ylim(0.7, 1.5 * max(up.max(), down.max()))  # so that a single point can be seen
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.minorticks_off()
    percent = ".1%" if right.mean() < 0.97 else ".2%"
    ax.axvline(confidence.mean(), color=DATA, label=f"mean confidence {confidence.mean():{percent}}")
    ax.axvline(right.mean(), color=DATA, linestyle="--", label=f"accuracy {right.mean():{percent}}")
    sure = confidence > SURE
    ax.set_title(f"{sure.sum():,} of {len(y):,} above {SURE:.0%}, {(sure & ~right).sum():,} of these wrong")
    ax.set(xlabel="confidence: largest class probability", ylabel="points", xlim=(edges[0], 1))
    legend_below(ax, columns=2)
    return ax


@drawn
def softmax_draws(
    prediction: Prediction,
    points: int | Sequence[int] | Tensor,
    y: Targets | None = None,
    schema: Schema | None = None,
    *,
    most: int = 10,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """Class probabilities of some points, one panel each: the mean (bar) and the draws (box); axes (len(points),).

    A box holds the middle half of the draws, its whiskers reach from 5 to 95 %. The title has the total entropy and
    its epistemic and aleatoric parts, in nats. Tall boxes are draws that disagree; short boxes at middling heights,
    draws that agree that the label is a gamble.

    points: which rows of the prediction. most: how many classes to show, the most probable ones.
    """
    need(prediction, "classification", "softmax draws")
    rows = np.atleast_1d(np.asarray(points)).astype(int)
    if len(rows) == 0 or rows.min() < -len(prediction) or rows.max() >= len(prediction):
        raise UserError(f"points must be rows 0 to {len(prediction) - 1} of the prediction, got {rows.tolist()}")
    y = None if y is None else targets(prediction, y)
    names = class_names(prediction, schema)
    long = min(most, len(names)) > 3 and max(map(len, names)) > 3
    columns = 2 if len(rows) == 4 else min(len(rows), 3)
    lines = -(-len(rows) // columns)
    if axes is not None:
        lines, columns = 1, len(rows)
    height = (3.0 if long else 2.6) * lines
    axes = panels(axes, lines, columns, 3.1 * columns + 0.4, height, sharey=True)
    for ax in axes[len(rows) :]:
        ax.set_axis_off()
    some = prediction[rows.tolist()]
    for k, (ax, row) in enumerate(zip(axes, rows, strict=False)):
        draws = some.probs[:, k].double().numpy()
        shown = np.sort(np.argsort(-draws.mean(0), kind="stable")[:most])
        place = draw_boxes(ax, draws, shown, names)
        if y is not None and y[row] in place:
            ax.get_xticklabels()[place[y[row]]].set(color=WRONG, fontweight="bold")
        true = "" if y is None else f", true: {names[y[row]]}"
        ax.set_title(f"point {row}{true}\n{split_nats(some, k)}", size=8.5)
        ax.set_ylim(0, 1.03)
    for ax in axes[::columns]:
        ax.set_ylabel("class probability\n(bar: mean, box: draws)")
    return axes[: len(rows)]


def draw_boxes(ax: Axes, draws: np.ndarray, shown: np.ndarray, names: Sequence[str]) -> dict[int, int]:
    """Draws (S, K) of one point: their mean as bars, and as boxes; {class shown: its place on the axis}."""
    place = np.arange(len(shown))
    ax.bar(place, draws.mean(0)[shown], 0.8, color=tint(BAYES, 0.25), label="mean")
    if len(draws) > 1:
        ax.boxplot(
            draws[:, shown], positions=place, widths=0.45, whis=(5, 95), showfliers=False,
            medianprops={"color": DATA}, boxprops={"color": BAYES}, whiskerprops={"color": BAYES},
            capprops={"color": BAYES},
        )  # fmt: skip
    long = len(shown) > 3 and max(len(name) for name in names) > 3
    ax.set_xticks(place, [names[c] for c in shown], rotation=90 if long else 0)
    return {int(c): k for k, c in enumerate(shown)}


@drawn
def selective_risk(
    prediction: Prediction, y: Targets, *, baseline: Prediction | None = None, ax: Axes | None = None
) -> Axes:
    """Error among the points that the network is surest of (least total entropy), against how many these are.

    Between the best possible order of the same errors (oracle) and a random one. The title has the area under the
    curve. baseline: another prediction of the same points, such as the deterministic network's.
    """
    need(prediction, "classification", "selective risk")
    coverage, risk = metrics.selective_risk(prediction, y)
    ax = panel(ax)
    error, num = risk[-1], len(risk)
    rank = np.arange(1, num + 1)
    oracle = np.maximum(rank - round((1 - error) * num), 0) / rank
    ax.plot(coverage, risk, color=BAYES, label="least entropy first")
    title = f"AURC {risk.mean():.4f}"
    if baseline is not None:
        other = metrics.selective_risk(baseline, y)[1]
        ax.plot(coverage, other, color=POINT, linestyle="-.", label="baseline")
        title += f", baseline {other.mean():.4f}"
    ax.axhline(error, color=REFERENCE, linestyle="--", linewidth=1.2, label="random order")
    ax.plot(coverage, oracle, color=GOOD, linestyle=":", linewidth=2, label="oracle: all errors last")
    top = max(error, risk[num // 20 :].max(), other.max() if baseline is not None else 0)
    ax.set(xlabel="coverage: share of points answered", ylabel="error among them", xlim=(0, 1), ylim=(0, 1.15 * top))
    ax.yaxis.set_major_formatter("{x:.1%}" if top < 0.1 else "{x:.0%}")
    ax.set_title(title)
    legend_below(ax, columns=2)
    return ax
