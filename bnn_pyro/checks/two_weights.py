"""Posteriors of two weights each, one skewed and one of two modes, by numerical integration over a grid.

logistic   y ~ Bernoulli(sigmoid(w x + b)),       w, b ~ Normal(0, 2): skewed, correlated
sign       y ~ Normal(v tanh(u x), 1.1),         u, v ~ Normal(0, 1.5): two modes, (u, v) and (−u, −v), of ½ each
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bnn_pyro.checks.integration import Grid, best_normal, climb, curvature, normal_grid
from bnn_pyro.checks.linear_regression import dataset
from bnn_pyro.checks.problems import Amount, Problem
from bnn_pyro.checks.z_tests import Estimate
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.predictive import Prediction

__all__ = ["TWO_WEIGHTS", "TwoWeights"]

#: New inputs; draws that are kept for the figure.
POINTS, SHOWN_DRAWS = 6, 1000


@dataclass(frozen=True)
class TwoWeights(Problem):
    """A posterior of two weights, by integration over a grid. inputs (N,) and targets (N,) in float64.

    names        of the weights, in the order of the sites
    prior_scale  τ of both
    noise        σ, of regression; None: labels
    temperature  T: p(y | x, w)^(1/T)
    one_mode     whether the sign of the second weight is taken of both, where w and −w are as likely
    """

    name: str
    title: str
    inputs: Tensor
    targets: Tensor
    settings: Mapping[str, Any]
    prior_scale: float
    names: tuple[str, str]
    noise: float | None = None
    two_modes: bool = False
    length: float = 1.0
    temperature: float = 1.0
    one_mode: bool = False

    x: ClassVar[Tensor] = torch.linspace(-1.5, 1.5, POINTS)[:, None]

    def at(self, temperature: float, exact: bool) -> TwoWeights:
        """See ``Problem``."""
        return replace(self, temperature=temperature, one_mode=self.two_modes and not exact)

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
        modes = [f"mass of the mode with {b} > 0"] if self.two_modes and not self.one_mode else []
        return [
            f"mean of {a}", f"mean of {b}", f"mean of {a}²", f"mean of {b}²", f"mean of {a}·{b}",
            *(f"{what} at input {k + 1}" for k in range(POINTS)), *modes,
        ]  # fmt: skip

    def outputs(self, prediction: Prediction) -> Tensor:
        """See ``Problem``."""
        return prediction.probs[..., 1] if self.noise is None else prediction.locs

    def quantities(self, w: Tensor, f: Tensor) -> Tensor:
        """One mode: a chain, or a fit, is turned as a whole."""
        w = w * torch.sign(w[..., 1].mean(1))[:, None, None] if self.one_mode else w
        return self._raw(w, f) / self.unit

    def mode(self, prior_weight: float) -> Tensor:
        """See ``Problem``."""
        start = self.grid.mode * (torch.sign(self.grid.mode[1]) if self.two_modes else 1.0)
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
        if covariance is None:
            return np.full(len(self.labels()), np.nan)
        return self._expect(normal_grid(mean, covariance))

    def steepest(self) -> Tensor:
        """See ``Problem``."""
        return curvature(self.log_joint, climb(self.log_joint, self.grid.mode))

    def amounts(self, w: Tensor, f: Tensor) -> list[Amount]:
        """See ``Problem``."""
        exact, unit = self.grid.expect(self.mean(self.grid.points)), "a probability" if self.noise is None else "σ"
        apart = (f.mean((0, 1)) - exact).abs().mean().item() / (self.noise or 1.0)
        return [("quadrature", f"distance of E[y | x] from the exact one ({unit}, {self.title}), mean", apart, 0.0)]

    def pictures(self, w: Tensor, f: Tensor) -> dict[str, Any]:
        """NAME_names of the weights; NAME_axis_1, NAME_axis_2 (n,), NAME_density (n, n); NAME_draws (S, 2)."""
        flat, step = w.flatten(0, 1), max(1, len(self.grid.axes[0]) // 200)
        keep = torch.linspace(0, len(flat) - 1, min(SHOWN_DRAWS, len(flat))).round().long()
        shown = {
            "names": list(self.names),
            "axis_1": self.grid.axes[0][::step].numpy(),
            "axis_2": self.grid.axes[1][::step].numpy(),
            "density": self.grid.density[::step, ::step].numpy(),
            "draws": flat[keep].numpy(),
        }
        return {f"{self.name}_{what}": value for what, value in shown.items()}

    def _raw(self, w: Tensor, f: Tensor) -> Tensor:
        if self.one_mode and w.dim() == 2:  # nodes of a grid
            w = w * torch.where(w[:, 1:] < 0, -1.0, 1.0)
        parts = [w, w.square(), w.prod(-1, keepdim=True), f]
        return torch.cat([*parts, (w[..., 1:] > 0).double()] if self.two_modes and not self.one_mode else parts, -1)

    def _expect(self, grid: Grid) -> np.ndarray:
        return (grid.expect(self._raw(grid.points, self.mean(grid.points))) / self.unit).numpy()


def _inputs(low: float, high: float) -> Tensor:
    x = torch.linspace(low, high, 12, dtype=torch.float64)
    return (x / x.square().mean().sqrt()).float().double()


_LABELS = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
_EPSILON = torch.tensor([0.5, -0.9, 0.3, -0.2, 1.1, -0.6, 0.4, -0.3, 0.7, -1.0, 0.2, 0.6], dtype=torch.float64)
_X = _inputs(-2.0, 2.0)

#: The problems of two weights by name.
TWO_WEIGHTS: dict[str, TwoWeights] = {
    "logistic": TwoWeights(
        "logistic",
        "logistic regression",
        _inputs(-1.5, 2.5),
        _LABELS,
        {"hidden": (), "bias": True, "prior": "normal:2.0"},
        prior_scale=2.0,
        names=("w", "b"),
    ),
    "sign": TwoWeights(
        "sign",
        "one tanh unit",
        _X,
        (torch.tanh(1.2 * _X) + 0.6 * _EPSILON).float().double(),
        {"hidden": (1,), "bias": False, "activation": "tanh", "prior": "normal:1.5", "noise": 1.1},
        prior_scale=1.5,
        names=("u", "v"),
        noise=1.1,
        two_modes=True,
        length=4.0,
    ),
}
