"""Integration over a few weights, maxima and curvatures, and the stationary distribution of stochastic gradients.

Integrals over two weights use the trapezoidal rule, whose error falls exponentially with the number of nodes if the
density is smooth and its tails are inside the grid. Integrals over more weights use importance sampling with Sobol
points of a Normal.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg import solve_discrete_lyapunov
from scipy.optimize import minimize
from torch import Tensor
from torch.quasirandom import SobolEngine

from bnn_pyro.inference import Method

LogDensity = Callable[[Tensor], Tensor]  # (S, P) -> (S,), float64


class Nodes(NamedTuple):
    """w (n, P) and mass (n,), which sums to 1: the expectation of values (n, M) is mass @ values, (M,)."""

    w: Tensor
    mass: Tensor


def grid(log_density: LogDensity, reach: float, nodes: int = 401) -> Nodes:
    """A grid of nodes² nodes for a density of two weights, which is negligible outside ± ``reach``."""
    axis = torch.linspace(-reach, reach, nodes, dtype=torch.float64)
    w = torch.cartesian_prod(axis, axis)
    return Nodes(w, log_density(w).softmax(0))


def sobol(size: int, points: int = 2**15) -> Nodes:
    """Symmetric nodes of the standard Normal in ``size`` dimensions."""
    u = SobolEngine(size, scramble=True, seed=1).draw(points // 2, dtype=torch.float64)
    half = torch.special.ndtri(u.clamp(1e-12, 1 - 1e-12))
    return Nodes(torch.cat([half, -half]), torch.full((points,), 1 / points, dtype=torch.float64))


def normal(mean: Tensor, covariance: Tensor, standard: Nodes) -> Nodes:
    """Nodes of Normal(mean, covariance), or of a point if the covariance is 0, from those of the standard Normal."""
    root = torch.linalg.cholesky(covariance) if covariance.any() else covariance
    return Nodes(mean + standard.w @ root.mT, standard.mass)


def importance(log_density: LogDensity, mode: Tensor) -> Nodes:
    """Nodes of a density with one mode: weighted Sobol points of a Normal 1.3 times as wide as that at the mode."""
    standard = sobol(len(mode))
    proposed = normal(mode, 1.3**2 * torch.linalg.inv(curvature(log_density, mode)), standard)
    return Nodes(proposed.w, (log_density(proposed.w) + 0.5 * standard.w.square().sum(1)).softmax(0))


def climb(log_density: LogDensity, start: Tensor) -> Tensor:
    """The maximum near ``start`` (P,), by BFGS and a Newton step."""
    loss = _with_gradient(lambda w: -log_density(w[None])[0])
    near = minimize(loss, start.numpy(), jac=True, tol=1e-12).x
    step = np.linalg.solve(curvature(log_density, torch.from_numpy(near)).numpy(), loss(near)[1])
    return torch.from_numpy(near - step)


def curvature(log_density: LogDensity, at: Tensor) -> Tensor:
    """Minus the Hessian (P, P) of the log density."""
    return -torch.autograd.functional.hessian(lambda w: log_density(w[None])[0], at)


def best_normal(
    log_density: LogDensity, start: Tensor, standard: Nodes, correlated: bool = False
) -> tuple[Tensor, Tensor, float]:
    """(mean (P,), L (P, P), ELBO in nats) of the q = Normal(mean, LLᵀ) near ``start`` with minimal KL(q ‖ posterior).

    It maximises E_q log p(y, w) + H[q], where the expectation is over the ``standard`` nodes.
    correlated: whether q has any covariance, or independent weights.
    """
    size = len(start)
    below = torch.tril_indices(size, size, -1) if correlated else torch.zeros(2, 0, dtype=torch.long)

    def root(p: Tensor) -> Tensor:
        return torch.diag(p[size : 2 * size].exp()).index_put(tuple(below), p[2 * size :])

    def loss(p: Tensor) -> Tensor:
        expected = standard.mass @ log_density(p[:size] + standard.w @ root(p).mT)
        return -(expected + p[size : 2 * size].sum() + 0.5 * size * math.log(2 * math.pi * math.e))

    scale = curvature(log_density, start).diagonal().clamp_min(0.1).rsqrt()
    first = torch.cat([start, scale.log(), torch.zeros(below.shape[1]).double()])
    result = minimize(_with_gradient(loss), first.numpy(), jac=True, tol=1e-10)
    best = torch.from_numpy(result.x)
    return best[:size], root(best), -result.fun


def _with_gradient(loss: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """The loss and its gradient for scipy's ``minimize``."""
    return lambda p: tuple(part.numpy() for part in torch.func.grad_and_value(loss)(torch.from_numpy(p))[::-1])


def stationary_covariance(precision: Tensor, eta: float, friction: float, noise: Tensor | float = 0.0) -> Tensor:
    """Covariance (P, P) of w under w ← w + v, v ← (1 − α) v − η Λ (w − m) + Normal(0, 2αη + noise).

    noise: η² · the covariance (P, P) of the noise of gradients.
    """
    one = np.eye(len(precision))
    slope = -eta * precision.double().numpy()
    move = np.block([[one + slope, (1 - friction) * one], [slope, (1 - friction) * one]])
    both = np.vstack([one, one])
    covariance = solve_discrete_lyapunov(move, both @ (2 * friction * eta * one + np.asarray(noise)) @ both.T)
    return torch.from_numpy(covariance[: len(one), : len(one)])


def stationary(method: Method, problem: Any) -> tuple[Tensor, Tensor]:
    """Covariances (P, P) at a constant step, without the noise of mini-batches, and with it if they are independent."""
    (mean, precision), num, size = problem.gaussian, len(problem.inputs), method.batch_size
    eta = method.eta_share * method.lr / num
    low = stationary_covariance(precision, eta, method.friction)
    if not 0 < (size or 0) < num:
        return low, low
    # The gradient of a row is a r / σ². Over the posterior E r² = (r at the mean)² + its variance.
    a, variance = problem.design(problem.inputs), problem.noise**2 * problem.temperature
    residual = problem.targets - problem.output(mean[None], problem.inputs)[0]
    square = residual.square() + ((a @ torch.linalg.inv(precision)) * a).sum(1)
    rows = (a.T * square) @ a / variance**2 / num
    batch = num // math.ceil(num / size)
    noise = eta**2 * num**2 / batch * (1 - batch / num) * rows * num / (num - 1)
    return low, stationary_covariance(precision, eta, method.friction, noise)
