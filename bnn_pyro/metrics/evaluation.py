"""Metrics of a real target, in its own units; all metrics of a task at once; and how two predictions differ.

Scores are those of the mixture over the draws, never of a Gaussian with its moments. Two predictions of the same points
are compared by a metric (:func:`paired`), or by a distance that needs no targets: agreement and total variation of the
mean class probabilities (Izmailov, Vikram, Hoffman & Wilson 2021, arXiv:2104.14421, section 7), or the Wasserstein-1
distance of the predictive mixtures of a regression. With finitely many draws no distance is exactly 0, not even between
two runs of the same exact sampler or between halves of its draws (``prediction.of_draws``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.stats import binom

from bnn_pyro.errors import UserError, check_known
from bnn_pyro.metrics import classification
from bnn_pyro.metrics import metric as base
from bnn_pyro.metrics.classification import mean_probs
from bnn_pyro.metrics.metric import Estimate, Evaluation, Metric, Targets, Undefined, intervals, mean_of, targets
from bnn_pyro.parts.mixtures import BLOCK, GRID, growing
from bnn_pyro.predictive import Prediction


def _crps(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    prediction._need("regression", "crps")
    order = prediction.total.argsort()  # a block of counts takes as long as its widest row
    blocks = order.split(max(1, 4 * BLOCK // (GRID * prediction.num_draws)))
    return torch.cat([prediction[rows].crps(torch.from_numpy(y)[rows]) for rows in blocks])[order.argsort()].numpy()


def _steps(prediction: Prediction, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P(Y ≤ y), P(Y < y)), each (B,); they are equal where Y is continuous."""
    below, at = (share.mean(-2) for share in prediction.component_below(torch.from_numpy(y)))
    return (below + at).numpy(), below.numpy()


def pit(prediction: Prediction, y: Targets, *, seed: int | None = None) -> np.ndarray:
    """Probability integral transform P(Y ≤ y) of each point, (B,): uniform on (0, 1) if calibrated.

    For counts it is P(Y < y) + u P(Y = y), and for a censored time P(T ≤ t) + u P(T > t). With ``seed``, u is drawn
    uniformly, which makes the PIT exactly uniform (Dunn & Smyth 1996, JCGS 5:236-244); without it, u = ½.
    Raises UserError for classes without an order and for several targets.
    """
    if prediction.task == "classification":
        raise UserError("classes have no order, and so no P(Y ≤ y): use bp.plots.reliability")
    if prediction.task in ("targets", "labels"):
        prediction._need("regression", "pit")
    upper, lower = _steps(prediction, targets(prediction, y))
    # A random stream of its own, independent of data that were simulated from the same seed.
    return lower + (upper - lower) * (0.5 if seed is None else np.random.default_rng([seed, 1996]).random(len(upper)))


def _covered(share: float, prediction: Prediction, y: np.ndarray) -> np.ndarray:
    randomised = prediction.task == "survival"  # the place of a censored time in its interval is drawn at random
    upper, lower = (pit(prediction, y, seed=0),) * 2 if randomised else _steps(prediction, y)
    return (np.maximum(lower - 0.5, 0.5 - upper) <= share / 2).astype(np.float64)


def _coverage(share: float, noun: str = "targets", more: str = "") -> Metric:
    text = f"share of {noun} inside the central {share:.0%} interval{more}"
    return Metric(partial(_covered, share), mean_of, text, "nominal", share=True)


def interval_verdict(share: float, observed: float, num: int) -> str:
    """Whether intervals with a nominal coverage of ``share`` that cover ``observed`` of ``num`` targets have it.

    "too narrow" or "too wide" where the number of covered targets lies outside the central 95 % of its binomial
    distribution, else "about right", or "too few rows to tell" if there are fewer than 10 rows.
    """
    right = "about right" if num >= 10 else "too few rows to tell"
    count, (low, high) = round(observed * num), binom.ppf([0.025, 0.975], num, share)
    return "too narrow" if count < low else "too wide" if count > high else right


def _squares(prediction: Prediction, y: np.ndarray) -> np.ndarray:
    if prediction.task == "survival" and (y < 0).any():
        raise UserError("the RMSE needs observed times, but some are censored; use nll and concordance")
    return np.square(prediction.locs.mean(0, dtype=torch.float64).numpy() - y)


