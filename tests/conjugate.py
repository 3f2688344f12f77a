"""Bayesian linear regression with known noise by formulas: the one Bayesian network whose every answer is known.

    w ~ Normal(0, τ² I)       y ~ Normal(shift + scale · A w, σ² I),    A = [x, 1] or x

    Λ = scale² AᵀA / σ² + I / τ²                     posterior: Normal(m, Λ⁻¹), Λm = scale Aᵀ(y − shift)/σ²
    best mean-field q: Normal(m, diag(Λ)⁻¹)          its gap to the evidence: KL = ½ (Σ log Λᵢᵢ − log det Λ)

It is ``MeanField(hidden=(), noise=σ, prior="normal:τ")`` on a data set made here.
Everything exact is float64.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, kl_divergence

import bnn_pyro as bp


def dataset(x, y, schema, x_test=None, y_test=None):
    """A Dataset by hand, with an empty validation part."""
    x, y = x.float(), y if schema.has_classes else y.float()
    x_test, y_test = (x[:0] if x_test is None else x_test.float()), (y[:0] if y_test is None else y_test)
    return bp.Dataset("by-hand", schema, x, y, x[:0], y[:0], x_test, y_test)


def model_of(entry: Any, schema: bp.Schema) -> Any:
    """The variant's model with the initial weights of seed 0."""
    with bp.isolated(0):
        return entry.model(schema)


@dataclass(frozen=True)
class LinearGaussian:
    """The problem and its exact answers. x (N, D) and y (N,), in float64; P weights."""

    x: Tensor
    y: Tensor
    noise: float = 0.7
    prior_scale: float = 1.5
    y_shift: float = 0.0
    y_scale: float = 1.0
    bias: bool = True

    @property
    def schema(self) -> bp.Schema:
        return bp.Schema("regression", tuple(self.x.shape[1:]), y_shift=self.y_shift, y_scale=self.y_scale)

    @property
    def data(self) -> bp.Dataset:
        return dataset(self.x, self.y, self.schema)

    def entry(self, **settings: Any) -> bp.MeanField:
        """The variant whose posterior this is."""
        prior = f"normal:{self.prior_scale}"
        return bp.MeanField(**{"hidden": (), "noise": self.noise, "prior": prior, "bias": self.bias, **settings})

    def design(self, x: Tensor) -> Tensor:
        """A (N, P): the order of the columns is that of the sites "layers.0.weight", "layers.0.bias"."""
        return torch.cat([x.double(), torch.ones(len(x), 1).double()], 1) if self.bias else x.double()

    @property
    def precision(self) -> Tensor:
        a = self.design(self.x)
        return self.y_scale**2 * a.T @ a / self.noise**2 + torch.eye(a.shape[1]).double() / self.prior_scale**2

    @property
    def mean(self) -> Tensor:
        projected = self.y_scale * self.design(self.x).T @ (self.y - self.y_shift) / self.noise**2
        return torch.linalg.solve(self.precision, projected)

    @property
    def log_evidence(self) -> float:
        a = self.design(self.x)
        covariance = self.noise**2 * torch.eye(len(a)).double() + (self.y_scale * self.prior_scale) ** 2 * a @ a.T
        return MultivariateNormal(torch.full_like(self.y, self.y_shift), covariance).log_prob(self.y).item()

    @property
    def gap(self) -> float:
        """KL(best mean-field q ‖ posterior): what its ELBO lacks to the evidence; 0 where Λ is diagonal."""
        return 0.5 * (self.precision.diagonal().log().sum() - torch.logdet(self.precision)).item()

    def elbo(self, loc: Tensor, scale: Tensor) -> float:
        """E_q log p(y | x, w) − KL(q ‖ prior), in nats, of any q = Normal(loc, diag(scale²))."""
        a, variance = self.design(self.x), self.noise**2
        residual = self.y - self.y_shift - self.y_scale * a @ loc
        spread = self.y_scale**2 * (a.square() @ scale.square()).sum()
        fit = -0.5 * (residual.square().sum() + spread) / variance - 0.5 * len(a) * math.log(2 * math.pi * variance)
        return fit.item() - self.kl(loc, scale)

    def kl(self, loc: Tensor, scale: Tensor) -> float:
        """KL(q ‖ prior), in nats."""
        return kl_divergence(Normal(loc, scale), Normal(0.0, self.prior_scale)).sum().item()


def correlated(num: int = 200, inputs: int = 4, seed: int = 1, **settings: Any) -> LinearGaussian:
    """Neighbouring inputs correlate at 0.7, and there is a bias: mean field is too narrow here, by a known amount.

    settings: fields of ``LinearGaussian`` other than its data.
    """
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(num, inputs, generator=g, dtype=torch.float64)
    for i in range(1, inputs):
        z[:, i] = 0.7 * z[:, i - 1] + math.sqrt(1 - 0.7**2) * z[:, i]
    x, w = z.float().double(), torch.linspace(-1.5, 1.2, inputs, dtype=torch.float64)
    eps = torch.randn(num, generator=g, dtype=torch.float64)
    made = LinearGaussian(x, eps, **settings)
    y = made.y_shift + made.y_scale * (x @ w + 0.3) + made.noise * eps
    return replace(made, y=y.float().double())
