"""The numbers that a method computes with: are they unbiased, do they agree with one another, and how noisy are they?

On the variant itself and its own data. For optimisers: the ELBO and its gradient (``elbo_estimators``). For samplers:
the log joint density and its gradient (``density_estimators``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bnn_pyro.checks.check import Finding, Outcome, worst
from bnn_pyro.checks.density_estimators import density_estimators
from bnn_pyro.checks.elbo_estimators import elbo_estimators
from bnn_pyro.checks.subject import Subject
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.features import on_features
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.optimise import Optimisation
from bnn_pyro.isolation import isolated
from bnn_pyro.settings import plain

__all__ = ["Estimators"]


@dataclass(frozen=True)
class Estimators:
    """Settings of the check of estimators.

    rows     of the training set that are used, at most
    batches  mini-batches that they are divided into
    repeats  of an estimate, to know its mean and variance
    warm     steps of training before, so that q has a width and a place of its own
    """

    rows: int = 600
    batches: int = 6
    repeats: int = 400
    warm: int = 300

    title: ClassVar[str] = "Estimators"
    idea: ClassVar[str] = (
        "Mini-batch estimates must have the full-batch number for their mean, whatever the size of the batches and the "
        "number of particles; gradients must be those of finite differences, in 32 bits as in 64."
    )
    quick: ClassVar[Mapping[str, Any]] = {"rows": 120, "repeats": 60, "warm": 60}

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        if subject.inference == "laplace":
            return "it takes all rows at once and estimates nothing"
        if str(getattr(subject.entry, "prior", "")).startswith("log-uniform") and subject.limit.startswith("posterior"):
            return "its prior is improper: there is no posterior to sample"
        return ""

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence`` of an optimiser: batch_sizes (M,), elbo, elbo_error (M,) means as training estimates them, and
        full_elbo, full_error, in nats; estimators (names), variance, variance_error: that of the gradient, as a share
        of the first one's. Of a sampler: gradient and finite_difference (K,), nats per unit.
        """
        start = time.perf_counter()
        method = subject.method({})
        data = self._few(subject.data)
        with isolated(seed):
            model = subject.entry.model(data.schema)
            model, data = on_features(model, data)
            guide = subject.entry.guide(model)
            if isinstance(method, Optimisation):
                found = elbo_estimators(self, subject, method, model, guide, data, seed, report)
            else:
                found = density_estimators(self, method, model, data)
        findings, evidence, figures = found
        level = worst(f.level for f in findings)
        return Outcome(
            "estimator",
            level,
            _sentence(findings, evidence, isinstance(method, Optimisation)),
            {**subject.settings(method), "check": plain(self), "rows": len(data.x_train)},
            tuple(findings),
            evidence,
            figures,
            time.perf_counter() - start,
        )

    def _few(self, data: Dataset) -> Dataset:
        """A part of the training rows, a multiple of the number of batches, and nothing else."""
        num = min(self.rows, len(data.x_train))
        num -= num % self.batches if num >= self.batches else 0
        return replace(data, x_train=data.x_train[:num], y_train=data.y_train[:num], x_val=data.x_val[:0],
                       y_val=data.y_val[:0], x_test=data.x_test[:0], y_test=data.y_test[:0])  # fmt: skip


def _sentence(findings: list[Finding], evidence: Mapping[str, Any], optimiser: bool) -> str:
    bad = [f for f in findings if f.level == "bad"]
    if bad:
        first = min(bad, key=lambda f: f.p if f.p is not None else 0.0)
        return (
            f"{len(bad)} of {len(findings)} estimates are wrong, most of all the {first.about}: {first.found:.5g} "
            f"where {first.expected:.5g} is right."
        )
    if not optimiser:
        return (
            "The log joint density's gradient is that of finite differences, in 32 bits as in 64, and mini-batches "
            "have it for their mean."
        )
    said = (
        "Mini-batches, particles and precision change the noise of the objective and of its gradient, not their mean."
    )
    if len(evidence.get("estimators", ())) > 1:
        pairs = zip(evidence["estimators"][1:], evidence["variance"][1:], strict=True)
        said += " Variance of the gradient, as a share of that of all rows and one draw: "
        said += ", ".join(f"{name} {share:.2g}" for name, share in pairs) + "."
    cautions = [f for f in findings if f.level == "caution"]
    return said + "".join(f" {f.about[0].upper()}{f.about[1:]}: {f.found:.4g}, not {f.expected:.4g}." for f in cautions)
