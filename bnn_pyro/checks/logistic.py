"""A method on logistic regression with several weights, against a long run of this package's NUTS.

Too many weights for a grid: the reference is a sampler that is itself held to integrals where there are two
(``quadrature``), here on a log-concave posterior in whitened coordinates, where it converges. Compared are means and
mean squares of the log-odds, and the probabilities, at new inputs; errors are those of both runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.checks.check import ALPHA, Finding, Outcome, worst
from bnn_pyro.checks.linear_regression import LinearGaussian, correlated, dataset
from bnn_pyro.checks.quadrature import small_settings
from bnn_pyro.checks.reduction import irreducible, reduced
from bnn_pyro.checks.subject import Subject
from bnn_pyro.checks.z_tests import Estimate, bound, judge, of_chains, of_runs, z_scores
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.fitting import fit
from bnn_pyro.inference import NUTS, Method
from bnn_pyro.inference.method import Report
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import predict
from bnn_pyro.settings import plain
from bnn_pyro.zoo import MeanField

__all__ = ["Logistic"]

PRIOR, DRAWS, BLIND = 1.5, 4000, 0.1


@dataclass(frozen=True)
class Logistic:
    """Settings of the check against a long run of NUTS.

    rows, inputs  of the data; neighbouring inputs correlate at 0.7, and there is a bias
    points        new inputs B at which predictions are compared
    draws         of each of the four chains of the reference
    effort        length of the method's own run, in that of the quick budget
    """

    rows: int = 100
    inputs: int = 5
    points: int = 10
    draws: int = 10_000
    effort: float = 4.0

    title: ClassVar[str] = "Logistic regression"
    idea: ClassVar[str] = (
        "A posterior of six weights that no grid holds: log-odds and probabilities at new inputs are held against a "
        "long run of NUTS, which is itself held against numerical integration."
    )
    quick: ClassVar[Mapping[str, Any]] = {"draws": 2000, "effort": 1.0}

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        if subject.given.get("temperature", 1.0) != 1.0:
            return "the reference is a posterior at temperature 1"
        return irreducible(subject)

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence``: labels (M,), z (M,), by how many standard errors each quantity is off, with the bound of an alarm;
        of the log-odds at B new inputs: exact_mean, exact_sd, found_mean, found_sd (B,), and of the probabilities
        exact_probability, found_probability (B,), "exact" being the reference.
        """
        start = time.perf_counter()
        problem = correlated(self.rows, self.inputs)
        x = (problem.x / problem.x.square().mean().sqrt()).float()
        wave = torch.sin(torch.arange(self.rows) * 2.4)
        schema = Schema("classification", (self.inputs,), classes=("no", "yes"))
        data = dataset(x, (problem.y + wave > 0.3).long(), schema)
        new = (correlated(self.points, self.inputs, seed=2).x / problem.x.square().mean().sqrt()).float()
        settings = {"hidden": (), "bias": True, "prior": f"normal:{PRIOR}"}
        long = NUTS(draws=self.draws, warmup=500, chains=4, cores=1)
        how = dict(device="cpu", progress=False)
        reference = _log_odds(fit(MeanField(**settings), data, long, seed=seed + 1000, **how), new, seed)
        if report is not None:
            report(1, 2, {})
        method = subject.method(small_settings(subject.inference, "logistic", self.effort))
        entry = reduced(subject.entry, **settings)
        found = _log_odds(fit(entry, data, method, seed=seed, **how), new, seed)
        centre, sd = reference.mean((0, 1)), reference.std((0, 1))
        base, own = (_quantities(values, centre, sd) for values in (reference, found))
        a = of_chains(base)
        b = of_runs(own.mean(1)) if subject.limit == "posterior at step size 0" else of_chains(own)
        both = Estimate(b.mean, np.hypot(a.error, b.error), b.freedom)
        tolerance = self._bias(method, problem, x) if subject.limit == "posterior at step size 0" else 0.0
        exact = subject.limit.startswith("posterior")
        labels = [what.format(k + 1) for what in _LABELS for k in range(self.points)]
        level = "bad" if exact else "caution"
        findings = list(judge(labels, both, a.mean, tolerance=tolerance, level=level))
        noisy = float(both.error[: self.points].max())
        if exact and noisy > BLIND:
            about = "Monte-Carlo error of the log-odds (posterior sd): too few independent draws to tell"
            findings.append(Finding(about, noisy, BLIND, level="caution"))
        evidence = self._evidence(labels, both, a, tolerance, reference, found)
        variation = float(np.abs(evidence["found_probability"] - evidence["exact_probability"]).mean())
        ratio = float(np.mean(evidence["found_sd"] / evidence["exact_sd"]))
        return Outcome(
            "logistic",
            worst(f.level for f in findings),
            _sentence(findings, exact, ratio, variation),
            {**subject.settings(method), "variant": plain(entry), "check": plain(self)},
            tuple(findings),
            evidence,
            {"logistic_sd": ratio, "logistic_variation": variation},
            time.perf_counter() - start,
        )

    def _evidence(
        self,
        labels: list[str],
        both: Estimate,
        expected: Estimate,
        tolerance: float,
        reference: np.ndarray,
        found: np.ndarray,
    ) -> dict[str, Any]:
        named = {"exact": reference, "found": found}
        return {
            "labels": labels,
            "z": z_scores(both, expected.mean, tolerance=tolerance),
            "bound": bound(both),
            **{f"{name}_mean": f.mean((0, 1)) for name, f in named.items()},
            **{f"{name}_sd": f.std((0, 1)) for name, f in named.items()},
            **{f"{name}_probability": (1 / (1 + np.exp(-f))).mean((0, 1)) for name, f in named.items()},
        }

    def _bias(self, method: Method, problem: LinearGaussian, x: Tensor) -> float:
        """Of a variance by a finite step, at most: ηλ/(4 − 2α) for the largest curvature that there can be."""
        a = problem.design(x)
        largest = 0.25 * torch.linalg.eigvalsh(a.T @ a).max().item() + 1 / PRIOR**2
        return method.eta_share * method.lr / self.rows * largest / (4 - 2 * method.friction)


