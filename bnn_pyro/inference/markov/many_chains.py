"""Many chains that move as one: transitions of Hamiltonian Monte Carlo for all of them, and the draws that are kept.

    H(z, r) = −log π(z) + ½ rᵀ M⁻¹ r,     r ~ Normal(0, M)

Everything is a tensor with the chains first. All take as many leapfrog steps, each with a step size of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bnn_pyro.inference.target.potential import Potential

__all__ = ["Chains", "Draws", "Transition"]

#: A loss of energy, in nats, above which a trajectory counts as divergent (as in Stan).
DIVERGENT = 1000.0

#: How stats of thinned transitions become one; the last one's, where it isn't said.
COMBINED: dict[str, Callable[[Tensor], Tensor]] = {
    "acceptance_rate": lambda v: v.mean(0),
    "diverging": lambda v: v.amax(0),
    "n_steps": lambda v: v.sum(0),
    "trajectory_length": lambda v: v.mean(0),
}


class Transition(NamedTuple):
    """What became of all chains: where they were and are, where trajectories ended, the chance of acceptance."""

    before: Tensor  # (C, P)
    end: Tensor  # (C, P)
    after: Tensor  # (C, P), the end where it was accepted
    velocity: Tensor  # (C, P), dz/dt at the end
    acceptance: Tensor  # (C,)
    energy: Tensor  # (C,), nats, where they started
    diverging: Tensor  # (C,), 0 or 1


@dataclass
class Chains:
    """All chains: where they are, z (C, P), with their log densities (C,) and gradients (C, P)."""

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
        diverging = (~finite | (lost > DIVERGENT)).double()
        return Transition(before, end.z, self.z, variance * r, acceptance, energy, diverging)


class Draws:
    """What is kept: z (C, D, P) and stats {name: (C, D)}, of which the first ``kept`` draws are there."""

    def __init__(self, chains: int, draws: int, size: int, thin: int) -> None:
        self.z = torch.zeros(chains, draws, size, dtype=torch.float64)
        self.stats: dict[str, Tensor] = {}
        self.thin, self.kept = thin, 0
        self.since: list[dict[str, Tensor]] = []  # of the transitions since the last draw that was kept

    def add(self, z: Tensor, figures: dict[str, Tensor]) -> None:
        """The outcome of one transition after the warm-up."""
        self.since.append({name: value.cpu() for name, value in figures.items()})
        if len(self.since) < self.thin:
            return
        self.z[:, self.kept] = z.cpu()
        for name in figures:
            values = torch.stack([one[name] for one in self.since])
            if name not in self.stats:
                self.stats[name] = torch.zeros(self.z.shape[:2], dtype=torch.float64)
            self.stats[name][:, self.kept] = COMBINED.get(name, lambda v: v[-1])(values)
        self.since, self.kept = [], self.kept + 1

    def state(self) -> dict[str, Any]:
        """All of it, for a checkpoint."""
        stats = {name: series[:, : self.kept].clone() for name, series in self.stats.items()}
        return {"z": self.z[:, : self.kept].clone(), "stats": stats, "since": self.since, "kept": self.kept}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over such a state."""
        self.kept, self.since = state["kept"], state["since"]
        self.z[:, : self.kept] = state["z"]
        for name, series in state["stats"].items():
            self.stats[name] = torch.zeros(self.z.shape[:2], dtype=torch.float64)
            self.stats[name][:, : self.kept] = series
