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

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from scipy.optimize import minimize
from torch import Tensor
from torch.func import functional_call

from bnn_pyro.inference.log_joint import log_joints
from bnn_pyro.inference.potential import Potential, Space
from bnn_pyro.parts.likelihoods import ReadLikelihood
from bnn_pyro.parts.nets import MLP
from bnn_pyro.parts.priors import IsotropicNormal

__all__ = ["Rounded", "Whitened", "coordinates"]

WEIGHT, BIAS = "layers.0.weight", "layers.0.bias"

#: Draws of the targets, and of the prior, that the Fisher information and the prior's scale are estimated with.
SAMPLES = 20

#: Rows whose inputs are held in double precision at once.
ROWS = 4096

#: The largest slope, in nats per standard deviation or so, at which a place will do for the mode.
NEAR = 0.01

#: Weights up to which the whole Hessian is used: 4,096 make a matrix of 67 MB.
DENSE = 4096


class Whitened(Space):
    """The weights (K, F) and biases (K,) of a linear layer, rounded off; sites after them stay as they are.

    potential: of a model whose first sites are those of the layer.   at: {site: value} of the mode, or near it.
    """

    def __init__(self, potential: Potential, at: Mapping[str, Tensor]) -> None:
        self.outputs, self.inputs = at[WEIGHT].shape
        self.bias = BIAS in at
        tau = [_prior_scale(potential.priors[site]) for site in (WEIGHT, BIAS) if site in at]
        self.tau = torch.cat([tau[0].expand(self.inputs), *(t[None] for t in tau[1:])])  # (F + 1,)
        self.size = self.outputs * len(self.tau)
        gram, information = self._fisher(potential, at)
        g, self.q = torch.linalg.eigh(gram / potential.temperature)
        c, self.u = torch.linalg.eigh(information)
        self.scale = (c.clamp_min(0)[:, None] * g.clamp_min(0) + 1).rsqrt()

    def _fisher(self, potential: Potential, at: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """G (F + 1, F + 1), summed over the rows, and C (K, K) of trace 1, at the values of the sites given."""
        model = potential.model
        gram, information = 0.0, 0.0
        for rows in potential.x.split(ROWS):
            f = _outputs(model, at, rows)
            with ReadLikelihood() as read, poutine.condition(data=at):
                model.likelihood(f)
            weight = 0.0
            for _ in range(SAMPLES):
                log_prob = read.likelihood.log_prob(read.likelihood.sample()).sum()
                (score,) = torch.autograd.grad(log_prob, f, retain_graph=True)  # (rows, K)
                information = information + score.mT @ score / SAMPLES
                weight = weight + score.square().sum(1, keepdim=True) / SAMPLES
            inputs = self._inputs(model, rows)
            gram = gram + inputs.mT @ (inputs * weight)
        return gram, information / information.trace().clamp_min(1e-300)

    def _inputs(self, model: torch.nn.Module, rows: Tensor) -> Tensor:
        """(B, F + 1) in units of the prior, the last one that of the bias."""
        inputs = model.net.enter(rows).double()
        return (torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1) if self.bias else inputs) * self.tau

    def forward(self, z: Tensor) -> Tensor:
        """z (…, P) -> u (…, P)."""
        w = self._unfold(z[..., : self.size]) * self.tau
        parts = [w[..., : self.inputs].flatten(-2), *([w[..., -1]] if self.bias else []), z[..., self.size :]]
        return torch.cat(parts, -1)

    def inverse(self, u: Tensor) -> Tensor:
        """u (…, P) -> z (…, P)."""
        cut = self.outputs * self.inputs
        w = u[..., :cut].unflatten(-1, (self.outputs, self.inputs))
        if self.bias:
            w = torch.cat([w, u[..., cut : self.size, None]], -1)
        return torch.cat([self._fold(w / self.tau), u[..., self.size :]], -1)

    def _unfold(self, z: Tensor) -> Tensor:
        """z (…, size) -> V (…, K, F + 1)."""
        return self.u @ (z.unflatten(-1, self.scale.shape) * self.scale) @ self.q.mT

    def _fold(self, v: Tensor) -> Tensor:
        return (self.u.mT @ v @ self.q / self.scale).flatten(-2)


