"""Several draws, and several methods: what each says of one input, and what an ensemble gains with every draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from bnn_pyro.metrics.classification import mean_probs
from bnn_pyro.metrics.metric import Targets, targets
from bnn_pyro.plots.classification import draw_boxes
from bnn_pyro.plots.images import show_image, split_nats
from bnn_pyro.plots.style import (
    BAYES,
    CONTRAST,
    DATA,
    POINT,
    WRONG,
    class_names,
    drawn,
    figure,
    legend_below,
    need,
    panel,
    tint,
)
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict

__all__ = ["dispute", "growing_ensemble", "method_predictions", "most_disputed"]

#: Log-likelihoods of all draws that are held at once: so many numbers, the classes counted.
NUMBERS = 2**24


@drawn
def method_predictions(
    predictions: Mapping[str, Prediction],
    row: int | None = None,
    *,
    x: Tensor | None = None,
    y: Targets | None = None,
    schema: Schema | None = None,
    most: int = 10,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """One input by several methods: each one's mean class probabilities (bar) and draws (box); axes (methods,).

    A box holds the middle half of the draws, its whiskers reach from 5 to 95 %. Titles have the total entropy and its
    parts in nats. With images a first panel shows the input; axes is then (1 + methods,).

    predictions: {label: prediction of the same points}.
    row: which point; None takes the one that the methods dispute most, see :func:`most_disputed`.
    x: (B, …) the inputs, shown where they are images. y: labels (B,), the true class has a bold tick.
    most: how many classes to show, the most probable ones by the mean over the methods.

    Raises UserError for a regression, predictions of different points, or a row that they have not.
    """
    row = most_disputed(predictions) if row is None else row
    first = _same_points(predictions)
    if not 0 <= row < len(first):
        raise UserError(f"row must be 0 to {len(first) - 1}, got {row}")
    if x is not None and len(x) != len(first):
        raise UserError(f"x has {len(x)} rows, but the predictions are for {len(first)} points")
    label = None if y is None else int(targets(first, y)[row])
    names = class_names(first, schema)
    shown = np.sort(np.argsort(-sum(p.mean[row].double().numpy() for p in predictions.values()), kind="stable")[:most])
    image = x is not None and x.dim() == 4
    axes = _in_a_line(axes, len(predictions), image)
    if image:
        show_image(axes[0], x[row], schema)
    true = "" if label is None else f", true: {names[label]}"
    for ax, (method, prediction) in zip(axes[int(image) :], predictions.items(), strict=True):
        one = prediction[[row]]
        place = draw_boxes(ax, one.probs[:, 0].double().numpy(), shown, names)
        if label in place:
            ax.get_xticklabels()[place[label]].set(color=WRONG, fontweight="bold")
        ax.set_title(f"{method}\n{split_nats(one, 0)}", size=7.5)
        ax.set_ylim(0, 1.03)
    axes[int(image)].set_ylabel("class probability\n(bar: mean, box: draws)")
    for ax in axes[4::4] if len(axes) > 5 else []:
        ax.set_ylabel("class probability")
    axes[0].set_title(f"point {row}{true}" + ("" if image else f"\n{axes[0].get_title()}"), size=8.5)
    return axes


def most_disputed(predictions: Mapping[str, Prediction]) -> int:
    """The point at which two of the methods are furthest apart, by :func:`dispute`.

    Raises UserError for a regression, predictions of different points, or a single one.
    """
    return int(_disputes(predictions).argmax())


def dispute(predictions: Mapping[str, Prediction], row: int) -> float:
    """How far apart the methods are at a point: the largest total variation ½ Σ |p − p'| of any two, 0 to 1."""
    return float(_disputes({label: p[[row]] for label, p in predictions.items()})[0])


def _disputes(predictions: Mapping[str, Prediction]) -> np.ndarray:
    _same_points(predictions)
    if len(predictions) < 2:
        raise UserError("a single method disputes nothing: give a second prediction, or a row")
    probs = [mean_probs(p) for p in predictions.values()]
    return np.max([0.5 * np.abs(a - b).sum(1) for k, a in enumerate(probs) for b in probs[:k]], axis=0)


def _same_points(predictions: Mapping[str, Prediction]) -> Prediction:
    if not predictions:
        raise UserError("there is no prediction to draw")
    (label, first), *rest = predictions.items()
    for name, prediction in predictions.items():
        need(prediction, "classification", f"'{name}' beside other methods")
    for name, prediction in rest:
        if prediction.mean.shape != first.mean.shape:
            raise UserError(
                f"'{label}' predicts {first.mean.shape[0]} points and {first.mean.shape[1]} classes, '{name}' "
                f"{prediction.mean.shape[0]} and {prediction.mean.shape[1]}: give predictions of the same points"
            )
    return first


