"""The joint distribution test: transitions of a sampler, and new targets, must leave p(w, y | x) as it is.

    marginal-conditional     w ~ p(w),  y ~ p(y | x, w), independently
    successive-conditional   w_k ~ K(· | w_{k−1}; y_{k−1}),  y_k ~ p(y | x, w_k),   where K keeps p(w | y, x)

Geweke 2004, JASA 99:799. Both have the same joint distribution where model, prior, gradient and kernel are right, and
no posterior has to be known. Chains start from the first simulator's draws: they are independent and stationary from
the first transition on, and a kernel that is wrong drifts away from there. What is compared is (w_k, y_{k−1}): w as the
kernel left it, with the targets that it was given. With y_k, only the prior would be seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyro

from bnn_pyro.checks.check import Finding, Outcome, Subject, most_off, worst
from bnn_pyro.checks.joint_chains import QUANTILES, JointChains, Shift, transitions_of
from bnn_pyro.errors import UserError
from bnn_pyro.inference import Method
from bnn_pyro.isolation import isolated
from bnn_pyro.progress import Report

__all__ = ["JointDistribution"]

#: Settings of the methods that have them; a user's own go above. Long steps are often rejected: that is to be seen.
SETTINGS = {"warmup": 150, "target_accept": 0.6, "lr": 0.01, "max_steps": 50}
#: Step sizes that are compared: the method's own, and that divided by so much; and how often the step size is divided
#: before, where the user gave none and chains diverge or are far off.
DIVIDED, ATTEMPTS = 4, 2
#: A distribution that is off by a quarter of a standard deviation, or of a variance, is no posterior of this model; and
#: nothing that is off by less is seen where the Monte-Carlo error is too large to tell.
LARGE = OF_INTEREST = 0.25
#: Of the names of quantities extrapolated.
AT_ZERO = " at step size 0"


@dataclass(frozen=True)
class JointDistribution:
    """Settings: how many chains and sweeps, and how small the variant is made.

    chains  independent chains, each with targets of its own
    sweeps  transitions of each
    steps   of a method with a step size alone, which make one transition
    rows    of the training inputs        inputs  columns of them, at most
    hidden  units of a hidden layer, at most

    ``evidence``: quantities, M names; shift, error, z (M, 2), how far mean and variance of each one's normal scores
    are off those of the joint distribution; drift, drift_error (sweeps, M, 2), the same after each sweep; levels (199,)
    and scores (199, M), quantiles of the standard Normal and of the chains' normal scores; bound, what |z| stays below
    with probability 1 − ALPHA; renewed, the share of a slope that one transition makes anew. Empty where chains
    diverged.
    """

    title: ClassVar[str] = "Joint distribution test"
    idea: ClassVar[str] = (
        "Weights drawn from the prior and targets simulated from them must stay such a pair when the sampler moves the "
        "weights and new targets are simulated, again and again (Geweke 2004)."
    )
    quick: ClassVar[dict[str, int]] = {"chains": 2000, "sweeps": 8}

    chains: int = 5000
    sweeps: int = 50
    steps: int = 30
    rows: int = 10
    inputs: int = 4
    hidden: int = 4

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        if transitions_of(subject.kind) is None:
            return f"{subject.inference} makes no transitions of a Markov chain that are known here"
        if subject.temperature != 1.0:
            return "targets can be simulated at temperature 1 alone"
        if hasattr(subject.entry, "channels"):
            return "its layers are convolutions, too large for thousands of chains; mean-field has the same samplers"
        if subject.improper:
            return "its prior is improper, and there are no draws of it to begin with"
        if subject.converges_to != "exact" and str(getattr(subject.entry, "prior", "")).startswith("scale-mixture"):
            return "its prior has a part so narrow that steps small enough for it would take hours; take normal:1"
        return ""

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``."""
        method = subject.method(SETTINGS)
        with isolated(seed), pyro.validation_enabled(False), np.errstate(all="ignore"):  # of trajectories
            joint = JointChains(self, subject, seed, report)
            if subject.converges_to == "exact":
                shift, sentence, findings = _exact(joint, method)
            else:
                attempts = 0 if "lr" in subject.given else ATTEMPTS
                shift, sentence, findings = _at_step_sizes(joint, method, self.steps, attempts)
        limit = [f for f in findings if subject.converges_to == "exact" or f.about.endswith(AT_ZERO)]
        p = min((f.p for f in limit if f.p is not None), default=0.0)
        evidence: dict[str, Any] = {}
        if shift is not None:
            evidence = shift._asdict() | {"z": shift.shift / shift.error, "bound": shift.bound}
            evidence |= {"quantities": joint.names, "levels": QUANTILES}
        level, settings = worst(f.level for f in findings), subject.settings(method, joint.entry)
        return Outcome("joint-distribution", level, sentence, settings, findings, evidence, {"joint_p": p})


