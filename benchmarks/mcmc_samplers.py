"""Who is measured by ``benchmarks/mcmc.py``: one line a sampler and setting, and how each kind is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyro
from mcmc_problems import Problem

import bnn_pyro as bp
from bnn_pyro.errors import UserError
from bnn_pyro.inference import METHODS
from bnn_pyro.settings import build, plain

__all__ = ["SAMPLERS", "Absent", "Sampler", "in_full", "run"]

#: {site: (C, D, *shape)}, and what is known of every transition, (C, D).
Found = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


class Absent(Exception):
    """This version of the package has no such method, or none with such settings."""


@dataclass(frozen=True)
class Sampler:
    """A line of the table.

    kind      how it is called: pyro, numpyro, nuts or chees
    title     how the table names it
    settings  for every problem; ``by_problem`` those that differ
    devices   XLA's on the host
    threads   torch's
    cached    with compiled code on disk from a run before
    seeds     runs from different seeds; the table shows the median
    """

    kind: str
    title: str
    settings: dict[str, Any]
    by_problem: dict[str, dict[str, Any]] = field(default_factory=dict)
    devices: int = 1
    threads: int = 1
    cached: bool = False
    seeds: tuple[int, ...] = (0, 1, 2)

    def settings_for(self, problem: str) -> dict[str, Any]:
        """What it is run with."""
        return self.settings | self.by_problem.get(problem, {})


#: Pyro's budgets are cut where 1,000 + 1,000 transitions would take from a quarter of an hour to two hours.
BRIEF = {"warmup": 200, "draws": 200}
SHORT = {"breast-cancer": {"warmup": 150, "draws": 150}, "toy-curve": {"warmup": 40, "draws": 40}}
FULL = {"chains": 1, "warmup": 1000, "draws": 1000}
FOUR = FULL | {"chains": 4}
PARALLEL = FOUR | {"method": "parallel"}

SAMPLERS: dict[str, Sampler] = {
    "pyro": Sampler("pyro", "Pyro NUTS", BRIEF | {"jit": False}, SHORT, seeds=(0,)),
    "pyro-jit": Sampler("pyro", "Pyro NUTS, jit_compile", BRIEF | {"jit": True}, SHORT, seeds=(0,)),
    "numpyro": Sampler("numpyro", "NumPyro NUTS", FULL | {"method": "sequential"}, seeds=(0, 1)),
    "numpyro-sequential": Sampler("numpyro", "NumPyro NUTS, sequential", FOUR | {"method": "sequential"}, seeds=(0,)),
    "numpyro-vectorized": Sampler("numpyro", "NumPyro NUTS, vectorized", FOUR | {"method": "vectorized"}, seeds=(0,)),
    "numpyro-parallel": Sampler("numpyro", "NumPyro NUTS, parallel", PARALLEL, devices=4),
    "chees-wide": Sampler("chees", "bnn_pyro ChEES, long", {"chains": 256, "draws": 1000}, threads=2),
    "numpyro-cached": Sampler(
        "numpyro", "NumPyro NUTS, parallel, compiled before", PARALLEL, devices=4, cached=True, seeds=(0,)
    ),
    "numpyro-dense": Sampler(
        "numpyro", "NumPyro NUTS, parallel, dense mass", PARALLEL | {"dense_mass": True}, devices=4, seeds=(0,)
    ),
    "numpyro-long": Sampler("numpyro", "NumPyro NUTS, parallel", PARALLEL | {"draws": 5000}, devices=4, seeds=(0, 1)),
    "nuts": Sampler("nuts", "bnn_pyro NUTS", FULL),
    "nuts-4": Sampler("nuts", "bnn_pyro NUTS", FOUR),
    "chees-16": Sampler("chees", "bnn_pyro ChEES", {"chains": 16}, threads=2),
    "chees-64": Sampler("chees", "bnn_pyro ChEES", {"chains": 64}, threads=2),
    "chees-256": Sampler("chees", "bnn_pyro ChEES", {"chains": 256}, threads=2),
    "chees-long": Sampler("chees", "bnn_pyro ChEES, long", {"chains": 64, "draws": 1000}, threads=2),
}


def by_pyro(problem: Problem, seed: int, **settings: Any) -> Found:
    """Plain ``pyro.infer.NUTS(model)``, one chain."""
    import mcmc_pyro

    return mcmc_pyro.sample(problem, seed=seed, **settings)


def by_numpyro(problem: Problem, seed: int, **settings: Any) -> Found:
    """NumPyro's NUTS."""
    import mcmc_numpyro

    return mcmc_numpyro.sample(problem, seed=seed, **settings)


def in_full(sampler: Sampler, problem: str) -> dict[str, Any]:
    """The settings with this package's defaults filled in: what a run is known by."""
    settings = sampler.settings_for(problem)
    return plain(build(METHODS[sampler.kind], settings)) if sampler.kind in METHODS else settings


def by_package(name: str) -> Callable[..., Found]:
    """A method of this package, through its one door."""

    def sample(problem: Problem, seed: int, **settings: Any) -> Found:
        if name not in METHODS:
            raise Absent(f"this version of bnn_pyro has no method '{name}' (yet)")
        try:
            method = build(METHODS[name], settings)
        except UserError as error:
            raise Absent(str(error)) from error
        posterior = bp.fit(problem.entry, problem.data, method, seed=seed, device="cpu", progress=False)
        stats = {key: value.numpy() for key, value in posterior.stats.items()}
        return {site: value.numpy() for site, value in posterior.chains.items()}, stats

    return sample


KINDS: dict[str, Callable[..., Found]] = {
    "pyro": by_pyro,
    "numpyro": by_numpyro,
    "nuts": by_package("nuts"),
    "chees": by_package("chees"),
}


def run(sampler: Sampler, problem: Problem, seed: int) -> Found:
    """Draws of the posterior, from nothing. Raises Absent."""
    with pyro.validation_enabled(True):  # Pyro's default
        return KINDS[sampler.kind](problem, seed, **sampler.settings_for(problem.name))
