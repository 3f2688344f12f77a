"""ChEES-HMC: many short chains of Hamiltonian Monte Carlo, which tune step size, trajectories and mass together.

    r ~ Normal(0, M),   (z', r') = ⌈h T/ε⌉ leapfrog steps of size ε from (z, r),   accept with min(1, exp(H − H'))

Hoffman, Radul & Sountsov 2021, AISTATS. h is a quasi-random number in (0, 1), the same for all chains, so that every
chain takes as many steps and one batched call moves them all. The warm-up has two parts: an approach, in which each
chain has a step size of its own until it has come from its start to where the posterior is, and the adaptation of
:mod:`bnn_pyro.inference.markov.chees_adaptation`; both are dropped. Draws have the exact posterior as their limit.

Chains are short, so that the usual R-hat is no judge of them. Groups of chains, superchains, share a starting point:
whether their means agree tells whether the starts are forgotten (nested R-hat, Margossian et al. 2022,
arXiv:2110.13017); ``stats["superchain"]`` tells the groups.
"""

from __future__ import annotations

import math
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.markov.budget import announce, choose_compiled, work
from bnn_pyro.inference.markov.chees_adaptation import Adaptation, Approach, halton
from bnn_pyro.inference.markov.many_chains import Chains, Draws
from bnn_pyro.inference.markov.one_chain import one_thread
from bnn_pyro.inference.markov.sampler import COMPILED, check_settings
from bnn_pyro.inference.markov.starts import STARTS, starting_points
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.target.potential import Potential
from bnn_pyro.inference.target.whitening import coordinates
from bnn_pyro.isolation import generator_state, isolated, set_generator_state
from bnn_pyro.posterior import Posterior, weight_space

__all__ = ["ChEES"]

#: Gradients that an iteration may be expected to take, all chains at once.
TYPICAL = 20

#: Iterations of the approach, at most, and as a share of the warm-up.
APPROACH, APPROACH_SHARE = 100, 0.25

#: Draws of a chain from which on one that never moves, or always diverges, is told: fewer may be bad luck.
ENOUGH = 10


@dataclass(frozen=True)
class ChEES:
    """Settings of ChEES-HMC: many chains at once, tuned across chains.

    chains         chains, all at once; 16 to 512
    draws          draws kept of each chain
    warmup         iterations before them, in which step size, trajectory length and mass are learned; dropped
    superchains    starting points, each shared by as many chains; at most ``chains``, which it must divide
    target_accept  harmonic mean of the acceptance rates that the step size is adapted to (the plain mean is higher)
    max_steps      at most so many leapfrog steps a transition
    thin           transitions a draw
    start          where chains start: jitter, prior, map or svi
    jitter         how far apart jittered chains start, in standard deviations of the prior
    temperature    T: p(y | x, w)^(1/T) p(w) is sampled; 1 is Bayes, less is a cold posterior and is reported as such
    compiled       whether to compile the gradient: auto (where the run is long enough), yes or no
    """

    limit: ClassVar[str] = "posterior"
    chains: int = 64
    draws: int = 200
    warmup: int = 400
    superchains: int = 16
    target_accept: float = 0.651
    max_steps: int = 1000
    thin: int = 1
    start: str = "prior"
    jitter: float = 1.0
    temperature: float = 1.0
    compiled: str = "auto"

    def __post_init__(self) -> None:
        least = {"draws": 1, "warmup": 1, "superchains": 1, "max_steps": 1, "thin": 1}
        check_settings(self, least, 0.651, start=STARTS, compiled=COMPILED)
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
            gradients = float((self.warmup + self.draws * self.thin) * TYPICAL)
            if compiled := choose_compiled(self.compiled, gradients, work(potential)):
                compiled = potential.compile(self.chains)
            sampling = _Sampling(self, potential)
            # Compiled code has threads of its own; those of torch would only be in its way.
            with one_thread(self.chains) if compiled else nullcontext():
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
        total = self.warmup + self.draws * self.thin
        try:
            while sampling.done < total:
                figures = sampling.iterate()
                if report is not None:
                    report(sampling.done, total, figures)
                if checkpoint is not None and checkpoint.due:
                    checkpoint.save(sampling.state())
                    if checkpoint.stop:
                        raise Interrupted(f"stopped after iteration {sampling.done:,} of {total:,}")
        except Interrupted:
            raise
        except KeyboardInterrupt:
            if checkpoint is not None or not sampling.draws.kept:
                raise KeyboardInterrupt(
                    f"stopped at iteration {sampling.done:,} of {total:,}, before the first draw"
                    if not sampling.draws.kept
                    else "stopped"
                ) from None
            return f"stopped: {sampling.draws.kept:,} of {self.draws:,} draws of each chain"
        return ""

    def _posterior(self, model: nn.Module, data: Dataset, sampling: _Sampling, stopped: str) -> Posterior:
        if stopped:
            warnings.warn(f"{stopped} are kept", stacklevel=4)
        draws = sampling.draws
        z, stats = draws.z[:, : draws.kept], {name: value[:, : draws.kept] for name, value in draws.stats.items()}
        if draws.kept >= ENOUGH:
            still = (z == z[:, :1]).flatten(1).all(1)
            diverging = stats["diverging"].bool().all(1)
            for chains, what in ((diverging, "diverged"), (still & ~diverging, "was rejected")):
                if chains.any():
                    named = ", ".join(str(int(c) + 1) for c in chains.nonzero()[:5])
                    warnings.warn(
                        f"{int(chains.sum())} of {len(z)} chains: every transition {what} (chain {named}"
                        f"{', …' if chains.sum() > 5 else ''}), and their draws tell of their start alone; try "
                        "start=map, a higher target_accept or a longer warm-up",
                        stacklevel=4,
                    )
        chains = sampling.potential.weights(z.to(data.x_train.device))
        about = {"stopped": stopped} if stopped else {}
        return Posterior(model, data.schema, chains=chains, stats=stats, provenance=about)


