"""A method on problems whose posterior is known: closed forms, numerical integration, a long run of NUTS.

One runner for all of them. A problem (``problems``, ``two_weights``) is data and exact expectations; a claim
(``claims``) is what the method must meet there, within the Monte-Carlo errors of its own draws. How far an
approximation is off the posterior itself is said in amounts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from scipy.stats import t

from bnn_pyro.checks.check import ALPHA, Estimate, Finding, Outcome, Subject, judge, most_off, worst, z_scores
from bnn_pyro.checks.claims import Claim, claim_of, density_findings, evidence_findings
from bnn_pyro.checks.problems import Amount, LinearRegression, Problem, SixWeights, drawn
from bnn_pyro.checks.two_weights import TWO_WEIGHTS
from bnn_pyro.fitting import fit
from bnn_pyro.inference import Method
from bnn_pyro.parallel.task import Report

__all__ = ["ClosedForm", "KnownAnswers", "Logistic", "Quadrature", "problem_method"]

#: A Monte-Carlo error that tells nothing, in posterior standard deviations.
BLIND = 0.1
#: Methods that give a guide or points, whose own randomness is seen by fitting again and again.
REFITTED = ("best in family", "point")


@dataclass(frozen=True)
class KnownAnswers:
    """Settings that these checks share.

    fits    independent fits of a method that gives a guide or points
    effort  length of runs and trainings, in those of the quick budget
    """

    fits: int = 24
    effort: float = 4.0

    name: ClassVar[str]
    title: ClassVar[str]
    idea: ClassVar[str]
    quick: ClassVar[Mapping[str, Any]] = {"fits": 8, "effort": 1.0}

    def problems(self, subject: Subject, seed: int) -> Sequence[Problem]:
        """Those on which the subject is checked."""
        raise NotImplementedError

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        return subject.irreducible()

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence``: labels (M,) of every quantity of all problems; in posterior standard deviations estimate, error,
        low, high (what is claimed) and expected (the posterior's), each (M,); z (M,), standard errors between estimate
        and claim, and the bound of an alarm; and what ``Problem.shown`` has.
        """
        problems, compared, findings = self.problems(subject, seed), [], []
        for k, problem in enumerate(problems):
            compared.append(_compare(problem, subject, self, seed))
            findings += compared[-1].findings
            biased = subject.converges_to == "exact as lr → 0" and not subject.given.get("batch_size")
            if biased and problem.batches > 1:
                findings += _compare(
                    problem, subject, self, seed, len(problem.data.x_train) // problem.batches
                ).findings
            if report is not None:
                report(k + 1, len(problems), {"problem": problem.title})
        amounts = [amount for c in compared for amount in c.amounts]
        if subject.converges_to != "exact":
            level = worst(c.beside for c in compared)
            findings += [Finding(about, value, exact, level=level) for _, about, value, exact in amounts]
        where = " and ".join(problem.title for problem in problems)
        return Outcome(
            self.name,
            worst(f.level for f in findings),
            _sentence(where, compared[-1].claim, findings, amounts if not subject.exact else []),
            compared[-1].settings,
            findings,
            _together([c.evidence for c in compared]),
            {name: max(v for n, _, v, _ in amounts if n == name) for name, *_ in amounts},
        )


@dataclass(frozen=True)
class ClosedForm(KnownAnswers):
    """Settings of the check against closed forms; see also ``KnownAnswers``.

    rows, inputs  of linear regression; neighbouring inputs correlate at 0.7, and there is a bias
    points        new inputs at which predictions are compared
    """

    rows: int = 200
    inputs: int = 4
    points: int = 8

    name: ClassVar[str] = "closed-form"
    title: ClassVar[str] = "Closed forms"
    idea: ClassVar[str] = (
        "Without hidden layers, with a Normal prior and a known noise, the network is Bayesian linear regression: "
        "means, covariances, predictions and the evidence are held against the formulas."
    )

    def problems(self, subject: Subject, seed: int) -> list[Problem]:
        """Linear regression."""
        return [LinearRegression(self.rows, self.inputs, self.points)]


@dataclass(frozen=True)
class Quadrature(KnownAnswers):
    """Settings of the check against numerical integration: those of ``KnownAnswers``."""

    name: ClassVar[str] = "quadrature"
    title: ClassVar[str] = "Numerical integration"
    idea: ClassVar[str] = (
        "Logistic regression with two weights, and one tanh unit, whose posterior has two modes that differ in sign: "
        "means, variances, predictions and the masses of the modes are held against integrals over a grid."
    )

    def problems(self, subject: Subject, seed: int) -> list[Problem]:
        """Those of two weights that the variant and the method can be made for."""
        return [p for p in TWO_WEIGHTS.values() if not subject.irreducible(p.settings["hidden"])]


@dataclass(frozen=True)
class Logistic(KnownAnswers):
    """Settings of the check against a long run of NUTS; see also ``KnownAnswers``.

    rows, inputs  of the data; neighbouring inputs correlate at 0.7, and there is a bias
    points        new inputs at which predictions are compared
    draws         of each of the four chains of the reference
    """

    rows: int = 100
    inputs: int = 5
    points: int = 10
    draws: int = 10_000

    name: ClassVar[str] = "logistic"
    title: ClassVar[str] = "Logistic regression"
    idea: ClassVar[str] = (
        "A posterior of six weights that no grid holds: log-odds and probabilities at new inputs are held against a "
        "long run of NUTS, which is itself held against numerical integration."
    )
    quick: ClassVar[Mapping[str, Any]] = {"draws": 2000, "effort": 1.0, "fits": 6}

    def problems(self, subject: Subject, seed: int) -> list[Problem]:
        """Logistic regression, after its reference run."""
        return [SixWeights(self.rows, self.inputs, self.points, self.draws, seed + 1000)]

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        return "the reference is a posterior at temperature 1" if subject.temperature != 1 else subject.irreducible()


