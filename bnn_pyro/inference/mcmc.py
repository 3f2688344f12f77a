"""Hamiltonian Monte Carlo over all rows of the training set: Pyro's own HMC and NUTS kernels, chain after chain.

    H(w, r) = −log p(y | x, w) / T − log p(w) + ½ rᵀ M⁻¹ r

Exact up to Monte-Carlo error (Neal 2011, arXiv:1206.1901; Hoffman & Gelman 2014, arXiv:1111.4246), every gradient a
pass over all rows: a reference for small networks and last layers, not a way to train large ones. Step size and
diagonal M are adapted in the warm-up, which is dropped. Chains start apart, as a convergence diagnostic wants it: each
at the model's initial values plus ``jitter`` times a vector of mean 0 with the prior's standard deviations.

A linear model is sampled in the coordinates of :mod:`bnn_pyro.inference.whitening`, where trajectories are short; its
draws are weights all the same. Positions and energies are float64, the model is evaluated in its own precision.

Chains run in sequence in this process, each with a seed of its own derived from (seed, chain): Pyro's worker
processes are known to hang in notebooks. A checkpoint holds the draws so far and the whole state of the kernel with
its adaptation, so that a run stopped at any transition goes on to the very same draws.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import mcmc
from torch import Tensor, nn

from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.whitening import Plain, coordinates
from bnn_pyro.isolation import generator_state, isolated, set_generator_state
from bnn_pyro.posterior import Posterior, weight_space

__all__ = ["HMC", "NUTS"]


class _Watched:
    """Remembers the energy that a trajectory starts with; mixed into Pyro's kernels."""

    def _sample_r(self, name: str) -> tuple[dict[str, Tensor], dict[tuple, Tensor]]:
        r, unscaled = super()._sample_r(name)
        self.energy = self._potential_energy_last + self._kinetic_energy(unscaled)
        return r, unscaled


class _NUTSKernel(_Watched, mcmc.NUTS):
    pass


class _HMCKernel(_Watched, mcmc.HMC):
    """Trajectories of random lengths, so that no direction of the posterior comes back to where it started."""

    settings: HMC

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        self.trajectory_length = self.settings.length * (0.5 + torch.rand(()).item())
        return super().sample(params)

    @property
    def num_steps(self) -> int:
        return min(self.settings.max_steps, super().num_steps)


