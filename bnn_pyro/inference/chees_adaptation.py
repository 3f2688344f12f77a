"""What ChEES-HMC learns in its warm-up, from all chains at once: step size, trajectory length, mass.

    step size          dual averaging of log ε until the harmonic mean of the acceptance rates is the target
    trajectory length  T by stochastic gradients of ChEES(T) = ¼ E[(‖x' − E x'‖² − ‖x − E x‖²)²]
    mass               1 / the variance of every coordinate, over chains and iterations, late ones weighing most

Hoffman, Radul & Sountsov 2021, AISTATS, "An adaptive-MCMC scheme for setting trajectory lengths in Hamiltonian Monte
Carlo", equations 6 to 9 and algorithm 1; dual averaging by Hoffman & Gelman 2014, section 3.2. x are the coordinates in
units of their standard deviations, as the mass knows them, so that no coordinate rules the criterion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_pyro.errors import UserError
from bnn_pyro.inference.many_chains import Transition

__all__ = ["Adaptation", "Approach", "halton"]

#: Adam's settings of the paper, section 4, for log T.
LEARNING_RATE, MEMORY = 0.025, 0.95
#: Dual averaging: shrinkage, early iterations, and how fast old ones are forgotten.
SHRINKAGE, OFFSET, DECAY = 0.05, 10.0, 0.75
#: The approach: first step size, leapfrog steps, aim for the acceptance rate, and how fast it is followed.
FIRST_STEP, APPROACH_STEPS, APPROACH_TARGET, GAIN = 0.01, 8, 0.65, 0.5
#: Quantile of the chains' step sizes that the adaptation begins with.
CAUTION = 0.1
#: Below this no trajectory gets anywhere.
SMALLEST_STEP = 1e-10
#: In the variance, iteration t weighs as t^(WINDOW − 1): 70 % of the weight is that of the last third.
WINDOW = 3.0


def halton(index: int, base: int = 2) -> float:
    """The quasi-random number in (0, 1) of an index from 1: the share of T that a trajectory has."""
    value, part = 0.0, 1.0 / base
    while index:
        index, digit = divmod(index, base)
        value += digit * part
        part /= base
    return value


@dataclass
class Approach:
    """The first part: every chain has a step size of its own, so that none far off holds the others up.

    step  (C,), in units of z over √mass, the mass being 1/``variance``        variance  (P,) of the starts
    """

    step: Tensor
    variance: Tensor

    @classmethod
    def begin(cls, z: Tensor) -> Approach:
        """At starts z (C, P)."""
        spread = z.var(0)
        variance = torch.where(spread > 0, spread, torch.ones_like(spread))
        return cls(torch.full_like(z[:, 0], FIRST_STEP), variance)

    def plan(self) -> tuple[Tensor, Tensor, int]:
        """(variance, step sizes, steps) of the next transition."""
        return self.variance, self.step, APPROACH_STEPS

    def learn(self, acceptance: Tensor) -> None:
        """Up where trajectories are accepted, down where they are not."""
        self.step = self.step * (GAIN * (acceptance - APPROACH_TARGET)).exp()


@dataclass
class Adaptation:
    """The second part; all of it is numbers and tensors (P,).

    step      ε               length        T, in units of x per unit of time        variance  (P,) of z
    """

    step: float
    length: float
    variance: Tensor
    mean: Tensor
    count: int = 0
    error: float = 0.0  # of dual averaging
    centre: float = 0.0
    log_step: float = 0.0
    log_length: float = 0.0
    square: float = 0.0  # Adam's second moment

    @classmethod
    def begin(cls, steps: Tensor, z: Tensor, former: Tensor) -> Adaptation:
        """Where the chains have come to, z (C, P), with step sizes (C,) that suited them under the variance ``former``.

        Trajectories are as long as a standard deviation at first, and the variance is that of the chains as they are.
        """
        spread = z.var(0)
        variance = torch.where(spread > 0, spread, former)
        step = steps.quantile(CAUTION).item() * (former / variance).sqrt().median().item()
        return cls(step, 1.0, variance, z.mean(0), centre=math.log(step), log_step=math.log(step))

    def learn(self, moved: Transition, share: float, target: float, longest: float) -> None:
        """From one iteration of all chains.

        share: of T that was travelled.   target: for the harmonic mean of the acceptance rates.
        longest: the longest T to consider.

        Raises UserError where the step size falls to nothing.
        """
        self.count += 1
        self._learn_length(moved, share, longest)
        self._learn_step(moved.acceptance, target)
        self._learn_mass(moved.after)
        if self.step < SMALLEST_STEP:
            chain = int(moved.acceptance.argmin()) + 1
            raise UserError(
                f"the step size fell to {self.step:.1g} after {self.count:,} iterations of adaptation: chain {chain} "
                "accepts no trajectory; try start=map, a longer warm-up, or look for infinite densities in the model"
            )

    def _learn_step(self, acceptance: Tensor, target: float) -> None:
        harmonic = len(acceptance) / acceptance.clamp_min(1e-10).reciprocal().sum().item()
        t = self.count
        weight = 1 / (t + OFFSET)
        self.error = (1 - weight) * self.error + weight * (target - harmonic)
        now = self.centre - math.sqrt(t) / SHRINKAGE * self.error
        forget = t**-DECAY
        self.log_step = forget * now + (1 - forget) * self.log_step
        self.step = math.exp(now)

    def _learn_length(self, moved: Transition, share: float, longest: float) -> None:
        sd, acceptance = self.variance.sqrt(), moved.acceptance
        finite = acceptance > 0
        weight = acceptance / acceptance.sum().clamp_min(1e-300)
        end = torch.where(finite[:, None], moved.end, moved.before)
        a = (moved.before - moved.before.mean(0)) / sd
        b = (end - weight @ end) / sd
        slope = torch.where(finite, (b * (moved.velocity / sd)).sum(1), torch.zeros_like(acceptance))
        gradient = share * (weight * (b.square().sum(1) - a.square().sum(1)) * slope).sum().item()
        gradient *= self.length  # with respect to log T
        if not math.isfinite(gradient) or gradient == 0:
            return
        self.square = MEMORY * self.square + (1 - MEMORY) * gradient**2
        corrected = self.square / (1 - MEMORY**self.count)
        log_length = math.log(self.length) + LEARNING_RATE * gradient / math.sqrt(corrected)
        log_length = min(max(log_length, math.log(self.step)), math.log(longest))
        self.length = math.exp(log_length)
        forget = self.count**-DECAY
        self.log_length = forget * log_length + (1 - forget) * self.log_length

    def _learn_mass(self, z: Tensor) -> None:
        rate = 1 / (1 + self.count / WINDOW)
        self.mean = self.mean + rate * (z.mean(0) - self.mean)
        spread = (z - self.mean).square().mean(0)
        self.variance = self.variance + rate * (spread - self.variance)

    def settle(self) -> None:
        """End the warm-up: the averages of what was tried are kept."""
        if self.count:
            self.step, self.length = math.exp(self.log_step), max(math.exp(self.log_length), math.exp(self.log_step))
