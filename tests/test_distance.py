"""Predictions by closed forms: their distances, intervals, expected losses, and what they rest on."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conjugate import correlated
from pyro.distributions import LogNormal, Normal, Poisson
from refused import refuses
from scipy import stats
from test_conformal import simulated
from test_metrics import classes, gaussians

import bnn_pyro as bp
from bnn_pyro.calibration import Conformal
from bnn_pyro.diagnostics.draws import as_chain
from bnn_pyro.metrics import distances
from bnn_pyro.parts.components import HeavyTailed
from bnn_pyro.parts.mixtures import Mixture

A = classes([[[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]], [[0.7, 0.1, 0.2], [0.1, 0.85, 0.05]]])
# means (0.6, 0.2, 0.2) and (0.5, 0.45, 0.05)
B = classes([[[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]]])


def test_distances_by_hand():
    """Shifted Normals: the shift. Normals of one mean: |σ − σ'| √(2/π). Mixtures: by their quantile functions."""
    apart = lambda p, q: distances(p, q)["wasserstein"].value  # noqa: E731
    a = gaussians([[0.0, 1.0, -2.0]], 0.5)
    assert apart(a, gaussians([[0.25, 0.25, 1.0]], 0.5)) == pytest.approx((0.25 + 0.75 + 3.0) / 3, rel=1e-3)
    spread = apart(gaussians([[3.0]], 1.0), gaussians([[3.0]], 2.5))
    assert spread == pytest.approx(1.5 * math.sqrt(2 / math.pi), rel=1e-3)
    levels = ((torch.arange(2000) + 0.5) / 2000).tolist()
    p, q = gaussians([[0.0], [2.0], [2.5]], [[0.3], [0.1], [1.0]]), gaussians([[0.5], [1.0]], [[0.4], [2.0]])
    exact = (p.quantile(levels) - q.quantile(levels)).abs().mean().item()
    assert apart(p, q) == pytest.approx(exact, rel=5e-3)
    wide = [[1000.0], *[[1.0]] * 49]  # the others are seen
    assert apart(*(gaussians([[loc]] * 50, wide) for loc in (0.0, 0.5))) == pytest.approx(0.5, rel=1e-2)
    far = [gaussians([*[[0.0]] * 9, [loc]], [[0.2]] * 10) for loc in (100.0, 100.3)]  # a second mode
    assert apart(*far) == pytest.approx(0.03, rel=1e-2)
    # Total variation: ½(0.4 + 0.3 + 0.1) = 0.4 and ½(0.1 + 0.15 + 0.05) = 0.15; the labels agree at one of two.
    values = {name: estimate.value for name, estimate in distances(A, B).items()}
    assert values == {"agreement": 0.5, "total_variation": pytest.approx(0.275)}
    assert distances(A, A) == {"agreement": (1.0, 1.0, 1.0), "total_variation": (0.0, 0.0, 0.0)}


# -- decisions ----------------------------------------------------------------------------------------------------
def test_predictive_intervals_sets_and_decisions():
    prediction, _ = simulated("regression", 30)
    low, high, _, kind, note = prediction.interval(0.8)
    torch.testing.assert_close(torch.stack([low, high]).float(), prediction.quantile([0.1, 0.9]).float())
    assert kind == "predictive" and "if the model is right" in note
    labels = classes([[[0.5, 0.3, 0.2], [0.9, 0.06, 0.04]]])
    assert labels.set(0.7).members.tolist() == [[True, True, False], [True, False, False]]
    assert labels.decide().tolist() == [0, 0]
    assert labels.decide(abstain_cost=0.3).tolist() == [-1, 0]  # expected costs 0.5 and 0.1
    # Missing class 2 costs 10: action 1 (treat) costs 1 always; 10 · 0.2 > 1 > 10 · 0.04.
    cost = [[0, 0, 10], [1, 1, 1]]
    assert labels.decide(cost).tolist() == [1, 0] and labels.decide(cost, abstain_cost=0.7).tolist() == [-1, 0]
    refuses(r"\(actions, 3\)", labels.decide, [[0, 1]])
    refuses("classification", prediction.set, 0.8)


