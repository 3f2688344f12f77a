"""Coordinates in which the posterior of a linear model is nearly round: what spares HMC its long trajectories.

    posterior precision of V ≈ C ⊗ G + I,   C = U diag(c) Uᵀ,  G = Q diag(g) Qᵀ      W = τ ∘ V
    z = Uᵀ V Q / s,   s_ij = (c_i g_j + 1)^(-1/2)

G is the Gram matrix of the inputs, every row weighted by the Fisher information of its outputs, and C their mean
information: the Kronecker approximation of Martens & Grosse 2015 (arXiv:1503.05671). The features of a network are
far from uncorrelated, so that in the coordinates of the weights the widest direction of the posterior is hundreds of
times the narrowest. A linear change of coordinates alters no draw's distribution, however rough the approximation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pyro import poutine
from torch import Tensor
from torch.func import functional_call

from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.parts.likelihoods import ReadLikelihood
from bnn_pyro.parts.nets import MLP

__all__ = ["Plain", "Whitened", "coordinates"]

WEIGHT, BIAS, ROUND = "layers.0.weight", "layers.0.bias", "layers.0"

#: Draws of the targets, and of the prior, that the Fisher information and the prior's scale are estimated with.
SAMPLES = 20
ROWS = 4096


class Plain:
    """The weights themselves, in float64."""

    def weights(self, z: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """z -> w."""
        return dict(z)

    def inverse(self, w: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """w -> z."""
        return {site: value.double() for site, value in w.items()}


class Whitened(Plain):
    """The weights (K, F) and biases (K,) of a linear layer as one site z (K, F + 1); other sites as they are."""

    def __init__(self, log_joint: LogJoint, at: Mapping[str, Tensor], factor: float) -> None:
        shape = log_joint.initial[WEIGHT].shape
        draws = [log_joint.prior_draw() for _ in range(SAMPLES)]
        tau = [torch.stack([d[site].double() for d in draws]).square().mean().sqrt() for site in self._sites(log_joint)]
        self.bias = len(tau) == 2
        self.tau = torch.cat([tau[0].expand(shape[1]), *(t[None] for t in tau[1:])])  # (F + 1,)
        gram, information = self._fisher(log_joint, at)
        g, self.q = torch.linalg.eigh(gram * factor)
        c, self.u = torch.linalg.eigh(information)
        self.scale = (c.clamp_min(0)[:, None] * g.clamp_min(0) + 1).rsqrt()

    @staticmethod
    def _sites(log_joint: LogJoint) -> list[str]:
        return [site for site in (WEIGHT, BIAS) if site in log_joint.initial]

    def _fisher(self, log_joint: LogJoint, at: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """G (F + 1, F + 1), summed over the rows, and C (K, K) of trace 1, at the values of the sites given."""
        model = log_joint.model
        w = {site: at[site] for site in self._sites(log_joint)}
        gram, information = 0.0, 0.0
        for rows in log_joint.x.split(ROWS):
            with torch.no_grad():
                f = functional_call(model.net, w, (rows,)).double()
            f.requires_grad_(True)
            with ReadLikelihood() as read, poutine.condition(data=at):
                model.likelihood(f)
            weight = 0.0
            for _ in range(SAMPLES):
                log_prob = read.likelihood.log_prob(read.likelihood.sample()).sum()
                (score,) = torch.autograd.grad(log_prob, f, retain_graph=True)  # (rows, K)
                information = information + score.mT @ score / SAMPLES
                weight = weight + score.square().sum(1, keepdim=True) / SAMPLES
            inputs = model.net.enter(rows).double()
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1) if self.bias else inputs
            gram = gram + (inputs * self.tau).mT @ (inputs * self.tau * weight)
        return gram, information / information.trace().clamp_min(1e-300)

    def weights(self, z: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """z -> w."""
        w = {site: value for site, value in z.items() if site != ROUND}
        v = self.u @ (z[ROUND] * self.scale) @ self.q.mT * self.tau
        return w | ({WEIGHT: v[:, :-1], BIAS: v[:, -1]} if self.bias else {WEIGHT: v})

    def inverse(self, w: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """w -> z."""
        w = {site: value.double() for site, value in w.items()}
        v = torch.cat([w.pop(WEIGHT), w.pop(BIAS)[:, None]], 1) if self.bias else w.pop(WEIGHT)
        return w | {ROUND: self.u.mT @ (v / self.tau) @ self.q / self.scale}


def coordinates(log_joint: LogJoint, temperature: float) -> Plain:
    """Where a sampler of this model had best move: whitened at the mode of a linear model, else the weights as such."""
    net = getattr(log_joint.model, "net", None)
    if not (isinstance(net, MLP) and len(net.layers) == 1 and hasattr(log_joint.model, "likelihood")):
        return Plain()
    rough = Whitened(log_joint, log_joint.initial, 1 / temperature)
    return Whitened(log_joint, _mode(log_joint, rough), 1 / temperature)


def _mode(log_joint: LogJoint, space: Plain, iterations: int = 100) -> dict[str, Tensor]:
    """The most probable weights, or near enough: L-BFGS from the model's initial values."""
    z = {site: value.clone().requires_grad_(True) for site, value in space.inverse(log_joint.initial).items()}
    optimiser = torch.optim.LBFGS(list(z.values()), max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -log_joint(space.weights(z))
        loss.backward()
        return loss

    optimiser.step(closure)
    with torch.no_grad():
        w = {site: v.to(log_joint.initial[site].dtype) for site, v in space.weights(z).items()}
    return w if all(torch.isfinite(v).all() for v in w.values()) else log_joint.initial
