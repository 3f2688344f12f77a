"""Microcanonical Langevin ensembles: M optimised networks, each the start of a chain of its own.

    z, u ← one step ε of the isokinetic integrator,    u ← (u + ν ζ)/|u + ν ζ|,  ν² = (exp(2 ε/L) − 1)/d

Sommer et al. 2025, arXiv:2502.06335, on the dynamics of ``microcanonical`` (Robnik & Seljak 2024, arXiv:2303.18221). A
member is found by AdamW with early stopping on held-out rows, the chain samples the posterior given all training rows.
No proposal is rejected: draws have a bias that falls with the step, which the warm-up finds from the energy error,
E[ΔE²]/d = ``energy_variance``. With h = ε/√d the leapfrog has E[ΔE²] = h⁶λ³/16 in a direction of variance 1/λ, which
is off by at most h²λ/4 = (16 E[ΔE²])^(1/3)/4 of itself; the minimal-norm integrator here is better. The error is that
of the few directions that data make narrow, so that ``energy_variance`` is 0.001, not 0.1 as in the paper.

With ``adjusted`` draws are exact (Robnik, Cohn-Gordon & Seljak 2025, arXiv:2503.01707): u is drawn anew, a trajectory
of a random number of steps is accepted with probability min(1, exp(−Σ ΔE)), and ε is that of ``target_accept``.

Transitions are single steps: refresh u, then a step of the integrator; or where adjusted draw u, then a trajectory. The
warm-up of T transitions learns ε in its first half by ``EnergyTuning``, its target falling until 0.3 T. Then zᵢ is
divided by its standard deviation since 0.15 T, as by a diagonal mass matrix, and ε learned anew; from 0.5 T on it is
the geometric mean of those since then, and changed eight times by E[ΔE²] since the last, as chains still go to stiffer
places. L, first √d, is from 0.5 T on √Σ Var zᵢ, at the end 0.4 · way / n_eff by effective draws. The adjusted sampler
does so in 0.6 T, then dual averaging learns ε. All is of each chain, its stats of these coordinates.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import bnn_pyro.inference.microcanonical as microcanonical
from bnn_pyro.checkpoint import Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.adaptation import OFFSET, ChainLost, DualAveraging, check_steps
from bnn_pyro.inference.cost import TYPICAL
from bnn_pyro.inference.hmc import SeparateChains
from bnn_pyro.inference.microcanonical import GRADIENTS, EnergyTuning, Moments, State, direction, langevin_steps, travel
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.sampler import STARTS, Drawn, Starts
from bnn_pyro.inference.trajectories import MAX_ENERGY_ERROR, evaluator
from bnn_pyro.posterior import Posterior, weight_space
from bnn_pyro.settings import setting

#: Windows begin and end at these shares of the warm-up: moments for scales, for L, effective draws for L (LENGTH of the
#: way between two), without and with ``adjusted``. One shorter than draws are correlated finds too small an L.
WINDOWS = {False: (0.15, 0.3, 0.5, 1.0), True: (0.08, 0.15, 0.3, 0.6)}
#: The last three in checkpoints of earlier versions, which do not say theirs.
FORMER_WINDOWS = {False: (0.8, 0.9, 1.0), True: (0.15, 0.3, 0.6)}
LENGTH = {False: 0.4, True: 0.3}
#: L of trajectories at most, in units of √Σ Var zᵢ: that of half a circle in each direction of a Normal is π.
REACH = 3.0
#: Positions and coordinates of the last window, at most; positions at least; those after which the step is changed.
POSITIONS, COORDINATES, MIN_POSITIONS, STRETCH = 1000, 2000, 10, 125
#: A step diverges at so many √d nats, or MAX_ENERGY_ERROR, and is taken back at so many times the usual error; halvings
#: of a step after the warm-up, as it diverged twice, before the chain is lost; the first step, in units of √d.
WIDE, FAR, HALVINGS, FIRST_STEP = 30.0, 50.0, 10, 1e-3
#: Members of a network whose weights are at most so many; four of a larger one. What else a kernel's state has.
MEMBERS, SMALL, OWN = 8, 10_000, ("step_size", "length", "lost", "turned", "halved", "ends", "way")


@dataclass(frozen=True)
class MILE(SeparateChains):
    """Settings of microcanonical Langevin ensembles: optimised members, each the start of a chain.

    chains           M, members and chains; 0: 8, or 4 of a network of more than 10,000 weights
    start            members, or one of the starts of the other samplers
    epochs           of a member's optimisation at most
    patience         epochs without a better NLL of validation rows, or 15 % of the training rows, after which it stops
    lr               AdamW's first learning rate
    batch_size       rows of a step of AdamW
    warmup           transitions before the draws: single steps of the integrator, or trajectories where adjusted
    first_energy_variance, energy_variance  E[ΔE²]/d that the step is to have at first, and in the end (see above)
    adjusted         whether trajectories are accepted or rejected by Metropolis, so that draws are exact
    target_accept    acceptance rate that the step is adapted to where adjusted
    max_steps        at most so many steps a trajectory where adjusted
    """

    converges_to: ClassVar[str] = "exact as lr → 0"
    tiny: ClassVar[Mapping[str, Any]] = {
        "draws": 1000, "warmup": 2000, "chains": 4, "thin": 4, "start": "prior", "energy_variance": 1e-6,
        "first_energy_variance": 1e-4, "epochs": 20, "cores": 1,
    }  # fmt: skip
    chains: int = setting(0, low=0)
    draws: int = setting(100, low=1)
    warmup: int = setting(20_000, low=1)
    thin: int = setting(200, low=1)
    target_accept: float = setting(0.9, above=0, below=1)
    start: str = setting("members", choices=STARTS)
    epochs: int = setting(300, low=1)
    patience: int = setting(50, low=0)
    lr: float = setting(0.01, above=0)
    batch_size: int = setting(64, low=0)
    first_energy_variance: float = setting(0.5, above=0)
    energy_variance: float = setting(0.001, above=0)
    adjusted: bool = False
    max_steps: int = setting(1000, low=1)

    former: ClassVar[Mapping[str, Any]] = {"integrator": "minimal-norm"}
    group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adjusted:  # of this object, above its class's
            object.__setattr__(self, "converges_to", "exact")

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **how: Any) -> Posterior:
        """Find the members, then sample; see ``Method.run`` and ``Sampler.run``.

        ``stats``, (C, D): lp, n_steps (gradients), step_size, decoherence_length L, diverging; energy_error, the
        root mean square of ΔE a step in nats, or acceptance_rate where adjusted.

        A step whose energy error exceeds 1,000 nats and 30 √d, or is not finite, is taken back and u reversed; where
        the next is too the step is halved. After ten halvings a chain is left out with a warning; UserError if all are.
        Once ε is found, one whose error exceeds 50 √(d · ``energy_variance``) is taken back too, but has not diverged.
        """
        if not self.chains:
            size = sum(value.numel() for value in weight_space(model).initial.values())
            return replace(self, chains=MEMBERS if size <= SMALL else 4).run(model, guide, data, **how)
        return super().run(model, guide, data, **how)

    #: See ``Sampler``. Trajectories take many times as long as steps, and these several times as long one by one.
    untimed = property(lambda self: int(0.6 * self.warmup))

    def _members(self, potential: Potential, data: Dataset, run: Run, num: int, **settings: Any) -> Tensor:
        settings |= dict(epochs=self.epochs, patience=self.patience, lr=self.lr, batch_size=self.batch_size)
        return super()._members(potential, data, run, num, **settings)

    def _draw(self, potential: Potential, starts: Starts, run: Run) -> Drawn:
        if potential.size < 2:
            raise UserError("microcanonical dynamics need two weights or more: one has no direction to turn; take nuts")
        records, stopped = super()._draw(potential, starts, run)
        parts = [record.of_chain(c) for record in records for c in range(self.chains // len(records))]
        for c, part in enumerate(parts):  # of several that move as one
            if not self.adjusted and part.kept and part.columns["diverging"][part.kept - 1] > 1:
                part.kept, stopped = 0, stopped or f"chain {c + 1} diverged"
        return parts, stopped

    def kernel(self, potential: Potential, start: np.ndarray, *seeds: int) -> "Kernel":
        """At the start of its chains (G, P), or of one (P,); call inside ``isolated``."""
        return Kernel(self, potential, np.atleast_2d(start), seeds)

    def typical(self, whitened: bool) -> int:
        """See ``SeparateChains``."""
        return GRADIENTS * (TYPICAL if self.adjusted else 1)


class Kernel:
    """G chains (``start``: (G, P)) between transitions; each does the same, bit for bit, whichever move beside it."""

    def __init__(self, settings: Any, potential: Potential, start: np.ndarray, seeds: Sequence[int]) -> None:
        self.settings, self.potential = settings, potential
        chains, self.size = start.shape
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        self.start_at(start, np.ones_like(start))
        self.lost, self.turned, self.halved, self.way = *np.zeros((2, chains), dtype=bool), *np.zeros((2, chains))
        self.done, self.ends = 0, [int(share * settings.warmup) for share in WINDOWS[settings.adjusted]]
        self.length = np.full(chains, math.sqrt(self.size))
        self.step_size = FIRST_STEP * self.length
        self.tuning, self.moments = EnergyTuning(self.step_size), Moments()
        self.averages, self.positions = list[DualAveraging](), list[np.ndarray]()

    def start_at(self, z: np.ndarray, scale: np.ndarray | None = None) -> None:
        """Go on from z (G, P), in directions drawn anew, with densities as the potential now has them."""
        z, scale = np.atleast_2d(z), self.point.scale if scale is None else scale
        density, gradient = evaluator(self.potential)(z)
        self.point = State(z.copy(), direction(self._noise(1)[:, 0]), density, scale * gradient, scale)

    #: Transitions between two positions of which effective draws are counted.
    _every = property(lambda self: max(1, -(-(self.ends[3] - self.ends[2]) // POSITIONS)))

    def step(self) -> dict[str, np.ndarray]:
        """One transition: what ``stats`` keeps of it. Raises UserError where all chains have diverged."""
        return self.steps(1)[0]

    def steps(self, most: int) -> list[dict[str, np.ndarray]]:
        """One transition, or several, ``most`` at most: what ``stats`` keeps of each; ``lp`` is that of the last."""
        learning = self.done < self.ends[2]
        with np.errstate(all="ignore"):
            if self.settings.adjusted and not learning:
                return [self._trajectory()]
            if self.done < self.settings.warmup:  # to the next position that is kept
                most = min(most, self._every - (self.done - self.ends[2]) % self._every)
            num = 1 if learning else min(most, microcanonical.at_once(self.potential, len(self.length)))
            return self._langevin(self._noise(num))

    def _langevin(self, noise: np.ndarray) -> list[dict[str, np.ndarray]]:
        """Steps of every chain; one that diverges is taken back and its u reversed, as a Metropolis step would."""
        settings, before, step = self.settings, self.point, self.step_size
        state, errors = langevin_steps(self.potential, before, step, self.length, noise)
        largest = np.where(np.isfinite(state.gradient).all(1), np.abs(errors).max(1), math.inf)
        diverged = ~(largest < max(MAX_ENERGY_ERROR, WIDE * math.sqrt(self.size)))
        usual = math.sqrt(settings.energy_variance * self.size) if self.done >= self.ends[2] else math.inf
        good = ~diverged & (largest < FAR * usual)
        if noise.shape[1] > 1 and not good.all():  # which of them did is found one by one
            return [self._langevin(noise[:, s : s + 1].copy())[0] for s in range(noise.shape[1])]
        error, drawing = errors[:, -1], self.done >= settings.warmup
        again, self.turned = (self.done >= self.ends[2]) & ~good & self.turned, ~good  # the way back is as bad
        self.step_size, self.halved = np.where(again, step / 2, step), self.halved + (again & diverged)
        self.lost = self.lost | (self.halved > HALVINGS)
        if self.lost.all():
            chain = int(np.argmax(diverged))
            who = f"chain {chain + 1}" if len(error) > 1 else "a chain"
            what = f"{error[chain]:,.0f} nats" if np.isfinite(error[chain]) else "not finite"
            raise ChainLost(f"{who} diverged at transition {self.done + 1:,}: its energy error is {what} in a step of "
                            f"{self.step_size[chain]:.3g}; take a smaller energy_variance than "
                            f"{settings.energy_variance:g}, a longer warm-up, or adjusted=true")  # fmt: skip
        u = direction(before.u + microcanonical.refreshment(step, self.length, self.size)[:, None] * noise[:, 0])
        self.point = state.where(good & ~self.lost, before._replace(u=np.where(good[:, None], before.u, -u)))
        if self.done < min(self.ends[2], settings.warmup):
            targets = settings.first_energy_variance, settings.energy_variance
            self.tuning.learn(error, good, self.size, np.interp(self.done, (0, max(1, self.ends[1])), targets))
            self.step_size = self.tuning.step
            check_steps(self.step_size, self.done)
        if self.ends[2] <= self.done < settings.warmup:
            self.tuning.observe(np.fmin(abs(errors), FAR * usual), ~self.lost, self.size, settings.energy_variance)
        figures = dict(lp=self.point.density, n_steps=np.full_like(step, GRADIENTS), step_size=step)
        figures |= dict(decoherence_length=self.length, diverging=np.where(self.lost, 2.0, drawing & diverged))
        self._learn_length(noise.shape[1])
        return [{"energy_error": own, **figures} for own in np.abs(errors).T]

    def _trajectory(self) -> dict[str, np.ndarray]:
        """One trajectory of every chain, accepted or rejected as a whole; in the warm-up step sizes learn of it."""
        settings, before, step = self.settings, self.point, self.step_size
        if not self.averages:
            self.averages = [DualAveraging(s, centre=math.log(s), log_step=math.log(s)) for s in step.tolist()]
        shares = np.array([rng.random() for rng in self.rngs])
        steps = np.clip(np.ceil(2 * shares * self.length / self.step_size), 1, settings.max_steps)
        state = before._replace(u=direction(self._noise(1)[:, 0]))
        state, lost = travel(self.potential, state, self.step_size, steps)
        finite = np.isfinite(lost) & np.isfinite(state.gradient).all(1)
        acceptance = np.where(finite, np.exp(np.minimum(0.0, -lost)), 0.0)
        self.point = state.where(np.array([rng.random() for rng in self.rngs]) < acceptance, before)
        if self.done < settings.warmup:
            for average, rate in zip(self.averages, acceptance.tolist(), strict=True):
                average.count += 1
                average.learn_step((settings.target_accept - rate) / (average.count + OFFSET))
            last = self.done == settings.warmup - 1
            self.step_size = np.array([math.exp(a.log_step) if last else a.step for a in self.averages])
            check_steps(self.step_size, self.done)
        self._learn_length(1)
        figures = dict(trajectory_length=steps * step, n_steps=steps * GRADIENTS, lp=self.point.density, step_size=step)
        bad = dict(diverging=~finite | (lost > MAX_ENERGY_ERROR), cut=steps == settings.max_steps)
        return {**figures, "acceptance_rate": acceptance, **{name: one.astype(float) for name, one in bad.items()}}

    def _learn_length(self, transitions: int) -> None:
        """After so many: scales from the moments of a window, L from those of the next, and from effective draws."""
        self.done += transitions
        (begin, first, second, last), done, z = self.ends, self.done, self.point.z / self.point.scale
        if begin < done <= second:
            self.moments.add(z, self.step_size)
        if begin < done == first:
            scale = self.moments.scales(first - begin)
            self.point = self.point._replace(gradient=self.point.gradient * scale, scale=scale)
            self.tuning, self.moments = self.tuning.anew(), Moments()
        if done == second:
            self.step_size = self.tuning.mean if begin < first else self.step_size
            self.length = np.where(self.moments.radius > 0, self.moments.radius, self.length)
        if is_kept := second < done <= last and (done - second) % self._every == 0:
            self.positions.append(z[:, :: -(-self.size // COORDINATES)].copy())
            self.way = self.way + (self.length if self.settings.adjusted else self.step_size) * self._every
        if done == last and len(self.positions) >= MIN_POSITIONS:
            x = np.stack(self.positions, 1)
            apart = np.array([np.mean(1 / microcanonical.effective_draws(one)) for one in x])
            self.length = LENGTH[self.settings.adjusted] * self.way * apart
            if self.settings.adjusted:  # where chains do not mix, effective draws ask for trajectories without end
                radius = np.sqrt(x.var(1).sum(1) * (self.size / x.shape[2]))
                self.length = np.where(radius > 0, np.minimum(self.length, REACH * radius), self.length)
            self.positions = []
        if done == last or (is_kept and len(self.positions) % STRETCH == 0):
            self.step_size, self.tuning = self.step_size * self.tuning.factor, self.tuning.anew()

    def _noise(self, num: int) -> np.ndarray:
        """(G, num, d) standard Normal numbers, each chain's of its own generator."""
        return np.stack([rng.standard_normal((num, self.size)) for rng in self.rngs])

    def state(self) -> dict[str, Any]:
        """Everything that the next transition depends on: tensors, numbers and lines of JSON."""
        parts = {"point": self.point._asdict(), "tuning": vars(self.tuning), "moments": vars(self.moments),
                 "own": {name: getattr(self, name) for name in OWN}, "positions": self.positions,
                 "averages": [vars(average) for average in self.averages]}  # fmt: skip
        generators = json.dumps([rng.bit_generator.state for rng in self.rngs])
        return tree_map_only(np.ndarray, torch.from_numpy, {**parts, "done": self.done, "rngs": generators})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, in a kernel that was made in the same way."""
        state = tree_map_only(Tensor, Tensor.numpy, dict(state))
        self.point = State(**{"scale": np.ones_like(state["point"]["z"]), **state["point"]})
        self.tuning = EnergyTuning(**{k: v for k, v in state["tuning"].items() if k != "limit"})  # of before
        self.moments, self.positions, self.done = Moments(**state["moments"]), state["positions"], state["done"]
        former = [int(share * self.settings.warmup) for share in FORMER_WINDOWS[self.settings.adjusted]]
        vars(self).update({"ends": former, **(own := state["own"])})  # those of before lack ``lost`` and others
        self.ends = [*self.ends[:1] * (4 - len(self.ends)), *self.ends]  # and a window for scales
        ways = own["length" if self.settings.adjusted else "step_size"] * self._every * len(self.positions)
        self.way, self.averages = own.get("way", ways), [DualAveraging(**values) for values in state["averages"]]
        for rng, saved in zip(self.rngs, json.loads(state["rngs"]), strict=True):
            rng.bit_generator.state = saved
