"""Small problems whose posterior is known, implemented independently of the code that is checked.

    y ~ Normal(f, σ²) or Bernoulli(sigmoid(f)),    f = [x, 1] w, or v tanh(u x) with w = (u, v),    w ~ Normal(0, τ² I)
    y ~ Categorical(softmax([x, 1] W)) of more than two classes

The posterior of linear regression, whose log joint is quadratic, is known in closed form; other posteriors are known by
integration over a grid for two weights, or by importance sampling for more (``integration``). Means and second moments
of w and of E[y | x, w] are compared.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal

import bnn_pyro.checks.integration as integration
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.inference import Method

#: σ and τ of linear regression, and τ of logistic regression with six weights and of three classes.
NOISE, PRIOR = 0.7, 1.5


@dataclass(frozen=True, eq=False)
class Problem:
    """A small data set and model, float64, with P weights in the order of the model's sites."""

    title: str
    inputs: Tensor  # (N, D)
    targets: Tensor  # (N,)
    x: Tensor  # new inputs (B, D)
    prior_scale: Any  # τ, or (P,)
    noise: float | None = None  # σ; None: classes
    unit: bool = False  # whether it is one tanh unit, whose posterior has the modes (u, v) and (−u, −v)
    classes: int = 2  # number of classes; more than two: softmax, with weights (K, D) by rows, then biases (K,)
    length: float = 1.0  # number of draws that it needs, relative to the easiest problem
    stops: float = 0.03  # tolerance for the end point of an optimiser, in posterior standard deviations
    batches: int = 1  # number of mini-batches that optimisers divide the rows into
    temperature: float = 1.0  # T: p(y | x, w)^(1/T)
    one_mode: bool = False  # whether both modes count as one, by the sign of v, as a Normal finds only one of them
    prior_mean: Any = 0.0  # 0, or (P,)

    @property
    def size(self) -> int:
        """P."""
        return 2 if self.unit else (self.inputs.shape[1] + 1) * (self.classes if self.classes > 2 else 1)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the variant that has this posterior."""
        kind = {"hidden": (1,), "bias": False, "activation": "tanh"} if self.unit else {"hidden": (), "bias": True}
        return kind | {"prior": f"normal:{self.prior_scale}"} | ({"noise": self.noise} if self.noise else {})

    @property
    def data(self) -> Dataset:
        """The rows as a data set."""
        task, classes = ("regression", ()) if self.noise else ("classification", tuple("abcdef"[: self.classes]))
        schema = Schema(task, tuple(self.inputs.shape[1:]), classes=classes)
        x, y = self.inputs.float(), self.targets.float() if self.noise else self.targets.long()
        return Dataset("by-hand", schema, x, y, x[:0], y[:0], x[:0], y[:0])

    def output(self, w: Tensor, x: Tensor) -> Tensor:
        """f (S, B) of w (S, P) at x (B, D): means; log-odds of the second class, or of class b mod K > 2 at input b."""
        if self.classes > 2:
            log_p = self.log_probs(w, x, torch.arange(len(x)) % self.classes)
            return log_p - (-log_p.expm1()).log()
        return w[:, 1:] * torch.tanh(w[:, :1] * x[:, 0]) if self.unit else w[:, :-1] @ x.mT + w[:, -1:]

    def log_probs(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """log p(y_b | x_b, w) (S, B), nats, of targets y (B,)."""
        if self.classes > 2:
            weight, bias = w[:, : -self.classes].unflatten(1, (self.classes, -1)), w[:, None, -self.classes :]
            return (x @ weight.mT + bias).log_softmax(-1)[:, torch.arange(len(x)), y.long()]
        f = self.output(w, x)
        return F.logsigmoid((2 * y - 1) * f) if self.noise is None else Normal(f, self.noise).log_prob(y)

    def log_joint(self, w: Tensor, prior_weight: float = 1.0) -> Tensor:
        """log p(y | x, w)/T + prior_weight · log p(w), (S,), nats, of w (S, P) in float64."""
        prior = Normal(self.prior_mean, self.prior_scale).log_prob(w).sum(1)
        return self.log_probs(w, self.inputs, self.targets).sum(1) / self.temperature + prior_weight * prior

    #: Whether it is linear regression, whose log joint is quadratic, and whose posterior is Normal.
    is_linear = property(lambda self: not self.unit and self.noise is not None)

    def design(self, x: Tensor) -> Tensor:
        """A (B, P) of a linear model, whose outputs are A w plus a constant."""
        return torch.cat([x, torch.ones_like(x[:, :1])], 1)

    @cached_property
    def gaussian(self) -> tuple[Tensor, Tensor]:
        """Mean (P,) and precision (P, P) of the posterior of linear regression; exact, as one Newton step is."""
        mean = self.mode()
        return mean, integration.curvature(self.log_joint, mean)

    @cached_property
    def standard(self) -> integration.Nodes:
        """Nodes of the standard Normal; for linear regression exact only for polynomials of total degree 3."""
        size = self.size
        if not self.is_linear:
            if size > 2:
                return integration.sobol(size, 2**12)
            # Many nodes in each dimension, because ``one_mode`` makes the integrand discontinuous.
            return integration.grid(lambda w: -0.5 * w.square().sum(1), 8.0, 201)
        half = math.sqrt(size) * torch.eye(size, dtype=torch.float64)
        return integration.Nodes(torch.cat([half, -half]), torch.full((2 * size,), 0.5 / size, dtype=torch.float64))

    @cached_property
    def posterior(self) -> integration.Nodes:
        """The exact posterior."""
        if self.is_linear:
            mean, precision = self.gaussian
            return self.normal(mean, torch.linalg.inv(precision))
        if self.size == 2:
            return integration.grid(self.log_joint, 8 * self.prior_scale)
        return integration.importance(self.log_joint, self.mode())

    def mode(self, prior_weight: float = 1.0) -> Tensor:
        """Maximum of log p(y | w)/T + prior_weight · log p(w), (P,); the one with v > 0 if there are two."""
        start = torch.zeros(self.size, dtype=torch.float64)
        if self.unit:
            start = self.posterior.w[self.posterior.mass.argmax()]
            start = start * torch.sign(start[1])
        return integration.climb(lambda w: self.log_joint(w, prior_weight), start)

    #: The new inputs for ``predict``.
    new = property(lambda self: self.x.float())

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of weights and predictions under the posterior, (P + B,) each."""
        values = self._raw(self.posterior.w, self.output(self.posterior.w, self.x))
        mean = self.posterior.mass @ values
        return mean, (self.posterior.mass @ (values - mean).square()).sqrt()

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Indices (i, j) of the second moments: all pairs of weights; every prediction with itself."""
        upper, points = torch.triu_indices(self.size, self.size), torch.arange(self.size, self.size + len(self.x))
        return torch.cat([upper[0], points]), torch.cat([upper[1], points])

    def labels(self) -> list[str]:
        """Descriptions of the M quantities."""
        ones = [f"weight {i + 1}" for i in range(self.size)]
        ones += [f"the prediction at input {b + 1}" for b in range(len(self.x))]
        seconds = []
        for i, j in zip(*(index.tolist() for index in self.pairs), strict=True):
            pair = f"covariance of weights {i + 1} and {j + 1} (posterior sd)"
            seconds.append(f"variance of {ones[i]} (posterior variance)" if i == j else pair)
        return [f"mean of {one} (posterior sd)" for one in ones] + seconds

    def units(self, w: Tensor, f: Tensor) -> Tensor:
        """Weights (…, P) and predictions of outputs (…, B), standardised by the posterior; (…, P + B)."""
        mean, sd = self.moments
        return (self._raw(w, f) - mean) / sd

    def quantities(self, w: Tensor, f: Tensor) -> Tensor:
        """(…, M), float64: :meth:`units`, and the products of ``pairs``."""
        unit, (i, j) = self.units(w, f), self.pairs
        return torch.cat([unit, unit[..., i] * unit[..., j]], -1)

    def _raw(self, w: Tensor, f: Tensor) -> Tensor:
        if self.one_mode:  # each node (n, P) by its own sign; chains and fits (C, D, P) by their mean
            sign = w[:, 1:] if w.dim() == 2 else w[..., 1:].mean(1, keepdim=True)
            w = w * torch.where(sign < 0, -1.0, 1.0)
        return torch.cat([w, f.sigmoid() if self.noise is None else f], -1)

    #: Expectations of the quantities (M,) under the posterior.
    exact = cached_property(lambda self: self.expect(self.posterior))

    def expect(self, nodes: integration.Nodes) -> np.ndarray:
        """Expectations of the quantities (M,) under a distribution of the weights."""
        return (nodes.mass @ self.quantities(nodes.w, self.output(nodes.w, self.x))).numpy()

    def normal(self, mean: Tensor, covariance: Tensor) -> integration.Nodes:
        """Nodes of Normal(mean, covariance), or of a point, whose covariance is 0."""
        return integration.normal(mean, covariance, self.standard)

    def best_normal(self, mode: Tensor, correlated: bool) -> tuple[Tensor, Tensor]:
        """Mean (P,) and covariance (P, P) of the closest Normal, with independent or ``correlated`` weights."""
        if self.is_linear:
            mean, precision = self.gaussian
            return mean, torch.linalg.inv(precision if correlated else precision.diagonal().diag())
        mean, root, _ = integration.best_normal(self.log_joint, mode, self.standard, correlated)
        return mean, root @ root.mT

    def stationary(self, method: Method) -> dict[str, Any]:
        """Arguments of ``judge`` for stochastic gradients at a finite step: expected and high, or tolerance."""
        if self.is_linear:  # exact, from the recursion
            ends = [self.expect(self.normal(self.gaussian[0], c)) for c in integration.stationary(method, self)]
            return {"expected": np.minimum(*ends), "high": np.maximum(*ends)}  # noise may make a covariance smaller
        largest = torch.linalg.eigvalsh(integration.curvature(self.log_joint, self.mode())).max().item()
        relative = method.eta_share * method.lr / len(self.inputs) * largest / (4 - 2 * method.friction)
        return {"expected": self.exact, "tolerance": relative * np.maximum(np.abs(self.exact), 1.0)}

    def elbo(self, mean: Tensor, covariance: Tensor) -> float:
        """log p(y) − KL(q ‖ posterior) of q = Normal(mean, covariance), nats."""
        q = self.normal(mean, covariance)
        return (q.mass @ self.log_joint(q.w) + 0.5 * torch.logdet(2 * math.pi * math.e * covariance)).item()


def linear_regression(rows: int, inputs: int, points: int) -> Problem:
    """Linear regression with a bias; neighbouring inputs have a correlation of 0.7."""
    x, y, new = _correlated(rows, inputs, points)
    return Problem("linear regression", x, y, new, PRIOR, NOISE, stops=0.02, batches=4)


def six_weights(rows: int, inputs: int, points: int) -> Problem:
    """Logistic regression with more weights than a grid holds."""
    x, y, new = _correlated(rows, inputs, points)
    labels = (y + torch.sin(torch.arange(rows) * 2.4) > 0.3).double()
    return Problem("logistic regression with six weights", x, labels, new, PRIOR)


def softmax_regression(rows: int, inputs: int, points: int) -> Problem:
    """Three classes that overlap."""
    x, _, new = _correlated(rows, inputs, points)
    score = torch.stack([x[:, 0], x[:, -1] - 0.5, -x[:, 0] - 0.3 * x[:, -1]], 1)
    labels = (score + torch.sin(torch.arange(3 * rows) * 2.4).view(rows, 3)).argmax(1).double()
    return Problem("softmax regression of three classes", x, labels, new, PRIOR, classes=3)


def _correlated(rows: int, inputs: int, points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs whose neighbours have a correlation of 0.7, targets, and new inputs.

    Inputs are divided by their root mean square, like the features of a last layer.
    """
    g, new = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    x, new = (torch.randn(n, inputs, generator=one, dtype=torch.float64) for n, one in ((rows, g), (points, new)))
    for z in (x, new):
        for i in range(1, inputs):
            z[:, i] = 0.7 * z[:, i - 1] + math.sqrt(1 - 0.7**2) * z[:, i]
    x, w = x.float().double(), torch.linspace(-1.5, 1.2, inputs, dtype=torch.float64)
    y = x @ w + 0.3 + NOISE * torch.randn(rows, generator=g, dtype=torch.float64)
    scale = x.square().mean().sqrt()
    return (x / scale).float().double(), y.float().double(), (new.float().double() / scale).float().double()


def _inputs(low: float, high: float) -> Tensor:
    x = torch.linspace(low, high, 12, dtype=torch.float64)[:, None]
    return (x / x.square().mean().sqrt()).float().double()


_LABELS = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
_EPSILON = torch.tensor([0.5, -0.9, 0.3, -0.2, 1.1, -0.6, 0.4, -0.3, 0.7, -1.0, 0.2, 0.6], dtype=torch.float64)
_TARGETS = (torch.tanh(1.2 * _inputs(-2.0, 2.0)[:, 0]) + 0.6 * _EPSILON).float().double()
_NEW = torch.linspace(-1.5, 1.5, 6, dtype=torch.float64)[:, None].float().double()
#: The problems of two weights by name: one skewed, one of two modes.
TWO_WEIGHTS: dict[str, Problem] = {
    "logistic": Problem("logistic regression", _inputs(-1.5, 2.5), _LABELS, _NEW, 2.0),
    "sign": Problem("one tanh unit", _inputs(-2.0, 2.0), _TARGETS, _NEW, 1.5, 1.1, unit=True, length=4.0),
}
