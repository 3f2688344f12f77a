"""Hamiltonian Monte Carlo over all rows of the training set: HMC and NUTS with Pyro's adaptation, several chains.

    H(w, r) = −log p(y | x, w) / T − log p(w) + ½ rᵀ M⁻¹ r

Exact up to Monte-Carlo error (Neal 2011, arXiv:1206.1901; Hoffman & Gelman 2014, arXiv:1111.4246), every gradient a
pass over all rows: a reference for small networks and last layers, not a way to train large ones. Step size and M are
adapted in the warm-up, which is dropped: M is diagonal, a matrix for every layer, or one for all weights.

The log density is :class:`bnn_pyro.inference.potential.Potential`, in float64 coordinates on all of ℝᴾ,
compiled where the run is long enough to be worth it; a linear model is sampled in the coordinates of
:mod:`bnn_pyro.inference.curvature`, where trajectories are short. Kernels are Pyro's with trajectories of our
own (:mod:`bnn_pyro.inference.kernel`), and chains run side by side in processes, or in sequence, to the same
draws (:mod:`bnn_pyro.inference.chains`). A run stopped at any transition goes on to the very same draws.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.inference.chains import Plan, one_thread_each, run_chains
from bnn_pyro.inference.curvature import coordinates
from bnn_pyro.inference.kernel import FlatHMC, FlatNUTS
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.potential import Potential, Space
from bnn_pyro.inference.record import Record, most_draws
from bnn_pyro.inference.sampler import (
    Sampler,
    check_dense,
    choose_compiled,
    choose_cores,
    nothing_drawn,
    warn_of_idle_chains,
    work,
)
from bnn_pyro.inference.starts import starting_points
from bnn_pyro.isolation import isolated
from bnn_pyro.posterior import Posterior, weight_space
from bnn_pyro.settings import setting

__all__ = ["HMC", "NUTS"]

MASSES = ("diagonal", "dense", "block")


@dataclass(frozen=True)
class _Sampler(Sampler):
    """What HMC and NUTS have besides.

    mass   mass matrix: diagonal, block (a dense one for every layer) or dense
    cores  chains at once, each in a process of its own; 1: one after the other in this one; 0: as many as there are
           cores, where the run is long enough. The draws are the same
    """

    mass: str = setting("diagonal", choices=MASSES)
    cores: int = setting(0, low=0)

    #: Settings that no draw depends on: a run may be resumed with others.
    incidental: ClassVar[tuple[str, ...]] = ("cores",)

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

        ``stats`` of the posterior, (C, D): acceptance_rate, diverging (0 or 1), energy (in nats, where the trajectory
        starts), lp (log joint density of the draw in nats), n_steps (gradients taken), step_size; tree_depth of NUTS,
        trajectory_length of HMC. With ``thin`` above 1 they speak for all transitions since the draw before.

        Ctrl-C returns the draws so far, with a warning, where there are any and no checkpoint.
        """
        model = weight_space(model)
        with isolated(seed), one_thread_each(self.chains):
            potential = Potential(model, data.x_train, data.y_train, self.temperature)
            potential.space = coordinates(potential)
            blocks = self._blocks(potential)
            if checkpoint is not None and (state := checkpoint.load()) is not None:
                starts = state["starts"]
            else:
                starts = starting_points(
                    potential, model, guide, data, self.start, self.chains, self.jitter, seed
                ).cpu()
                if checkpoint is not None:
                    checkpoint.save({"starts": starts})
        gradients = float(self.chains * self.transitions * self.typical(type(potential.space) is not Space))
        compiled = choose_compiled(self.compiled, gradients, work(potential))
        plan = Plan(self, potential, blocks, starts.numpy(), seed, compiled, gradients)
        cores = choose_cores(self.cores, self.chains, gradients, compiled, potential)
        records, stopped = run_chains(plan, cores, checkpoint, report)
        return self._posterior(model, data, potential, records, stopped)

    def _posterior(
        self, model: nn.Module, data: Dataset, potential: Potential, records: list[Record], stopped: str
    ) -> Posterior:
        """The draws of all chains, or of those that have the most of them."""
        chosen, draws = most_draws(records)
        if not chosen:
            raise nothing_drawn(stopped)
        if stopped:
            stopped = f"{stopped}: {len(chosen)} of {self.chains} chains with {draws:,} of {self.draws:,} draws each"
            warnings.warn(f"{stopped} are kept", stacklevel=4)
        z = torch.from_numpy(np.stack([records[c].z[:draws] for c in chosen]))
        stats = {
            name: torch.from_numpy(np.stack([records[c].stats[name][:draws] for c in chosen]))
            for name in records[chosen[0]].stats
        }
        warn_of_idle_chains(z, stats["diverging"], chosen, self.chains)
        drawn = [potential.weights(one) for one in z.to(potential.initial.device)]
        chains = {site: torch.stack([w[site] for w in drawn]) for site in model.initial}
        about = {"stopped": stopped} if stopped else {}
        return Posterior(model, data.schema, chains=chains, stats=stats, provenance=about)

    def kernel(self, potential: Potential, blocks: dict[str, int], start: np.ndarray, seed: int) -> Any:
        """A kernel at the start of its chain, set up; call inside ``isolated``."""
        kernel = self._kernel(
            potential=potential,
            sizes=blocks,
            dense=self.mass != "diagonal",
            start=start,
            target_accept=self.target_accept,
            seed=seed,
        )
        kernel.setup(self.warmup)
        return kernel

    def _blocks(self, potential: Potential) -> dict[str, int]:
        """{block of the mass matrix: its length}, in the order of z. Raises UserError for one that is too large."""
        blocks = {"all": potential.size} if self.mass != "block" else _layers(potential)
        if self.mass != "diagonal":
            for block, length in blocks.items():
                check_dense(length, block)
        return blocks

    def _kernel(self, **settings: Any) -> Any:
        raise NotImplementedError

    def typical(self, whitened: bool) -> int:
        """Gradients that a transition may be expected to take; more where the coordinates are not whitened."""
        raise NotImplementedError


