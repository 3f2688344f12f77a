"""ChEES-HMC: many short chains of Hamiltonian Monte Carlo with a common step size, trajectory length and mass.

    r ~ Normal(0, M),   (z', r') = ⌈h T/ε⌉ leapfrog steps of size ε from (z, r),   accept with min(1, exp(H − H'))

h is a quasi-random number in (0, 1), the same for all chains, which move in one batched call (Hoffman, Radul & Sountsov
2021, AISTATS, equations 6 to 9 and algorithm 1). In the first part of the warm-up, the approach, each chain has its own
step size. Then all chains together adapt ε to the harmonic mean of their acceptance rates, M to the inverse variances
of the coordinates, and T by stochastic gradient ascent of

    ChEES(T) = ¼ E[(‖x' − E x'‖² − ‖x − E x‖²)²],  x = M^(1/2) z
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.checkpoint import Run
from bnn_pyro.errors import UserError
from bnn_pyro.inference.adaptation import DECAY, OFFSET, DualAveraging, check_steps
from bnn_pyro.inference.chains import Chain, Record
from bnn_pyro.inference.cost import TYPICAL, choose_compiled
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.sampler import Drawn, Sampler, Starts
from bnn_pyro.inference.trajectories import MAX_ENERGY_ERROR
from bnn_pyro.isolation import generator_state, one_thread, set_generator_state
from bnn_pyro.settings import setting

#: Length of the approach: largest number of iterations, and largest share of the warm-up.
APPROACH, APPROACH_SHARE = 100, 0.25
#: In the approach: first step size, leapfrog steps, acceptance rate to reach, and gain with which log ε follows it.
FIRST_STEP, APPROACH_STEPS, APPROACH_TARGET, GAIN = 0.01, 8, 0.65, 0.5
CAUTION = 0.1  # the common step size begins at this quantile of the chains' step sizes
#: Adam's settings for log T, from section 4 of the paper; in M, iteration t has a weight ∝ t^(WINDOW − 1).
LEARNING_RATE, MEMORY, WINDOW = 0.025, 0.95, 3.0


@dataclass(frozen=True)
class ChEES(Sampler):
    """Settings of ChEES-HMC: many chains at once, 16 to 512, tuned across chains.

    target_accept  harmonic mean of the chains' acceptance rates to adapt to; the arithmetic mean is higher
    superchains    number of starting points, each shared by equally many chains: it divides ``chains``, or is so
                   large that each chain has its own (for nested R-hat, Margossian et al. 2022, arXiv:2110.13017)
    max_steps      largest number of leapfrog steps a transition
    """

    tiny: ClassVar[Mapping[str, Any]] = {"chains": 32, "superchains": 16, "draws": 150, "warmup": 200}
    chains: int = setting(64, low=1)
    draws: int = setting(200, low=1)
    warmup: int = setting(400, low=1)
    target_accept: float = setting(0.651, above=0, below=1)
    superchains: int = setting(16, low=1)
    max_steps: int = setting(1000, low=1)

    one_by_one: ClassVar[bool] = False
    usual_start: ClassVar[str] = "prior"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chains < 2:
            raise UserError(f"chees learns across chains and needs at least 2 of them, got {self.chains}; take nuts")
        if self.chains > self.superchains and self.chains % self.superchains:
            which = f"{self.chains} chains cannot be shared out evenly to {self.superchains} superchains"
            raise UserError(f"{which}; take a multiple of {self.superchains}, or other superchains")

    def _draw(self, potential: Potential, starts: Starts, run: Run) -> Drawn:
        gradients = float(self.transitions * TYPICAL)
        compiled = choose_compiled(self.compiled, gradients, potential) and potential.compile(self.chains)
        record, stopped = Record(self.draws, self.warmup, self.thin), ""
        # Compiled code has its own threads, with which those of torch would compete for cores.
        with one_thread() if compiled else nullcontext():
            try:
                run.take(Chain(Kernel(self, potential, starts), record, {}))
            except KeyboardInterrupt:
                if run.checkpoint is not None:  # it holds all draws, except after a second Ctrl-C
                    raise
                stopped = "stopped by Ctrl-C"
        return [record.of_chain(c) for c in range(self.chains)], stopped


class Kernel:
    """All chains, what their warm-up has learned, and the number of iterations ``done``."""

    def __init__(self, settings: ChEES, potential: Potential, starts: Starts | None = None) -> None:
        self.settings, self.potential, self.starts = settings, potential, starts
        self.chains, self.done = None, 0
        self.approach = min(APPROACH, int(APPROACH_SHARE * settings.warmup))  # iterations of it
        self.each = settings.chains // min(settings.chains, settings.superchains)
        self.superchain = torch.arange(settings.chains, dtype=torch.float64) // self.each

    #: The chains' positions: ``z`` (C, P) as a numpy array.
    point = property(lambda self: SimpleNamespace(z=self.chains.z.cpu().numpy()))

    def begin(self, z: Tensor) -> None:
        """Start the chains at z (C, P)."""
        self.chains, self.adaptation = Chains(z, *self.potential(z)), None
        # For the approach: the step (C,) of each chain, in units of z / √variance, and the starts' variance (P,).
        steps = torch.full_like(z[:, 0], FIRST_STEP)
        self.first = SimpleNamespace(step=steps, variance=_variance(z, torch.ones_like(z[0])))

    def step(self) -> dict[str, np.ndarray]:
        """Make one transition of every chain and return its ``stats``."""
        if self.chains is None:
            self.begin(self.starts(self.settings.chains // self.each).repeat_interleave(self.each, 0))
        settings, done, first = self.settings, self.done, self.first
        self.done += 1
        if done < self.approach:
            moved = self.chains.move(self.potential, first.variance, first.step, APPROACH_STEPS)
            first.step = first.step * (GAIN * (moved.acceptance - APPROACH_TARGET)).exp()
            return self._figures(moved, APPROACH_STEPS, first.step)
        if self.adaptation is None:
            self.adaptation = Adaptation.begin(first.step, self.chains.z, first.variance)
        if done == settings.warmup:
            self.adaptation.settle()
        learned, share, step = self.adaptation, _van_der_corput(done + 1 - self.approach), self.adaptation.step
        steps = max(1, min(settings.max_steps, math.ceil(share * learned.length / step)))
        sizes = self.chains.density.new_full((settings.chains,), step)
        moved = self.chains.move(self.potential, learned.variance, sizes, steps)
        if done < settings.warmup:
            learned.learn(moved, share, target=settings.target_accept, longest=settings.max_steps * step)
        return self._figures(moved, steps, sizes)

    def _figures(self, moved: "Transition", steps: int, step: Tensor) -> dict[str, np.ndarray]:
        figures = dict(
            acceptance_rate=moved.acceptance, diverging=moved.diverging, energy=moved.energy, lp=self.chains.density,
            n_steps=torch.full_like(step, steps), step_size=step, trajectory_length=steps * step,
            superchain=self.superchain, cut=torch.full_like(step, steps == self.settings.max_steps),
        )  # fmt: skip
        return {name: value.cpu().numpy() for name, value in figures.items()}

    def state(self) -> dict[str, Any]:
        """All that the next iteration depends on."""
        parts = {"chains": self.chains, "first": self.first, "adaptation": self.adaptation}
        state = {name: None if part is None else dict(vars(part)) for name, part in parts.items()}
        return {**state, "done": self.done, "centred": self.potential.centred, "generators": generator_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``."""
        for name, kind in {"chains": Chains, "first": SimpleNamespace, "adaptation": Adaptation}.items():
            part = state[name] or {}
            values = {k: v.to(self.potential.initial.device) if isinstance(v, Tensor) else v for k, v in part.items()}
            setattr(self, name, kind(**values) if values else None)
        self.done = state["done"] if "done" in state else state["record"]["done"]  # of an earlier version
        set_generator_state(state["generators"])


