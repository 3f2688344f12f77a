"""Likelihoods of numbers with outliers and of counts, and their mixtures: against SciPy, sums and integrals."""

import json

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats
from test_parts import read

import bnn_pyro as bp
from bnn_pyro.parts.likelihoods import LIKELIHOODS, make_likelihood
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.run import main

NUMBERS, COUNTS = (bp.Schema(task, (1,), y_shift=5.0, y_scale=2.0) for task in ("regression", "counts"))
F = torch.tensor([[-0.3], [0.0], [0.8]])
MEAN = 5 * np.exp(F[:, 0].double().numpy())


# -- densities ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "own", "reference"),
    [
        ("normal", {"log_noise": -0.5}, stats.norm(5 + 2 * F[:, 0], 2 * np.exp(-0.5))),
        ("student-t", {"log_noise": -0.5, "log_df": 1.0}, stats.t(2 + np.e, 5 + 2 * F[:, 0], 2 * np.exp(-0.5))),
        ("laplace", {"log_noise": -0.5}, stats.laplace(5 + 2 * F[:, 0], 2 * np.exp(-0.5))),
        ("poisson", {}, stats.poisson(MEAN)),
        ("negative-binomial", {"log_dispersion": 0.7}, stats.nbinom(np.exp(0.7), np.exp(0.7) / (np.exp(0.7) + MEAN))),
    ],
)
def test_densities_are_scipys_in_target_units(name, own, reference):
    kind, task = LIKELIHOODS[name]
    of_counts = task == "counts"
    likelihood, y = make_likelihood(COUNTS if of_counts else NUMBERS, "learned", name), torch.tensor([4.0, 9.0, 0.0])
    assert type(likelihood) is kind and likelihood.initial.keys() == own.keys()
    d = read(likelihood, F, **{site: torch.tensor(value) for site, value in own.items()})
    log_density = (reference.logpmf if of_counts else reference.logpdf)(y.numpy())
    np.testing.assert_allclose(d.log_prob(y), log_density, rtol=2e-5)
    np.testing.assert_allclose(d.mean, reference.mean(), rtol=1e-5)
    np.testing.assert_allclose(d.variance, reference.var(), rtol=1e-5)
    draws = read(likelihood, F.expand(4, 3, 1), **{site: torch.full((4,), value) for site, value in own.items()})
    assert draws.batch_shape == (4, 3)
    np.testing.assert_allclose(draws.log_prob(y)[2], log_density, rtol=2e-5)


@pytest.mark.parametrize("name", ["normal", "laplace", "poisson"])
def test_information_is_the_expected_square_of_the_slope(name):
    """E[(∂ log p / ∂ f)²], and of the likelihood's own site, by sums over y and differences."""
    of_counts, h = LIKELIHOODS[name][1] == "counts", 1e-4
    likelihood = make_likelihood(COUNTS if of_counts else NUMBERS, "learned", name).double()
    own = {site: torch.tensor(-0.5).double() for site in likelihood.own_sites}
    y = torch.arange(300).double() if of_counts else torch.linspace(-60, 70, 400_001, dtype=torch.float64)

    def log_p(f, shift=0.0):
        return read(likelihood, f.view(1, 1), **{site: v + shift for site, v in own.items()}).log_prob(y)

    for f in F.double():
        weight = log_p(f).exp() * (y[1] - y[0])
        slope = (weight * ((log_p(f + h) - log_p(f - h)) / (2 * h)).square()).sum()
        assert likelihood.information(f[None], own).item() == pytest.approx(slope.item(), rel=2e-3)
        for number in likelihood.own_information.values():
            slope = (weight * ((log_p(f, h) - log_p(f, -h)) / (2 * h)).square()).sum()
            assert number == pytest.approx(slope.item(), rel=2e-3)


