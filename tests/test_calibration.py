"""Recalibration against exact optima, densities that are proper, a posterior's calibration on disk."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pyro.distributions import Categorical, Normal, Poisson
from refused import refuses
from scipy.optimize import brentq, minimize
from scipy.stats import beta, binom, kstest
from sklearn.isotonic import isotonic_regression
from sklearn.linear_model import LogisticRegression
from test_conformal import simulated

import bnn_pyro as bp
from bnn_pyro.calibration import RECALIBRATIONS, Adaptive, load, monitor
from bnn_pyro.calibration.calibrated import DUPLICATES, METHODS, fitted_rows
from bnn_pyro.calibration.recalibration import CdfMap, LogitMap, log_mean_probs
from bnn_pyro.datasets.dataset import Column
from bnn_pyro.datasets.rows import OnDisk, Rows, row_digests
from bnn_pyro.loading import load as load_plain
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.settings import plain

TWO = ("beta", "isotonic-classes")


def untrained(task="regression", **fields):
    """A posterior nobody trained, with rows that are said to have trained it."""
    classes = {"classification": ("a", "b", "c"), "two classes": ("a", "b")}.get(task, ())
    columns = (Column("size"), Column("town", ("north", "south")))
    several = dict(targets=("u", "v"), y_shift=(0.0, 0.0), y_scale=(1.0, 9.0)) if task == "targets" else {}
    schema = bp.Schema("classification" if classes else task, (3,), classes=classes, columns=columns, **several)
    with bp.isolated(0):
        model = (entry := bp.MeanField(hidden=(4,), noise=0.5, init_scale=0.3)).model(schema)
        x = torch.randn(200, 3)
        x[:, 1:] = torch.nn.functional.one_hot(torch.randint(2, (200,)), 2)
        y = torch.randint(len(classes), (200,)) if classes else torch.randn((200, 2) if several else 200)
        provenance = {"data": "by-hand", "entry": "mean-field", "entry_settings": plain(entry)}
        posterior = bp.Posterior(model, schema, entry.guide(model), provenance=provenance, **fields)
    return posterior, x, y


def test_temperature_is_the_exact_optimum_of_mean_probabilities():
    prediction, y = simulated("classification", 600)
    mean = prediction.components.logits.softmax(-1).mean(0)
    np.testing.assert_allclose(log_mean_probs(prediction), mean.log(), atol=1e-9)

    def slope(beta, logs):  # of the log score less the prior, in 1/T
        fit = ((beta * logs).softmax(-1) * logs).sum().item() - logs.gather(1, y[:, None]).sum().item()
        return fit + np.log(beta) / beta

    exact = brentq(slope, 0.01, 10, args=(mean.log(),))
    assert LogitMap.temperature(prediction, y).weight[0, 0].item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("method", sorted({*RECALIBRATIONS} - {"distribution"}))  # its density is not a fit
@pytest.mark.parametrize("rows", [5, 60, 2000])
def test_the_log_score_of_the_calibration_rows_never_gets_worse(method, rows):
    prediction, y = simulated(METHODS[method], rows, seed=rows)
    after = RECALIBRATIONS[method][1](prediction, y).apply(prediction)
    assert bp.metrics.nll(after, y) <= bp.metrics.nll(prediction, y) + 1e-7
    torch.testing.assert_close(after.total, after.aleatoric + after.epistemic, check_dtype=False)
    assert (after.epistemic >= 0).all() and len(bp.metrics.evaluate(after, y, bootstrap=2)) >= 7
    if rows == 2000:  # and of others it becomes better: the model is overconfident
        other, truth = simulated(METHODS[method], 4000, seed=1)
        better = RECALIBRATIONS[method][1](prediction, y).apply(other)
        assert bp.metrics.nll(better, truth) < bp.metrics.nll(other, truth) - 0.01


@pytest.mark.parametrize("bent", [False, True])
def test_two_classes_have_the_optima_of_scikit_learn(bent):
    prediction, y = simulated("two classes", 800)
    if bent:  # labels of which p̄ near 1 says nothing: the slope of log(1 − p̄) would be negative
        y = (torch.tensor(np.random.default_rng(0).random(800)) < (0.1 + prediction.mean[:, 1].clamp_max(0.3))).long()
    logs = log_mean_probs(prediction)
    inputs, maps = np.stack([logs[:, 1], -logs[:, 0]], 1), {name: RECALIBRATIONS[name][1] for name in TWO}
    free = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(inputs, y)
    assert (free.coef_ < 0).any() == bent

    def loss(w):  # of two slopes and an intercept, a difference of two biases; the prior of each
        logit = inputs @ w[:2] + w[2]
        score = np.logaddexp(0, -logit * (2 * y.numpy() - 1)).sum()
        return score + 0.5 * np.square(w[:2] - 1).sum() + w[2] ** 2 / 4

    best = minimize(loss, [1.0, 1.0, 0.0], bounds=[(0, None), (0, None), (None, None)], options={"ftol": 1e-14}).x
    after = maps["beta"](prediction, y)(logs)
    np.testing.assert_allclose(after[:, 1] - after[:, 0], inputs @ best[:2] + best[2], atol=5e-3)
    steps, p = maps["isotonic-classes"](prediction, y), logs[:, 1].exp().numpy()
    best = isotonic_regression(y.double().numpy()[np.argsort(p)])
    found = (steps(logs)[:, 1].exp().numpy() - steps.share * p) / (1 - steps.share)
    np.testing.assert_allclose(found[np.argsort(p)], best, atol=1e-9)
    num = len(np.unique(best.round(9)))
    assert steps.share == num / (800 + num)


@pytest.mark.parametrize("method", ["temperature", "vector", "dirichlet", "beta"])
def test_labels_that_all_are_right_do_not_make_probabilities_0_and_1(method):
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]]).repeat(10, 1)
    prediction = bp.Prediction(Categorical(logits=logits[None]))
    after = RECALIBRATIONS[method][1](prediction, logits.argmax(1)).apply(prediction).mean.max(1).values
    assert (prediction.mean.max() < after).all() and (after < 0.999).all()


def test_variance_scaling_has_a_closed_form_and_counts_stay_counts():
    y = torch.tensor(np.random.default_rng(0).normal(size=4000) * 3)
    prediction = bp.Prediction(Normal(torch.zeros(1, 4000), torch.full((1, 4000), 1.5)))
    factor = RECALIBRATIONS["variance"][1](prediction, y).factor
    assert factor == pytest.approx((y / 1.5).square().mean().sqrt().item(), rel=1e-4)
    counts = Mixture(Poisson(torch.tensor([[1.0, 4.0], [2.0, 6.0]])))
    after = CdfMap([0, 0.3, 1], [0, 0.6, 1]).apply(counts)
    np.testing.assert_allclose(sum(after.log_prob(torch.full((2,), float(k))).exp() for k in range(40)), 1, atol=1e-6)
    far, slope = torch.full((2,), 60.0), np.log(0.4 / 0.7)  # where the cdf rounds to 1
    np.testing.assert_allclose(after.log_prob(far), counts.log_prob(far) + slope, rtol=1e-6)
    refuses("take isotonic", RECALIBRATIONS["variance"][1], counts, torch.ones(2))


def test_isotonic_cdf_has_a_proper_density():
    prediction, y = simulated("regression", 1500)
    map = CdfMap.fit(prediction[:1000], y[:1000])
    after = map.apply(prediction[:4])
    grid = torch.linspace(-12, 12, 240_001, dtype=torch.float64)[:, None].expand(-1, 4)
    line = grid[::10, 0]
    density = map.apply(prediction[torch.zeros(len(line), dtype=torch.int64)]).log_prob(line).exp()
    assert torch.trapezoid(density, line).item() == pytest.approx(1, abs=2e-3)
    cdf = after.cdf(grid)
    np.testing.assert_allclose(cdf[[0, -1]], [[0] * 4, [1] * 4], atol=1e-9)
    mean = grid[-1] - torch.trapezoid(cdf, grid, dim=0)
    second = 2 * torch.trapezoid((grid - grid[0]) * (1 - cdf), grid, dim=0)
    np.testing.assert_allclose(after.mean, mean, atol=1e-3)
    np.testing.assert_allclose(after.total, second - (mean - grid[0]).square(), rtol=1e-2)
    levels = [0.05, 0.5, 0.9]
    np.testing.assert_allclose(after.cdf(after.quantile(levels).double()), np.tile(levels, (4, 1)).T, atol=1e-5)
    new, known = map.apply(prediction[1000:]), y[1000:]
    assert kstest(bp.metrics.pit(new, known), "uniform").pvalue > 0.01
    assert kstest(bp.metrics.pit(prediction[1000:], known), "uniform").pvalue < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_a_calibrated_posterior_predicts_and_comes_back_from_disk(method, tmp_path):
    posterior, x, y = untrained(METHODS[method], rows=torch.zeros(50, dtype=torch.int64))
    calibrated = bp.calibrate(posterior, x[:100], y[:100], method, num_draws=20)
    calibrated.save(tmp_path)
    again, prediction = bp.load(tmp_path), bp.predict(calibrated, x)
    other = bp.predict(again, x)
    assert torch.equal(other.mean, prediction.mean) and torch.equal(other.log_prob(y), prediction.log_prob(y))
    read = (lambda p: p.set(0.8).members) if posterior.schema.classes else (lambda p: p.interval(0.8).high)
    assert torch.equal(read(other), read(prediction))
    assert 0 < again.unusual(other).min() <= again.unusual(other).max() <= 1
    assert again.provenance["calibration"] == {"methods": [method], "rows": 100}
    assert torch.equal(bp.predict(load_plain(tmp_path), x).mean, bp.predict(posterior, x).mean)
    # The calibration of another posterior, or a damaged one.
    bp.Posterior(**{**vars(posterior), "provenance": {**posterior.provenance, "seed": 7}}).save(tmp_path)
    refuses("another posterior", load, tmp_path)
    for content in ("{", json.dumps({"maps": 3})):
        (tmp_path / "calibration.json").write_text(content)
        refuses("damaged", load, tmp_path)


def test_recalibration_first_then_conformal_on_other_rows(tmp_path):
    posterior, x, y = untrained(rows=torch.zeros(1, dtype=torch.int64))
    first = bp.calibrate(posterior, x[:60], y[:60], "isotonic", num_draws=10)
    both = bp.calibrate(first, x[60:120], y[60:120], "pit")
    both.save(tmp_path)
    prediction = bp.predict(bp.load(tmp_path), x[120:])
    assert prediction.interval(0.9).kind == "conformal: pit" and both.provenance["calibration"]["rows"] == 120
    assert torch.equal(prediction.log_prob(y[120:]), bp.predict(first, x[120:]).log_prob(y[120:]))
    refuses("calibrated this posterior before", bp.calibrate, first, x[50:100], y[50:100], "cqr")
    refuses("conformal already", bp.calibrate, both, x[120:], y[120:], "isotonic")
    for other in ({"num_draws": 50}, {"seed": 1}):
        with pytest.warns(UserWarning, match="calibrated with 10 draws of seed 0, which are taken"):
            bp.predict(both, x, **other)


def test_rows_that_trained_are_refused_and_duplicates_are_not():
    rng = torch.Generator().manual_seed(5)
    x, y = torch.randn(300, 3, generator=rng), torch.randn(300, generator=rng)
    digests = row_digests(x, y)
    assert len(digests.unique()) == 300 and torch.equal(digests[5:9], row_digests(x[5:9], y[5:9]))
    posterior, new, target = untrained(rows=digests)
    bp.calibrate(posterior, new, target)
    mixed = (torch.cat([a[:2], b[2:20]]) for a, b in ((x, new), (y, target)))
    refuses("2 of 20 calibration rows trained", bp.calibrate, posterior, *mixed)
    # Of a table of few values new rows equal training rows as often as those one another: not refused, but for chance.
    found = []
    for _ in range(400):
        rows = torch.randint(3000, (600,), generator=rng)
        posterior = SimpleNamespace(rows=rows[:400])
        found.append([fitted_rows(posterior, rows[i : i + 200]) > 0 for i in (400, 300)])  # half of these trained
    few, all_of_them = np.sum(found, 0)
    assert few <= binom.ppf(1 - 1e-4, 400, DUPLICATES) and all_of_them == 400
    # Nor of one where nearly all do, but for a file with all that trained: of 150 kinds of row, some of them rare.
    found, often = [], 1 / torch.arange(1.0, 151)
    for _ in range(400):
        rows = often.multinomial(800, replacement=True, generator=rng)
        posterior = SimpleNamespace(rows=rows[:300])
        found.append([fitted_rows(posterior, part) > 0 for part in (rows[300:], rows[:500])])
    few, all_of_them = np.sum(found, 0)
    assert few <= binom.ppf(1 - 1e-4, 400, DUPLICATES) and all_of_them == 400
    with pytest.warns(UserWarning, match="without fingerprints"):
        bp.calibrate(untrained()[0], new, target)


def test_fits_remember_their_rows_and_exact_samplers_start_without_the_validation_rows(tmp_path):
    data = bp.load_data("diabetes")
    how = dict(seed=0, progress=False, device="cpu")
    plain, stopped = (bp.fit("mlp", data, bp.MAP(epochs=2, patience=p), **how) for p in (0, 1))
    plain.save(tmp_path)
    for posterior in (plain, bp.load(tmp_path)):
        bp.calibrate(posterior, data.x_val, data.y_val)
        refuses("hold other rows back: --data FILE.* in Python", bp.calibrate, posterior, data.x_train, data.y_train)
    refuses("or stopped its training", bp.calibrate, stopped, data.x_val, data.y_val)
    # Networks that exact samplers start from are stopped early by some of the training rows.
    data = bp.load_data("diabetes", features=["bmi"], limit=60)
    others = replace(data, x_val=data.x_val + 9, y_val=data.y_val * 9)
    method = bp.NUTS(start="members", chains=2, warmup=2, draws=1, compiled="no", max_tree_depth=2)
    a, b = (bp.fit(bp.MeanField(hidden=(2,), noise=1.0), one, method, **how).chains for one in (data, others))
    assert all(torch.equal(a[site], b[site]) for site in a)


def test_codes_of_seven_digits_are_groups_of_their_own():
    codes = 1_000_001.0 + np.arange(80) % 2
    data = bp.dataset(np.stack([codes, np.arange(80.0)], axis=1), codes % 7, split=0.5)
    posterior = bp.fit("mlp", data, bp.MAP(epochs=1, patience=0), progress=False)
    calibrated = bp.calibrate(posterior, data.x_test, data.y_test, groups=data.schema.features[0])
    assert {*calibrated.conformal.groups} == {"1000001", "1000002"}


def test_groups_are_columns_or_labels(tmp_path):
    posterior, x, y = untrained(rows=torch.zeros(1, dtype=torch.int64))
    calibrated = bp.calibrate(posterior, x[:100], y[:100], groups="town")
    towns = np.where(x[:, 1] > x[:, 2], "north", "south")
    assert calibrated.conformal.groups == towns[:100].tolist()
    calibrated.save(tmp_path)
    by_column = bp.predict(bp.load(tmp_path), x[100:]).interval(0.9)
    labelled = bp.calibrate(posterior, x[:100], y[:100], groups=towns[:100])
    assert torch.equal(labelled.predict(x[100:], groups=towns[100:]).interval(0.9).low, by_column.low)
    thirds = bp.calibrate(posterior, x[:100], y[:100], groups="uncertainty", num_draws=20)
    total = thirds.predict(x[:100]).total
    borders = np.quantile(total, [1 / 3, 2 / 3])
    assert thirds.conformal.groups == [f"third {k + 1}" for k in np.digitize(total, borders)]
    neither = torch.cat([x[:1, :1], torch.zeros(1, 2)], 1)  # a category that training did not have
    assert calibrated.predict(neither).interval(0.5).high.isinf().all()
    weights = np.ones(100), np.ones(100)
    assert torch.equal(calibrated.predict(x[100:], weights=weights).interval(0.9).low, by_column.low)
    for how, words in (
        ({"groups": "twon"}, "did you mean 'town'"), ({"groups": "size"}, "too many for groups"),
        ({"groups": ["north"] * 200}, "200 labels for 100 rows"), ({"per_class": True}, "class labels"),
        ({"method": "lac"}, "method for regression 'lac'"), ({"method": "isotonic", "groups": "town"}, "is a recalibr"),
    ):  # fmt: skip
        refuses(words, bp.calibrate, posterior, x[:100], y[:100], **how)
    refuses("if and only if calibration was given labels", bp.predict, labelled, x)
    few = min(calibrated.conformal.groups.count(town) for town in ("north", "south"))
    k = math.ceil(0.9 * (few + 1))
    low, high = beta.ppf([0.05, 0.95], k, few + 1 - k)
    assert f"of the smallest group ({few}), 9 give a coverage between {low:.3f} and {high:.3f}" in by_column.note
    named = replace(posterior.schema, columns=(Column("uncertainty"), posterior.schema.columns[1]))
    refuses("rename the column", bp.calibrate, replace(posterior, schema=named), x, y, groups="uncertainty")


def test_targets_over_time_and_inputs_are_checked_and_what_has_no_effect_is_refused():
    posterior, x, y = untrained(rows=torch.zeros(1, dtype=torch.int64))
    conformal, recalibrated = (bp.calibrate(posterior, x[:100], y[:100], name) for name in ("normalised", "isotonic"))
    adaptive = Adaptive(conformal)
    covered = []
    for given in (y[100:103], y[100:103].numpy(), y[100:103].tolist()):
        adaptive.predict(x[100:103])
        refuses("y is nan at row 0", adaptive.update, y[100:103] * math.nan)
        refuses("pass one value each", adaptive.update, y[100])
        covered.append(adaptive.update(given).tolist())
    assert covered[0] == covered[1] == covered[2]
    bad = torch.cat([x[:1] * math.nan, x])
    refuses("x is not finite at row 0", conformal.predict, bad)
    refuses("x is not finite at row 0", bp.calibrate, posterior, bad[:50], y[:50])
    for how in ({"level": 0.5}, {"groups": ["a"] * 200}, {"weights": (np.ones(100), np.ones(200))}):
        refuses("are for conformal intervals", recalibrated.predict, x, **how)
    refuses("not all 0", conformal.predict, x, weights=(np.zeros(100), np.zeros(200)))
    refuses("calibrate with a conformal method first", Adaptive, posterior)
    few = [bp.calibrate(posterior, x[:n], y[:n], "local").predict(x).interval(0.9) for n in (1, 17, 18)]
    assert few[0].high.isinf().all() and few[2].high.isfinite().all() and "needs 18 calibration rows" in few[1].note


def test_classes_are_given_by_number_or_by_name():
    posterior, x, y = untrained("classification", rows=torch.zeros(1, dtype=torch.int64))
    names = np.array(posterior.schema.classes)[y]
    a, b = (bp.calibrate(posterior, x, labels, num_draws=5).conformal.scores for labels in (y, names))
    assert a == b
    refuses("unknown class 'z'", bp.calibrate, posterior, x, ["z", *names[1:]])


def test_rows_in_a_file_are_predicted_as_in_memory(tmp_path):
    posterior, x, y = untrained(rows=torch.zeros(1, dtype=torch.int64))
    posterior = replace(posterior, schema=replace(posterior.schema, x_shift=(3.0, 0.0, 0.0), x_scale=(5.0, 1.0, 1.0)))
    raw = posterior.schema.unstandardise(x.double()).numpy()
    raw.tofile(tmp_path / "rows")
    file = OnDisk(tmp_path / "rows", raw.dtype, raw.shape)
    for some in (slice(None), slice(2, 9), slice(1, None, 3), slice(None, 2), torch.tensor([4, 1])):
        assert np.array_equal(file[some], raw[some])
    rows = Rows(file, posterior.schema, torch.arange(len(x)))
    x = rows[:]
    for how in ({"method": "local"}, {"method": "cqr", "groups": "town"}, {"method": "isotonic"}):
        memory, file = (bp.calibrate(posterior, part, y, num_draws=5, **how) for part in (x, rows))
        assert torch.equal(memory.predict(x).interval(0.9).low, file.predict(rows).interval(0.9).low)
    monitor(file, rows, rows)
