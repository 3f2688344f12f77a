"""Posteriors of two weights each, one skewed and one of two modes, by numerical integration over a grid.

logistic   y ~ Bernoulli(sigmoid(w x + b)),       w, b ~ Normal(0, 2): skewed, correlated
sign       y ~ Normal(v tanh(u x), 1.1),         u, v ~ Normal(0, 1.5): two modes, (u, v) and (−u, −v), of ½ each

The trapezoidal rule on a box outside which the density is e⁻³⁰ of its maximum: for smooth densities its error falls
exponentially with the number of nodes, and 400 a side are far more than enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor
from torch.distributions import MultivariateNormal

from bnn_pyro.checks.check import Estimate
from bnn_pyro.checks.linear_regression import dataset
from bnn_pyro.checks.problems import Amount, Problem
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.predictive import Prediction

__all__ = ["TWO_WEIGHTS", "Grid", "TwoWeights", "best_normal", "climb", "curvature", "normal_grid"]

#: exp(−NEGLIGIBLE) of the maximum counts as nothing; nodes a side of the first look, and of the integral.
NEGLIGIBLE, COARSE_NODES, NODES = 30.0, 201, 401
#: Gauss–Hermite nodes a side; new inputs; draws that are kept for the figure.
HERMITE_NODES, POINTS, SHOWN_DRAWS = 50, 6, 1000

LogDensity = Callable[[Tensor], Tensor]  # (S, 2) -> (S,), float64


@dataclass(frozen=True)
class Grid:
    """axes (n,), (n,);  points (n², 2);  mass (n²,), which sums to 1: the ends of the box count for nothing."""

    axes: tuple[Tensor, Tensor]
    points: Tensor
    mass: Tensor

    @classmethod
    def of(cls, log_density: LogDensity, reach: float, nodes: int = NODES) -> Grid:
        """Integrate a density, all of which lies within ± ``reach`` in both weights."""
        axis = torch.linspace(-reach, reach, COARSE_NODES, dtype=torch.float64)
        log = log_density(torch.cartesian_prod(axis, axis)).view(COARSE_NODES, COARSE_NODES)
        inside = log > log.max() - NEGLIGIBLE
        axes = []
        for other in (1, 0):
            places = inside.any(other).nonzero().flatten()
            low, high = axis[max(places[0] - 1, 0)], axis[min(places[-1] + 1, COARSE_NODES - 1)]
            axes.append(torch.linspace(low, high, nodes, dtype=torch.float64))
        points = torch.cartesian_prod(*axes)
        return cls((axes[0], axes[1]), points, log_density(points).softmax(0))

    @property
    def density(self) -> Tensor:
        """(n, n), first weight first."""
        cell = (self.axes[0][1] - self.axes[0][0]) * (self.axes[1][1] - self.axes[1][0])
        return (self.mass / cell).view(len(self.axes[0]), len(self.axes[1]))

    @property
    def mode(self) -> Tensor:
        """The node of the highest density (2,)."""
        return self.points[self.mass.argmax()]

    def expect(self, values: Tensor) -> Tensor:
        """Expectation of (n², M) values at the nodes, (M,)."""
        return self.mass @ values


def climb(log_density: LogDensity, start: Tensor) -> Tensor:
    """The maximum near ``start`` (P,)."""
    loss = _with_gradient(lambda w: -log_density(w[None])[0])
    return torch.from_numpy(minimize(loss, start.numpy(), jac=True, tol=1e-12).x)


def curvature(log_density: LogDensity, at: Tensor) -> Tensor:
    """Minus the Hessian (P, P)."""
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

    def loss(p: Tensor) -> Tensor:
        expected = mass @ log_density(p[:2] + pairs @ root(p).mT)
        return -(expected + p[2:4].sum() + math.log(2 * math.pi * math.e))

    scale = curvature(log_density, start).diagonal().clamp_min(0.1).rsqrt()
    first = np.concatenate([start.numpy(), scale.log().numpy(), [0.0]])
    result = minimize(_with_gradient(loss), first, jac=True, tol=1e-10)
    best = torch.from_numpy(result.x)
    return best[:2], root(best), -result.fun


def _with_gradient(loss: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """As scipy's ``minimize`` takes it."""

    def both(p: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.from_numpy(p).requires_grad_()
        value = loss(leaf)
        return value.item(), torch.autograd.grad(value, leaf)[0].numpy()

    return both


def normal_grid(mean: Tensor, covariance: Tensor) -> Grid:
    """Normal(mean, covariance) as a grid of its own; one node where the covariance is 0."""
    if not covariance.any():
        return Grid((mean[:1], mean[1:]), mean[None], torch.ones(1, dtype=torch.float64))
    q = MultivariateNormal(mean, covariance)
    low, high = mean - 8 * q.stddev, mean + 8 * q.stddev
    axes = tuple(torch.linspace(*ends, COARSE_NODES, dtype=torch.float64) for ends in zip(low, high, strict=True))
    points = torch.cartesian_prod(*axes)
    return Grid(axes, points, q.log_prob(points).softmax(0))


@dataclass(frozen=True)
class TwoWeights(Problem):
    """A posterior of two weights, by integration over a grid. inputs (N,) and targets (N,) in float64.

    names        of the weights, in the order of the sites
    prior_scale  τ of both
    noise        σ, of regression by one tanh unit, with two modes; None: logistic regression
    temperature  T: p(y | x, w)^(1/T)
    one_mode     whether the sign of the second weight is taken of both, where w and −w are as likely
    """

    name: str
    title: str
    inputs: Tensor
    targets: Tensor
    prior_scale: float
    names: tuple[str, str]
    noise: float | None = None
    length: float = 1.0
    temperature: float = 1.0
    one_mode: bool = False

    x: ClassVar[Tensor] = torch.linspace(-1.5, 1.5, POINTS)[:, None]

    def at(self, temperature: float, exact: bool) -> TwoWeights:
        """See ``Problem``."""
        return replace(self, temperature=temperature, one_mode=self.noise is not None and not exact)

    @property
    def settings(self) -> Mapping[str, Any]:
        """See ``Problem``."""
        unit = {"hidden": (1,), "bias": False, "activation": "tanh", "noise": self.noise}
        return {**(unit if self.noise else {"hidden": (), "bias": True}), "prior": f"normal:{self.prior_scale}"}

    @property
    def data(self) -> Dataset:
        """See ``Problem``."""
        classes = ("no", "yes") if self.noise is None else ()
        schema = Schema("regression" if self.noise else "classification", (1,), classes=classes)
        return dataset(self.inputs[:, None], self.targets if self.noise else self.targets.long(), schema)

    @cached_property
    def grid(self) -> Grid:
        """The posterior."""
        return Grid.of(self.log_joint, 8 * self.prior_scale)

    @cached_property
    def unit(self) -> Tensor:
        """Posterior standard deviations of the quantities (M,)."""
        values = self._raw(self.grid.points, self.mean(self.grid.points))
        return (self.grid.expect(values.square()) - self.grid.expect(values).square()).sqrt()

    @cached_property
    def posterior(self) -> Estimate:
        """See ``Problem``."""
        expected = self._expect(self.grid)
        return Estimate(expected, np.zeros_like(expected))

    def output(self, w: Tensor, x: Tensor) -> Tensor:
        """f (S, B) of weights w (S, 2) at x (B,): the logit, or the mean."""
        first, second = w[:, :1], w[:, 1:]
        return first * x + second if self.noise is None else second * torch.tanh(first * x)

    def mean(self, w: Tensor) -> Tensor:
        """E[y | x, w] (S, B) at the new inputs: the probability of the second class, or f."""
        f = self.output(w, self.x[:, 0].double())
        return f.sigmoid() if self.noise is None else f

    def log_likelihood(self, w: Tensor) -> Tensor:
        """log p(y | x, w) (S,), nats."""
        f = self.output(w, self.inputs)
        if self.noise is None:
            return F.logsigmoid((2 * self.targets - 1) * f).sum(1)
        normaliser = 0.5 * len(self.targets) * math.log(2 * math.pi * self.noise**2)
        return -0.5 * (self.targets - f).square().sum(1) / self.noise**2 - normaliser

    def log_joint(self, w: Tensor, prior_weight: float = 1.0) -> Tensor:
        """See ``Problem``."""
        prior = -0.5 * w.square().sum(1) / self.prior_scale**2
        prior = prior - 2 * math.log(self.prior_scale * math.sqrt(2 * math.pi))
        return self.log_likelihood(w) / self.temperature + prior_weight * prior

    def labels(self) -> list[str]:
        """See ``Problem``."""
        (a, b), what = self.names, "P(y = 1)" if self.noise is None else "E[y]"
        modes = [f"mass of the mode with {b} > 0"] if self.noise and not self.one_mode else []
        weights = [f"mean of {one}" for one in (a, b, f"{a}²", f"{b}²", f"{a}·{b}")]
        return [*weights, *(f"{what} at input {k + 1}" for k in range(POINTS)), *modes]

    def outputs(self, prediction: Prediction) -> Tensor:
        """See ``Problem``."""
        return prediction.probs[..., 1] if self.noise is None else prediction.locs

    def quantities(self, w: Tensor, f: Tensor) -> Tensor:
        """One mode: a chain, or a fit, is turned as a whole."""
        w = w * torch.sign(w[..., 1].mean(1))[:, None, None] if self.one_mode else w
        return self._raw(w, f) / self.unit

    def mode(self, prior_weight: float) -> Tensor:
        """See ``Problem``."""
        start = self.grid.mode * (torch.sign(self.grid.mode[1]) if self.noise else 1.0)
        return climb(lambda w: self.log_joint(w, prior_weight), start)

    def precisions(self, mode: Tensor) -> dict[str, Tensor]:
        """Of a linear model also with one curvature for all rows, as a Kronecker product has it."""
        full = curvature(self.log_joint, mode)
        known = {"full": full, "diagonal": torch.diag(full.diagonal())}
        if self.noise is None:
            p, phi = self.output(mode[None], self.inputs)[0].sigmoid(), torch.stack([self.inputs, self.inputs**0], 1)
            mean = (p * (1 - p)).mean() / self.temperature
            known["Kronecker"] = mean * phi.mT @ phi + torch.eye(2).double() / self.prior_scale**2
        return known

    def best_normal(self, mode: Tensor, correlated: bool) -> tuple[Tensor, Tensor]:
        """See ``Problem``."""
        mean, root, _ = best_normal(self.log_joint, mode, correlated)
        return mean, root @ root.mT

    def expect(self, mean: Tensor, covariance: Tensor | None) -> np.ndarray:
        """See ``Problem``."""
        unknown = np.full(len(self.labels()), np.nan)
        return unknown if covariance is None else self._expect(normal_grid(mean, covariance))

    def steepest(self) -> Tensor:
        """See ``Problem``."""
        return curvature(self.log_joint, climb(self.log_joint, self.grid.mode))

    def shown(self, w: Tensor, f: Tensor) -> tuple[list[Amount], dict[str, Any]]:
        """NAME_names of the weights; NAME_axis_1, NAME_axis_2 (n,), NAME_density (n, n); NAME_draws (S, 2)."""
        exact, unit = self.grid.expect(self.mean(self.grid.points)), "σ" if self.noise else "a probability"
        apart = (f.mean((0, 1)) - exact).abs().mean().item() / (self.noise or 1.0)
        about = f"distance of E[y | x] from the exact one ({unit}, {self.title}), mean"
        flat, step = w.flatten(0, 1), max(1, len(self.grid.axes[0]) // 200)
        keep = torch.linspace(0, len(flat) - 1, min(SHOWN_DRAWS, len(flat))).round().long()
        axes = [axis[::step].numpy() for axis in self.grid.axes]
        arrays = {"names": list(self.names), "axis_1": axes[0], "axis_2": axes[1]}
        arrays |= {"density": self.grid.density[::step, ::step].numpy(), "draws": flat[keep].numpy()}
        return [("quadrature", about, apart, 0.0)], {f"{self.name}_{what}": value for what, value in arrays.items()}

    def _raw(self, w: Tensor, f: Tensor) -> Tensor:
        if self.one_mode and w.dim() == 2:  # nodes of a grid
            w = w * torch.where(w[:, 1:] < 0, -1.0, 1.0)
        parts = [w, w.square(), w.prod(-1, keepdim=True), f]
        return torch.cat([*parts, (w[..., 1:] > 0).double()] if self.noise and not self.one_mode else parts, -1)

    def _expect(self, grid: Grid) -> np.ndarray:
        return (grid.expect(self._raw(grid.points, self.mean(grid.points))) / self.unit).numpy()


def _inputs(low: float, high: float) -> Tensor:
    x = torch.linspace(low, high, 12, dtype=torch.float64)
    return (x / x.square().mean().sqrt()).float().double()


_LABELS = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
_EPSILON = torch.tensor([0.5, -0.9, 0.3, -0.2, 1.1, -0.6, 0.4, -0.3, 0.7, -1.0, 0.2, 0.6], dtype=torch.float64)
_TARGETS = (torch.tanh(1.2 * _inputs(-2.0, 2.0)) + 0.6 * _EPSILON).float().double()
_LOGISTIC = TwoWeights("logistic", "logistic regression", _inputs(-1.5, 2.5), _LABELS, 2.0, ("w", "b"))
_SIGN = TwoWeights("sign", "one tanh unit", _inputs(-2.0, 2.0), _TARGETS, 1.5, ("u", "v"), noise=1.1, length=4.0)

#: The problems of two weights by name.
TWO_WEIGHTS: dict[str, TwoWeights] = {"logistic": _LOGISTIC, "sign": _SIGN}