def test_the_expected_loss_of_a_mixture_has_its_closed_form():
    """Of squared errors variance + bias², of a threshold 1 − F, of a stock the partial moments, of counts a sum."""
    prediction, _ = simulated("regression", 30)
    loc, scale = (v.double().numpy() for v in (prediction.locs, prediction.scales))
    squared = prediction.risk(lambda y: (y - 0.3).square()).expected
    expected = (scale**2 + (loc - 0.3) ** 2).mean(0)
    torch.testing.assert_close(squared, torch.tensor(expected), rtol=1e-3, atol=1e-4)
    over = prediction.risk(lambda y: (y > 0.1).double()).expected
    torch.testing.assert_close(over, 1 - prediction.cdf(torch.full((30,), 0.1).double()), rtol=0, atol=5e-3)
    far = torch.linspace(1.3, 2.3, 40).double()
    tails = Mixture(Normal(torch.zeros(1, 40), torch.ones(1, 40))).risk(lambda y: (y > far) * 1.0).expected
    np.testing.assert_allclose(tails, stats.norm.sf(far), rtol=0.012)
    heavy = Mixture(HeavyTailed(torch.full((1, 2), 3.0), torch.tensor([[0.0, 0.13]]), torch.ones(1, 2)))
    above = torch.from_numpy(stats.t.sf([0.4, 0.27], 3))
    torch.testing.assert_close(heavy.risk(lambda y: (y > 0.4).double()).expected, above, rtol=0, atol=5e-3)
    # A piece left costs 1, one missing 3: E(a − Y)⁺ + 3 E(Y − a)⁺, least where a is the quantile of ¾.
    stock = torch.linspace(-3, 3, 241, dtype=torch.float64)
    loss = lambda y: (stock - y[..., None]).clamp_min(0) + 3 * (y[..., None] - stock).clamp_min(0)  # noqa: E731
    risk = prediction.risk(loss)
    z = (stock.numpy()[:, None, None] - loc) / scale
    left = scale * (z * stats.norm.cdf(z) + stats.norm.pdf(z))
    exact = (left + 3 * (left - (stock.numpy()[:, None, None] - loc))).mean(1).T
    torch.testing.assert_close(risk.expected, torch.tensor(exact), rtol=2e-3, atol=1e-3)
    assert risk.kind == "predictive" and "if the predictive distribution is" in risk.note
    torch.testing.assert_close(stock[prediction.decide(loss)], prediction.quantile(0.75)[0].double(), rtol=0, atol=0.03)
    rate = torch.tensor([[0.5, 30.0], [2.0, 40.0]])
    counts = Mixture(Poisson(rate)).risk(lambda y: y * (y - 1)).expected  # E Y(Y − 1) = rate²
    torch.testing.assert_close(counts, rate.double().square().mean(0), rtol=2e-3, atol=0)


def test_the_risk_of_a_log_scale_of_a_conformal_prediction_and_of_bad_losses():
    prediction, y = simulated("regression", 40)
    prediction.guarantee = Conformal.fit("cqr", prediction, y).at(40)
    assert "conformal method changes intervals" in prediction.risk(lambda y: y).note
    skewed = Mixture(LogNormal(torch.zeros(1, 3), torch.full((1, 3), 0.5)))
    torch.testing.assert_close(skewed.risk(lambda y: y).expected, torch.full((3,), 1.1331).double(), rtol=2e-3, atol=0)
    labels, _ = simulated("classification", 4)
    for call, message in (
        (lambda: prediction.risk(lambda y: y.sum(0)), "must be finite, of shape"),
        (lambda: prediction.risk(lambda y: y / 0), "must be finite"),
        (lambda: prediction.risk(torch.eye(2)), "a function of targets of numbers"),
        (lambda: labels.risk(lambda y: y), "a loss is a matrix"),
        (lambda: labels.decide([[0, 1], [1]]), "must be finite, of shape"),
        (lambda: prediction.decide(), "classification"),
    ):
        refuses(message, call)


# -- explanations ----------------------------------------------------------------------------------------------------
NOISE, DRAWS = 0.7, 40


@pytest.fixture(scope="module")
def linear():
    """40 draws of a linear network of 3 inputs, of which the last has no weight in any of them."""
    problem = correlated(num=60, inputs=3, noise=NOISE)
    fitted = bp.fit(problem.entry(), problem.data, bp.SVI(epochs=2), progress=False)
    weight = 1 + 0.2 * torch.randn(DRAWS, 1, 3, generator=torch.Generator().manual_seed(1))
    weight[..., 2] = 0.0
    draws = {"layers.0.weight": weight, "layers.0.bias": torch.zeros(DRAWS, 1)}
    return SimpleNamespace(posterior=as_chain(fitted, draws), data=problem.data, weight=weight[:, 0].double())


