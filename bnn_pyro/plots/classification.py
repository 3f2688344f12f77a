"""Class probabilities: confusion, confidence, reliability, thresholds and selective prediction."""

from collections.abc import Mapping, Sequence

import numpy as np
import seaborn
from matplotlib.axes import Axes
from scipy import stats
from sklearn import metrics as sklearn_metrics

from bnn_pyro import metrics
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from bnn_pyro.metrics.classification import BINS, mean_probs
from bnn_pyro.metrics.metric import Targets, targets
from bnn_pyro.plots.layout import Panel, class_names, legend_below, panel, panels, short
from bnn_pyro.plots.style import BAYES, CONTRAST, DASHED, DATA, GOOD, HATCH, LINES, MARKERS, POINT, WRONG, drawn, tint
from bnn_pyro.predictive import Prediction

#: High confidence: the title has the number of points above it, and how many of them are wrong.
SURE = 0.99


@drawn
def confusion_matrix(prediction: Prediction, y: Targets, schema: Schema | None = None, *, ax: Panel = None) -> Axes:
    """Number of points of each true class (row) by most probable class (column).

    The colour is the share of the row: blue for correct predictions, red for wrong ones.
    """
    counts = metrics.confusion_matrix(prediction, y)
    names = [short(name, 20) for name in class_names(prediction, schema)]
    size, long = 2.2 + 0.36 * len(names) if len(names) <= 20 else 7.5, max(map(len, names))
    upright = len(names) * long > 16
    ax = panel(ax, size + 1.5 + 0.07 * long, size + 0.07 * long * upright)
    right = np.where(np.eye(len(names)), counts, -counts) / np.maximum(counts.sum(1, keepdims=True), 1)
    annotations = np.array([[f"{n:,}" if n else "" for n in row] for row in counts]) if len(names) <= 20 else False
    seaborn.heatmap(
        right, ax=ax, vmin=-1, vmax=1, cmap="RdBu", annot=annotations, fmt="", square=True, linewidths=0.5,
        annot_kws={"size": 8}, cbar_kws={"label": "share of the true class", "shrink": 0.8, "ticks": [-1, 0, 1]},
        xticklabels=False, yticklabels=False,
    )  # fmt: skip
    ax.collections[0].colorbar.set_ticklabels(["all wrong", "0", "all right"])
    ax.set_xticks(place := np.arange(len(names)) + 0.5, names, rotation=90 * upright)
    ax.set_yticks(place, names)
    wrong = counts.sum() - np.trace(counts)
    ax.set(xlabel="most probable class", ylabel="true class", title=f"{wrong:,} of {counts.sum():,} wrong")
    return ax


@drawn
def confidence_histogram(prediction: Prediction, y: Targets, *, ax: Panel = None) -> Axes:
    """Histogram of the confidence of correct and of wrong predictions (narrow hatched bars), on a log scale.

    Lines mark the mean confidence and the accuracy, which differ if the network is over- or underconfident.
    """
    y, probs = targets(prediction, y), mean_probs(prediction)
    confidence, right = probs.max(1), probs.argmax(1) == y
    edges = np.linspace(1 / probs.shape[1], 1, 21)
    ax = panel(ax)
    up, *_ = ax.hist(confidence[right], edges, color=tint(BAYES, 0.7), edgecolor="white", label="right")
    narrow = dict(rwidth=0.55, color=tint(WRONG, 0.35), edgecolor=WRONG, hatch=HATCH, label="wrong")
    down, *_ = ax.hist(confidence[~right], edges, **narrow)
    _log_counts(ax, 1.5 * max(up.max(), down.max()))
    percent = ".1%" if right.mean() < 0.97 else ".2%"
    for value, line, label in ((confidence.mean(), "-", "mean confidence"), (right.mean(), "--", "accuracy")):
        ax.axvline(value, color=DATA, linestyle=line, label=f"{label} {value:{percent}}")
    sure = confidence > SURE
    ax.set_title(f"{sure.sum():,} of {len(y):,} above {SURE:.0%}, {(sure & ~right).sum():,} of these wrong")
    ax.set(xlabel="confidence: largest class probability", xlim=(edges[0], 1))
    return legend_below(ax, 2)