class _Sampling:
    """A run between two iterations: all chains, what the warm-up has learned, and the draws so far."""

    def __init__(self, settings: ChEES, potential: Potential) -> None:
        self.settings, self.potential = settings, potential
        self.draws = Draws(settings.chains, settings.draws, potential.size, settings.thin)
        self.approach = min(APPROACH, int(APPROACH_SHARE * settings.warmup))  # iterations of it
        self.done = self.divergent = 0

    def begin(self, z: Tensor) -> None:
        """At starts z (C, P); a gradient of all chains is timed."""
        start = time.perf_counter()
        self.chains = Chains(z, *self.potential(z))
        self.seconds = time.perf_counter() - start
        self.first = Approach.begin(z)
        self.adaptation: Adaptation | None = None

    def iterate(self) -> dict[str, float]:
        """One transition of every chain. Returns what a progress bar shows."""
        settings, done = self.settings, self.done
        self.done += 1
        if done < self.approach:
            moved = self.chains.move(self.potential, *self.first.plan())
            self.first.learn(moved.acceptance)
            return {"accept": moved.acceptance.mean().item(), "step size": self.first.step.median().item()}
        if self.adaptation is None:
            self.adaptation = Adaptation.begin(self.first.step, self.chains.z, self.first.variance)
        learned, share = self.adaptation, halton(done + 1 - self.approach)
        if done == settings.warmup:
            learned.settle()
        steps = max(1, min(settings.max_steps, math.ceil(share * learned.length / learned.step)))
        step = self.chains.density.new_full((settings.chains,), learned.step)
        size = learned.step
        moved = self.chains.move(self.potential, learned.variance, step, steps)
        if done < settings.warmup:
            learned.learn(moved, share, target=settings.target_accept, longest=settings.max_steps * size)
        else:
            same = {"n_steps": steps, "step_size": size, "trajectory_length": steps * size}
            figures = {name: torch.full_like(moved.energy, value) for name, value in same.items()}
            figures |= {"acceptance_rate": moved.acceptance, "diverging": moved.diverging, "energy": moved.energy}
            figures |= {"lp": self.chains.density, "superchain": self._superchain()}
            self.draws.add(self.chains.z, figures)
            self.divergent += int(moved.diverging.sum())
        shown = {"accept": moved.acceptance.mean().item(), "step size": size, "gradients": steps}
        return shown | {"divergent": self.divergent}

    def _superchain(self) -> Tensor:
        chains = self.settings.chains
        return torch.arange(chains, dtype=torch.float64) // (chains // min(chains, self.settings.superchains))

    def state(self) -> dict[str, Any]:
        """Everything that the next iteration depends on, and the draws."""
        return {
            "done": self.done,
            "divergent": self.divergent,
            "chains": dict(vars(self.chains)),
            "first": dict(vars(self.first)),
            "adaptation": None if self.adaptation is None else dict(vars(self.adaptation)),
            "draws": self.draws.state(),
            "generators": generator_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from such a state."""
        device = self.potential.initial.device
        there = lambda part: {k: v.to(device) if isinstance(v, Tensor) else v for k, v in part.items()}  # noqa: E731
        self.done, self.divergent = state["done"], state["divergent"]
        self.chains, self.first = Chains(**there(state["chains"])), Approach(**there(state["first"]))
        self.adaptation = None if state["adaptation"] is None else Adaptation(**there(state["adaptation"]))
        self.draws.restore(state["draws"])
        set_generator_state(state["generators"])
