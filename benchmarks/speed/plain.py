"""Plain PyTorch, without Pyro: the deterministic network, which is the floor, and local reparametrization itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnn_pyro.parts.local_linear import FreeLinear
from speed.problem import LR, Contestant, Problem, Step, network

__all__ = ["INIT_SCALE", "PLAIN", "LocalWeights"]

#: Standard deviation of every weight where training starts, here and in Pyro.
INIT_SCALE = 0.01


def deterministic(problem: Problem, update: bool = True, fused: bool = True) -> Step:
    """Adam on the mean negative log-likelihood."""
    net = network(problem).to(problem.device)
    optimiser = torch.optim.Adam(net.parameters(), lr=LR, fused=fused)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = problem.nll(net(x), y)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if update:
            optimiser.step()
        return loss.detach()

    return step


class LocalWeights(nn.Module):
    """Means and log σ² of the weights, the bias as the last row of each: the weights of an adjoined 1."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        shapes = [(i + 1, o) for i, o in pairwise(problem.sizes)]
        self.means = nn.ParameterList(torch.randn(shape) / shape[0] ** 0.5 for shape in shapes)
        self.log_variances = nn.ParameterList(torch.full(shape, INIT_SCALE).log() * 2 for shape in shapes)
        self.register_buffer("one", torch.ones(()))


def own_layer(X: Tensor, mean: Tensor, log_variance: Tensor, one: Tensor) -> tuple[Tensor, Tensor]:
    """(pre-activations, KL to N(0, 1)) by the package's autograd function."""
    return FreeLinear.apply(X, mean, log_variance, one, True, torch.Size())


def plain_layer(X: Tensor, mean: Tensor, log_variance: Tensor, one: Tensor) -> tuple[Tensor, Tensor]:
    """The same as one writes it down; the 10⁻¹² keeps the square root's gradient finite."""
    X, variance = F.pad(X, (0, 1), value=1.0), log_variance.exp()
    std = (X.square() @ variance + 1e-12).sqrt()
    kl = 0.5 * (variance + mean.square() - 1 - log_variance).sum()
    return X @ mean + std * torch.randn_like(std), kl


def local(problem: Problem, layer: Callable[..., tuple[Tensor, Tensor]]) -> Step:
    """Local reparametrization with a closed-form KL: −ELBO = N·nll + KL, fused Adam."""
    weights = LocalWeights(problem).to(problem.device)
    optimiser = torch.optim.Adam(weights.parameters(), lr=LR, fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        divergence, last = 0.0, len(weights.means) - 1
        for i, (mean, log_variance) in enumerate(zip(weights.means, weights.log_variances, strict=True)):
            x, kl = layer(x, mean, log_variance, weights.one)
            x = x if i == last else F.leaky_relu(x)
            divergence = divergence + kl
        loss = problem.rows * problem.nll(x, y) + divergence
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


PLAIN: dict[str, Contestant] = {
    "deterministic": Contestant(deterministic, "MLP, torch's fused Adam: the floor"),
    "deterministic, Adam not fused": Contestant(
        lambda p: deterministic(p, fused=False), "MLP, torch's Adam as it comes"
    ),
    "deterministic, no update": Contestant(lambda p: deterministic(p, update=False), "MLP, forward and backward only"),
    "plain torch": Contestant(
        lambda p: local(p, own_layer), "local reparametrization by our autograd functions, without Pyro"
    ),
    "plain torch, plain autograd": Contestant(
        lambda p: local(p, plain_layer), "the same with torch's own backward, without Pyro"
    ),
}