_LABELS = (
    "mean log-odds at input {} (posterior sd)",
    "mean square of the log-odds about their mean at input {} (posterior variance)",
    "probability at input {}",
)


def _log_odds(posterior: Posterior, x: Tensor, seed: int) -> np.ndarray:
    """(C, D, B)."""
    chains = None if posterior.chains is None else next(iter(posterior.chains.values())).shape[:2]
    lead = (1, DRAWS) if chains is None else tuple(chains)
    prediction = predict(posterior, x, num_draws=lead[0] * lead[1], seed=seed)
    return prediction.components.logits.double().unflatten(0, lead).numpy()


def _quantities(f: np.ndarray, centre: np.ndarray, sd: np.ndarray) -> np.ndarray:
    unit = (f - centre) / sd
    return np.concatenate([unit, unit**2, 1 / (1 + np.exp(-f))], -1)


def _sentence(findings: list[Finding], exact: bool, ratio: float, variation: float) -> str:
    bad = [f for f in findings if f.level == "bad"]
    if bad:
        first = min(bad, key=lambda f: f.p if f.p is not None else 0.0)
        return (
            f"On logistic regression with six weights this is not the posterior that a long run of NUTS finds: "
            f"{len(bad)} quantities are off, most of all the {first.about}: {first.found:.3g} instead of "
            f"{first.expected:.3g}."
        )
    if exact:
        least = min(f.p for f in findings if f.p is not None)
        said = (
            "On logistic regression with six weights, log-odds and probabilities are those of a long run of NUTS "
            f"(smallest p {least:.2g}, alarm below {ALPHA:g})."
        )
        return said + "".join(f" {f.about}." for f in findings if f.about.startswith("Monte-Carlo"))
    return (
        f"On logistic regression with six weights, the log-odds have {ratio:.2f} of the standard deviation that a long "
        f"run of NUTS finds, and probabilities are off by {100 * variation:.1f} percentage points on average."
    )
