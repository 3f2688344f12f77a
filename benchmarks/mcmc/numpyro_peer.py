"""The same models as a user of NumPyro writes them, and its NUTS.

Shapes and scales are read off the package's model, and the log joint densities are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pyro
import torch
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

from benchmarks.mcmc.problems import Problem
from benchmarks.mcmc.pyro_peer import plain_model, pyro_model
from bnn_pyro import isolated

__all__ = ["check", "numpyro_model", "sample"]


def numpyro_model(problem: Problem) -> tuple[Callable, tuple[Any, Any]]:
    """(the model in NumPyro, its arguments x and y)."""
    joint = plain_model(problem, numpyro, {"relu": jax.nn.relu, "tanh": jnp.tanh}[problem.entry.activation])
    return joint, (jnp.asarray(problem.data.x_train.numpy()), jnp.asarray(problem.data.y_train.numpy()))


def check(problem: Problem, draws: int = 20, tolerance: float = 1e-4) -> float:
    """Largest relative difference of the package's log joint to the others'; AssertionError above ``tolerance``."""
    model, (plain, given) = problem.model(), pyro_model(problem)
    joint, args = numpyro_model(problem)
    theirs = jax.jit(lambda w: log_density(joint, args, {}, w)[0])
    worst = 0.0
    with isolated(0), torch.no_grad(), pyro.validation_enabled(False):
        for k in range(draws):
            w = {n: (0.2 + k / draws) * torch.randn_like(p) for n, p in model.net.named_parameters()}
            ours = density(model, (problem.data.x_train, problem.data.y_train), w)
            there = float(theirs({n: jnp.asarray(v.numpy()) for n, v in w.items()}))
            for other in (density(plain, given, w), there):
                worst = max(worst, abs(ours - other) / (1 + abs(ours)))
    assert worst < tolerance, f"{problem.name}: the log joint densities differ by {worst:.1e} of their size"
    return worst


def density(model: Callable, args: tuple, w: dict[str, torch.Tensor]) -> float:
    """The log joint density of a Pyro model, nats."""
    return float(pyro.poutine.trace(pyro.poutine.condition(model, data=w)).get_trace(*args).log_prob_sum())


def sample(
    problem: Problem, *, chains: int, warmup: int, draws: int, method: str, seed: int, dense_mass: bool = False
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """({site: (C, D, *shape)}, {n_steps, diverging: (C, D)}) from a first call: compilation is in it."""
    joint, args = numpyro_model(problem)
    numpyro.enable_x64(False)
    run = MCMC(
        NUTS(joint, dense_mass=dense_mass),
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method=method,
        progress_bar=False,
    )
    run.run(jax.random.PRNGKey(seed), *args, extra_fields=("num_steps", "diverging", "accept_prob"))
    found = {name: np.asarray(value) for name, value in run.get_samples(group_by_chain=True).items()}
    extra = run.get_extra_fields(group_by_chain=True)
    names = {"num_steps": "n_steps", "diverging": "diverging", "accept_prob": "acceptance_rate"}
    return found, {ours: np.asarray(extra[theirs], dtype=float) for theirs, ours in names.items()}
