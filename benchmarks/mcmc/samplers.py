"""Who samples: one line a sampler and setting, and how each kind is called."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import pyro

import bnn_pyro as bp
from benchmarks.mcmc.problems import Problem
from bnn_pyro.settings import build, plain

__all__ = ["SAMPLERS", "Sampler", "sample", "settings_of"]

#: {site: (C, D, *shape)}, and the statistics of every transition, (C, D).
Draws = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Sampler:
    """A line of the table.

    kind      how it is called: pyro, numpyro, nuts or chees
    title     how the table names it
    settings  for every problem; ``by_problem`` those that differ
    devices   XLA's on the host
    threads   torch's
    seeds     runs from different seeds; the table shows the median
    """

    kind: str
    title: str
    settings: dict[str, Any]
    by_problem: dict[str, dict[str, Any]] = field(default_factory=dict)
    devices: int = 1
    threads: int = 1
    seeds: tuple[int, ...] = (0, 1, 2)


#: Pyro's budgets are cut where 1,000 + 1,000 transitions would take from a quarter of an hour to two hours.
BRIEF = {"warmup": 200, "draws": 200}
SHORT = {"breast-cancer": {"warmup": 150, "draws": 150}, "toy-curve": {"warmup": 40, "draws": 40}}
FULL = {"chains": 1, "warmup": 1000, "draws": 1000}
FOUR = FULL | {"chains": 4}
PARALLEL = FOUR | {"method": "parallel"}


def _numpyro(title: str, settings: dict[str, Any], **more: Any) -> Sampler:
    return Sampler("numpyro", f"NumPyro NUTS{title}", settings, **more)


def _chees(chains: int) -> Sampler:
    return Sampler("chees", "bnn_pyro ChEES", {"chains": chains}, threads=2)


SAMPLERS: dict[str, Sampler] = {
    "pyro": Sampler("pyro", "Pyro NUTS", BRIEF | {"jit": False}, SHORT, seeds=(0,)),
    "pyro-jit": Sampler("pyro", "Pyro NUTS, `jit_compile`", BRIEF | {"jit": True}, SHORT, seeds=(0,)),
    "numpyro": _numpyro("", FULL | {"method": "sequential"}, seeds=(0, 1)),
    "numpyro-sequential": _numpyro(", sequential", FOUR | {"method": "sequential"}, seeds=(0,)),
    "numpyro-vectorized": _numpyro(", vectorized", FOUR | {"method": "vectorized"}, seeds=(0,)),
    "numpyro-parallel": _numpyro(", parallel", PARALLEL, devices=4),
    "numpyro-dense": _numpyro(", parallel, dense mass", PARALLEL | {"dense_mass": True}, devices=4, seeds=(0,)),
    "numpyro-long": _numpyro(", parallel, long", PARALLEL | {"draws": 5000}, devices=4, seeds=(0, 1)),
    "nuts": Sampler("nuts", "bnn_pyro NUTS", FULL),
    "nuts-4": Sampler("nuts", "bnn_pyro NUTS", FOUR),
    "chees-16": _chees(16),
    "chees-64": _chees(64),
    "chees-256": _chees(256),
}


def settings_of(sampler: Sampler, problem: str) -> dict[str, Any]:
    """All settings, this package's defaults filled in: what a run is known by."""
    settings = sampler.settings | sampler.by_problem.get(problem, {})
    return plain(build(bp.METHODS[sampler.kind], settings)) if sampler.kind in bp.METHODS else settings


def sample(sampler: Sampler, problem: Problem, seed: int) -> Draws:
    """Draws of the posterior, from nothing."""
    settings = sampler.settings | sampler.by_problem.get(problem.name, {})
    with pyro.validation_enabled(True):  # Pyro's default
        if sampler.kind not in bp.METHODS:
            return import_module(f"benchmarks.mcmc.{sampler.kind}_peer").sample(problem, seed=seed, **settings)
        method = build(bp.METHODS[sampler.kind], settings)
        posterior = bp.fit(problem.entry, problem.data, method, seed=seed, device="cpu", progress=False)
    chains, stats = ({k: v.numpy() for k, v in of.items()} for of in (posterior.chains, posterior.stats))
    return chains, stats