_RMSE = "root mean squared error of the predictive mean, target units"
rmse = Metric(_squares, lambda w, n: np.sqrt(mean_of(w, n)), _RMSE)
crps = Metric(_crps, mean_of, "distance of the predicted distribution from the observed value (CRPS), target units")
coverage_50, coverage_90, coverage_95 = _coverage(0.50), _coverage(0.90), _coverage(0.95)
_DRAWN = "; of a censored row drawn from what is predicted beyond it"
_WIDTH = "mean width of the central 95% interval, target units"
width_95 = Metric(lambda p, y: p.quantile([0.025, 0.975]).double().diff(dim=0)[0].numpy(), mean_of, _WIDTH)

_NLL = "how improbable the observed value is under the prediction: −log p of the mixture over draws, nats a row"
nll = Metric(lambda p, y: -p.log_prob(torch.from_numpy(y)).double().numpy(), mean_of, _NLL)

_NUMBERS = dict(rmse=rmse, nll=nll, crps=crps)
_NUMBERS |= dict(coverage_50=coverage_50, coverage_90=coverage_90, coverage_95=coverage_95, width_95=width_95)
_TIMES = {f"coverage_{share}": _coverage(share / 100, "times", _DRAWN) for share in (50, 90)}
_CLASSES = dict(error=classification.error, accuracy=classification.accuracy, nll=nll, brier=classification.brier)
_CLASSES |= {name: vars(classification)[name] for name in ("ece", "adaptive_ece", "classwise_ece", "auroc", "aurc")}
_CLASSES |= dict(average_precision=base.average_precision)
_LABELS = dict(label_error=base.label_error, nll=nll, label_brier=base.label_brier)
_LABELS |= dict(average_precision=base.average_precision)
#: {task: {name: metric}}; metrics of several targets are of all targets together.
METRICS: dict[str, dict[str, Metric]] = {
    "classification": _CLASSES,
    "ordinal": {"rps": classification.rps, **_CLASSES},
    "regression": _NUMBERS,
    "counts": _NUMBERS,
    "survival": {"concordance": base.concordance, "nll": nll, **_TIMES},
    "targets": dict(nrmse=base.nrmse, nll=nll),
    "labels": _LABELS,
}


def evaluate(prediction: Prediction, y: Targets, **resampling: Any) -> Evaluation:
    """Every metric of the prediction's task with its bootstrap interval; shares have the exact binomial interval.

    y: (B,) labels 0 … K−1, or targets in their own units.
    resampling: ``bootstrap`` = 1000 replicates of the same points for all metrics, ``seed`` = 0, ``confidence`` = 0.95.
    A metric without a value on these data is left out and has an entry in ``.notes``; ``.replicates`` has the values on
    the resampled points, ``.flat()`` the JSON-able form. Raises UserError for a bad y, or where the prediction is NaN.
    """
    y = targets(prediction, y)
    table, points, notes = METRICS[prediction.task], {}, {}
    for name, metric in table.items():
        try:
            points[name] = metric.summarise(prediction, y)
        except Undefined as reason:
            notes[name] = str(reason)
    biased = {name for name in points if table[name].biased}
    reductions = {name: partial(table[name].reduce, p) for name, p in points.items()}
    evaluation = intervals(reductions, (len(y),), biased=biased, **resampling)
    evaluation.notes.update(notes)
    confidence = resampling.get("confidence", 0.95)
    evaluation.update({name: base.share_of(p, confidence) for name, p in points.items() if table[name].share})
    # Biased metrics are sums of absolute values, and their intervals, which are shifted, must not fall below 0.
    evaluation.update({n: one._replace(low=max(one.low, 0.0)) for n, one in evaluation.items() if n in biased})
    return evaluation