def test_what_does_not_go_together_is_refused():
    classes = bp.Schema("classification", (1,), classes=("a", "b"))
    for schema, noise, name, message in (
        (NUMBERS, "learned", "poisson", "poisson is for counts, and the task is regression"),
        (classes, "learned", "student-t", "student-t is for regression, and the task is classification"),
        (NUMBERS, "heteroscedastic", "laplace", "heteroscedastic goes with likelihood=normal"),
        (NUMBERS, "learned", "cauchy", "unknown likelihood 'cauchy'"),
    ):
        with pytest.raises(bp.UserError, match=message):
            make_likelihood(schema, noise, name)
    with pytest.raises(bp.UserError, match="unknown likelihood 'poison'; did you mean 'poisson'"):
        bp.MLP(likelihood="poison")
    with pytest.raises(bp.UserError, match="StudentT defines no 'information'"):
        make_likelihood(NUMBERS, "learned", "student-t").information(F, {})


# -- mixtures ----------------------------------------------------------------------------------------------------
RATES = np.array([[1.5, 40.0, 0.01], [3.0, 55.0, 2.0]])
DISPERSION = np.array([[0.7], [8.0]])
DF, LOCS, SCALES = np.array([[2.1], [9.0]]), np.array([[0.0, 5.0, -2.0], [1.0, 8.0, -2.0]]), np.array([[1.0], [0.3]])


def tensors(*arrays):
    return [torch.as_tensor(np.broadcast_to(a, LOCS.shape).copy(), dtype=torch.float32) for a in arrays]


