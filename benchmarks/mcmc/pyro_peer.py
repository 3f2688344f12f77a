"""The same models as an ordinary user of Pyro or NumPyro writes them, and plain ``pyro.infer.NUTS``.

The package's own model serves Pyro's kernels too, and takes as long there; but ``jit_compile`` refuses the functional
calls in it, and a peer should have its best settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import MCMC, NUTS

from benchmarks.mcmc.problems import Problem
from bnn_pyro import isolated

__all__ = ["plain_model", "pyro_model", "sample"]


def plain_model(problem: Problem, library: Any, activation: Callable) -> Callable[..., None]:
    """The model of x and y by ``sample``, ``plate`` and ``distributions`` of a library, pyro or numpyro."""
    (sites, schema), dist = (problem.sites(), problem.data.schema), library.distributions
    layers, regression = len(sites) // 2, schema.task == "regression"

    def joint(x: Any, y: Any = None) -> None:
        w = {n: library.sample(n, dist.Normal(0.0, s).expand(shape).to_event(len(shape))) for n, shape, s in sites}
        h = x
        for k in range(layers):
            h = h @ w[f"layers.{k}.weight"].T + w[f"layers.{k}.bias"]
            h = activation(h) if k + 1 < layers else h[:, 0]
        with library.plate("data", len(x)):
            if regression:
                library.sample("y", dist.Normal(schema.y_shift + schema.y_scale * h, problem.entry.noise), obs=y)
            else:
                library.sample("y", dist.Bernoulli(logits=h), obs=y)

    return joint


def pyro_model(problem: Problem) -> tuple[Callable, tuple[torch.Tensor, torch.Tensor]]:
    """(the model in plain Pyro, its arguments x and y)."""
    joint = plain_model(problem, pyro, getattr(torch, problem.entry.activation))
    return joint, (problem.data.x_train, problem.data.y_train.float())


def sample(
    problem: Problem, *, warmup: int, draws: int, jit: bool, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """({site: (1, D, *shape)}, {diverging: (1, D)}) of one chain with Pyro's default settings."""
    joint, args = pyro_model(problem)
    with isolated(seed):
        kernel = NUTS(joint, jit_compile=jit, ignore_jit_warnings=True)
        run = MCMC(kernel, num_samples=draws, warmup_steps=warmup, disable_progbar=True)
        run.run(*args)
    found = {site: value.numpy() for site, value in run.get_samples(group_by_chain=True).items()}
    diverging = np.zeros((1, draws))
    diverging[0, run.diagnostics()["divergences"]["chain 0"]] = 1
    return found, {"diverging": diverging}