def paired(
    metric: str | Metric, prediction_a: Prediction, prediction_b: Prediction, y: Targets, **resampling: Any
) -> Estimate:
    """metric(a) − metric(b) on the same points, which are resampled together: far more precise than two intervals.

    metric: a name in METRICS[task], or a Metric.   resampling: as for :func:`evaluate`.
    Raises UserError for an unknown name, predictions of different lengths or tasks, or where either has no value.
    """
    if prediction_a.task != prediction_b.task:
        raise UserError(f"cannot compare a {prediction_a.task} with a {prediction_b.task} prediction")
    if isinstance(metric, str):
        table = METRICS[prediction_a.task]
        check_known(f"{prediction_a.task} metric", table, metric)
        metric = table[metric]
    a, b = metric.summarise(prediction_a, y), metric.summarise(prediction_b, y)
    reductions = {"difference": lambda counts: metric.reduce(a, counts) - metric.reduce(b, counts)}
    biased = reductions.keys() if metric.biased else ()
    return intervals(reductions, (len(a),), biased=biased, **resampling)["difference"]


def _transport(a: Prediction, b: Prediction) -> np.ndarray:
    """∫ |F(y) − G(y)| dy by the trapezoid rule, from 8 standard deviations below the lowest component to 8 above.

    The nodes are evenly spaced ones together with those of the CRPS, whose steps grow from the median component.
    """
    distances = []
    for rows in torch.arange(len(a)).split(max(1, BLOCK // (GRID * max(a.num_draws, b.num_draws)))):
        p, q = a[rows], b[rows]
        ends = [(m.untransformed.locs.double(), 8 * m.untransformed.scales.double()) for m in (p, q)]
        low = torch.minimum(*((loc - far).amin(0) for loc, far in ends))
        high = torch.maximum(*((loc + far).amax(0) for loc, far in ends))
        middle = torch.cat([loc for loc, _ in ends]).median(0).values
        even = torch.lerp(low, high, torch.linspace(0, 1, GRID, dtype=torch.float64)[:, None])
        y = p.transform(torch.cat([even, growing(low, middle, high, GRID + 1)]).sort(0).values)
        distances.append(torch.trapezoid((p.cdf(y) - q.cdf(y)).abs(), y, dim=0))
    return torch.cat(distances).numpy()


_OF_CLASSES: dict[str, Callable[[Prediction, Prediction], np.ndarray]] = {
    "agreement": lambda a, b: 1.0 * (mean_probs(a).argmax(1) == mean_probs(b).argmax(1)),
    "total_variation": lambda a, b: 0.5 * np.abs(mean_probs(a) - mean_probs(b)).sum(1),
}
_OF_NUMBERS = {"wasserstein": _transport}
#: {task: {distance: (a, b) -> (B,) float64}}. agreement: whether the most probable class is the same in both.
#: total_variation: ½ Σ_k |p_k − q_k| of the mean probabilities, 0 to 1. wasserstein: ∫ |F − G| of the two predictive
#: mixtures, target units, to 1/1000 of the scale (Wasserstein-1; for Normals of one scale the distance of their means).
DISTANCES = dict(classification=_OF_CLASSES, ordinal=_OF_CLASSES, regression=_OF_NUMBERS, survival=_OF_NUMBERS)


def distances(a: Prediction, b: Prediction, *, bootstrap: int = 1000, seed: int = 0) -> dict[str, Estimate]:
    """The mean over the points of every distance of the task, with its 95 % interval over ``bootstrap`` resamples.

    Raises UserError for predictions of different tasks or numbers of points or classes, or that are not finite.
    """
    if a.task != b.task:
        raise UserError(f"cannot compare a {a.task} with a {b.task} prediction")
    check_known("task with distances", DISTANCES, a.task)
    if len(a) != len(b):
        raise UserError(f"the predictions are for {len(a)} and {len(b)} points; predict the same points with both")
    if len(a) == 0:
        raise UserError("there is nothing to compare: the predictions have 0 points")
    if a.has_classes and a.mean.shape != b.mean.shape:
        raise UserError(f"the predictions have {a.mean.shape[1]} and {b.mean.shape[1]} classes")
    values = {name: distance(a, b) for name, distance in DISTANCES[a.task].items()}
    if not (finite := np.isfinite([*values.values()]).all(0)).all():
        raise UserError(f"a prediction is not finite at row {int(np.argmin(finite))}")
    reductions = {name: partial(mean_of, points) for name, points in values.items()}
    return intervals(reductions, (len(a),), bootstrap=bootstrap, seed=seed)