@drawn
def reliability(
    prediction: Prediction, y: Targets, schema: Schema | None = None, *, axes: Sequence[Axes] | None = None
) -> np.ndarray:
    """Accuracy per bin of confidence with its gap to the confidence (hatched), above the points per bin; axes (2,).

    For two classes: the share of the second class per bin of its probability. Whiskers are 95 % Wilson intervals. The
    title has the ECE and its noise floor, the mean ECE of a perfectly calibrated model on as many points; for two
    classes also the mean gap of these bins, as the ECE is that of the most probable class.
    """
    names = class_names(prediction, schema)
    two = names[1] if len(names) == 2 else None
    table = metrics.reliability(prediction, y, of=None if two is None else 1)
    filled, width = table.count > 0, 1 / BINS
    count, accuracy, confidence = (v[filled] for v in (table.count, table.accuracy, table.confidence))
    left = table.edges[:-1][filled]
    colours = [tint(BAYES, 0.5) if num >= 10 else "0.88" for num in count]  # grey: few points
    axes = panels(2, 1, (4.4, 2.4), sharex=True, height_ratios=(3, 1)) if axes is None else axes
    axes[0].plot([0, 1], [0, 1], **DASHED, label="perfectly calibrated")
    interval = dict(color=DATA, linewidth=1, zorder=3, label="95% interval")
    axes[0].vlines(left + width / 2, *_wilson(accuracy * count, count), **interval)
    axes[0].bar(left, accuracy, width, align="edge", color=colours, edgecolor="white")
    gap = dict(facecolor="none", edgecolor=WRONG, hatch=HATCH, linewidth=0.8, label="gap to the mean prediction")
    axes[0].bar(left, confidence - accuracy, width, bottom=accuracy, align="edge", **gap)
    ece = f"ECE {metrics.ece(prediction, y):.4f}, noise floor {metrics.ece_floor(prediction).mean:.4f}"
    off = f"mean gap {np.average(np.abs(accuracy - confidence), weights=count):.4f}\nof the class named: "
    axes[0].set_title(off + ece if two else ece)
    axes[0].set(xlim=(0, 1), ylim=(0, 1.02), ylabel=f"share of {two}" if two else "accuracy (share right)")
    axes[1].set(xlabel=f"P({two})" if two else "confidence: largest class probability")
    bars = axes[1].bar(left, count, width, align="edge", color=colours, edgecolor="white")
    axes[1].bar_label(bars, fmt="{:,.0f}", size=6.5, padding=1.5)
    _log_counts(axes[1], count.max() * 4)  # room for the numbers
    legend_below(axes[1], 2, handles=axes[0].get_legend_handles_labels()[0])
    return axes


