"""Pictures of classifications and of images: their artists hold the numbers of the metrics."""

import numpy as np
import pytest
import torch
from pictures import (
    CLASSES,
    DRAWS,
    POINTS,
    clean_matplotlib,  # noqa: F401 (a fixture of every test here)
    heights,
    legend_of,
    line_of,
    mixed,
    mostly_right,
    random,
)
from pyro.distributions import Categorical

from bnn_pyro import metrics, plots
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from bnn_pyro.predictive import Prediction


@pytest.fixture
def categorical():
    return mixed()


@pytest.fixture
def labels(categorical):
    return mostly_right(categorical)


def test_reliability_bars_are_the_accuracies_and_counts_of_the_metric(categorical, labels):
    table = metrics.reliability(categorical, labels)
    filled = table.count > 0
    top, bottom = plots.reliability(categorical, labels)
    many, few, gaps = top.containers
    bars = {round(bar.get_x(), 6): bar.get_height() for bar in [*many, *few]}
    assert list(dict(sorted(bars.items())).values()) == pytest.approx(table.accuracy[filled])
    assert heights(gaps) == pytest.approx((table.confidence - table.accuracy)[filled])
    assert sorted(heights([*bottom.containers[0], *bottom.containers[1]])) == sorted(table.count[filled])
    assert len(few) == ((table.count < 10) & filled).sum()
    ece, floor = metrics.ece(categorical, labels), metrics.ece_floor(categorical).mean
    assert top.get_title() == f"ECE {ece:.4f}, noise floor {floor:.4f}"


def test_confusion_matrix_has_the_counts(categorical, labels):
    ax = plots.confusion_matrix(categorical, labels, Schema("classification", (2,), ("a", "b", "c", "d")))
    shown = [int(t.get_text().replace("·", "0")) for t in ax.texts]
    expected = metrics.confusion_matrix(categorical, labels)
    assert shown == expected.ravel().tolist()
    shares = ax.collections[0].get_array()  # of the true class
    np.testing.assert_allclose(np.ravel(shares), (expected / expected.sum(1, keepdims=True)).ravel())
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b", "c", "d"]
    assert ax.get_title() == "12 of 60 wrong"


def test_confidence_histogram_divides_right_from_wrong(categorical, labels):
    ax = plots.confidence_histogram(categorical, labels)
    right, wrong = ax.containers
    assert (heights(right).sum(), heights(wrong).sum()) == (48, 12)
    assert line_of(ax, "accuracy").get_xdata()[0] == pytest.approx(0.8)
    assert line_of(ax, "mean confidence").get_xdata()[0] == pytest.approx(categorical.mean.amax(1).mean().item())


def test_softmax_draws_shows_the_means_and_the_decomposition(categorical, labels):
    axes = plots.softmax_draws(categorical, [5, 2], labels)
    for ax, row in zip(axes, (5, 2), strict=True):
        assert heights(ax.containers[0]) == pytest.approx(categorical.mean[row].numpy(), abs=1e-6)
        total, epistemic = categorical.total[row], categorical.epistemic[row]
        assert f"total {total:.2f} = {epistemic:.2f} epist. +" in ax.get_title()
        assert f"point {row}, true: {labels[row]}" in ax.get_title()
    few = plots.softmax_draws(categorical, 5, most=2)[0]
    top = categorical.mean[5].topk(2).indices.sort().values
    assert [t.get_text() for t in few.get_xticklabels()] == [str(k.item()) for k in top]
    with pytest.raises(UserError, match="rows 0 to 59"):
        plots.softmax_draws(categorical, 60)


def test_selective_risk_lies_between_the_oracle_and_a_random_order(categorical, labels):
    ax = plots.selective_risk(categorical, labels)
    coverage, risk = metrics.selective_risk(categorical, labels)
    assert np.allclose(line_of(ax, "least entropy").get_xydata(), np.stack([coverage, risk], 1))
    oracle = line_of(ax, "oracle").get_ydata()
    assert oracle[47] == 0 and oracle[48] == pytest.approx(1 / 49) and oracle[-1] == pytest.approx(0.2)
    assert line_of(ax, "random").get_ydata() == [pytest.approx(0.2)] * 2
    assert ax.get_title() == f"AURC {metrics.aurc(categorical, labels):.4f}"


