"""Recalibration against exact optima, densities that are proper, a posterior's calibration on disk, and monitoring."""

import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from pyro.distributions import Categorical, Normal, Poisson
from scipy.optimize import brentq
from scipy.stats import binom, kstest
from test_conformal import simulated

import bnn_pyro as bp
from bnn_pyro import metrics
from bnn_pyro.calibration import RECALIBRATIONS, load, martingale, monitor
from bnn_pyro.calibration.calibrated import METHODS
from bnn_pyro.calibration.recalibration import CdfMap, LogitMap, log_mean_probs
from bnn_pyro.calibration.shift import classifier_p, conformal_p, epistemic_p
from bnn_pyro.datasets.dataset import Column
from bnn_pyro.datasets.rows import row_digests
from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated
from bnn_pyro.loading import load as load_plain
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction
from bnn_pyro.settings import plain


def untrained(task="regression", **fields):
    """A posterior nobody trained, with rows that are said to have trained it."""
    classes = ("a", "b", "c") if task == "classification" else ()
    columns = (Column("size"), Column("town", ("north", "south")))
    schema = bp.Schema(task, (3,), classes=classes, columns=columns)
    with isolated(0):
        model = (entry := bp.MeanField(hidden=(4,), noise=0.5, init_scale=0.3)).model(schema)
        x = torch.randn(200, 3)
        x[:, 1:] = torch.nn.functional.one_hot(torch.randint(2, (200,)), 2)
        y = torch.randint(3, (200,)) if classes else torch.randn(200)
        provenance = {"data": "by-hand", "entry": "mean-field", "entry_settings": plain(entry)}
        posterior = Posterior(model, schema, entry.guide(model), provenance=provenance, **fields)
    return posterior, x, y


# -- recalibration -----------------------------------------------------------------------------------------------------
def test_temperature_is_the_exact_optimum_of_mean_probabilities():
    prediction, y = simulated("classification", 600)
    mean = prediction.components.logits.softmax(-1).mean(0)
    np.testing.assert_allclose(log_mean_probs(prediction), mean.log(), atol=1e-9)

    def slope(beta, logs):  # of the log score, in 1/T
        return ((beta * logs).softmax(-1) * logs).sum().item() - logs.gather(1, y[:, None]).sum().item()

    exact = brentq(slope, 0.01, 10, args=(mean.log(),))
    assert LogitMap.temperature(prediction, y).weight[0, 0].item() == pytest.approx(exact, rel=1e-6)
    averaged = brentq(slope, 0.01, 10, args=(prediction.components.logits.log_softmax(-1).mean(0),))
    assert abs(averaged / exact - 1) > 1e-2  # planted: log-probabilities averaged


@pytest.mark.parametrize("method", RECALIBRATIONS)
@pytest.mark.parametrize("rows", [5, 60, 2000])
def test_the_log_score_of_the_calibration_rows_never_gets_worse(method, rows):
    prediction, y = simulated(METHODS[method], rows, seed=rows)
    after = RECALIBRATIONS[method][1](prediction, y).apply(prediction)
    assert metrics.nll(after, y) <= metrics.nll(prediction, y) + 1e-7
    part = after[torch.arange(rows) % 2 == 0]
    torch.testing.assert_close(part.log_prob(y[::2]), after.log_prob(y)[::2])
    torch.testing.assert_close(after.total, after.aleatoric + after.epistemic, check_dtype=False)
    assert (after.epistemic >= 0).all() and len(metrics.evaluate(after, y, bootstrap=2)) >= 7
    if rows == 2000:  # and of others it becomes better: the model is overconfident
        other, truth = simulated(METHODS[method], 4000, seed=1)
        better = RECALIBRATIONS[method][1](prediction, y).apply(other)
        assert metrics.nll(better, truth) < metrics.nll(other, truth) - 0.01


