"""CV+ and jackknife+: the intervals of their definition, what they cover, and that no row calibrates its own fit."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.calibration import cross_conformal, cv_plus

LINEAR = bp.MLP(hidden=(), noise=1.0)
METHOD = bp.MAP(epochs=60, lr=0.1, batch_size=0, patience=0)


def table(num, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(3, 2, size=(num, 2))
    return x, x @ [2.0, -1.0] + 50 + rng.normal(size=num)


def by_definition(means, spreads, scores, folds, level):
    """A row at a time, in whole numbers of rows."""
    num, ends = len(scores), []
    for b in range(means.shape[1]):
        low = sorted(means[folds[i], b] - scores[i] * spreads[folds[i], b] for i in range(num))
        high = sorted(means[folds[i], b] + scores[i] * spreads[folds[i], b] for i in range(num))
        k = math.ceil(round(level * (num + 1), 9))
        ends.append((-math.inf, math.inf) if k > num else (low[num - k], high[k - 1]))
    return np.transpose(ends)


@pytest.mark.parametrize(("num", "level"), [(9, 0.9), (10, 0.9), (19, 0.8), (37, 0.9), (8, 0.9), (40, 0.5)])
def test_the_ends_are_those_of_the_definition(num, level):
    rng = np.random.default_rng(num)
    means, spreads = rng.normal(size=(4, 6)), rng.uniform(0.5, 2, size=(4, 6))
    scores, folds = rng.exponential(size=num), rng.integers(4, size=num)
    ends = cv_plus(means, spreads, scores, folds, level)
    np.testing.assert_allclose(ends, by_definition(means, spreads, scores, folds, level), rtol=1e-12)
    assert np.isinf(ends).all() == (num == 8)


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


def test_each_row_is_scored_by_the_fit_without_its_fold():
    data = bp.dataset(*table(24), split=0.0, validation=0)
    x, y = data.schema.unstandardise(data.x_train), data.y_train
    made = cross_conformal(LINEAR, data, METHOD, folds=4, seed=3, cores=1)
    assert np.bincount(made.folds).tolist() == [6] * 4 and len(set(made.folds[:6].tolist())) > 1
    for k in range(4):
        out = torch.from_numpy(made.folds == k)
        rest = bp.dataset(x[~out], y[~out], split=0.0, validation=0)
        alone = bp.fit(LINEAR, rest, METHOD, seed=3, progress=False)
        mean = bp.predict(alone, rest.schema.standardise(x[out])).mean
        np.testing.assert_allclose(made.scores[out], (y[out] - mean).abs(), rtol=0, atol=2e-3)
    interval = made.interval(data.x_train, 0.8)
    assert interval.kind == "conformal (cv+)" and "60%" in interval.note and (interval.low < interval.high).all()
    assert 0.6 < ((interval.low <= y) & (y <= interval.high)).double().mean() <= 1
    short = made.interval(data.x_train, 0.99)
    assert torch.isinf(short.low).all() and "takes 99" in short.note


def test_what_is_refused():
    data = bp.dataset(*table(24), split=0.0, validation=0)
    for folds in (1, 25):
        with pytest.raises(bp.UserError, match=f"from 2 to the number of training rows, 24, got {folds}"):
            cross_conformal(LINEAR, data, METHOD, folds=folds)
    with pytest.raises(bp.UserError, match="in memory"):
        cross_conformal(LINEAR, replace(data, x_train=data.x_train.numpy()), METHOD)
    with pytest.raises(bp.UserError, match="for numbers"):
        cross_conformal("mlp", bp.load_data("breast-cancer"), METHOD)
