"""What HMC, NUTS and ChEES have in common: settings, what a run is going to cost, and what is said of one that failed.

    gradients  =  chains · (warm-up + draws · thin) · typical gradients a transition
    seconds    ≈  gradients · (overhead + arithmetic),   arithmetic ∝ rows · weights

Whether to compile and how many processes to start is decided by the settings and the sizes of the problem, never by a
clock: a compiled gradient rounds otherwise, and what a run draws must not depend on how busy the machine was. What the
user is told is measured.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from bnn_pyro.errors import UserError
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.starts import STARTS
from bnn_pyro.inference.trajectories import gradient_of
from bnn_pyro.parallel.executor import current_executor, usable_cores
from bnn_pyro.settings import Settings, setting

__all__ = [
    "LARGE", "Sampler", "announce", "check_dense", "choose_compiled", "choose_cores", "nothing_drawn",
    "seconds_per_gradient", "warn_of_idle_chains", "work",
]  # fmt: skip

#: When the gradient is compiled.
WHEN_COMPILED = ("auto", "yes", "no")

#: Draws of a chain from which on one that never moves, or always diverges, is told: fewer may be bad luck.
MIN_DRAWS = 10

#: Chains that a warning names.
NAMED = 5

#: Seconds that a gradient takes besides its arithmetic, by PyTorch's operators one by one and compiled; and seconds for
#: 6 floating-point operations, what a weight costs with a row, forwards and backwards.
EAGER, COMPILED, ARITHMETIC = 1e-3, 1e-5, 5e-10

#: Rows · weights above which compiled code was no faster than operators, and soon three times slower.
LARGE = 5e6

#: Seconds that a compilation takes, and that a process takes to start.
COMPILATION, PROCESS = 2.5, 5.0

#: Seconds above which a run is announced, with what to take instead; and the rows of the largest dense mass matrix.
LONG, MAX_DENSE = 30 * 60, 4096

INSTEAD = "chees shares the work between many chains, sghmc takes mini-batches, and svi is an approximation in minutes"


@dataclass(frozen=True)
class Sampler(Settings):
    """Settings that all share.

    draws          draws kept of each chain
    warmup         transitions before them, in which step size, mass and the like are adapted; dropped
    chains         independent chains
    target_accept  acceptance rate that the step size is adapted to; higher where trajectories diverge
    thin           transitions a draw
    start          where chains start: jitter, prior, map or svi
    jitter         how far apart jittered chains start, in standard deviations of the prior
    temperature    T: p(y | x, w)^(1/T) p(w) is sampled; 1 is Bayes, less is a cold posterior and is reported as such
    compiled       whether to compile the gradient: auto (where the run is long enough), yes or no
    """

    converges_to: ClassVar[str] = "exact"
    needs: ClassVar[frozenset[str]] = frozenset({"weights", "proper prior"})
    tiny: ClassVar[Mapping[str, Any]] = {"draws": 1000, "warmup": 300, "chains": 4, "cores": 1}
    draws: int = setting(1000, low=1)
    warmup: int = setting(500, low=1)
    chains: int = setting(4, low=1)
    target_accept: float = setting(0.8, above=0, below=1)
    thin: int = setting(1, low=1)
    start: str = setting("jitter", choices=STARTS)
    jitter: float = setting(1.0, low=0)
    temperature: float = setting(1.0, above=0)
    compiled: str = setting("auto", choices=WHEN_COMPILED)

    @property
    def transitions(self) -> int:
        """Of every chain, with its warm-up."""
        return self.warmup + self.draws * self.thin


def nothing_drawn(stopped: str) -> KeyboardInterrupt:
    """For a run that was stopped too early; ``stopped`` says by what."""
    return KeyboardInterrupt(
        f"{stopped} in the warm-up, before the first draw; with a folder (out=…, --out) a run can go on from where it "
        "was stopped"
    )


def warn_of_idle_chains(z: Tensor, diverging: Tensor, numbers: Sequence[int], chains: int) -> None:
    """Warn of chains whose draws stand for nothing but their starts.

    z (C, D, P), diverging (C, D).   numbers: of these C among the ``chains`` of the run, from 0.
    """
    if z.shape[1] < MIN_DRAWS:
        return
    diverged = diverging.bool().all(1)
    rejected = (z == z[:, :1]).flatten(1).all(1) & ~diverged
    for idle, what in ((diverged, "every draw diverged"), (rejected, "every transition was rejected")):
        which = [numbers[i] + 1 for i in idle.nonzero()[:, 0].tolist()]
        if which:
            named = ", ".join(map(str, which[:NAMED])) + (", …" if len(which) > NAMED else "")
            who = f"chain {named}" if len(which) == 1 else f"{len(which)} chains ({named})"
            warnings.warn(
                f"{who} of {chains}: {what}, and tells of its start alone; try start=map, a higher target_accept or a "
                "longer warm-up",
                stacklevel=5,
            )


# -- what a run is going to cost ---------------------------------------------------------------------------------------
def work(potential: Potential) -> float:
    """Rows · weights, infinite on a GPU: what a gradient's arithmetic is in proportion to."""
    return len(potential.x) * potential.size if potential.x.device.type == "cpu" else math.inf


