"""Pictures of a regression, maps, and training carry the right numbers, on axes with labels."""

import numpy as np
import pictures
import pytest
import torch
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from pictures import CATEGORICAL, LABELS, POINTS, clean_matplotlib, line_of, random, refuses  # noqa: F401 (a fixture)
from pyro.distributions import Bernoulli, Categorical, Normal

from bnn_pyro import metrics, plots
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.predictive import Prediction

NORMAL = Prediction(Normal(random(pictures.DRAWS, POINTS), 0.5 + random(pictures.DRAWS, POINTS, seed=1).abs()))


def two_features(task="classification"):
    x = random(40, 2)
    y = (x[:, 0] > 0).long() if task == "classification" else x[:, 0]
    schema = Schema(task, (2,), ("no", "yes") if task == "classification" else (), ("a", "b"), "answer",
                    x_shift=(10.0, -5.0), x_scale=(2.0, 4.0))  # fmt: skip
    return Dataset("two", schema, x[:30], y[:30], x[30:35], y[30:35], x[35:], y[35:])


def one_feature():
    schema = Schema("regression", (1,), (), ("age",), "height", x_shift=(30.0,), x_scale=(10.0,))
    x, y = torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([1.0, 2.0, 3.0])
    return Dataset("one", schema, x, y, x[:0], y[:0], x[:0], y[:0])


# -- axes --------------------------------------------------------------------------------------------------------------
def test_a_picture_draws_on_the_axes_that_it_is_given():
    page = Figure()
    ax = page.add_subplot()
    assert plots.selective_risk(CATEGORICAL, LABELS, ax=ax) is ax
    pair = Figure().subplots(2)
    assert list(plots.reliability(CATEGORICAL, LABELS, axes=pair)) == list(pair)
    refuses(r"draws on 2 axes, but 1 were given", plots.reliability, CATEGORICAL, LABELS, axes=[ax])
    refuses("belongs to classification, but this is a regression", plots.confusion_matrix, NORMAL, NORMAL.mean)


# -- where to predict --------------------------------------------------------------------------------------------------
def test_grid_is_a_mesh_in_raw_units_whose_points_are_standardised():
    data = two_features()
    grid = plots.grid(data, num=5, margin=0.5)
    raw = data.schema.unstandardise(grid.x).numpy()
    assert np.allclose(raw[:5, 0], grid.first, atol=1e-5), "the first feature runs along the columns"
    assert np.allclose(raw[::5, 1], grid.second, atol=1e-5), "the second along the rows"
    everything = grid.points(torch.cat([data.x_train, data.x_val, data.x_test]))
    low, high = everything.min(0), everything.max(0)
    assert np.allclose([grid.first[0], grid.second[0]], low - 0.5 * (high - low), atol=1e-4)
    assert np.allclose([grid.first[-1], grid.second[-1]], high + 0.5 * (high - low), atol=1e-4)


def test_grid_of_two_among_more_features_keeps_the_others_at_their_mean():
    x, y = random(10, 3), torch.zeros(10)
    schema = Schema("regression", (3,), (), ("a", "b", "c"), x_shift=(1.0, 2.0, 3.0), x_scale=(1.0, 1.0, 1.0))
    data = Dataset("three", schema, x, y, x, y, x, y)
    grid = plots.grid(data, ["c", "a"], num=3)
    assert grid.names == ("c", "a") and not grid.x[:, 1].any() and grid.x[:, 0].any()
    refuses("name the two features", plots.grid, data)
    refuses("unknown feature 'd'", plots.grid, data, ["a", "d"])
    refuses("one input feature", plots.line, data)


# -- training ----------------------------------------------------------------------------------------------------------
def test_training_curves_show_each_part_of_the_trace_and_the_epoch_that_was_kept():
    trace = {"epoch": [1.0, 2.0, 3.0], "elbo": [-9.0, -5.0, -4.0], "log_likelihood": [-5, -3, -3], "kl": [4, 2, 1]}
    objective, likelihood, kl, nll = plots.training_curves(trace | {"validation_nll": [0.5, 0.3, 0.3]})
    assert line_of(objective, "elbo").get_xydata().tolist() == [[1, -9], [2, -5], [3, -4]]
    assert line_of(likelihood, "log_likelihood").get_ydata().tolist() == [-5, -3, -3]
    assert line_of(kl, "kl").get_ydata().tolist() == [4, 2, 1] and kl.get_title() == "KL to the prior: 1 at last"
    assert line_of(nll, "lowest: epoch 2, 0.3000 nats").get_xydata().tolist() == [[2, 0.3]], "the first of equals"
    assert "nats" in objective.get_ylabel() and "nats" in nll.get_ylabel() and len(plots.training_curves(trace)) == 3


# -- regression --------------------------------------------------------------------------------------------------------
def edges_of(ax, label):
    """Lower and upper edge of a filled band, by ascending x."""
    band = next(c for c in ax.collections if str(c.get_label()).startswith(label))
    corners = band.get_paths()[0].vertices
    xs = np.unique(corners[:, 0])
    return np.array([[f(corners[corners[:, 0] == x, 1]) for x in xs] for f in (np.min, np.max)])


