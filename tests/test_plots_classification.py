"""Pictures of classifications, of images, of ensembles and of weights: their artists hold hand-computed numbers."""

import math

import numpy as np
import pictures
import pytest
import torch
from pictures import CATEGORICAL, LABELS, chains, clean_matplotlib, line_of, random, refuses  # noqa: F401 (a fixture)
from pyro.distributions import Categorical

from bnn_pyro import metrics, plots
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.predictive import Prediction


# -- classes -----------------------------------------------------------------------------------------------------------
def test_reliability_bars_are_the_accuracies_and_counts_of_the_metric():
    table = metrics.reliability(CATEGORICAL, LABELS)
    filled = table.count > 0
    top, bottom = plots.reliability(CATEGORICAL, LABELS)
    bars, gaps = top.containers
    assert pictures.heights(bars) == pytest.approx(table.accuracy[filled])
    assert pictures.heights(gaps) == pytest.approx((table.confidence - table.accuracy)[filled])
    assert pictures.heights(bottom.containers[0]).tolist() == table.count[filled].tolist()
    ece, floor = metrics.ece(CATEGORICAL, LABELS), metrics.ece_floor(CATEGORICAL).mean
    assert top.get_title() == f"ECE {ece:.4f}, noise floor {floor:.4f}"


def test_reliability_of_two_classes_is_of_the_second_ones_probability():
    prediction = pictures.stated([[0.9, 0.1]] * 20 + [[0.3, 0.7]] * 10)
    y = torch.tensor([1] * 5 + [0] * 15 + [1] * 6 + [0] * 4)
    top, bottom = plots.reliability(prediction, y, Schema("classification", (2,), ("no", "yes")))
    assert pictures.heights(top.containers[0]) == pytest.approx([0.25, 0.6])
    assert (top.get_ylabel(), bottom.get_xlabel()) == ("share of yes", "P(yes)")


def test_confusion_matrix_has_the_counts():
    ax = plots.confusion_matrix(CATEGORICAL, LABELS, Schema("classification", (2,), ("a", "b", "c", "d")))
    shown = [int(t.get_text() or 0) for t in ax.texts]
    expected = metrics.confusion_matrix(CATEGORICAL, LABELS)
    assert shown == expected.ravel().tolist()
    shares = expected / expected.sum(1, keepdims=True) * (2 * np.eye(4) - 1)  # of the true class; wrong ones negative
    np.testing.assert_allclose(np.ravel(ax.collections[0].get_array()), shares.ravel())


def test_softmax_draws_shows_the_means_and_the_decomposition(monkeypatch):
    axes = plots.softmax_draws(CATEGORICAL, [5, 2], LABELS)
    for ax, row in zip(axes, (5, 2), strict=True):
        assert pictures.heights(ax.containers[0]) == pytest.approx(CATEGORICAL.mean[row].numpy(), abs=1e-6)
        total, epistemic = CATEGORICAL.total[row], CATEGORICAL.epistemic[row]
        assert f"total {total:.2f} = {epistemic:.2f} epist. +" in ax.get_title()
        assert f"point {row}, true: {LABELS[row]}" in ax.get_title()
    monkeypatch.setattr("bnn_pyro.plots.points.MOST_CLASSES", 2)
    few = plots.softmax_draws(CATEGORICAL, 5, index=torch.arange(60) + 100)[0]
    top = CATEGORICAL.mean[5].topk(2).indices.sort().values
    assert few.get_title().startswith("row 105\n") and [t.get_text() for t in few.get_xticklabels()] == [
        str(k.item()) for k in top
    ]
    refuses("rows 0 to 59", plots.softmax_draws, CATEGORICAL, 60)


