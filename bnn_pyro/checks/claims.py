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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.checks.check import Estimate, Finding, close, judge, z_scores
from bnn_pyro.checks.problems import Problem, drawn
from bnn_pyro.inference import Method
from bnn_pyro.inference.log_joint import ELBO, LogJoint
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import once
from bnn_pyro.parts.correlated_normal import FullNormal, LowRankNormal
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.local_net import WeightGuide
from bnn_pyro.posterior import Posterior

__all__ = ["Claim", "claim_of", "density_findings", "evidence_findings"]

#: Draws that estimate an ELBO.
PARTICLES = 400


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


def claim_of(
    problem: Problem, converges_to: str, method: Method, posterior: Posterior, weights: int, estimate: Estimate
) -> Claim:
    """What is right of the draws of a method on a problem.

    posterior: one of those that it gave.   weights: P.
    estimate: of the quantities, for the nearest of several curvatures.
    """
    if converges_to == "exact":
        return Claim("the exact posterior", problem.posterior.mean, problem.posterior.mean)
    if converges_to == "exact as lr → 0":
        return Claim("the posterior, but for the bias of a finite step", *problem.stationary(method))
    prior_weight = getattr(method, "prior_weight", 1.0)
    mode = problem.mode(prior_weight)
    if converges_to == "point":
        name = "the most probable point" if prior_weight else "the most likely point"
        return _normal(problem, name, mode, torch.zeros(weights, weights).double(), problem.stops)
    if converges_to == "normal at the mode":
        stated, precisions = getattr(method, "curvature", None), problem.precisions(mode)
        claims = [
            _normal(problem, f"the Normal at the mode ({kind} curvature)", mode, torch.linalg.inv(precision))
            for kind, precision in precisions.items()
            if stated not in precisions or kind == stated
        ]
        nearest = lambda claim: np.abs(z_scores(estimate, claim.low)).max()  # noqa: E731
        return min(claims, key=nearest) if claims else _normal(problem, "the Normal at the mode", None, None)
    guide, independent = posterior.guide, isinstance(posterior.guide, MeanFieldNormal | WeightGuide)
    rank = weights if isinstance(guide, FullNormal) else 0
    rank = guide.factor.shape[1] if isinstance(guide, LowRankNormal) else rank
    if mode is None or not (independent or rank >= weights - 1):
        return _normal(problem, f"the best {type(guide).__name__}", mode, None, problem.stops)
    name = "the best mean-field Normal" if independent else "the best Normal of any covariance"
    return _normal(problem, name, *problem.best_normal(mode, not independent), problem.stops)


def _normal(
    problem: Problem, name: str, mean: Tensor | None, covariance: Tensor | None, tolerance: float = 0.0
) -> Claim:
    if mean is None:
        unknown = np.full(len(problem.labels()), np.nan)
        return Claim(name, unknown, unknown, tolerance)
    expected = problem.expect(mean, covariance)
    return Claim(name, expected, expected, tolerance, (mean, covariance))


def density_findings(problem: Problem, method: Method, posterior: Posterior) -> list[Finding]:
    """The log joint of the variant's own model beside the formula, at a few weights."""
    model, x = once(posterior.model, problem.data.x_train)
    joint = LogJoint(model, x, problem.data.y_train, getattr(method, "temperature", 1.0))
    weights = torch.linspace(-2, 2, 10)[:, None] * torch.cos(torch.arange(joint.size))
    if (expected := problem.log_joint(weights.double())) is None:
        return []
    with torch.no_grad():
        off = (joint.log_density(weights).double() - expected).abs().max().item()
    about = f"the model's log joint less the formula's, at most (nats, {problem.title})"
    return [close(about, off, 0.0, 1e-3 + 1e-5 * expected.abs().max().item())]


def evidence_findings(problem: Problem, method: Method, posteriors: Sequence[Posterior], claim: Claim) -> list[Finding]:
    """The log evidence that a method reports, and its ELBO: both the evidence less KL(q ‖ posterior)."""
    posterior, normal = posteriors[0], claim.normal
    if getattr(method, "temperature", 1.0) != 1.0 or normal is None or normal[1] is None:
        return []
    if "log_evidence" in posterior.stats:
        expected, estimate = problem.elbo(*normal), posterior.stats["log_evidence"].item()
        return [] if expected is None else [close("log evidence (nats)", estimate, expected, 1e-5 * abs(expected))]
    if posterior.guide is None or len(posteriors) < 2:
        return []
    pairs = []
    for seed, posterior in enumerate(posteriors):
        draws = drawn(problem, posterior, seed)[0][0]
        if (expected := problem.elbo(draws.mean(0), draws.mT.cov())) is None:
            return []
        with isolated(seed), torch.no_grad():
            x, y = problem.data.x_train, problem.data.y_train
            some = [ELBO().parts(posterior.model, posterior.guide, x, y)[0] for _ in range(PARTICLES)]
        pairs.append((torch.stack(some).double().mean().item(), expected))
    about = "ELBO of the fitted q (nats), beside the evidence less KL(q ‖ posterior)"
    (finding,) = judge([about], Estimate.of_runs(np.array([[a - b] for a, b in pairs])), np.zeros(1))
    estimate, expected = np.mean(pairs, axis=0)
    return [replace(finding, estimate=float(estimate), expected=float(expected))]