def test_importance_of_a_linear_network_is_its_formula_and_dependence_its_weights(linear):
    """E over permutations of (r + w (x − x'))² − r² is 2 w cov(r, x) + 2 w² var(x), of each draw."""
    x, y = linear.data.x_train.double(), linear.data.y_train.double()
    residual = y[:, None] - x @ linear.weight.mT  # (N, S)
    covariance = torch.einsum("ns,nj->sj", residual - residual.mean(0), x - x.mean(0)) / len(x)
    exact = 2 * linear.weight * (covariance + linear.weight * x.var(0, correction=0)) / y.var(correction=0)  # (S, 3)
    right = exact.quantile(torch.tensor([0.5, 0.05, 0.95]).double(), 0).mT.numpy()
    found = [bp.explain(linear.posterior, linear.data, num_draws=DRAWS, seed=seed) for seed in range(4)]
    names, columns = ["feature 0", "feature 1", "feature 2"], ["importance", "low", "high"]
    tables = np.array([one.importance.loc[names, columns] for one in found])  # (4, 3 columns, 3 numbers)
    mean, error = tables.mean(0), tables.std(0, ddof=1) / 2
    assert (np.abs(mean - right) < 4 * error.mean() + 1e-6).all(), (mean, right, error)
    assert found[0].rows == "60 training rows" and np.abs(tables[:, 2]).max() < 1e-6
    found = bp.explain(linear.posterior, linear.data, num_draws=DRAWS, num=2)
    assert list(found.dependence) == list(found.importance.index[:2]) and found.outputs == ["mean of y"]
    for name, (values, outputs) in found.dependence.items():
        slopes = (outputs[:, -1, 0] - outputs[:, 0, 0]) / (values[-1] - values[0])
        assert np.allclose(slopes, linear.weight[:, int(name[-1])], atol=1e-4) and outputs.shape == (DRAWS, 20, 1)


