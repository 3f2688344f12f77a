"""Conformal prediction: coverage over 1,000 data sets in its exact band, other packages' thresholds, planted faults."""

import math
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from pyro.distributions import Categorical, Normal, Poisson
from scipy.stats import betabinom, kstest

from bnn_pyro.calibration import SCORES, Adaptive, Conformal, likelihood_ratio, rows_needed, threshold
from bnn_pyro.calibration.conformal import DRAWN, NEAREST
from bnn_pyro.errors import UserError
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.predictive import Prediction

SETS, NEW, LEVEL = 1000, 20, 0.9


def in_band(covered, rows, level=LEVEL):
    """Whether the mean share of covered new rows (SETS, NEW) is that of beta-binomials, within 4 standard errors."""
    k, new = math.ceil((rows + 1) * level - 1e-9), covered.shape[1]
    exact = betabinom(new, k, rows + 1 - k)
    return abs(covered.sum(1).mean() - exact.mean()) < 4 * exact.std() / math.sqrt(len(covered))


def simulated(task, points, seed=0):
    """A prediction that is wrong in scale and shape, in 3 draws, and what came true."""
    rng = np.random.default_rng(seed)
    if task == "regression":
        loc, scale = rng.normal(size=(3, points)), rng.uniform(0.2, 0.5, size=(3, points))
        y = loc.mean(0) + scale.mean(0) * rng.standard_t(4, size=points)
        return Prediction(Normal(torch.tensor(loc), torch.tensor(scale))), torch.tensor(y)
    logits = torch.tensor(rng.normal(size=(3, points, 4)) + 1.5 * rng.normal(size=(points, 4)))
    truth = (0.5 * logits.mean(0)).softmax(-1)  # the model is overconfident
    y = (torch.tensor(rng.random((points, 1))) > truth.cumsum(-1)).sum(-1).clamp_max(3)
    return Prediction(Categorical(logits=logits)), y


def limits(scores, level=LEVEL):
    return np.array([threshold(s, level) for s in scores])[:, None]


# -- coverage ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [20, 99])
@pytest.mark.parametrize("method", SCORES)
def test_coverage_is_exact_over_a_thousand_data_sets(method, rows):
    prediction, y = simulated(SCORES[method].task, SETS * (rows + NEW))
    scores = Conformal(method, []).score(prediction, y).numpy().reshape(SETS, rows + NEW)
    calibration, new = scores[:, :rows], scores[:, rows:]
    assert in_band(new <= limits(calibration), rows)
    for wrong in (math.ceil(20 * LEVEL), 20) if rows == 20 else ():  # planted: ⌈n level⌉, and one rank too high
        assert not in_band(new <= np.append(np.sort(calibration), np.inf * np.ones((SETS, 1)), 1)[:, [wrong - 1]], rows)


@pytest.mark.parametrize("method", SCORES)
def test_intervals_and_sets_are_where_the_score_is_up_to_the_threshold(method):
    prediction, y = simulated(SCORES[method].task, 400)
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    conformal = Conformal.fit(method, prediction[:100], y[:100], x[:100])
    new, y = prediction[100:], y[100:]
    new.guarantee = conformal.at(300, x=x[100:])
    part = new[torch.arange(300) % 2 == 0]
    limit = threshold(np.array(conformal.scores), 0.8)
    if SCORES[method].task == "regression":
        low, high, level, kind, note = new.interval(0.8)
        inside = (low <= y) & (y <= high)
        assert torch.equal(part.interval(0.8).low, low[::2]) and level == 0.8
        some = high - low > 1e-3  # of cqr others may be empty, shown as a point
        for edge, inward in ((low, 1e-4), (high, -1e-4)):  # just inside an end a target is covered, outside not
            assert (new.guarantee.score(new, edge + inward) <= limit)[some].all() and some.sum() > 200
            assert (new.guarantee.score(new, edge - inward) > limit)[some].all()
    else:
        members, _, kind, note = new.set(0.8)
        inside = members.gather(1, y[:, None])[:, 0]
        assert torch.equal(part.set(0.8).members, members[::2])
    assert torch.equal(inside, new.guarantee.covers(new, y, 0.8))
    assert kind == f"conformal: {method}" and f"exchangeable with the {len(conformal.scores)} calibration rows" in note


