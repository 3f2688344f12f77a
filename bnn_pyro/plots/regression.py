"""Regression: the predictive band over one input, predicted against observed targets, and calibration of intervals."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from scipy.stats import binom
from torch import Tensor

from bnn_pyro import metrics
from bnn_pyro.cells import skewed
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.diagnostics.draws import even
from bnn_pyro.errors import UserError
from bnn_pyro.metrics.metric import Targets, targets
from bnn_pyro.parts.mixtures import BLOCK
from bnn_pyro.plots.effects import one_feature
from bnn_pyro.plots.layout import Panel, calibrated_histogram, legend_below, panel, panels, plain_numbers
from bnn_pyro.plots.style import BAYES, DASHED, DATA, EPISTEMIC, GOOD, HATCH, REFERENCE, WRONG, drawn, tint
from bnn_pyro.predictive import Prediction

#: Largest number of points that are drawn against their targets.
MAX_POINTS = 200
#: Largest number of bars of a rootogram.
MAX_BARS = 50
#: {level of a central interval of the fan: strength of its tint}.
SHARES = {0.95: 0.16, 0.80: 0.30, 0.50: 0.46}


@drawn
def predictive_band(
    prediction: Prediction, x: Tensor, data: Dataset, *, truth: Callable[[Tensor], Tensor] | None = None,
    legend: bool = True, ax: Panel = None,
) -> Axes:  # fmt: skip
    """Median and central 50, 80 and 95 % of y over one input, and the central 95 % of the mean curves (hatched).

    The fan is the total uncertainty of a new observation; the hatched band is its epistemic part.

    x: (B, 1) the standardised inputs of the prediction (``plots.line``).
    data: provides units and training points; the range outside of these is shaded.
    truth: the true function of raw inputs, if known.   legend: False if several panels share one.
    """
    one_feature(data.schema)
    x = data.schema.unstandardise(torch.as_tensor(x).cpu()).detach().double().reshape(-1)
    if len(x) != len(prediction):
        raise UserError(f"x has {len(x)} points, but the prediction is for {len(prediction)}")
    order = x.argsort()
    x, prediction = x[order], prediction[order]
    ax = panel(ax)
    for share, strength in SHARES.items():
        low, high = prediction.quantile([(1 - share) / 2, (1 + share) / 2])
        ax.fill_between(x, low, high, color=tint(BAYES, strength), linewidth=0, label=f"{share:.0%} of new y (total)")
    if prediction.num_draws > 1:
        low, high = np.quantile(prediction.locs.double().numpy(), [0.025, 0.975], axis=0)
        hatched = dict(facecolor="none", edgecolor=EPISTEMIC, hatch=HATCH, linewidth=0)
        ax.fill_between(x, low, high, **hatched, label="95% of mean curves (epistemic)")
        ax.plot(x, low, x, high, color=EPISTEMIC, linewidth=1, linestyle="--")
    ax.plot(x, prediction.quantile(0.5)[0], color=BAYES, label="median")
    if truth is not None:
        limits = ax.get_ylim()  # the truth must not change them
        ax.plot(x, truth(x), color=GOOD, linestyle=(0, (1, 1.2)), linewidth=2, label="truth")
        ax.set_ylim(limits)
    ax.set(xlabel=(data.schema.features or ("x",))[0], ylabel=data.schema.target, xlim=(x[0].item(), x[-1].item()))
    if prediction.untransformed is not prediction:
        ax.set_yscale("log")
        plain_numbers(ax)
    raw = data.schema.unstandardise(data.x_train.cpu())[:, 0].double()
    look = dict(markersize=2.5, mew=0.3, alpha=0.6) if len(raw) > 200 else dict(markersize=5, mew=0.8)
    y = data.y_train.cpu().abs() if data.schema.task == "survival" else data.y_train.cpu()
    ax.plot(raw, y, "o", color=DATA, mec="white", label="training data", zorder=4, **look)
    label, (low, high) = "outside the training data", raw.aminmax() if len(raw) else (x[0], x[-1])
    low, high = low.item(), high.item()
    for start, stop, edge in ((x[0].item(), low, low), (high, x[-1].item(), high)):
        if stop > start:
            ax.axvspan(start, stop, color="0.92", linewidth=0, zorder=0, label=label)
            ax.axvline(edge, color="0.55", linestyle=":", linewidth=1)
            label = None
    return legend_below(ax, 2) if legend else ax


@drawn
def predicted_observed(prediction: Prediction, y: Targets, schema: Schema | None = None, *, ax: Panel = None) -> Axes:
    """Predictive median with its central 95 % interval against the observed target; the title has the coverage.

    Points whose interval does not contain the target are crosses. Of many points 200 are drawn, evenly spaced by rank
    of y; the title is about all points. Censored times are left out.   y: (B,) in target units.
    """
    y = targets(prediction, y)
    if prediction.task == "survival":
        prediction, y = prediction[np.flatnonzero(y > 0)], y[y > 0]
    low, middle, high = prediction.quantile([0.025, 0.5, 0.975]).double().numpy()
    hit = (low <= y) & (y <= high)
    picks = np.argsort(y, kind="stable")[even(len(y), MAX_POINTS)]
    ax = panel(ax, 4.6, 4.4)
    for is_shown, colour, marker, size, place in ((hit, BAYES, "o", 4, "inside"), (~hit, WRONG, "X", 6, "outside")):
        if is_shown.any():
            rows = picks[is_shown[picks]]
            bars, look = [(middle - low)[rows], (high - middle)[rows]], dict(ecolor=tint(colour, 0.5), capsize=0)
            look |= dict(ms=size, mec="white", mew=0.5, label=f"target {place} its interval")
            ax.errorbar(y[rows], middle[rows], bars, fmt=marker, color=colour, **look)
    ends = y.min(), y.max()
    ax.plot(ends, ends, **DASHED, zorder=1)
    if prediction.untransformed is not prediction or (low.min() > 0 and skewed(y)):
        ax.set(xscale="log", yscale="log")
    else:
        ax.xaxis.set_major_locator(MaxNLocator(4))
    plain_numbers(ax)
    target = schema.target if schema is not None else "y"
    ax.set(xlabel=f"observed {target}", ylabel=f"predicted {target}")
    few = "" if len(picks) == len(y) else f"\n{len(picks)} of them are shown"
    ax.set_title(f"{hit.mean():.1%} of {len(y):,} targets in their 95% interval{few}")
    return legend_below(ax, 2)


@drawn
def regression_calibration(prediction: Prediction, y: Targets, *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Observed against nominal coverage of central intervals, and the histogram of P(Y ≤ y); axes (2,).

    Grey: the central 95 % of perfectly calibrated models with this number of points, separately at each level.
    A curve below the diagonal, or a U-shaped histogram, means overconfidence; the opposite, too wide intervals. The PIT
    of counts and of censored times is randomised.
    """
    pit, nominal = metrics.pit(prediction, y, seed=0), np.linspace(0, 1, 41)
    observed = (np.abs(pit[:, None] - 0.5) <= nominal / 2).mean(0)
    axes = panels(2, 2, (3.8, 3.5)) if axes is None else axes
    low, high = binom.ppf([[0.025], [0.975]], len(pit), nominal[1:-1]) / len(pit)
    axes[0].fill_between(nominal, [0, *low, 1], [0, *high, 1], color="0.88", linewidth=0, label="95% if calibrated")
    axes[0].plot([0, 1], [0, 1], **DASHED)
    axes[0].plot(nominal, observed, color=BAYES, marker="o", markevery=4, label="this prediction")
    verdict, half = (metrics.interval_verdict(at / 40, observed[at], len(pit)) for at in (36, 20))
    intervals = "90% of the PIT" if prediction.randomised else "90% intervals"
    title = f"{intervals} hold {observed[36]:.1%}\nof {len(pit):,} targets: {verdict}"
    title += "" if half in ("about right", verdict) else f"; 50%: {half}"
    axes[0].set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=title)
    axes[0].set(xlabel="nominal coverage of the central interval", ylabel="observed coverage")
    axes[0].legend(loc="upper left" if observed.mean() <= nominal.mean() else "lower right")
    name = "P(Y ≤ observed y), the PIT" + (" (randomised)" if prediction.randomised else "")
    bins = calibrated_histogram(axes[1], pit, xlabel=name, ylabel="points")
    low, high = binom.ppf([0.025, 0.975], len(pit), 1 / bins)
    axes[1].axhspan(low, high, color="0.88", linewidth=0, zorder=0)
    axes[1].hlines([low, high], 0, 1, color=REFERENCE, linestyle=":", linewidth=1)
    return axes