def test_selective_risk_lies_between_the_oracle_and_a_random_order():
    ax = plots.selective_risk(CATEGORICAL, LABELS)
    coverage, risk = metrics.selective_risk(CATEGORICAL, LABELS)
    assert np.allclose(line_of(ax, "least entropy").get_xydata(), np.stack([coverage, risk], 1))
    oracle = line_of(ax, "oracle").get_ydata()
    assert oracle[47] == 0 and oracle[48] == pytest.approx(1 / 49) and oracle[-1] == pytest.approx(0.2)
    assert line_of(ax, "random").get_ydata() == [pytest.approx(0.2)] * 2


def test_entropy_histograms_hold_every_point_and_tell_the_auroc():
    outside = Prediction(Categorical(logits=0.1 * random(pictures.DRAWS, 30, pictures.CLASSES, seed=3)))
    ax = plots.entropy_histograms(CATEGORICAL, {"noise": outside})
    inner, outer = (patch.get_data() for patch in ax.patches)
    expected, _ = np.histogram(metrics.SCORES["total_entropy"](CATEGORICAL), outer.edges)
    assert inner.values == pytest.approx(expected / pictures.POINTS) and outer.values.sum() == pytest.approx(1)
    assert f"AUROC {metrics.ood_auroc(CATEGORICAL, outside):.3f}" in pictures.legend_of(ax)[1]
    refuses("1 to 4 out-of-distribution sets, got 0", plots.entropy_histograms, CATEGORICAL, {})


# -- images ------------------------------------------------------------------------------------------------------------
def test_images_come_in_the_order_of_their_uncertainty():
    images = torch.arange(pictures.POINTS * 1.0)[:, None, None, None].expand(-1, 1, 2, 2)  # pixels say which it is
    axes = plots.uncertain_images(CATEGORICAL, images, LABELS, num=5, by="epistemic")
    expected = CATEGORICAL.epistemic.argsort(descending=True)[:5].tolist()
    assert [int(image.images[0].get_array()[0, 0]) for image, _ in axes] == expected
    for (_, bars), row in zip(axes, expected, strict=True):
        mean = CATEGORICAL.mean[row]
        assert pictures.heights(bars.containers[0]) == pytest.approx(mean.numpy())
        assert f"{mean.argmax()} ({mean.max():.0%}), true: {LABELS[row]}" in bars.get_title("right")


# -- the growing ensemble ----------------------------------------------------------------------------------------------
def by_hand(posterior, x, y, picks):
    """NLL of an ensemble of some (chain, draw)s."""
    total = 0.0
    for row, label in zip(x, y.tolist(), strict=True):
        probs = [
            torch.softmax(posterior.chains["layers.0.weight"][c, d] @ row + posterior.chains["layers.0.bias"][c, d], 0)
            for c, d in picks
        ]
        total -= math.log(sum(p[label].item() for p in probs) / len(probs))
    return total / len(x)


@pytest.mark.parametrize("numbers", [2**24, 40])
def test_an_ensemble_grows_by_the_stored_draws_in_their_order(numbers, monkeypatch):
    monkeypatch.setattr("bnn_pyro.plots.training.NUMBERS", numbers)  # 40: two rows at a time
    posterior = chains(random(2, 3, 3, 2), random(2, 3, 3, seed=1))
    x, y = random(7, 2, seed=2), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    ax = plots.growing_ensemble(posterior, x, y)
    together = line_of(ax, "ensemble of 2 chains").get_data()
    expected = [by_hand(posterior, x, y, [(c, d) for c in range(2) for d in range(s)]) for s in (1, 2, 3)]
    assert list(together[0]) == [2, 4, 6] and list(together[1]) == pytest.approx(expected, rel=1e-5)
    for c, curve in enumerate((line_of(ax, "each of 2 chains"), line_of(ax, "_chain 1"))):
        alone = [by_hand(posterior, x, y, [(c, d) for d in range(s)]) for s in (1, 2, 3)]
        assert list(curve.get_ydata()) == pytest.approx(alone, rel=1e-5)
    single = np.array([by_hand(posterior, x, y, [(c, d)]) for c in range(2) for d in range(3)])
    low, middle, high = np.quantile(single, (0.16, 0.5, 0.84))
    assert line_of(ax, "a single draw").get_ydata()[0] == pytest.approx(middle, rel=1e-5)
    assert f"{middle:.4f} ({low:.4f} to {high:.4f})" in line_of(ax, "a single draw").get_label()
    members = chains(random(3, 1, 3, 2))  # one draw a chain: it grows by its chains
    curve = line_of(plots.growing_ensemble(members, x, y), "ensemble")
    expected = [by_hand(members, x, y, [(c, 0) for c in range(s)]) for s in (1, 2, 3)]
    assert list(curve.get_xdata()) == [1, 2, 3] and list(curve.get_ydata()) == pytest.approx(expected, rel=1e-5)


