"""A method on problems whose posterior is known: closed forms, numerical integration, a long run of NUTS.

One runner for all of them. A problem (``problems``, ``two_weights``) is data and exact expectations; a claim
(``claims``) is what the method must meet there, within the Monte-Carlo errors of its own draws. How far an
approximation is off the posterior itself is said in amounts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.checks.check import ALPHA, Finding, Outcome, Subject, irreducible, most_off, reduced, worst
from bnn_pyro.checks.claims import REFITTED, Claim, claim_of, density_findings, estimate_of, evidence_findings
from bnn_pyro.checks.problems import LinearRegression, Problem, SixWeights, drawn
from bnn_pyro.checks.two_weights import TWO_WEIGHTS
from bnn_pyro.checks.z_tests import Estimate, bound, judge, of_independent, z_scores
from bnn_pyro.fitting import fit
from bnn_pyro.inference import Method
from bnn_pyro.inference.method import Report
from bnn_pyro.posterior import Posterior
from bnn_pyro.zoo import Entry

__all__ = ["ClosedForm", "KnownAnswers", "Logistic", "Quadrature", "problem_method"]

#: A Monte-Carlo error that tells nothing, in posterior standard deviations.
BLIND = 0.1


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
        return irreducible(subject)

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence``: labels (M,) of every quantity of all problems; in posterior standard deviations estimate, error,
        low, high (what is claimed) and expected (the posterior's), each (M,); z (M,), standard errors between estimate
        and claim, and the bound of an alarm; and what ``Problem.pictures`` has.
        """
        comparisons = []
        problems = self.problems(subject, seed)
        for k, problem in enumerate(problems):
            settings, biased = [{}], subject.converges_to == "exact as lr → 0"
            if biased and problem.batches > 1 and not subject.given.get("batch_size"):
                settings.append({"batch_size": len(problem.data.x_train) // problem.batches})
            for batch in settings:
                comparisons.append(_compare(problem, subject, self, seed, batch))
            if report is not None:
                report(k + 1, len(problems), {"problem": problem.title})
        findings = [f for c in comparisons for f in c.findings]
        shown = [c for c in comparisons if not c.mini_batches]
        amounts = [a for c in shown for a in c.problem.amounts(c.w, c.f)]
        if subject.converges_to != "exact":
            level = worst(f.level for c in shown for f in c.beside())
            findings += [Finding(about, value, exact, level=level) for _, about, value, exact in amounts]
        where = " and ".join(problem.title for problem in problems)
        return Outcome(
            self.name,
            worst(f.level for f in findings),
            _sentence(where, shown[-1].claim.name, findings, amounts if not subject.exact else []),
            subject.settings(shown[-1].method, shown[-1].entry),
            findings,
            _together(shown),
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
        return [p for p in TWO_WEIGHTS.values() if not irreducible(subject, p.settings["hidden"])]


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
        return "the reference is a posterior at temperature 1" if subject.temperature != 1 else irreducible(subject)


# -- the runner ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Comparison:
    """Draws of a method on a problem beside what is claimed: weights w (C, D, P), outputs f (C, D, B).

    estimate  of the quantities, with the errors of independent fits, or of chains
    pooled    the same, with the errors of all draws as independent ones where several fits have the same limit
    """

    problem: Problem
    method: Method
    entry: Entry
    claim: Claim
    estimate: Estimate
    pooled: Estimate
    w: Tensor
    f: Tensor
    posteriors: Sequence[Posterior]
    mini_batches: bool

    @property
    def labels(self) -> list[str]:
        """Of the quantities."""
        where = f" ({self.problem.title}{', mini-batches' if self.mini_batches else ''})"
        return [label + where for label in self.problem.labels()]

    @property
    def findings(self) -> list[Finding]:
        """Beside the claim, and what can be compared without draws."""
        known, error = self.claim.known, self.estimate.less(self.problem.posterior).error
        estimate = Estimate(self.estimate.mean[known], error[known], self.estimate.freedom)
        labels = [label for label, k in zip(self.labels, known, strict=True) if k]
        low, high, tolerance = (
            np.broadcast_to(v, known.shape)[known] for v in (self.claim.low, self.claim.high, self.claim.tolerance)
        )
        findings = judge(labels, estimate, low, high=high, tolerance=tolerance) if labels else []
        if (noisy := float(error[self.problem.sure].max())) > BLIND:
            about = f"Monte-Carlo error ({self.problem.title}, posterior sd): too few independent draws to tell"
            findings.append(Finding(about, noisy, BLIND, level="caution"))
        exact = self.problem, self.method, self.posteriors
        return findings + density_findings(*exact) + evidence_findings(*exact, self.claim)

    def beside(self) -> list[Finding]:
        """Beside the posterior itself, where an approximation may be off."""
        estimate = self.pooled.less(self.problem.posterior)
        return judge(self.labels, estimate, self.problem.posterior.mean, tolerance=self.problem.stops, level="caution")

    def row(self) -> dict[str, Any]:
        """Arrays for the figures."""
        estimate, exact = self.estimate.less(self.problem.posterior), self.problem.posterior.mean
        low, high = (np.where(self.claim.known, v, exact) for v in (self.claim.low, self.claim.high))
        return {
            "labels": self.labels,
            "estimate": estimate.mean,
            "error": estimate.error,
            "low": low,
            "high": high,
            "expected": exact,
            "z": z_scores(estimate, low, high, np.where(self.claim.known, self.claim.tolerance, 0.0)),
            "bound": bound(estimate),
        }


def problem_method(problem: Problem, subject: Subject, effort: float, **settings: Any) -> Method:
    """The subject's method with settings that suffice on a problem."""
    if problem.batches > 1 and not subject.exact:
        settings = {"batch_size": len(problem.data.x_train) // problem.batches, **settings}
    return subject.tiny_method(draws=effort * problem.length, epochs=effort / problem.batches, **settings)


def _compare(
    problem: Problem, subject: Subject, check: KnownAnswers, seed: int, batch: Mapping[str, Any]
) -> _Comparison:
    """batch: the size of the mini-batches of stochastic gradients, which then take a smaller step; or empty."""
    method = problem_method(problem, subject, check.effort)
    if batch:
        method = problem_method(problem, subject, check.effort / problem.batches, **batch, lr=method.lr / 5)
    problem = problem.at(getattr(method, "temperature", 1.0), subject.exact)
    entry = reduced(subject.entry, **problem.settings)
    fits = check.fits if subject.converges_to in REFITTED else 1
    posteriors = [fit(entry, problem.data, method, seed=seed + i, device="cpu", progress=False) for i in range(fits)]
    pairs = [drawn(problem, posterior, i) for i, posterior in enumerate(posteriors)]
    w, f = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    values = problem.quantities(w, f).numpy()
    estimate = estimate_of(subject.converges_to, values)
    pooled = of_independent(values.reshape(-1, values.shape[-1])) if fits > 1 else estimate
    claim = claim_of(problem, subject.converges_to, method, posteriors[0], w.shape[-1], estimate)
    if subject.exact:  # chains of one posterior
        w, f = (v.flatten(0, 1)[None] for v in (w, f))
    return _Comparison(problem, method, entry, claim, estimate, pooled, w, f, posteriors, bool(batch))


def _together(comparisons: Sequence[_Comparison]) -> dict[str, Any]:
    rows = [c.row() for c in comparisons]
    merged = {k: np.concatenate([row[k] for row in rows]) for k in rows[0] if k not in ("labels", "bound")}
    merged |= {"labels": [label for row in rows for label in row["labels"]], "bound": max(row["bound"] for row in rows)}
    return merged | {k: v for c in comparisons for k, v in c.problem.pictures(c.w, c.f).items()}


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