class _Chain:
    """One chain at work: a Pyro kernel with its adaptation."""

    def __init__(self, kernel: mcmc.HMC, log_joint: LogJoint, space: Plain, warmup: int, jitter: float) -> None:
        self.kernel, self.log_joint, self.space = kernel, log_joint, space
        a, b = log_joint.prior_draw(), log_joint.prior_draw()  # their difference has mean 0 and twice the variance
        start = {s: w + jitter / math.sqrt(2) * (a[s] - b[s]) for s, w in log_joint.initial.items()}
        kernel.initial_params = space.inverse(start)
        kernel.setup(warmup)

    def step(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """One transition: (weights, what ``stats`` keeps of it)."""
        kernel, calls = self.kernel, self.log_joint.calls
        mean, divergences = kernel._mean_accept_prob, len(kernel._divergences)
        z = kernel.sample(kernel._z_last)
        past = kernel._t - kernel._warmup_steps  # Pyro starts its running mean afresh after the warm-up
        count = past if past > 0 else kernel._t
        figures = {
            "acceptance_rate": kernel._mean_accept_prob * count - mean * (count - 1),
            "diverging": float(len(kernel._divergences) > divergences),
            "energy": kernel.energy.item(),
            "lp": -kernel._potential_energy_last.item(),
            "n_steps": float(self.log_joint.calls - calls),
            "step_size": float(kernel.step_size),
        }
        return self.space.weights(z), figures

    def state(self) -> dict[str, Any]:
        """Everything that the next transition depends on."""
        kernel, adapter = self.kernel, self.kernel._adapter
        (inverse_mass,) = kernel.inverse_mass_matrix.values()
        (welford,) = kernel.mass_matrix_adapter._adapt_scheme.values()
        names = ("_t", "_accept_cnt", "_mean_accept_prob", "_divergences")
        return {
            "cache": list(kernel._fetch_from_cache()),
            "kernel": {name: getattr(kernel, name) for name in names},
            "adapter": {name: getattr(adapter, name) for name in ("step_size", "_current_window")},
            "averaging": dict(vars(adapter._step_size_adapt_scheme)),
            "welford": dict(vars(welford)),
            "inverse_mass": inverse_mass,
            "generators": generator_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from such a state, in a chain made with the same seed."""
        kernel, adapter = self.kernel, self.kernel._adapter
        state = _on(kernel._potential_energy_last.device, {k: v for k, v in state.items() if k != "generators"}) | {
            "generators": state["generators"]
        }
        kernel._cache(*state["cache"])
        vars(kernel).update(state["kernel"])
        vars(adapter).update(state["adapter"])
        vars(adapter._step_size_adapt_scheme).update(state["averaging"])
        ((block, welford),) = kernel.mass_matrix_adapter._adapt_scheme.items()
        kernel.mass_matrix_adapter.inverse_mass_matrix = {block: state["inverse_mass"]}  # which empties welford
        vars(welford).update(state["welford"])
        set_generator_state(state["generators"])


def _on(device: torch.device, value: Any) -> Any:
    """The same nested lists and dicts with their tensors on a device."""
    if isinstance(value, dict):
        return {k: _on(device, v) for k, v in value.items()}
    if isinstance(value, list):
        return [_on(device, v) for v in value]
    return value.to(device) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class _Sampler:
    """Settings that HMC and NUTS share.

    draws          kept transitions of each chain
    warmup         transitions before them, in which step size and mass matrix are adapted; dropped
    chains         independent chains, one after the other
    target_accept  mean acceptance rate that the step size is adapted to; higher where trajectories diverge
    jitter         how far apart chains start, in standard deviations of the prior
    temperature    T: p(y | x, w)^(1/T) p(w) is sampled; 1 is Bayes, less is a cold posterior and is reported as such
    """

    draws: int = 1000
    warmup: int = 500
    chains: int = 4
    target_accept: float = 0.8
    jitter: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("draws", "warmup", "chains"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.target_accept < 1:
            raise UserError(f"target_accept must lie between 0 and 1, got {self.target_accept}; 0.8 is usual")
        if not 0 <= self.jitter < math.inf:
            raise UserError(f"jitter must be 0 or positive, got {self.jitter}")
        if not 0 < self.temperature < math.inf:
            raise UserError(f"temperature must be positive (1 is the Bayesian posterior), got {self.temperature}")

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
        """Sample the posterior; see ``Method.run``. The guide is not used.

        ``stats`` of the posterior, (C, D): acceptance_rate, diverging (0 or 1), energy (in nats, where the trajectory
        starts), lp (log joint density of the draw in nats), n_steps (gradients taken), step_size.
        """
        model = weight_space(model)
        with isolated(seed):
            log_joint = LogJoint(model, data.x_train, data.y_train, self.temperature)
            space = coordinates(log_joint, self.temperature)
        chains = {s: w.new_zeros(self.chains, self.draws, *w.shape) for s, w in log_joint.initial.items()}
        stats: dict[str, Tensor] = {}
        per_chain = self.warmup + self.draws
        done, total, unfinished = 0, self.chains * per_chain, None
        if checkpoint is not None and (state := checkpoint.load()) is not None:
            done, unfinished, stats = state["done"], state["chain"], state["stats"]
            for site, draws in state["chains"].items():
                chains[site][: len(draws)] = draws
        start, calls, divergent = 0.0, 0, 0
        while done < total:
            c = done // per_chain
            with isolated(_seed(seed, c)), pyro.validation_enabled(False):  # trajectories may meet infinities
                chain = _Chain(self._kernel(log_joint, space), log_joint, space, self.warmup, self.jitter)
                if unfinished is not None:
                    chain.restore(unfinished)
                    unfinished = None
                if not calls:  # by now every lazy set-up is over: what follows tells the time of a gradient
                    start, calls = time.perf_counter(), log_joint.calls
                for t in range(done - c * per_chain, per_chain):
                    w, figures = chain.step()
                    done += 1
                    if t >= self.warmup:
                        for site, value in w.items():
                            chains[site][c, t - self.warmup] = value
                        for name, value in figures.items():
                            stats.setdefault(name, torch.zeros(self.chains, self.draws, dtype=torch.float64))
                            stats[name][c, t - self.warmup] = value
                        divergent += int(figures["diverging"])
                    if report is not None:
                        seconds = (time.perf_counter() - start) / (log_joint.calls - calls)
                        shown = {"accept": chain.kernel._mean_accept_prob, "step size": figures["step_size"]}
                        shown |= {"gradients": figures["n_steps"], "ms/gradient": 1e3 * seconds, "divergent": divergent}
                        report(done, total, shown)
                    if checkpoint is not None and checkpoint.due:
                        inside = t + 1 < per_chain
                        checkpoint.save(
                            {
                                "done": done,
                                "chain": chain.state() if inside else None,
                                "chains": {site: draws[: c + 1].clone() for site, draws in chains.items()},
                                "stats": stats,
                            }
                        )
                        if checkpoint.stop:
                            raise Interrupted(f"stopped after step {done:,} of {total:,}")
        return Posterior(model, data.schema, chains=chains, stats=stats)

    def _kernel(self, log_joint: LogJoint, space: Plain) -> mcmc.HMC:
        raise NotImplementedError


def _seed(seed: int, chain: int) -> int:
    return int(np.random.SeedSequence([seed, chain]).generate_state(1)[0])


@dataclass(frozen=True)
class NUTS(_Sampler):
    """Settings of the No-U-Turn sampler: trajectories go on until they turn back.

    max_tree_depth  at most 2^depth − 1 gradients a transition
    """

    max_tree_depth: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tree_depth < 1:
            raise UserError(f"max_tree_depth must be at least 1, got {self.max_tree_depth}")

    def _kernel(self, log_joint: LogJoint, space: Plain) -> mcmc.HMC:
        return _NUTSKernel(
            potential_fn=lambda z: -log_joint(space.weights(z)),
            target_accept_prob=self.target_accept,
            max_tree_depth=self.max_tree_depth,
        )


@dataclass(frozen=True)
class HMC(_Sampler):
    """Settings of Hamiltonian Monte Carlo with trajectories of random length.

    length     mean length of a trajectory, in standard deviations of the posterior as the mass matrix knows them; each
               is drawn uniformly between a half and one and a half of it (Neal 2011, section 3.2)
    max_steps  at most so many gradients a transition
    """

    length: float = 3.0
    max_steps: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.length < math.inf:
            raise UserError(f"length must be positive, got {self.length}")
        if self.max_steps < 1:
            raise UserError(f"max_steps must be at least 1, got {self.max_steps}")

    def _kernel(self, log_joint: LogJoint, space: Plain) -> mcmc.HMC:
        kernel = _HMCKernel(potential_fn=lambda z: -log_joint(space.weights(z)), target_accept_prob=self.target_accept)
        kernel.settings = self
        return kernel
