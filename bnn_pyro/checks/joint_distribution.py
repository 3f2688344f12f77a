"""The joint distribution test: transitions of a sampler, and new targets, must leave p(w, y | x) as it is.

    marginal-conditional     w ~ p(w),  y ~ p(y | x, w), independently
    successive-conditional   w_k ~ K(· | w_{k−1}; y_{k−1}),  y_k ~ p(y | x, w_k),   where K keeps p(w | y, x)

Geweke 2004, JASA 99:799. Both have the same joint distribution where model, prior, gradient and kernel are right.
Chains start from the first simulator's draws, and a kernel that is wrong drifts away from there. What is compared is
(w_k, y_{k−1}): w as the kernel left it, with the targets that it was given. With y_k, only the prior would be seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyro

from bnn_pyro.checks.check import Check, Estimate, Finding, Outcome, Subject, judge, most_off, worst
from bnn_pyro.checks.joint_chains import JointChains, transitions_of
from bnn_pyro.checks.simulation import Simulator, design
from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated
from bnn_pyro.progress import Report

#: Weights of a user's module, of which there are thousands of draws at once.
MAX_WEIGHTS = 2000
#: Settings of the methods that have them; a user's own go above. Long steps are often rejected: that is to be seen.
SETTINGS = {"warmup": 150, "target_accept": 0.6, "lr": 0.01, "max_steps": 50}
#: How many step sizes are tried where the user gave none and chains diverge or are far off; what divides each.
ATTEMPTS, DIVIDED = 3, 4
#: A distribution that is off by a quarter of a standard deviation, or of a variance, is no posterior of this model; and
#: nothing that is off by less is seen where the Monte-Carlo error is too large to tell.
LARGE = OF_INTEREST = 0.25


@dataclass(frozen=True)
class JointDistribution(Check):
    """Weights drawn from the prior and targets simulated from them must stay such a pair when the sampler moves the
    weights and new targets are simulated, again and again (Geweke 2004).

    chains  independent chains, each with targets of its own
    sweeps  transitions of each
    steps   of a method with a step size alone, which make one transition
    rows    of the training inputs        inputs  columns of them, at most
    hidden  units of a hidden layer, at most
    """

    title: ClassVar[str] = "Joint distribution test"
    quick: ClassVar[dict[str, int]] = {"chains": 2000, "sweeps": 8}

    chains: int = 5000
    sweeps: int = 50
    steps: int = 30
    rows: int = 10
    inputs: int = 4
    hidden: int = 4

    def _refuses(self, subject: Subject) -> str:
        if transitions_of(subject.kind) is None:
            return f"{subject.inference} makes no transitions of a Markov chain that are known here"
        if subject.converges_to != "exact" and not hasattr(subject.kind, "eta_share"):
            return f"{subject.inference} has a bias of the step size here, and no known law that it falls by"
        if subject.temperature != 1.0:
            return "targets can be simulated at temperature 1 alone"
        if subject.own_module:
            with isolated(0):
                simulator = Simulator(subject.entry, design(subject.data, self.rows, 2, 0))
            if simulator.potential.size > MAX_WEIGHTS or getattr(simulator.model, "statistics", None) is not None:
                return f"thousands of draws take too long of more than {MAX_WEIGHTS:,} weights, or batch statistics"
        if hasattr(subject.entry, "channels"):
            return "its layers are convolutions, too large for thousands of chains; mean-field has the same samplers"
        if subject.improper:
            return "its prior is improper, and there are no draws of it to begin with"
        if subject.converges_to != "exact" and str(getattr(subject.entry, "prior", "")).startswith("scale-mixture"):
            return "its prior has a part so narrow that steps small enough for it would take hours; take normal:1"
        return ""

    def _run(self, subject: Subject, seed: int, report: Report) -> Outcome:
        method, exact = subject.method(SETTINGS), subject.converges_to == "exact"
        with isolated(seed), pyro.validation_enabled(False), np.errstate(all="ignore"):  # of trajectories
            joint = JointChains(self, subject, seed)
            for k in range(1 if exact or "lr" in subject.given else ATTEMPTS):
                method = replace(method, lr=method.lr / DIVIDED) if k else method
                try:
                    evidence = joint.compare(method, self.steps * DIVIDED**k, report)
                    sentence, findings = self._verdict(evidence, 0.0 if exact else method.lr)
                except UserError as error:
                    what = "the warm-up of the sampler fails" if exact else f"at lr {method.lr:g} chains diverge"
                    sentence = f"{what}: {error}"
                    findings = [Finding("transitions of the chains", float("nan"), level="bad")]
                if (level := worst(f.level for f in findings)) != "bad":
                    break
        p = min((f.p for f in findings if f.p is not None), default=0.0)
        settings = subject.settings(method, joint.entry)
        return Outcome("joint-distribution", level, sentence, settings, findings, figures={"joint_p": p})

    def _verdict(self, evidence: Mapping[str, Any], lr: float) -> tuple[str, list[Finding]]:
        """Sentence and findings.   lr: the step size that a bias may be of; 0 where there may be none."""
        shift, error = evidence["shift"], evidence["error"]
        sides = [f"{side} of {name}" for name in evidence["quantities"] for side in ("mean", "variance")]
        estimate = Estimate(shift.ravel(), error.ravel())
        findings = judge(sides, estimate, np.zeros(shift.size), level="caution" if lr else "bad")
        if lr and (biased := [f for f in findings if f.level == "caution"]):
            top = max(biased, key=lambda f: abs(f.estimate))
            words = f"at lr {lr:g} the {top.about} is off by {top.estimate:+.2g} of its own spread"
            if abs(top.estimate) - 3 * top.error <= LARGE:
                return f"{words}, which the bias of a finite step may be", findings
            findings[findings.index(top)] = replace(top, level="bad")
            return f"{words}: the step is too large, or something else is wrong; take a smaller lr", findings
        if off := most_off(findings):
            return f"transitions do not leave the joint distribution as it is: {off}", findings
        # The least error of posterior variances that those of the slopes would show after many transitions; after k of
        # them, as far as they have come. A kernel that never moves leaves every distribution as it is.
        come = 1 - (1 - evidence["renewed"]) ** np.arange(1, self.sweeps + 1)
        slopes = [name.startswith("slope along") for name in evidence["quantities"]]
        blind = evidence["bound"] * float(np.median(error[slopes, 1])) / max(float(come.mean()), 1e-9)
        if blind <= OF_INTEREST:
            words = f"{self.chains * self.sweeps:,} transitions leave the joint distribution as it is in"
            return f"{words} {len(findings)} comparisons; variances off by {blind:.0%} would be seen", findings
        amount = f"by {blind:.0%}" if blind < 2 else "by any amount"
        words = f"too few draws to tell: variances could be off {amount} and not be seen; take more chains or sweeps"
        about = "error of the variances that would be seen"
        return words, [*findings, Finding(about, blind, OF_INTEREST, level="caution")]
