"""Coverage of conformal intervals over many data sets, beside faults planted here that must be seen; monitoring."""

import math
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from pyro.distributions import Normal
from refused import refuses
from scipy.stats import binom, kstest
from test_calibration import untrained
from test_conformal import LEVEL, SETS, in_band, limits

import bnn_pyro as bp
from bnn_pyro.calibration import Adaptive, Conformal, cv_plus, martingale, monitor, threshold
from bnn_pyro.calibration.shift import classifier_p, conformal_p, epistemic_p


def test_local_intervals_cover_exactly(monkeypatch):
    """Noise that grows with x, which the model does not know; the difficulty of a row must not have seen its score."""
    for name, value in (("NEAREST", 2), ("DRAWN", 0.01)):  # where a row's own score would tell most
        monkeypatch.setattr(f"bnn_pyro.calibration.conformal.{name}", value)
    rng, sets, rows, new = np.random.default_rng(1), 400, 40, 20
    x = torch.tensor(rng.uniform(size=(sets, rows + new, 1)))
    y = torch.tensor(rng.normal(size=(sets, rows + new))) * (0.1 + 2 * x[..., 0])
    plain = bp.Prediction(Normal(torch.zeros(1, rows + new).double(), torch.ones(1, rows + new).double()))
    covered, seen = np.empty((2, sets, new))
    for k in range(sets):
        conformal = Conformal.fit("local", plain[:rows], y[k, :rows], x[k, :rows])
        ahead = plain[rows:]
        ahead.guarantee = conformal.at(new, x=x[k, rows:])
        low, high, *_ = ahead.interval(LEVEL)
        covered[k] = (low <= y[k, rows:]) & (y[k, rows:] <= high)
        own = replace(conformal, inputs=x[k, :rows].tolist(), errors=y[k, :rows].abs().tolist())  # planted
        scores = y[k].abs() / own.difficulty(x[k])
        seen[k] = scores[rows:] <= threshold(scores[:rows].numpy(), LEVEL)
    assert in_band(covered, rows // 2) and not in_band(seen, rows)


def test_adaptive_levels_hold_under_a_drift_that_breaks_split_conformal():
    rng, rounds, batch, rate = np.random.default_rng(10), 300, 10, 0.02
    scale = np.repeat([1.0, 3.0, 0.5], rounds * batch // 3)
    y = torch.tensor((rng.normal(size=rounds * batch) * scale).reshape(rounds, batch))
    prediction = bp.Prediction(Normal(torch.zeros(1, batch), torch.ones(1, batch)))
    conformal, level = Conformal("normalised", np.abs(rng.normal(size=200)).tolist()), LEVEL

    def predict(x, level=None):
        prediction.guarantee = conformal.at(len(x), level=level)
        return prediction

    adaptive, covered = Adaptive(types.SimpleNamespace(conformal=conformal, predict=predict), LEVEL, rate=rate), []
    for targets in y:
        low, high, *_ = adaptive.predict(targets).interval(0.5)  # the level of time, whatever is asked for
        limit = threshold(np.array(conformal.scores), level) if 0 < level < 1 else math.inf * (level - 0.5)
        covered.append(adaptive.update(targets).double())
        assert torch.equal(covered[-1] == 1, targets.abs() <= limit)
        assert torch.equal(covered[-1] == 1, (low <= targets) & (targets <= high))
        level += rate * (LEVEL - covered[-1]).sum().item()
        assert adaptive.now == pytest.approx(level)
    with pytest.raises(bp.UserError, match="once"):
        adaptive.update(targets)
    # Gibbs & Candès 2021, proposition 4.1, with steps of a batch: the level stays within one step of [0, 1].
    assert abs(torch.stack(covered).mean() - LEVEL) < (1 + 2 * rate * batch) / (rate * rounds * batch) < 0.03
    assert torch.stack(covered[110:200]).mean() > 0.85
    assert (y[100:200].abs() <= threshold(np.array(conformal.scores), LEVEL)).double().mean() < 0.5


def test_the_jackknife_covers(num=20, sets=4000):
    """The mean of the rows as a fit: stable, so that the coverage is the level; scores in the fit without the row."""
    y = np.random.default_rng(1).standard_t(3, size=(sets, num + 1))
    rest = (y[:, :num].sum(1, keepdims=True) - y[:, :num]) / (num - 1)
    inside = np.empty((2, sets), dtype=bool)
    for k, (row, means) in enumerate(zip(y, rest, strict=True)):
        for wrong, used in enumerate((means, row[:num].mean())):  # planted: rows calibrate their own fit
            low, high = cv_plus(means[:, None], np.ones((num, 1)), np.abs(row[:num] - used), np.arange(num), LEVEL)
            inside[wrong, k] = low[0] <= row[num] <= high[0]
    error = math.sqrt(LEVEL * (1 - LEVEL) / sets)
    assert -4 * error < inside[0].mean() - LEVEL < 1 / (num + 1) + 4 * error
    assert inside[1].sum() < inside[0].sum()


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


# -- monitoring --------------------------------------------------------------------------------------------------------
def test_p_values_of_what_is_exchangeable_and_bets_on_others():
    rng, repeats, rate = np.random.default_rng(3), 80, 0.1
    inputs = epistemic = 0
    for k in range(repeats):
        inputs += classifier_p(*(torch.tensor(rng.normal(size=(60, 3))) for _ in range(2)), k)[0] <= rate
        epistemic += epistemic_p(rng.exponential(size=60).tolist(), rng.exponential(size=60))[0] <= rate
    most = binom.ppf(1 - 1e-4, repeats, rate)
    assert epistemic <= most and binom.ppf(1e-4, repeats, rate) < inputs <= most  # an exact test, not a timid one
    p, _ = epistemic_p(range(19), np.array([30.0, 1, 2, 3]))
    assert p == pytest.approx(4 / 23)  # that a new row is the largest of 23
    ranks = conformal_p(rng.normal(size=50).round().tolist(), rng.normal(size=3000).round())
    assert kstest(ranks, "uniform").pvalue > 1e-3 and abs(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) < 0.08
    # E of the capital is 1: exactly, over all p-values of a step.
    mean = np.mean([np.exp(martingale(np.array([0.01, p])))[1] for p in (np.arange(2000) + 0.5) / 2000])
    assert mean == pytest.approx(np.exp(martingale(np.array([0.01])))[0])
    shifted = conformal_p(rng.normal(size=200).tolist(), rng.normal(2, 1, size=60))
    assert martingale(shifted).max() > math.log(100)


def test_monitor_speaks_of_what_changed():
    posterior, x, y = untrained(rows=torch.zeros(1, dtype=torch.int64))
    calibrated = bp.calibrate(posterior, x[:100], y[:100], num_draws=20)
    for shift, alarm in ((0.0, False), (8.0, True)):
        found = monitor(calibrated, x[:100], x[100:] + torch.tensor([shift / 2, 0, 0]), y[100:] + shift)
        assert [(v.test, v.alarm) for v in found] == [(name, alarm) for name in ("inputs", "epistemic", "targets")]
    assert "a chance of 0.01 if nothing changed" in found[2].sentence
    refuses("the 100 calibration rows", monitor, calibrated, x, x)
    refuses("y is nan at row 0", monitor, calibrated, x[:100], x[100:], y[100:] * math.nan)
    labelled = bp.calibrate(posterior, x[:100], y[:100], groups=["a"] * 100, num_draws=20)  # its scores have no groups
    found = [monitor(one, x[:100], x[100:], y[100:]) for one in (calibrated, labelled)]
    assert found[0] == found[1]
