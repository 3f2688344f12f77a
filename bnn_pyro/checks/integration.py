"""A density of two weights by numerical integration, and the Normals that are closest to it.

The trapezoidal rule on a box outside which the density is e⁻³⁰ of its maximum: for smooth densities its error falls
exponentially with the number of nodes, and 400 a side are far more than enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.distributions import MultivariateNormal

__all__ = ["Grid", "best_normal", "climb", "curvature", "normal_grid"]

#: exp(−NEGLIGIBLE) of the maximum counts as nothing; nodes a side of the first look, and of the integral.
NEGLIGIBLE, COARSE_NODES, NODES = 30.0, 201, 401
#: Gauss–Hermite nodes a side.
HERMITE_NODES = 50

LogDensity = Callable[[Tensor], Tensor]  # (S, 2) -> (S,), float64


@dataclass(frozen=True)
class Grid:
    """axes (n,), (n,);  points (n², 2);  mass (n²,), which sums to 1;  log_evidence in nats."""

    axes: tuple[Tensor, Tensor]
    points: Tensor
    mass: Tensor
    log_evidence: float = 0.0

    @classmethod
    def of(cls, log_density: LogDensity, reach: float, nodes: int = NODES) -> Grid:
        """Integrate a density.

        reach: all of it lies within ± this in both weights, such as eight prior standard deviations.
        """
        axis = torch.linspace(-reach, reach, COARSE_NODES, dtype=torch.float64)
        log = log_density(torch.cartesian_prod(axis, axis)).view(COARSE_NODES, COARSE_NODES)
        inside = log > log.max() - NEGLIGIBLE
        axes = []
        for other in (1, 0):
            places = inside.any(other).nonzero().flatten()
            low, high = axis[max(places[0] - 1, 0)], axis[min(places[-1] + 1, COARSE_NODES - 1)]
            axes.append(torch.linspace(low, high, nodes, dtype=torch.float64))
        points = torch.cartesian_prod(*axes)
        log = log_density(points)
        total = torch.logsumexp(log, 0)  # the ends of the box count for nothing
        grid = cls((axes[0], axes[1]), points, (log - total).exp())
        return cls(grid.axes, points, grid.mass, (total + grid.cell.log()).item())

    @property
    def cell(self) -> Tensor:
        """Area between four nodes."""
        return (self.axes[0][1] - self.axes[0][0]) * (self.axes[1][1] - self.axes[1][0])

    @property
    def density(self) -> Tensor:
        """(n, n), first weight first."""
        return (self.mass / self.cell).view(len(self.axes[0]), len(self.axes[1]))

    @property
    def mode(self) -> Tensor:
        """The node of the highest density (2,)."""
        return self.points[self.mass.argmax()]

    def expect(self, values: Tensor) -> Tensor:
        """Expectation of (n², M) values at the nodes, (M,)."""
        return self.mass @ values


def climb(log_density: LogDensity, start: Tensor) -> Tensor:
    """The maximum near ``start`` (2,)."""

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.from_numpy(w)[None].requires_grad_()
        value = -log_density(leaf)[0]
        return value.item(), torch.autograd.grad(value, leaf)[0][0].numpy()

    return torch.from_numpy(minimize(loss, start.numpy(), jac=True, tol=1e-12).x)


def curvature(log_density: LogDensity, at: Tensor) -> Tensor:
    """Minus the Hessian (2, 2)."""
    return -torch.autograd.functional.hessian(lambda w: log_density(w[None])[0], at)


def best_normal(log_density: LogDensity, start: Tensor, correlated: bool = False) -> tuple[Tensor, Tensor, float]:
    """(mean (2,), L (2, 2), ELBO in nats) of the Normal(mean, LLᵀ) that is closest near ``start``.

    Closest by KL(q ‖ posterior): E_q log p(y, w) + H[q] is maximised, the expectation by Gauss–Hermite quadrature.
    correlated: of any covariance; otherwise of independent weights.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(HERMITE_NODES)
    pairs = torch.cartesian_prod(*[torch.from_numpy(nodes)] * 2)
    mass = torch.cartesian_prod(*[torch.from_numpy(weights / weights.sum())] * 2).prod(1)

    def root(p: Tensor) -> Tensor:
        lower = torch.zeros(2, 2, dtype=p.dtype)
        lower[1, 0] = p[4] if correlated else 0.0
        return lower + torch.diag(p[2:4].exp())

    def loss(p: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.from_numpy(p).requires_grad_()
        expected = mass @ log_density(leaf[:2] + pairs @ root(leaf).mT)
        value = -(expected + leaf[2:4].sum() + math.log(2 * math.pi * math.e))
        return value.item(), torch.autograd.grad(value, leaf)[0].numpy()

    scale = curvature(log_density, start).diagonal().clamp_min(0.1).rsqrt()
    result = minimize(loss, np.concatenate([start.numpy(), scale.log().numpy(), [0.0]]), jac=True, tol=1e-10)
    best = torch.from_numpy(result.x)
    return best[:2], root(best), -result.fun


def normal_grid(mean: Tensor, covariance: Tensor, nodes: int = COARSE_NODES) -> Grid:
    """Normal(mean, covariance) as a grid of its own; one node where the covariance is 0."""
    if not covariance.any():
        return Grid((mean[:1], mean[1:]), mean[None], torch.ones(1, dtype=torch.float64))
    q = MultivariateNormal(mean, covariance)
    axes = [
        torch.linspace(m - 8 * s, m + 8 * s, nodes, dtype=torch.float64) for m, s in zip(mean, q.stddev, strict=True)
    ]
    points = torch.cartesian_prod(*axes)
    return Grid((axes[0], axes[1]), points, q.log_prob(points).softmax(0))
