"""Images: those that a classifier is least sure of, and out-of-distribution ones, with what it says of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from torch import Tensor

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.metrics.metric import Targets, targets
from bnn_pyro.plots.layout import class_names, evenly, figure, legend_outside, need
from bnn_pyro.plots.style import BAYES, DATA, HATCH, POINT, WRONG, drawn, tint
from bnn_pyro.predictive import Prediction

__all__ = ["ood_bars", "show_image", "split_nats", "uncertain_images"]

#: What images can be sorted by, and what it is called.
ORDERS = {"total": "total entropy", "epistemic": "mutual information", "aleatoric": "aleatoric entropy"}
#: So many draws are drawn as lines; more would only be black.
MAX_LINES = 100


@drawn
def uncertain_images(
    prediction: Prediction,
    x: Tensor,
    y: Targets | None = None,
    schema: Schema | None = None,
    *,
    num: int = 9,
    by: str = "total",
) -> np.ndarray:
    """The most uncertain images, worst first, each beside the class probabilities of its draws; axes (num, 2).

    A thin line is one draw, the thick one with dots their mean; the true class is hatched. The title has the total
    entropy and its parts in nats. Lines that part are draws that disagree; lines that agree on a middling height, an
    image that is ambiguous to all of them.

    x: (B, channels, height, width).   y: labels (B,).   by: "total", "epistemic" or "aleatoric" entropy, nats.

    Raises UserError for a regression, an unknown order, or inputs that are not the prediction's images.
    """
    need(prediction, "classification", "a grid of uncertain images")
    if by not in ORDERS:
        raise unknown("order", by, ORDERS)
    if x.dim() != 4 or len(x) != len(prediction):
        raise UserError(f"x must be {len(prediction)} images (B, channels, height, width), got shape {tuple(x.shape)}")
    y = None if y is None else targets(prediction, y)
    names = class_names(prediction, schema)
    order = getattr(prediction, by).argsort(descending=True, stable=True)[:num].tolist()
    short = all(len(name) <= 2 for name in names)
    key = "thin lines: draws, thick: their mean" + (", hatched: the true class" if y is not None else "")
    axes = _cells(len(order), f"most uncertain first, by {ORDERS[by]}", key, 0.0 if short else 0.4)
    some, place = prediction[order], np.arange(len(names))
    keep = evenly(some.num_draws, MAX_LINES)
    for k, ((image, lines), row) in enumerate(zip(axes, order, strict=True)):
        show_image(image, x[row], schema)
        mean = some.mean[k].numpy()
        true = "" if y is None else f"true {names[y[row]]}, "
        top = f"most probable {names[mean.argmax()]} ({mean.max():.0%})"
        lines.set_title(f"{true}{top}\n{split_nats(some, k)}", size=7.5, pad=3, loc="right")
        if some.num_draws > 1:
            paths = [np.column_stack([place, draw]) for draw in some.probs[keep, k].numpy()]
            lines.add_collection(LineCollection(paths, colors=[tint(BAYES, 0.65)], linewidths=0.35, label="draws"))
        lines.plot(place, mean, color=DATA, marker="o", markersize=2.6, linewidth=1.1, zorder=3, label="mean")
        if y is not None:
            look = dict(facecolor=tint(WRONG, 0.12), edgecolor=tint(WRONG, 0.6), hatch=HATCH, linewidth=0, zorder=0)
            lines.axvspan(y[row] - 0.4, y[row] + 0.4, **look)
        lines.set_xticks(place, names, size=6.5, rotation=0 if short else 90)
        lines.set(xlim=(-0.6, len(names) - 0.4), ylim=(0, 1.03), yticks=[0, 0.5, 1])
        lines.tick_params(axis="y", labelsize=6.5)
        lines.tick_params(length=2, pad=1.5)
    return axes


@drawn
def ood_bars(
    bayesian: Prediction,
    deterministic: Prediction,
    x: Tensor,
    schema: Schema | None = None,
    *,
    num: int = 4,
    names: Sequence[str] | None = None,
) -> np.ndarray:
    """Class probabilities of out-of-distribution images, Bayesian beside deterministic; axes (num, 2).

    Whiskers hold the middle 90 % of the Bayesian network's draws. The titles have both predictive entropies in nats.

    x: (B, channels, height, width), the first ``num`` are shown.   names: a caption for each image.
    """
    for prediction in (bayesian, deterministic):
        need(prediction, "classification", "a comparison of class probabilities")
    if not len(bayesian) == len(deterministic) == len(x) or x.dim() != 4:
        raise UserError(
            f"predictions of {len(bayesian)} and {len(deterministic)} points and x of shape {tuple(x.shape)}: both "
            "must be of the same images (B, channels, height, width)"
        )
    classes = class_names(bayesian, schema)
    num = min(num, len(x))
    bayesian, deterministic = bayesian[:num], deterministic[:num]
    shape = dict(squeeze=False, sharey="row", height_ratios=(1, 1.3))  # image above bars, side by side
    axes = figure(2.3 * num + 0.5, 3.9).subplots(2, num, **shape).T
    place, width = np.arange(len(classes)), 0.4
    left, right = place - width / 2, place + width / 2
    for row, (image, bars) in enumerate(axes):
        show_image(image, x[row], schema)
        image.set_title(names[row] if names is not None else f"input {row}", size=8)
        bars.bar(left, bayesian.mean[row].numpy(), width, color=BAYES, label="Bayesian (whiskers: 90% of draws)")
        look = dict(color=tint(POINT, 0.55), edgecolor=POINT, hatch=HATCH, label="deterministic")
        bars.bar(right, deterministic.mean[row].numpy(), width, **look)
        low, high = np.quantile(bayesian.probs[:, row].double().numpy(), [0.05, 0.95], axis=0)
        bars.vlines(left, low, high, color="black", linewidth=1)
        bars.set_xticks(place, classes, rotation=0 if all(len(name) <= 3 for name in classes) else 90)
        bars.set_ylim(0, 1.02)
        entropies = (
            f"entropy {bayesian.total[row]:.2f} nats Bayesian,\n{deterministic.total[row]:.2f} nats deterministic"
        )
        bars.set_title(entropies, size=8)
    axes[0][1].set_ylabel("class probability")
    legend_outside(axes[0][1:], 1 if num == 1 else 2)
    return axes


def split_nats(prediction: Prediction, row: int) -> str:
    """The total entropy of one point and its parts, in words."""
    total, epistemic, aleatoric = (getattr(prediction, u)[row] for u in ("total", "epistemic", "aleatoric"))
    return f"total {total:.2f} = {epistemic:.2f} epist. + {aleatoric:.2f} aleat. nats"


def show_image(ax: Axes, image: Tensor, schema: Schema | None = None) -> None:
    """One standardised image (channels, height, width), dark ink on white where it has a single channel."""
    raw = (image if schema is None else schema.unstandardise(image)).detach().cpu().double()
    pixels = raw.permute(1, 2, 0).numpy()
    if pixels.shape[-1] == 1:
        ax.imshow(pixels[..., 0], cmap="gray_r")
    else:
        ax.imshow(np.clip((pixels - pixels.min()) / max(np.ptp(pixels), 1e-12), 0, 1))
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(True)
    ax.spines[:].set_color("0.7")


def _cells(num: int, heading: str, key: str, more: float) -> np.ndarray:
    """(num, 2) axes: image beside draws, three to a line, each ``more`` inches higher for long class names."""
    columns = min(num, 3)
    lines = -(-num // columns)
    page = figure(max(3.15 * columns, 4.0), (1.45 + more) * lines + (0.3 if columns > 1 else 0.45))
    page.suptitle(heading + ("; " if columns > 1 else "\n") + key, size=9)
    outer = page.add_gridspec(lines, columns)
    axes = []
    for cell in range(num):
        inner = outer[divmod(cell, columns)].subgridspec(1, 2, width_ratios=(1, 1.75), wspace=0.02)
        axes.append([page.add_subplot(inner[0]), page.add_subplot(inner[1])])
        axes[-1][1].set_ylabel("class probability" if cell % columns == 0 else "", size=7)
        axes[-1][1].set_xlabel("class" if cell + columns >= num else "", size=7)
    return np.array(axes, dtype=object)
