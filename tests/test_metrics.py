"""Metrics against numbers worked out by hand, brute force, numerical integration and scikit-learn."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from pyro.distributions import Bernoulli, Categorical, Normal
from refused import refuses
from scipy.stats import binom, norm
from sklearn.metrics import roc_auc_score

from bnn_pyro import metrics
from bnn_pyro.metrics.classification import auroc_of, in_order, mean_probs
from bnn_pyro.metrics.metric import intervals, mean_of
from bnn_pyro.parts.several import SeveralMixture
from bnn_pyro.predictive import Prediction


def classes(probs):
    """A Prediction with these probabilities (S, B, K)."""
    return Prediction(Categorical(logits=torch.as_tensor(probs, dtype=torch.float32).log(), validate_args=False))


def gaussians(locs, scales):
    """A Prediction with these components (S, B)."""
    locs, scales = (torch.as_tensor(v, dtype=torch.float32) for v in (locs, scales))
    return Prediction(Normal(locs, scales, validate_args=False))


def simulated(num=2000, num_classes=4, draws=3, seed=0, sharpen=1.0):
    """A prediction, and labels drawn from the probabilities that it would state at ``sharpen`` = 1."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(1, num, num_classes)) + 0.7 * rng.normal(size=(draws, num, num_classes))
    truth = mean_probs(Prediction(Categorical(logits=torch.tensor(logits), validate_args=False)))
    y = (rng.random((num, 1)) > truth.cumsum(1)).sum(1).clip(max=num_classes - 1)
    return Prediction(Categorical(logits=torch.tensor(sharpen * logits), validate_args=False)), y


# Two draws of three points. Mean probabilities: (.75, .25), (.4, .6), (.5, .5)
TWO_DRAWS = classes([[[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]], [[0.6, 0.4], [0.6, 0.4], [0.5, 0.5]]])
Y = [0, 0, 1]
POINT = classes([[[0.9, 0.1], [0.5, 0.5]]])


def test_hand_numbers_classification():
    # Most probable: 0, 1, 0 (first of a tie); right: only the first.
    assert metrics.error(TWO_DRAWS, Y) == pytest.approx(2 / 3)
    assert metrics.accuracy(TWO_DRAWS, Y) == pytest.approx(1 / 3)
    assert metrics.nll(TWO_DRAWS, Y) == pytest.approx(-(math.log(0.75) + math.log(0.4) + math.log(0.5)) / 3)
    # Squared distances to (1, 0), (1, 0), (0, 1): .125, .72, .5
    assert metrics.brier(TWO_DRAWS, Y) == pytest.approx((0.125 + 0.72 + 0.5) / 3)
    # P(class 1) = .25, .6 for the negatives, .5 for the positive: it wins one of its two pairs.
    assert metrics.auroc(TWO_DRAWS, Y) == pytest.approx(0.5)
    # By confidence: right, wrong, wrong. Risks 0, 1/2, 2/3.
    np.testing.assert_allclose(metrics.selective_risk(TWO_DRAWS, Y), [[1 / 3, 2 / 3, 1], [0, 1 / 2, 2 / 3]])
    assert metrics.aurc(TWO_DRAWS, Y) == pytest.approx((1 / 2 + 2 / 3) / 3)
    np.testing.assert_array_equal(metrics.confusion_matrix(TWO_DRAWS, Y), [[1, 1], [1, 0]])
    of_90, of_60, of_75 = (-p * math.log(p) - (1 - p) * math.log(1 - p) for p in (0.9, 0.6, 0.75))
    scores = {name: score(TWO_DRAWS) for name, score in metrics.SCORES.items()}
    assert scores["total_entropy"][0] == pytest.approx(of_75, rel=1e-6) and scores["max_prob"][0] == pytest.approx(0.25)
    assert scores["mutual_information"][0] == pytest.approx(of_75 - (of_90 + of_60) / 2, rel=1e-5)
    assert scores["mutual_information"][2] == 0.0