def test_beta_calibration_recovers_a_bias_between_two_classes():
    rng = np.random.default_rng(0)
    logit = torch.tensor(rng.normal(size=4000))
    y = torch.tensor(rng.random(4000) < torch.sigmoid(0.5 * logit + 1).numpy()).long()
    prediction = Prediction(Categorical(logits=torch.stack([-logit / 2, logit / 2], -1)[None]))
    after = LogitMap.linear(prediction, y, full=False).apply(prediction)
    error = after.mean[:, 1] - torch.sigmoid(0.5 * logit + 1)
    assert error.abs().max() < 0.05 and (prediction.mean[:, 1] - torch.sigmoid(0.5 * logit + 1)).abs().max() > 0.15


def test_isotonic_cdf_has_a_proper_density():
    prediction, y = simulated("regression", 1500)
    map = CdfMap.fit(prediction[:1000], y[:1000])
    after = map.apply(prediction[:4])
    grid = torch.linspace(-12, 12, 240_001, dtype=torch.float64)[:, None].expand(-1, 4)
    for point in range(4):
        line = grid[::10, 0]
        density = map.apply(prediction[torch.full((len(line),), point)]).log_prob(line).exp()
        assert torch.trapezoid(density, line).item() == pytest.approx(1, abs=2e-3)
    cdf = after.cdf(grid)
    np.testing.assert_allclose(cdf[[0, -1]], [[0] * 4, [1] * 4], atol=1e-9)
    assert (cdf.diff(dim=0) >= 0).all()
    mean = grid[-1] - torch.trapezoid(cdf, grid, dim=0)
    second = 2 * torch.trapezoid((grid - grid[0]) * (1 - cdf), grid, dim=0)
    np.testing.assert_allclose(after.mean, mean, atol=1e-3)
    np.testing.assert_allclose(after.total, second - (mean - grid[0]).square(), rtol=1e-2)
    levels = [0.05, 0.5, 0.9]
    np.testing.assert_allclose(after.cdf(after.quantile(levels).double()), np.tile(levels, (4, 1)).T, atol=1e-5)
    before, new = prediction[1000:], map.apply(prediction[1000:])
    assert kstest(metrics.pit(new, y[1000:]), "uniform").pvalue > 0.01
    assert kstest(metrics.pit(before, y[1000:]), "uniform").pvalue < 1e-4


def test_isotonic_of_counts_is_a_distribution_of_counts():
    rate = torch.tensor([[1.0, 4.0], [2.0, 6.0]])
    prediction = Mixture(Poisson(rate))
    after = CdfMap([0, 0.3, 1], [0, 0.6, 1]).apply(prediction)
    mass = torch.stack([after.log_prob(torch.full((2,), float(k))) for k in range(40)]).exp()
    np.testing.assert_allclose(mass.sum(0), 1, atol=1e-6)


def test_counts_are_calibrated_as_numbers_are():
    rng = torch.Generator().manual_seed(7)
    y = torch.poisson(torch.full((120,), 3.0), generator=rng)
    data = bp.dataset(torch.randn(120, 2, generator=rng), y, task="counts")
    posterior = bp.fit(bp.MLP(hidden=()), data, bp.MAP(epochs=2, patience=0), progress=False, device="cpu")
    interval = bp.calibrate(posterior, data.x_val, data.y_val).predict(data.x_val).interval(0.8)
    assert interval.kind == "conformal: normalised"
    assert ((interval.low <= data.y_val) & (data.y_val <= interval.high)).double().mean() >= 0.8


def test_variance_scaling_has_a_closed_form_for_one_component():
    rng = np.random.default_rng(2)
    y = torch.tensor(rng.normal(size=300) * 3)
    prediction = Prediction(Normal(torch.zeros(1, 300), torch.full((1, 300), 1.5)))
    factor = RECALIBRATIONS["variance"][1](prediction, y).factor
    assert factor == pytest.approx((y / 1.5).square().mean().sqrt().item(), rel=1e-4)
    with pytest.raises(UserError, match="take isotonic"):
        RECALIBRATIONS["variance"][1](Prediction(Poisson(torch.ones(1, 3))), torch.ones(3))