class Transition(NamedTuple):
    """The outcome of one transition of all chains."""

    before: Tensor  # z (C, P) at the start of the trajectory
    end: Tensor  # z (C, P) at its end
    after: Tensor  # z (C, P) of the chain: the end if it was accepted, else the start
    velocity: Tensor  # dz/dt (C, P) at the end
    acceptance: Tensor  # acceptance probability (C,)
    energy: Tensor  # H (C,) at the start, nats
    diverging: Tensor  # (C,), 0 or 1


@dataclass
class Chains:
    """The positions of all chains, z (C, P), with their log densities (C,) and gradients (C, P)."""

    z: Tensor
    density: Tensor
    gradient: Tensor

    def move(self, potential: Potential, variance: Tensor, step: Tensor, steps: int) -> Transition:
        """One transition of every chain.   variance: (P,), the inverse of the mass.   step: (C,)."""
        r = torch.randn_like(self.z) / variance.sqrt()
        energy = 0.5 * (variance * r.square()).sum(1) - self.density
        end = Chains(self.z.clone(), self.density.clone(), self.gradient.clone())
        potential.leapfrog(end.z, r, end.density, end.gradient, variance, step, steps)
        lost = 0.5 * (variance * r.square()).sum(1) - end.density - energy
        finite = torch.isfinite(lost) & torch.isfinite(end.gradient).all(1)
        acceptance = torch.where(finite, (-lost).clamp_max(0).exp(), torch.zeros_like(lost))
        take = torch.rand_like(acceptance) < acceptance
        before, self.z = self.z, torch.where(take[:, None], end.z, self.z)
        self.density = torch.where(take, end.density, self.density)
        self.gradient = torch.where(take[:, None], end.gradient, self.gradient)
        diverging = (~finite | (lost > MAX_ENERGY_ERROR)).double()
        return Transition(before, end.z, self.z, variance * r, acceptance, energy, diverging)


