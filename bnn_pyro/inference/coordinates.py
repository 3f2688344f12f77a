"""Coordinates in which a posterior is about as wide in all directions: of a linear model, and of gamma priors.

Of a linear model f = W φ(x) with Λ, the curvature of its log joint (``linear``):

    up to DENSE weights:   z = Rᵀ w,  R Rᵀ = Λ at the centre
    above, by Kronecker:   w = τ v,  Λ_v ≈ C ⊗ G + 1,  C = U diag(c) Uᵀ,  G = Q diag(g) Qᵀ,
                           z_ij = (Uᵀ V Q)_ij (c_i g_j + 1)^(1/2)

τ is the prior's scale, G the Gram matrix of φ, every row weighted by the trace of its I_n, and C their mean (Martens &
Grosse 2015, arXiv:1503.05671). In the weights themselves the widest direction of the posterior can be a hundred times
the narrowest. A linear change of coordinates alters no draw's distribution, however rough the approximation.

Of other models gamma priors give their scales back, see :class:`NonCentred`.
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

#: The largest slope, in nats per standard deviation or so, at which a place will do for the mode.
MAX_SLOPE = 0.01
#: Rounds at most to find scales that are learned, the last of which changes log σ by so much at most.
ROUNDS, MAX_CHANGE = 30, 0.05
#: How much wider the prior is where the second search for these scales begins.
WIDER = 100.0
#: Weights up to which Λ is used as it is: 4,096 make a matrix of 67 MB.
DENSE = 4096


class Rounded(Space):
    """z = Rᵀ u, R Rᵀ = Λ at u (P,)."""

    whitened = True

    def __init__(self, curvature: Curvature, u: Tensor) -> None:
        self.root = torch.linalg.cholesky(curvature.precision(u, summed))
        eye = torch.eye(len(u), dtype=u.dtype, device=u.device)
        # In single precision, half the memory to read: any fixed matrix will do.
        self.map = torch.linalg.solve_triangular(self.root.mT, eye, upper=True).float()

    def forward(self, z: Tensor) -> Tensor:
        """z (…, P) -> u (…, P)."""
        return (z.float() @ self.map.mT).double()

    def inverse(self, u: Tensor) -> Tensor:
        """u (…, P) -> z (…, P)."""
        return u @ self.root


class Whitened(Space):
    """By Kronecker factors of Λ at u (P,)."""

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
    """w = v eᵗ of each parameter with a gamma prior, which has one t: v ~ Normal(0, I), e⁻²ᵗ = τ ~ Gamma(shape, rate).

    z (…, P + T) are v and the other numbers, then the T scales t. Where the prior has τ integrated out, all of w has to
    move for its scale to change, and a step is too long for small scales or too short for large ones; here t moves by
    itself (Papaspiliopoulos, Roberts & Sköld 2007, doi:10.1214/088342307000000014).
    """

    def __init__(self, potential: Potential) -> None:
        self.sizes = [shape.numel() for shape in potential.free.values()]
        self.priors = [prior if isinstance(prior, GammaNormal) else None for prior in potential.priors.values()]

    def _parts(self, z: Tensor) -> Iterator[tuple[Tensor, GammaNormal | None, Tensor]]:
        """(numbers (…, n) of a site, its gamma prior, t (…, groups), which is 0 without one)."""
        *parts, t = z.split([*self.sizes, z.shape[-1] - sum(self.sizes)], -1)
        scales = iter(t.split([prior.groups for prior in self.priors if prior], -1))
        for part, prior in zip(parts, self.priors, strict=True):
            yield part, prior, next(scales) if prior else torch.zeros_like(part[..., :1])

    def forward(self, z: Tensor) -> Tensor:
        """z (…, P + T) -> u (…, P)."""
        return torch.cat([prior.scaled(part, t.exp()) if prior else part for part, prior, t in self._parts(z)], -1)

    def inverse(self, u: Tensor) -> Tensor:
        """u (…, P) -> z (…, P + T), each t drawn from its distribution given w; call inside ``isolated``."""
        parts, scales = list(u.split(self.sizes, -1)), []
        for i, prior in enumerate(self.priors):
            if prior:
                precision = Gamma(*prior.given(parts[i]), validate_args=False).sample()
                scales.append(-0.5 * precision.log())
                parts[i] = prior.scaled(parts[i], (-scales[-1]).exp())
        return torch.cat([*parts, *scales], -1)

    def extra(self, z: Tensor) -> Tensor:
        """log p(t | w) + log |∂w/∂v|, by which the density of z exceeds that of u."""
        total = z.new_zeros(z.shape[:-1])
        for v, prior, t in self._parts(z):
            if prior:
                shape, rate = prior.given(prior.scaled(v, t.exp()))
                each = shape * rate.log() - rate * (-2 * t).exp() - 2 * prior.shape_ * t
                total = total + (each + math.log(2) - torch.lgamma(shape)).sum(-1)
        return total


def coordinates(potential: Potential) -> Space:
    """Rounded at the centre of a linear model, else NonCentred or plain; call inside ``isolated``.

    The centre becomes the potential's initial numbers, around which chains start. A run that an earlier version began,
    as ``potential.centred`` says, has the coordinates that it began with, as it recorded positions in them.
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
    """u (P,), the mode of the weights given scales of the highest evidence; of gamma priors the curvature takes them.

    The most probable of all together is of no use: with as many weights as rows a noise of 0, where no posterior is.

        ∂ log p(y, w, σ) / ∂ log σ = −γ,  γ = Σ (1 − τ var w)        τ = (shape + γ_τ/2) / (rate + Σ w²/2)

    var w is the diagonal of Λ⁻¹, γ_τ the sum over the weights of that prior (MacKay 1992, Neural Computation 4:415,
    section 4, where Normal noise has σ² = Σ (y − f)² / (N − γ)). The evidence can have two maxima, so that a second
    search begins at weights ``WIDER`` times as large and a tenth of the noise; the higher one counts.
    """
    at, order, tau = cut(torch.arange(potential.size), potential.free), curvature.order, curvature.prior_precision
    gammas = [(at[s].flatten(), prior) for s, prior in potential.priors.items() if isinstance(prior, GammaNormal)]
    held = torch.zeros(potential.size, dtype=torch.bool)
    if "log_noise" in at:
        held[at["log_noise"].flatten()] = True

    def density(v: Tensor, u: Tensor) -> Tensor:
        """At the noise of u, and gamma priors as Normal ones."""
        v = torch.where(held.to(u.device), u, v)
        others = [p.log_prob(v[:, i].view(-1, *p.event_shape)) + v[:, i].square() @ tau[i] / 2 for i, p in gammas]
        return potential.log_density(v) - sum(others)

    def search(u: Tensor, wider: float) -> tuple[float, Tensor, Tensor]:
        """(log evidence up to a constant, u, τ)."""
        for i, prior in gammas:
            tau[i] = (prior.shape_ / prior.rate).double() / wider**2
        for _ in range(ROUNDS if gammas or held.any() else 0):
            space, variance, change = Whitened(curvature, u), torch.zeros_like(u), torch.zeros_like(u)
            u = mode_of(partial(density, u=u), space, u)
            variance[order] = space.variances()
            known = 1 - tau * variance
            slope = potential.gradient(u[None])[1][0, held] + known[order].sum() / held.sum()
            change[held] = (slope / curvature.own_precision[held[order.numel() :]]).clamp(-1, 1)
            u = u + change
            for i, prior in gammas:
                of = (prior.shape_ + prior.sums(known[i]) / 2) / (prior.rate + prior.sums(u[i].square()) / 2)
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

    found = [search(potential.initial, 1.0)]
    if potential.centred >= 2 and gammas and held.any():
        low = torch.where(held.to(potential.initial.device), potential.initial - math.log(10), potential.initial)
        found.append(search(low, WIDER))
    _, u, tau[:] = max(found, key=lambda one: one[0])
    return u


def mode_of(density: Callable[[Tensor], Tensor], space: Space, start: Tensor) -> Tensor:
    """The u (P,) of the highest density, (C, P) -> (C,), or near enough: L-BFGS in the coordinates given."""

    def evaluate(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = with_gradient(lambda z: density(space.forward(z)), torch.from_numpy(z)[None].to(start))
        return -value.item(), -slope[0].cpu().numpy()

    how = dict(jac=True, method="L-BFGS-B", options={"gtol": MAX_SLOPE, "maxiter": 200})
    u = space.forward(torch.from_numpy(minimize(evaluate, space.inverse(start).cpu().numpy(), **how).x).to(start))
    return u if torch.isfinite(u).all() else start
