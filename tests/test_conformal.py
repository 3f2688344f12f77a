"""Conformal prediction: coverage over 1,000 data sets in its exact band, other packages' thresholds, planted faults."""

import math

import numpy as np
import pytest
import torch
from pyro.distributions import Categorical, Normal, Poisson
from refused import refuses
from scipy.stats import betabinom

import bnn_pyro as bp
from bnn_pyro.calibration import RECALIBRATIONS, SCORES, Conformal, likelihood_ratio, rows_needed, threshold
from bnn_pyro.calibration.conformal import NEAREST, SHRINKAGE
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.several import SeveralMixture

SETS, NEW, LEVEL = 1000, 20, 0.9


def in_band(covered, rows, level=LEVEL):
    """Whether the mean share of covered new rows (SETS, NEW) is that of beta-binomials, within 4 standard errors."""
    k, new = math.ceil((rows + 1) * level - 1e-9), covered.shape[1]
    exact = betabinom(new, k, rows + 1 - k)
    return abs(covered.sum(1).mean() - exact.mean()) < 4 * exact.std() / math.sqrt(len(covered))


def simulated(task, points, seed=0):
    """A prediction that is wrong in scale and shape, in 3 draws, and what came true."""
    rng = np.random.default_rng(seed)
    if task == "targets":  # that depend on each other
        loc, scale = rng.normal(size=(3, points, 2)), rng.uniform(0.2, 0.5, size=(3, points, 2))
        noise = (rng.normal(size=(points, 2)) @ [[1, 0.5], [0, 1]]) * scale.mean(0)
        return SeveralMixture(Normal(torch.tensor(loc), torch.tensor(scale))), torch.tensor(loc.mean(0) + noise)
    if task == "regression":
        loc, scale = rng.normal(size=(3, points)), rng.uniform(0.2, 0.5, size=(3, points))
        y = loc.mean(0) + scale.mean(0) * rng.standard_t(4, size=points)
        return bp.Prediction(Normal(torch.tensor(loc), torch.tensor(scale))), torch.tensor(y)
    classes = 2 if task == "two classes" else 4
    logits = torch.tensor(rng.normal(size=(3, points, classes)) + 1.5 * rng.normal(size=(points, classes)))
    truth = (0.5 * logits.mean(0)).softmax(-1)  # the model is overconfident
    y = (torch.tensor(rng.random((points, 1))) > truth.cumsum(-1)).sum(-1).clamp_max(classes - 1)
    return bp.Prediction(Categorical(logits=logits)), y


def limits(scores, level=LEVEL):
    return np.array([threshold(s, level) for s in scores])[:, None]


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
    new, y_own, y, limit = prediction[100:], y[:100], y[100:], threshold(np.array(conformal.scores), 0.8)
    new.guarantee = conformal.at(300, x=x[100:])
    part = new[torch.arange(300) % 2 == 0]
    if SCORES[method].task != "classification":
        low, high, _, kind, note = new.interval(0.8)
        inside, same = (low <= y) & (y <= high), torch.equal(part.interval(0.8).low, low[::2])
        inside = inside.view(300, -1).all(1)
        some = (high - low > 1e-3).view(300, -1).all(1)  # of cqr others may be empty, shown as a point
        for edge, inward in ((low, 1e-4), (high, -1e-4)):  # just inside an end a target is covered, outside not
            assert (new.guarantee.score(new, edge + inward) <= limit)[some].all() and some.sum() > 200
            assert (new.guarantee.score(new, edge - inward) > limit)[some].all()
    else:
        members, _, kind, note = new.set(0.8)
        inside, same = members.gather(1, y[:, None])[:, 0], torch.equal(part.set(0.8).members, members[::2])
    assert same and torch.equal(inside, new.guarantee.covers(new, y, 0.8))
    own = prediction[:100]  # the row whose score is the threshold is covered
    own.guarantee, half = conformal.at(100, x=x[:100]), slice(1, None, 2) if method == "local" else slice(None)
    covered = own.guarantee.covers(own, y_own, 0.8)[half]
    assert covered.sum() == math.ceil(0.8 * (len(covered) + 1))
    assert kind == f"conformal: {method}" and f"exchangeable with the {len(conformal.scores)} calibration rows" in note


