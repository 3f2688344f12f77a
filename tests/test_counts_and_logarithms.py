"""Counts with an exposure, by hand and by simulation; correlated noise, by SciPy; positive targets on a log scale."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from refused import refuses
from scipy import stats
from test_parts import read
from zoo_problems import check_log_joint

import bnn_pyro as bp
from bnn_pyro.calibration.conformal import SCORES, Conformal
from bnn_pyro.calibration.recalibration import Affine, CdfMap
from bnn_pyro.diagnostics.failures import _knows_nothing
from bnn_pyro.parts.likelihoods import LogNormalMixture, make_likelihood
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.several import CorrelatedNoise
from bnn_pyro.predictive import knows_nothing
from bnn_pyro.runs import evaluate
from bnn_pyro.runs.baselines import boosted


def visits(num=120, seed=0):
    """Counts of mean hours · exp(1 + x), with another column that says nothing."""
    rng = np.random.default_rng(seed)
    x, hours = rng.normal(size=num), rng.uniform(0.2, 30, num)
    table = pd.DataFrame({"hours": hours, "x": x, "city": rng.choice(["Oslo", "Rome"], num)})
    return table.assign(count=rng.poisson(hours * np.exp(1 + 0.3 * x)))


def test_the_exposure_multiplies_the_mean_and_is_no_input_of_the_network():
    table = visits(60)
    data = bp.dataset(table, "count", task="counts", exposure="hours", seed=0)
    assert data.schema.features == ("x", "city=Oslo", "city=Rome", "hours")
    hours = torch.from_numpy(table["hours"].to_numpy()[data.index_train]).float()
    torch.testing.assert_close(data.x_train[:, 3], hours / hours.mean())

    def law(f, w):
        return dist.Poisson(data.schema.y_shift * f[:, 0].exp())

    check_log_joint(data, law, {}, offset=lambda x: x[:, 3:].log(), likelihood="poisson")
    # Knowing nothing is the training rows' rate, and how dispersed their counts are.
    count, of = (table[name].to_numpy(float) for name in ("count", "hours")), (data.index_train, data.index_test)
    (y, y_test), (h, h_test) = ([values[rows] for rows in of] for values in count)
    means, nothing = h_test * y.sum() / h.sum(), knows_nothing(data, data.x_test)
    sizes, fitted = np.exp(np.linspace(-8, 14, 2201)), h * y.sum() / h.sum()
    r = max(sizes, key=lambda r: stats.nbinom.logpmf(y, r, r / (r + fitted)).sum())
    np.testing.assert_allclose(
        nothing.log_prob(data.y_test), stats.nbinom.logpmf(y_test, r, r / (r + means)), rtol=2e-3
    )
    density, error, its_error = _knows_nothing(data, nothing, data.x_test, data.y_test)
    np.testing.assert_allclose(density, nothing.log_prob(data.y_test))
    np.testing.assert_allclose(error, its_error, rtol=1e-4)


def test_boosting_takes_counts_of_which_every_fold_leaves_some_above_0():
    data = bp.dataset(np.arange(60.0)[:, None], np.arange(60) % 3, task="counts", seed=0)
    rare = replace(data, y_train=torch.eye(len(data.y_train))[0])  # one, which a fold leaves out
    assert boosted(rare) is None and boosted(data) is not None


def mixture(num=4000, wrong=False):
    """Five draws of negative binomials, and y from the same mixture; or predicted by Poissons of the same means."""
    rng = np.random.default_rng(0)
    means, r = rng.uniform(0.5, 6, (5, num)), 1.5
    y = rng.negative_binomial(r, r / (r + means[rng.integers(5, size=num), np.arange(num)]))
    if wrong:
        return bp.Prediction(dist.Poisson(torch.from_numpy(means))), y
    logits = torch.from_numpy(np.log(means / r))
    return bp.Prediction(dist.NegativeBinomial(torch.full_like(logits, r), logits=logits)), y


@pytest.mark.parametrize(("y", "said"), [([1, 2.5, 3], "2.5 at row 1"), ([1, 2, -1], "-1 at row 2")])
def test_what_is_no_count_is_not_scored(y, said):
    data = bp.dataset(np.arange(60.0)[:, None], np.arange(60) % 3, task="counts", seed=0)
    posterior = bp.fit("mean-field", data, bp.SVI(epochs=1), progress=False)
    refuses(f"y is {said}, and counts are whole numbers", bp.metrics.nll, bp.predict(posterior, data.x_train[:3]), y)


def test_counts_the_randomised_pit_is_uniform_and_the_rootogram_hangs_from_what_is_expected():
    prediction, y = mixture()
    pit = bp.metrics.pit(prediction, y, seed=0)  # also where the data were simulated from that seed
    assert stats.kstest(pit, "uniform").pvalue > 0.01
    assert stats.kstest(bp.metrics.pit(prediction, y), "uniform").pvalue < 1e-6  # without it there are steps
    wrong, y = mixture(wrong=True)
    assert stats.kstest(bp.metrics.pit(wrong, y, seed=1), "uniform").pvalue < 1e-6
    k = np.arange(int(y.max()) + 1)
    pmf = torch.stack([prediction.log_prob(torch.full((len(y),), float(value))).exp().sum() for value in k]).numpy()
    bars = np.array([(bar.get_y(), bar.get_height()) for bar in bp.plots.rootogram(prediction, y).containers[0]])
    np.testing.assert_allclose(bars[:, 1], np.sqrt(np.bincount(y, minlength=len(k))), rtol=1e-6)
    np.testing.assert_allclose(bars.sum(1), np.sqrt(pmf), rtol=1e-4)


def test_commands_take_an_exposure(tmp_path, command):
    table = visits()
    file, run, predictions = (tmp_path / name for name in ("visits.csv", "run", "p.csv"))
    table.to_csv(file, index=False)
    data = ["--data", file, "--target", "count", "--task", "counts", "--exposure", "hours"]
    command("train", "hidden-layer", *data, "--epochs", 20, "--num-draws", 20, "--out", run)
    scores = json.loads((run / "metrics.json").read_text())
    assert set(bp.metrics.METRICS["counts"]) <= set(scores) and scores["coverage_95"] > 0.5
    assert "Counts · inference by svi" in (run / "report.html").read_text()
    assert (run / "figures/rootogram.png").is_file()
    predict, means = ["predict", run, "--input", file, "--output", predictions, "--overwrite"], []
    for factor in (1, 2):
        table.assign(hours=factor * table["hours"]).to_csv(file, index=False)
        command(*predict)
        means.append((found := pd.read_csv(predictions))["mean"])
        assert set(np.mod(found["q97.5"], 1)) == {0.0}
    np.testing.assert_allclose(means[1], 2 * means[0], rtol=1e-4)
    table.assign(hours=table["hours"].where(table.index != 3, -1.0)).to_csv(file, index=False)
    assert "row 5: '-1.0' is no exposure" in command(*predict, code=2)
    data = bp.dataset(table, "count", task="counts", exposure="hours")
    with bp.isolated(0):
        refuses("my-network takes no exposure", bp.fit, torch.nn.Linear(4, 1), data, progress=False)
    refuses(r"shape \(2,\); .* takes \(4,\), the last one the exp", bp.load_inputs, np.ones((5, 2)), data.schema)
    refuses("no column 'hours', which this model needs", bp.load_inputs, table.drop(columns="hours"), data.schema)


# -- several targets with correlated noise ----------------------------------------------------------------------
def test_correlated_noise_is_a_multivariate_normal():
    likelihood, g = CorrelatedNoise((5.0, -1.0, 2.0), (3.0, 0.2, 1.0)), torch.Generator().manual_seed(0)
    f, y = torch.randn(4, 7, 3, generator=g), torch.randn(4, 7, 3, generator=g)
    own = {site: 0.5 * torch.randn(4, 3, generator=g) for site in likelihood.initial}
    with bp.isolated(0), poutine.trace() as trace, poutine.condition(data=own):
        likelihood(f, y)
        drawn = trace.trace.nodes["y"]["fn"].base_dist.rsample((20_000,))
    trace.trace.compute_log_prob()
    components = trace.trace.nodes["y"]["fn"].base_dist
    scale, lower = torch.tensor([3.0, 0.2, 1.0]), torch.tril_indices(3, 3, -1)
    for s in range(4):
        b = torch.zeros(3, 3)
        b[lower[0], lower[1]] = own["noise_slopes"][s]
        root = scale[:, None] * torch.linalg.inv(torch.eye(3) - b) * own["log_noise"][s].exp()
        exact = stats.multivariate_normal([0, 0, 0], (root @ root.T).numpy())
        error = y[s] - torch.tensor([5.0, -1.0, 2.0]) - scale * f[s]
        np.testing.assert_allclose(trace.trace.nodes["y"]["log_prob"][s], exact.logpdf(error.numpy()), rtol=1e-4)
        np.testing.assert_allclose(components.variance[s, 0], exact.cov.diagonal(), rtol=1e-4)
        correlation = np.corrcoef(drawn[:, s, 0].T.numpy())
        deviation = exact.cov.diagonal() ** 0.5
        np.testing.assert_allclose(correlation, exact.cov / np.outer(deviation, deviation), atol=4 / 20_000**0.5)


def test_correlated_noise_is_learned_and_predicted(tmp_path):
    """Of a correlation ρ knowing one target is worth −½ log(1 − ρ²) nats of the other; each by itself is the same."""
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=(700, 2)), rng.multivariate_normal([0, 0], [[1, 0.9], [0.9, 1]], 700)
    data = bp.dataset(x, x @ [[2.0, 0.0], [0.0, 1.0]] + noise)
    own, fit = (bp.fit(bp.MLP(hidden=(), noise=kind), data, bp.MAP(epochs=600, batch_size=0, lr=0.05), progress=False)
                for kind in ("learned", "correlated"))  # fmt: skip
    apart, joint = bp.predict(own, data.x_test), bp.predict(fit, data.x_test)
    gain = (joint.log_prob(data.y_test) - apart.log_prob(data.y_test)).double()
    error = gain.std().item() / len(gain) ** 0.5
    assert abs(gain.mean().item() + 0.5 * math.log(1 - 0.81)) < 4 * error + 0.05
    np.testing.assert_allclose(joint.total.mean(0), [1, 1], rtol=0.2)
    nll = -joint.log_prob(data.y_test).mean().item()
    assert bp.metrics.evaluate(joint, data.y_test).flat()["nll"] == pytest.approx(nll)
    assert joint.noise_correlation[0, 1].item() == pytest.approx(0.9, abs=4 * (1 - 0.81) / len(data.x_train) ** 0.5)
    fit.save(tmp_path)
    again = bp.predict(bp.load(tmp_path), data.x_test)[:3].of_draws([0])
    assert torch.equal(again.target(1).mean, joint.mean[:3, 1])
    refuses("noise=correlated is of several targets", bp.MLP(noise="correlated").model, bp.Schema("regression", (2,)))


# -- positive targets on a log scale: densities of y itself, against SciPy and a fit to log y by hand -----------------
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("noise", ["learned", "heteroscedastic", 0.3])
def test_likelihoods_of_the_logarithm_have_its_jacobian(noise):
    schemas = [bp.Schema("regression", (1,), y_shift=1.0, y_scale=0.5, target_scale=s) for s in ("log", "identity")]
    log, plain = (make_likelihood(schema, noise) for schema in schemas)
    f, y = torch.randn(3, log.outputs, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 3.0, 9.0])
    own = {name: torch.tensor(-0.5) for name in log.own_sites}
    of_y, of_log = read(log, f, **own), read(plain, f, **own)
    reference = stats.lognorm(of_log.scale.numpy(), scale=np.exp(of_log.loc.numpy()))
    np.testing.assert_allclose(of_y.log_prob(y), reference.logpdf(y.numpy()), rtol=2e-5)
    np.testing.assert_allclose(of_y.mean, reference.mean(), rtol=1e-5)
    assert torch.equal(log.information(f, own), plain.information(f, own)) and log.quadratic is plain.quadratic


@pytest.fixture(scope="module")
def pair():
    """Data on a log scale, the same data logged by hand, and a fit with the same seed to each."""
    x = RNG.normal(size=(240, 2))
    y = np.exp(3 + x[:, 0] + 0.3 * RNG.normal(size=240))
    data = [bp.dataset(x, y, target_scale="log"), bp.dataset(x, np.log(y))]
    return data, [bp.fit("mlp", d, bp.MAP(epochs=40, patience=10), progress=False) for d in data]


def test_a_fit_is_that_of_the_logarithm(pair, tmp_path):
    """With early stopping, which sets the noise by residuals: of the logarithm."""
    (data, logged), fits = pair
    assert (data.y_train > 0).all() and data.schema.y_scale == pytest.approx(logged.schema.y_scale, rel=1e-5)
    assert data.fingerprint != bp.dataset(data.x_train.numpy(), data.y_train.numpy(), validation=0).fingerprint
    one, other = (bp.predict(p, d.x_test) for p, d in zip(fits, (data, logged), strict=True))
    assert type(one) is LogNormalMixture
    torch.testing.assert_close(one.quantile([0.05, 0.5]), other.quantile([0.05, 0.5]).exp(), rtol=1e-3, atol=0)
    torch.testing.assert_close(one.log_prob(data.y_test), other.log_prob(logged.y_test) - logged.y_test,
                               rtol=1e-3, atol=1e-3)  # fmt: skip
    np.testing.assert_allclose(bp.metrics.pit(one, data.y_test), bp.metrics.pit(other, logged.y_test), atol=1e-3)
    fits[0].save(tmp_path)
    assert torch.equal(bp.predict(bp.load(tmp_path), data.x_test).mean, one.mean)
    density, *errors = _knows_nothing(data, one, data.x_test, data.y_test)
    log_density, *log_errors = _knows_nothing(logged, other, logged.x_test, logged.y_test)
    torch.testing.assert_close(density, log_density - logged.y_test.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(errors, log_errors, rtol=1e-2, atol=1e-3)
    assert bp.diagnostics.failure(fits[0], data) is None


def test_calibration_is_of_the_logarithm():
    """Intervals are the exponential of those of log y, for every score; recalibrated ones too."""
    loc = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    mixture = LogNormalMixture(dist.LogNormal(loc, torch.full_like(loc, 0.4)))
    log_y = loc[0] + torch.randn(200, generator=torch.Generator().manual_seed(1))
    base, y = mixture.untransformed, log_y.double().exp()
    for method in (name for name, score in SCORES.items() if score.task == "regression"):
        low, high, *_ = Conformal.fit(method, mixture, y, loc.mT).at(200, x=loc.mT).interval(mixture, 0.9)
        ends = Conformal.fit(method, base, log_y.double(), loc.mT).at(200, x=loc.mT).interval(base, 0.9)
        torch.testing.assert_close(torch.stack([low, high]), torch.stack(ends[:2]).exp(), rtol=1e-5, atol=0)
        assert ((low <= y) & (y <= high)).double().mean() >= (0.85 if method == "local" else 0.9)  # by half of the rows
    for kind in (Affine, CdfMap):
        made, logged = kind.fit(mixture, y), kind.fit(base, log_y)
        after, before = made.apply(mixture), logged.apply(base)
        torch.testing.assert_close(after.quantile(0.9), before.quantile(0.9).exp(), rtol=1e-3, atol=0)
        jacobian = (after.log_prob(y.float()) - before.log_prob(log_y)).float()
        torch.testing.assert_close(jacobian, -log_y, rtol=1e-3, atol=1e-3)
        low, high, *_ = Conformal.fit("normalised", after, y).at(200).interval(after, 0.9)
        assert (low > 0).all() and ((low <= y) & (y <= high)).double().mean() >= 0.9
    same = CdfMap([0.0, 1.0], [0.0, 1.0]).apply(mixture)  # moments by integration
    np.testing.assert_allclose(same.total, mixture.total, rtol=2e-2)


def test_what_has_no_logarithm_is_refused_with_its_row(tmp_path):
    path, x = tmp_path / "houses.csv", np.arange(40.0)[:, None]
    path.write_text("area,price\n" + "1,2\n\n2,0\n3,-6\n" + "4,8.5\n" * 30)
    logarithm = bp.Schema("regression", (1,), target_scale="log")
    for call, message in (
        (lambda: bp.load_data(path, target="price", target_scale="log"), "row 4: 0 has no logarithm, and 1 more"),
        (lambda: bp.dataset(x, x[:, 0], target_scale="log"), "row 0: 0 has no logarithm; leave"),
        (lambda: bp.dataset(x, x[:, 0], task="counts", target_scale="log"), "is for the task regression, not counts"),
        (lambda: make_likelihood(logarithm, "learned", "laplace"), "goes with likelihood=normal, not laplace"),
    ):
        refuses(message, call)
    prices = np.exp(np.r_[30.0, x[1:, 0] / 40])
    assert "the logarithm of y: 30 in row 0" in bp.dataset(x, prices, target_scale="log").split["doubts"][0]


def test_parts_know_the_numbers_of_their_rows(tmp_path):
    """Of a file as an editor counts, without empty lines and dropped rows; else from 0."""
    path = tmp_path / "houses.csv"
    path.write_text("area,price\n" + "".join(f"{k},{k}.5\n" + "\n" * (k == 7) + "NA,1\n" * (k == 9) for k in range(40)))
    data = bp.load_data(path, target="price", drop_missing=True, limit=20)
    lines = path.read_text().splitlines()
    for part in ("train", "val", "test"):
        y, index = getattr(data, f"y_{part}"), getattr(data, f"index_{part}")
        assert len(y) == len(index) and [float(lines[i - 1].split(",")[1]) for i in index.tolist()] == y.tolist()
    x = np.arange(50.0)[:, None]
    data = bp.dataset(x[:30], x[:30, 0], x_test=x[30:], y_test=x[30:, 0])
    assert torch.equal(data.index_train.float(), data.y_train) and data.index_test.tolist() == list(range(20))


def test_a_mean_that_one_draw_carries_is_said_and_one_of_many_zeros_is_not(monkeypatch):
    data = bp.dataset(visits(60), "count", task="counts", seed=0)
    posterior = bp.fit(bp.MLP(hidden=(2,)), data, bp.MAP(epochs=1), seed=0, progress=False)
    for rates, outside in (([0.01] * 50, 0), ([3.0] * 49 + [1e5], len(data.x_test))):
        law = dist.Poisson(torch.tensor(rates)[:, None].expand(-1, len(data.x_test)))
        monkeypatch.setattr(evaluate, "predict_with_progress", lambda *_, law=law: Mixture(law))
        assert evaluate._score(posterior, data, {}, 10).scores["means_outside"] == outside
        assert evaluate.means_outside(Mixture(law)).sum() == outside, "as `predict` says"


def test_boosting_takes_an_exposure_as_one():
    """Rates differ by a column, exposures by a factor of 1,000; the reference is a fit of rates, weighted."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"kind": rng.integers(0, 2, 900) * 1.0, "hours": 10 ** rng.uniform(-1, 2, 900)})
    table["count"] = rng.poisson(table["hours"] * np.where(table["kind"] > 0, 2.0, 0.5))
    data = bp.dataset(table, "count", task="counts", exposure="hours", seed=0)
    prediction, _ = boosted(data)
    kinds, hours = table["kind"].to_numpy()[data.index_test], table["hours"].to_numpy()[data.index_test]
    rates = prediction.mean.numpy() / hours
    for kind, rate in ((0.0, 0.5), (1.0, 2.0)):  # Poisson noise of some 8,000 hours, and the shrinkage of boosting
        assert np.ptp(rates[kinds == kind]) < 1e-6 * rate and abs(rates[kinds == kind][0] / rate - 1) < 0.1
    assert boosted(bp.dataset(table[["hours", "count"]], "count", task="counts", exposure="hours", seed=0)) is None