def test_ece_against_brute_force_and_the_ends_of_its_bins():
    prediction, y = simulated(sharpen=1.5)
    probs = prediction.probs.double().mean(0).numpy()
    confidence, gap = probs.max(1), (probs.argmax(1) == y) - probs.max(1)

    def binned(confidence, gap):
        bins = ((confidence > i / 15) & (confidence <= (i + 1) / 15) for i in range(15))
        return sum(abs(gap[inside].sum()) for inside in bins) / len(y)

    adaptive = sum(abs(gap[rows].sum()) for rows in np.array_split(np.argsort(confidence), 15)) / len(y)
    by_class = sum(binned(probs[:, k], probs[:, k] - (y == k)) for k in range(4)) / 4
    assert metrics.ece(prediction, y) == pytest.approx(binned(confidence, gap), abs=1e-12)
    assert metrics.adaptive_ece(prediction, y) == pytest.approx(adaptive, abs=1e-12)
    assert metrics.classwise_ece(prediction, y) == pytest.approx(by_class, abs=1e-12)
    half = classes([[[0.5, 0.5], [0.51, 0.49]]])
    np.testing.assert_array_equal(metrics.reliability(half, [0, 0], bins=2).count, [1, 1])
    result = metrics.reliability(classes([[[1.0, 0.0], [1.0, 0.0], [0.97, 0.03], [0.97, 0.03]]]), [0, 1, 0, 0])
    assert result.count[-1] == 4 and result.count.sum() == 4
    assert result.confidence[-1] == pytest.approx(0.985) and result.accuracy[-1] == 0.75
    assert np.isnan(result.accuracy[:-1]).all()


def test_a_calibrated_model_is_at_the_floor_and_an_overconfident_one_is_not():
    eces = [metrics.ece(*simulated(num=1500, seed=seed)) for seed in range(40)]
    floor = metrics.ece_floor(simulated(num=1500)[0])
    standard_error = np.std(eces) / math.sqrt(len(eces))
    assert abs(np.mean(eces) - floor.mean) < 4 * standard_error
    assert np.mean(np.array(eces) > floor.quantile_95) < 0.25  # 5% expected, of 40
    assert 0 < floor.mean < floor.quantile_95
    # By hand: one point of confidence 0.92 has an ECE of 0.08, or of 0.92 in 8 % of the test sets.
    assert metrics.ece_floor(classes([[[0.92, 0.08]]])).quantile_95 == pytest.approx(0.92)


def test_ties_auroc_is_scikit_learns_and_the_order_of_the_file_does_not_matter():
    rng = np.random.default_rng(0)
    score, label = rng.integers(0, 8, 200).astype(float), rng.integers(0, 2, 200)
    counts = rng.multinomial(200, np.full(200, 1 / 200), size=5).astype(float)
    ours = auroc_of(np.stack([score, label], 1), counts)
    np.testing.assert_allclose(ours, [roc_auc_score(label, score, sample_weight=c) for c in counts], rtol=1e-12)
    certain = classes(np.tile([[1.0, 0.0]], (1, 6, 1)))
    for y in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]):
        assert metrics.aurc(certain, y) == pytest.approx(0.5)
    ordered = in_order(np.array([[2.0, 1.0], [1.0, 5.0], [2.0, 3.0]]), np.array([[1.0, 1, 1], [2, 0, 1], [0, 3, 0]]))
    np.testing.assert_allclose(ordered, [[5, 2, 2], [5 / 3] * 3, [5, 5, 5]])


def test_intervals_of_a_mean_are_the_analytic_ones_and_of_shares_exact_binomial_ones():
    points = np.random.default_rng(1).exponential(size=2000)
    value, low, high = intervals({"m": lambda c: mean_of(points, c)}, (2000,), bootstrap=4000)["m"]
    half = 1.959964 * points.std() / math.sqrt(2000)
    assert value == pytest.approx(points.mean())
    # An extreme quantile of 4000 replicates has a standard error of about 0.04 standard errors of the mean.
    assert high - value == pytest.approx(half, rel=0.1) and value - low == pytest.approx(half, rel=0.1)
    narrow = intervals({"m": lambda c: mean_of(points, c)}, (2000,), confidence=0.5)["m"]
    assert (narrow.high - narrow.low) / (high - low) == pytest.approx(0.6745 / 1.96, rel=0.1)
    # Of 45 rows without an error up to 7.9 % may be wrong: 1 − 0.025^(1/45), where a bootstrap says none.
    sure = metrics.evaluate(classes(np.tile([0.9, 0.1], (1, 45, 1))), np.zeros(45), bootstrap=2)
    assert sure["error"] == pytest.approx((0.0, 0.0, 1 - 0.025 ** (1 / 45)))
    assert sure["accuracy"] == pytest.approx((1.0, 0.025 ** (1 / 45), 1.0))
    prediction, y = simulated(num=200)
    value, low, high = metrics.evaluate(prediction, y, bootstrap=2, confidence=0.8)["error"]
    assert binom.sf(round(200 * value) - 1, 200, low) == pytest.approx(0.1)
    assert binom.cdf(round(200 * value), 200, high) == pytest.approx(0.1)


