"""A method on problems whose posterior is known by closed forms or numerical integration.

A problem (``problems``) is data and exact expectations; a claim (``claims``) is what the method must meet there, within
the Monte-Carlo errors of its own draws. How far an approximation is off the posterior itself is said in amounts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from scipy.stats import norm, t
from torch import Tensor

from bnn_pyro.checks.check import ALPHA, Estimate, Finding, Outcome, Subject, judge, most_off, worst, z_scores
from bnn_pyro.checks.claims import claim_of, density_findings, drawn, evidence_findings
from bnn_pyro.checks.problems import TWO_WEIGHTS, Problem, linear_regression, six_weights, softmax_regression
from bnn_pyro.fitting import fit
from bnn_pyro.inference import Method
from bnn_pyro.progress import Report

__all__ = ["ClosedForm", "KnownAnswers", "Logistic", "Quadrature", "problem_method"]

#: A Monte-Carlo error that tells nothing, in posterior standard deviations.
BLIND = 0.1
#: Methods that give a guide or points, whose own randomness is seen by fitting again and again.
REFITTED = ("best in family", "point")
#: Central intervals; draws that are kept for a figure.
LEVELS, SHOWN_DRAWS = (0.5, 0.8, 0.95), 1000

#: How far a method is off the posterior: in words, of the method, of the posterior.
Amount = tuple[str, float, float]


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

    def problems(self, subject: Subject) -> Sequence[Problem]:
        """Those on which the subject is checked."""
        raise NotImplementedError

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        return subject.irreducible()

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence``: labels (M,) of every quantity of all problems; z (M,), standard errors between estimate and claim,
        and the bound of an alarm; and what :func:`_arrays` has.
        """
        problems, compared, findings = self.problems(subject), [], []
        biased = subject.converges_to == "exact as lr → 0" and not subject.given.get("batch_size")
        tests = len(problems) + biased * sum(problem.batches > 1 for problem in problems)
        for k, problem in enumerate(problems):
            compared.append(_compare(problem, subject, self, seed, tests))
            findings += compared[-1].findings
            if biased and problem.batches > 1:
                size = len(problem.inputs) // problem.batches
                findings += _compare(problem, subject, self, seed, tests, size).findings
            if report is not None:
                report(k + 1, len(problems), {"problem": problem.title})
        amounts = [amount for c in compared for amount in c.amounts]
        if subject.converges_to != "exact":
            level = worst(c.beside for c in compared)
            findings += [Finding(about, value, exact, level=level) for about, value, exact in amounts]
        where = " and ".join(problem.title for problem in problems)
        evidence = {k: v for c in compared for k, v in c.evidence.items()}
        evidence |= {k: np.concatenate([c.evidence[k] for c in compared]) for k in ("labels", "z")}
        evidence["bound"] = max(c.evidence["bound"] for c in compared)
        return Outcome(
            self.name,
            worst(f.level for f in findings),
            _sentence(where, compared[-1].claim, findings, amounts if not subject.exact else []),
            compared[-1].settings,
            findings,
            evidence,
            {self.name.replace("-", "_"): amounts[0][1]},
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

    def problems(self, subject: Subject) -> list[Problem]:
        """Linear regression."""
        return [linear_regression(self.rows, self.inputs, self.points)]


@dataclass(frozen=True)
class Quadrature(KnownAnswers):
    """Settings of the check against numerical integration: those of ``KnownAnswers``."""

    name: ClassVar[str] = "quadrature"
    title: ClassVar[str] = "Numerical integration"
    idea: ClassVar[str] = (
        "Logistic regression with two weights, and one tanh unit, whose posterior has two modes that differ in sign: "
        "means, covariances and predictions are held against integrals over a grid."
    )

    def problems(self, subject: Subject) -> list[Problem]:
        """Those of two weights that the variant and the method can be made for."""
        return [p for p in TWO_WEIGHTS.values() if not subject.irreducible(p.settings["hidden"])]


@dataclass(frozen=True)
class Logistic(KnownAnswers):
    """Settings of the check of logistic regression with more weights; see also ``KnownAnswers``.

    rows, inputs  of the data; neighbouring inputs correlate at 0.7, and there is a bias
    points        new inputs at which predictions are compared
    """

    rows: int = 100
    inputs: int = 5
    points: int = 10

    name: ClassVar[str] = "logistic"
    title: ClassVar[str] = "Logistic regression"
    idea: ClassVar[str] = (
        "A posterior of six weights that no grid holds, and for samplers and Laplace one of three classes: means, "
        "covariances and predictions are held against importance sampling with 32,768 quasi-random points."
    )
    quick: ClassVar[Mapping[str, Any]] = {"effort": 1.0, "fits": 6}

    def problems(self, subject: Subject) -> list[Problem]:
        """Of two classes, and of three where the method is not fitted again and again."""
        three = [] if subject.converges_to in REFITTED else [softmax_regression(self.rows // 2, 2, self.points)]
        return [six_weights(self.rows, self.inputs, self.points), *three]


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
    estimate = draws = Estimate.of_independent(values.reshape(-1, values.shape[-1]))
    if to == "exact":
        estimate = Estimate.of_chains(values)
    elif len(values) > 1:
        estimate = Estimate.of_runs(values.mean(1))
    claim = claim_of(problem, to, method, posteriors[0], estimate)
    labels = [f"{label} ({problem.title}{', mini-batches' if batch_size else ''})" for label in problem.labels()]
    # Several fits have the same limit: all draws together are that much surer of it.
    beside = judge(labels, draws if fits > 1 else estimate, problem.exact, tolerance=problem.stops)
    if subject.exact:  # chains of one posterior
        w, f = (v.flatten(0, 1)[None] for v in (w, f))
    findings = judge(labels, estimate, claim.low, high=claim.high, tolerance=claim.tolerance, tests=tests)
    if (noisy := float(estimate.error[: problem.size + len(problem.x)].max())) > BLIND:  # of means
        about = f"Monte-Carlo error ({problem.title}, posterior sd): too few independent draws to tell"
        findings.append(Finding(about, noisy, BLIND, level="caution"))
    findings += density_findings(problem, method, posteriors[0])
    findings += evidence_findings(problem, method, posteriors, claim)
    unknown = np.isnan(claim.low)  # no claim: it is compared with the posterior itself
    low, high = (np.where(unknown, problem.exact, bound) for bound in (claim.low, claim.high))
    z = z_scores(estimate, low, high, np.where(unknown, 0.0, claim.tolerance))
    alarm = float(np.max(t.isf(ALPHA / (2 * len(z) * tests), estimate.freedom)))
    evidence = {"labels": np.array(labels), "z": z, "bound": alarm, **_arrays(problem, w, f)}
    level = "caution" if any(finding.level == "bad" for finding in beside) else "good"
    settings = subject.settings(method, entry)
    return _Compared(claim.name, settings, findings, level, evidence, _amounts(problem, w, f))


def _amounts(problem: Problem, w: Tensor, f: Tensor) -> list[Amount]:
    """How far C approximations (C, D, P), (C, D, B) are off the posterior."""
    unit, size = problem.units(w, f), problem.size
    sd, mean = unit.std(1, correction=0).mean(0), unit.mean((0, 1))
    share = f"standard deviation of the {{}} as a share of the posterior's, mean ({problem.title})"
    apart = f"distance of mean predictions from the posterior's, in its standard deviations, mean ({problem.title})"
    return [
        (share.format("weights"), sd[:size].mean().item(), 1.0),
        (share.format("predictions"), sd[size:].mean().item(), 1.0),
        (apart, mean[size:].abs().mean().item(), 0.0),
    ]


def _arrays(problem: Problem, w: Tensor, f: Tensor) -> dict[str, Any]:
    """For the figures.

    Of linear regression exact_mean, exact_sd, mean, sd (B,) of the outputs; levels, coverage, weight_coverage (3,) of
    intervals. Of two weights NAME_names; NAME_axis_1, NAME_axis_2 (n,), NAME_density (n, n); NAME_draws (S, 2).
    """
    if problem.known is not None:
        unit, weights, outputs = problem.units(w, f), slice(problem.size), slice(problem.size, None)
        sd, mean, (exact_mean, exact_sd) = unit.std(1, correction=0).mean(0), unit.mean((0, 1)), problem.moments
        arrays = {"exact_mean": exact_mean, "exact_sd": exact_sd}
        arrays |= {"mean": exact_mean + mean * exact_sd, "sd": sd * exact_sd}
        return {name: value[outputs].numpy() for name, value in arrays.items()} | {
            "levels": np.array(LEVELS),
            "coverage": _coverage(mean[outputs], sd[outputs]),
            "weight_coverage": _coverage(mean[weights], sd[weights]),
        }
    if problem.size > 2:
        return {}
    flat, step = w.flatten(0, 1), max(1, len(problem.posterior.axes[0]) // 200)
    keep = torch.linspace(0, len(flat) - 1, min(SHOWN_DRAWS, len(flat))).round().long()
    first, second = (axis[::step].numpy() for axis in problem.posterior.axes)
    arrays = {"names": ["u", "v"] if problem.unit else ["w", "b"], "axis_1": first, "axis_2": second}
    arrays |= {"density": problem.posterior.density[::step, ::step].numpy(), "draws": flat[keep].numpy()}
    return {f"{problem.name}_{what}": value for what, value in arrays.items()}


def _coverage(off: Tensor, sd: Tensor) -> np.ndarray:
    """Share of a standard Normal inside central intervals of Normal(off, sd), for each level, mean; (3,)."""
    half = norm.ppf(0.5 + np.array(LEVELS) / 2)[:, None] * sd.numpy()
    return (norm.cdf(off.numpy() + half) - norm.cdf(off.numpy() - half)).mean(1)


def _sentence(where: str, claim: str, findings: Sequence[Finding], amounts: Sequence[tuple]) -> str:
    if off := most_off(findings):
        return f"On {where} this is not {claim}: {off}"
    if p := [f.p for f in findings if f.p is not None]:
        least = f"smallest p {min(p):.2g}, alarm below {ALPHA:g}"
        words = f"On {where} this is {claim}: {len(p)} quantities agree within their errors ({least})."
    else:
        words = f"On {where}, what this method tends to is not known; it can only be compared with the posterior."
    if amounts:
        parts = (f"{about} {value:.2f} ({exact:g} is exact)" for about, value, exact in amounts)
        words += f" Against the posterior itself: {'; '.join(parts)}."
    return words + "".join(f" {f.about}." for f in findings if f.about.startswith("Monte-Carlo"))
