"""What every test must leave as it found it: an empty parameter store, and the caller's random generators."""

import random

import matplotlib
import numpy as np
import pyro
import pytest
import torch

matplotlib.use("Agg")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Nothing is written to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BNN_PYRO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_residue():
    torch.manual_seed(0)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (Pyro seeds this one)
    yield
    assert not dict(pyro.get_param_store()), "the global parameter store was left with parameters in it"
    assert random.getstate() == states[0], "the test moved random's generator"
    now = np.random.get_state()  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(now, states[1], strict=True)), "numpy's generator moved"
    assert torch.equal(torch.get_rng_state(), states[2]), "torch's generator moved: use isolated(seed)"
