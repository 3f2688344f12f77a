"""Augmentation drawn anew in every step, and processes that read ahead: the same bits however they are read."""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from refused import refuses

import bnn_pyro as bp
from bnn_pyro.inference.mini_batches import MiniBatches

RNG = np.random.default_rng(0)
DATA = bp.dataset(RNG.integers(0, 255, (60, 6, 6), dtype=np.uint8), np.arange(60) % 2, split=0, validation=12)
METHOD = bp.SVI(epochs=5, batch_size=16, patience=3)
KILL = {"process": 0}


def noisy(x):
    """Draws from two generators; of pixels between 0 and 1, of one image."""
    assert x.shape == (1, 6, 6) and x.min() >= 0 and x.max() <= 1
    return x + 0.3 * torch.rand(()) + 0.1 * np.random.rand()  # noqa: NPY002 (the generator that Pyro seeds)


def killed(x):
    """Ends the process that reads, once."""
    if KILL["process"] not in (0, os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def loc(method, **how):
    return bp.fit(bp.MeanField(hidden=(4,)), DATA, method, progress=False, device="cpu", **how).guide.loc


def test_it_is_drawn_anew_and_the_same_by_any_number_of_processes():
    batches = MiniBatches(DATA, 0, METHOD.__class__(augment=noisy).augment)
    (first, y), (again, _), (other, _) = (batches[step, slice(4)] for step in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other) and torch.equal(y, DATA.y_train[:4])
    difference = (DATA.schema.unstandardise(first) - DATA.schema.unstandardise(DATA.x_train[:4])).flatten(1)
    assert (difference.std(1) < 1e-5).all() and difference.mean(1).unique().numel() == 4
    augmented = replace(METHOD, augment=noisy)
    expected = loc(augmented)
    assert not torch.equal(expected, loc(METHOD))
    assert torch.equal(expected, loc(replace(augmented, workers=2)))
    assert torch.equal(loc(METHOD), loc(replace(METHOD, workers=1)))


def test_to_a_gpu_rows_go_from_pinned_memory_without_waiting(monkeypatch):
    seen, cuda = [], torch.device("cuda", 0)

    class Pinned:
        def to(self, *where, **how):
            seen.append((where, how))

    def loader(batches, size, *, pin_memory, num_workers, sampler, **rest):
        seen.append((pin_memory, num_workers, batches.data.x_train.device.type))
        return [(Pinned(), Pinned()) for _ in sampler]

    monkeypatch.setattr("bnn_pyro.inference.mini_batches.torch_data.DataLoader", loader)
    on_gpu = SimpleNamespace(x_train=SimpleNamespace(device=cuda), to={"cpu": DATA}.get)
    assert len([*MiniBatches(on_gpu, 0).load(iter([(0, slice(4))]), 2)]) == 1
    assert seen == [(True, 2, "cpu"), *[((cuda,), {"non_blocking": True})] * 2]


def test_a_process_that_dies_is_said_and_a_bad_function_is_named():
    KILL["process"] = os.getpid()
    refuses("reads mini-batches died .* set workers to 0", loc, replace(METHOD, augment=killed, workers=1))
    refuses("augment: .* makes .1, 3, 6. of .1, 6, 6.", loc, replace(METHOD, augment=lambda x: x[:, :3]))
    refuses("augment: .* failed: .*division", loc, replace(METHOD, augment=lambda x: x / (1 // 0)))
    refuses("there is no nowhere:flip", loc, replace(METHOD, augment="nowhere:flip"))
