"""Microcanonical Langevin ensembles: chains of microcanonical dynamics that start at M optimised networks.

    z, u ← one step ε of the isokinetic integrator,    u ← (u + ν ζ)/|u + ν ζ|,  ν² = (exp(2 ε/L) − 1)/d

Sommer et al. 2025, arXiv:2502.06335, with the dynamics of ``microcanonical`` (Robnik & Seljak 2024, arXiv:2303.18221).
Members are optimised by AdamW with early stopping on held-out rows; chains sample the posterior given all training
rows. A transition refreshes u and makes one step. No step is rejected, so draws have a bias, which falls with ε. The
warm-up chooses ε by the energy error: E[ΔE²]/d = ``energy_variance``. With h = ε/√d the leapfrog has E[ΔE²] = h⁶λ³/16
in a direction of variance 1/λ, and draws have a relative error of at most h²λ/4 = (16 E[ΔE²])^(1/3)/4 in that variance;
the minimal-norm integrator here is better. As most of ΔE comes from the few directions that data make narrow,
``energy_variance`` is 0.001, not 0.1 as in the paper.

With ``adjusted``, draws are exact (Robnik, Cohn-Gordon & Seljak 2025, arXiv:2503.01707): a transition draws a new u and
makes a trajectory with a random number of steps, which is accepted with probability min(1, exp(−Σ ΔE)).

Each chain adapts by itself. In a warm-up of T transitions ``EnergyTuning`` learns ε from each step, with a target that
falls until 0.3 T. Then each zᵢ is divided by its standard deviation since 0.15 T, as by a diagonal mass matrix, and ε
is learned again. At 0.5 T it becomes the geometric mean of its values since 0.3 T, and from then on it is corrected
eight times by E[ΔE²], as chains may reach places with larger curvature. L is √d at first, √Σ Var zᵢ from 0.5 T, and
0.4 · distance travelled / effective draws at the end. With ``adjusted`` the bounds are 0.08, 0.15, 0.3 and 0.6 T:
single steps end at 0.3 T; from then on dual averaging learns ε from trajectories, and L is set at 0.6 T.
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

#: Bounds of three windows as shares of the warm-up, without and with ``adjusted``: moments for scales, moments for L,
#: effective draws for L. A window shorter than the correlation time of draws would find too small an L.
WINDOWS = {False: (0.15, 0.3, 0.5, 1.0), True: (0.08, 0.15, 0.3, 0.6)}
#: The last three bounds for checkpoints of earlier versions that do not contain them.
FORMER_WINDOWS = {False: (0.8, 0.9, 1.0), True: (0.15, 0.3, 0.6)}
LENGTH = {False: 0.4, True: 0.3}  # L as a share of the distance travelled between two effective draws
REACH = 3.0  # largest L of trajectories, in units of √Σ Var zᵢ; half a circle in each direction of a Normal has π
#: In the last window: largest number of positions and of coordinates kept, and smallest number of positions to use.
POSITIONS, COORDINATES, MIN_POSITIONS = 1000, 2000, 10
STRETCH = 125  # number of positions of the last window after which the step is corrected by its energy error
#: A step diverges at an energy error of WIDE √d nats, or MAX_ENERGY_ERROR if that is more. Once ε is known, a step with
#: FAR times the usual energy error is undone too. A chain is lost after HALVINGS halvings of its step.
WIDE, FAR, HALVINGS = 30.0, 50.0, 10
MEMBERS, SMALL = 8, 10_000  # number of members for networks of at most SMALL weights; larger ones have 4


@dataclass(frozen=True)
class MILE(SeparateChains):
    """Settings of microcanonical Langevin ensembles: optimised members, each the start of a chain.

    chains           number M of members and chains; 0: 8, or 4 for a network with more than 10,000 weights
    start            members, or one of the starts of the other samplers
    epochs           largest number of epochs of a member's optimisation
    patience         epochs without a lower NLL of validation rows, or 15 % of the training rows, after which it stops
    lr               first learning rate of AdamW
    batch_size       rows of a step of AdamW
    warmup           transitions before the draws: single steps of the integrator, or trajectories if ``adjusted``
    first_energy_variance, energy_variance  targets of E[ΔE²]/d at the beginning and the end of adaptation (see above)
    adjusted         whether trajectories are accepted or rejected by Metropolis, so that draws are exact
    target_accept    acceptance rate to which the step is adapted if ``adjusted``
    max_steps        largest number of steps of a trajectory if ``adjusted``
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
        if self.adjusted:  # overrides the attribute of the class
            object.__setattr__(self, "converges_to", "exact")

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **options: Any) -> Posterior:
        """Optimise the members, then sample; see ``Method.run`` and ``Sampler.run``.

        ``stats``, (C, D): lp, n_steps (gradients), step_size, decoherence_length L, diverging; energy_error, the root
        mean square of ΔE of a step in nats, or acceptance_rate if ``adjusted``.

        A step diverges if its energy error exceeds 1,000 nats and 30 √d, or is not finite: it is undone and u reversed.
        After two divergences in succession the step is halved. After ten halvings the chain is left out with a warning;
        UserError if all are. Once ε is known, steps with an error above 50 √(d · ``energy_variance``) are undone too.
        """
        size = sum(value.numel() for value in weight_space(model).initial.values())
        settings = self if self.chains else replace(self, chains=MEMBERS if size <= SMALL else 4)
        return super(MILE, settings).run(model, guide, data, **options)

    #: See ``Sampler``. Later transitions, which are trajectories or several steps in one call, have another duration.
    untimed = property(lambda self: int(0.6 * self.warmup))

    def _draw(self, potential: Potential, starts: Starts, run: Run) -> Drawn:
        if potential.size < 2:
            raise UserError("microcanonical dynamics need two weights or more, for directions to turn; take nuts")
        records, stopped = super()._draw(potential, starts, run)
        parts = [record.of_chain(c) for record in records for c in range(self.chains // len(records))]
        for c, part in enumerate(parts):  # a lost chain may have moved together with others
            if not self.adjusted and part.kept and part.columns["diverging"][part.kept - 1] > 1:
                part.kept, stopped = 0, stopped or f"chain {c + 1} diverged"
        return parts, stopped

    def kernel(self, potential: Potential, start: np.ndarray, *seeds: int) -> "Kernel":
        """The kernel of G chains that start at (G, P), or of one (P,); call it inside ``isolated``."""
        return Kernel(self, potential, np.atleast_2d(start), seeds)

    def typical(self, whitened: bool) -> int:
        """See ``SeparateChains``."""
        return GRADIENTS * (TYPICAL if self.adjusted else 1)


class Kernel:
    """G chains that start at (G, P); each has the same draws, bit for bit, with any other chains beside it."""

    def __init__(self, settings: Any, potential: Potential, start: np.ndarray, seeds: Sequence[int]) -> None:
        self.settings, self.potential = settings, potential
        chains, self.size = start.shape
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        self.start_at(start, np.ones_like(start))
        self.lost, self.turned, self.halved, self.way = *np.zeros((2, chains), dtype=bool), *np.zeros((2, chains))
        self.done, self.ends = 0, [int(share * settings.warmup) for share in WINDOWS[settings.adjusted]]
        self.length = np.full(chains, math.sqrt(self.size))
        self.step_size = 1e-3 * self.length  # the first one, √d / 1000
        self.tuning, self.moments = EnergyTuning(self.step_size), Moments()
        self.averages, self.positions = list[DualAveraging](), list[np.ndarray]()

    def start_at(self, z: np.ndarray, scale: np.ndarray | None = None) -> None:
        """Continue from z (G, P), in new random directions, with the potential's present densities."""
        z, scale = np.atleast_2d(z), self.point.scale if scale is None else scale
        density, gradient = evaluator(self.potential)(z)
        self.point = State(z.copy(), direction(self._noise(1)[:, 0]), density, scale * gradient, scale)

    #: Number of transitions between two positions that are kept to count effective draws.
    _every = property(lambda self: max(1, -(-(self.ends[3] - self.ends[2]) // POSITIONS)))

    def step(self) -> dict[str, np.ndarray]:
        """Make one transition and return its ``stats``. Raises UserError if all chains are lost."""
        return self.steps(1)[0]

    def steps(self, most: int) -> list[dict[str, np.ndarray]]:
        """Make up to ``most`` transitions and return the ``stats`` of each; all have the last one's ``lp``."""
        learning = self.done < self.ends[2]
        with np.errstate(all="ignore"):
            if self.settings.adjusted and not learning:
                return [self._trajectory()]
            if self.done < self.settings.warmup:  # up to the next position that is kept
                most = min(most, self._every - (self.done - self.ends[2]) % self._every)
            num = 1 if learning else min(most, microcanonical.at_once(self.potential, len(self.length)))
            return self._langevin(self._noise(num))

    def _langevin(self, noise: np.ndarray) -> list[dict[str, np.ndarray]]:
        """Make steps of every chain. One that diverges is undone and u reversed, as when Metropolis rejects it."""
        settings, before, step = self.settings, self.point, self.step_size
        state, errors = langevin_steps(self.potential, before, step, self.length, noise)
        largest = np.where(np.isfinite(state.gradient).all(1), np.abs(errors).max(1), math.inf)
        diverged = ~(largest < max(MAX_ENERGY_ERROR, WIDE * math.sqrt(self.size)))
        usual = math.sqrt(settings.energy_variance * self.size) if self.done >= self.ends[2] else math.inf
        good = ~diverged & (largest < FAR * usual)
        if noise.shape[1] > 1 and not good.all():  # repeat them one by one, to see which of them diverges
            return [self._langevin(noise[:, s : s + 1].copy())[0] for s in range(noise.shape[1])]
        error, drawing = errors[:, -1], self.done >= settings.warmup
        again, self.turned = (self.done >= self.ends[2]) & ~good & self.turned, ~good  # bad in both directions
        self.step_size, self.halved = np.where(again, step / 2, step), self.halved + (again & diverged)
        self.lost = self.lost | (self.halved > HALVINGS)
        if self.lost.all():
            chain = int(np.argmax(diverged))
            who = f"chain {chain + 1}" if len(error) > 1 else "a chain"
            size = f"{error[chain]:,.0f} nats" if np.isfinite(error[chain]) else "not finite"
            raise ChainLost(f"{who} diverged at transition {self.done + 1:,}: its energy error is {size} in a step of "
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
        return [{"energy_error": error, **figures} for error in np.abs(errors).T]

    def _trajectory(self) -> dict[str, np.ndarray]:
        """Make one trajectory of every chain, accepted or rejected as a whole; in the warm-up adapt step sizes."""
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
        """Adapt scales and L at the ends of their windows, and correct the step size; see the top of the file."""
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
            if self.settings.adjusted:  # a bound, as chains that do not mix would get extremely long trajectories
                radius = np.sqrt(x.var(1).sum(1) * (self.size / x.shape[2]))
                self.length = np.where(radius > 0, np.minimum(self.length, REACH * radius), self.length)
            self.positions = []
        if done == last or (is_kept and len(self.positions) % STRETCH == 0):
            self.step_size, self.tuning = self.step_size * self.tuning.factor, self.tuning.anew()

    def _noise(self, num: int) -> np.ndarray:
        """Standard Normal numbers (G, num, d), from the generator of each chain."""
        return np.stack([rng.standard_normal((num, self.size)) for rng in self.rngs])

    def state(self) -> dict[str, Any]:
        """All that the next transition depends on: tensors, numbers and strings of JSON."""
        names = ("step_size", "length", "lost", "turned", "halved", "ends", "way")
        parts = {"point": self.point._asdict(), "tuning": vars(self.tuning), "moments": vars(self.moments),
                 "own": {name: getattr(self, name) for name in names}, "positions": self.positions,
                 "averages": [vars(average) for average in self.averages], "done": self.done,
                 "rngs": json.dumps([rng.bit_generator.state for rng in self.rngs])}  # fmt: skip
        return tree_map_only(np.ndarray, torch.from_numpy, parts)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state`` of a kernel with the same settings and potential."""
        state = tree_map_only(Tensor, Tensor.numpy, dict(state))
        self.point = State(**{"scale": np.ones_like(state["point"]["z"]), **state["point"]})
        # In earlier versions the tuning had a "limit", "own" had fewer entries, and "ends" lacked the first bound.
        self.tuning = EnergyTuning(**{k: v for k, v in state["tuning"].items() if k != "limit"})
        self.moments, self.positions, self.done = Moments(**state["moments"]), state["positions"], state["done"]
        former = [int(share * self.settings.warmup) for share in FORMER_WINDOWS[self.settings.adjusted]]
        vars(self).update({"ends": former, **(earlier := state["own"])})
        self.ends = [*self.ends[:1] * (4 - len(self.ends)), *self.ends]
        ways = earlier["length" if self.settings.adjusted else "step_size"] * self._every * len(self.positions)
        self.way, self.averages = earlier.get("way", ways), [DualAveraging(**values) for values in state["averages"]]
        for rng, saved in zip(self.rngs, json.loads(state["rngs"]), strict=True):
            rng.bit_generator.state = saved
