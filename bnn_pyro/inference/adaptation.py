"""What samplers learn in their warm-up: a step size ε by dual averaging, and the mass matrix in the windows of Stan.

    log ε_t = μ − (√t / γ) ē_t,    ē_t = (1 − 1/(t + t₀)) ē_{t−1} + (target − acceptance)/(t + t₀)

Hoffman & Gelman 2014 (arXiv:1111.4246), section 3.2; M⁻¹ is the covariance of the draws of a window (Welford's sums),
shrunk to 10⁻³ as in Stan's reference manual, "HMC algorithm parameters". The numbers are those of Pyro's kernels.
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

#: Dual averaging: γ, t₀, and how fast old step sizes are forgotten.
SHRINKAGE, OFFSET, DECAY = 0.05, 10.0, 0.75
#: Acceptance rate that the first step size is to cross; a smaller step than this is none, a larger one is not tried.
FIRST_TARGET, SMALLEST_STEP, LARGEST_STEP = 0.8, 1e-10, 1e10


class ChainLost(UserError):
    """A chain cannot go on, whatever time it is given; others may."""


def check_steps(sizes: float | np.ndarray, done: int) -> None:
    """Raise ChainLost where a step size, of one chain or of several, has fallen to nothing.   done: transitions."""
    if not (least := np.min(sizes)) > 1.001 * SMALLEST_STEP:
        raise ChainLost(f"the step size fell to {least:.1e} at transition {done:,}: no step is short enough, as where "
                        "a gradient is no number; try start=map, a narrower prior or scaled inputs")  # fmt: skip


@dataclass
class DualAveraging:
    """step: ε of the next transition.   log_step: the mean of log ε, late ones weighing most.   error: ē."""

    step: float
    centre: float = 0.0
    count: int = 0
    error: float = 0.0
    log_step: float = 0.0

    def learn_step(self, error: float) -> None:
        """Of transition ``count``, from 1.   error: (target − acceptance)/(count + OFFSET)."""
        t = self.count
        self.error = (1 - 1 / (t + OFFSET)) * self.error + error
        log_step = self.centre - t**0.5 / SHRINKAGE * self.error
        weight = t**-DECAY
        self.log_step = (1 - weight) * self.log_step + weight * log_step
        self.step = math.exp(log_step)


class Warmup(DualAveraging):
    """Of one chain of HMC or NUTS.   inverse_mass: (P,) variances, the diagonal of M⁻¹.

    ends: the last transition of each window, counted from 1; a step size of its own averages the last but one.
    """

    def __init__(self, transitions: int, target: float, size: int) -> None:
        super().__init__(step=1.0)
        pyros = WarmupAdapter(adapt_step_size=True)
        pyros.configure(transitions, mass_matrix_shape={})
        self.ends = [window.end for window in pyros.adaptation_schedule]
        self.target, self.done, self.window = target, 0, 0
        self.inverse_mass = torch.ones(size, dtype=torch.float64)
        self._forget()

    def _forget(self) -> None:
        self.draws, self.mean, self.squares = 0, 0.0, 0.0

    def restart(self, step: float) -> None:
        """Begin the averages again, from this step size."""
        super().__init__(step, centre=math.log(10 * step))

    def learn(self, acceptance: float, z: np.ndarray) -> bool:
        """From one transition. Returns whether ``inverse_mass`` has changed: the step size is to be found again."""
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
            self._forget()
        elif self.window == len(self.ends):
            self.step = math.exp(self.log_step)
        return between

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``vars`` of another one; that of an earlier version has a list of one block of the mass matrix."""
        own = {name: state[name] for name in vars(self)}
        former = {k: v[0] for k, v in own.items() if k in ("inverse_mass", "squares") and isinstance(v, list)}
        vars(self).update(own | former)


def reasonable_step(step: float, dynamics: Dynamics, z: np.ndarray) -> float:
    """``step`` times the first power of 2, or of ½, at which a leapfrog step's acceptance rate crosses the target."""
    log_density, slope = dynamics.gradient(z)

    def accepted() -> bool:
        u = torch.randn(len(z), dtype=torch.float64).numpy()
        _, _, end, _, kinetic = dynamics.leap(step)(z, u, slope)
        return math.log(FIRST_TARGET) < end - kinetic - log_density + 0.5 * float(u.dot(u))  # not where it is NaN

    grows = accepted()
    while SMALLEST_STEP < step < LARGEST_STEP:
        step *= 2.0 if grows else 0.5
        if accepted() != grows:
            break
    return min(max(step, SMALLEST_STEP), LARGEST_STEP)
