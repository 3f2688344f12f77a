"""What the draws of a method must be like, by what it says that they converge to.

N(m, Λ⁻¹) being the posterior of linear regression:

    exact                 the posterior
    exact as lr → 0       on linear regression its stationary law at the finite step; elsewhere the posterior, less the
                          bias that its step has at the largest curvature
    best in family        the closest Normal: N(m, diag(Λ)⁻¹) of independent weights, N(m, Λ⁻¹) of any covariance
    normal at the mode    N(mode, Λ⁻¹), or with what may stand for Λ: its diagonal, or a Kronecker product: the one
                          that a method states in ``curvature``, or the nearest where it states none
    point                 the mode; without a prior, the most likely point
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.checks.check import Estimate, Finding, close, z_scores
from bnn_pyro.checks.problems import Problem
from bnn_pyro.inference import Method
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.parts.backbone import once
from bnn_pyro.parts.correlated_normal import FullNormal, LowRankNormal
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.local_net import WeightGuide
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import predict

__all__ = ["Claim", "claim_of", "density_findings", "drawn", "evidence_findings"]

#: Draws of a guide that are compared.
DRAWS = 4000


class Claim(NamedTuple):
    """What is right of the quantities of a problem, in words and numbers.

    low, high  (M,) between which each expectation lies; NaN where nothing is known
    tolerance  what each may be off besides, (M,) or one for all
    normal     mean (P,) and covariance (P, P), where it is a Normal
    """

    name: str
    low: np.ndarray
    high: np.ndarray
    tolerance: Any = 0.0
    normal: tuple[Tensor, Tensor | None] | None = None


def claim_of(problem: Problem, converges_to: str, method: Method, posterior: Posterior, estimate: Estimate) -> Claim:
    """What is right of the draws of a method on a problem.

    posterior: one of those that it gave.   estimate: of the quantities, for the nearest of several curvatures.
    """
    if converges_to == "exact":
        return Claim("the exact posterior", problem.exact, problem.exact)
    if converges_to == "exact as lr → 0":
        return Claim("the posterior, but for the bias of a finite step", *problem.stationary(method))
    prior_weight = getattr(method, "prior_weight", 1.0)
    mode = problem.mode(prior_weight)
    if converges_to == "point":
        name = "the most probable point" if prior_weight else "the most likely point"
        return _normal(problem, name, mode, torch.zeros_like(mode).diag(), problem.stops)
    if converges_to == "normal at the mode":
        stated, precisions = getattr(method, "curvature", None), problem.precisions(mode)
        claims = [
            _normal(problem, f"the Normal at the mode ({kind} curvature)", mode, torch.linalg.inv(precision))
            for kind, precision in precisions.items()
            if stated not in precisions or kind == stated
        ]
        return min(claims, key=lambda claim: np.abs(z_scores(estimate, claim.low)).max())
    guide, independent = posterior.guide, isinstance(posterior.guide, MeanFieldNormal | WeightGuide)
    rank = problem.size if isinstance(guide, FullNormal) else 0
    rank = guide.factor.shape[1] if isinstance(guide, LowRankNormal) else rank
    if not (independent or rank >= problem.size - 1):
        return _normal(problem, f"the best {type(guide).__name__}", mode, None, problem.stops)
    name = "the best mean-field Normal" if independent else "the best Normal of any covariance"
    return _normal(problem, name, *problem.best_normal(mode, not independent), problem.stops)


def _normal(problem: Problem, name: str, mean: Tensor, covariance: Tensor | None, tolerance: float = 0.0) -> Claim:
    expected = problem.expect(mean, covariance)
    return Claim(name, expected, expected, tolerance, (mean, covariance))


def drawn(problem: Problem, posterior: Posterior, seed: int) -> tuple[Tensor, Tensor]:
    """Weights (C, D, P) and outputs (C, D, B) of chains, or of one "chain" of independent draws; float64."""
    chains = None if posterior.chains is None else next(iter(posterior.chains.values())).shape[:2]
    lead = (1, DRAWS) if chains is None else tuple(chains)
    sites = posterior.draw(lead[0] * lead[1], seed=seed)
    w = torch.cat([sites[site].double().flatten(1) for site in posterior.model.initial], 1)
    f = predict(posterior, problem.x.float(), num_draws=len(w), seed=seed).mixture.output_values()[..., 0]
    return w.unflatten(0, lead), f.unflatten(0, lead)


def density_findings(problem: Problem, method: Method, posterior: Posterior) -> list[Finding]:
    """The log joint of the variant's own model beside the formula, at a few weights."""
    model, x = once(posterior.model, problem.data.x_train)
    joint = LogJoint(model, x, problem.data.y_train, getattr(method, "temperature", 1.0))
    weights = torch.linspace(-2, 2, 10)[:, None] * torch.cos(torch.arange(joint.size))
    expected = problem.log_joint(weights.double())
    with torch.no_grad():
        off = (joint.log_density(weights).double() - expected).abs().max().item()
    about = f"the model's log joint less the formula's, at most (nats, {problem.title})"
    return [close(about, off, 0.0, 1e-3 + 1e-5 * expected.abs().max().item())]


def evidence_findings(problem: Problem, method: Method, posterior: Posterior, claim: Claim) -> list[Finding]:
    """The log evidence that a method reports of linear regression: the exact one less KL(q ‖ posterior)."""
    temperature = getattr(method, "temperature", 1.0)
    if problem.known is None or temperature != 1.0 or "log_evidence" not in posterior.stats:
        return []
    expected, estimate = problem.elbo(*claim.normal), posterior.stats["log_evidence"].item()
    return [close("log evidence (nats)", estimate, expected, 1e-5 * abs(expected))]
