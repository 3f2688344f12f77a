"""The numbers that a method computes with: are they unbiased, do they agree with one another, and how noisy are they?

On the variant itself and its own data. For optimisers: the ELBO and its gradient (``elbo_estimators``). For samplers:
the log joint density that they follow; its gradient against finite differences, precision, and mini-batches.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from bnn_pyro.checks.check import Finding, Outcome, Subject, most_off, worst
from bnn_pyro.checks.elbo_estimators import elbo_estimators
from bnn_pyro.checks.z_tests import close
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.features import on_features
from bnn_pyro.inference import Method
from bnn_pyro.inference.linear import linear_layer, stochastic_log_joint
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.optimise import Optimisation
from bnn_pyro.inference.potential import Potential
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import weight_space

__all__ = ["Estimators"]

#: Step of central differences, how far they and 32 bits may be off (relative); points, and numbers looked at in each.
STEP, SMOOTH, ROUNDING, PLACES, COORDINATES = 1e-5, 1e-5, 1e-3, 4, 12


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
        method, data = subject.method({}), self._few(subject.data)
        with isolated(seed):
            model, data = on_features(subject.entry.model(data.schema), data)
            if isinstance(method, Optimisation):
                sizes = self.batches, self.repeats, self.warm
                guide = subject.entry.guide(model)
                findings, evidence, figures = elbo_estimators(*sizes, subject, method, model, guide, data, seed)
            else:
                findings, evidence = _density(method, weight_space(model), data, self.batches)
                figures = {}
        level, sentence = worst(f.level for f in findings), _sentence(findings, evidence)
        settings = {**subject.settings(method), "rows": len(data.x_train)}
        return Outcome("estimator", level, sentence, settings, findings, evidence, figures)

    def _few(self, data: Dataset) -> Dataset:
        """A part of the training rows, a multiple of the number of batches, and nothing else."""
        num = min(self.rows, len(data.x_train))
        num -= num % self.batches if num >= self.batches else 0
        return replace(data, x_train=data.x_train[:num], y_train=data.y_train[:num], x_val=data.x_val[:0],
                       y_val=data.y_val[:0], x_test=data.x_test[:0], y_test=data.y_test[:0])  # fmt: skip


def _density(method: Method, model: nn.Module, data: Dataset, batches: int) -> tuple[list[Finding], dict[str, Any]]:
    x, y, temperature = data.x_train, data.y_train, method.temperature
    single = Potential(model, x, y, temperature)
    exact = y.double() if y.is_floating_point() else y
    double = Potential(copy.deepcopy(model).double(), x.double(), exact, temperature)
    z = double.initial + 0.2 * (single.prior_draws(PLACES) - double.initial)
    density, gradient = double(z)
    which = torch.linspace(0, double.size - 1, min(COORDINATES, double.size)).round().long().unique()
    moves = torch.zeros(len(which), double.size, dtype=torch.float64)
    moves[torch.arange(len(which)), which] = STEP
    ahead, behind = (torch.stack([double(place + sign * moves)[0] for place in z]) for sign in (1, -1))
    differences = (ahead - behind) / (2 * STEP)  # (PLACES, coordinates)
    chosen, scale = gradient[:, which], gradient.abs().amax(1, keepdim=True).clamp_min(1.0)
    # Kinks of a piecewise linear network, and cancellation in a density of many nats, count for something.
    cancelled = 1e-15 * density.abs().max().item() / STEP / scale.min().item()
    off = ((differences - chosen).abs() / scale).flatten().sort().values
    low, low_gradient = single(z)
    in_32 = ((low - density).abs() / density.abs().clamp_min(1.0)).max().item()
    gradient_in_32 = ((low_gradient - gradient).abs() / scale).max().item()
    about = "gradient less finite differences, of the largest entry ({})"
    findings = [
        close(about.format("median"), off[len(off) // 2].item(), 0.0, SMOOTH + cancelled),
        close("log joint density in 32 bits less that in 64 (relative)", in_32, 0.0, ROUNDING),
        close("gradient in 32 bits less that in 64, of the largest entry", gradient_in_32, 0.0, ROUNDING),
    ]
    if linear_layer(model) is not None or getattr(model.net, "activation", None) in (torch.tanh, torch.sigmoid, None):
        findings.append(close(about.format("worst"), off[-1].item(), 0.0, 10 * SMOOTH + cancelled))
    if hasattr(method, "eta_share"):
        findings += _mini_batches(model, data, temperature, min(batches, len(x)))
    return findings, {"gradient": chosen.flatten().numpy(), "finite_difference": differences.flatten().numpy()}


def _mini_batches(model: nn.Module, data: Dataset, temperature: float, batches: int) -> list[Finding]:
    """The mean over equal mini-batches of log joint and gradient is that of all rows."""
    x, y, chains = data.x_train, data.y_train, 3
    target = stochastic_log_joint(model, x, y, temperature)
    with in_mode(model, training=False):
        w = target.flat(target.sample_prior(chains)[0])
        w = w.lerp(target.initial.to(w), 0.8)
        total, gradient = target.gradient(w)
        blocks = torch.randperm(len(x)).view(batches, -1)
        own = ([part[rows].expand(chains, *part[rows].shape) for part in (x, y)] for rows in blocks)
        pieces = [target.gradient(w, *rows) for rows in own]
    mean, slope = (torch.stack([p[k].double() for p in pieces]).mean(0) for k in (0, 1))
    off = ((mean - total).abs() / total.abs().clamp_min(1.0)).max().item()
    steep = ((slope - gradient).norm(dim=1) / gradient.norm(dim=1).clamp_min(1e-12)).max().item()
    about = f"{{}}: mean over {batches} mini-batches less that of all rows (relative)"
    pairs = {"log joint density": off, "gradient": steep}
    return [close(about.format(what), value, 0.0, ROUNDING) for what, value in pairs.items()]


def _sentence(findings: list[Finding], evidence: Mapping[str, Any]) -> str:
    if off := most_off(findings):
        return f"Estimates are wrong: {off}"
    if "finite_difference" in evidence:
        return (
            "The log joint density's gradient is that of finite differences, in 32 bits as in 64, and mini-batches "
            "have it for their mean."
        )
    words = (
        "Mini-batches, particles and precision change the noise of the objective and of its gradient, not their mean."
    )
    if len(evidence.get("estimators", ())) > 1:
        pairs = zip(evidence["estimators"][1:], evidence["variance"][1:], strict=True)
        words += " Variance of the gradient, as a share of that of all rows and one draw: "
        words += ", ".join(f"{name} {share:.2g}" for name, share in pairs) + "."
    for f in findings:
        if f.level == "caution":
            words += f" {f.about[0].upper()}{f.about[1:]}: {f.estimate:.4g}, not {f.expected:.4g}."
    return words
