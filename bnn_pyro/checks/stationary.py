"""The stationary law of stochastic gradients at a finite step, on linear regression: by the recursion itself."""

import math
from typing import Any

import numpy as np
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor

from bnn_pyro.inference import Method


def stationary_covariance(precision: Tensor, eta: float, friction: float, noise: Tensor | float = 0.0) -> Tensor:
    """Of the weights (P, P) under stochastic-gradient HMC at a finite step, by a discrete Lyapunov equation.

    v ← (1 − α) v − η Λ (w − m) + Normal(0, 2αη + noise),  w ← w + v;  noise: (P, P), of the gradients, times η².
    """
    one = np.eye(len(precision))
    kick = np.hstack([-eta * precision.double().numpy(), (1 - friction) * one])
    move = np.vstack([np.hstack([one, 0 * one]) + kick, kick])
    both = np.vstack([one, one])
    covariance = solve_discrete_lyapunov(move, both @ (2 * friction * eta * one + np.asarray(noise)) @ both.T)
    return torch.from_numpy(covariance[: len(one), : len(one)])


def stationary(method: Method, problem: Any) -> tuple[Tensor, Tensor]:
    """Two covariances (P, P) between which that of a stochastic-gradient method at its own constant step size lies.

    Without the noise of mini-batches, and with that of independent ones; batches that take every row once an epoch lie
    between.   problem: a linear ``Problem``.
    """
    (mean, precision), num, size = problem.gaussian, len(problem.inputs), method.batch_size
    eta = method.eta_share * method.lr / num
    low = stationary_covariance(precision, eta, method.friction)
    if not 0 < (size or 0) < num:
        return low, low
    # Gradients of rows, a r / σ², at weights of the posterior: E r² = (r at the mean)² + its variance.
    a, variance = problem.design(problem.inputs), problem.noise**2 * problem.temperature
    residual = problem.targets - problem.output(mean[None], problem.inputs)[0]
    square = residual.square() + ((a @ torch.linalg.inv(precision)) * a).sum(1)
    rows = (a.T * square) @ a / variance**2 / num
    batch = num // math.ceil(num / size)
    noise = eta**2 * num**2 / batch * (1 - batch / num) * rows * num / (num - 1)
    return low, stationary_covariance(precision, eta, method.friction, noise)