@drawn
def rootogram(prediction: Prediction, y: Targets, schema: Schema | None = None, *, ax: Panel = None) -> Axes:
    """Hanging rootogram: bars for the frequency of each count hang from its expected frequency; square-root scale.

    A bar that ends at 0 has the expected height; a count whose bar ends below 0 is more frequent. Grey: the central
    95 % of each end if the prediction is right. Several counts share a bar if there are more than about ``MAX_BARS``.
    Kleiber & Zeileis 2016, doi:10.1080/00031305.2016.1173590.   Raises UserError unless the prediction is of counts.
    """
    if prediction.has_classes or not prediction.is_discrete:
        raise UserError("a rootogram is for counts (--task counts)")
    y = targets(prediction, y)
    width = 1 + int(y.max()) // MAX_BARS
    edges = torch.arange(-1, y.max() + width, width, dtype=torch.float64)
    expected, variance = np.zeros((2, len(edges) - 1))
    for rows in torch.arange(len(y)).split(max(1, 16 * BLOCK // (len(edges) * prediction.num_draws))):
        shares = prediction[rows].cdf(edges[:, None].expand(-1, len(rows))).diff(dim=0).numpy()
        expected, variance = expected + shares.sum(1), variance + (shares * (1 - shares)).sum(1)
    observed, middle = np.histogram(y, edges + 1)[0], edges[:-1].numpy() + (1 + width) / 2
    root, far = np.sqrt(expected), 1.96 * np.sqrt(variance)
    low, high = (root - np.sqrt(np.maximum(expected + sign * far, 0)) for sign in (1, -1))
    (ax := panel(ax, 5.6, 3.7)).xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.bar(middle, np.sqrt(observed), 0.85 * width, root - np.sqrt(observed), color=tint(BAYES, 0.5), label="observed")
    ax.plot(middle, root, color=WRONG, marker="o", ms=3, label="expected")
    ax.bar(middle, high - low, 0.95 * width, low, color="0.6", alpha=0.4, label="95% of ends if right")
    ax.axhline(0, color=DATA, linewidth=1)
    outside = (observed > expected + far) | (observed < expected - far)
    ax.set_title(f"{outside.sum()} of {len(observed)} bars end outside the band")
    ax.set(xlabel=schema.target if schema is not None else "y", ylabel="square root of the number of rows")
    return legend_below(ax, 3)
