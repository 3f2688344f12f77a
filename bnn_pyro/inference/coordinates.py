"""Coordinates in which the posterior is about equally wide in all directions, for linear models and gamma priors.

For a linear model f = W φ(x) with Λ, the curvature of its log joint (``linear``):

    up to DENSE weights:    z = Rᵀ w,  R Rᵀ = Λ at the centre
    Kronecker, for more:    w = τ v,  Λ_v ≈ C ⊗ G + 1,  C = U diag(c) Uᵀ,  G = Q diag(g) Qᵀ,
                            z_ij = (Uᵀ V Q)_ij (c_i g_j + 1)^(1/2)

τ is the prior's scale, G the Gram matrix of φ with row n weighted by the trace of its Fisher information I_n, and C the
mean of the I_n (Martens & Grosse 2015, arXiv:1503.05671). A linear map does not change the distribution of draws, so
the approximation need not be accurate. For other models with gamma priors see :class:`NonCentred`.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.distributions import Gamma

from bnn_pyro.inference.linear import ROWS, Curvature, linear_layer, summed
from bnn_pyro.inference.log_joint import with_gradient
from bnn_pyro.inference.potential import Potential, Space
from bnn_pyro.parts.likelihoods import Likelihood
from bnn_pyro.parts.priors import GammaNormal
from bnn_pyro.parts.weights import cut

MAX_SLOPE = 0.01  # the search for a mode ends at this gradient, in nats per standard deviation (roughly)
#: The search for learned scales ends after this number of rounds, or when log σ changes by less than MAX_CHANGE.
ROUNDS, MAX_CHANGE = 30, 0.05
WIDER = 100.0  # factor of the prior's scale with which the second search begins
DENSE = 4096  # number of weights up to which the dense Λ is used: 4,096 make a matrix of 67 MB in single precision


class Rounded(Space):
    """z = Rᵀ u, R Rᵀ = Λ at u (P,)."""

    whitened = True

    def __init__(self, curvature: Curvature, u: Tensor) -> None:
        self.root = torch.linalg.cholesky(curvature.precision(u, summed))
        eye = torch.eye(len(u), dtype=u.dtype, device=u.device)
        # Single precision halves the memory traffic, and is allowed as any fixed matrix is.
        self.map = torch.linalg.solve_triangular(self.root.mT, eye, upper=True).float()

    def forward(self, z: Tensor) -> Tensor:
        """z (…, P) -> u (…, P)."""
        return (z.float() @ self.map.mT).double()

    def inverse(self, u: Tensor) -> Tensor:
        """u (…, P) -> z (…, P)."""
        return u @ self.root


class Whitened(Space):
    """Coordinates by Kronecker factors of Λ at u (P,), see the top of the file."""

    whitened = True

    @torch.no_grad()
    def __init__(self, curvature: Curvature, u: Tensor) -> None:
        self.order, self.size, self.has_bias = curvature.order, curvature.order.numel(), curvature.has_bias
        gram, total = 0.0, 0.0
        information = curvature.information(u)
        for rows in curvature.features.split(ROWS):
            each = information(rows)
            gram, total = gram + rows.mT @ (rows * torch.einsum("bkk->b", each)[:, None]), total + each.sum(0)
        self.tau = curvature.prior_precision[curvature.order[0]].rsqrt()  # (D,)
        gram = gram[: len(self.tau), : len(self.tau)]
        g, self.q = torch.linalg.eigh(self.tau[:, None] * gram * self.tau / curvature.log_joint.temperature)
        c, self.u = torch.linalg.eigh(total / total.trace().clamp_min(1e-300))
        self.scale = (c.clamp_min(0)[:, None] * g.clamp_min(0) + 1).rsqrt()
        self.own_scale = curvature.own_precision.rsqrt()

    def variances(self) -> Tensor:
        """The diagonal of Λ⁻¹, (K, D)."""
        return self.u.square() @ self.scale.square() @ self.q.mT.square() * self.tau.square()

    def forward(self, z: Tensor) -> Tensor:
        """z (…, P) -> u (…, P)."""
        w = self.u @ (z[..., : self.size].unflatten(-1, self.scale.shape) * self.scale) @ self.q.mT * self.tau
        layer = [w[..., :-1].flatten(-2), w[..., -1]] if self.has_bias else [w.flatten(-2)]
        return torch.cat([*layer, z[..., self.size :] * self.own_scale], -1)

    def inverse(self, u: Tensor) -> Tensor:
        """u (…, P) -> z (…, P)."""
        v = self.u.mT @ (u[..., self.order] / self.tau) @ self.q / self.scale
        return torch.cat([v.flatten(-2), u[..., self.size :] / self.own_scale], -1)


class NonCentred(Space):
    """w = v eᵗ for each parameter w with a gamma prior: v ~ Normal(0, I), e⁻²ᵗ = τ ~ Gamma(shape, rate).

    z (…, P + T) consists of P numbers, v in the place of w, and the T log scales t. In a model with τ integrated out,
    all of w has to move for its scale to change, and one step size does not suit both small and large scales; here t
    is a coordinate (Papaspiliopoulos, Roberts & Sköld 2007, doi:10.1214/088342307000000014).
    """

    def __init__(self, potential: Potential) -> None:
        self.sizes = [shape.numel() for shape in potential.free.values()]
        self.priors = [prior if isinstance(prior, GammaNormal) else None for prior in potential.priors.values()]

    def _parts(self, z: Tensor) -> Iterator[tuple[Tensor, GammaNormal | None, Tensor]]:
        """For each site: (its numbers (…, n), its gamma prior or None, t (…, groups), which is 0 without one)."""
        *parts, t = z.split([*self.sizes, z.shape[-1] - sum(self.sizes)], -1)
        scales = iter(t.split([prior.groups for prior in self.priors if prior], -1))
        for part, prior in zip(parts, self.priors, strict=True):
            yield part, prior, next(scales) if prior else torch.zeros_like(part[..., :1])

    def forward(self, z: Tensor) -> Tensor:
        """z (…, P + T) -> u (…, P)."""
        return torch.cat([prior.scaled(part, t.exp()) if prior else part for part, prior, t in self._parts(z)], -1)

    def inverse(self, u: Tensor) -> Tensor:
        """u (…, P) -> z (…, P + T); each t is drawn from its distribution given w: call it inside ``isolated``."""
        parts, scales = list(u.split(self.sizes, -1)), []
        for i, prior in enumerate(self.priors):
            if prior:
                precision = Gamma(*prior.given(parts[i]), validate_args=False).sample()
                scales.append(-0.5 * precision.log())
                parts[i] = prior.scaled(parts[i], (-scales[-1]).exp())
        return torch.cat([*parts, *scales], -1)

    def extra(self, z: Tensor) -> Tensor:
        """log density of z minus log density of u: log p(t | w) + log |∂w/∂v|."""
        total = z.new_zeros(z.shape[:-1])
        for v, prior, t in self._parts(z):
            if prior:
                shape, rate = prior.given(prior.scaled(v, t.exp()))
                each = shape * rate.log() - rate * (-2 * t).exp() - 2 * prior.shape_ * t
                total = total + (each + math.log(2) - torch.lgamma(shape)).sum(-1)
        return total


def coordinates(potential: Potential) -> Space:
    """The coordinates that suit a model: Rounded or Whitened, NonCentred, or z = u; call it inside ``isolated``.

    The centre of a linear model becomes ``potential.initial``, around which chains start. A run that an earlier version
    began (see ``Potential.centred``) keeps its coordinates, as positions were recorded in them.
    """
    likelihood = type(getattr(potential.model, "likelihood", None))
    unknown = getattr(likelihood, "information", Likelihood.information) is Likelihood.information
    if unknown or linear_layer(potential.model) is None:
        gamma = any(isinstance(prior, GammaNormal) for prior in potential.priors.values())
        return NonCentred(potential) if gamma and potential.centred >= 3 else Space()
    curvature = Curvature(potential)
    where = potential.log_density, Whitened(curvature, potential.initial), potential.initial
    u = centre_of(potential, curvature) if potential.centred else mode_of(*where)
    if potential.centred >= 2:
        potential.initial = u
    return Rounded(curvature, u) if potential.size <= DENSE else Whitened(curvature, u)


def centre_of(potential: Potential, curvature: Curvature) -> Tensor:
    """u (P,), the mode of the weights given the noise σ and the prior precisions τ of the highest evidence.

    The mode over all of them would not do: with as many weights as rows its noise is 0, far from the posterior.

        ∂ log p(y, w, σ) / ∂ log σ = −γ,  γ = Σ (1 − τ var w)        τ = (shape + γ_τ/2) / (rate + Σ w²/2)

    var w is the diagonal of Λ⁻¹, γ_τ the sum over the weights of that prior (MacKay 1992, Neural Computation 4:415,
    section 4, where Normal noise has σ² = Σ (y − f)² / (N − γ)). The evidence can have two maxima, so a second search
    begins at a wider prior and less noise, and the higher one counts. τ is written to ``curvature.prior_precision``.
    """
    at, order, tau = cut(torch.arange(potential.size), potential.free), curvature.order, curvature.prior_precision
    gammas = [(at[s].flatten(), prior) for s, prior in potential.priors.items() if isinstance(prior, GammaNormal)]
    is_noise = torch.zeros(potential.size, dtype=torch.bool)
    if "log_noise" in at:
        is_noise[at["log_noise"].flatten()] = True

    def density(v: Tensor, u: Tensor) -> Tensor:
        """Log density with the noise of u, and with Normal(0, 1/√τ) in place of gamma priors."""
        v = torch.where(is_noise.to(u.device), u, v)
        others = [p.log_prob(v[:, i].view(-1, *p.event_shape)) + v[:, i].square() @ tau[i] / 2 for i, p in gammas]
        return potential.log_density(v) - sum(others)

    def search(u: Tensor, wider: float) -> tuple[float, Tensor, Tensor]:
        """(log evidence up to a constant, u, τ)."""
        for i, prior in gammas:
            tau[i] = (prior.shape_ / prior.rate).double() / wider**2
        for _ in range(ROUNDS if gammas or is_noise.any() else 0):
            space, variance, change = Whitened(curvature, u), torch.zeros_like(u), torch.zeros_like(u)
            u = mode_of(partial(density, u=u), space, u)
            variance[order] = space.variances()
            determined = 1 - tau * variance
            slope = potential.gradient(u[None])[1][0, is_noise] + determined[order].sum() / is_noise.sum()
            change[is_noise] = (slope / curvature.own_precision[is_noise[order.numel() :]]).clamp(-1, 1)
            u = u + change
            for i, prior in gammas:
                of = (prior.shape_ + prior.sums(determined[i]) / 2) / (prior.rate + prior.sums(u[i].square()) / 2)
                before, tau[i] = tau[i], prior.scaled(torch.ones_like(u[i]), of)
                change[i] = (tau[i] / before).log() / 2
            if change.abs().max() < MAX_CHANGE:
                break
        else:
            u = mode_of(partial(density, u=u), Whitened(curvature, u), u)
        space = Whitened(curvature, u)
        each = ((p, p.sums(tau[i]) * p.groups / len(i)) for i, p in gammas)  # every τ
        scales = sum(((p.shape_ * t.log() - p.rate * t).sum() for p, t in each), torch.zeros(()))
        return float(density(u[None], u) + space.scale.log().sum() + scales), u, tau.clone()

    modes = [search(potential.initial, 1.0)]
    if potential.centred >= 2 and gammas and is_noise.any():
        low = torch.where(is_noise.to(potential.initial.device), potential.initial - math.log(10), potential.initial)
        modes.append(search(low, WIDER))
    _, u, tau[:] = max(modes, key=lambda one: one[0])
    return u


def mode_of(density: Callable[[Tensor], Tensor], space: Space, start: Tensor) -> Tensor:
    """The mode u (P,) of a density, (C, P) -> (C,), up to ``MAX_SLOPE``, by L-BFGS in the coordinates ``space``."""

    def evaluate(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = with_gradient(lambda z: density(space.forward(z)), torch.from_numpy(z)[None].to(start))
        return -value.item(), -slope[0].cpu().numpy()

    options = dict(jac=True, method="L-BFGS-B", options={"gtol": MAX_SLOPE, "maxiter": 200})
    u = space.forward(torch.from_numpy(minimize(evaluate, space.inverse(start).cpu().numpy(), **options).x).to(start))
    return u if torch.isfinite(u).all() else start
