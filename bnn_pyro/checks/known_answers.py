"""A method on problems whose posterior is known in closed form or by numerical integration.

A problem (``problems``) consists of data and exact expectations. The draws of a method must agree, within their
Monte-Carlo errors, with what it claims to converge to, where N(m, Λ⁻¹) is the posterior of linear regression:

    exact                 the posterior
    exact as lr → 0       for linear regression the stationary distribution at the finite step; for other problems the
                          posterior, up to the bias of the step at the largest curvature
    best in family        the closest Normal: N(m, diag(Λ)⁻¹) of independent weights, N(m, Λ⁻¹) of any covariance
    normal at the mode    N(mode, Λ⁻¹)
    point                 the mode; without a prior, the most likely point
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.checks.check import Check, Estimate, Finding, Outcome, Subject, close, concluded, judge, worst
from bnn_pyro.checks.integration import curvature
from bnn_pyro.checks.problems import TWO_WEIGHTS, Problem, linear_regression, six_weights, softmax_regression
from bnn_pyro.checks.user_module import linear_module
from bnn_pyro.diagnostics.draws import sized
from bnn_pyro.fitting import fit
from bnn_pyro.inference import Method
from bnn_pyro.inference.log_joint import LogJoint, elbo_of
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.correlated_normal import FullNormal, LowRankNormal
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.local_net import WeightGuide
from bnn_pyro.posterior import Posterior, split_frozen
from bnn_pyro.predictive import predict
from bnn_pyro.progress import Report

#: Monte-Carlo error, in posterior standard deviations, above which a comparison is inconclusive.
BLIND = 0.1
#: Claims of methods that return a guide or points, whose randomness is estimated from several fits.
REFITTED = ("best in family", "point")
#: Number of draws of a guide that are compared, and that estimate an ELBO.
DRAWS, PARTICLES = 4000, 400


@dataclass(frozen=True)
class KnownAnswers(Check):
    """Base class of the checks below. A subclass has ``problems(subject)``, on which the subject is checked.

    fits    number of independent fits of a method that returns a guide or points
    effort  length of runs and trainings relative to the quick budget
    """

    fits: int = 24
    effort: float = 4.0

    name: ClassVar[str]
    quick: ClassVar[Mapping[str, Any]] = {"fits": 8, "effort": 1.0}

    def _refuses(self, subject: Subject) -> str:
        return subject.irreducible()

    def _run(self, subject: Subject, seed: int, report: Report) -> Outcome:
        problems, findings, settings = self.problems(subject), [], {}
        cases = [(problem, 0) for problem in problems]
        if hasattr(subject.kind, "eta_share") and not subject.given.get("batch_size"):  # takes mini-batches
            cases += [(problem, len(problem.inputs) // problem.batches) for problem in problems if problem.batches > 1]
        for k, (problem, batch_size) in enumerate(cases):
            claim, used, new_findings = _compare(problem, subject, self, seed, len(cases), batch_size)
            findings, settings = findings + new_findings, settings or used
            report(k + 1, len(cases), {"problem": problem.title})
        ratio = next(f.estimate for f in findings if f.about.startswith("standard deviation of the weights"))
        sentences = [f"On {' and '.join(p.title for p in problems)} this is {no}{claim}" for no in ("", "not ")]
        return concluded(self.name, findings, settings, *sentences, figures={self.name.replace("-", "_"): ratio})


@dataclass(frozen=True)
class ClosedForm(KnownAnswers):
    """Without hidden layers, with a Normal prior and a known noise, the network is Bayesian linear regression: means,
    covariances, predictions and the evidence are compared with the formulas.
    """

    name: ClassVar[str] = "closed-form"
    title: ClassVar[str] = "Closed forms"

    def _refuses(self, subject: Subject) -> str:
        return "" if subject.own_module and linear_module(subject) else super()._refuses(subject)

    def problems(self, subject: Subject) -> list[Problem]:
        """Linear regression, for a user's module on rows of its own data."""
        return [linear_module(subject) if subject.own_module else linear_regression(200, 4, 8)]


@dataclass(frozen=True)
class Quadrature(KnownAnswers):
    """Logistic regression with two weights, and one tanh unit, whose posterior has two modes that differ in sign:
    means, covariances and predictions are compared with integrals over a grid.
    """

    name: ClassVar[str] = "quadrature"
    title: ClassVar[str] = "Numerical integration"

    def problems(self, subject: Subject) -> list[Problem]:
        """The problems of two weights to which the variant and the method can be reduced."""
        return [p for p in TWO_WEIGHTS.values() if not subject.irreducible(p.settings["hidden"])]


