"""A method on problems whose posterior is known by closed forms or numerical integration.

A problem (``problems``) is data and exact expectations; a claim (``claims``) is what the method must meet there, within
the Monte-Carlo errors of its own draws. How far an approximation is off the posterior itself is said in amounts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from bnn_pyro.checks.check import ALPHA, Check, Estimate, Finding, Outcome, Subject, judge, most_off, worst
from bnn_pyro.checks.claims import claim_of, density_findings, drawn, evidence_findings
from bnn_pyro.checks.problems import TWO_WEIGHTS, Problem, linear_regression, six_weights, softmax_regression
from bnn_pyro.checks.user_module import linear_module
from bnn_pyro.fitting import fit
from bnn_pyro.inference import Method
from bnn_pyro.progress import Report

#: A Monte-Carlo error that tells nothing, in posterior standard deviations.
BLIND = 0.1
#: Methods that give a guide or points, whose own randomness is seen by fitting again and again.
REFITTED = ("best in family", "point")


@dataclass(frozen=True)
class KnownAnswers(Check):
    """Settings that these checks share.

    fits    independent fits of a method that gives a guide or points
    effort  length of runs and trainings, in those of the quick budget
    """

    fits: int = 24
    effort: float = 4.0

    name: ClassVar[str]
    quick: ClassVar[Mapping[str, Any]] = {"fits": 8, "effort": 1.0}

    def problems(self, subject: Subject) -> Sequence[Problem]:
        """Those on which the subject is checked."""
        raise NotImplementedError

    def _refuses(self, subject: Subject) -> str:
        return subject.irreducible()

    def _run(self, subject: Subject, seed: int, report: Report) -> Outcome:
        problems, compared = self.problems(subject), []
        cases = [(problem, 0) for problem in problems]
        if hasattr(subject.kind, "eta_share") and not subject.given.get("batch_size"):  # takes mini-batches
            cases += [(problem, len(problem.inputs) // problem.batches) for problem in problems if problem.batches > 1]
        for k, (problem, batch_size) in enumerate(cases):
            compared.append(_compare(problem, subject, self, seed, len(cases), batch_size))
            report(k + 1, len(cases), {"problem": problem.title})
        findings = [finding for c in compared for finding in c.findings]
        if subject.converges_to != "exact":
            findings += [amount for c in compared[: len(problems)] for amount in c.amounts]
        sentence = _sentence(problems, compared, findings, subject.exact)
        figures = {self.name.replace("-", "_"): compared[0].amounts[0].estimate}
        level = worst(f.level for f in findings)
        return Outcome(self.name, level, sentence, compared[0].settings, findings, figures=figures)


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
        """Linear regression; that of a user's module on rows of its own data."""
        return [linear_module(subject) if subject.own_module else linear_regression(200, 4, 8)]


@dataclass(frozen=True)
class Quadrature(KnownAnswers):
    """Logistic regression with two weights, and one tanh unit, whose posterior has two modes that differ in sign:
    means, covariances and predictions are compared with integrals over a grid.
    """

    name: ClassVar[str] = "quadrature"
    title: ClassVar[str] = "Numerical integration"

    def problems(self, subject: Subject) -> list[Problem]:
        """Those of two weights that the variant and the method can be made for."""
        return [p for p in TWO_WEIGHTS.values() if not subject.irreducible(p.settings["hidden"])]


@dataclass(frozen=True)
class Logistic(KnownAnswers):
    """A posterior that no grid holds, of six weights and two classes, or nine and three for samplers and Laplace:
    means, covariances and predictions are compared with importance sampling with 32,768 quasi-random points.
    """

    name: ClassVar[str] = "logistic"
    title: ClassVar[str] = "Logistic regression"
    quick: ClassVar[Mapping[str, Any]] = {"effort": 1.0, "fits": 6}

    def problems(self, subject: Subject) -> list[Problem]:
        """Of two classes, or of three where the method is not fitted again and again."""
        return [six_weights(60, 5, 10) if subject.converges_to in REFITTED else softmax_regression(50, 2, 10)]


