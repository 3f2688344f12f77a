"""The samplers' own transitions, of many chains whose targets change between one and the next.

    w ← one transition of the method that leaves p(w | y, x) as it is

The kernel, its step size and mass matrix are what ``run`` of the method makes in a short warm-up, on one data set, and
keeps from then on. Only the targets are exchanged, and what a chain remembers of its density with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.inference import Method
from bnn_pyro.inference.chees import TYPICAL, Chains, ChEES, Sampling
from bnn_pyro.inference.hmc import HMC, NUTS
from bnn_pyro.inference.linear import coordinates
from bnn_pyro.inference.potential import Potential, Space, choose_compiled
from bnn_pyro.inference.sghmc import SGHMC, SGLD
from bnn_pyro.inference.sghmc import Chains as StochasticChains
from bnn_pyro.inference.trajectories import Point

__all__ = ["Start", "transitions_of"]

#: Chains that ChEES is tuned with.
TUNED_WITH = 64

#: One transition of C chains, given targets of its own for each, y (C, N): {site: (C, *shape)}, where they then are.
Transition = Callable[[Tensor], dict[str, Tensor]]


class Start(NamedTuple):
    """Where chains begin.

    data         the inputs, and the targets that belong to ``first``
    first        {site: (*shape)}, an exact draw of that posterior, where a warm-up starts
    w            {site: (C, *shape)}, where the chains are
    transitions  how many are to come
    """

    model: nn.Module
    data: Dataset
    first: dict[str, Tensor]
    w: dict[str, Tensor]
    transitions: int
    seed: int


def _one_by_one(method: HMC | NUTS, start: Start) -> Transition:
    """All that a kernel remembers after its warm-up is where it is: it takes every chain's turn."""
    potential = _potential(start)
    z = potential.position(start.w)
    gradients = float(len(z) * start.transitions * method.typical(type(potential.space) is not Space))
    if choose_compiled(method.compiled, gradients, potential):
        potential.compile(1)
    first = potential.position({site: value[None] for site, value in start.first.items()})[0].numpy()
    kernel = method.kernel(potential, method.blocks(potential), first, start.seed)
    for _ in range(method.warmup):
        kernel.step()

    def move(y: Tensor) -> dict[str, Tensor]:
        for row, own in zip(z.numpy(), y, strict=True):
            potential.give(own)
            kernel.point = Point(row.copy(), *kernel.gradient(row))
            kernel.step()
            row[:] = kernel.point.z
        return potential.weights(z)

    return move


def _all_at_once(method: ChEES, start: Start) -> Transition:
    """ChEES is tuned with few chains; what they learned moves all of them."""
    potential, chains = _potential(start), dict(superchains=1, thin=1)
    z = potential.position(start.w)
    if choose_compiled(method.compiled, float(method.warmup * TYPICAL), potential):
        potential.compile(TUNED_WITH)
    tuned = Sampling(replace(method, chains=TUNED_WITH, **chains), potential)
    tuned.begin(potential.prior_draws(TUNED_WITH))
    while tuned.record.done < method.warmup:
        tuned.iterate()
    sampling = Sampling(replace(method, chains=len(z), draws=start.transitions, **chains), potential)
    sampling.first, sampling.adaptation, sampling.record.done = tuned.first, tuned.adaptation, tuned.record.done

    def move(y: Tensor) -> dict[str, Tensor]:
        nonlocal z
        potential.give(y)
        sampling.chains = Chains(z, *potential(z))
        sampling.iterate()
        z = sampling.chains.z
        return potential.weights(z)

    return move


def _in_steps(method: SGHMC | SGLD, start: Start, steps: int = 1) -> Transition:
    """On all rows at a constant step size, ``steps`` of them a transition; momenta are kept."""
    total = start.transitions * steps
    whole = dict(epochs=total, burn_in=0, batch_size=0, schedule="constant", thin=total, max_draws=1)
    chains = len(next(iter(start.w.values())))
    run = StochasticChains(replace(method, chains=chains, **whole), start.model, start.data, start.seed)
    run.start_at(start.w)

    def move(y: Tensor) -> dict[str, Tensor]:
        for _ in range(steps):
            run.advance(start.data.x_train, y)
        run.record()  # raises UserError where something stops being finite
        return {site: value.clone() for site, value in run.log_joint.sites(run.w).items()}

    return move


def _potential(start: Start) -> Potential:
    potential = Potential(start.model, start.data.x_train, start.data.y_train)
    potential.space = coordinates(potential)
    return potential


_KINDS = {HMC: _one_by_one, NUTS: _one_by_one, ChEES: _all_at_once, SGHMC: _in_steps, SGLD: _in_steps}


def transitions_of(kind: type[Method]) -> Callable[..., Transition] | None:
    """What makes C chains from (method, start) of a method of this class; None where its transitions are not known."""
    return next((made for known, made in _KINDS.items() if issubclass(kind, known)), None)