@dataclass(frozen=True)
class Logistic(KnownAnswers):
    """Logistic regression with six weights and two classes, or nine weights and three classes for samplers and Laplace:
    means, covariances and predictions are compared with importance sampling with 32,768 quasi-random points.
    """

    name: ClassVar[str] = "logistic"
    title: ClassVar[str] = "Logistic regression"
    quick: ClassVar[Mapping[str, Any]] = {"effort": 1.0, "fits": 6}

    def problems(self, subject: Subject) -> list[Problem]:
        """Two classes for methods that are fitted several times, else three."""
        return [six_weights(60, 5, 10) if subject.converges_to in REFITTED else softmax_regression(50, 2, 10)]


def problem_method(problem: Problem, subject: Subject, effort: float, **settings: Any) -> Method:
    """The subject's method with sufficient settings for a problem."""
    if problem.batches > 1 and not subject.exact:
        settings = {"batch_size": len(problem.inputs) // problem.batches, **settings}
    return subject.tiny_method(effort * problem.length, effort / problem.batches, **settings)


def _compare(
    problem: Problem, subject: Subject, check: KnownAnswers, seed: int, tests: int, batch_size: int = 0
) -> tuple[str, dict[str, Any], list[Finding]]:
    """(the claim, settings, findings: draws against the claim, and their difference to the posterior itself).

    tests: number of comparisons of the check.   batch_size: of stochastic gradients, which then take a smaller step.
    """
    method, to = problem_method(problem, subject, check.effort), subject.converges_to
    if batch_size:
        smaller = {"batch_size": batch_size, "lr": method.lr / 5}
        method = problem_method(problem, subject, check.effort / problem.batches, **smaller)
    temperature = getattr(method, "temperature", 1.0)
    problem = replace(problem, temperature=temperature, one_mode=problem.unit and not subject.exact)
    entry = subject.reduced(**problem.settings)
    fits = check.fits if to in REFITTED else 1
    posteriors = [fit(entry, problem.data, method, seed=seed + i, device="cpu", progress=False) for i in range(fits)]
    pairs = [drawn(problem, posterior, i) for i, posterior in enumerate(posteriors)]
    w, f = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    values = problem.quantities(w, f).numpy()
    means = values[0] if len(values) == 1 else values.mean(1)
    estimate = Estimate.of_chains(values) if to == "exact" else Estimate.of_independent(means)
    claim, bounds, normal = claim_of(problem, to, method, posteriors[0])
    title = f"{problem.title}{', mini-batches' if batch_size else ''}"
    labels = [f"{label} ({title})" for label in problem.labels()]
    if subject.exact:  # chains of one posterior
        w, f = (v.flatten(0, 1)[None] for v in (w, f))
    findings = judge(labels, estimate, **bounds, tests=tests)
    if (noisy := float(estimate.error[: problem.size + len(problem.x)].max())) > BLIND:  # of means
        about = f"Monte-Carlo error ({title}, posterior sd): too few independent draws to tell"
        findings.append(Finding(about, noisy, BLIND, level="caution"))
    findings += density_findings(problem, method, posteriors[0])
    findings += evidence_findings(problem, method, posteriors, normal)
    # All fits have the same limit, so that their draws together estimate it more precisely.
    together = Estimate.of_independent(values.reshape(-1, values.shape[-1])) if fits > 1 else estimate
    options = dict(tolerance=problem.stops, level="caution", tests=tests)
    level = worst(x.level for x in judge(labels, together, problem.exact, **options))
    # The difference to the posterior, in posterior standard deviations.
    unit, size = problem.units(w, f), problem.size
    sd, mean = unit.std(1, correction=0).mean(0), unit.mean((0, 1))
    share = f"standard deviation of the {{}} as a share of the posterior's, mean ({title})"
    distance = f"distance of mean predictions from the posterior's, in its standard deviations, mean ({title})"
    findings += [
        Finding(share.format("weights"), sd[:size].mean().item(), 1.0, level=level),
        Finding(share.format("predictions"), sd[size:].mean().item(), 1.0, level=level),
        Finding(distance, mean[size:].abs().mean().item(), 0.0, level=level),
    ]
    return claim, subject.settings(method, entry), findings


def claim_of(
    problem: Problem, converges_to: str, method: Method, posterior: Posterior
) -> tuple[str, dict[str, Any], tuple[Tensor, Tensor] | None]:
    """What the draws of a method must agree with on a problem.   posterior: one of its results.

    (description; arguments of ``judge``; mean (P,) and covariance (P, P) if it is a Normal, else None)
    """
    exact: dict[str, Any] = {"expected": problem.exact}
    if converges_to == "exact":
        return "the exact posterior", exact, None
    if converges_to == "exact as lr → 0":
        bounds = problem.stationary(method)
        if "energy_error" in posterior.stats:
            squared = posterior.stats["energy_error"].square().mean().item()
            bounds = exact | {"tolerance": (16 * squared) ** (1 / 3) / 4 * np.maximum(np.abs(problem.exact), 1.0)}
        return "the posterior, but for the bias of a finite step", bounds, None
    prior_weight, tolerance = getattr(method, "prior_weight", 1.0), 0.0
    mode = problem.mode(prior_weight)
    if converges_to == "point":
        name = "the most probable point" if prior_weight else "the most likely point"
        normal, tolerance = (mode, torch.zeros_like(mode).diag()), problem.stops
    elif converges_to == "normal at the mode":
        name, normal = "the Normal at the mode", (mode, torch.linalg.inv(curvature(problem.log_joint, mode)))
    else:
        guide, independent = posterior.guide, isinstance(posterior.guide, MeanFieldNormal | WeightGuide)
        rank = problem.size if isinstance(guide, FullNormal) else 0
        rank = guide.factor.shape[1] if isinstance(guide, LowRankNormal) else rank
        if not (independent or rank >= problem.size - 1):
            # Only the mean of the best such Normal is known, and only for linear regression.
            means = np.arange(len(problem.exact)) < problem.size + len(problem.x)
            level = np.where(means & problem.is_linear, "bad", "caution")
            return "near the exact posterior", exact | {"tolerance": problem.stops, "level": level}, None
        name = "the best mean-field Normal" if independent else "the best Normal of any covariance"
        normal = problem.best_normal(mode, not independent)
    return name, {"expected": problem.expect(problem.normal(*normal)), "tolerance": tolerance}, normal


def drawn(problem: Problem, posterior: Posterior, seed: int) -> tuple[Tensor, Tensor]:
    """Weights (C, D, P) and outputs (C, D, B) of chains, or of independent draws with C = 1; float64."""
    lead = sized(posterior, DRAWS)
    sites = posterior.draw(lead[0] * lead[1], seed=seed)
    w = torch.cat([sites[site].double().flatten(1) for site in posterior.model.initial], 1)
    f = predict(posterior, problem.new, num_draws=len(w), seed=seed).output_values()  # (S, B, K or 1)
    inputs = torch.arange(len(problem.x))
    return w.unflatten(0, lead), f[:, inputs, inputs % f.shape[2]].unflatten(0, lead)


def density_findings(problem: Problem, method: Method, posterior: Posterior) -> list[Finding]:
    """The log joint of the variant's model against the formula, at a few weights."""
    model, x = split_frozen(posterior.model, problem.data.x_train)
    joint = LogJoint(model, x, problem.data.y_train, getattr(method, "temperature", 1.0))
    weights = torch.linspace(-2, 2, 10)[:, None] * torch.cos(torch.arange(joint.size))
    expected = problem.log_joint(weights.double())
    with torch.no_grad():
        off = (joint.log_density(weights).double() - expected).abs().max().item()
    about = f"the model's log joint less the formula's, at most (nats, {problem.title})"
    return [close(about, off, 0.0, 1e-3 + 1e-5 * expected.abs().max().item())]


def evidence_findings(
    problem: Problem, method: Method, posteriors: Sequence[Posterior], normal: tuple[Tensor, Tensor] | None
) -> list[Finding]:
    """The log evidence of linear regression that a fit reports, or the ELBO of its q, against the exact values."""
    if not problem.is_linear or getattr(method, "temperature", 1.0) != 1.0 or normal is None:
        return []
    if "log_evidence" in posteriors[0].stats:
        expected, estimate = problem.elbo(*normal), posteriors[0].stats["log_evidence"].item()
        return [close("log evidence (nats)", estimate, expected, 1e-5 * abs(expected))]
    if not normal[1].any() or len(posteriors) < 2:
        return []
    pairs, x, y = [], problem.data.x_train, problem.data.y_train
    for i, posterior in enumerate(posteriors):
        with isolated(i), torch.no_grad():
            estimate = elbo_of(posterior.model, posterior.guide, x, y, particles=PARTICLES)[0].item()
        q = drawn(problem, posterior, i)[0][0]  # a Normal, known by its moments
        pairs.append((estimate, problem.elbo(q.mean(0), q.mT.cov())))
    estimates, expected = np.array(pairs).T
    about = "ELBO of the fitted q (nats), beside the evidence less KL(q ‖ posterior)"
    off = Estimate.of_independent((estimates - expected)[:, None])
    (finding,) = judge([about], off, np.zeros(1), tests=len(problem.exact))
    return [replace(finding, estimate=float(estimates.mean()), expected=float(expected.mean()))]