# -- the verdict -------------------------------------------------------------------------------------------------------
Judged = tuple[Shift | None, str, list[Finding]]


def _exact(joint: JointChains, method: Method) -> Judged:
    """A sampler that converges to the posterior must be on it."""
    try:
        shift = joint.compare(method)
    except UserError as error:
        sentence = f"the sampler does not get through its warm-up: {error}"
        return None, sentence, [Finding("transitions of the chains", float("nan"), level="bad")]
    findings = joint.findings(shift.shift, shift.error, "bad")
    if off := most_off(findings):
        return shift, f"transitions do not leave the joint distribution as it is: {off}", findings
    number = joint.check.chains * joint.check.sweeps
    sentence = f"{number:,} transitions leave the joint distribution as it is in {len(findings)} comparisons"
    return _seen(joint, shift, findings, sentence)


def _at_step_sizes(joint: JointChains, method: Method, steps: int, attempts: int) -> Judged:
    """A sampler with a bias of the order of its step size: what is left of it as the step size goes to 0.

    attempts: how often the step size may be divided, where chains diverge or are far off for it.
    """
    small, smaller = replace(method, lr=method.lr / DIVIDED), DIVIDED * steps
    try:
        shift = joint.compare(method, steps=steps)
        near = joint.compare(small, steps=smaller)
    except UserError as error:
        if attempts:
            return _at_step_sizes(joint, small, smaller, attempts - 1)
        finding = Finding("step size, as lr", method.lr, level="bad")
        return None, f"at lr {method.lr:g} the chains diverge: {error}", [finding]
    at_lr = joint.findings(shift.shift, shift.error, "caution")
    top = max((f for f in at_lr if f.level == "caution"), key=lambda f: abs(f.estimate), default=None)
    large = top is not None and abs(top.estimate) - 3 * top.error > LARGE
    if large and attempts == ATTEMPTS and abs(near.shift).max() < 0.5 * abs(shift.shift).max():
        return _at_step_sizes(joint, small, smaller, attempts - 1)
    left = (DIVIDED * near.shift - shift.shift) / (DIVIDED - 1)
    common = joint.expected.var(0) / len(joint.expected)  # the same draws of the joint distribution in both
    own = DIVIDED**2 * (near.error**2 - common) + (shift.error**2 - common)
    error = np.sqrt(own / (DIVIDED - 1) ** 2 + common)
    # Of the second order in the step size, which this does not take away: a bias of 1/(1 − c) − 1 leaves c²/DIVIDED.
    limit = joint.findings(left, error, "bad", 2 * shift.shift**2 / DIVIDED, AT_ZERO)
    findings = [*at_lr, *limit]
    if off := most_off(limit):
        return shift, f"a bias does not vanish with the step size: {off}", findings
    if top is None:
        return _seen(joint, shift, findings, f"no bias is seen at lr {method.lr:g}")
    amount = f"at lr {method.lr:g} the {top.about} is off by {top.estimate:+.2g} of its own spread"
    if large:
        findings.append(Finding("step size, as lr", method.lr, level="bad"))
        return shift, f"the step is too large: {amount}; take a smaller lr", findings
    remains = abs(left.ravel()[at_lr.index(top)]) > 0.5 * abs(top.estimate)
    what = "and there are too few draws to tell whether that vanishes" if remains else "a bias that vanishes"
    return shift, f"{amount}, {what} with the step size", findings


def _seen(joint: JointChains, shift: Shift, findings: list[Finding], sentence: str) -> Judged:
    """Where nothing is off: the sentence, and what would have been seen."""
    # The least error of posterior variances that those of the slopes would show: off by that after many transitions,
    # after k of them as far as they have come. A kernel that never moves leaves every distribution as it is.
    come = 1 - (1 - shift.renewed) ** np.arange(1, joint.check.sweeps + 1)
    blind = shift.bound * float(np.median(shift.error[joint.slopes, 1])) / max(float(come.mean()), 1e-9)
    if blind <= OF_INTEREST:
        return shift, f"{sentence}; variances off by {blind:.0%} would be seen", findings
    amount = f"by {blind:.0%}" if blind < 2 else "by any amount"
    words = f"too few draws to tell: variances could be off {amount} and not be seen; take more chains or sweeps"
    finding = Finding("error of the variances that would be seen", blind, OF_INTEREST, level="caution")
    return shift, words, [*findings, finding]
