"""Features of a frozen backbone: computed once, the network left as it was, and a cache that is never the wrong one."""

import os
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conjugate import dataset
from refused import refuses
from torch import nn

import bnn_pyro as bp
from bnn_pyro import features
from bnn_pyro.features import on_features

QUICK = bp.MAP(epochs=2, batch_size=16)


class Net(nn.Module):
    """A user's own network. What it is called with is kept outside of it, where a copy finds it too."""

    calls: list = []  # noqa: RUF012

    def __init__(self, activation=torch.tanh):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 5)
        self.activation = activation

    def forward(self, x):
        Net.calls.append((x.clone(), {part.training for part in self.modules()}, torch.is_grad_enabled()))
        return self.activation(self.second(self.drop(self.activation(self.first(x)))))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of each test's own that keeps everything."""
    monkeypatch.setenv("BNN_PYRO_CACHE", str(tmp_path))
    monkeypatch.setattr(features, "SMALL", 1)
    monkeypatch.setattr(features, "PROBE", 2)
    Net.calls.clear()
    return tmp_path / "features"


def net(seed=0, **settings):
    with bp.isolated(seed):
        return Net(**settings)


def rows(num=40, num_val=10, x_shift=0.0, x_scale=1.0, last=0.0, shape=(4,)):
    """``last`` is added to the last training row."""
    x = torch.randn(num + num_val + 7, *shape, generator=torch.Generator().manual_seed(1))
    x[num - 1] += last
    y = (x.flatten(1)[:, 0] > 0).long() + (x.flatten(1)[:, 1] > 1).long()
    schema = bp.Schema("classification", shape, tuple("abc"), x_shift=(x_shift,), x_scale=(x_scale,))
    train, val, test = (slice(0, num), slice(num, num + num_val), slice(num + num_val, None))
    return bp.Dataset("by-hand", schema, x[train], y[train], x[val], y[val], x[test], y[test])


def seen(module, data, inputs=None):
    """The data set of features."""
    with bp.isolated(0):
        return on_features(bp.LastLayer(backbone=module, inputs=inputs).model(data.schema), data)


def rows_run():
    """How many rows the network was run on, but for the probes of shape and repeatability (2 rows each)."""
    return sum(len(x) for x, *_ in Net.calls if len(x) > 2)


