"""A method on Bayesian linear regression, where everything is known exactly: posterior, best approximation, evidence.

What is expected depends on what the method claims, N(m, Λ⁻¹) being the posterior (see ``linear_regression``):

    posterior                  N(m, Λ⁻¹)
    … at step size 0           its stationary law at the finite step: N(m, Λ⁻¹(1 − ηΛ/(4 − 2α))⁻¹), full batch
    best of a family           mean-field: N(m, diag(Λ)⁻¹); full, or of no lower rank: N(m, Λ⁻¹)
    normal at the mode         N(m, Λ⁻¹) and log p(y); diagonal: as mean-field
    points                     m; of maximum likelihood, the m of least squares

Compared are means, every entry of the covariance, and mean and variance of ``predict`` at new inputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from bnn_pyro.checks.check import ALPHA, Finding, Outcome, worst
from bnn_pyro.checks.gaussian_claims import Claim, claim_of, evidence_findings, expected_of, quantities, which_are_means
from bnn_pyro.checks.linear_regression import LinearGaussian, correlated
from bnn_pyro.checks.reduction import irreducible, reduced
from bnn_pyro.checks.subject import Subject
from bnn_pyro.checks.z_tests import Estimate, bound, judge, of_chains, of_independent, of_runs, z_scores
from bnn_pyro.fitting import fit
from bnn_pyro.inference import Method
from bnn_pyro.inference.method import Report
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import predict
from bnn_pyro.settings import plain
from bnn_pyro.zoo import Entry

__all__ = ["LEVELS", "ClosedForm", "linear_settings"]

#: Intervals whose coverage is told.
LEVELS = (0.5, 0.8, 0.95)
#: In posterior standard deviations: how far off an optimiser may stop, and the Monte-Carlo error that tells nothing.
STOPS, BLIND = 0.02, 0.1
#: Draws of a fitted guide; mini-batches that the rows are divided into.
DRAWS, BATCHES = 4000, 4

#: Methods that give a guide or points, whose own randomness is seen by fitting again and again.
REFITTED = ("best of a family", "points")


@dataclass(frozen=True)
class ClosedForm:
    """Settings of the check against closed forms.

    rows, inputs  of the regression; neighbouring inputs correlate at 0.7, and there is a bias
    points        new inputs at which predictions are compared
    fits          independent fits of a method that gives a guide or points
    effort        length of runs and trainings, in those of the quick budget
    """

    rows: int = 200
    inputs: int = 4
    points: int = 8
    fits: int = 24
    effort: float = 4.0

    title: ClassVar[str] = "Closed forms"
    idea: ClassVar[str] = (
        "Without hidden layers, with a Normal prior and a known noise, the network is Bayesian linear regression: "
        "means, covariances, predictions and the evidence are held against the formulas."
    )
    quick: ClassVar[Mapping[str, Any]] = {"fits": 8, "effort": 1.0}

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        return irreducible(subject)

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence``: labels (M,), found, expected, error, low, high (M,) of every quantity, in posterior standard
        deviations, and z (M,), by how many standard errors it is off, with the bound of an alarm; of predictions at B
        new inputs in units of the target: exact_mean, exact_sd, found_mean, found_sd (B,); levels and coverage, the
        share of the exact posterior's predictions that the method's central intervals hold; weight_coverage, the same
        of the weights; ratio and weight_ratio, mean of the method's standard deviations as shares of the posterior's.
        """
        start = time.perf_counter()
        problem = self._problem()
        entry = reduced(subject.entry, hidden=(), bias=True, noise=problem.noise, prior=f"normal:{problem.prior_scale}")
        findings: list[Finding] = []
        method = subject.method(linear_settings(subject.inference, self.effort, self.rows))
        exact = replace(problem, noise=problem.noise * math.sqrt(getattr(method, "temperature", 1.0)))
        batches = [{}]
        if subject.limit == "posterior at step size 0" and not subject.given.get("batch_size"):
            epochs, lr = max(200, round(600 * self.effort)), {"sgld": 0.03}.get(subject.inference, 0.004)
            batches.append(dict(batch_size=self.rows // BATCHES, lr=lr, epochs=epochs, burn_in=epochs // 4))
        for extra in batches:
            method = subject.method({**linear_settings(subject.inference, self.effort, self.rows), **extra})
            posteriors = self._posteriors(subject, entry, method, problem, seed, report)
            values = self._values(posteriors, exact)
            claimed = claim_of(subject, entry, method, exact, posteriors[0])
            found, judged = self._judge(subject, claimed, exact, values, " of mini-batches" if extra else "")
            findings += judged
            if not extra:
                shown, shown_claim, kept = found, claimed, values
        method = subject.method(linear_settings(subject.inference, self.effort, self.rows))
        findings += evidence_findings(problem, posteriors, method)
        evidence = self._evidence(exact, shown, shown_claim, kept)
        findings += self._amounts(subject, shown, evidence)
        level = worst(f.level for f in findings)
        return Outcome(
            "closed-form",
            level,
            _sentence(level, findings, shown_claim.name, evidence),
            {**subject.settings(method), "variant": plain(entry), "check": plain(self)},
            tuple(findings),
            evidence,
            {"closed_form": float(evidence["weight_ratio"]), "closed_form_predictions": float(evidence["ratio"])},
            time.perf_counter() - start,
        )

    # -- the parts -----------------------------------------------------------------------------------------------
    def _problem(self) -> LinearGaussian:
        made = correlated(self.rows, self.inputs, noise=0.7)
        x = made.x / made.x.square().mean().sqrt()  # a last layer divides its features by just this
        return replace(made, x=x.float().double())

    def _posteriors(
        self, subject: Subject, entry: Entry, method: Method, problem: LinearGaussian, seed: int, report: Report | None
    ) -> list[Posterior]:
        fits = self.fits if subject.limit in REFITTED else 1
        found = []
        for i in range(fits):
            found.append(fit(entry, problem.data, method, seed=seed + i, device="cpu", progress=False))
            if report is not None:
                report(i + 1, fits, {"fit": i + 1})
        return found

    def _new(self, problem: LinearGaussian) -> Tensor:
        """New inputs (B, D), float32."""
        x = correlated(self.points, self.inputs, seed=2).x
        return (x / problem.x.square().mean().sqrt()).float()

    def _values(self, posteriors: list[Posterior], exact: LinearGaussian) -> np.ndarray:
        """(C, D, M): weights, their products, f and f² at new inputs, all in standard units of the exact posterior."""
        covariance = torch.linalg.inv(exact.precision)
        sd, x = covariance.diagonal().sqrt(), self._new(exact)
        a = exact.design(x)
        f_sd = ((a @ covariance) * a).sum(1).sqrt() * exact.y_scale
        upper = torch.triu_indices(len(sd), len(sd))
        found = []
        for k, posterior in enumerate(posteriors):
            num = DRAWS if posterior.chains is None else next(iter(posterior.chains.values())).shape[:2].numel()
            lead = (1, num) if posterior.chains is None else next(iter(posterior.chains.values())).shape[:2]
            drawn = posterior.draw(num, seed=k)
            w = torch.cat([drawn[site].double().flatten(1) for site in posterior.model.initial], 1)
            unit = (w - exact.mean) / sd
            locs = predict(posterior, x, num_draws=num, seed=k).locs.double()
            f = (locs - exact.y_shift - exact.y_scale * a @ exact.mean) / f_sd
            series = torch.cat([unit, unit[:, upper[0]] * unit[:, upper[1]], f, f.square()], 1)
            found.append(series.unflatten(0, tuple(lead)))
        return torch.cat(found).numpy()

    def _judge(
        self, subject: Subject, claim: Claim, exact: LinearGaussian, values: np.ndarray, run: str
    ) -> tuple[Estimate, list[Finding]]:
        """(the estimate of every quantity, findings against what the method converges to by ``claim``).

        values: (C, D, M), as from ``_values``.   run: a suffix to the names of the quantities.
        """
        abouts = quantities(len(exact.mean), self.points, run)
        low, high = (expected_of(c, exact, self._new(exact), claim.shift) for c in (claim.low, claim.high))
        if subject.limit == "posterior":
            found = of_chains(values)
        elif subject.limit == "normal at the mode":
            found = of_independent(values[0])
        else:  # independent fits, members or chains
            found = of_runs(values.mean(1))
        stops = STOPS if subject.limit in REFITTED else 0.0
        if claim.known is None:  # no more than the means
            keep = which_are_means(len(exact.mean), self.points)
            judged = judge([abouts[i] for i in keep], found[keep], low[keep], tolerance=stops)
        else:
            judged = judge(abouts, found, low, high=high, tolerance=stops)
        noisy = float(found.error[: len(exact.mean)].max())
        if noisy > BLIND:
            about = f"Monte-Carlo error of the means{run} (posterior sd): too few independent draws to tell"
            judged += (Finding(about, noisy, BLIND, level="caution"),)
        return found, list(judged)

    def _evidence(self, exact: LinearGaussian, found: Estimate, claim: Claim, values: np.ndarray) -> dict[str, Any]:
        x, size = self._new(exact), len(exact.mean)
        a, covariance = exact.design(x), torch.linalg.inv(exact.precision)
        exact_mean = (exact.y_shift + exact.y_scale * a @ exact.mean).numpy()
        exact_sd = (((a @ covariance) * a).sum(1).sqrt() * exact.y_scale).numpy()
        every, count = np.arange(len(found.mean)), size * (size + 1) // 2
        firsts = every[:size], every[-2 * self.points : -self.points]
        diagonal = [
            i for i, (row, column) in enumerate(zip(*torch.triu_indices(size, size), strict=True)) if row == column
        ]
        seconds = every[size : size + count][diagonal], every[-self.points :]
        runs = values.mean(1) if claim.refitted else values.mean((0, 1))[None]
        sds, coverages = [], []
        for first, second in zip(firsts, seconds, strict=True):
            sd = np.sqrt(np.maximum(runs[:, second] - runs[:, first] ** 2, 0.0)).mean(0)
            half, off = norm.ppf(0.5 + np.array(LEVELS) / 2)[:, None] * sd, found.mean[first]
            sds.append(sd)
            coverages.append((norm.cdf(off + half) - norm.cdf(off - half)).mean(1))
        low, high = (expected_of(c, exact, x, claim.shift) for c in (claim.low, claim.high))
        return {
            "labels": quantities(size, self.points),
            "found": found.mean,
            "error": found.error,
            "low": low,
            "high": high,
            "z": z_scores(found, low, high, STOPS if claim.refitted else 0.0),
            "bound": bound(found),
            "expected": expected_of(torch.linalg.inv(exact.precision), exact, x),
            "exact_mean": exact_mean,
            "exact_sd": exact_sd,
            "found_mean": exact_mean + found.mean[firsts[1]] * exact_sd,
            "found_sd": sds[1] * exact_sd,
            "levels": np.array(LEVELS),
            "coverage": coverages[1],
            "weight_coverage": coverages[0],
            "ratio": sds[1].mean(),
            "weight_ratio": sds[0].mean(),
        }

    def _amounts(self, subject: Subject, found: Estimate, evidence: Mapping[str, Any]) -> list[Finding]:
        """How far an approximation is from the posterior itself, where it is."""
        if subject.limit == "posterior":
            return []
        off = judge(evidence["labels"], found, evidence["expected"], tolerance=STOPS, level="caution")
        level = worst(f.level for f in off)
        about = "standard deviation of the {}, as a share of the posterior's (mean)"
        return [
            Finding(about.format("weights"), float(evidence["weight_ratio"]), 1.0, level=level),
            Finding(about.format("predictions"), float(evidence["ratio"]), 1.0, level=level),
        ]


def linear_settings(name: str, effort: float, rows: int) -> dict[str, Any]:
    """What the check sets of each method; the user's settings go above."""
    many = lambda num: max(1, round(num * effort))  # noqa: E731
    optimiser = {"epochs": many(125), "batch_size": rows // BATCHES, "lr": 0.03, "final_lr": 0.0}
    chains = {"draws": many(1000), "warmup": 300, "chains": 4, "cores": 1}
    stochastic = {"chains": 128, "friction": 0.1, "lr": 0.01, "epochs": many(1200), "burn_in": 300}
    return {
        "svi": optimiser,
        **{name: {**optimiser, "epochs": many(125)} for name in ("map", "mle")},
        "ensemble": {**optimiser, "epochs": many(125), "members": 2},
        "nuts": chains,
        "hmc": chains,
        "chees": {"chains": 32, "superchains": 16, "draws": many(150), "warmup": 200},
        "sghmc": stochastic,
        "sgld": {"chains": 128, "lr": 0.05, "epochs": many(1600), "burn_in": 400},
    }.get(name, {})


def _sentence(level: str, findings: list[Finding], claim: str, evidence: Mapping[str, Any]) -> str:
    bad = [f for f in findings if f.level == "bad"]
    if bad:
        first = min(bad, key=lambda f: f.p if f.p is not None else 0.0)
        return (
            f"On linear regression this is not {claim}: {len(bad)} of {len(findings)} quantities are off, most of all "
            f"the {first.about}: {first.found:.4g}, and {first.expected:.4g} is exact."
        )
    held = [f.p for f in findings if f.p is not None]
    said = (
        f"On linear regression this is {claim}: {len(held)} quantities agree with the formulas within their errors "
        f"(smallest p {min(held):.2g}, alarm below {ALPHA:g})."
    )
    cautions = [f for f in findings if f.level == "caution"]
    if any(f.about.startswith("standard deviation") for f in cautions):
        said += " Against the posterior itself, " + "; ".join(
            f"its {what} have {ratio:.2f} of the exact standard deviation, and intervals of 50, 80 and 95 % hold "
            + ", ".join(f"{100 * c:.0f}" for c in coverage[:2])
            + f" and {100 * coverage[2]:.0f} %"
            for what, ratio, coverage in (
                ("weights", evidence["weight_ratio"], evidence["weight_coverage"]),
                ("predictions", evidence["ratio"], evidence["coverage"]),
            )
        )
        said += "."
    return said + "".join(f" {f.about}." for f in cautions if f.about.startswith("Monte-Carlo"))
