"""What changes over time: levels that adapt, and tests whether new rows are as those of calibration."""

import math
import types

import numpy as np
import pytest
import torch
from pyro.distributions import Normal
from refused import refuses
from scipy.stats import binom, kstest
from test_calibration import untrained
from test_conformal import LEVEL

import bnn_pyro as bp
from bnn_pyro.calibration import Adaptive, Conformal, martingale, monitor, threshold
from bnn_pyro.calibration.shift import classifier_p, conformal_p, epistemic_p


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