@pytest.mark.parametrize(("task", "name"), [(task, name) for task, table in metrics.METRICS.items() for name in table])
def test_replicates_are_the_metric_of_resampled_predictions(task, name):
    rng = np.random.default_rng(3)
    prediction, y = gaussians(rng.normal(size=(4, 60)), rng.random((4, 60)) + 0.1), rng.normal(size=60)
    if task in ("classification", "ordinal"):
        prediction, y = simulated(num=60, num_classes=2)
    if task in ("targets", "labels"):
        f, y = torch.from_numpy(rng.normal(size=(4, 60, 2))), rng.normal(size=(60, 2))
        of_labels = task == "labels"
        prediction, y = SeveralMixture(Bernoulli(logits=f) if of_labels else Normal(f, 1)), y > 0 if of_labels else y
    drawn, metric = rng.integers(60, size=60), metrics.METRICS[task][name]
    fast = metric.reduce(metric.summarise(prediction, y), np.bincount(drawn, minlength=60)[None].astype(float))
    assert fast[0] == pytest.approx(metric(prediction[torch.tensor(drawn)], y[drawn]), rel=1e-6, abs=1e-7)


def test_evaluate_gives_every_metric_an_interval_around_its_value():
    prediction, y = simulated(num_classes=2, num=800)
    result = metrics.evaluate(prediction, y)
    assert list(result) == list(metrics.METRICS["classification"]) and result.notes == {}
    for name, (value, low, high) in result.items():
        assert value == getattr(metrics, name)(prediction, y)
        assert 0 <= low < value < high, name  # the ECEs too: their raw replicates lie above the value
    assert result == metrics.evaluate(prediction, y) != metrics.evaluate(prediction, y, seed=1)
    flat = json.loads(json.dumps(result.flat(), allow_nan=False))
    assert (flat["nll"], flat["nll_low"], flat["nll_high"]) == result["nll"] and len(flat) == 3 * len(result)


def test_paired_difference_is_sharper_than_two_intervals():
    (a, y), (b, _) = simulated(num=1000), simulated(num=1000, sharpen=1.6)
    difference, alone = metrics.paired("nll", a, b, y), metrics.evaluate(a, y)["nll"]
    assert difference.value == pytest.approx(metrics.nll(a, y) - metrics.nll(b, y))
    assert difference.low < difference.value < difference.high < 0
    assert difference.high - difference.low < (alone.high - alone.low) / 2
    assert metrics.paired("ece", a, a, y) == (0, 0, 0)


def test_ood_auroc_by_hand_with_inside_and_outside_resampled_by_themselves():
    inside = classes([[[0.95, 0.05], [0.7, 0.3]], [[0.95, 0.05], [0.7, 0.3]]])  # no disagreement
    outside = classes([[[0.9, 0.1], [0.9, 0.1]], [[0.1, 0.9], [0.8, 0.2]]])  # means .5, .85
    # Entropy falls with max p: .95 < .85 < .7 < .5, so that the outside wins 2 + 1 of 4 pairs.
    assert metrics.ood_auroc(inside, outside) == 0.75
    assert metrics.ood_auroc(inside, outside, "max_prob") == 0.75
    assert metrics.ood_auroc(inside, outside, "mutual_information") == 1.0
    assert metrics.ood_auroc(outside, inside) == 0.25
    table = metrics.ood_table(inside, outside, bootstrap=50)
    assert list(table) == list(metrics.SCORES) and table["max_prob"].value == 0.75
    assert table["mutual_information"] == (1, 1, 1)
    point = metrics.ood_table(POINT, POINT, bootstrap=10)
    assert list(point) == ["total_entropy", "max_prob"] and "more than one draw" in point.notes["mutual_information"]
    # At float32, p = 1 − 1e-9 is 1; the sum of the others still tells it from 1 − 1e-12.
    certain = Prediction(Categorical(logits=torch.tensor([[[0.0, -27.6], [0.0, -20.7]]]), validate_args=False))
    for score in ("max_prob", "total_entropy"):
        assert metrics.ood_auroc(certain[:1], certain[1:], score) == 1.0
    unnormalised = classes(torch.rand(3, 50, 10, generator=torch.Generator().manual_seed(0)) + 0.1)
    np.testing.assert_allclose(mean_probs(unnormalised).sum(1), 1.0, rtol=1e-14)
    # Of two outside points one is above: both of a replicate are below in 1/4 (in 1/3, were all three shuffled).
    inside, outside = classes([[[0.7, 0.3]]]), classes([[[0.9, 0.1], [0.6, 0.4]]])
    table = metrics.ood_table(inside, outside, bootstrap=4000, confidence=1 - 2 * 0.29)
    assert table["max_prob"] == (0.5, 0.5, 0.5)


