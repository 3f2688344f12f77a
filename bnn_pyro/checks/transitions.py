"""The samplers' own transitions, of many chains whose targets change between one and the next.

    w ← one transition of the method that leaves p(w | y, x) as it is

Nothing is written anew here: the kernel, its step size and mass matrix are what ``run`` of the method makes in a short
warm-up, on one data set, and keeps from then on. Only the targets are exchanged, and what a chain remembers of its
density with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import pyro
from torch import Tensor, nn

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.inference import Method
from bnn_pyro.inference.chees import TYPICAL, ChEES
from bnn_pyro.inference.chees import _Sampling as Sampling
from bnn_pyro.inference.curvature import coordinates
from bnn_pyro.inference.hmc import HMC, NUTS
from bnn_pyro.inference.many_chains import Chains
from bnn_pyro.inference.potential import Potential, Space
from bnn_pyro.inference.sampler import choose_compiled, work
from bnn_pyro.inference.sghmc import SGHMC, SGLD
from bnn_pyro.inference.sghmc import Chains as StochasticChains
from bnn_pyro.inference.trajectories import Point

__all__ = ["Start", "Transitions", "quiet", "transitions_of"]

#: Chains that ChEES is tuned with.
TUNED_WITH = 64


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


class Transitions(Protocol):
    """C chains, at weights of their own; made from (method, start)."""

    def move(self, y: Tensor) -> dict[str, Tensor]:
        """One transition of every chain, given targets of its own, y (C, N). Returns where they are, as w."""
        ...


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Trajectories may meet infinities."""
    with pyro.validation_enabled(False), np.errstate(all="ignore"):
        yield


class _OneByOne:
    """HMC and NUTS. All that a kernel remembers after its warm-up is where it is: it takes every chain's turn."""

    def __init__(self, method: HMC | NUTS, start: Start) -> None:
        self.potential = potential = _potential(start)
        self.z = potential.position(start.w)
        gradients = float(len(self.z) * start.transitions * method.typical(type(potential.space) is not Space))
        if choose_compiled(method.compiled, gradients, work(potential)):
            potential.compile(1)
        first = potential.position({site: value[None] for site, value in start.first.items()})[0].numpy()
        self.kernel = method.kernel(potential, method._blocks(potential), first, start.seed)
        for _ in range(method.warmup):
            self.kernel.step()

    def move(self, y: Tensor) -> dict[str, Tensor]:
        """See ``Transitions``."""
        kernel = self.kernel
        for row, own in zip(self.z.numpy(), y, strict=True):
            self.potential.give(own)
            kernel.point = Point(row.copy(), *kernel.gradient(row))
            kernel.step()
            row[:] = kernel.point.z
        return self.potential.weights(self.z)


class _AllAtOnce:
    """ChEES. It is tuned with few chains; what they learned moves all of them."""

    def __init__(self, method: ChEES, start: Start) -> None:
        self.potential = potential = _potential(start)
        self.z = potential.position(start.w)
        chains = dict(superchains=1, thin=1)
        if choose_compiled(method.compiled, float(method.warmup * TYPICAL), work(potential)):
            potential.compile(TUNED_WITH)
        tuned = Sampling(replace(method, chains=TUNED_WITH, **chains), potential)
        tuned.begin(potential.prior_draws(TUNED_WITH))
        while tuned.record.done < method.warmup:
            tuned.iterate()
        self.sampling = Sampling(replace(method, chains=len(self.z), draws=start.transitions, **chains), potential)
        self.sampling.adaptation, self.sampling.record.done = tuned.adaptation, tuned.record.done

    def move(self, y: Tensor) -> dict[str, Tensor]:
        """See ``Transitions``."""
        self.potential.give(y)
        self.sampling.chains = Chains(self.z, *self.potential(self.z))
        self.sampling.iterate()
        self.z = self.sampling.chains.z
        return self.potential.weights(self.z)


class _InSteps:
    """SGHMC and SGLD on all rows at a constant step size, ``steps`` of them a transition; momenta are kept."""

    def __init__(self, method: SGHMC | SGLD, start: Start, steps: int = 1) -> None:
        self.x, self.steps = start.data.x_train, steps
        total = start.transitions * steps
        whole = dict(epochs=total, burn_in=0, batch_size=0, schedule="constant", thin=total, max_draws=1)
        chains = len(next(iter(start.w.values())))
        self.run = StochasticChains(replace(method, chains=chains, **whole), start.model, start.data, start.seed)
        self.run.start_at(start.w)

    def move(self, y: Tensor) -> dict[str, Tensor]:
        """See ``Transitions``. Raises UserError where something stops being finite."""
        for _ in range(self.steps):
            self.run.advance(self.x, y)
        self.run.record()
        return {site: value.clone() for site, value in self.run.log_joint.sites(self.run.w).items()}


def _potential(start: Start) -> Potential:
    potential = Potential(start.model, start.data.x_train, start.data.y_train)
    potential.space = coordinates(potential)
    return potential


#: By the class of the method.
_KINDS: list[tuple[tuple[type, ...], type]] = [
    ((HMC, NUTS), _OneByOne),
    ((ChEES,), _AllAtOnce),
    ((SGHMC, SGLD), _InSteps),
]


def transitions_of(kind: type[Method]) -> Callable[..., Transitions] | None:
    """What makes C chains from (method, start) of a method of this class; None where its transitions are not known."""
    return next((made for kinds, made in _KINDS if issubclass(kind, kinds)), None)