# -- the runner ------------------------------------------------------------------------------------------------------
class _Compared(NamedTuple):
    """Draws of a method on a problem beside what is claimed, in words; and the level beside the posterior itself."""

    claim: str
    settings: dict[str, Any]
    findings: list[Finding]
    beside: str
    evidence: dict[str, Any]
    amounts: list[Amount]


def problem_method(problem: Problem, subject: Subject, effort: float, **settings: Any) -> Method:
    """The subject's method with settings that suffice on a problem."""
    if problem.batches > 1 and not subject.exact:
        settings = {"batch_size": len(problem.data.x_train) // problem.batches, **settings}
    return subject.tiny_method(draws=effort * problem.length, epochs=effort / problem.batches, **settings)


def _compare(problem: Problem, subject: Subject, check: KnownAnswers, seed: int, batch_size: int = 0) -> _Compared:
    """batch_size: of the mini-batches of stochastic gradients, which then take a smaller step."""
    method, to = problem_method(problem, subject, check.effort), subject.converges_to
    if batch_size:
        smaller = {"batch_size": batch_size, "lr": method.lr / 5}
        method = problem_method(problem, subject, check.effort / problem.batches, **smaller)
    problem = problem.at(getattr(method, "temperature", 1.0), subject.exact)
    entry = subject.reduced(**problem.settings)
    fits = check.fits if to in REFITTED else 1
    posteriors = [fit(entry, problem.data, method, seed=seed + i, device="cpu", progress=False) for i in range(fits)]
    pairs = [drawn(problem, posterior, i) for i, posterior in enumerate(posteriors)]
    w, f = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    values = problem.quantities(w, f).numpy()
    draws = Estimate.of_independent(values.reshape(-1, values.shape[-1]))
    estimate = (
        Estimate.of_chains(values) if to == "exact" else draws if len(values) == 1 else Estimate.of_runs(values.mean(1))
    )
    claim = claim_of(problem, to, method, posteriors[0], w.shape[-1], estimate)
    labels = [f"{label} ({problem.title}{', mini-batches' if batch_size else ''})" for label in problem.labels()]
    exact = problem.posterior
    # Several fits have the same limit: all draws together are that much surer of it.
    beside = judge(labels, (draws if fits > 1 else estimate).less(exact), exact.mean, tolerance=problem.stops)
    if subject.exact:  # chains of one posterior
        w, f = (v.flatten(0, 1)[None] for v in (w, f))
    amounts, arrays = problem.shown(w, f)
    estimate = estimate.less(exact)
    findings = judge(labels, estimate, claim.low, high=claim.high, tolerance=claim.tolerance)
    if (noisy := float(estimate.error[problem.sure].max())) > BLIND:
        about = f"Monte-Carlo error ({problem.title}, posterior sd): too few independent draws to tell"
        findings.append(Finding(about, noisy, BLIND, level="caution"))
    findings += density_findings(problem, method, posteriors[0])
    findings += evidence_findings(problem, method, posteriors, claim)
    evidence = {"labels": labels, **_row(claim, estimate, exact.mean), **arrays}
    level = "caution" if any(finding.level == "bad" for finding in beside) else "good"
    return _Compared(claim.name, subject.settings(method, entry), findings, level, evidence, amounts)


def _row(claim: Claim, estimate: Estimate, exact: np.ndarray) -> dict[str, Any]:
    """Arrays for the figures; what is not claimed is held beside the posterior."""
    unknown = np.isnan(claim.low)
    low, high = (np.where(unknown, exact, bound) for bound in (claim.low, claim.high))
    z = z_scores(estimate, low, high, np.where(unknown, 0.0, claim.tolerance))
    alarm = float(np.max(t.isf(ALPHA / (2 * len(z)), estimate.freedom)))
    arrays = {"estimate": estimate.mean, "error": estimate.error, "low": low, "high": high, "expected": exact}
    return {**arrays, "z": z, "bound": alarm}


def _together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The evidence of all problems."""
    series = ("estimate", "error", "low", "high", "expected", "z")
    merged = {k: v for row in rows for k, v in row.items()} | {k: np.concatenate([r[k] for r in rows]) for k in series}
    labels = [label for row in rows for label in row["labels"]]
    return {**merged, "labels": labels, "bound": max(row["bound"] for row in rows)}


def _sentence(where: str, claim: str, findings: Sequence[Finding], amounts: Sequence[tuple]) -> str:
    if off := most_off(findings):
        return f"On {where} this is not {claim}: {off}"
    if p := [f.p for f in findings if f.p is not None]:
        least = f"smallest p {min(p):.2g}, alarm below {ALPHA:g}"
        words = f"On {where} this is {claim}: {len(p)} quantities agree within their errors ({least})."
    else:
        words = f"On {where}, what this method tends to is not known; it can only be compared with the posterior."
    if amounts:
        parts = (f"{about} {value:.2f} ({exact:g} is exact)" for _, about, value, exact in amounts)
        words += f" Against the posterior itself: {'; '.join(parts)}."
    return words + "".join(f" {f.about}." for f in findings if f.about.startswith("Monte-Carlo"))