class _Compared(NamedTuple):
    """Draws of a method on a problem beside what is claimed, in words; how far they are off the posterior itself."""

    claim: str
    settings: dict[str, Any]
    findings: list[Finding]
    amounts: list[Finding]


def problem_method(problem: Problem, subject: Subject, effort: float, **settings: Any) -> Method:
    """The subject's method with settings that suffice on a problem."""
    if problem.batches > 1 and not subject.exact:
        settings = {"batch_size": len(problem.inputs) // problem.batches, **settings}
    return subject.tiny_method(draws=effort * problem.length, epochs=effort / problem.batches, **settings)


def _compare(
    problem: Problem, subject: Subject, check: KnownAnswers, seed: int, tests: int, batch_size: int = 0
) -> _Compared:
    """tests: comparisons of the check.   batch_size: of stochastic gradients, which then take a smaller step."""
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
    claim = claim_of(problem, to, method, posteriors[0])
    labels = [f"{label} ({problem.title}{', mini-batches' if batch_size else ''})" for label in problem.labels()]
    if subject.exact:  # chains of one posterior
        w, f = (v.flatten(0, 1)[None] for v in (w, f))
    bounds = {"high": claim.high, "tolerance": claim.tolerance}
    findings = judge(labels, estimate, claim.low, **bounds, tests=tests, level=claim.level)
    if (noisy := float(estimate.error[: problem.size + len(problem.x)].max())) > BLIND:  # of means
        about = f"Monte-Carlo error ({problem.title}, posterior sd): too few independent draws to tell"
        findings.append(Finding(about, noisy, BLIND, level="caution"))
    findings += density_findings(problem, method, posteriors[0])
    findings += evidence_findings(problem, method, posteriors, claim)
    # Several fits have the same limit: all draws together are that much surer of it.
    together = Estimate.of_independent(values.reshape(-1, values.shape[-1])) if fits > 1 else estimate
    beside = worst(x.level for x in judge(labels, together, problem.exact, tolerance=problem.stops, level="caution"))
    # How far these are off the posterior, in its own standard deviations.
    unit, size = problem.units(w, f), problem.size
    sd, mean = unit.std(1, correction=0).mean(0), unit.mean((0, 1))
    share = f"standard deviation of the {{}} as a share of the posterior's, mean ({problem.title})"
    apart = f"distance of mean predictions from the posterior's, in its standard deviations, mean ({problem.title})"
    amounts = [
        Finding(share.format("weights"), sd[:size].mean().item(), 1.0, level=beside),
        Finding(share.format("predictions"), sd[size:].mean().item(), 1.0, level=beside),
        Finding(apart, mean[size:].abs().mean().item(), 0.0, level=beside),
    ]
    return _Compared(claim.name, subject.settings(method, entry), findings, amounts)


def _sentence(
    problems: Sequence[Problem], compared: Sequence[_Compared], findings: Sequence[Finding], exact: bool
) -> str:
    where, claim = " and ".join(problem.title for problem in problems), compared[-1].claim
    if off := most_off(findings):
        return f"On {where} this is not {claim}: {off}"
    p = [f.p for f in findings if f.p is not None]
    words = f"On {where} this is {claim}: {len(p)} quantities agree within their errors"
    if differ := sum(f.level == "caution" for f in findings if f.p is not None):
        words = f"On {where} {differ} of {len(p)} quantities are not those of {claim}, which this may only approximate"
    words += f" (smallest p {min(p):.2g}, alarm below {ALPHA:g})."
    for problem, one in [] if exact else zip(problems, compared, strict=True):
        weights, predictions, off = (f"{amount.estimate:.2f}" for amount in one.amounts)
        words += f" Beside the posterior of {problem.title}, standard deviations of weights are {weights} of its own, "
        words += f"those of predictions {predictions}, and mean predictions lie {off} of them off."
    return words + "".join(f" {f.about}." for f in findings if f.about.startswith("Monte-Carlo"))
