"""Torch data sets and loaders become the data set that their arrays become."""

import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bnn_pyro as bp
from bnn_pyro.datasets.rows import Rows

RNG = np.random.default_rng(0)
X, Y = torch.from_numpy(RNG.normal(size=(60, 3)).astype(np.float32)), torch.from_numpy(RNG.normal(size=60))


class Stream(IterableDataset):
    """Rows one after the other, without a length."""

    def __init__(self, num=60, width=None):
        self.num, self.width = num, width

    def __iter__(self):
        for k in range(self.num):
            yield (X[k] if self.width is None or k < 10 else X[k, : self.width]), Y[k]


def same(a, b):
    assert a.schema == b.schema and a.fingerprint == b.fingerprint
    assert all(torch.equal(part[:], b.parts()[name][:]) for name, part in a.parts().items())


@pytest.mark.parametrize("large", [False, True])
def test_loaders_are_the_arrays_that_they_give(large, monkeypatch):
    """Also on disk, and whatever their order and their batches."""
    expected, both = bp.dataset(X, Y), bp.dataset(X, Y, x_test=X[:20], y_test=Y[:20])
    monkeypatch.setenv("BNN_PYRO_MEMORY", "1e-7" if large else "1")
    items, small = TensorDataset(X, Y), TensorDataset(X[:20], Y[:20])
    shuffled = DataLoader(items, 7, shuffle=True, generator=torch.Generator().manual_seed(1))
    data = bp.dataset(train=shuffled)
    assert isinstance(data.x_train, Rows) == large
    same(data, expected)
    same(bp.dataset(train=Stream(), rows=60), expected)
    for test, rows in ((DataLoader(small, 8), 60), (DataLoader(Stream(20), 8), (60, 20))):
        same(bp.dataset(train=DataLoader(Stream(), 16), test=test, rows=rows), both)


def test_classes_of_both_parts_are_the_same():
    items, other = (TensorDataset(X, (Y > 0).long()) for _ in range(2))
    items.classes, other.classes = ["down", "up"], ["up", "down"]
    data = bp.dataset(train=DataLoader(items, 8), test=DataLoader(items, 8))
    assert data.schema.classes == ("down", "up") and torch.equal(data.y_test, (Y > 0).long())
    with pytest.raises(bp.UserError, match="test has the classes"):
        bp.dataset(train=DataLoader(items, 8), test=DataLoader(other, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(train=DataLoader(Stream(), 16)), "train has no length; give rows="),
        (dict(train=DataLoader(Stream(), 16), rows=80), "train ends after 60 of 80 rows"),
        (dict(train=DataLoader(Stream(), 16), rows=50), "train has more rows than 50"),
        (dict(train=DataLoader(TensorDataset(X, Y)), rows=50), "train has 60 rows, and rows=50"),
        (dict(train=Stream(width=2), rows=60), "train[10] is float32 (2,) and float64 (1,), and train[0]"),
        (dict(train=DataLoader(TensorDataset(X), 8, drop_last=True)), "must be a pair"),
        (dict(x=X, y=Y, rows=60), "rows= are of torch data sets and loaders"),
        (dict(x=X, train=TensorDataset(X, Y)), "give X or train="),
    ],
)
def test_loaders_that_are_refused(options, message):
    with pytest.raises(bp.UserError, match=re.escape(message)):
        bp.dataset(**options)