@pytest.mark.parametrize(
    ("prediction", "reference", "y"),
    [
        (Mixture(dist.Poisson(*tensors(RATES))), stats.poisson(RATES), [2.0, 44.0, 0.0]),
        (
            Mixture(dist.NegativeBinomial(tensors(DISPERSION)[0], logits=tensors(np.log(RATES / DISPERSION))[0])),
            stats.nbinom(DISPERSION, DISPERSION / (DISPERSION + RATES)),
            [2.0, 44.0, 0.0],
        ),
    ],
)
def test_mixtures_of_counts_are_sums(prediction, reference, y):
    k, y = np.arange(3000)[:, None, None], np.array(y)
    pmf = reference.pmf(k).mean(1)  # (counts, points)
    cdf, mean = pmf.cumsum(0), (pmf * k[:, 0]).sum(0)
    np.testing.assert_allclose(prediction.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(prediction.total, (pmf * (k[:, 0] - mean) ** 2).sum(0), rtol=1e-4)
    np.testing.assert_allclose(prediction.epistemic, reference.mean().var(0), rtol=1e-4)
    np.testing.assert_allclose(prediction.aleatoric, reference.var().mean(0), rtol=1e-4)
    at = pmf[y.astype(int), [0, 1, 2]]
    np.testing.assert_allclose(prediction.log_prob(torch.tensor(y)), np.log(at), rtol=1e-4)
    for level, found in zip((0.025, 0.5, 0.9), prediction.quantile((0.025, 0.5, 0.9)), strict=True):
        np.testing.assert_array_equal(found, (cdf < level).sum(0))
    np.testing.assert_allclose(
        prediction.cdf(torch.tensor([[-0.5, 43.5, 7.0]])).numpy()[0], [0.0, cdf[43, 1], cdf[7, 2]], rtol=1e-5
    )
    crps = ((cdf - (y <= k[:, 0])) ** 2).sum(0).mean()
    assert bp.metrics.crps(prediction, y) == pytest.approx(crps, rel=1e-4)
    np.testing.assert_allclose(bp.metrics.pit(prediction, y), cdf[y.astype(int), [0, 1, 2]] - at / 2, rtol=1e-4)
    assert prediction.is_discrete and not prediction.has_classes


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        (Mixture(dist.StudentT(*tensors(DF, LOCS, SCALES))), stats.t(DF, LOCS, SCALES)),
        (Mixture(dist.Laplace(*tensors(LOCS, SCALES))), stats.laplace(LOCS, np.broadcast_to(SCALES, LOCS.shape))),
    ],
)
def test_mixtures_with_heavy_tails_are_integrals(prediction, reference):
    y = np.array([0.7, 6.0, -9.0])
    np.testing.assert_allclose(prediction.mean, LOCS.mean(0), rtol=1e-5)
    np.testing.assert_allclose(prediction.total, reference.var().mean(0) + LOCS.var(0), rtol=1e-4)
    np.testing.assert_allclose(
        prediction.log_prob(torch.tensor(y)), np.log(reference.pdf(y).mean(0)), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(prediction.cdf(torch.tensor(y)), reference.cdf(y).mean(0), rtol=1e-5, atol=1e-9)
    found = prediction.quantile((0.005, 0.5, 0.95)).double().numpy()
    for level, values in zip((0.005, 0.5, 0.95), found, strict=True):
        np.testing.assert_allclose(reference.cdf(values).mean(0), level, rtol=1e-4)

    def squared(t, point):
        return (reference.cdf(t).mean(0)[point] - (y[point] <= t)) ** 2

    ends = ((-400.0, y[p], LOCS[0, p], 400.0) for p in range(3))
    integrals = [
        sum(
            integrate.quad(squared, a, b, args=(p,), limit=400)[0]
            for a, b in zip(sorted(e), sorted(e)[1:], strict=False)
        )
        for p, e in enumerate(ends)
    ]
    assert bp.metrics.crps(prediction, y) == pytest.approx(np.mean(integrals), rel=3e-3)


def test_a_mixture_of_positive_numbers_without_a_class_of_its_own_is_an_integral():
    """A Gamma, whose cdf PyTorch has for positive numbers alone."""
    shape, rate, y = np.array([[0.8, 3.0], [2.0, 5.0]]), np.array([[1.0, 0.5], [2.0, 1.0]]), np.array([0.1, 7.0])
    prediction, reference = (
        Mixture(dist.Gamma(*map(torch.from_numpy, (shape, rate)))),
        stats.gamma(shape, scale=1 / rate),
    )
    np.testing.assert_allclose(
        prediction.cdf(torch.tensor([[-1.0, 7.0]]))[0], [0, reference.cdf(7.0).mean(0)[1]], rtol=1e-6
    )
    t = np.linspace(0, 80, 400_001)[:, None, None]
    crps = np.trapezoid((reference.cdf(t).mean(1) - (y <= t[:, 0])) ** 2, t[:, 0], axis=0).mean()
    assert bp.metrics.crps(prediction, y) == pytest.approx(crps, rel=1e-2)


# -- posteriors --------------------------------------------------------------------------------------------------------
def constant(y, name, task="counts"):
    """One number alone is learned: inputs of 0, a bias with a Normal prior of scale 1."""
    data = bp.dataset(np.zeros((len(y), 1)), y, task=task, split=0, validation=0)
    entry = bp.MeanField(hidden=(), prior="normal:1", likelihood=name)
    return data, bp.fit(entry, data, bp.NUTS(chains=2, warmup=200, draws=500), seed=1, progress=False, device="cpu")


def test_nuts_with_a_poisson_is_the_integral_over_the_one_weight():
    y = np.array([3, 0, 4, 2, 6, 1, 2, 5])
    data, posterior = constant(y, "poisson")
    bias = posterior.draw(1000)["layers.0.bias"].flatten().double().numpy()
    grid = np.linspace(-2, 2, 4001)
    log_p = stats.poisson.logpmf(y[:, None], data.schema.y_shift * np.exp(grid)).sum(0) + stats.norm.logpdf(grid)
    p = np.exp(log_p - log_p.max()) / np.exp(log_p - log_p.max()).sum()
    mean = (p * grid).sum()
    sd = np.sqrt((p * (grid - mean) ** 2).sum())
    assert abs(bias.mean() - mean) < 5 * sd / np.sqrt(200) and bias.std() == pytest.approx(sd, rel=0.2)
    exact = (p[:, None] * stats.poisson.pmf(np.arange(3), data.schema.y_shift * np.exp(grid)[:, None])).sum(0)
    prediction = bp.predict(posterior, torch.zeros(3, 1), num_draws=1000)
    np.testing.assert_allclose(prediction.log_prob(torch.arange(3.0)).exp(), exact, rtol=0.1)


@pytest.mark.parametrize("name", ["student-t", "negative-binomial"])
def test_own_sites_are_learned_with_the_weights(name):
    """Against sums over a grid of the weight and of the likelihood's own one or two numbers."""
    rng = np.random.default_rng(3)
    y = rng.negative_binomial(2, 0.2, 25) if name == "negative-binomial" else rng.standard_t(2.5, 25)
    data, posterior = constant(y, name, "counts" if name == "negative-binomial" else "regression")
    schema, draws = data.schema, posterior.draw(1000)
    bias, values = np.linspace(-1.5, 1.5, 61), np.asarray(y, dtype=float)[:, None]
    if name == "negative-binomial":
        b, log_r = (g.ravel() for g in np.meshgrid(bias, np.linspace(-4, 8, 121)))
        r, mean = np.exp(log_r), schema.y_shift * np.exp(b)
        log_p = stats.nbinom.logpmf(values, r, r / (r + mean)).sum(0) + stats.norm.logpdf(log_r, 2, 1.5)
        grids = {"layers.0.bias": b, "log_dispersion": log_r}
    else:
        b, s, d = (g.ravel() for g in np.meshgrid(bias, np.linspace(-4, 1.5, 56), np.linspace(-2, 6, 41)))
        t = stats.t(2 + np.exp(d), schema.y_shift + schema.y_scale * b, schema.y_scale * np.exp(s))
        log_p = t.logpdf(values).sum(0) + stats.norm.logpdf(s, -1, 1) + stats.norm.logpdf(d, 2, 1)
        grids = {"layers.0.bias": b, "log_noise": s, "log_df": d}
    p = np.exp(log_p + stats.norm.logpdf(b) - log_p.max())
    p /= p.sum()
    for site, grid in grids.items():
        mean = (p * grid).sum()
        sd = np.sqrt((p * (grid - mean) ** 2).sum())
        found = draws[site].flatten().double().numpy()
        assert abs(found.mean() - mean) < 5 * sd / np.sqrt(150), site
        assert found.std() == pytest.approx(sd, rel=0.25), site


# -- every command -----------------------------------------------------------------------------------------------------
def test_commands_take_counts(tmp_path, capsys):
    x = np.random.default_rng(0).uniform(-1, 1, 120)
    table = pd.DataFrame({"x": x, "count": np.random.default_rng(1).negative_binomial(3, 3 / (3 + 4 * np.exp(x)))})
    table.to_csv(tmp_path / "counts.csv", index=False)
    file, run, predictions = (str(tmp_path / name) for name in ("counts.csv", "run", "p.csv"))
    data = ["--data", file, "--target", "count", "--task", "counts"]
    train = ["train", "hidden-layer", *data, "--epochs", "100", "--num-draws", "20", "--device", "cpu", "--quiet"]
    assert main([*train, "--likelihood", "poisson", "--out", run]) == 0
    assert json.loads((tmp_path / "run/config.json").read_text())["variant_settings"]["likelihood"] == "poisson"
    assert main(["diagnose", run, "--quiet", "--no-netcdf"]) == 0
    assert main(["evaluate", run, "--data", file, "--quiet"]) == 0
    assert main(["predict", run, "--input", file, "--output", predictions, "--quiet"]) == 0
    assert set(np.mod(pd.read_csv(predictions)["q97.5"], 1)) == {0.0}
    scores = json.loads((tmp_path / "run/metrics.json").read_text())
    assert set(bp.metrics.METRICS["counts"]) <= set(scores) and scores["coverage_95"] > 0.5
    report = (tmp_path / "run/report.html").read_text()
    assert "Counts · inference by svi" in report and "coverage 95" in report
    capsys.readouterr()
    assert main([*train, "--likelihood", "student-t", "--task", "regression", "--set", "noise=heteroscedastic"]) == 2
    assert "noise=heteroscedastic goes with likelihood=normal" in capsys.readouterr().err


def test_outliers_do_not_move_a_students_t():
    """The mean of data with a planted outlier: that of the others, where a Normal's is drawn away."""
    y = np.random.default_rng(0).normal(10, 1, 60)
    y[7] = 100.0
    means = {}
    for name in ("normal", "student-t", "laplace"):
        entry = bp.MeanField(hidden=(), likelihood=name)
        posterior = bp.fit(
            entry, (np.zeros((60, 1)), y), bp.MAP(epochs=150, batch_size=0, lr=0.1, patience=0), progress=False
        )
        means[name] = bp.predict(posterior, np.zeros((1, 1))).mean.item()
    assert abs(means["student-t"] - 10) < 0.5 and abs(means["laplace"] - 10) < 0.5 and means["normal"] > 11
