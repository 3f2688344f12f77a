"""Pyro work that leaves nothing behind, and nothing behind that reaches it."""

import random

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from conjugate import correlated
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam

import bnn_pyro as bp
from bnn_pyro.isolation import isolated

FIRST, SECOND = correlated(num=20, seed=1), correlated(num=20, seed=2)
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
    assert not torch.equal(fit(FIRST, seed=8).guide.loc, expected)


@pytest.mark.parametrize("work", ["fit", "predict", "draw", "load"])
def test_public_calls_leave_store_and_generators_alone(work, tmp_path):
    posterior = bp.fit(FIRST.entry(), FIRST.data, QUICK, seed=0, progress=False, out=tmp_path)
    calls = {
        "fit": lambda: fit(FIRST),
        "predict": lambda: bp.predict(posterior, FIRST.data.x_train, num_draws=3),
        "draw": lambda: posterior.draw(3, seed=5),
        "load": lambda: bp.load(tmp_path),
    }
    with isolated(1):
        pyro.param("mine", torch.ones(1))
        before = state()
        calls[work]()
        assert state() == before
        assert list(pyro.get_param_store()) == ["mine"] and pyro.param("mine").item() == 1.0
        assert pyro.settings.get("module_local_params")
    assert not pyro.settings.get("module_local_params")


class Planned(Exception):
    pass


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_comes_back(seed, fails):
    with isolated(0):
        pyro.param("mine", torch.ones(1))
        before = state()
        try:
            with isolated(seed):
                assert not list(pyro.get_param_store())
                with pyro.settings.context(module_local_params=False):
                    use_everything() if seed is not None else pyro.param("other", torch.zeros(1))
                if fails:
                    raise Planned
        except Planned:
            pass
        assert list(pyro.get_param_store()) == ["mine"]
        assert state() == before


def test_without_a_seed_the_generators_are_the_callers():
    with isolated(0):
        first = torch.rand(1)
        with isolated():
            second = torch.rand(1)
    with isolated(0):
        assert torch.equal(torch.rand(2), torch.cat([first, second]))


def test_a_fit_that_fails_leaves_nothing():
    before = state()
    with pytest.raises(bp.UserError):
        bp.fit(FIRST.entry(), FIRST.data, bp.SVI(epochs=20, lr=1e30), progress=False)
    assert state() == before and not list(pyro.get_param_store())


def test_parameters_of_a_users_own_run_survive_a_fit():
    """Same object, same value, still trainable: the store is theirs."""
    with isolated(0), pyro.settings.context(module_local_params=False):

        def model(y):
            pyro.sample("y", dist.Normal(pyro.param("loc", torch.zeros(())), 1.0), obs=y)

        svi = SVI(model, lambda y: None, Adam({"lr": 0.1}), Trace_ELBO())
        svi.step(torch.tensor(2.0))
        mine, value = pyro.param("loc").unconstrained(), pyro.param("loc").item()
        fit(FIRST)
        assert pyro.param("loc").unconstrained() is mine and pyro.param("loc").item() == value
        svi.step(torch.tensor(2.0))
        assert pyro.param("loc").item() > value