def test_maps_of_a_linear_network_are_its_weights():
    """Of two classes the log odds are w x + b: covering a window takes away w x of its pixels."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (60, 1, 6, 5), dtype=np.uint8), np.arange(60) % 2
    data = bp.dataset(images, labels, task="classification")
    fitted = bp.fit(bp.MeanField(hidden=()), data, bp.SVI(epochs=1), progress=False)
    weight = 0.1 * torch.randn(7, 1, 30, generator=torch.Generator().manual_seed(0))
    posterior = as_chain(fitted, {"layers.0.weight": weight, "layers.0.bias": torch.zeros(7, 1)})
    found = bp.explain(posterior, data, num=3)
    prediction = bp.predict(posterior, data.x_test)
    assert (prediction.total[found.rows].diff() > 0).all()
    assert (found.classes == prediction.mean[found.rows].argmax(1).numpy()).all()
    for image, k, fall, spread in zip(found.images, found.classes, found.falls, found.spreads, strict=True):
        worth = (2 * k - 1) * (weight.view(7, 6, 5) * image).numpy()
        windows = [(slice(i, i + 2), slice(j, j + 2)) for i in range(5) for j in range(4)]
        maps, counts = np.zeros((7, 6, 5)), np.zeros((6, 5))
        for window in windows:
            maps[:, *window] += worth[:, *window].sum((1, 2), keepdims=True)
            counts[window] += 1
        np.testing.assert_allclose(fall, (maps / counts).mean(0), atol=1e-4)
        np.testing.assert_allclose(spread, (maps / counts).std(0, ddof=1), atol=1e-4)
    axes = bp.plots.pixel_maps(found, data.schema)
    assert axes.shape == (3, 3) and [ax.get_title() for ax in axes[0]] == [str(k) for k in found.classes]
    point = as_chain(fitted, {"layers.0.weight": weight[:1], "layers.0.bias": torch.zeros(1, 1)})
    assert bp.plots.pixel_maps(bp.explain(point, data, num=3), data.schema).shape == (2, 3)  # a warning is an error


def test_on_a_log_scale_it_is_the_logarithm_that_is_explained():
    """One draw whose mean of y is beyond any number of the data would else be all that is seen."""
    g, found = torch.Generator().manual_seed(0), []
    x = torch.randn(60, 2, generator=g).numpy()
    y = np.exp(x[:, 0] + 0.3 * torch.randn(60, generator=g).numpy())
    for target, scale in ((y, "log"), (np.log(y), "identity")):
        data = bp.dataset(x, target, target_scale=scale)
        fitted = bp.fit(bp.MeanField(hidden=(), noise="heteroscedastic"), data, bp.SVI(epochs=2), progress=False)
        draws = {site: value.clone() for site, value in fitted.draw(DRAWS, seed=0).items()}
        draws["layers.0.bias"][0, 1] += 6.0  # a noise of e⁶ times the others
        found.append(bp.explain(as_chain(fitted, draws), data, num_draws=DRAWS))
    np.testing.assert_allclose(*(one.importance.to_numpy() for one in found), rtol=1e-3, atol=1e-5)
    logarithm, plain = (next(iter(one.dependence.values())).outputs for one in found)
    np.testing.assert_allclose(logarithm, np.exp(plain), rtol=1e-3)


def test_the_parts_of_a_date_are_one_column():
    """A network that adds year and sine: both are shuffled together, and dates are set as training rows have them."""
    days = pd.date_range("2020-01-01", periods=60, freq="17D")
    frame = pd.DataFrame({"sold": days.astype(str), "z": np.arange(60) % 7, "y": np.arange(60.0)})
    data = bp.dataset(frame, "y", dates="parts")
    fitted = bp.fit(bp.MeanField(hidden=()), data, bp.SVI(epochs=1), progress=False)
    weight = torch.tensor([1.0, 0.5, 0.0, 0.0]).expand(3, 1, 1, 4).clone()
    posterior = as_chain(fitted, {"layers.0.weight": weight[:, 0], "layers.0.bias": torch.zeros(3, 1)})
    found = bp.explain(posterior, data, num_draws=3)
    assert list(found.importance.index) == ["sold", "z"] and found.importance.loc["z", "importance"] == 0
    years, outputs = found.dependence["sold"]
    own = dict(zip((days.year + (days.day_of_year - 1) / 365.25)[data.index_train], data.x_train, strict=True))
    assert len(years) == 20 and years == sorted(years) and 2020 <= years[0] < years[-1] < 2022.8
    assert years[0] == pytest.approx(min(own), abs=2e-4) and years[-1] == pytest.approx(max(own), abs=2e-4)
    f = [min(own.items(), key=lambda pair: abs(pair[0] - year))[1] for year in years]
    scale, shift = data.schema.y_scale, data.schema.y_shift
    expected = [shift + scale * (row[0] + 0.5 * row[1]).item() for row in f]
    np.testing.assert_allclose(outputs[0, :, 0], expected, rtol=1e-4)
    frame["sold"] = pd.date_range("2024-03-01", periods=60, freq="h").astype(str)  # hours are places of their own
    data = bp.dataset(frame, "y", dates="parts")
    at = bp.explain(bp.fit("mlp", data, bp.MAP(epochs=1), progress=False), data).dependence["sold"].values
    rows = np.sort(data.index_train)[np.linspace(0, len(data.index_train) - 1, 20).round().astype(int)]
    np.testing.assert_allclose(np.subtract(at, at[0]) * 365.25 * 24, rows - rows[0], atol=0.02)


def test_categories_and_gaps_are_set_as_in_the_users_own_rows():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"area": rng.normal(60, 20, 90), "town": rng.choice(["north", "south", "west"], 90)})
    frame["class"] = np.where((frame["town"] == "north") == (rng.random(90) < 0.9), "dear", "cheap")
    frame.loc[:5, "area"] = np.nan
    data = bp.dataset(frame, "class", missing="indicator")
    posterior = bp.fit(bp.MeanField(hidden=(3,)), data, bp.SVI(epochs=300), progress=False)
    found = bp.explain(posterior, data, num_draws=10)
    assert found.importance.index[0] == "town" and found.outputs == ["P(class = dear)"]
    values, outputs = found.dependence["town"]
    rows = frame.loc[data.index_train.numpy() if len(data.x_test) < 20 else data.index_test.numpy()]
    for k, town in enumerate(values):
        own = bp.predict(posterior, rows.assign(town=town).drop(columns="class"), num_draws=10)
        assert outputs[:, k, 0] == pytest.approx(own.probs[..., 1].mean(1).numpy(), abs=1e-5)
    assert len(found.dependence["area"].values) == 20 and np.isfinite(found.dependence["area"].outputs).all()
    places = np.array(found.dependence["area"].values)
    assert np.diff(places).max() < 0.1 * np.ptp(places)  # also where values are few
    assert rows["area"].isna().any()  # these have the value too, and are no longer missing
    for k in (0, 7, 19):
        own = bp.predict(posterior, rows.assign(area=places[k]).drop(columns="class"), num_draws=10).probs[..., 1]
        assert found.dependence["area"].outputs[:, k, 0] == pytest.approx(own.mean(1).numpy(), abs=1e-5)
    assert [ax.get_xlabel() for ax in bp.plots.partial_dependence(found)] == ["town", "area"]
    assert [t.get_text() for t in bp.plots.permutation_importance(found).get_yticklabels()] == ["town", "area"]
