"""Many chains that move as one: transitions of Hamiltonian Monte Carlo for all of them.

    H(z, r) = −log π(z) + ½ rᵀ M⁻¹ r,     r ~ Normal(0, M)

Everything is a tensor with the chains first. All take as many leapfrog steps, each with a step size of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bnn_pyro.inference.potential import Potential

__all__ = ["Chains", "Transition"]

#: A loss of energy, in nats, above which a trajectory counts as divergent (as in Stan).
DIVERGENT = 1000.0


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
