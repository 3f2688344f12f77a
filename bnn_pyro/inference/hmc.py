"""Hamiltonian Monte Carlo over all rows of the training set: HMC and NUTS, several chains.

    H(w, r) = −log p(y | x, w) / T − log p(w) + ½ rᵀ M⁻¹ r

Draws are exact up to Monte-Carlo error (Neal 2011, arXiv:1206.1901; Hoffman & Gelman 2014, arXiv:1111.4246). As every
gradient is a pass over all rows, these samplers are a reference for small networks and last layers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from bnn_pyro.checkpoint import Run
from bnn_pyro.inference.adaptation import Warmup, check_steps, reasonable_step
from bnn_pyro.inference.chains import Chains, run_chains
from bnn_pyro.inference.cost import choose_compiled, choose_cores, run_cost
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.sampler import Drawn, Sampler, Starts
from bnn_pyro.inference.trajectories import Dynamics, Point, Transition, gradient_of, hmc, nuts
from bnn_pyro.isolation import generator_state, set_generator_state
from bnn_pyro.parallel.executor import on_cluster
from bnn_pyro.settings import setting


@dataclass(frozen=True)
class SeparateChains(Sampler):
    """Samplers whose chains do not learn from one another.

    A subclass defines ``typical(whitened)``, the expected number of gradients a transition, and either ``kernel`` or
    ``_move(dynamics, rng, point, step)``, which returns a transition and the additional columns of ``stats``.

    cores  number of processes, which changes no draw; 1: the present one; 0: one for each core if the run is long
    """

    cores: int = setting(0, low=0)

    former: ClassVar[Mapping[str, Any]] = {"mass": "diagonal"}
    incidental: ClassVar[tuple[str, ...]] = ("cores",)  # no draw depends on them: a run may be resumed with others
    #: Whether a kernel moves several chains together, as Python's share of a transition takes longer than the gradient
    #: of a small network: all chains with PyTorch's operators, the chains of a process with compiled code.
    group: ClassVar[bool] = False

    def kernel(self, potential: Potential, start: np.ndarray, seed: int) -> "Kernel":
        """The kernel of one chain.   start: P numbers, in an array of any shape.   Call it inside ``isolated``."""
        return Kernel(self, potential, start.ravel(), seed)

    def _draw(self, potential: Potential, starts: Starts, run: Run) -> Drawn:
        """See ``Sampler``. The starts are kept in the checkpoint."""
        gradients = float(self.chains * self.transitions * self.typical(potential.space.whitened))
        compiled = choose_compiled(self.compiled, gradients, potential)
        tasks = 1 if self.group and not compiled else self.chains
        together = self.chains // tasks
        seconds, price = run_cost(gradients / together, compiled, potential, together)
        cores = choose_cores(self.cores, tasks, potential.x.device, seconds, price)
        if self.group and compiled and not on_cluster():
            tasks = next(n for n in range(cores, self.chains + 1) if self.chains % n == 0)
        if run.checkpoint is not None and (state := run.checkpoint.load()) is not None:
            z = state["starts"]
            tasks = len(z) if z.dim() == 3 or compiled else tasks  # the same groups of chains as when the run began
        else:
            z = starts(self.chains).cpu()
            z = z.reshape(tasks, -1, z.shape[-1])
            if run.checkpoint is not None:
                run.checkpoint.save({"starts": z, "centred": potential.centred})
        z = z.reshape(tasks, -1, z.shape[-1]).numpy()
        return run_chains(Chains(self, potential, z, run.seed, compiled), min(cores, tasks), run)


class Kernel:
    """One chain: its position, what its warm-up has learned, and its random generator."""

    def __init__(self, sampler: Any, potential: Potential, start: np.ndarray, seed: int) -> None:
        self.sampler, self.potential = sampler, potential
        self.warmup = Warmup(sampler.warmup, sampler.target_accept, len(start))
        self.rng, self.gradient = np.random.default_rng(seed), gradient_of(potential)
        self.start_at(start)
        self._new_metric()

    def start_at(self, z: np.ndarray) -> None:
        """Continue from z (P,), with the potential's present density there."""
        self.point = Point(z.copy(), *self.gradient(z))

    def step(self) -> dict[str, float]:
        """Make one transition and return its ``stats``. Raises UserError if the step size has become too small."""
        step = self.warmup.step
        done, figures = self.sampler._move(self.dynamics, self.rng, self.point, step)
        self.point = done.point
        if self.warmup.learn(done.acceptance, done.point.z):
            self._new_metric()
        check_steps(self.warmup.step, self.warmup.done)
        stats = dict(acceptance_rate=done.acceptance, diverging=float(done.diverging), energy=done.energy)
        stats |= dict(lp=done.point.log_density, n_steps=float(done.steps), step_size=step)
        return stats | figures

    def _new_metric(self) -> None:
        self._set_dynamics()
        self.warmup.restart(reasonable_step(self.warmup.step, self.dynamics, self.point.z))
        check_steps(self.warmup.step, self.warmup.done)

    def _set_dynamics(self) -> None:
        scale = self.warmup.inverse_mass.sqrt().numpy()
        self.dynamics = Dynamics(self.gradient, scale, getattr(self.potential, "compiled", None))

    def state(self) -> dict[str, Any]:
        """All that the next transition depends on: tensors, numbers and a string of JSON."""
        z, log_density, gradient = self.point
        return {
            "point": [torch.from_numpy(z), log_density, torch.from_numpy(gradient)],
            "warmup": dict(vars(self.warmup)),
            "generators": generator_state(),
            "rng": json.dumps(self.rng.bit_generator.state),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state`` of a kernel with the same settings and potential."""
        z, log_density, gradient = state["point"]
        self.point = Point(z.numpy(), log_density, gradient.numpy())
        self.warmup.restore(state["warmup"])
        self._set_dynamics()
        set_generator_state(state["generators"])
        self.rng.bit_generator.state = json.loads(state["rng"])


@dataclass(frozen=True)
class NUTS(SeparateChains):
    """Settings of the No-U-Turn sampler: trajectories go on until they turn back.

    max_tree_depth  largest depth of the tree of a transition, which then takes 2^depth − 1 gradients
    """

    max_tree_depth: int = setting(10, low=1)

    def _move(self, dynamics: Dynamics, rng: np.random.Generator, point: Point, step: float) -> tuple[Transition, dict]:
        done = nuts(rng, point, dynamics, step, self.max_tree_depth)
        return done, {"tree_depth": float(done.depth), "cut": float(done.depth >= self.max_tree_depth)}

    def typical(self, whitened: bool) -> int:
        """See ``SeparateChains``."""
        return 2 ** min(self.max_tree_depth, 3 if whitened else 7) - 1


@dataclass(frozen=True)
class HMC(SeparateChains):
    """Settings of Hamiltonian Monte Carlo with trajectories of random length.

    length     mean length of a trajectory, in standard deviations of the posterior as the mass matrix estimates them;
               each length is drawn uniformly between 0.5 and 1.5 times the mean (Neal 2011, section 3.2)
    max_steps  largest number of gradients a transition
    """

    length: float = setting(3.0, above=0)
    max_steps: int = setting(1024, low=1)

    def _move(self, dynamics: Dynamics, rng: np.random.Generator, point: Point, step: float) -> tuple[Transition, dict]:
        steps = min(self.max_steps, max(1, int(self.length * (0.5 + rng.random()) / step)))
        figures = {"trajectory_length": steps * step, "cut": float(steps == self.max_steps)}
        return hmc(rng, point, dynamics, step, steps), figures

    def typical(self, whitened: bool) -> int:
        """See ``SeparateChains``."""
        return min(self.max_steps, max(1, round(self.length / (0.5 if whitened else 0.025))))
