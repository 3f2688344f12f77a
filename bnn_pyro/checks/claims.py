"""What the draws of a method must be like, by what it says that they converge to.

N(m, Λ⁻¹) being the posterior of linear regression:

    exact                 the posterior
    exact as lr → 0       on linear regression its stationary law at the finite step; elsewhere the posterior, less the
                          bias that its step has at the largest curvature
    best in family        the closest Normal: N(m, diag(Λ)⁻¹) of independent weights, N(m, Λ⁻¹) of any covariance
    normal at the mode    N(mode, Λ⁻¹)
    point                 the mode; without a prior, the most likely point
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.checks.check import Estimate, Finding, close, judge
from bnn_pyro.checks.integration import curvature
from bnn_pyro.checks.problems import Problem
from bnn_pyro.diagnostics.draws import sized
from bnn_pyro.inference import Method
from bnn_pyro.inference.log_joint import LogJoint, elbo_of
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.correlated_normal import FullNormal, LowRankNormal
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.local_net import WeightGuide
from bnn_pyro.posterior import Posterior, split_frozen
from bnn_pyro.predictive import predict

#: Draws of a guide that are compared, and that estimate an ELBO.
DRAWS, PARTICLES = 4000, 400


class Claim(NamedTuple):
    """What is right of the quantities of a problem, in words and numbers.

    low, high  (M,) between which each expectation lies
    tolerance  what each may be off besides, (M,) or one for all
    normal     mean (P,) and covariance (P, P), where it is a Normal
    level      of a quantity that is not, (M,) or one for all
    """

    name: str
    low: np.ndarray
    high: np.ndarray
    tolerance: Any = 0.0
    normal: tuple[Tensor, Tensor] | None = None
    level: str | np.ndarray = "bad"


def claim_of(problem: Problem, converges_to: str, method: Method, posterior: Posterior) -> Claim:
    """What is right of the draws of a method on a problem.   posterior: one of those that it gave."""
    exact = Claim("the exact posterior", problem.exact, problem.exact)
    if converges_to == "exact":
        return exact
    if converges_to == "exact as lr → 0":
        if "energy_error" in posterior.stats:
            squared = posterior.stats["energy_error"].square().mean().item()
            bounds = exact.low, exact.high, (16 * squared) ** (1 / 3) / 4 * np.maximum(np.abs(problem.exact), 1.0)
        else:
            bounds = problem.stationary(method)
        return Claim("the posterior, but for the bias of a finite step", *bounds)
    prior_weight = getattr(method, "prior_weight", 1.0)
    mode = problem.mode(prior_weight)
    if converges_to == "point":
        name = "the most probable point" if prior_weight else "the most likely point"
        return _normal(problem, name, mode, torch.zeros_like(mode).diag(), problem.stops)
    if converges_to == "normal at the mode":
        return _normal(problem, "the Normal at the mode", mode, torch.linalg.inv(curvature(problem.log_joint, mode)))
    guide, independent = posterior.guide, isinstance(posterior.guide, MeanFieldNormal | WeightGuide)
    rank = problem.size if isinstance(guide, FullNormal) else 0
    rank = guide.factor.shape[1] if isinstance(guide, LowRankNormal) else rank
    if not (independent or rank >= problem.size - 1):  # of the best of these, linear regression alone knows the mean
        means = np.arange(len(problem.exact)) < problem.size + len(problem.x)
        level = np.where(means & problem.is_linear, "bad", "caution")
        return exact._replace(tolerance=problem.stops, level=level)
    name = "the best mean-field Normal" if independent else "the best Normal of any covariance"
    return _normal(problem, name, *problem.best_normal(mode, not independent), problem.stops)


def _normal(problem: Problem, name: str, mean: Tensor, covariance: Tensor, tolerance: float = 0.0) -> Claim:
    expected = problem.expect(problem.normal(mean, covariance))
    return Claim(name, expected, expected, tolerance, (mean, covariance))


def drawn(problem: Problem, posterior: Posterior, seed: int) -> tuple[Tensor, Tensor]:
    """Weights (C, D, P) and outputs (C, D, B) of chains, or of one "chain" of independent draws; float64."""
    lead = sized(posterior, DRAWS)
    sites = posterior.draw(lead[0] * lead[1], seed=seed)
    w = torch.cat([sites[site].double().flatten(1) for site in posterior.model.initial], 1)
    f = predict(posterior, problem.new, num_draws=len(w), seed=seed).output_values()  # (S, B, K or 1)
    inputs = torch.arange(len(problem.x))
    return w.unflatten(0, lead), f[:, inputs, inputs % f.shape[2]].unflatten(0, lead)


def density_findings(problem: Problem, method: Method, posterior: Posterior) -> list[Finding]:
    """The log joint of the variant's own model beside the formula, at a few weights."""
    model, x = split_frozen(posterior.model, problem.data.x_train)
    joint = LogJoint(model, x, problem.data.y_train, getattr(method, "temperature", 1.0))
    weights = torch.linspace(-2, 2, 10)[:, None] * torch.cos(torch.arange(joint.size))
    expected = problem.log_joint(weights.double())
    with torch.no_grad():
        off = (joint.log_density(weights).double() - expected).abs().max().item()
    about = f"the model's log joint less the formula's, at most (nats, {problem.title})"
    return [close(about, off, 0.0, 1e-3 + 1e-5 * expected.abs().max().item())]


def evidence_findings(problem: Problem, method: Method, posteriors: Sequence[Posterior], claim: Claim) -> list[Finding]:
    """The log evidence that a fit of linear regression reports, or the ELBO of its q, lower by KL(q ‖ posterior)."""
    if not problem.is_linear or getattr(method, "temperature", 1.0) != 1.0 or claim.normal is None:
        return []
    if "log_evidence" in posteriors[0].stats:
        expected, estimate = problem.elbo(*claim.normal), posteriors[0].stats["log_evidence"].item()
        return [close("log evidence (nats)", estimate, expected, 1e-5 * abs(expected))]
    if not claim.normal[1].any() or len(posteriors) < 2:
        return []
    pairs, x, y = [], problem.data.x_train, problem.data.y_train
    for i, posterior in enumerate(posteriors):
        with isolated(i), torch.no_grad():
            estimate = elbo_of(posterior.model, posterior.guide, x, y, particles=PARTICLES)[0].item()
        q = drawn(problem, posterior, i)[0][0]  # of a Normal, whose moments tell all of it
        pairs.append((estimate, problem.elbo(q.mean(0), q.mT.cov())))
    estimates, expected = np.array(pairs).T
    about = "ELBO of the fitted q (nats), beside the evidence less KL(q ‖ posterior)"
    off = Estimate.of_independent((estimates - expected)[:, None])
    (finding,) = judge([about], off, np.zeros(1), tests=len(claim.low))
    return [replace(finding, estimate=float(estimates.mean()), expected=float(expected.mean()))]