def test_band_edges_are_the_quantiles_of_the_mixture_and_of_the_mean_curves():
    """In whatever order the points come; a truth far away does not squeeze the bands."""
    x = plots.line(one_feature(), num=POINTS)
    shuffled = torch.randperm(POINTS, generator=torch.Generator().manual_seed(0))
    ax = plots.predictive_band(NORMAL[shuffled], x[shuffled], one_feature(), truth=lambda x: 1e6 * x)
    for share in (0.5, 0.8, 0.95):
        expected = NORMAL.quantile([(1 - share) / 2, (1 + share) / 2])
        assert np.allclose(edges_of(ax, f"{share:.0%} of new y"), expected, atol=1e-5)
    expected = np.quantile(NORMAL.locs.numpy(), [0.025, 0.975], axis=0)
    assert np.allclose(edges_of(ax, "95% of mean curves"), expected, atol=1e-5)
    assert np.allclose(line_of(ax, "median").get_ydata(), NORMAL.quantile(0.5)[0], atol=1e-5)
    assert line_of(ax, "training data").get_xydata().tolist() == [[20, 1], [30, 2], [40, 3]]  # raw units
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("age", "height") and ax.get_ylim()[1] < 100
    refuses("x has 3 points", plots.predictive_band, NORMAL, torch.zeros(3))


def test_predicted_observed_counts_the_hits_of_all_points(monkeypatch):
    prediction = Prediction(Normal(torch.zeros(1, 10), torch.ones(1, 10)))
    y = torch.tensor([0.0] * 8 + [1.95, 1.97])  # the interval ends at 1.96
    ax = plots.predicted_observed(prediction, y)
    misses = next(c for c in ax.containers if "misses" in c.get_label())
    assert misses[0].get_xdata().tolist() == pytest.approx([1.97])
    monkeypatch.setattr("bnn_pyro.plots.regression.MOST_POINTS", 5)
    assert "90.0% of 10 targets" in plots.predicted_observed(prediction, y).get_title(), "of all, not of those drawn"


def test_coverage_and_pit_are_those_of_the_metrics():
    y = NORMAL.mean + 0.8 * random(POINTS, seed=9)
    coverage, pit = plots.regression_calibration(NORMAL, y)
    curve = dict(np.round(line_of(coverage, "this prediction").get_xydata(), 6).tolist())
    for share, metric in ((0.5, metrics.coverage_50), (0.9, metrics.coverage_90), (0.95, metrics.coverage_95)):
        assert curve[share] == pytest.approx(metric(NORMAL, y), abs=1e-6)
    assert coverage.get_title() == "90% intervals hold 100.0%\nof 60 targets: too wide"
    expected, _ = np.histogram(metrics.pit(NORMAL, y), np.linspace(0, 1, 11))
    assert pictures.heights(pit.containers[0]).tolist() == expected.tolist()


# -- maps --------------------------------------------------------------------------------------------------------------
def mesh_of(ax):
    return next(c for c in ax.collections if isinstance(c, QuadMesh)).get_array()


def test_maps_show_the_probability_and_the_mutual_information_with_the_data():
    data = two_features()
    grid = plots.grid(data, num=9)
    prediction = Prediction(Bernoulli(logits=3 * grid.x[:, 0] + random(pictures.DRAWS, 81)))
    raw = data.schema.unstandardise(data.x_train)
    for draw, expected in (
        (plots.decision_boundary, prediction.mean[:, 1]),
        (plots.epistemic_map, prediction.epistemic),
    ):
        ax = draw(prediction, grid, data.x_train, data.y_train)
        assert np.allclose(mesh_of(ax), expected.reshape(9, 9), atol=1e-6)
        points = {c.get_label(): c.get_offsets() for c in ax.collections if c.get_label() in ("no", "yes")}
        assert np.allclose(points["yes"], raw[data.y_train == 1], atol=1e-5)
        assert np.allclose(points["no"], raw[data.y_train == 0], atol=1e-5)
    ax = plots.decision_boundary(Prediction(Bernoulli(logits=4 * grid.x[None, :, 0])), grid)
    assert "P(answer = yes)" in [a.get_ylabel() for a in ax.figure.axes]
    contour = next(c for c in ax.collections if type(c).__name__ == "QuadContourSet")
    x = np.concatenate([path.vertices[:, 0] for path in contour.get_paths()])
    assert np.allclose(x, 10.0, atol=0.3), "where both are as probable: standardised 0 is 10 in raw units"


def test_maps_of_more_classes_and_of_a_regression():
    data = two_features("regression")
    grid = plots.grid(data, num=5)
    prediction = Prediction(Normal(random(pictures.DRAWS, 25), torch.ones(pictures.DRAWS, 25)))
    ax = plots.epistemic_map(prediction, grid, data.x_test)
    assert np.allclose(mesh_of(ax), prediction.epistemic.sqrt().reshape(5, 5))
    three = Schema("classification", (2,), ("u", "v", "w"), ("a", "b"))
    grid = plots.Grid(grid.x, grid.first, grid.second, grid.features, three)
    prediction = Prediction(Categorical(logits=3 * random(pictures.DRAWS, 25, 3)))
    assert np.allclose(mesh_of(plots.decision_boundary(prediction, grid)), prediction.mean.amax(1).reshape(5, 5))
    refuses(r"predict at grid\.x", plots.decision_boundary, prediction[:7], grid)