# -- a posterior with its calibration ----------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_a_calibrated_posterior_predicts_and_comes_back_from_disk(method, tmp_path):
    posterior, x, y = untrained(METHODS[method], rows=torch.zeros(50, dtype=torch.int64))
    calibrated = bp.calibrate(posterior, x[:100], y[:100], method, num_draws=20)
    calibrated.save(tmp_path)
    again, prediction = bp.load(tmp_path), bp.predict(calibrated, x)
    known = bp.predict(calibrated, x[:100]).epistemic.double()
    np.testing.assert_allclose(calibrated.epistemic, known, rtol=1e-4, atol=1e-7)
    other = bp.predict(again, x)
    assert torch.equal(other.mean, prediction.mean) and torch.equal(other.log_prob(y), prediction.log_prob(y))
    read = (lambda p: p.set(0.8).members) if METHODS[method] == "classification" else (lambda p: p.interval(0.8).high)
    assert torch.equal(read(other), read(prediction))
    assert again.provenance["calibration"] == {"methods": [method], "rows": 100}
    assert (again.unusual(other) > 0).all() and (again.unusual(other) <= 1).all()
    assert torch.equal(bp.predict(load_plain(tmp_path), x).mean, bp.predict(posterior, x).mean)


def test_recalibration_first_then_conformal_on_other_rows(tmp_path):
    posterior, x, y = untrained(rows=torch.zeros(1, dtype=torch.int64))
    first = bp.calibrate(posterior, x[:60], y[:60], "isotonic", num_draws=10)
    both = bp.calibrate(first, x[60:120], y[60:120], "pit")
    both.save(tmp_path)
    prediction = bp.predict(bp.load(tmp_path), x[120:])
    assert prediction.interval(0.9).kind == "conformal: pit" and both.provenance["calibration"]["rows"] == 120
    assert torch.equal(prediction.log_prob(y[120:]), bp.predict(first, x[120:]).log_prob(y[120:]))
    with pytest.raises(UserError, match="calibrated this posterior before"):
        bp.calibrate(first, x[50:100], y[50:100], "cqr")
    with pytest.raises(UserError, match="conformal already"):
        bp.calibrate(both, x[120:], y[120:], "isotonic")
    with pytest.warns(UserWarning, match="calibrated with 10 draws"):
        bp.predict(both, x, num_draws=50)


def test_rows_that_trained_are_refused_and_duplicates_are_not():
    rng = torch.Generator().manual_seed(5)
    x, y = torch.randn(300, 3, generator=rng), torch.randn(300, generator=rng)
    digests = row_digests(x, y)
    assert len(digests.unique()) == 300 and torch.equal(digests[5:9], row_digests(x[5:9], y[5:9]))
    posterior, new, target = untrained(rows=digests)
    bp.calibrate(posterior, new, target)
    for share in (20, 2):  # all of them, or a tenth
        with pytest.raises(UserError, match=f"{share} of 20 calibration rows trained"):
            mixed = [torch.cat([a[:share], b[share:20]]) for a, b in ((x, new), (y, target))]
            bp.calibrate(posterior, *mixed)
    # A table of few values: rows equal one another by chance, and training rows do so as often.
    x, y = (torch.randint(3, shape, generator=rng).float() for shape in ((600, 3), (600,)))
    posterior, *_ = untrained(rows=row_digests(x[:400], y[:400]))
    bp.calibrate(posterior, x[400:], y[400:])
    with pytest.warns(UserWarning, match="without fingerprints"):
        bp.calibrate(untrained()[0], new, target)


def test_fits_remember_their_rows(tmp_path):
    data = bp.load_data("diabetes")
    how = dict(seed=0, progress=False, device="cpu")
    plain, stopped = (bp.fit("mlp", data, bp.MAP(epochs=2, patience=p), **how) for p in (0, 1))
    plain.save(tmp_path)
    for posterior in (plain, bp.load(tmp_path)):
        bp.calibrate(posterior, data.x_val, data.y_val)
        with pytest.raises(UserError, match="hold other rows back"):
            bp.calibrate(posterior, data.x_train, data.y_train)
    with pytest.raises(UserError, match="or stopped its training"):
        bp.calibrate(stopped, data.x_val, data.y_val)


