"""Predictions for single images: class probabilities of the draws, and of a deterministic network.

A bar is the mean over the draws. A box shows their quartiles, its whiskers the 5 % and 95 % quantiles: tall boxes mean
that draws disagree; short boxes at medium heights, that the image is ambiguous. The label of the true class is bold.
Titles have the total entropy and its parts in nats.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XTick
from torch import Tensor

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError, check_known
from bnn_pyro.metrics.metric import Targets, targets
from bnn_pyro.plots.layout import class_names, figure, legend_outside, short
from bnn_pyro.plots.style import BAYES, DATA, HATCH, POINT, WRONG, drawn, tint
from bnn_pyro.predictive import Prediction

#: Orders of images and their description.
ORDERS = {"total": "total entropy", "epistemic": "mutual information", "aleatoric": "aleatoric entropy"}
#: Largest number of classes in a panel, and of letters of their names in its width.
MAX_CLASSES, MAX_LETTERS = 10, 30


@drawn
def uncertain_images(
    prediction: Prediction, x: Tensor, y: Targets | None = None, schema: Schema | None = None, *, num: int = 9,
    by: str = "total",
) -> np.ndarray:  # fmt: skip
    """The most uncertain images, worst first, each beside its most probable classes; axes (num, 2).

    x: (B, channels, height, width).   y: labels (B,).   by: "total", "epistemic" or "aleatoric" entropy, nats.
    Raises UserError for a regression, an unknown order, or inputs that are not the prediction's images.
    """
    check_known("order", ORDERS, by)
    _need_images(prediction, x)
    y = None if y is None else targets(prediction, y)
    names = [short(name) for name in class_names(prediction, schema)]
    order = getattr(prediction, by).argsort(descending=True, stable=True)[:num].tolist()
    height = 1.5 if max(map(len, names)) <= 2 else 1.9
    columns, lines = min(3, len(order)), -(-len(order) // 3)
    page = figure(max(3.2 * columns, 4.2), height * lines + 0.4)
    axes = page.subplots(lines, 2 * columns, squeeze=False, width_ratios=[1, 1.75] * columns).reshape(-1, 2)
    for ax in axes[len(order) :].ravel():
        ax.remove()
    axes = axes[: len(order)]
    for (image, bars), row in zip(axes, order, strict=True):
        show_image(image, x[row], schema)
        mean = prediction.mean[row]
        _boxes(bars, prediction, row, names, y)
        caption = f"most probable {names[mean.argmax()]} ({mean.max():.0%})"
        caption += "" if y is None else f", true: {names[y[row]]}"
        total, epistemic, aleatoric = (getattr(prediction, part)[row] for part in ("total", "epistemic", "aleatoric"))
        caption += f"\ntotal {total:.2f} = {epistemic:.2f} epist. + {aleatoric:.2f} aleat. nats"
        bars.set_title(caption, size=7.5, pad=3, loc="right")
        bars.tick_params(labelsize=6.5, length=2, pad=1.5)
    page.suptitle(f"most uncertain first, by {ORDERS[by]}")
    page.supylabel("class probability\n(bar: mean, box: draws)")
    return axes


@drawn
def ood_bars(
    bayesian: Prediction, deterministic: Prediction, x: Tensor, schema: Schema | None = None, *, num: int = 4,
    names: Sequence[str] | None = None,
) -> np.ndarray:  # fmt: skip
    """Class probabilities of out-of-distribution images, Bayesian beside deterministic; axes (num, 2).

    Whiskers show the central 90 % of the Bayesian network's draws. Titles have both predictive entropies in nats.

    x: (B, channels, height, width); the first ``num`` are shown.   names: a caption for each image.
    """
    sizes = [tuple(prediction.probs.shape[1:]) for prediction in (bayesian, deterministic)]
    if sizes[0] != sizes[1]:
        raise UserError(f"predictions of {sizes[0]} and {sizes[1]} points and classes do not belong to the same points")
    names_of = [short(name) for name in class_names(bayesian, schema)]
    _need_images(bayesian, x)
    num = min(num, len(x))
    axes = figure(2.3 * num + 0.5, 3.9).subplots(2, num, squeeze=False, sharey="row", height_ratios=(1, 1.3)).T
    width = 0.4
    for row, (image, bars) in enumerate(axes):
        show_image(image, x[row], schema)
        image.set_title(names[row] if names is not None else f"input {row}", size=8)
        classes = _most_probable(bayesian.mean[row] + deterministic.mean[row])
        place, draws = np.arange(len(classes)), bayesian.probs[:, row, classes].double().numpy()
        mean = draws.mean(0)
        whiskers = np.abs(np.quantile(draws, [0.05, 0.95], axis=0) - mean)
        bars.bar(place - width / 2, mean, width, color=BAYES, label="Bayesian (whiskers: 90% of draws)")
        bars.errorbar(place - width / 2, mean, whiskers, fmt="none", ecolor="black", elinewidth=1, capsize=0)
        look = dict(color=tint(POINT, 0.55), edgecolor=POINT, hatch=HATCH, label="deterministic")
        bars.bar(place + width / 2, deterministic.mean[row, classes].numpy(), width, **look)
        _ticks(bars, [names_of[k] for k in classes])
        bars.set_ylim(0, 1.02)
        totals = [f"{p.total[row]:.2f} nats {who}" for p, who in ((bayesian, "Bayesian"), (deterministic, "determ."))]
        bars.set_title("entropy " + ",\n".join(totals), size=8)
    axes[0][1].set_ylabel("class probability")
    legend_outside(axes[0][1:], 1 if num == 1 else 2)
    return axes


def _need_images(prediction: Prediction, x: Tensor) -> None:
    if len(x.shape) != 4 or len(x) != len(prediction):
        raise UserError(f"x must be {len(prediction)} images (B, channels, height, width), got shape {tuple(x.shape)}")


def _most_probable(probs: Tensor) -> np.ndarray:
    """Indices of the MAX_CLASSES classes of the largest probabilities (K,), in ascending order."""
    return np.sort(np.argsort(-probs.numpy(), kind="stable")[:MAX_CLASSES])


def _boxes(ax: Axes, prediction: Prediction, row: int, names: Sequence[str], y: np.ndarray | None) -> None:
    draws, classes = prediction.probs[:, row].double().numpy(), _most_probable(prediction.mean[row])
    place = np.arange(len(classes))
    ax.bar(place, draws.mean(0)[classes], 0.8, color=tint(BAYES, 0.25), label="mean")
    if len(draws) > 1:
        colours = {f"{part}props": {"color": BAYES} for part in ("box", "whisker", "cap")}
        look = dict(widths=0.45, whis=(5, 95), showfliers=False, medianprops={"color": DATA})
        ax.boxplot(draws[:, classes], positions=place, **look, **colours)
    for tick, k in zip(_ticks(ax, [names[k] for k in classes]), classes, strict=True):
        if y is not None and k == y[row]:
            tick.label1.set(color=WRONG, fontweight="bold")
    ax.set_ylim(0, 1.03)


def _ticks(ax: Axes, names: Sequence[str]) -> Sequence[XTick]:
    """Set a tick for each name, rotated if the names would overlap."""
    return ax.set_xticks(range(len(names)), names, rotation=90 * (len(names) * max(map(len, names)) > MAX_LETTERS))


def show_image(ax: Axes, image: Tensor, schema: Schema | None = None) -> None:
    """Draw one standardised image (channels, height, width); with a single channel, high values are dark."""
    pixels = (image if schema is None else schema.unstandardise(image)).detach().cpu().double().permute(1, 2, 0).numpy()
    if pixels.shape[-1] > 1:
        pixels = np.clip((pixels - pixels.min()) / max(np.ptp(pixels), 1e-12), 0, 1)
    ax.imshow(pixels, cmap="gray_r")  # cmap applies to a single channel only
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="0.7")