def choose_compiled(asked: str, gradients: float, work: float = 0.0) -> bool:
    """Whether to compile: for "auto", if that saves twice the time that it takes. PyTorch multiplies large matrices
    faster."""
    return asked == "yes" or (asked == "auto" and work <= LARGE and gradients * (EAGER - COMPILED) > 2 * COMPILATION)


def choose_cores(asked: int, chains: int, gradients: float, compiled: bool, potential: Potential) -> int:
    """How many processes: what was asked for, or for 0 as many as there are cores where that saves twice their price.

    1: in this process, as on a GPU and in a process that is itself one of several. An executor in force decides.
    """
    current = current_executor()
    if current is not None and current.kind != "dask":
        return min(usable_cores(), chains) if potential.x.device.type == "cpu" else 1
    if asked:
        return min(asked, chains)
    if potential.x.device.type != "cpu" or usable_cores() == 1:
        return 1
    cores = min(chains, usable_cores())
    rows = len(potential.x)
    seconds = gradients * ((COMPILED if compiled else EAGER) + ARITHMETIC * rows * potential.size)
    price = PROCESS + (COMPILATION if compiled else 0.0)
    return cores if seconds * (1 - 1 / cores) > 2 * price else 1


def seconds_per_gradient(potential: Potential, z: np.ndarray) -> float:
    """Measured at one z (P,), a few times over."""
    gradient = gradient_of(potential)
    gradient(z)
    start, times = time.perf_counter(), 0
    while times < 3 or (times < 100 and time.perf_counter() - start < 0.05):
        gradient(z)
        times += 1
    return (time.perf_counter() - start) / times


def announce(seconds: float, gradients: float, cores: int, instead: str = INSTEAD) -> None:
    """Warn of a run that will take long. ``seconds``: measured, for one gradient.   instead: what to take."""
    total = seconds * gradients / cores
    if total < LONG:
        return
    length = f"{total / 60:.0f} minutes" if total < 2 * 3600 else f"{total / 3600:,.0f} hours"
    warnings.warn(
        f"this run will take about {length}: {gradients:,.0f} gradients of {1e3 * seconds:.3g} ms each"
        f"{f' on {cores} cores' if cores > 1 else ''}; {instead}",
        stacklevel=3,
    )


def check_dense(length: int, block: str) -> None:
    """Raises UserError where a mass matrix of that many rows would not be worth its memory and its time."""
    if length > MAX_DENSE:
        raise UserError(
            f"a dense mass matrix of {length:,} weights ({block}) takes {length**2 * 8 / 2**30:.1f} GiB; "
            "take mass=diagonal"
        )