def test_an_exact_sampler_starts_without_the_validation_rows():
    """Networks that chains start from are stopped early by some of the training rows."""
    data = bp.load_data("diabetes", features=["bmi"], limit=60)
    others = replace(data, x_val=data.x_val + 9, y_val=data.y_val * 9)
    method = bp.NUTS(start="members", chains=2, warmup=2, draws=1, compiled="no", max_tree_depth=2)
    entry, how = bp.MeanField(hidden=(2,), noise=1.0), dict(seed=0, progress=False, device="cpu")
    a, b = (bp.fit(entry, one, method, **how).chains for one in (data, others))
    assert all(torch.equal(a[site], b[site]) for site in a)


def test_a_calibration_of_another_posterior_is_refused(tmp_path):
    posterior, x, y = untrained(rows=torch.zeros(1, dtype=torch.int64))
    bp.calibrate(posterior, x, y).save(tmp_path)
    Posterior(**{**vars(posterior), "provenance": {**posterior.provenance, "seed": 7}}).save(tmp_path)
    with pytest.raises(UserError, match="another posterior"):
        load(tmp_path)
    path = tmp_path / "calibration.json"
    for content in ("{", "[]", json.dumps({"maps": 3})):
        path.write_text(content)
        with pytest.raises(UserError, match="damaged"):
            load(tmp_path)


# -- monitoring --------------------------------------------------------------------------------------------------------
def test_false_alarms_come_as_often_as_they_should():
    rng, repeats, rate = np.random.default_rng(3), 80, 0.1
    alarms = {"inputs": 0, "epistemic": 0, "targets": 0}
    for k in range(repeats):
        x, new = (torch.tensor(rng.normal(size=(60, 3))) for _ in range(2))
        alarms["inputs"] += classifier_p(x, new, k)[0] <= rate
        alarms["epistemic"] += epistemic_p(rng.exponential(size=60).tolist(), rng.exponential(size=60))[0] <= rate
        ranks = conformal_p(rng.normal(size=60).round(1).tolist(), rng.normal(size=60).round(1), k)
        alarms["targets"] += martingale(ranks).max() >= math.log(1 / rate)
    most = binom.ppf(1 - 1e-4, repeats, rate)
    assert all(count <= most for count in alarms.values()), alarms
    assert alarms["inputs"] > binom.ppf(1e-4, repeats, rate)  # an exact test, not a timid one


def test_p_values_of_exchangeable_scores_are_uniform_and_bets_on_others_grow():
    rng = np.random.default_rng(4)
    ranks = conformal_p(rng.normal(size=50).round(1).tolist(), rng.normal(size=3000).round(1))
    assert kstest(ranks, "uniform").pvalue > 1e-3 and abs(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) < 0.08
    # E of the capital is 1: exactly, over all p-values of a step.
    steps = (np.arange(2000) + 0.5) / 2000
    assert np.mean([np.exp(martingale(np.array([0.01, p])))[1] for p in steps]) == pytest.approx(
        np.exp(martingale(np.array([0.01])))[0]
    )
    shifted = conformal_p(rng.normal(size=200).tolist(), rng.normal(2, 1, size=60))
    assert martingale(shifted).max() > math.log(100)


def test_monitor_speaks_of_what_changed():
    posterior, x, y = untrained(rows=torch.zeros(1, dtype=torch.int64))
    calibrated = bp.calibrate(posterior, x[:100], y[:100], num_draws=20)
    quiet = monitor(calibrated, x[:100], x[100:], y[100:])
    assert [v.test for v in quiet] == ["inputs", "epistemic", "targets"] and not any(v.alarm for v in quiet)
    shifted = x[100:] + torch.tensor([4.0, 0, 0])
    loud = {v.test: v for v in monitor(calibrated, x[:100], shifted, y[100:] + 8)}
    assert loud["inputs"].alarm and loud["epistemic"].alarm and loud["targets"].alarm
    assert "a chance of 0.01 if nothing changed" in loud["targets"].sentence
    with pytest.raises(UserError, match="the 100 calibration rows"):
        monitor(calibrated, x, x)
    with pytest.raises(UserError, match="calibrate returns"):
        monitor(posterior, x[:100], x[100:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor(calibrated, x[:100], x[100:105])
