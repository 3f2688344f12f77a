"""Pictures of pictures: the images that a classifier is least sure of, with the votes of its draws."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.metrics.metric import Targets, targets
from bnn_pyro.plots.style import BAYES, HATCH, WRONG, class_names, drawn, figure, need, tint
from bnn_pyro.predictive import Prediction

__all__ = ["show_image", "uncertain_images"]

#: What images can be sorted by, and what it is called.
ORDERS = {"total": "total entropy", "epistemic": "mutual information", "aleatoric": "aleatoric entropy"}


@drawn
def uncertain_images(
    prediction: Prediction,
    x: Tensor,
    y: Targets | None = None,
    schema: Schema | None = None,
    *,
    num: int = 12,
    by: str = "total",
    axes: np.ndarray | None = None,
) -> np.ndarray:
    """The most uncertain images, worst first, each above the share of the draws that vote for a class; axes (num, 2).

    x: (B, channels, height, width) the images of the prediction. y: their labels (B,); the true class is hatched.
    by: "total", "epistemic" or "aleatoric" entropy, nats.
    axes: (num, 2) to draw on: image, votes.
    """
    need(prediction, "classification", "a grid of uncertain images")
    if by not in ORDERS:
        raise unknown("order", by, ORDERS)
    if x.dim() != 4 or len(x) != len(prediction):
        raise UserError(f"x must be {len(prediction)} images (B, channels, height, width), got shape {tuple(x.shape)}")
    y = None if y is None else targets(prediction, y)
    names = class_names(prediction, schema)
    score = getattr(prediction, by)
    order = score.argsort(descending=True, stable=True)[:num].tolist()
    short = all(len(name) <= 2 for name in names)
    if axes is None:
        heading = f"most uncertain first, by {ORDERS[by]}"
        key = "bars: votes of the draws" + (", hatched: the true class" if y is not None else "")
        axes = _cells(len(order), heading, key, 0.0 if short else 0.35)
    all_votes = prediction[order].votes.numpy()
    for (image, bars), row, votes in zip(axes, order, all_votes, strict=True):
        show_image(image, x[row], schema)
        true = "" if y is None else f"true {names[y[row]]} · "
        top = f"{votes.max():.0%} vote {names[votes.argmax()]}"
        image.set_title(f"{true}{score[row]:.2f} nats\n{top}", size=7.5, pad=3)
        drawn_bars = bars.bar(np.arange(len(votes)), votes, 0.8, color=tint(BAYES, 0.75))
        if y is not None:
            drawn_bars[y[row]].set(facecolor=tint(WRONG, 0.45), hatch=HATCH, edgecolor=WRONG)
        bars.set_xticks(np.arange(len(votes)), names, size=6 if len(names) > 5 else 7, rotation=0 if short else 90)
        bars.set(ylim=(0, 1), yticks=[])
        bars.tick_params(length=0, pad=1.5)
        bars.spines["left"].set_visible(False)
    return axes


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
    """(num, 2) axes: image above votes, six to a line, each ``more`` inches higher for long class names."""
    columns = min(num, 6)
    lines = -(-num // columns)
    page = figure(max(1.35 * columns, 2.9), (2.05 + more) * lines + (0.3 if columns > 5 else 0.45))
    page.suptitle(heading + ("; " if columns > 5 else "\n") + key, size=9)
    outer = page.add_gridspec(lines, columns)
    axes = []
    for cell in range(num):
        inner = outer[divmod(cell, columns)].subgridspec(2, 1, height_ratios=(3, 1.2), hspace=0.02)
        axes.append([page.add_subplot(inner[0]), page.add_subplot(inner[1])])
    return np.array(axes, dtype=object)