# -- methods side by side ----------------------------------------------------------------------------------------------
METHODS = {
    "SVI": pictures.stated([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1]], [[0.6, 0.2, 0.2], [0.2, 0.5, 0.3]]),
    "MAP": pictures.stated([[0.7, 0.1, 0.2], [0.4, 0.5, 0.1]]),
}


def test_methods_are_drawn_side_by_side():
    images, y = torch.arange(8.0).reshape(2, 1, 2, 2), torch.tensor([0, 2])
    axes = plots.method_predictions(METHODS, 1, x=images, y=y, schema=pictures.SCHEMA)
    assert axes[0].images[0].get_array().ravel().tolist() == [4, 5, 6, 7] and axes[0].get_title() == "point 1, true: c"
    means = {"SVI": [0.4, 0.4, 0.2], "MAP": [0.4, 0.5, 0.1]}
    for ax, (name, mean) in zip(axes[1:], means.items(), strict=True):
        assert [bar.get_height() for bar in ax.containers[0]] == pytest.approx(mean)
        assert ax.get_title().startswith(f"{name}\ntotal {METHODS[name].total[1]:.2f} = ") and "nats" in ax.get_title()
    medians = [line.get_ydata()[0] for line in axes[1].lines if line.get_color() == "0.1"]
    assert medians == pytest.approx([0.4, 0.4, 0.2]) and not axes[2].lines, "a box of one draw is none"
    few = METHODS | {"MAP": METHODS["MAP"][:1]}
    refuses("'SVI' predicts 2 points and 3 classes, 'MAP' 1 and 3", plots.method_predictions, few, 0)
    refuses("row must be 0 to 1, got 2", plots.method_predictions, METHODS, 2)
    refuses("no prediction", plots.method_predictions, {}, 0)


# -- weights -----------------------------------------------------------------------------------------------------------
def test_weights_are_those_of_the_largest_disagreement():
    """By Wasserstein-2 in units of the mean σ: 3 at [2, 0] (a shift), 2·(2 − 1)/(2 + 1) at [0, 1] (a scale)."""
    one = random(1, 4000, 3, 2)
    one = (one - one.mean(1, keepdim=True)) / one.std(1, keepdim=True)
    one[..., 1, 1] *= 10
    other = one.clone()
    other[..., 1, 1] += 5  # half of its σ
    other[..., 2, 0] += 3
    other[..., 0, 1] *= 2
    both = {"SVI": chains(one), "NUTS": chains(other)}
    axes = plots.weight_posteriors(both, num=2, num_draws=4000)
    assert [ax.get_title() for ax in axes] == ["layers.0.weight[2, 0]", "layers.0.weight[0, 1]"]
    x, density = line_of(axes[0], "NUTS").get_xydata().T
    assert x[density.argmax()] == pytest.approx(3, abs=0.25) and np.trapezoid(density, x) == pytest.approx(1, abs=0.02)
    assert line_of(axes[1], "SVI").get_ydata().max() == pytest.approx(0.4, rel=0.08)  # of a standard Normal
    assert line_of(axes[1], "NUTS").get_ydata().max() == pytest.approx(0.2, rel=0.08)
    both["NUTS"] = pictures.guided(4)
    refuses(r"'layers.0.weight' has shape \(3, 2", plots.weight_posteriors, both)
