"""What one writes in Pyro, trained by its own SVI: AutoNormal, and our HiddenLayer."""

from __future__ import annotations

from itertools import pairwise

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions import constraints
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

import bnn_pyro as bp
from benchmarks.speed.problem import INIT_SCALE, NOISE, Contestant, Problem, Step

__all__ = ["THROUGH_PYRO", "adam"]


def adam(problem: Problem) -> pyro.optim.PyroOptim:
    """Pyro's Adam, fused as everybody's is here."""
    return pyro.optim.Adam({"lr": problem.lr, "fused": True})


def observe(problem: Problem, f: Tensor, y: Tensor) -> None:
    """The site "y" in a plate that scales it by N/B."""
    with pyro.plate("data", problem.rows, subsample=y):
        pyro.sample("y", dist.Normal(f.squeeze(-1), NOISE) if problem.regression else dist.Categorical(logits=f), obs=y)


def hidden_layers(problem: Problem) -> Step:
    """Model and guide as people write them."""
    shapes = [(i + 1, o) for i, o in pairwise(problem.sizes)]
    last = len(shapes) - 1
    prior = [(torch.zeros(s, device=problem.device), torch.ones(s, device=problem.device)) for s in shapes]
    starts = [(torch.randn(s) / s[0] ** 0.5, torch.full(s, INIT_SCALE)) for s in shapes]

    def layers(x: Tensor, weights: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = F.pad(x, (0, 1), value=1.0)
        for i, (mean, scale) in enumerate(weights):
            activation = (lambda v: v) if i == last else F.leaky_relu
            with pyro.plate(f"rows{i}", len(x)):
                x = pyro.sample(f"h{i}", bp.HiddenLayer(x, mean, scale, activation, include_hidden_bias=i < last))
        return x

    def model(x: Tensor, y: Tensor) -> None:
        observe(problem, layers(x, prior), y)

    def guide(x: Tensor, y: Tensor) -> None:
        weights = []
        for i, (mean, scale) in enumerate(starts):
            mean = pyro.param(f"mean{i}", lambda m=mean: m.to(problem.device))
            scale = pyro.param(f"scale{i}", lambda s=scale: s.to(problem.device), constraint=constraints.positive)
            weights.append((mean, scale))
        layers(x, weights)

    return SVI(model, guide, adam(problem), TraceMeanField_ELBO()).step


class BayesianMLP(PyroModule):
    """Every weight a ``PyroSample`` with an N(0, 1) prior, as in Pyro's tutorials."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self.layers = PyroModule[nn.ModuleList]([PyroModule[nn.Linear](i, o) for i, o in pairwise(problem.sizes)])
        zero, one = torch.zeros((), device=problem.device), torch.ones((), device=problem.device)
        for layer in self.layers:
            layer.weight = PyroSample(dist.Normal(zero, one).expand(layer.weight.shape).to_event(2))
            layer.bias = PyroSample(dist.Normal(zero, one).expand(layer.bias.shape).to_event(1))

    def forward(self, x: Tensor, y: Tensor) -> None:
        """The model."""
        for layer in self.layers[:-1]:
            x = F.leaky_relu(layer(x))
        observe(self.problem, self.layers[-1](x), y)


def auto_normal(problem: Problem) -> Step:
    """Pyro's mean-field autoguide."""
    model = BayesianMLP(problem)
    guide = AutoNormal(model, init_scale=INIT_SCALE)
    return SVI(model, guide, adam(problem), TraceMeanField_ELBO()).step


THROUGH_PYRO: dict[str, Contestant] = {
    "HiddenLayer in Pyro": Contestant(hidden_layers, "bnn_pyro.HiddenLayer; Pyro's SVI"),
    "Pyro AutoNormal": Contestant(auto_normal, "PyroSample weights, AutoNormal, TraceMeanField_ELBO; Pyro's SVI"),
}