@drawn
def selective_risk(prediction: Prediction, y: Targets, *, baseline: Prediction | None = None, ax: Panel = None) -> Axes:
    """Error rate of the share of points with the lowest total entropy, against that share.

    It lies between the best possible order of the same errors (oracle) and a random order. The title has the area under
    the curve.   baseline: another prediction of the same points, such as the deterministic network's.
    """
    coverage, risk = metrics.selective_risk(prediction, y)
    error, num = risk[-1], len(risk)
    rank = np.arange(1, num + 1)
    oracle = np.maximum(rank - round((1 - error) * num), 0) / rank
    top, title = max(error, risk[num // 20 :].max()), f"AURC {risk.mean():.4f}"
    ax = panel(ax)
    ax.plot(coverage, risk, color=BAYES, label="least entropy first")
    rows = np.unique(np.linspace(1, num, 200).astype(int))
    low, high = _wilson(risk[rows - 1] * rows, rows)
    ax.fill_between(coverage[rows - 1], low, high, color=tint(BAYES, 0.13), linewidth=0, zorder=0, label="95% interval")
    if baseline is not None:
        other = metrics.selective_risk(baseline, y)[1]
        ax.plot(coverage, other, color=POINT, linestyle="-.", label="baseline")
        top, title = max(top, other.max()), f"{title}, baseline {other.mean():.4f}"
    ax.axhline(error, **DASHED, label="random order")
    ax.plot(coverage, oracle, color=GOOD, linestyle=":", linewidth=2, label="oracle: all errors last")
    ax.set(xlabel="coverage: share of points answered", ylabel="error among them", xlim=(0, 1), title=title)
    ax.set_ylim(0, max(1.15 * top, 1.3 * high[-1]))  # also high enough for the interval at full coverage
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    return legend_below(ax, 2)


@drawn
def threshold_curves(prediction: Prediction, y: Targets, schema: Schema | None = None) -> np.ndarray:
    """Precision against recall, and the ROC curve, of the probability of the rarer of two classes; axes (2,).

    Markers are thresholds of that probability, from the frequency of the class in y to 0.5; the legend has the number
    of rows above each. Dashed: a random order.   Raises UserError unless there are two classes, and rows of both.
    """
    metrics.average_precision.summarise(prediction, y)
    y, probs, names = targets(prediction, y), mean_probs(prediction), class_names(prediction, schema)
    rare = int(2 * y.sum() <= len(y))
    score, positive = probs[:, rare], y == rare
    precision, recall, _ = sklearn_metrics.precision_recall_curve(positive, score)
    false, true, _ = sklearn_metrics.roc_curve(positive, score, drop_intermediate=False)
    base, area = positive.mean(), sklearn_metrics.roc_auc_score(positive, score)
    axes = panels(2, 2, (3.8, 3.7))
    axes[0].plot(recall[:-1], precision[:-1], color=BAYES, drawstyle="steps-post")
    axes[0].axhline(base, **DASHED)
    axes[1].plot(false, true, color=BAYES, drawstyle="steps-post")
    axes[1].plot([0, 1], [0, 1], **DASHED)
    for k, threshold in enumerate(sorted({0.5, 0.2, 0.1, float(f"{base:.1g}")}, reverse=True)):
        flagged = score >= threshold
        hits = (flagged & positive).sum()
        label = f"P ≥ {threshold:g}: {flagged.sum():,} rows, {hits:,} of {positive.sum():,} found"
        look = dict(color=CONTRAST[k], marker=MARKERS[k], ls="", ms=6, mec="white", zorder=3, label=label)
        axes[0].plot(*((hits / positive.sum(), hits / flagged.sum()) if flagged.any() else (np.nan, np.nan)), **look)
        axes[1].plot((flagged & ~positive).sum() / (~positive).sum(), hits / positive.sum(), **look)
    ends = dict(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    ap = metrics.average_precision(prediction, y)
    axes[0].set(title=f"average precision {ap:.3f}\n{base:.3f} in a random order", **ends)
    axes[0].set_xlabel(f"recall: share of {names[rare]} that is found")
    axes[0].set_ylabel(f"precision: share of these that is {names[rare]}")
    axes[1].set(title=f"AUROC {area:.3f}\n0.500 in a random order", **ends)
    axes[1].set(xlabel=f"false alarms: share of {names[1 - rare]}", ylabel=f"share of {names[rare]} found")
    axes[0].figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return axes


@drawn
def entropy_histograms(
    inside: Prediction, outside: Prediction | Mapping[str, Prediction], *, name: str = "in distribution",
    ax: Panel = None,
) -> Axes:  # fmt: skip
    """Total entropy on test data and on out-of-distribution inputs, with the AUROC between them.

    outside: one prediction, or {name: prediction}, up to four.   name: name of the test data.
    """
    outside = {"out of distribution": outside} if isinstance(outside, Prediction) else dict(outside)
    if not 0 < len(outside) <= len(CONTRAST):
        raise UserError(f"an entropy histogram shows 1 to {len(CONTRAST)} out-of-distribution sets, got {len(outside)}")
    values = [metrics.SCORES["total_entropy"](prediction) for prediction in (inside, *outside.values())]
    edges = np.linspace(0, max(*(v.max() for v in values), 1e-9), 41)
    tested, *shares = (np.histogram(v, edges)[0] / len(v) for v in values)
    ax = panel(ax)
    ax.stairs(tested, edges, fill=True, color=tint(BAYES, 0.55), label=f"{name} (mean {values[0].mean():.2f})")
    for k, (other, prediction) in enumerate(outside.items()):
        label = f"{other} (mean {values[k + 1].mean():.2f}, AUROC {metrics.ood_auroc(inside, prediction):.3f})"
        ax.stairs(shares[k], edges, color=CONTRAST[k], linestyle=LINES[k], linewidth=1.8, label=label)
    ax.set(xlabel="total predictive entropy, nats", ylabel="share of points", xlim=(0, edges[-1]))
    if np.max([tested, *shares]) > 0.4:  # a confident network has nearly all test points in the first bin
        ax.set(yscale="log", ylim=(0.5 / max(map(len, values)), 1), ylabel="share of points (log scale)")
    return legend_below(ax, 1)


def _wilson(hits: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Ends of the 95 % Wilson intervals of hits / count, (2, bins)."""
    tests = (stats.binomtest(int(k), int(n)) for k, n in zip(hits.round(), count, strict=True))
    return np.array([test.proportion_ci(method="wilson") for test in tests]).T


def _log_counts(ax: Axes, top: float) -> None:
    ax.set(yscale="log", ylim=(0.7, top), ylabel="points")
    ax.yaxis.set_major_formatter("{x:,.0f}")
    if top < 50:
        ax.set_yticks([tick for tick in (1, 2, 5, 10, 20) if tick < top])
    ax.minorticks_off()
