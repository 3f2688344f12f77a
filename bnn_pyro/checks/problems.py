"""Two posteriors of two weights each, written out by hand: nothing here comes from the code that is checked.

logistic   y ~ Bernoulli(sigmoid(w x + b)),       w, b ~ Normal(0, 2): skewed, correlated
sign       y ~ Normal(v tanh(u x), 1.1),         u, v ~ Normal(0, 1.5): two modes, (u, v) and (−u, −v), of ½ each
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bnn_pyro.checks.linear_regression import dataset
from bnn_pyro.datasets.dataset import Dataset, Schema

__all__ = ["PROBLEMS", "SmallProblem"]


@dataclass(frozen=True)
class SmallProblem:
    """A posterior of two weights. x (N,) and y (N,) in float64.

    settings      of the variant that it is the posterior of
    prior_scale   τ of both weights
    noise         σ, of regression
    temperature   T: p(y | x, w)^(1/T)
    two_modes     whether (−w) is as likely as w
    names         of the weights, in the order of the sites
    """

    title: str
    x: Tensor
    y: Tensor
    settings: Mapping[str, Any]
    prior_scale: float
    noise: float | None
    names: tuple[str, str]
    two_modes: bool = False
    temperature: float = 1.0

    @property
    def data(self) -> Dataset:
        """Its rows, as a variant takes them."""
        classes = ("no", "yes") if self.noise is None else ()
        schema = Schema("regression" if self.noise else "classification", (1,), classes=classes)
        return dataset(self.x[:, None], self.y if self.noise else self.y.long(), schema)

    def output(self, w: Tensor, x: Tensor) -> Tensor:
        """f (S, B) of weights w (S, 2) at x (B,): the logit, or the mean."""
        first, second = w[:, :1], w[:, 1:]
        return first * x + second if self.noise is None else second * torch.tanh(first * x)

    def mean(self, w: Tensor, x: Tensor) -> Tensor:
        """E[y | x, w] (S, B): the probability of the second class, or f."""
        f = self.output(w, x)
        return f.sigmoid() if self.noise is None else f

    def log_likelihood(self, w: Tensor) -> Tensor:
        """log p(y | x, w) (S,), nats."""
        f = self.output(w, self.x)
        if self.noise is None:
            return F.logsigmoid((2 * self.y - 1) * f).sum(1)
        normaliser = 0.5 * len(self.y) * math.log(2 * math.pi * self.noise**2)
        return -0.5 * (self.y - f).square().sum(1) / self.noise**2 - normaliser

    def log_prior(self, w: Tensor) -> Tensor:
        """log p(w) (S,), nats."""
        return -0.5 * w.square().sum(1) / self.prior_scale**2 - 2 * math.log(self.prior_scale * math.sqrt(2 * math.pi))

    def log_joint(self, w: Tensor) -> Tensor:
        """log p(y | x, w)/T + log p(w) (S,), nats, w (S, 2) in float64."""
        return self.log_likelihood(w) / self.temperature + self.log_prior(w)


def _inputs(low: float, high: float) -> Tensor:
    x = torch.linspace(low, high, 12, dtype=torch.float64)
    return (x / x.square().mean().sqrt()).float().double()  # a last layer divides its features by just this


_LABELS = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
_NOISE = torch.tensor([0.5, -0.9, 0.3, -0.2, 1.1, -0.6, 0.4, -0.3, 0.7, -1.0, 0.2, 0.6], dtype=torch.float64)
_X = _inputs(-2.0, 2.0)

#: Every one by its name.
PROBLEMS: dict[str, SmallProblem] = {
    "logistic": SmallProblem(
        "logistic regression",
        _inputs(-1.5, 2.5),
        _LABELS,
        {"hidden": (), "bias": True, "prior": "normal:2.0"},
        2.0,
        None,
        ("w", "b"),
    ),
    "sign": SmallProblem(
        "one tanh unit",
        _X,
        (torch.tanh(1.2 * _X) + 0.6 * _NOISE).float().double(),
        {"hidden": (1,), "bias": False, "activation": "tanh", "prior": "normal:1.5", "noise": 1.1},
        1.5,
        1.1,
        ("u", "v"),
        two_modes=True,
    ),
}
