"""Coordinates in which the posterior of a linear model is nearly round: what spares HMC its long trajectories.

    W = τ ∘ V,  τ the prior's scale;  Hessian of −log p(y | x, V) at the mode: H;  R Rᵀ = H + I
    up to DENSE weights:   z = Rᵀ V
    above, by Kronecker:   H ≈ C ⊗ G,  C = U diag(c) Uᵀ,  G = Q diag(g) Qᵀ,    z_ij = (Uᵀ V Q)_ij (c_i g_j + 1)^(1/2)

G is the Gram matrix of the inputs, every row weighted by the Fisher information of its outputs, and C their mean
information (Martens & Grosse 2015, arXiv:1503.05671). The features of a network are far from uncorrelated: in the
coordinates of the weights the widest direction of the posterior can be a hundred times the narrowest. A linear change
of coordinates alters no draw's distribution, however rough the approximation.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyro
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.func import functional_call

from bnn_pyro.inference.log_joint import LogJoint, Sites
from bnn_pyro.parts.likelihoods import ReadLikelihood
from bnn_pyro.parts.nets import MLP
from bnn_pyro.parts.priors import IsotropicNormal

__all__ = ["Plain", "Rounded", "Whitened", "coordinates"]

WEIGHT, BIAS, ROUND = "layers.0.weight", "layers.0.bias", "layers.0"

#: Draws of the targets, and of the prior, that the Fisher information and the prior's scale are estimated with.
SAMPLES = 20

#: Rows whose inputs are held in double precision at once.
ROWS = 4096

#: Weights up to which the whole Hessian is used: 4,096 make a matrix of 67 MB.
DENSE = 4096


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
        tau = [_prior_scale(log_joint.priors[site]) for site in self._sites(log_joint)]
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
            inputs = self._inputs(log_joint, rows)
            gram = gram + inputs.mT @ (inputs * weight)
        return gram, information / information.trace().clamp_min(1e-300)

    def _inputs(self, log_joint: LogJoint, rows: Tensor) -> Tensor:
        """(B, F + 1) in units of the prior, the last one that of the bias."""
        inputs = log_joint.model.net.enter(rows).double()
        return (torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1) if self.bias else inputs) * self.tau

    def _sites_of(self, z: Mapping[str, Tensor], w: Tensor) -> dict[str, Tensor]:
        others = {site: value for site, value in z.items() if site != ROUND}
        return others | ({WEIGHT: w[:, :-1], BIAS: w[:, -1]} if self.bias else {WEIGHT: w})

    def _joined(self, w: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        w = {site: value.double() for site, value in w.items()}
        return w, torch.cat([w.pop(WEIGHT), w.pop(BIAS)[:, None]], 1) if self.bias else w.pop(WEIGHT)

    def weights(self, z: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """z -> w."""
        return self._sites_of(z, self.u @ (z[ROUND] * self.scale) @ self.q.mT * self.tau)

    def inverse(self, w: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """w -> z."""
        w, v = self._joined(w)
        return w | {ROUND: self.u.mT @ (v / self.tau) @ self.q / self.scale}


class Rounded(Whitened):
    """As ``Whitened``, by the whole Hessian of all weights of the layer: z (P,), v = R⁻ᵀ z where R Rᵀ = H + I."""

    def __init__(self, log_joint: LogJoint, at: Mapping[str, Tensor], factor: float) -> None:
        super().__init__(log_joint, at, factor)
        hessian = self._hessian(log_joint, at) * factor
        hessian.diagonal().add_(1.0)
        self.root = torch.linalg.cholesky(hessian)
        eye = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
        # In single precision, half the memory to read: any fixed matrix will do.
        self.map = torch.linalg.solve_triangular(self.root.mT, eye, upper=True).float()

    def _hessian(self, log_joint: LogJoint, at: Mapping[str, Tensor]) -> Tensor:
        """−∂² log p(y | x, V) / ∂V², (P, P), block by block of the outputs."""
        model, blocks = log_joint.model, {}  # block (i, j) is symmetric, and equal to (j, i)
        w = {site: at[site] for site in self._sites(log_joint)}
        for rows, y in zip(log_joint.x.split(ROWS), log_joint.y.split(ROWS), strict=True):
            with torch.no_grad():
                f = functional_call(model.net, w, (rows,)).double()
            f.requires_grad_(True)
            with pyro.validation_enabled(False), Sites(at) as sites:
                model.likelihood(f, y)
            (score,) = torch.autograd.grad(sites.total, f, create_graph=True)
            inputs = self._inputs(log_joint, rows)
            for i in range(f.shape[1]):
                (curvature,) = torch.autograd.grad(-score[:, i].sum(), f, retain_graph=True)  # (rows, K)
                for j in range(i + 1):
                    blocks[i, j] = blocks.get((i, j), 0.0) + inputs.mT @ (inputs * curvature[:, j : j + 1])
        outputs = 1 + max(i for i, _ in blocks)
        return torch.cat([torch.cat([blocks[max(i, j), min(i, j)] for j in range(outputs)], 1) for i in range(outputs)])

    def weights(self, z: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """z -> w."""
        v = (self.map @ z[ROUND].float()).view(len(self.u), -1) * self.tau
        return self._sites_of(z, v)

    def inverse(self, w: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """w -> z."""
        w, v = self._joined(w)
        return w | {ROUND: self.root.mT @ (v / self.tau).flatten()}


def _prior_scale(prior: TorchDistribution) -> Tensor:
    """The standard deviation of a weight, from draws where the prior does not say it."""
    if isinstance(prior, IsotropicNormal):
        return prior.scale.double()
    return torch.stack([prior.sample() for _ in range(SAMPLES)]).double().square().mean().sqrt()


def coordinates(log_joint: LogJoint, temperature: float) -> Plain:
    """Where a sampler of this model had best move: whitened at the mode of a linear model, else the weights as such."""
    net = getattr(log_joint.model, "net", None)
    if not (isinstance(net, MLP) and len(net.layers) == 1 and hasattr(log_joint.model, "likelihood")):
        return Plain()
    rough = Whitened(log_joint, log_joint.initial, 1 / temperature)
    mode = _mode(log_joint, rough)
    if sum(log_joint.initial[site].numel() for site in (WEIGHT, BIAS) if site in log_joint.initial) <= DENSE:
        try:
            return Rounded(log_joint, mode, 1 / temperature)
        except torch.linalg.LinAlgError:  # not the top of a hill, as a learned noise of every row can have it
            pass
    return Whitened(log_joint, mode, 1 / temperature)


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
