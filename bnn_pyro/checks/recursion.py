"""What SGHMC and SGLD sample at a finite step size where it is known: on linear regression, from their own recursion.

    (w − m, v) ← A (w − m, v) + noise,        Σ = A Σ Aᵀ + noise's covariance

With all rows in every step the gradient is −Λ(w − m), the recursion is linear, and its stationary covariance Σ solves a
discrete Lyapunov equation: no limit of small steps is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor

from bnn_pyro.checks.linear_regression import LinearGaussian
from bnn_pyro.inference.sghmc import SGHMC, SGLD
from bnn_pyro.isolation import isolated

__all__ = ["Draws", "eta_of", "largest_lr", "sample", "stationary_covariance"]


def eta_of(method: SGHMC | SGLD, lr: float, rows: int) -> float:
    """η of a step: what the step size says that it is."""
    return method.eta_share * lr / rows


def largest_lr(method: SGHMC | SGLD, precision: Tensor, rows: int) -> float:
    """Above which the recursion explodes: where ηλ = 4 − 2α in the narrowest direction."""
    return (4 - 2 * method.friction) / torch.linalg.eigvalsh(precision)[-1].item() * rows / method.eta_share


def stationary_covariance(precision: Tensor, eta: float, friction: float) -> Tensor:
    """Of the weights (P, P), under v ← (1 − α) v − η Λ (w − m) + Normal(0, 2αη), w ← w + v."""
    one = np.eye(len(precision))
    kick = np.hstack([-eta * precision.double().numpy(), (1 - friction) * one])
    move = np.vstack([np.hstack([one, 0 * one]) + kick, kick])
    noise = np.vstack([one, one])
    covariance = solve_discrete_lyapunov(move, 2 * friction * eta * noise @ noise.T)
    return torch.from_numpy(covariance[: len(one), : len(one)])


@dataclass(frozen=True)
class Draws:
    """draws (C, D, P) float64, kinetic temperature, and how many steps it took."""

    draws: Tensor
    kinetic_temperature: float
    steps: int


def sample(
    method: SGHMC | SGLD, problem: LinearGaussian, lr: float, *, chains: int, times: float, seed: int = 0, **more: Any
) -> Draws:
    """A run of the method at this step size, so many times as long as the slowest direction takes to be forgotten.

    A third of it is the burn-in.   more: settings of the method.   Raises UserError where it diverges.
    """
    eta, rows = eta_of(method, lr, len(problem.x)), len(problem.x)
    slowest = 2 * method.friction / (eta * torch.linalg.eigvalsh(problem.precision)[0].item())
    steps = math.ceil(times * max(slowest, 2 / method.friction)) + 600
    per_epoch = math.ceil(rows / method.batch_size) if method.batch_size else 1
    epochs = math.ceil(steps / per_epoch)
    method = replace(method, lr=lr, epochs=epochs, burn_in=epochs // 3, chains=chains, max_draws=300, **more)
    with isolated(seed):
        posterior = method.run(problem.entry().model(problem.schema), None, problem.data, seed=seed)
    draws = torch.cat([posterior.chains[s].double().flatten(2) for s in posterior.model.initial], -1)
    kinetic = torch.tensor(posterior.trace["kinetic_temperature"])
    return Draws(draws, kinetic[len(kinetic) // 3 :].mean().item(), epochs * per_epoch)
