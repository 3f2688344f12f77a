"""Guarantees that hold in each group by itself: of a column, of labels, of thirds by uncertainty."""

import math

import numpy as np
import pytest
import torch
from test_calibration import untrained

import bnn_pyro as bp
from bnn_pyro.calibration.calibrated import groups_of
from bnn_pyro.datasets.dataset import Column
from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated


def test_groups_are_read_behind_a_column_with_an_indicator():
    columns = Column("size", fill=0.0), Column("town", ("north", "south"))  # features size, size missing, two of town
    x = torch.tensor([[0.5, 0.0, 1.0, 0.0], [0.1, 1.0, 0.0, 1.0]])
    schema = bp.Schema("regression", (4,), columns=columns)
    assert groups_of(x, "town", schema) == ["north", "south"] and groups_of(x, "size", schema) == ["0.5", "0.1"]


def test_groups_are_columns_or_labels(tmp_path):
    posterior, x, y = untrained(rows=torch.zeros(1, dtype=torch.int64))
    calibrated = bp.calibrate(posterior, x[:100], y[:100], groups="town")
    towns = np.where(x[:, 1] > x[:, 2], "north", "south")
    assert calibrated.conformal.groups == towns[:100].tolist()
    calibrated.save(tmp_path)
    by_column = bp.predict(bp.load(tmp_path), x[100:]).interval(0.9)
    labelled = bp.calibrate(posterior, x[:100], y[:100], groups=towns[:100])
    assert torch.equal(labelled.predict(x[100:], groups=towns[100:]).interval(0.9).low, by_column.low)
    weights = np.ones(100), np.ones(100)
    assert torch.equal(calibrated.predict(x[100:], weights=weights).interval(0.9).low, by_column.low)
    for how, words in (({"groups": "twon"}, "did you mean 'town'"), ({"groups": "size"}, "too many for groups"),
                       ({"groups": towns}, "200 labels for 100 rows"), ({"per_class": True}, "class labels"),
                       ({"level": 1.0}, "strictly between"), ({"method": "lac"}, "is for classification"),
                       ({"method": "isotonic", "groups": "town"}, "is a recalibration"),
                       ({"method": "cqrr"}, "did you mean 'cqr'")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            bp.calibrate(posterior, x[:100], y[:100], **how)
    for bad in (torch.full((100,), math.nan), y[:99]):
        with pytest.raises(UserError):
            bp.calibrate(posterior, x[:100], bad)
    with pytest.raises(UserError, match="exactly where calibration had labels"):
        bp.predict(labelled, x)


def test_the_guarantee_holds_in_each_third_by_uncertainty(tmp_path):
    posterior, x, _ = untrained(rows=torch.zeros(1, dtype=torch.int64))
    with isolated(3):
        x = x[torch.randint(200, (4300,))] + torch.tensor([1.0, 0.0, 0.0]) * torch.randn(4300, 1)
        total = (prediction := bp.predict(posterior, x, num_draws=20)).total
        spread = torch.where(total < total.quantile(1 / 3), 2.0, 0.5)  # where it is sure, it is wrong
        y = prediction.mean + spread * total.sqrt() * torch.randn(4300)
    calibrated = bp.calibrate(posterior, x[:300], y[:300], groups="uncertainty", num_draws=20)
    calibrated.save(tmp_path)
    prediction = bp.predict(bp.load(tmp_path), x[300:])
    low, high, *_ = prediction.interval(0.9)
    thirds = np.digitize(prediction.total, np.quantile(calibrated.predict(x[:300]).total, [1 / 3, 2 / 3]))
    assert torch.equal(calibrated.predict(x[300:]).interval(0.9).low, low)
    for third in range(3):  # 100 rows calibrate each: Beta(91, 10)
        covered = ((low <= y[300:]) & (y[300:] <= high))[thirds == third].double().mean()
        assert abs(covered - 0.9) < 4 * math.sqrt(0.9 * 0.1 / 102)
    plain = bp.calibrate(posterior, x[:300], y[:300], num_draws=20).predict(x[300:]).interval(0.9)
    inside = (plain.low <= y[300:]) & (y[300:] <= plain.high)
    assert inside[thirds == 0].double().mean() < 0.8
