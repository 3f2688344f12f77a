"""What a run of HMC or NUTS is going to cost, known before it starts: whether to compile, and how many processes.

    gradients  =  chains · (warm-up + draws · thin) · typical gradients a transition
    seconds    ≈  gradients · (overhead + arithmetic),   arithmetic ∝ rows · weights

The rules look at the settings and at the sizes of the problem, never at a clock: a compiled gradient rounds otherwise,
and what a run draws must not depend on how busy the machine was. What the user is told is measured.
"""

from __future__ import annotations

import math
import time
import warnings

import numpy as np

from bnn_pyro.errors import UserError
from bnn_pyro.executors.where import Here, Processes, in_force
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.trajectories import gradient_of
from bnn_pyro.side_by_side import usable_cores

__all__ = ["announce", "check_dense", "choose_compiled", "choose_cores", "seconds_per_gradient", "work"]

#: Seconds that a gradient takes besides its arithmetic, by PyTorch's operators one by one and compiled.
EAGER, COMPILED = 1e-3, 1e-5

#: Seconds for 6 floating-point operations, what a weight costs with a row, forwards and backwards.
ARITHMETIC = 5e-10

#: Rows · weights above which compiled code was no faster than operators, and soon three times slower.
LARGE = 5e6

#: Seconds that a compilation takes, and that a process takes to start.
COMPILATION, PROCESS = 2.5, 5.0

#: Seconds above which a run is announced, with what to take instead.
LONG = 30 * 60


def work(potential: Potential) -> float:
    """Rows · weights, infinite on a GPU: what a gradient's arithmetic is in proportion to."""
    return len(potential.x) * potential.size if potential.x.device.type == "cpu" else math.inf


def choose_compiled(asked: str, gradients: float, work: float = 0.0) -> bool:
    """Whether to compile: where "auto" was asked for, if that saves twice the time that it takes.

    work: see :func:`work`. Large matrices are multiplied faster by PyTorch's operators.
    """
    return asked == "yes" or (asked == "auto" and work <= LARGE and gradients * (EAGER - COMPILED) > 2 * COMPILATION)


def choose_cores(asked: int, chains: int, gradients: float, compiled: bool, potential: Potential) -> int:
    """How many processes: what was asked for, or for 0 as many as there are cores where that saves twice their price.

    1 means: in this process. No draw depends on it. On a GPU chains are run one after the other, and so they are in a
    process that is itself one of several. An executor in force decides instead of ``asked``.
    """
    if isinstance(in_force(), Here | Processes):
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


INSTEAD = "chees shares the work between many chains, sghmc takes mini-batches, and svi is an approximation in minutes"


def announce(seconds: float, gradients: float, cores: int, instead: str = INSTEAD) -> None:
    """Warn of a run that will take long. ``seconds``: measured, for one gradient.   instead: what to take."""
    total = seconds * gradients / cores
    if total < LONG:
        return
    spoken = f"{total / 60:.0f} minutes" if total < 2 * 3600 else f"{total / 3600:,.0f} hours"
    warnings.warn(
        f"this run will take about {spoken}: {gradients:,.0f} gradients of {1e3 * seconds:.3g} ms each"
        f"{f' on {cores} cores' if cores > 1 else ''}; {instead}",
        stacklevel=3,
    )


def check_dense(length: int, block: str) -> None:
    """Raises UserError where a mass matrix of that many rows would not be worth its memory and its time."""
    if length > 4096:
        raise UserError(
            f"a dense mass matrix of {length:,} weights ({block}) takes {length**2 * 8 / 2**30:.1f} GiB; "
            "take mass=diagonal"
        )
