"""Pyro work that leaves nothing behind, and nothing behind that reaches it."""

import random
from contextlib import nullcontext, suppress

import numpy as np
import pyro
import pytest
import torch
from conjugate import correlated

import bnn_pyro as bp
from bnn_pyro.isolation import isolated

FIRST = correlated(num=20, seed=1)
QUICK = bp.SVI(epochs=20)


def fit(problem, seed=0):
    return bp.fit(problem.entry(), problem.data, QUICK, seed=seed, progress=False, device="cpu")


def state():
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002


def use_everything():
    """Draw from all generators and leave a parameter in the global store."""
    random.random()
    np.random.rand()  # noqa: NPY002 (the generator that Pyro seeds)
    torch.rand(1)
    pyro.param(f"p{len(pyro.get_param_store())}", torch.zeros(2))


def test_the_seed_decides_whatever_the_caller_did_before():
    expected = fit(FIRST, seed=7).guide.loc.detach()
    with isolated(123):  # another state of every generator, and a full store
        use_everything()
        assert torch.equal(fit(FIRST, seed=7).guide.loc, expected)
        with isolated(5):
            first = torch.rand(2)
    with isolated(5):
        assert torch.equal(torch.rand(1), first[:1])
        with isolated():  # without a seed the generators are the caller's
            assert torch.equal(torch.rand(1), first[1:])
    assert not torch.equal(fit(FIRST, seed=8).guide.loc, expected)


@pytest.mark.parametrize("work", ["fit", "a fit that fails", "predict", "draw", "load"])
def test_public_calls_leave_store_and_generators_alone(work, tmp_path):
    posterior = bp.fit(FIRST.entry(), FIRST.data, QUICK, seed=0, progress=False, out=tmp_path)
    calls = {
        "fit": lambda: fit(FIRST),
        "a fit that fails": lambda: bp.fit(FIRST.entry(), FIRST.data, bp.SVI(epochs=20, lr=1e30), progress=False),
        "predict": lambda: bp.predict(posterior, FIRST.data.x_train, num_draws=3),
        "draw": lambda: posterior.draw(3, seed=5),
        "load": lambda: bp.load(tmp_path),
    }
    with isolated(1):
        mine, before = pyro.param("mine", torch.ones(1)).unconstrained(), state()
        with pytest.raises(bp.UserError) if work == "a fit that fails" else nullcontext():
            calls[work]()
        assert state() == before
        assert list(pyro.get_param_store()) == ["mine"] and pyro.param("mine").item() == 1.0
        assert pyro.param("mine").unconstrained() is mine and mine.requires_grad
        assert pyro.settings.get("module_local_params")
    assert not pyro.settings.get("module_local_params")


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_comes_back(seed, fails):
    with isolated(0):
        pyro.param("mine", torch.ones(1))
        before = state()
        with suppress(KeyError), isolated(seed):
            assert not list(pyro.get_param_store())
            with pyro.settings.context(module_local_params=False):
                use_everything() if seed is not None else pyro.param("other", torch.zeros(1))
            if fails:
                raise KeyError
        assert list(pyro.get_param_store()) == ["mine"]
        assert state() == before
