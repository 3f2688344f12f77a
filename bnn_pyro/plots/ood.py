"""Does the network know what it does not know? Inputs from elsewhere, beside those it was trained for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from bnn_pyro import metrics
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.metrics import SCORES
from bnn_pyro.plots.images import show_image
from bnn_pyro.plots.style import (
    BAYES,
    CONTRAST,
    HATCH,
    LINES,
    POINT,
    class_names,
    drawn,
    figure,
    legend_below,
    need,
    panel,
    tint,
)
from bnn_pyro.predictive import Prediction

__all__ = ["entropy_histograms", "ood_bars"]

#: What a score is called on an axis.
_LABELS = {
    "total_entropy": "total predictive entropy, nats",
    "max_prob": "1 − largest class probability",
    "mutual_information": "mutual information of label and weights, nats",
}


@drawn
def ood_bars(
    bayesian: Prediction,
    deterministic: Prediction,
    x: Tensor,
    schema: Schema | None = None,
    *,
    num: int = 4,
    names: Sequence[str] | None = None,
    axes: np.ndarray | None = None,
) -> np.ndarray:
    """Class probabilities of images from elsewhere, Bayesian beside deterministic; axes (num, 2).

    Whiskers hold the middle 90 % of the Bayesian network's draws. A network that knows its limits spreads its bars
    on noise; the titles have both predictive entropies in nats, of which log K is the highest.

    x: (B, channels, height, width) the inputs of both predictions; the first ``num`` are shown.
    names: a caption for each image.
    axes: (num, 2) to draw on: image, bars.
    """
    for prediction in (bayesian, deterministic):
        need(prediction, "classification", "a comparison of class probabilities")
    if not len(bayesian) == len(deterministic) == len(x) or x.dim() != 4:
        raise UserError(
            f"predictions of {len(bayesian)} and {len(deterministic)} points and x of shape {tuple(x.shape)}: both "
            "must be of the same images (B, channels, height, width)"
        )
    classes = class_names(bayesian, schema)
    num, own = min(num, len(x)), axes is None
    bayesian, deterministic = bayesian[:num], deterministic[:num]
    axes = _cells(num) if axes is None else axes
    place, width = np.arange(len(classes)), 0.4
    for row, (image, bars) in enumerate(axes):
        show_image(image, x[row], schema)
        image.set_title(names[row] if names is not None else f"input {row}", size=8)
        probs = bayesian.probs[:, row].double().numpy()
        mean, point = bayesian.mean[row].numpy(), deterministic.mean[row].numpy()
        bars.bar(place - width / 2, mean, width, color=BAYES, label="Bayesian (whiskers: 90% of draws)")
        bars.bar(place + width / 2, point, width, color=tint(POINT, 0.55), edgecolor=POINT, hatch=HATCH,
                 label="deterministic")  # fmt: skip
        low, high = np.quantile(probs, [0.05, 0.95], axis=0)
        bars.vlines(place - width / 2, low, high, color="black", linewidth=1)
        short = all(len(name) <= 3 for name in classes)
        bars.set_xticks(place, classes, rotation=0 if short else 90)
        bars.set_ylim(0, 1.02)
        entropies = bayesian.total[row], deterministic.total[row]
        bars.set_title("entropy {:.2f} nats Bayesian,\n{:.2f} nats deterministic".format(*entropies), size=8)
        if row == 0:
            bars.set_ylabel("class probability")
    if own:
        handles, labels = axes[0][1].get_legend_handles_labels()
        axes[0][1].figure.legend(handles, labels, loc="outside lower center", ncols=1 if num == 1 else 2)
    else:
        legend_below(axes[0][1], columns=1, below=24)
    return axes


@drawn
def entropy_histograms(
    inside: Prediction,
    outside: Prediction | Mapping[str, Prediction],
    *,
    score: str = "total_entropy",
    name: str = "in distribution",
    bins: int = 40,
    ax: Axes | None = None,
) -> Axes:
    """How uncertain the network is on its own test data and on data from elsewhere, with the AUROC between them.

    outside: one prediction, or {name: prediction}, up to four.
    score: "total_entropy", "max_prob" or "mutual_information", as in ``metrics.SCORES``.
    name: what the test data are called.
    """
    need(inside, "classification", "an entropy histogram")
    if score not in SCORES:
        raise unknown("uncertainty score", score, SCORES)
    outside = {"out of distribution": outside} if isinstance(outside, Prediction) else dict(outside)
    if not 0 < len(outside) <= len(CONTRAST):
        raise UserError(f"an entropy histogram shows 1 to {len(CONTRAST)} sets from elsewhere, got {len(outside)}")
    values = {name: SCORES[score](inside)} | {other: SCORES[score](p) for other, p in outside.items()}
    edges = np.linspace(0, max(max(v.max() for v in values.values()), 1e-9), bins + 1)
    ax, heights = panel(ax), []
    for k, (label, v) in enumerate(values.items()):
        share = np.histogram(v, edges)[0] / len(v)
        heights.append(share.max())
        if k == 0:
            ax.stairs(share, edges, fill=True, color=tint(BAYES, 0.55), label=f"{label} (mean {v.mean():.2f})")
            continue
        auroc = metrics.ood_auroc(inside, outside[label], score)
        ax.stairs(
            share, edges, color=CONTRAST[k - 1], linestyle=LINES[(k - 1) % len(LINES)], linewidth=1.8,
            label=f"{label} (mean {v.mean():.2f}, AUROC {auroc:.3f})",
        )  # fmt: skip
    ax.set(xlabel=_LABELS[score], ylabel="share of points", xlim=(0, edges[-1]))
    if max(heights) > 0.4:  # a sure network has nearly all of its test points in the first bin
        ax.set(yscale="log", ylim=(0.5 / max(len(v) for v in values.values()), 1))
        ax.set_ylabel("share of points (log scale)")
    legend_below(ax, columns=1)
    return ax


def _cells(num: int) -> np.ndarray:
    """(num, 2) axes: image above bars, side by side."""
    axes = figure(2.3 * num + 0.5, 3.9).subplots(2, num, squeeze=False, sharey="row", height_ratios=(1, 1.3))
    return axes.T
