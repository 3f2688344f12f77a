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
from bnn_pyro.plots.images import show_image, split_nats
from bnn_pyro.plots.layout import class_names, legend_below, need, panel, panel_grid
from bnn_pyro.plots.style import BAYES, CONTRAST, DATA, POINT, WRONG, drawn, tint
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict

__all__ = ["dispute", "growing_ensemble", "method_predictions", "most_disputed", "softmax_draws"]

#: Log-likelihoods of all draws that are held at once: so many numbers, the classes counted.
NUMBERS = 2**24


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
    its parts in nats. Tall boxes are draws that disagree; short ones at middling heights, an ambiguous point.

    points: which rows of the prediction.   most: how many classes to show, the most probable ones.
    """
    need(prediction, "classification", "softmax draws")
    rows = np.atleast_1d(np.asarray(points)).astype(int)
    if len(rows) == 0 or rows.min() < -len(prediction) or rows.max() >= len(prediction):
        raise UserError(f"points must be rows 0 to {len(prediction) - 1} of the prediction, got {rows.tolist()}")
    y = None if y is None else targets(prediction, y)
    names = class_names(prediction, schema)
    height = 3.0 if min(most, len(names)) > 3 and max(map(len, names)) > 3 else 2.6
    axes, columns = panel_grid(axes, len(rows), 3, (3.1, height), (0.4, 0), sharey=True)
    for ax, row in zip(axes, rows, strict=True):
        one, true = prediction[[int(row)]], None if y is None else y[row]
        _boxes(ax, one, _most_probable(one.mean[0].double().numpy(), most), names, true)
        said = "" if true is None else f", true: {names[true]}"
        ax.set_title(f"point {row}{said}\n{split_nats(one, 0)}")
    for ax in axes[::columns]:
        ax.set_ylabel("class probability\n(bar: mean, box: draws)")
    return axes


@drawn
def method_predictions(
    predictions: Mapping[str, Prediction],
    row: int | None = None,
    *,
    x: Tensor | None = None,
    y: Targets | None = None,
    schema: Schema | None = None,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """One input by several methods: each one's mean class probabilities (bar) and draws (box); axes (methods,).

    Boxes and titles as in :func:`softmax_draws`, for the most probable classes. With images a first panel shows the
    input; axes is then (1 + methods,).

    predictions: {label: prediction of the same points}.
    row: which point; None takes the one that the methods dispute most, see :func:`most_disputed`.
    x: (B, …) the inputs, shown where they are images.   y: labels (B,), the true class has a bold tick.

    Raises UserError for a regression, predictions of different points, or a row that they have not.
    """
    row = most_disputed(predictions) if row is None else row
    first = _same_points(predictions)
    if not 0 <= row < len(first):
        raise UserError(f"row must be 0 to {len(first) - 1}, got {row}")
    if x is not None and len(x) != len(first):
        raise UserError(f"x has {len(x)} rows, but the predictions are for {len(first)} points")
    label = None if y is None else int(targets(first, y)[row])
    names, image = class_names(first, schema), x is not None and x.dim() == 4
    shown = _most_probable(sum(p.mean[row].double().numpy() for p in predictions.values()), 10)
    num = len(predictions) + int(image)
    axes, columns = panel_grid(axes, num, 5, (2.6, 2.5), least=3.6)
    for ax, (method, prediction) in zip(axes[int(image) :], predictions.items(), strict=True):
        one = prediction[[row]]
        _boxes(ax, one, shown, names, label)
        ax.set_title(f"{method}\n{split_nats(one, 0)}", size=7.5)
    for ax in [axes[int(image)], *axes[columns::columns]]:
        ax.set_ylabel("class probability\n(bar: mean, box: draws)")
    true = "" if label is None else f", true: {names[label]}"
    if image:
        show_image(axes[0], x[row], schema)
    axes[0].set_title(f"point {row}{true}" + ("" if image else f"\n{axes[0].get_title()}"), size=8.5)
    return axes


def _most_probable(probs: np.ndarray, most: int) -> np.ndarray:
    """The classes of the largest probabilities (K,), in their own order."""
    return np.sort(np.argsort(-probs, kind="stable")[:most])


def _boxes(ax: Axes, one: Prediction, shown: np.ndarray, names: Sequence[str], true: int | None) -> None:
    """A single point: the mean over the draws as bars, the draws as boxes; the true class has a bold tick."""
    draws, place = one.probs[:, 0].double().numpy(), np.arange(len(shown))
    ax.bar(place, draws.mean(0)[shown], 0.8, color=tint(BAYES, 0.25), label="mean")
    if len(draws) > 1:
        colours = {f"{part}props": {"color": BAYES} for part in ("box", "whisker", "cap")}
        look = dict(widths=0.45, whis=(5, 95), showfliers=False, medianprops={"color": DATA})
        ax.boxplot(draws[:, shown], positions=place, **look, **colours)
    long = len(shown) > 3 and max(len(name) for name in names) > 3
    for tick in ax.set_xticks(place, [names[c] for c in shown], rotation=90 if long else 0):
        if true is not None and shown[round(tick.get_loc())] == true:
            tick.label1.set(color=WRONG, fontweight="bold")
    ax.set_ylim(0, 1.03)


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


@drawn
def growing_ensemble(
    posterior: Posterior, x: Tensor, y: Targets, *, baseline: Prediction | None = None, ax: Axes | None = None
) -> Axes:
    """NLL in nats per row of the first s stored draws of every chain, against the number of draws in that ensemble.

    −mean_n log 1/S Σ_s p(y_n | x_n, w_s). Thin: each chain by itself. Band: a single draw's NLL, mean ± standard
    deviation. Where the curve still falls at its end, more draws would help. One draw a chain: it grows by its chains.

    x: (B, *input_shape), standardised.   y: (B,).   baseline: another prediction of the same rows.

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
    average, spread = single.mean(), single.std()
    ax.axhspan(average - spread, average + spread, color="0.88", linewidth=0, zorder=0)
    label = f"a single draw: {average:.4f} ± {spread:.4f}"
    ax.axhline(average, color=DATA, linestyle=":", linewidth=1.2, label=label)
    if chains > 1 and kept > 1:
        for k, curve in enumerate(of_chain):
            label = f"each of {chains} chains alone" if k == 0 else f"_chain {k}"
            ax.plot(np.arange(1, kept + 1), curve, color=tint(CONTRAST[2], 0.75), linewidth=0.7, label=label)
    label = "ensemble" if chains == 1 else f"ensemble of {chains} chains"
    ax.plot(sizes, together, color=BAYES, marker="o" if kept <= 20 else None, markersize=3, label=label)
    if baseline is not None:
        nll = -baseline.log_prob(torch.as_tensor(y)).double().mean().item()
        bottom, top = ax.get_ylim()
        where = "" if abs(nll - (bottom + top) / 2) < 2 * (top - bottom) else " (far off)"
        ax.axhline(nll, color=POINT, linestyle="-.", linewidth=1.4, label=f"baseline: {nll:.4f}{where}")
        if where:  # its line would flatten all others
            ax.set_ylim(bottom, top)
    ax.set(xscale="log", xlabel="stored draws in the ensemble", ylabel="NLL, nats per row")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_title(f"NLL {together[-1]:.4f} nats of all {chains * kept:,} draws")
    ax.grid(axis="y", color="0.9")
    return legend_below(ax, 2)


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