def test_local_difficulty_is_the_mean_error_of_the_nearest_rows():
    """Of every other row of calibration; the scores are of those between, whose errors it has not seen."""
    rng = np.random.default_rng(1)
    x, y = torch.tensor(rng.uniform(size=(400, 1))), torch.tensor(rng.normal(size=400))
    known = bp.Prediction(Normal(torch.zeros(1, 400).double(), torch.ones(1, 400).double()))
    conformal, errors = Conformal.fit("local", known, y, x), y[::2].abs()
    near = (x[1::2, None, 0] - x[None, ::2, 0]).abs().argsort(1)[:, :NEAREST]
    difficulty = errors[near].mean(1) + SHRINKAGE * errors.mean()
    torch.testing.assert_close(conformal.difficulty(x[1::2]), difficulty)
    np.testing.assert_allclose(conformal.scores, y[1::2].abs() / difficulty, rtol=1e-6)


def test_quantiles_of_the_conformal_distribution_hold_over_a_thousand_data_sets():
    """P(Y ≤ the quantile of k / 20) is k / 20 with 19 rows, of a model that is wrong, of a number and of a count."""
    rng, exact = np.random.default_rng(8), betabinom(NEW, 4, 16)
    normal, y = simulated("regression", SETS * (19 + NEW))
    counts = Mixture(Poisson(torch.tensor(rng.uniform(0.5, 4, size=(2, SETS * (19 + NEW))))))
    for prediction, targets in ((normal, y), (counts, torch.tensor(rng.poisson(3, SETS * (19 + NEW))).double())):
        level, held, wrong = bp.metrics.pit(prediction, targets, seed=1).reshape(SETS, -1), [], []
        for k in range(SETS):
            rows = slice(k * (19 + NEW), k * (19 + NEW) + 19)
            map = RECALIBRATIONS["distribution"][1](prediction[rows], targets[rows])
            held.append((map(torch.tensor(level[k, 19:])) <= 0.2 + 1e-7).sum())
            wrong.append((level[k, 19:] <= np.sort(level[k, :19])[2]).sum())  # planted: ⌊n / 5⌋ of n rows
        bound = 4 * exact.std() / math.sqrt(SETS)
        assert abs(np.mean(held) - exact.mean()) < bound < abs(np.mean(wrong) - exact.mean())
    assert "to within 2 / (n + 1), if they are exchangeable" in map.apply(prediction[:50]).interval(0.9).note


@pytest.mark.parametrize("method", ["absolute", "cqr", "normalised", "pit"])
def test_counts_are_covered_exactly(method):
    rng, rows = np.random.default_rng(1), 20
    rate = rng.uniform(0.5, 6, size=(2, SETS * (rows + NEW)))
    y, prediction = torch.tensor(1.0 * rng.poisson(1.3 * rate.mean(0))), Mixture(Poisson(torch.tensor(rate)))
    for by_lot in (True, False) if method == "cqr" else (False,):  # planted: whole scores, which tie
        scores = Conformal(method, [], by_lot=by_lot).score(prediction, y).numpy().reshape(SETS, rows + NEW)
        assert in_band(scores[:, rows:] <= limits(scores[:, :rows]), rows) == (by_lot or method != "cqr")
    conformal, new = Conformal.fit(method, prediction[:500], y[:500]), prediction[500:900]
    new.guarantee, at = conformal.at(400), torch.arange(60.0).double()
    covers = torch.stack([new.guarantee.covers(new, k.expand(400), 0.8) for k in at])
    low, high, *_ = new.interval(0.8)
    assert ((low >= 0) | (high < 0)).all()
    some = covers.any(0)  # of others no count has a score up to the threshold
    assert torch.equal(((low <= at[:, None]) & (at[:, None] <= high))[:, some], covers[:, some]) and some.sum() > 380
    assert conformal.by_lot == (method == "cqr") and torch.equal(new[::2].interval(0.8).low, low[::2])


