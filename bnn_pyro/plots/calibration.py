"""Are the stated probabilities true? Reliability of a classifier, coverage and PIT of a regression."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from scipy import stats

from bnn_pyro import metrics
from bnn_pyro.metrics.classification import BINS, mean_probs
from bnn_pyro.metrics.metric import Targets, targets
from bnn_pyro.plots.style import BAYES, DATA, HATCH, REFERENCE, WRONG, drawn, legend_below, need, panels, tint
from bnn_pyro.predictive import Prediction

__all__ = ["doubt_calibration", "regression_calibration", "reliability"]

#: A bin of fewer points is drawn in grey: its accuracy says next to nothing.
FEW = 10
#: Single-precision probabilities cannot tell a smaller doubt from none.
LEAST_DOUBT = 1e-6


@drawn
def reliability(
    prediction: Prediction, y: Targets, *, bins: int = BINS, axes: Sequence[Axes] | None = None
) -> np.ndarray:
    """Accuracy per bin of confidence with its gap to the confidence (hatched), above the points per bin; axes (2,).

    Whiskers are 95 % Wilson intervals of the accuracy. The title has the ECE of these bins and, for the default ones,
    its noise floor: what a perfectly calibrated model would show on average on as many points.
    """
    need(prediction, "classification", "a reliability diagram")
    table = metrics.reliability(prediction, y, bins)
    filled = table.count > 0
    ece = np.sum(table.count[filled] * np.abs(table.accuracy - table.confidence)[filled]) / table.count.sum()
    axes = panels(axes, 2, 1, 4.4, 4.8, sharex=True, height_ratios=(3, 1))
    left, width = table.edges[:-1], 1 / bins
    for some, colour in (((table.count >= FEW), tint(BAYES, 0.5)), (filled & (table.count < FEW), "0.88")):
        axes[0].bar(left[some], table.accuracy[some], width, align="edge", color=colour, edgecolor="white")
        axes[1].bar(left[some], table.count[some], width, align="edge", color=colour, edgecolor="white")
    gap = table.confidence - table.accuracy
    axes[0].bar(
        left[filled], gap[filled], width, bottom=table.accuracy[filled], align="edge", facecolor="none",
        edgecolor=WRONG, hatch=HATCH, linewidth=0.8, label="gap to the mean confidence",
    )  # fmt: skip
    right = (table.accuracy[filled] * table.count[filled]).round().astype(int)
    ends = [
        stats.binomtest(int(k), int(n)).proportion_ci(method="wilson")
        for k, n in zip(right, table.count[filled], strict=True)
    ]
    middle = left[filled] + width / 2
    for at, num in zip(middle, table.count[filled], strict=True):
        axes[1].annotate(f"{num:,}", (at, num), (0, 1.5), textcoords="offset points", ha="center", size=6.5)
    axes[0].vlines(middle, [e.low for e in ends], [e.high for e in ends], color=DATA, linewidth=1, label="95% interval")
    axes[0].plot([0, 1], [0, 1], "--", color=REFERENCE, linewidth=1, label="perfectly calibrated")
    axes[0].set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy (share right)")
    axes[1].set(xlabel="confidence: largest class probability", ylabel="points", yscale="log")
    axes[1].set_ylim(0.7, table.count.max() * 4)  # room for the numbers
    axes[1].yaxis.set_major_formatter("{x:,.0f}")
    axes[1].minorticks_off()
    floor = f", noise floor {metrics.ece_floor(prediction).mean:.4f}" if bins == BINS else ""
    axes[0].set_title(f"ECE {ece:.4f}{floor}")
    handles, labels = axes[0].get_legend_handles_labels()
    legend_below(axes[1], columns=2, handles=handles, labels=labels)
    return axes


@drawn
def doubt_calibration(prediction: Prediction, y: Targets, *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """The share of errors against the doubt 1 − max p on log scales, above the points per bin; axes (2,).

    For a classifier so sure of most points that all of them fall into the last bin of a reliability diagram. Bins are
    half a power of ten wide; a dot is at the mean doubt and the error of its bin, with the 95 % Wilson interval. On the
    diagonal, doubt is deserved; above it, the network is overconfident. A bin without an error has an open triangle
    at the upper end of its interval: the error is below.
    """
    need(prediction, "classification", "a calibration of doubt")
    y, probs = targets(prediction, y), mean_probs(prediction)
    doubt = np.clip(1 - probs.max(1), LEAST_DOUBT, 1)
    wrong = probs.argmax(1) != y
    edges = 10 ** np.arange(np.floor(2 * np.log10(doubt.min())) / 2, 0.01, 0.5)
    index = np.clip(np.searchsorted(edges, doubt, side="left") - 1, 0, len(edges) - 2)
    count, errors, total = (np.bincount(index, w, len(edges) - 1) for w in (None, wrong, doubt))
    filled = count > 0
    count, errors, mean = count[filled], errors[filled].astype(int), total[filled] / count[filled]
    ends = [stats.binomtest(int(k), int(n)).proportion_ci(method="wilson") for k, n in zip(errors, count, strict=True)]
    low, high, rate = np.array([e.low for e in ends]), np.array([e.high for e in ends]), errors / count
    axes = panels(axes, 2, 1, 4.4, 4.8, sharex=True, height_ratios=(3, 1))
    some = errors > 0
    floor = 0.3 / count.max()  # a smaller error could not be seen in any bin
    axes[0].plot([floor, 1], [floor, 1], "--", color=REFERENCE, linewidth=1, label="perfectly calibrated")
    axes[0].vlines(mean, np.maximum(low, floor), high, color=DATA, linewidth=1, label="95% interval")
    axes[0].plot(mean[some], rate[some], "o", color=BAYES, markersize=5, label="error of the bin")
    if not some.all():
        axes[0].plot(mean[~some], high[~some], "v", color=WRONG, mfc="white", markersize=5, label="no error: below")
    axes[0].set(xscale="log", yscale="log", ylim=(floor, 1.3), ylabel="share wrong")
    axes[0].set_title(f"{wrong.sum():,} of {len(y):,} wrong, mean doubt {doubt.mean():.2%}")
    left, right = edges[:-1][filled], edges[1:][filled]
    axes[1].bar(left, count, right - left, align="edge", color=tint(BAYES, 0.5), edgecolor="white")
    for at, num in zip(np.sqrt(left * right), count, strict=True):
        axes[1].annotate(f"{num:,}", (at, num), (0, 1.5), textcoords="offset points", ha="center", size=6.5)
    axes[1].set(xlabel="doubt: 1 − largest class probability", ylabel="points", yscale="log", xlim=(edges[0], 1))
    axes[1].set_ylim(0.7, count.max() * 4)
    axes[1].yaxis.set_major_formatter("{x:,.0f}")
    axes[1].minorticks_off()
    handles, labels = axes[0].get_legend_handles_labels()
    legend_below(axes[1], columns=2, handles=handles, labels=labels)
    return axes


@drawn
def regression_calibration(prediction: Prediction, y: Targets, *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Observed against nominal coverage of central intervals, and the histogram of P(Y ≤ y); axes (2,).

    Grey: where 95 % of perfectly calibrated models would lie at this number of points, at each place by itself.
    A curve below the diagonal, or a U-shaped histogram, is overconfidence; the opposite is too wide.
    """
    need(prediction, "regression", "regression calibration")
    pit = metrics.pit(prediction, y)
    nominal = np.linspace(0, 1, 41)
    observed = (np.abs(pit[:, None] - 0.5) <= nominal / 2).mean(0)
    axes = panels(axes, 1, 2, 7.6, 3.5)
    low, high = stats.binom.ppf([[0.025], [0.975]], len(pit), nominal[1:-1]) / len(pit)
    axes[0].fill_between(nominal, [0, *low, 1], [0, *high, 1], color="0.88", linewidth=0, label="95% if calibrated")
    axes[0].plot([0, 1], [0, 1], "--", color=REFERENCE, linewidth=1)
    axes[0].plot(nominal, observed, color=BAYES, marker="o", markevery=4, markersize=4, label="this prediction")
    axes[0].set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes[0].set(xlabel="nominal coverage of the central interval", ylabel="observed coverage")
    axes[0].legend(loc="upper left")
    axes[0].set_title(f"{observed[38]:.1%} of targets in the 95% interval")
    bins = 10 if len(pit) < 500 else 20
    counts, edges = np.histogram(pit, np.linspace(0, 1, bins + 1))
    low, high = stats.binom.ppf([0.025, 0.975], len(pit), 1 / bins)
    axes[1].bar(edges[:-1], counts, 1 / bins, align="edge", color=tint(BAYES, 0.6), edgecolor="white")
    axes[1].axhspan(low, high, color="0.88", linewidth=0, zorder=0)
    axes[1].hlines([low, high], 0, 1, color=REFERENCE, linestyle=":", linewidth=1)
    axes[1].axhline(len(pit) / bins, color=REFERENCE, linestyle="--", linewidth=1)
    axes[1].set(xlim=(0, 1), xlabel="P(Y ≤ observed y), the PIT", ylabel="points", title="uniform if calibrated")
    return axes