def _in_a_line(axes: Sequence[Axes] | None, methods: int, image: bool) -> np.ndarray:
    num = methods + int(image)
    if axes is not None:
        flat = np.ravel(np.asarray(axes, dtype=object))
        if len(flat) != num:
            raise UserError(f"this picture draws on {num} axes, but {len(flat)} were given; or pass axes=None")
        return flat
    columns = num if num <= 5 else 4
    lines = -(-num // columns)
    page = figure(2.6 * columns if num > 1 else 3.6, 2.5 * lines)
    grid = page.add_gridspec(lines, columns)
    made: list[Axes] = []
    for k in range(num):
        share = made[int(image)] if len(made) > int(image) else None
        made.append(page.add_subplot(grid[divmod(k, columns)], sharey=share))
    return np.array(made, dtype=object)


@drawn
def growing_ensemble(
    posterior: Posterior,
    x: Tensor,
    y: Targets,
    *,
    baseline: Prediction | None = None,
    ax: Axes | None = None,
) -> Axes:
    """NLL in nats per row of the first s stored draws of every chain, against the number of draws in that ensemble.

    −mean_n log 1/S Σ_s p(y_n | x_n, w_s). Thin: each chain by itself. The band is a single draw's NLL, mean ± one
    standard deviation over the draws. Averaging probabilities can only improve on the mean NLL of single draws
    (Jensen); where the curve still falls at its end, more draws would help. An ensemble with one draw a chain grows by
    its chains.

    x: (B, *input_shape), standardised. y: (B,).
    baseline: another prediction of the same rows, such as the deterministic network's.

    Raises UserError where the posterior has no stored draws, or a single one.
    """
    if posterior.chains is None:
        raise UserError("an ensemble grows by stored draws; this posterior is a guide, with as many as asked for")
    chains, kept = next(iter(posterior.chains.values())).shape[:2]
    if chains * kept < 2:
        raise UserError("an ensemble of a single draw does not grow")
    if kept == 1:  # members of a deep ensemble: there is nothing to grow but their number
        chains, kept = kept, chains
    if baseline is not None and len(baseline) != len(x):
        raise UserError(f"the baseline predicts {len(baseline)} points, and x has {len(x)}")
    together, single, of_chain = _running_nll(posterior, x, y, chains, kept)
    sizes = chains * np.arange(1, kept + 1)
    ax = panel(ax)
    low, high = single.mean() - single.std(), single.mean() + single.std()
    ax.axhspan(low, high, color="0.88", linewidth=0, zorder=0)
    ax.axhline(
        single.mean(), color=DATA, linestyle=":", linewidth=1.2,
        label=f"a single draw: {single.mean():.4f} ± {single.std():.4f}",
    )  # fmt: skip
    if chains > 1 and kept > 1:
        for k, curve in enumerate(of_chain):
            label = f"each of {chains} chains alone" if k == 0 else f"_chain {k}"
            ax.plot(np.arange(1, kept + 1), curve, color=tint(CONTRAST[2], 0.75), linewidth=0.7, label=label)
    ax.plot(
        sizes, together, color=BAYES, marker="o" if kept <= 20 else None, markersize=3,
        label="ensemble" if chains == 1 else f"ensemble of {chains} chains",
    )  # fmt: skip
    if baseline is not None:
        nll = -baseline.log_prob(torch.as_tensor(y)).double().mean().item()
        bottom, top = ax.get_ylim()
        where = "" if abs(nll - (bottom + top) / 2) < 2 * (top - bottom) else " (far off)"
        ax.axhline(nll, color=POINT, linestyle="-.", linewidth=1.4, label=f"baseline: {nll:.4f}{where}")
        if where:  # its line would flatten all others
            ax.set_ylim(bottom, top)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set(xlabel="stored draws in the ensemble", ylabel="NLL, nats per row")
    ax.set_title(f"NLL {together[-1]:.4f} nats of all {chains * kept:,} draws")
    ax.grid(axis="y", color="0.9")
    legend_below(ax, columns=2)
    return ax


def _running_nll(
    posterior: Posterior, x: Tensor, y: Targets, chains: int, kept: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """NLL of the first s draws of all chains (D,), of every draw (C·D,), and of the first s of each chain (C, D)."""
    num = chains * kept
    y = torch.as_tensor(y)
    if y.shape != (len(x),):
        raise UserError(f"y has shape {tuple(y.shape)}, but x has {len(x)} rows")
    size = torch.arange(1, kept + 1, dtype=torch.float64)
    together, single, of_chain = (torch.zeros(n, dtype=torch.float64) for n in (kept, num, (chains, kept)))
    rows = max(1, NUMBERS // (num * max(1, len(posterior.schema.classes))))
    for some, answers in zip(x.split(rows), y.split(rows), strict=True):
        prediction = predict(posterior, some, num_draws=num)  # every stored draw, chain after chain
        log_prob = prediction.mixture.log_probs(answers.cpu()).double()
        single -= log_prob.sum(1)
        grown = torch.logcumsumexp(log_prob.reshape(chains, kept, -1), 1)  # (C, D, rows)
        of_chain -= (grown - size.log()[:, None]).sum(2)
        together -= (torch.logsumexp(grown, 0) - (chains * size).log()[:, None]).sum(1)
    return tuple((total / len(x)).numpy() for total in (together, single, of_chain))