# -- images and elsewhere ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("by", ["total", "epistemic", "aleatoric"])
def test_images_come_in_the_order_of_their_uncertainty(categorical, labels, by):
    images = torch.arange(POINTS * 1.0)[:, None, None, None].expand(-1, 1, 2, 2)  # every pixel says which image it is
    axes = plots.uncertain_images(categorical, images, labels, num=5, by=by)
    expected = getattr(categorical, by).argsort(descending=True)[:5]
    assert [int(image.images[0].get_array()[0, 0]) for image, _ in axes] == expected.tolist()
    for (_, bars), row in zip(axes, expected.tolist(), strict=True):
        mean = categorical.mean[row]
        assert bars.lines[0].get_ydata() == pytest.approx(mean.numpy())
        draws = np.array(bars.collections[0].get_segments())  # (S, K, 2)
        assert draws[..., 1] == pytest.approx(categorical.probs[:, row].numpy())
        first, second = bars.get_title("right").split("\n")
        assert first == f"true {labels[row]}, most probable {mean.argmax()} ({mean.max():.0%})"
        parts = [getattr(categorical, u)[row] for u in ("total", "epistemic", "aleatoric")]
        assert second == "total {:.2f} = {:.2f} epist. + {:.2f} aleat. nats".format(*parts)
        (hatched,) = [patch for patch in bars.patches if patch.get_hatch()]
        assert hatched.get_x() + hatched.get_width() / 2 == pytest.approx(labels[row].item())


def test_images_can_have_colours_and_other_shapes_are_refused(categorical):
    axes = plots.uncertain_images(categorical, random(POINTS, 3, 4, 5), num=2)
    assert axes[0][0].images[0].get_array().shape == (4, 5, 3)
    with pytest.raises(UserError, match="60 images"):
        plots.uncertain_images(categorical, random(POINTS, 8))
    with pytest.raises(UserError, match="did you mean 'epistemic'"):
        plots.uncertain_images(categorical, random(POINTS, 1, 2, 2), by="epistemc")


def test_ood_bars_set_the_bayesian_mean_beside_the_deterministic_probabilities(categorical):
    point = Prediction(Categorical(logits=random(1, POINTS, CLASSES)))
    axes = plots.ood_bars(categorical, point, random(POINTS, 1, 3, 3), num=2, names=["left", "right"])
    for row, (image, bars) in enumerate(axes):
        assert heights(bars.containers[0]) == pytest.approx(categorical.mean[row].numpy())
        assert heights(bars.containers[1]) == pytest.approx(point.mean[row].numpy())
        assert f"{categorical.total[row]:.2f} nats Bayesian" in bars.get_title()
        assert f"{point.total[row]:.2f} nats deterministic" in bars.get_title()
        assert image.get_title() == ("left", "right")[row]
    with pytest.raises(UserError, match="the same images"):
        plots.ood_bars(categorical, point[:3], random(POINTS, 1, 3, 3))


def test_entropy_histograms_hold_every_point_and_tell_the_auroc(categorical):
    outside = Prediction(Categorical(logits=0.1 * random(DRAWS, 30, CLASSES, seed=3)))
    ax = plots.entropy_histograms(categorical, {"noise": outside}, bins=7)
    inner, outer = (patch.get_data() for patch in ax.patches)
    expected, _ = np.histogram(categorical.total, outer.edges)
    assert inner.values == pytest.approx(expected / POINTS) and inner.values.sum() == pytest.approx(1)
    assert outer.values.sum() == pytest.approx(1)
    assert f"AUROC {metrics.ood_auroc(categorical, outside):.3f}" in legend_of(ax)[1]
    with pytest.raises(UserError, match="unknown uncertainty score 'entropy'"):
        plots.entropy_histograms(categorical, outside, score="entropy")
