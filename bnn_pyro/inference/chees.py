"""ChEES-HMC: many short chains of Hamiltonian Monte Carlo, which tune step size, trajectories and mass together.

    r ~ Normal(0, M),   (z', r') = ⌈h T/ε⌉ leapfrog steps of size ε from (z, r),   accept with min(1, exp(H − H'))

Hoffman, Radul & Sountsov 2021, AISTATS. h is a quasi-random number in (0, 1), the same for all chains, so that every
chain takes as many steps and one batched call moves them all. The warm-up has two parts: an approach, in which each
chain has a step size of its own until it has come from its start to where the posterior is, and the adaptation of
:mod:`bnn_pyro.inference.chees_adaptation`; both are dropped. Draws have the exact posterior as their limit.

Chains are short, so that the usual R-hat is no judge of them. Groups of chains, superchains, share a starting point:
whether their means agree tells whether the starts are forgotten (nested R-hat, Margossian et al. 2022,
arXiv:2110.13017); ``stats["superchain"]`` tells the groups.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.chees_adaptation import APPROACH_STEPS, Adaptation, Approach, halton
from bnn_pyro.inference.curvature import coordinates
from bnn_pyro.inference.many_chains import Chains, Transition
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.record import Record
from bnn_pyro.inference.sampler import Sampler, announce, choose_compiled, nothing_drawn, warn_of_idle_chains, work
from bnn_pyro.inference.starts import STARTS, starting_points
from bnn_pyro.isolation import generator_state, isolated, set_generator_state
from bnn_pyro.parallel.task import one_thread
from bnn_pyro.posterior import Posterior, weight_space
from bnn_pyro.settings import setting

__all__ = ["ChEES"]

#: Gradients that an iteration may be expected to take, all chains at once.
TYPICAL = 20

#: Iterations of the approach, at most, and as a share of the warm-up.
APPROACH, APPROACH_SHARE = 100, 0.25


@dataclass(frozen=True)
class ChEES(Sampler):
    """Settings of ChEES-HMC: many chains at once, 16 to 512, tuned across chains.

    ``target_accept`` is the harmonic mean of the chains' acceptance rates; the plain mean is higher.

    superchains  starting points, each shared by as many chains; at most ``chains``, which it must divide
    max_steps    at most so many leapfrog steps a transition
    """

    tiny: ClassVar[Mapping[str, Any]] = {"chains": 32, "superchains": 16, "draws": 150, "warmup": 200}
    chains: int = setting(64, low=1)
    draws: int = setting(200, low=1)
    warmup: int = setting(400, low=1)
    target_accept: float = setting(0.651, above=0, below=1)
    start: str = setting("prior", choices=STARTS)
    superchains: int = setting(16, low=1)
    max_steps: int = setting(1000, low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chains < 2:
            raise UserError(f"chees learns across chains and needs at least 2 of them, got {self.chains}; take nuts")
        if self.chains > self.superchains and self.chains % self.superchains:
            raise UserError(
                f"{self.chains} chains cannot be shared out evenly to {self.superchains} superchains; take a multiple "
                f"of {self.superchains}, or other superchains"
            )

    def run(
        self,
        model: nn.Module,
        guide: nn.Module | None,
        data: Dataset,
        *,
        seed: int = 0,
        checkpoint: Checkpoint | None = None,
        report: Report | None = None,
    ) -> Posterior:
        """Sample the posterior; see ``Method.run``. The guide is used by ``start="svi"`` alone.

        ``stats`` of the posterior, (C, D): acceptance_rate, diverging (0 or 1), energy (nats, where the trajectory
        starts), lp (log joint density of the draw in nats), n_steps, step_size, trajectory_length, superchain.

        Ctrl-C returns the draws so far, with a warning, where there are any and no checkpoint.

        Raises UserError where the step size falls to nothing.
        """
        model = weight_space(model)
        with isolated(seed):
            potential = Potential(model, data.x_train, data.y_train, self.temperature)
            potential.space = coordinates(potential)
            gradients = float(self.transitions * TYPICAL)
            if compiled := choose_compiled(self.compiled, gradients, work(potential)):
                compiled = potential.compile(self.chains)
            sampling = _Sampling(self, potential)
            # Compiled code has threads of its own; those of torch would only be in its way.
            with one_thread() if compiled else nullcontext():
                saved = checkpoint.load() if checkpoint is not None else None
                if saved is not None:
                    sampling.restore(saved)
                else:
                    num = min(self.chains, self.superchains)
                    starts = starting_points(potential, model, guide, data, self.start, num, self.jitter, seed)
                    sampling.begin(starts.repeat_interleave(self.chains // num, 0))
                    announce(sampling.seconds, gradients, 1, "sghmc takes mini-batches, and svi is an approximation")
                stopped = self._drive(sampling, checkpoint, report)
        return self._posterior(model, data, sampling, stopped)

    def _drive(self, sampling: _Sampling, checkpoint: Checkpoint | None, report: Report | None) -> str:
        """Iterate to the end. Returns why it was stopped before, "" if it was not."""
        record, total = sampling.record, self.transitions
        try:
            while not record.finished:
                figures = sampling.iterate()
                if report is not None:
                    report(record.done, total, figures)
                if checkpoint is not None and checkpoint.due:
                    checkpoint.save(sampling.state())
                    if checkpoint.stop:
                        raise Interrupted(f"stopped after iteration {record.done:,} of {total:,}")
        except KeyboardInterrupt:
            if checkpoint is not None:  # it was answered above, or is the second Ctrl-C
                raise
            return "stopped by Ctrl-C"
        return ""

    def _posterior(self, model: nn.Module, data: Dataset, sampling: _Sampling, stopped: str) -> Posterior:
        record = sampling.record
        if not record.kept:
            raise nothing_drawn(stopped)
        if stopped:
            stopped = f"{stopped}: {record.kept:,} of {self.draws:,} draws of each chain"
            warnings.warn(f"{stopped} are kept", stacklevel=4)
        first = lambda kept: torch.from_numpy(kept[: record.kept]).transpose(0, 1).contiguous()  # noqa: E731
        z, stats = first(record.z), {name: first(values) for name, values in record.stats.items()}
        warn_of_idle_chains(z, stats["diverging"], range(len(z)), len(z))
        chains = sampling.potential.weights(z.to(data.x_train.device))
        about = {"stopped": stopped} if stopped else {}
        return Posterior(model, data.schema, chains=chains, stats=stats, provenance=about)


class _Sampling:
    """A run between two iterations: all chains, what the warm-up has learned, and the draws so far."""

    def __init__(self, settings: ChEES, potential: Potential) -> None:
        self.settings, self.potential = settings, potential
        self.record = Record(settings.draws, settings.warmup, settings.thin, (settings.chains, potential.size))
        self.approach = min(APPROACH, int(APPROACH_SHARE * settings.warmup))  # iterations of it
        each = settings.chains // min(settings.chains, settings.superchains)
        self.superchain = torch.arange(settings.chains, dtype=torch.float64) // each

    def begin(self, z: Tensor) -> None:
        """At starts z (C, P); a gradient of all chains is timed."""
        start = time.perf_counter()
        self.chains = Chains(z, *self.potential(z))
        self.seconds = time.perf_counter() - start
        self.first = Approach.begin(z)
        self.adaptation: Adaptation | None = None

    def iterate(self) -> dict[str, float]:
        """One transition of every chain. Returns what a progress bar shows."""
        if self.record.done < self.approach:
            moved = self.chains.move(self.potential, *self.first.plan())
            self.first.learn(moved.acceptance)
            self._keep(moved, APPROACH_STEPS, self.first.step)
            return {"accept": moved.acceptance.mean().item(), "step size": self.first.step.median().item()}
        if self.adaptation is None:
            self.adaptation = Adaptation.begin(self.first.step, self.chains.z, self.first.variance)
        settings, learned, done = self.settings, self.adaptation, self.record.done
        if done == settings.warmup:
            learned.settle()
        share, step = halton(done + 1 - self.approach), learned.step
        steps = max(1, min(settings.max_steps, math.ceil(share * learned.length / step)))
        sizes = self.chains.density.new_full((settings.chains,), step)
        moved = self.chains.move(self.potential, learned.variance, sizes, steps)
        if done < settings.warmup:
            learned.learn(moved, share, target=settings.target_accept, longest=settings.max_steps * step)
        self._keep(moved, steps, sizes)
        shown = {"accept": moved.acceptance.mean().item(), "step size": step, "gradients": steps}
        return shown | {"divergent": self.record.divergent}

    def _keep(self, moved: Transition, steps: int, step: Tensor) -> None:
        """Where the chains are now goes into the record, with what ``stats`` keeps of the transition."""
        figures = {"acceptance_rate": moved.acceptance, "diverging": moved.diverging, "energy": moved.energy}
        figures |= {"lp": self.chains.density, "n_steps": torch.full_like(step, steps), "step_size": step}
        figures |= {"trajectory_length": steps * step, "superchain": self.superchain}
        self.record.add(self.chains.z.cpu().numpy(), {name: value.cpu().numpy() for name, value in figures.items()})

    def state(self) -> dict[str, Any]:
        """Everything that the next iteration depends on, and the draws."""
        return {
            "chains": dict(vars(self.chains)),
            "first": dict(vars(self.first)),
            "adaptation": None if self.adaptation is None else dict(vars(self.adaptation)),
            "record": self.record.state(),
            "generators": generator_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from such a state."""
        device = self.potential.initial.device
        there = lambda part: {k: v.to(device) if isinstance(v, Tensor) else v for k, v in part.items()}  # noqa: E731
        self.chains, self.first = Chains(**there(state["chains"])), Approach(**there(state["first"]))
        self.adaptation = None if state["adaptation"] is None else Adaptation(**there(state["adaptation"]))
        self.record.restore(state["record"])
        set_generator_state(state["generators"])