def _layers(potential: Potential) -> dict[str, int]:
    """{layer: how many of its numbers z has}: sites that follow each other and share all of their name but its end."""
    sizes = {site: shape.numel() for site, shape in potential.free.items()}
    layers = groupby(sizes, key=lambda site: site.rpartition(".")[0] or site)
    return {layer: sum(sizes[site] for site in sites) for layer, sites in layers}


@dataclass(frozen=True)
class NUTS(_Sampler):
    """Settings of the No-U-Turn sampler: trajectories go on until they turn back.

    max_tree_depth  at most 2^depth − 1 gradients a transition
    """

    max_tree_depth: int = setting(10, low=1)

    def _kernel(self, **settings: Any) -> FlatNUTS:
        return FlatNUTS(max_depth=self.max_tree_depth, **settings)

    def typical(self, whitened: bool) -> int:
        """See ``_Sampler``."""
        return 2 ** min(self.max_tree_depth, 3 if whitened else 7) - 1


@dataclass(frozen=True)
class HMC(_Sampler):
    """Settings of Hamiltonian Monte Carlo with trajectories of random length.

    length     mean length of a trajectory, in standard deviations of the posterior as the mass matrix knows them; each
               is drawn uniformly between a half and one and a half of it (Neal 2011, section 3.2)
    max_steps  at most so many gradients a transition
    """

    length: float = setting(3.0, above=0)
    max_steps: int = setting(1024, low=1)

    def _kernel(self, **settings: Any) -> FlatHMC:
        return FlatHMC(length=self.length, max_steps=self.max_steps, **settings)

    def typical(self, whitened: bool) -> int:
        """See ``_Sampler``."""
        return min(self.max_steps, max(1, round(self.length / (0.5 if whitened else 0.025))))