def test_local_intervals_adapt_and_cover_exactly(monkeypatch):
    """Noise that grows with x, which the model does not know; the difficulty of a row must not have seen its score."""
    for name, value in (("NEAREST", 2), ("DRAWN", 0.01)):  # where a row's own score would tell most
        monkeypatch.setattr(f"bnn_pyro.calibration.conformal.{name}", value)
    rng, sets, rows, new = np.random.default_rng(1), 400, 40, 20
    x = torch.tensor(rng.uniform(size=(sets, rows + new, 1)))
    y = torch.tensor(rng.normal(size=(sets, rows + new))) * (0.1 + 2 * x[..., 0])
    plain = Prediction(Normal(torch.zeros(1, rows + new).double(), torch.ones(1, rows + new).double()))
    covered, seen = np.empty((2, sets, new))
    for k in range(sets):
        known, ahead = plain[:rows], plain[rows:]
        conformal = Conformal.fit("local", known, y[k, :rows], x[k, :rows])
        ahead.guarantee = conformal.at(new, x=x[k, rows:])
        low, high, *_ = ahead.interval(LEVEL)
        covered[k] = (low <= y[k, rows:]) & (y[k, rows:] <= high)
        own = replace(conformal, inputs=x[k, :rows].tolist(), errors=y[k, :rows].abs().tolist())  # planted
        scores = y[k].abs() / own.difficulty(x[k])
        seen[k] = scores[rows:] <= threshold(scores[:rows].numpy(), LEVEL)
    assert in_band(covered, rows // 2) and not in_band(seen, rows)
    monkeypatch.undo()
    x, y = x.flatten(0, 1)[:800], y.flatten()[:800]
    known = Prediction(Normal(torch.zeros(1, 400).double(), torch.ones(1, 400).double()))
    conformal = Conformal.fit("local", known, y[:400], x[:400])
    near = (x[400:, None, 0] - x[None, :400:2, 0]).abs().argsort(1)[:, :NEAREST]
    errors = y[:400:2].abs()
    torch.testing.assert_close(conformal.difficulty(x[400:]), errors[near].mean(1) + DRAWN * errors.mean())  # by hand
    known.guarantee = conformal.at(400, x=x[400:])
    low, high, *_ = known.interval(LEVEL)
    inside, easy, hard = (low <= y[400:]) & (y[400:] <= high), x[400:, 0] < 0.3, x[400:, 0] > 0.7
    assert (high - low)[hard].mean() > 2 * (high - low)[easy].mean()
    assert inside[hard].double().mean() > 0.8 and inside[easy].double().mean() < 0.99


def test_hand_numbers_of_class_scores():
    """Probabilities are averaged, not their logarithms: of class 0 (0.8 + 0.2) / 2, not √(0.8 · 0.2)."""
    probs = torch.tensor([[[0.8, 0.15, 0.05]], [[0.2, 0.45, 0.35]]], dtype=torch.float64)  # mean .5, .3, .2
    prediction = Prediction(Categorical(logits=probs.log()))
    lac, aps, raps = (SCORES[method].of(prediction)[0].numpy() for method in ("lac", "aps", "raps"))
    np.testing.assert_allclose(lac, [0.5, 0.7, 0.8])
    share = (np.array([0.5, 0.8, 1.0]) - aps) / [0.5, 0.3, 0.2]
    np.testing.assert_allclose(share, share[0])
    np.testing.assert_allclose(raps - aps, [0, 0, 0.01], atol=1e-9)
    many, _ = simulated("classification", 4000)
    shares = 1 - SCORES["aps"].of(many).amin(1) / many.probs.mean(0).amax(1)
    assert kstest(shares.numpy(), "uniform").pvalue > 1e-3 and 0 <= share[0] < 1


def test_counts_are_covered():
    rate = torch.rand(2, 3000, generator=torch.Generator().manual_seed(1)) * 9 + 1
    prediction = Mixture(Poisson(rate))
    y = torch.poisson(1.5 * rate.mean(0), generator=torch.Generator().manual_seed(2))
    conformal = Conformal.fit("pit", prediction[:500], y[:500])
    new = prediction[500:]
    new.guarantee = conformal.at(2500)
    low, high, *_ = new.interval(0.8)
    covered = ((low <= y[500:]) & (y[500:] <= high)).double().mean()
    assert torch.equal((low <= y[500:]) & (y[500:] <= high), new.guarantee.covers(new, y[500:], 0.8))
    assert 0.76 < covered < 0.93 and low.isfinite().all()  # steps of counts: at least the level


def test_calibrating_on_training_rows_is_seen():
    """Least squares with 12 inputs on 20 rows: its own residuals are far too small."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(SETS, 60, 12)), rng.normal(size=(SETS, 60))
    w = np.linalg.solve(x[:, :20].mT @ x[:, :20], x[:, :20].mT @ y[:, :20, None])
    residual = np.abs(y - (x @ w)[..., 0])
    assert in_band(residual[:, 40:] <= limits(residual[:, 20:40]), 20)
    assert not in_band(residual[:, 40:] <= limits(residual[:, :20]), 20)


def test_ties_cover_at_least_the_level():
    scores = np.random.default_rng(4).normal(size=(SETS, 40)).round(1)
    new, limit = scores[:, 20:], limits(scores[:, :20])
    assert (new <= limit).mean() > 19 / 21 > LEVEL > (new < limit).mean()  # planted: "<"


def test_too_few_rows_exclude_nothing_and_say_so():
    assert [rows_needed(level) for level in (0.5, 0.9, 0.95, 0.99)] == [1, 9, 19, 99]
    prediction, y = simulated("regression", 40)
    for rows, level in ((20, 0.96), (8, 0.9)):
        new = prediction[30:]
        new.guarantee = Conformal.fit("cqr", prediction[:rows], y[:rows]).at(10)
        low, high, _, _, note = new.interval(level)
        assert (low == -math.inf).all() and (high == math.inf).all()
        assert f"10 of 10 exclude nothing: a level of {level} needs {rows_needed(level)} calibration rows" in note
        assert new.interval(level - 0.05).low.isfinite().all()
    prediction, y = simulated("classification", 40)
    new = prediction[30:]
    new.guarantee = Conformal.fit("lac", prediction[:8], y[:8]).at(10)
    assert new.set(0.9).members.all() and "10 of 10 exclude nothing" in new.set(0.9).note


def test_levels_round_as_they_should():
    scores = np.arange(1.0, 10)  # (9 + 1) · 0.7 is 7.000000000000001 in floating point
    assert [threshold(scores, level) for level in (0.1, 0.7, 0.75, 0.9, 0.91)] == [1, 7, 8, 9, math.inf]


def test_other_packages_have_the_same_thresholds():
    """Figures of crepes 0.9.1 (``ConformalRegressor.fit(y − mean, sigmas=sd[, bins])``, half width / sigma) and of
    MAPIE 1.6.0 (``SplitConformalClassifier(prefit=True)``, ``quantiles_``; its aps is randomised)."""
    rng, n = np.random.default_rng(5), 40
    mean, sd, y = rng.normal(size=n), rng.uniform(0.5, 2, n), rng.normal(size=n) * 1.3
    probs, labels = rng.dirichlet(np.ones(4), size=n), torch.tensor(rng.integers(0, 4, n))
    normal = Prediction(Normal(torch.tensor(mean)[None], torch.tensor(sd)[None]))
    scores = Conformal.fit("normalised", normal, torch.tensor(y)).scores
    assert threshold(np.array(scores), 0.9) == pytest.approx(CREPES[0], abs=1e-6)  # float32 variance
    groups = np.arange(n) % 2
    exact = np.abs(y - mean) / sd
    found = [threshold(exact, 0.9), *(threshold(exact[groups == g], 0.8) for g in (0, 1))]
    np.testing.assert_allclose(found, CREPES, atol=1e-9)
    classes = Prediction(Categorical(logits=torch.tensor(probs).log()[None]))
    for method, quantile in MAPIE.items():
        scores = Conformal.fit(method, classes, labels).scores
        assert threshold(np.array(scores), 0.8) == pytest.approx(quantile, abs=1e-9)


CREPES = [2.5604698146530667 / 1.4, 2.1831057602851303 / 1.4, 5.1932744589642912 / 3]
MAPIE = {"lac": 0.8813732206105317}


# -- groups, weights, time ---------------------------------------------------------------------------------------------
def test_groups_are_covered_each_by_itself():
    prediction, y = simulated("regression", 40_000, seed=6)
    group = np.random.default_rng(7).choice(["a", "b"], 40_000, p=[0.8, 0.2])
    y = torch.where(torch.from_numpy(group == "b"), prediction.mean + 5 * (y - prediction.mean), y)
    shares = {}
    for name, groups in (("mondrian", group), ("marginal", None)):
        labels = None if groups is None else groups[:2000].tolist()
        conformal = Conformal.fit("normalised", prediction[:2000], y[:2000], groups=labels)
        new = prediction[2000:]
        new.guarantee = conformal.at(38_000, None if groups is None else groups[2000:])
        covered = new.guarantee.covers(new, y[2000:], LEVEL).numpy()
        shares[name] = [covered[group[2000:] == g].mean() for g in "ab"]
        low, high, *_ = new.interval(LEVEL)
        assert np.array_equal(covered, (low <= y[2000:]) & (y[2000:] <= high))
    # Standard deviation of a coverage: √(0.09 / 400) = 0.015 with the 400 rows of b.
    np.testing.assert_allclose(shares["mondrian"], LEVEL, atol=0.05)
    assert shares["marginal"][1] < 0.7  # planted: groups forgotten
    conformal = Conformal.fit("normalised", prediction[:20], y[:20], groups=["a"] * 20)
    new = prediction[:2]
    new.guarantee = conformal.at(2, np.array(["a", "unseen"]))
    assert new.interval(LEVEL).low.isfinite().tolist() == [True, False]
    assert "1 of 2 exclude nothing" in new.interval(LEVEL).note


def test_classes_are_covered_each_by_itself():
    prediction, y = simulated("classification", 20_000, seed=8)
    against = torch.tensor([-2.0, 0, 0, 0])  # what the model has against class 0
    prediction = Prediction(Categorical(logits=prediction.components.logits + against))
    rare = (y != 0) | (torch.arange(20_000) % 8 == 0)
    prediction, y = prediction[rare], y[rare]
    new, truth = prediction[4000:], y[4000:]
    for per_class in (True, False):
        new.guarantee = Conformal.fit("lac", prediction[:4000], y[:4000], per_class=per_class).at(len(new))
        inside = new.set(LEVEL).members.gather(1, truth[:, None])[:, 0]
        shares = np.array([inside[truth == k].double().mean() for k in range(4)])
        # Standard deviation of a coverage with the 160 calibration rows of class 0: √(0.09 / 160) = 0.024.
        assert (np.abs(shares - LEVEL).max() < 0.08) == per_class, shares


def test_weights_undo_a_covariate_shift():
    rng = np.random.default_rng(9)
    x, shifted = rng.normal(size=(SETS, 200)), rng.normal(1, 1, size=(SETS, NEW))
    noise = np.abs(rng.normal(size=(SETS, 200 + NEW)) * np.exp(np.concatenate([x, shifted], 1) / 2))
    weight = [np.exp(v - 0.5) for v in (x, shifted)]  # N(1, 1) / N(0, 1)
    limit = np.stack([threshold(noise[i, :200], LEVEL, weight[0][i], weight[1][i]) for i in range(SETS)])
    covered, plain = noise[:, 200:] <= limit, noise[:, 200:] <= limits(noise[:, :200])
    error = covered.mean(1).std() / math.sqrt(SETS)
    assert LEVEL - 4 * error < covered.mean() < LEVEL + 0.03 and plain.mean() < 0.85
    assert threshold(np.ones(20), LEVEL, np.ones(20), 3.0) == math.inf  # the new row alone has more than 1 − level
    old, new = likelihood_ratio(torch.tensor(x[:5].reshape(-1, 1)), torch.tensor(shifted.reshape(-1, 1)[:1000]))
    assert np.corrcoef(np.log(old), x[:5].ravel())[0, 1] > 0.95 and len(new) == 1000


def test_adaptive_levels_hold_under_a_drift_that_breaks_split_conformal():
    rng, rounds, batch = np.random.default_rng(10), 300, 10
    scale = np.repeat([1.0, 3.0, 0.5], rounds * batch // 3)
    y = torch.tensor((rng.normal(size=rounds * batch) * scale).reshape(rounds, batch))
    prediction = Prediction(Normal(torch.zeros(1, batch), torch.ones(1, batch)))
    scores = np.abs(rng.normal(size=200)).tolist()
    conformal = Conformal("normalised", scores)

    def predict(x, level=None):
        new = prediction[:]
        new.guarantee = conformal.at(len(x), level=level)
        return new

    calibrated = types.SimpleNamespace(conformal=conformal, predict=predict)
    adaptive, covered = Adaptive(calibrated, LEVEL, rate=0.02), []
    for targets in y:
        shown = adaptive.predict(targets)
        low, high, *_ = shown.interval(0.5)  # the level of time, whatever is asked for
        covered.append(adaptive.update(targets))
        assert torch.equal(covered[-1], (low <= targets) & (targets <= high))
    covered, fixed = torch.stack(covered).double(), (y.abs() <= threshold(np.array(scores), LEVEL)).double()
    # Proposition 4.1, with steps of a batch: the level stays within one step of [0, 1].
    bound = (1 + 2 * 0.02 * batch) / (0.02 * rounds * batch)
    assert abs(covered.mean() - LEVEL) < bound < 0.03 and fixed[100:200].mean() < 0.5
    assert covered[110:200].mean() > 0.85
    with pytest.raises(UserError, match="once"):
        adaptive.update(y[0])


@pytest.mark.parametrize("level", [0, 1, -0.5, 90])
def test_levels_outside_of_0_and_1_are_refused(level):
    prediction, _ = simulated("regression", 5)
    with pytest.raises(UserError, match="strictly between 0 and 1"):
        prediction.interval(level)
