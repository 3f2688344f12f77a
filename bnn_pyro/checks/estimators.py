"""The numbers that a method computes with: are they unbiased, do they agree with one another, and how noisy are they?

On the variant itself and its own data. For optimisers: the ELBO and its gradient as training estimates them. For
samplers: the log joint density that they follow, its gradient against finite differences, precision, and mini-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bnn_pyro.checks.check import Finding, Outcome, Subject, most_off, worst
from bnn_pyro.checks.objectives import density_estimators, elbo_estimators
from bnn_pyro.features import on_features
from bnn_pyro.inference.optimise import Optimisation
from bnn_pyro.isolation import isolated
from bnn_pyro.parallel.task import Report
from bnn_pyro.posterior import weight_space

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
        if subject.converges_to == "normal at the mode":
            return "it takes all rows at once and estimates nothing"
        if subject.improper and subject.exact:
            return "its prior is improper: there is no posterior to sample"
        return ""

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence`` of an optimiser: batch_sizes (M,), elbo, elbo_error (M,) means as training estimates them, in nats;
        estimators (names), variance, variance_error: that of the gradient, as a share of the first one's. Of a sampler:
        gradient and finite_difference (K,), nats per unit.
        """
        method, data = subject.method({}), subject.data
        num = min(self.rows, len(data.x_train))
        num -= num % self.batches if num >= self.batches else 0
        none = {f"{which}_{part}": getattr(data, f"{which}_{part}")[:0] for which in "xy" for part in ("val", "test")}
        data = replace(data, x_train=data.x_train[:num], y_train=data.y_train[:num], **none)
        with isolated(seed):
            model, data = on_features(subject.entry.model(data.schema), data)
            if isinstance(method, Optimisation):
                guide = subject.entry.guide(model)
                sizes = self.batches, self.repeats, self.warm
                findings, evidence, figures = elbo_estimators(*sizes, subject, method, model, guide, data, seed)
            else:
                findings, evidence = density_estimators(method, weight_space(model), data, self.batches)
                figures = {}
        level, sentence = worst(f.level for f in findings), _sentence(findings, evidence)
        settings = {**subject.settings(method), "rows": len(data.x_train)}
        return Outcome("estimator", level, sentence, settings, findings, evidence, figures)


def _sentence(findings: list[Finding], evidence: Mapping[str, Any]) -> str:
    if off := most_off(findings):
        return f"Estimates are wrong: {off}"
    if "finite_difference" in evidence:
        words = "The log joint density's gradient is that of finite differences, in 32 bits as in 64, and mini-batches "
        return words + "have it for their mean."
    words = "Mini-batches, particles and precision change the noise of the objective and of its gradient, not their "
    words += "mean."
    if len(evidence.get("estimators", ())) > 1:
        pairs = zip(evidence["estimators"][1:], evidence["variance"][1:], strict=True)
        words += " Variance of the gradient, as a share of that of all rows and one draw: "
        words += ", ".join(f"{name} {share:.2g}" for name, share in pairs) + "."
    for f in findings:
        if f.level == "caution":
            words += f" {f.about[0].upper()}{f.about[1:]}: {f.estimate:.4g}, not {f.expected:.4g}."
    return words
