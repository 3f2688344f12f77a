"""Adaptation in the warm-up: the step size ε by dual averaging, and a diagonal mass matrix in Stan's windows.

    log ε_t = μ − (√t / γ) ē_t,    ē_t = (1 − 1/(t + t₀)) ē_{t−1} + (target − acceptance)/(t + t₀)

Hoffman & Gelman 2014 (arXiv:1111.4246), section 3.2. M⁻¹ is the variance of the draws of a window (by Welford's
algorithm), shrunk towards 10⁻³ as in Stan's reference manual, "HMC algorithm parameters". Constants are Pyro's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pyro.infer.mcmc.adaptation import WarmupAdapter

from bnn_pyro.errors import UserError
from bnn_pyro.inference.trajectories import Dynamics

#: Dual averaging: γ, t₀, and the exponent with which old step sizes lose weight.
SHRINKAGE, OFFSET, DECAY = 0.05, 10.0, 0.75
#: Search for the first step size: the acceptance rate that it has to cross, and its bounds.
FIRST_TARGET, SMALLEST_STEP, LARGEST_STEP = 0.8, 1e-10, 1e10


class ChainLost(UserError):
    """A chain that cannot go on; other chains of the run may."""


def check_steps(sizes: float | np.ndarray, done: int) -> None:
    """Raise ChainLost if a step size, of one chain or of several, has fallen to 0.   done: transitions so far."""
    if not (least := np.min(sizes)) > 1.001 * SMALLEST_STEP:
        raise ChainLost(f"the step size fell to {least:.1e} at transition {done:,}: no step was short enough, perhaps "
                        "because a gradient is NaN; try start=map, a narrower prior or scaled inputs")  # fmt: skip


@dataclass
class DualAveraging:
    """step: ε of the next transition.   log_step: a mean of log ε in which late values weigh most.   error: ē."""

    step: float
    centre: float = 0.0
    count: int = 0
    error: float = 0.0
    log_step: float = 0.0

    def learn_step(self, error: float) -> None:
        """Update ε after transition number ``count`` (from 1).   error: (target − acceptance)/(count + OFFSET)."""
        t = self.count
        self.error = (1 - 1 / (t + OFFSET)) * self.error + error
        log_step = self.centre - t**0.5 / SHRINKAGE * self.error
        weight = t**-DECAY
        self.log_step = (1 - weight) * self.log_step + weight * log_step
        self.step = math.exp(log_step)


class Warmup(DualAveraging):
    """The warm-up of one chain of HMC or NUTS.   inverse_mass: (P,) variances, the diagonal of M⁻¹.

    ends: the last transition (from 1) of each window; in the first and in the last one only the step size adapts.
    """

    def __init__(self, transitions: int, target: float, size: int) -> None:
        super().__init__(step=1.0)
        pyros = WarmupAdapter(adapt_step_size=True)
        pyros.configure(transitions, mass_matrix_shape={})
        self.ends = [window.end for window in pyros.adaptation_schedule]
        self.target, self.done, self.window = target, 0, 0
        self.inverse_mass = torch.ones(size, dtype=torch.float64)
        self.draws, self.mean, self.squares = 0, 0.0, 0.0  # of a window, by Welford's algorithm

    def restart(self, step: float) -> None:
        """Restart dual averaging at this step size."""
        super().__init__(step, centre=math.log(10 * step))

    def learn(self, acceptance: float, z: np.ndarray) -> bool:
        """Learn from one transition. Returns whether ``inverse_mass`` changed, which calls for a new step size."""
        self.done += 1
        if self.done > self.ends[-1]:
            return False
        self.count += 1
        self.learn_step((self.target - acceptance) / (self.count + OFFSET))
        between = 0 < self.window < len(self.ends) - 1
        if between:
            self.draws += 1
            before = torch.from_numpy(z) - self.mean
            self.mean = self.mean + before / self.draws
            self.squares = self.squares + before * (torch.from_numpy(z) - self.mean)
        if self.done < self.ends[self.window]:
            return False
        self.window += 1
        if between:
            shrunk = self.draws / (self.draws + 5.0) * (self.squares / (self.draws - 1))
            self.inverse_mass = shrunk + 1e-3 * (5.0 / (self.draws + 5.0))
            self.draws, self.mean, self.squares = 0, 0.0, 0.0
        elif self.window == len(self.ends):
            self.step = math.exp(self.log_step)
        return between

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``vars`` of another one; in an earlier version they held lists of one block."""
        saved = {name: state[name] for name in vars(self)}
        former = {k: v[0] for k, v in saved.items() if k in ("inverse_mass", "squares") and isinstance(v, list)}
        vars(self).update(saved | former)


def reasonable_step(step: float, dynamics: Dynamics, z: np.ndarray) -> float:
    """``step``, doubled or halved until the acceptance rate of one leapfrog step crosses ``FIRST_TARGET``."""
    log_density, slope = dynamics.gradient(z)

    def accepted() -> bool:
        u = torch.randn(len(z), dtype=torch.float64).numpy()
        _, _, end, _, kinetic = dynamics.leap(step)(z, u, slope)
        return math.log(FIRST_TARGET) < end - kinetic - log_density + 0.5 * float(u.dot(u))  # False for NaN

    grows = accepted()
    while SMALLEST_STEP < step < LARGEST_STEP:
        step *= 2.0 if grows else 0.5
        if accepted() != grows:
            break
    return min(max(step, SMALLEST_STEP), LARGEST_STEP)
