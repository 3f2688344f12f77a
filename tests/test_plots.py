"""Pictures carry the right numbers: of predictions, ensembles, maps and checks."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conjugate import dataset, model_of
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from pyro.distributions import Bernoulli, Categorical, Normal
from refused import refuses
from scipy.stats import norm
from test_metrics import classes

import bnn_pyro as bp
from bnn_pyro import metrics, plots
from bnn_pyro.checks import Finding
from bnn_pyro.reports.page import Picture

pytestmark = pytest.mark.usefixtures("clean_matplotlib")
DRAWS, POINTS, CLASSES = 20, 60, 4
SCHEMA = bp.Schema("classification", (2,), ("a", "b", "c"), ("first", "second"))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


NORMAL = bp.Prediction(Normal(random(DRAWS, POINTS), 0.5 + random(DRAWS, POINTS, seed=1).abs()))
#: Draws of logits around common ones, (S, B, K), and labels (B,), every fifth not the most probable one.
CATEGORICAL = bp.Prediction(Categorical(logits=2 * random(1, POINTS, CLASSES) + random(DRAWS, POINTS, CLASSES, seed=1)))
LABELS = torch.where(torch.arange(POINTS) % 5 == 0, 1, 0).add(CATEGORICAL.mean.argmax(1)) % CLASSES


def chains(weight, bias=None):
    """A posterior of a linear classifier of two features; weight (C, D, 3, 2)."""
    bias = torch.zeros(*weight.shape[:2], 3) if bias is None else bias
    sites = {"layers.0.weight": weight, "layers.0.bias": bias}
    return bp.Posterior(model_of(bp.MeanField(hidden=()), SCHEMA), SCHEMA, chains=sites)


def heights(container):
    return np.array([bar.get_height() for bar in container])


def line_of(ax, label):
    return next(line for line in ax.lines if line.get_label().startswith(label))


def two_features(task="classification"):
    x = random(40, 2)
    y = (x[:, 0] > 0).long() if task == "classification" else x[:, 0]
    schema = bp.Schema(task, (2,), ("no", "yes") if task == "classification" else (), ("a", "b"), "answer",
                    x_shift=(10.0, -5.0), x_scale=(2.0, 4.0))  # fmt: skip
    return bp.Dataset("two", schema, x[:30], y[:30], x[30:35], y[30:35], x[35:], y[35:])


def one_feature():
    schema = bp.Schema("regression", (1,), (), ("age",), "height", x_shift=(30.0,), x_scale=(10.0,))
    return dataset(torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([1.0, 2.0, 3.0]), schema)


def edges_of(ax, label):
    """Lower and upper edge of a filled band, by ascending x."""
    corners = next(c for c in ax.collections if str(c.get_label()).startswith(label)).get_paths()[0].vertices
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
    refuses("x has 3 points", plots.predictive_band, NORMAL, torch.zeros(3, 1), one_feature())


def test_hits_coverage_and_pit_are_those_of_the_metrics_and_of_all_points(monkeypatch):
    prediction = bp.Prediction(Normal(torch.zeros(1, 10), torch.ones(1, 10)))
    y = torch.tensor([0.0] * 8 + [1.95, 1.97])  # the interval ends at 1.96
    misses = next(c for c in plots.predicted_observed(prediction, y).containers if "outside" in c.get_label())
    assert misses[0].get_xdata().tolist() == pytest.approx([1.97])
    monkeypatch.setattr("bnn_pyro.plots.regression.MAX_POINTS", 5)
    assert "90.0% of 10 targets" in plots.predicted_observed(prediction, y).get_title(), "of all, not of those drawn"
    refuses("classes have no order", plots.regression_calibration, CATEGORICAL, LABELS)
    y = NORMAL.mean + 0.8 * random(POINTS, seed=9)
    coverage, pit = plots.regression_calibration(NORMAL, y)
    curve = dict(np.round(line_of(coverage, "this prediction").get_xydata(), 6).tolist())
    for share, metric in ((0.5, metrics.coverage_50), (0.9, metrics.coverage_90), (0.95, metrics.coverage_95)):
        assert curve[share] == pytest.approx(metric(NORMAL, y), abs=1e-6)
    assert coverage.get_title() == "90% intervals hold 100.0%\nof 60 targets: too wide"
    expected, _ = np.histogram(metrics.pit(NORMAL, y), np.linspace(0, 1, 11))
    assert heights(pit.containers[0]).tolist() == expected.tolist()


@pytest.mark.parametrize("names", [("negative", "positive"), ("a" * 40, "b"), [f"class {k}" for k in range(25)]])
def test_labels_of_a_confusion_matrix_are_inside_the_figure(names):
    labels = torch.arange(100) % len(names)
    prediction = bp.Prediction(Categorical(logits=torch.eye(len(names))[labels][None]))
    ax = plots.confusion_matrix(prediction, labels, bp.Schema("classification", (2,), tuple(names)))
    ax.figure.canvas.draw()
    page, box = ax.figure.bbox, ax.get_tightbbox()
    assert box.x0 >= 0 and box.y0 >= 0 and box.y1 <= page.y1 and ax.get_window_extent().width > 0.3 * page.width


def test_dollars_of_names_are_drawn_as_they_are_and_powers_of_ten_and_the_users_formulas_as_mathematics():
    names = ("$0_$10k", "$10k_$20k", "$_$", "\\frac{$ }$")
    figure, (first, second) = plt.subplots(1, 2, layout="constrained")
    first.set_title("$x^2$")
    second.set_xticks([0, 1], ["$a$", "$b$"])
    plots.confusion_matrix(CATEGORICAL, LABELS, bp.Schema("classification", (2,), names), ax=second)
    sure = bp.Prediction(Categorical(logits=1e3 * CATEGORICAL.mean.log()[None]))
    ax = plots.entropy_histograms(sure, {"$_$": CATEGORICAL}, name="$x$ and $y$", ax=plt.figure().add_subplot())
    for page in (figure, ax.figure):
        page.draw_without_rendering()
    labels = [*second.get_xticklabels(), *second.get_yticklabels(), *ax.get_legend().get_texts()]
    assert [text.get_text() for text in labels[:4]] == list(names)
    assert len(labels) == 10 and not any(text.get_parse_math() for text in labels)
    power = ax.get_yticklabels()[0]
    assert ax.get_yscale() == "log" and "$" in power.get_text() and power.get_parse_math()
    assert first.title.get_parse_math()


def test_letters_that_the_font_lacks_are_said_by_no_warnings(recwarn):
    schema = bp.Schema("classification", (2,), ("日本", "b", "c", "d"))
    assert Picture.of("report", lambda: plots.confusion_matrix(CATEGORICAL, LABELS, schema), "title", "sentence")
    assert not recwarn


def test_without_ax_a_plot_is_on_pyplots_current_figure_where_that_is_empty(tmp_path):
    def inked():
        plt.savefig(tmp_path / "page.png")
        return plt.imread(tmp_path / "page.png")[..., :3].min() < 0.5

    Picture.of("report", lambda: plots.confusion_matrix(CATEGORICAL, LABELS), "title", "sentence")
    assert not plt.get_fignums(), "the figures of reports stay outside"
    plots.confusion_matrix(CATEGORICAL, LABELS)
    assert inked() and plt.get_fignums() == [1]
    plots.reliability(CATEGORICAL, LABELS)
    assert inked() and plt.get_fignums() == [1, 2], "not over the one before"
    plt.figure(figsize=(4, 3))
    plt.subplot(1, 2, 1)
    first = plots.selective_risk(CATEGORICAL, LABELS)
    plt.subplot(1, 2, 2)
    second = plots.confidence_histogram(CATEGORICAL, LABELS)
    assert first.figure is second.figure is plt.gcf() and plt.get_fignums() == [1, 2, 3] and inked()


def mesh_of(ax):
    return next(c for c in ax.collections if isinstance(c, QuadMesh))


def test_maps_show_the_probability_and_the_mutual_information_with_the_data():
    data = two_features()
    grid = plots.grid(data, num=9)
    prediction = bp.Prediction(Bernoulli(logits=3 * grid.x[:, 0] + random(DRAWS, 81)))
    raw = data.schema.unstandardise(data.x_train)
    maps = {plots.decision_boundary: prediction.mean[:, 1], plots.epistemic_map: prediction.epistemic}
    for draw, expected in maps.items():
        ax = draw(prediction, grid, data.x_train, data.y_train)
        assert np.allclose(mesh_of(ax).get_array(), expected.reshape(9, 9), atol=1e-6)
        points = {c.get_label(): c.get_offsets() for c in ax.collections if c.get_label() in ("no", "yes")}
        assert np.allclose(points["yes"], raw[data.y_train == 1], atol=1e-5)
        assert np.allclose(points["no"], raw[data.y_train == 0], atol=1e-5)
    ax = plots.decision_boundary(bp.Prediction(Bernoulli(logits=4 * grid.x[None, :, 0])), grid)
    assert "P(answer = yes)" in [a.get_ylabel() for a in ax.figure.axes]
    contour = next(c for c in ax.collections if type(c).__name__ == "QuadContourSet")
    x = np.concatenate([path.vertices[:, 0] for path in contour.get_paths()])
    assert np.allclose(x, 10.0, atol=0.3), "where both are as probable: standardised 0 is 10 in raw units"


def test_maps_of_more_classes_and_of_a_regression():
    grid = plots.grid(two_features("regression"), num=5)
    prediction = bp.Prediction(Normal(random(DRAWS, 25), torch.ones(DRAWS, 25)))
    ax, other = Figure().subplots(1, 2)
    shown = mesh_of(plots.epistemic_map(prediction, grid, ax=ax)).get_array()
    assert np.allclose(shown, prediction.epistemic.sqrt().reshape(5, 5))
    plots.epistemic_map(bp.Prediction(Normal(3 * prediction.locs, torch.ones(()))), grid, ax=other)
    most = 3 * prediction.epistemic.sqrt().max().item()
    for part in (ax, other):
        assert mesh_of(part).get_clim() == pytest.approx((0, most)), "one range in one figure"
    grid = plots.Grid(grid.x, grid.first, grid.second, bp.Schema("classification", (2,), ("u", "v", "w"), ("a", "b")))
    prediction = bp.Prediction(Categorical(logits=3 * random(DRAWS, 25, 3)))
    mesh = mesh_of(plots.decision_boundary(prediction, grid))
    assert np.allclose(mesh.get_array(), prediction.mean.amax(1).reshape(5, 5)) and mesh.get_clim() == (0, 1)
    refuses(r"predict at grid\.x", plots.decision_boundary, prediction[:7], grid)


def test_z_scores():
    names, z = ("mean of a", "mean of b (sd)", "variance of c"), (-1.0, 20.0, np.nan)
    ax = plots.standard_errors([Finding(name, 1.0, z=own) for name, own in zip(names, z, strict=True)])
    bound = norm.isf(0.001 / 6)
    assert line_of(ax, "mean").get_xydata().tolist() == [[1, -1], [2, 20]]
    assert line_of(ax, "variance").get_ydata() == pytest.approx([0.97 * 6 * bound])
    assert {text.get_text() for text in ax.texts} == {"mean of b", "variance of c"}
    assert ax.get_title() == f"2 of 3 beyond ±{bound:.1f} (shaded)"


def test_reliability_bars_are_the_accuracies_and_counts_of_the_metric():
    table = metrics.reliability(CATEGORICAL, LABELS)
    filled = table.count > 0
    top, bottom = plots.reliability(CATEGORICAL, LABELS)
    bars, gaps = top.containers
    assert heights(bars) == pytest.approx(table.accuracy[filled])
    assert heights(gaps) == pytest.approx((table.confidence - table.accuracy)[filled])
    assert heights(bottom.containers[0]).tolist() == table.count[filled].tolist()
    ece, floor = metrics.ece(CATEGORICAL, LABELS), metrics.ece_floor(CATEGORICAL).mean
    assert top.get_title() == f"ECE {ece:.4f}, noise floor {floor:.4f}"
    second = classes([[[0.9, 0.1]] * 20 + [[0.3, 0.7]] * 10])  # of two classes: P(the second)
    y = torch.tensor([1] * 5 + [0] * 15 + [1] * 6 + [0] * 4)
    assert heights(plots.reliability(second, y)[0].containers[0]) == pytest.approx([0.25, 0.6])


def test_confusion_matrix_has_the_counts_and_selective_risk_lies_between_oracle_and_random_order():
    ax = plots.selective_risk(CATEGORICAL, LABELS)
    coverage, risk = metrics.selective_risk(CATEGORICAL, LABELS)
    assert np.allclose(line_of(ax, "least entropy").get_xydata(), np.stack([coverage, risk], 1))
    oracle = line_of(ax, "oracle").get_ydata()
    assert oracle[47] == 0 and oracle[48] == pytest.approx(1 / 49) and oracle[-1] == pytest.approx(0.2)
    assert line_of(ax, "random").get_ydata() == [pytest.approx(0.2)] * 2
    ax = plots.confusion_matrix(CATEGORICAL, LABELS, bp.Schema("classification", (2,), ("a", "b", "c", "d")))
    shown = [int(t.get_text() or 0) for t in ax.texts]
    expected = metrics.confusion_matrix(CATEGORICAL, LABELS)
    assert shown == expected.ravel().tolist()
    shares = expected / expected.sum(1, keepdims=True) * (2 * np.eye(4) - 1)  # of the true class; wrong ones negative
    np.testing.assert_allclose(np.ravel(ax.collections[0].get_array()), shares.ravel())


def test_images_beside_the_ten_most_probable_of_many_classes_with_long_names():
    names = [f"a class called {k}" for k in range(30)]
    of = bp.Prediction(Categorical(logits=random(DRAWS, 4, 30))), bp.Prediction(Categorical(logits=random(1, 4, 30)))
    schema, x = bp.Schema("classification", (1, 3, 3), tuple(names)), random(4, 1, 3, 3)
    for axes, mean in ((plots.uncertain_images(of[0], x, None, schema, num=1), of[0].mean),
                       (plots.ood_bars(*of, x, schema), of[0].mean + of[1].mean)):  # fmt: skip
        row = 0 if len(axes) == 4 else of[0].total.argmax()
        ticks = axes[0, 1].get_xticklabels()
        assert [t.get_text() for t in ticks] == [f"a class…{names[k][-6:]}" for k in
                                                 sorted(mean[row].topk(10).indices.tolist())]  # fmt: skip
        assert {t.get_rotation() for t in ticks} == {90}
    assert "; 2 without" in plots.convergence([1.0, np.nan, np.inf], [400, 500, 1])[0].get_title()


@pytest.mark.parametrize("numbers", [2**24, 40])
def test_an_ensemble_grows_by_the_stored_draws_in_their_order(numbers, monkeypatch):
    monkeypatch.setattr("bnn_pyro.diagnostics.draws.BLOCK", numbers)  # 40: two rows at a time
    posterior = chains(random(2, 3, 3, 2), random(2, 3, 3, seed=1))
    x, y = random(7, 2, seed=2), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    ax = plots.growing_ensemble(posterior, x, y)
    outputs = x @ posterior.chains["layers.0.weight"].mT + posterior.chains["layers.0.bias"].unsqueeze(-2)
    p = outputs.softmax(-1)[..., torch.arange(7), y]  # of the true classes, (C, D, B)
    curves = {"ensemble of 2 chains": (0, 1), "each of 2 chains": (0,), "_chain 1": (1,)}
    for label, members in curves.items():
        expected = [-p[list(members), :s].mean((0, 1)).log().mean().item() for s in (1, 2, 3)]
        assert list(line_of(ax, label).get_ydata()) == pytest.approx(expected, rel=1e-5)
    low, middle, high = np.quantile(-p.log().mean(-1), (0.16, 0.5, 0.84))
    assert f"{middle:.4f} ({low:.4f} to {high:.4f})" in line_of(ax, "a single draw").get_label()


def test_the_lowest_validation_nll_is_seen_and_named(clean_matplotlib):
    """Also in a steep start that is cut off; a sampler's log joint density is no objective."""
    falls = [*np.linspace(9, 0.4, 20), 0.1, *np.linspace(0.5, 0.6, 79)]
    axes = plots.training_curves({"log_joint": [*np.arange(100.0)], "validation_nll": falls})
    assert axes[-1].get_ylim()[0] < 0.1 and axes[-1].get_legend_handles_labels()[1][0] == "validation rows"
    axes = plots.training_curves({"log_joint": falls, "validation_nll": falls, "draws": [*np.arange(100.0)]})
    assert "higher" not in axes[0].get_title() and axes[-1].get_title().startswith("NLL of the draws so far")