class Rounded(Whitened):
    """As ``Whitened``, by the whole Hessian of all weights of the layer: v = R⁻ᵀ z where R Rᵀ = H + I."""

    def __init__(self, potential: Potential, at: Mapping[str, Tensor]) -> None:
        super().__init__(potential, at)
        hessian = self._hessian(potential, at) / potential.temperature
        hessian.diagonal().add_(1.0)
        self.root = torch.linalg.cholesky(hessian)
        eye = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
        # In single precision, half the memory to read: any fixed matrix will do.
        self.map = torch.linalg.solve_triangular(self.root.mT, eye, upper=True).float()

    def _hessian(self, potential: Potential, at: Mapping[str, Tensor]) -> Tensor:
        """−∂² log p(y | x, V) / ∂V², (P, P), block by block of the outputs."""
        model, blocks = potential.model, {}  # block (i, j) is symmetric, and equal to (j, i)
        own = {site: value[None] for site, value in at.items() if site not in (WEIGHT, BIAS)}
        for rows, y in zip(potential.x.split(ROWS), potential.y.split(ROWS), strict=True):
            f = _outputs(model, at, rows)
            with pyro.validation_enabled(False):
                _, total = log_joints(lambda _, y, f=f: model.likelihood(f[None], y), own, rows, y)
            (score,) = torch.autograd.grad(total.sum(), f, create_graph=True)
            inputs = self._inputs(model, rows)
            for i in range(f.shape[1]):
                (curvature,) = torch.autograd.grad(-score[:, i].sum(), f, retain_graph=True)  # (rows, K)
                for j in range(i + 1):
                    blocks[i, j] = blocks.get((i, j), 0.0) + inputs.mT @ (inputs * curvature[:, j : j + 1])
        outputs = 1 + max(i for i, _ in blocks)
        return torch.cat([torch.cat([blocks[max(i, j), min(i, j)] for j in range(outputs)], 1) for i in range(outputs)])

    def _unfold(self, z: Tensor) -> Tensor:
        return (z.float() @ self.map.mT).double().unflatten(-1, self.scale.shape)

    def _fold(self, v: Tensor) -> Tensor:
        return v.flatten(-2) @ self.root


def _outputs(model: torch.nn.Module, at: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """The network's outputs (B, K), a leaf in double precision."""
    layer = {site: at[site] for site in (WEIGHT, BIAS) if site in at}
    with torch.no_grad():
        f = functional_call(model.net, layer, (rows,)).double()
    return f.requires_grad_(True)


def _prior_scale(prior: TorchDistribution) -> Tensor:
    """The standard deviation of a weight, from draws where the prior does not say it."""
    if isinstance(prior, IsotropicNormal):
        return prior.scale.double()
    return torch.stack([prior.sample() for _ in range(SAMPLES)]).double().square().mean().sqrt()


def coordinates(potential: Potential) -> Space:
    """Where a sampler of this model had best move: whitened at the mode of a linear model, else as it is.

    potential: in plain coordinates.
    """
    net = getattr(potential.model, "net", None)
    if not (isinstance(net, MLP) and len(net.layers) == 1 and hasattr(potential.model, "likelihood")):
        return Space()
    rough = Whitened(potential, _values(potential, potential.initial))
    mode = _mode(potential, rough)
    if rough.size <= DENSE:
        try:
            return Rounded(potential, mode)
        except torch.linalg.LinAlgError:  # not the top of a hill, as a learned noise of every row can have it
            pass
    return Whitened(potential, mode)


def _values(potential: Potential, u: Tensor) -> dict[str, Tensor]:
    return {site: value[0] for site, value in potential.weights(u[None]).items()}


def _mode(potential: Potential, space: Space) -> dict[str, Tensor]:
    """The most probable weights, or near enough: L-BFGS in the coordinates given, from the model's initial values."""
    plain, potential.space = potential.space, space
    device = potential.initial.device

    def loss(z: np.ndarray) -> tuple[float, np.ndarray]:
        density, gradient = potential(torch.from_numpy(z).to(device)[None])
        return -density.item(), -gradient[0].cpu().numpy()

    try:
        start = space.inverse(potential.initial).cpu().numpy()
        found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"gtol": NEAR, "maxiter": 200})
        u = space.forward(torch.from_numpy(found.x).to(device))
    finally:
        potential.space = plain
    return _values(potential, u if torch.isfinite(u).all() else potential.initial)