def _van_der_corput(index: int) -> float:
    """Element ``index`` (from 1) of the van der Corput sequence in (0, 1): the binary digits, mirrored at the point."""
    return int(f"{index:b}"[::-1], 2) / 2 ** index.bit_length()


def _variance(z: Tensor, otherwise: Tensor) -> Tensor:
    spread = z.var(0)
    return torch.where(spread > 0, spread, otherwise)


@dataclass
class Adaptation(DualAveraging):
    """length: T, in units of x.   variance, mean: (P,) of z.   square: Adam's second moment of the gradient of T."""

    length: float = 1.0
    variance: Tensor = None
    mean: Tensor = None
    log_length: float = 0.0
    square: float = 0.0

    @classmethod
    def begin(cls, steps: Tensor, z: Tensor, former: Tensor) -> Self:
        """Begin at z (C, P), where chains have step sizes (C,) that were adapted with the variance ``former`` (P,)."""
        variance = _variance(z, former)
        step = steps.quantile(CAUTION).item() * (former / variance).sqrt().median().item()
        return cls(step, centre=math.log(step), log_step=math.log(step), variance=variance, mean=z.mean(0))

    def learn(self, moved: Transition, share: float, target: float, longest: float) -> None:
        """Learn from one iteration.   share: h, travelled share of T.   longest: upper bound of T."""
        self.count += 1
        self._learn_length(moved, share, longest)
        harmonic = len(moved.acceptance) / moved.acceptance.clamp_min(1e-10).reciprocal().sum().item()
        self.learn_step(1 / (self.count + OFFSET) * (target - harmonic))
        rate = 1 / (1 + self.count / WINDOW)
        self.mean = self.mean + rate * (moved.after.mean(0) - self.mean)
        self.variance = self.variance + rate * ((moved.after - self.mean).square().mean(0) - self.variance)
        check_steps(self.step, self.count)

    def _learn_length(self, moved: Transition, share: float, longest: float) -> None:
        sd, acceptance = self.variance.sqrt(), moved.acceptance
        finite = acceptance > 0
        weight = acceptance / acceptance.sum().clamp_min(1e-300)
        end = torch.where(finite[:, None], moved.end, moved.before)
        a = (moved.before - moved.before.mean(0)) / sd
        b = (end - weight @ end) / sd
        slope = torch.where(finite, (b * (moved.velocity / sd)).sum(1), torch.zeros_like(acceptance))
        gradient = share * (weight * (b.square().sum(1) - a.square().sum(1)) * slope).sum().item() * self.length
        if not math.isfinite(gradient) or gradient == 0:
            return
        self.square = MEMORY * self.square + (1 - MEMORY) * gradient**2
        scale = math.sqrt(self.square / (1 - MEMORY**self.count))
        log_length = math.log(self.length) + LEARNING_RATE * gradient / scale
        log_length = min(max(log_length, math.log(self.step)), math.log(longest))
        self.length = math.exp(log_length)
        forget = self.count**-DECAY
        self.log_length = forget * log_length + (1 - forget) * self.log_length

    def settle(self) -> None:
        """End the warm-up: use the averages of ε and T from now on."""
        if self.count:
            self.step, self.length = math.exp(self.log_step), max(math.exp(self.log_length), math.exp(self.log_step))