def test_mistakes_and_what_has_no_value_in_any_replicate_which_is_left_out_with_a_note():
    for call, message in (
        (lambda: metrics.paired("nl", TWO_DRAWS, TWO_DRAWS, Y), "did you mean 'nll'"),
        (lambda: metrics.paired("nll", TWO_DRAWS, gaussians([[0.0]], 1.0), Y), "a classification with a regression"),
        (lambda: metrics.distances(TWO_DRAWS, gaussians([[0.0]], 1.0)), "a classification with a regression"),
        (lambda: metrics.distances(TWO_DRAWS, TWO_DRAWS[:1]), "3 and 1 points"),
        (lambda: metrics.distances(*(gaussians([[v]], 1.0) for v in (math.nan, 0.0))), "not finite at row 0"),
        (lambda: metrics.rmse(TWO_DRAWS, Y), "belongs to regression"),
        (lambda: metrics.evaluate(TWO_DRAWS, Y, bootstrap=0), "at least 2 replicates"),
        (lambda: metrics.evaluate(gaussians([[0.0, math.nan]], [[1.0, 1.0]]), [0.0, 0.0]), "is NaN at row 1"),
        (lambda: metrics.ood_auroc(TWO_DRAWS, classes([[[math.nan, 0.5]]])), "outside prediction is NaN at row 0"),
    ):
        refuses(message, call)
    once = {"once": lambda counts: np.where((counts == 1).all(1), 1.0, np.nan), "mean": partial(mean_of, np.ones(40))}
    found = intervals(once, (40,), bootstrap=5)
    assert set(found) == {"mean"} == set(found.replicates) and found.notes.keys() == {"once"}
    refuses("'once' has no value on these rows, or on any of 5 resamples", found.__getitem__, "once")


def test_hand_numbers_regression():
    one = gaussians([[0.0, 1.0], [2.0, 1.0]], [[1.0, 2.0], [1.0, 2.0]])
    assert metrics.rmse(one, [2.0, 4.0]) == pytest.approx(math.sqrt((1 + 9) / 2))
    density = (norm.pdf([2, 4], [0, 1], [1, 2]) + norm.pdf([2, 4], [2, 1], [1, 2])) / 2
    assert metrics.nll(one, [2.0, 4.0]) == pytest.approx(-np.log(density).mean(), rel=1e-6)
    assert metrics.width_95(one[1:], [1.0]) == pytest.approx(2 * 2 * 1.959964, rel=1e-5)
    np.testing.assert_allclose(metrics.pit(one, [1.0, 3.0]), [0.5, 0.8413447], rtol=1e-6)
    # Φ(.67) = .7486 lies inside the central half, Φ(.68) = .7517 outside.
    assert metrics.coverage_50(gaussians([[0.0] * 4], [[1.0] * 4]), [0.67, 0.68, -0.67, -0.68]) == 0.5
    # 95 % of binomial counts of 100 at 0.9 lie in 84 … 95.
    words = [metrics.interval_verdict(0.9, held / 100, 100) for held in (83, 84, 95, 96)]
    assert words == ["too narrow", "about right", "about right", "too wide"]
    assert metrics.coverage_90(gaussians([[0.0] * 4], [[1.0] * 4]), [1.64, 1.65, -1.64, 0.0]) == 0.75
    assert metrics.coverage_95(gaussians([[0.0] * 4], [[1.0] * 4]), [1.95, 1.97, -1.97, -3.0]) == 0.25
