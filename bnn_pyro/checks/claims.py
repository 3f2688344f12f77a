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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.checks.check import Finding
from bnn_pyro.checks.problems import Problem, drawn
from bnn_pyro.checks.z_tests import Estimate, close, judge, of_chains, of_independent, of_runs, z_scores
from bnn_pyro.inference import Method
from bnn_pyro.inference.elbo import ELBO
from bnn_pyro.inference.log_joint import log_joints
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import once
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.joint import FullNormal, LowRankNormal
from bnn_pyro.parts.local_net import WeightGuide
from bnn_pyro.posterior import Posterior

__all__ = ["REFITTED", "Claim", "claim_of", "density_findings", "estimate_of", "evidence_findings"]

#: Methods that give a guide or points, whose own randomness is seen by fitting again and again.
REFITTED = ("best in family", "point")
#: Draws that estimate an ELBO.
PARTICLES = 400


@dataclass(frozen=True)
class Claim:
    """What is right of the quantities of a problem.

    name       in words
    low, high  (M,) between which each expectation lies; NaN where nothing is known
    tolerance  what each may be off besides, (M,) or one for all
    normal     mean (P,) and covariance (P, P), where it is a Normal
    """

    name: str
    low: np.ndarray
    high: np.ndarray
    tolerance: Any = 0.0
    normal: tuple[Tensor, Tensor | None] | None = None

    @property
    def known(self) -> np.ndarray:
        """Which of the quantities are known (M,)."""
        return np.isfinite(self.low)


def estimate_of(converges_to: str, values: np.ndarray) -> Estimate:
    """Expectations of (C, D, M) values with their Monte-Carlo errors: C chains, or C independent fits."""
    if converges_to == "exact":
        return of_chains(values)
    return of_independent(values[0]) if len(values) == 1 else of_runs(values.mean(1))


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
        low, high, tolerance = problem.stationary(method)
        return Claim("the posterior, but for the bias of a finite step", low, high, tolerance)
    prior_weight = getattr(method, "prior_weight", 1.0)
    mode = problem.mode(prior_weight)
    if converges_to == "point":
        name = "the most probable point" if prior_weight else "the most likely point"
        return _normal(problem, name, mode, torch.zeros(weights, weights).double(), problem.stops)
    if converges_to == "normal at the mode":
        name = "the Normal at the mode ({} curvature)"
        stated, precisions = getattr(method, "curvature", None), problem.precisions(mode)
        claims = [
            _normal(problem, name.format(kind), mode, torch.linalg.inv(precision))
            for kind, precision in precisions.items()
            if stated not in precisions or kind == stated
        ]
        if not claims:
            return _normal(problem, "the Normal at the mode", None, None)
        return min(claims, key=lambda c: np.abs(z_scores(estimate, c.low)).max())
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
    unknown = np.full(len(problem.labels()), np.nan)
    expected = unknown if mean is None else problem.expect(mean, covariance)
    return Claim(name, expected, expected, tolerance, None if mean is None else (mean, covariance))


def density_findings(problem: Problem, method: Method, posteriors: Sequence[Posterior]) -> list[Finding]:
    """The log joint of the variant's own model beside the formula, at a few weights."""
    posterior, data = posteriors[0], problem.data
    size = sum(value.numel() for value in posterior.model.initial.values())
    weights = torch.linspace(-2, 2, 10)[:, None] * torch.cos(torch.arange(size))
    expected = problem.log_joint(weights.double())
    if expected is None:
        return []
    model, x = once(posterior.model, data.x_train)
    shapes = {site: value.shape for site, value in posterior.model.initial.items()}
    pieces = weights.split([shape.numel() for shape in shapes.values()], 1)
    sites = {site: piece.reshape(-1, *shape) for (site, shape), piece in zip(shapes.items(), pieces, strict=True)}
    temperature = getattr(method, "temperature", 1.0)
    off = (sum(log_joints(model, sites, x, data.y_train, 1.0 / temperature)).double() - expected).abs().max().item()
    about = f"the model's log joint less the formula's, at most (nats, {problem.title})"
    return [close(about, off, 0.0, 1e-3 + 1e-5 * expected.abs().max().item())]


def evidence_findings(problem: Problem, method: Method, posteriors: Sequence[Posterior], claim: Claim) -> list[Finding]:
    """The log evidence that a method reports, and its ELBO: both the evidence less KL(q ‖ posterior)."""
    posterior, normal = posteriors[0], claim.normal
    if getattr(method, "temperature", 1.0) != 1.0 or normal is None or normal[1] is None:
        return []
    if "log_evidence" in posterior.stats:
        expected = problem.elbo(*normal)
        estimate = posterior.stats["log_evidence"].item()
        return [close("log evidence (nats)", estimate, expected, 1e-5 * abs(expected))] if expected is not None else []
    if posterior.guide is None or len(posteriors) < 2:
        return []
    pairs = []
    for seed, posterior in enumerate(posteriors):
        draws = drawn(problem, posterior, seed)[0][0]
        expected = problem.elbo(draws.mean(0), draws.mT.cov())
        if expected is None:
            return []
        with isolated(seed), torch.no_grad():
            x, y = problem.data.x_train, problem.data.y_train
            some = [ELBO().parts(posterior.model, posterior.guide, x, y)[0] for _ in range(PARTICLES)]
        pairs.append((torch.stack(some).double().mean().item(), expected))
    about = "ELBO of the fitted q (nats), beside the evidence less KL(q ‖ posterior)"
    (finding,) = judge([about], of_runs(np.array([[a - b] for a, b in pairs])), np.zeros(1))
    estimate, expected = np.mean(pairs, axis=0)
    return [replace(finding, estimate=float(estimate), expected=float(expected))]