def test_they_are_the_networks_own_over_their_root_mean_square():
    x = torch.rand(600, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = dataset(x, torch.arange(600) % 3, bp.Schema("classification", (3, 16, 16), tuple("abc")))
    with bp.isolated(0):
        _, inside = seen(nn.Conv2d(3, 2, 3), images)  # features of any shape, rows a few at a time
    assert inside.x_train.shape == (600, 2 * 14 * 14)
    data, module = rows(x_shift=3.0, x_scale=2.0), net()
    head, inside = seen(module, data)  # of inputs as they are: raw ones are asked for below
    own = [module.eval()(x).detach() for x in (data.x_train, data.x_val)]
    c = own[0].square().mean().sqrt()
    torch.testing.assert_close(inside.x_train, own[0] / c)
    torch.testing.assert_close(inside.x_val, own[1] / c)
    assert inside.x_train.square().mean().item() == pytest.approx(1, abs=1e-6)
    assert inside.schema.input_shape == (5,) and inside.schema.classes == data.schema.classes
    assert torch.equal(inside.y_train, data.y_train) and len(inside.x_test) == len(inside.y_test) == 0
    with bp.isolated(0):
        assert head(inside.x_train).shape == (40,)


def test_it_runs_once_out_of_training_mode_and_without_gradients_whatever_the_number_of_draws():
    data, module = rows(), net()
    module.train()
    module.second.eval()
    modes = [part.training for part in module.modules()]
    posterior = bp.fit(bp.LastLayer(backbone=module), data, bp.SVI(epochs=2), progress=False, device="cpu")
    assert rows_run() == 40 + 10
    assert all(modes_inside == {False} and not gradients for _, modes_inside, gradients in Net.calls)
    Net.calls.clear()
    prediction = bp.predict(posterior, data.x_test, num_draws=300, max_memory=4000)
    assert prediction.num_draws == 300
    assert [len(x) for x, *_ in Net.calls] == [7] and Net.calls[0][1:] == ({False}, False)
    assert [part.training for part in module.modules()] == modes
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    with torch.no_grad():  # the posterior has a copy: the user may train the module on
        module.first.weight.zero_()
    assert torch.equal(bp.predict(posterior, data.x_test, num_draws=300, max_memory=4000).probs, prediction.probs)


class Output(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def test_networks_without_usable_features_are_refused_in_one_line():
    for function, words in (
        (lambda x: x / 0 - x / 0, "not finite"),
        (lambda x: x[:, 0], r"features of shape \(2, F\) for 2 rows, and gave \(2,\)"),
        (lambda x: x[:1], r"gave \(1, 4\)"),
        (lambda x: x * 0, "all features of the backbone .* are 0"),
        (lambda x: nn.functional.linear(x, torch.zeros(2, 3)), r"inputs of shape \(2, 4\): "),
        (lambda x: nn.functional.dropout(x + 10), "gives different features for the same rows"),
    ):
        entry = bp.LastLayer(backbone=Output(function))
        refuses(f"(?=.*Output).*{words}", bp.fit, entry, rows(), QUICK, progress=False, device="cpu")


def files(cache):
    return {path.name for path in cache.iterdir()}


def changed(module):
    with torch.no_grad():
        module.second.bias[0] += 1e-3
    return module


CHANGES = {
    "a weight": lambda: (changed(net()), rows()),
    "the last row": lambda: (net(), rows(last=1.0)),
    "the code": lambda: (net(activation=torch.sigmoid), rows()),
    "the units": lambda: (net(), rows(x_scale=2.0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_network_or_other_inputs_are_another_file(cache, change):
    seen(net(), rows(num_val=0), "raw")
    Net.calls.clear()
    module, data = CHANGES[change]()
    _, inside = seen(module, data, "raw")
    assert rows_run() == 50 and len(files(cache)) == 3
    own = module.eval()(data.schema.unstandardise(data.x_train)).detach()
    torch.testing.assert_close(inside.x_train, own / own.square().mean().sqrt())


def test_the_second_time_the_file_is_mapped_and_gives_the_same_fit(cache, monkeypatch):
    monkeypatch.setattr(os, "utime", Mock(side_effect=PermissionError("not yours")))  # a cache to read alone is read
    data, entry = rows(), bp.LastLayer(backbone=net())
    with monkeypatch.context() as patch:
        patch.setattr(features, "SMALL", 4 * 40 * 5 + 1)  # small features are not written
        in_memory = bp.fit(entry, data, QUICK, progress=False, device="cpu")
    assert not cache.exists()
    maps, load = [], np.load
    monkeypatch.setattr(np, "load", lambda *a, **k: maps.append(load(*a, **k)) or maps[-1])
    for num_run in (50, 0):  # computed and written; read
        maps.clear()
        Net.calls.clear()
        _, inside = seen(net(), data)
        assert rows_run() == num_run and len(files(cache)) == 2
        assert [type(array) for array in maps] == [np.memmap, np.memmap]
        assert inside.x_train.data_ptr() == maps[0].ctypes.data and inside.x_val.data_ptr() == maps[1].ctypes.data
    mapped = bp.fit(entry, data, QUICK, progress=False, device="cpu")
    assert mapped.trace == in_memory.trace and mapped.model.backbone.scale == in_memory.model.backbone.scale
    assert torch.equal(bp.predict(mapped, data.x_test).probs, bp.predict(in_memory, data.x_test).probs)
    before = inside.x_train.clone()
    inside.x_train.zero_()  # does not reach the file
    assert torch.equal(seen(net(), data)[1].x_train, before)


def full_disk(file, array):
    file.write(b"half")
    raise OSError("No space left on device")


@pytest.mark.parametrize("fault", ["a full disk", "no folder"])
def test_a_cache_that_cannot_be_written_only_warns_and_holds_nothing_half_written(cache, tmp_path, monkeypatch, fault):
    whole = seen(net(), rows())[1]
    if fault == "no folder":
        (tmp_path / "file").write_text("no folder")
        monkeypatch.setenv("BNN_PYRO_CACHE", str(tmp_path / "file"))
    else:
        monkeypatch.setattr(np, "save", full_disk)
        for name in files(cache):
            (cache / name).unlink()
    with pytest.warns(UserWarning, match="features could not be cached in .*(No space left|file)"):
        assert torch.equal(seen(net(), rows())[1].x_train, whole.x_train)
    assert fault == "no folder" or not files(cache)


def test_what_was_used_least_recently_goes(cache, monkeypatch):
    size = 4 * 40 * 5 + 128 + 4
    monkeypatch.setattr(features, "CACHE_BYTES", 2 * size)
    names = []
    for age, seed in ((3000, 0), (2000, 1)):
        seen(net(seed), rows(num_val=0))
        names += files(cache) - {*names}
        assert (cache / names[-1]).stat().st_size == size
        os.utime(cache / names[-1], (0, 1e9 - age))
    seen(net(0), rows(num_val=0))  # used again: the other one is older now
    seen(net(2), rows(num_val=0))
    assert names[0] in files(cache) and names[1] not in files(cache) and len(files(cache)) == 2
