"""Plain PyTorch, without Pyro: the deterministic network, which is the floor, and local reparametrization by itself."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.problem import INIT_SCALE, Contestant, Problem, Step, adam_step, network

__all__ = ["PLAIN"]


def deterministic(problem: Problem) -> Step:
    """Adam on the mean negative log-likelihood."""
    net = network(problem).to(problem.device)
    return adam_step(problem, net, lambda x, y: problem.nll(net(x), y))


class LocalWeights(nn.Module):
    """Means and log σ² of the weights, the bias as the last row of each: the weights of an adjoined 1."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        shapes = [(i + 1, o) for i, o in pairwise(problem.sizes)]
        self.means = nn.ParameterList(torch.randn(shape) / shape[0] ** 0.5 for shape in shapes)
        self.log_variances = nn.ParameterList(torch.full(shape, INIT_SCALE).log() * 2 for shape in shapes)


def local(problem: Problem) -> Step:
    """Local reparametrization with a closed-form KL: −ELBO = N·nll + KL; 10⁻¹² keeps the root's gradient finite."""
    weights = LocalWeights(problem).to(problem.device)
    last = len(weights.means) - 1

    def loss(x: Tensor, y: Tensor) -> Tensor:
        divergence = torch.zeros((), device=problem.device)
        for i, (mean, log_variance) in enumerate(zip(weights.means, weights.log_variances, strict=True)):
            x, variance = F.pad(x, (0, 1), value=1.0), log_variance.exp()
            std = (x.square() @ variance + 1e-12).sqrt()
            divergence = divergence + 0.5 * (variance + mean.square() - 1 - log_variance).sum()
            x = x @ mean + std * torch.randn_like(std)
            x = x if i == last else F.leaky_relu(x)
        return problem.rows * problem.nll(x, y) + divergence

    return adam_step(problem, weights, loss)


PLAIN: dict[str, Contestant] = {
    "deterministic": Contestant(deterministic, "torch's fused Adam: the floor", modules=True),
    "plain torch": Contestant(local, "local reparametrization as one writes it down, without Pyro"),
}