def test_too_few_rows_exclude_nothing_and_say_so():
    assert [rows_needed(level) for level in (0.5, 0.9, 0.95, 0.99)] == [1, 9, 19, 99]
    scores = np.arange(1.0, 10)  # (9 + 1) · 0.7 is 7.000000000000001 in floating point
    assert [threshold(scores, level) for level in (0.1, 0.7, 0.75, 0.9, 0.91)] == [1, 7, 8, 9, math.inf]
    prediction, y = simulated("regression", 40)
    new = prediction[30:]
    new.guarantee = Conformal.fit("cqr", prediction[:8], y[:8]).at(10)
    low, high, _, _, note = new.interval(0.9)
    assert (low == -math.inf).all() and (high == math.inf).all() and new.interval(0.85).low.isfinite().all()
    assert "10 of 10 exclude nothing: a level of 0.9 needs 9 calibration rows" in note
    new.guarantee = Conformal.fit("normalised", prediction[:20], y[:20], groups=["a"] * 20).at(10, ["a", "unseen"] * 5)
    assert new.interval(0.9).low.isfinite().tolist() == [True, False] * 5
    for level in (90, "0.9"):
        refuses("strictly between 0 and 1", prediction.interval, level)


def test_scores_by_hand_and_other_packages_have_the_same_thresholds():
    """Figures of crepes 0.9.1 (``ConformalRegressor.fit(y − mean, sigmas=sd[, bins])``, half width / sigma) and of
    MAPIE 1.6.0 (``SplitConformalClassifier(prefit=True)``, ``quantiles_``; its aps is randomised)."""
    crepes = [2.5604698146530667 / 1.4, 2.1831057602851303 / 1.4, 5.1932744589642912 / 3]
    rng, n = np.random.default_rng(5), 40
    mean, sd, y = rng.normal(size=n), rng.uniform(0.5, 2, n), rng.normal(size=n) * 1.3
    probs, labels = rng.dirichlet(np.ones(4), size=n), torch.tensor(rng.integers(0, 4, n))
    normal = bp.Prediction(Normal(torch.tensor(mean)[None], torch.tensor(sd)[None]))
    scores = Conformal.fit("normalised", normal, torch.tensor(y)).scores
    assert threshold(np.array(scores), 0.9) == pytest.approx(crepes[0], abs=1e-6)  # float32 variance
    groups = np.arange(n) % 2
    exact = np.abs(y - mean) / sd
    found = [threshold(exact, 0.9), *(threshold(exact[groups == g], 0.8) for g in (0, 1))]
    np.testing.assert_allclose(found, crepes, atol=1e-9)
    classes = bp.Prediction(Categorical(logits=torch.tensor(probs).log()[None]))
    scores = Conformal.fit("lac", classes, labels).scores
    assert threshold(np.array(scores), 0.8) == pytest.approx(0.8813732206105317, abs=1e-9)
    # Probabilities are averaged, not their logarithms: of class 0 (0.8 + 0.2) / 2, not √(0.8 · 0.2).
    probs = torch.tensor([[[0.8, 0.15, 0.05]], [[0.2, 0.45, 0.35]]], dtype=torch.float64)  # mean .5, .3, .2
    prediction = bp.Prediction(Categorical(logits=probs.log()))
    lac, aps, raps = (SCORES[method].of(prediction)[0].numpy() for method in ("lac", "aps", "raps"))
    np.testing.assert_allclose(lac, [0.5, 0.7, 0.8])
    share = (np.array([0.5, 0.8, 1.0]) - aps) / [0.5, 0.3, 0.2]
    np.testing.assert_allclose(share, share[0])
    np.testing.assert_allclose(raps - aps, [0, 0, 0.01], atol=1e-9)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_groups_have_thresholds_of_their_own(task):
    prediction, y = simulated(task, 400, seed=6)
    group = np.random.default_rng(7).choice(["a", "b"], 400, p=[0.8, 0.2])
    if task == "regression":
        y = torch.where(torch.from_numpy(group == "b"), prediction.mean + 5 * (y - prediction.mean), y)
        conformal = Conformal.fit("normalised", prediction[:200], y[:200], groups=group[:200].tolist())
    else:
        conformal, group = Conformal.fit("lac", prediction[:200], y[:200], per_class=True), y.numpy()
    scores, new = conformal.score(prediction, y).numpy(), prediction[200:]
    new.guarantee = conformal.at(200, group[200:] if task == "regression" else None)
    exact = [scores[i] <= threshold(scores[:200][group[:200] == group[i]], LEVEL) for i in range(200, 400)]
    assert new.guarantee.covers(new, y[200:], LEVEL).tolist() == exact
    assert exact != (scores[200:] <= threshold(scores[:200], LEVEL)).tolist()


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
