"""Coverage of conformal intervals over many data sets, and planted faults that it must show."""

import math
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from pyro.distributions import Normal, Poisson
from test_conformal import LEVEL, SETS, in_band, limits

from bnn_pyro.calibration import Adaptive, Conformal, cv_plus, threshold
from bnn_pyro.errors import UserError
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.predictive import Prediction


def test_local_intervals_cover_exactly(monkeypatch):
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


def test_coverage_of_the_jackknife_over_many_data_sets(num=20, sets=4000, level=0.9):
    """The mean of the rows as a fit: stable, so that the coverage is the level; scores in the fit without the row."""
    y = np.random.default_rng(1).standard_t(3, size=(sets, num + 1))
    rest = (y[:, :num].sum(1, keepdims=True) - y[:, :num]) / (num - 1)
    covered = leaky = 0
    for row, means in zip(y, rest, strict=True):
        for wrong in (False, True):
            used = np.full(num, row[:num].mean()) if wrong else means  # a planted fault: rows calibrate their own fit
            scores = np.abs(row[:num] - used)
            low, high = cv_plus(means[:, None], np.ones((num, 1)), scores, np.arange(num), level)
            inside = bool(low[0] <= row[num] <= high[0])
            covered, leaky = covered + (inside and not wrong), leaky + (inside and wrong)
    error = math.sqrt(level * (1 - level) / sets)
    assert -4 * error < covered / sets - level < 1 / (num + 1) + 4 * error
    assert leaky < covered
