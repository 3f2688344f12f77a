"""The joint distribution test: transitions of a sampler, and new targets, must leave p(w, y | x) as it is.

    marginal-conditional     w ~ p(w),  y ~ p(y | x, w), independently
    successive-conditional   w_k ~ K(· | w_{k−1}; y_{k−1}),  y_k ~ p(y | x, w_k),   where K keeps p(w | y, x)

Geweke 2004, JASA 99:799. Both have the same joint distribution where model, prior, gradient and kernel are right, and
no posterior has to be known. Chains start from the first simulator's draws, so that they are stationary from the first
transition on: there is no burn-in, chains are independent, and their spread is an honest standard error. A kernel that
is wrong drifts away from there, by a little with every sweep. What is compared is (w_k, y_{k−1}): w as the kernel left
it, with the targets that it was given. With y_k instead, only the prior would be seen, in which nothing stands out that
happens on the scale of the posterior.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from bnn_pyro.checks.check import ALPHA, Finding, Outcome, worst
from bnn_pyro.checks.joint_bench import Bench, Found
from bnn_pyro.checks.subject import Subject
from bnn_pyro.checks.transitions import TRANSITIONS, quiet
from bnn_pyro.checks.z_tests import Estimate, p_values, z_scores
from bnn_pyro.errors import UserError
from bnn_pyro.inference.method import Report
from bnn_pyro.isolation import isolated

__all__ = ["JointDistribution"]

#: Settings of the methods; a user's own go above them. Long steps are often rejected: that is what is to be seen.
SETTINGS: dict[str, dict[str, Any]] = {
    "nuts": {"warmup": 150, "target_accept": 0.6},
    "hmc": {"warmup": 150, "target_accept": 0.6},
    "chees": {"warmup": 100, "max_steps": 50},
    "sghmc": {"lr": 0.01},
    "sgld": {"lr": 0.01},
}

#: Step sizes of SGHMC and SGLD that are compared: the method's own, and that divided by so much.
DIVIDED = 4

#: How often the step size is divided before, where the user gave none and chains diverge or are far off.
ATTEMPTS = 2

#: A distribution that is off by a quarter of a standard deviation, or of a variance, is no posterior of this model.
LARGE = 0.25

#: Nothing that is off by less than this is seen where the Monte-Carlo error is too large to tell.
OF_INTEREST = 0.25


@dataclass(frozen=True)
class JointDistribution:
    """Settings: how many chains and sweeps, and how small the variant is made.

    chains  independent chains, each with targets of its own
    sweeps  transitions of each
    steps   of SGHMC and SGLD, which make one transition
    rows    of the training inputs        inputs  columns of them, at most
    hidden  units of a hidden layer, at most

    ``evidence``: quantities, the names of M quantities; shift, error, z (M, 2), how far the mean and the variance of
    each one's normal scores are off those of the joint distribution, with the standard error; drift, drift_error
    (sweeps, M, 2), the same after each sweep; levels (199,) and scores (199, M), quantiles of the standard Normal and
    of the chains' normal scores; bound, what |z| stays below with probability 1 − ALPHA; renewed, the share of a slope
    that one transition makes anew. Of SGHMC and SGLD also lr, and extrapolated, extrapolated_error (M, 2), what is left
    of the shift at step size 0. Empty where chains diverged.
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
        if subject.inference not in TRANSITIONS:
            return f"{subject.inference} makes no transitions of a Markov chain; take nuts, hmc, chees, sghmc or sgld"
        if float(subject.given.get("temperature", 1.0)) != 1.0:
            return "targets can be simulated at temperature 1 alone"
        if hasattr(subject.entry, "channels"):
            return "its layers are convolutions, too large for thousands of chains; mean-field has the same samplers"
        if str(getattr(subject.entry, "prior", "")).startswith("log-uniform"):
            return "its prior is improper, and there are no draws of it to begin with"
        if subject.limit != "posterior" and str(getattr(subject.entry, "prior", "")).startswith("scale-mixture"):
            return "its prior has a part so narrow that steps small enough for it would take hours; take normal:1"
        return ""

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``."""
        begun = time.perf_counter()
        method = subject.method(SETTINGS[subject.inference])
        with isolated(seed), quiet():
            bench = Bench(self, subject, seed, report)
            if subject.limit == "posterior":
                found, judged = _exact(bench, method)
            else:
                found, judged = _at_step_sizes(bench, method, self.steps, 0 if "lr" in subject.given else ATTEMPTS)
        level, sentence, findings, p, more = judged
        return Outcome(
            check="joint-distribution",
            level=level,
            sentence=sentence,
            settings=subject.settings(method) | {"check": vars(self), "variant": bench.described},
            findings=findings,
            evidence=bench.evidence(found) | more if found else {},
            figures={"joint_p": p},
            seconds=time.perf_counter() - begun,
        )


#: (level, sentence, findings, p, more evidence)
Judged = tuple[str, str, tuple[Finding, ...], float, dict[str, Any]]


def _exact(bench: Bench, method: Any) -> tuple[Found | None, Judged]:
    """A sampler whose limit is the posterior must be on it."""
    try:
        found = bench.compare(method)
    except UserError as error:
        return None, ("bad", f"the sampler does not get through its warm-up: {error}", (), 0.0, {})
    findings = _findings(bench, found.shift, found.error, "bad")
    p, off = min(f.p for f in findings), [f for f in findings if f.level == "bad"]
    level = worst(f.level for f in findings)
    if off:
        w = max(off, key=lambda f: abs(f.found / f.error))
        sentence = (
            f"transitions do not leave the joint distribution as it is: the {w.about} is off by {w.found:+.2g} of its "
            f"own spread ({abs(w.found / w.error):.0f} standard errors), one of {len(off)} out of {len(findings)}"
        )
    elif (blind := bench.blind(found)) > OF_INTEREST:
        level, sentence = "caution", _too_few(blind)
    else:
        sentence = (
            f"{bench.check.chains * bench.check.sweeps:,} transitions leave the joint distribution as it is: none of "
            f"{len(findings)} comparisons is off, and variances off by {blind:.0%} would be seen"
        )
    return found, (level, sentence, findings, p, {})


def _at_step_sizes(bench: Bench, method: Any, steps: int, attempts: int) -> tuple[Found | None, Judged]:
    """A sampler with a bias of the order of its step size: what is left of it as the step size goes to 0.

    attempts: how often the step size may be divided, where chains diverge or are far off for it.
    """
    small, smaller = replace(method, lr=method.lr / DIVIDED), DIVIDED * steps
    try:
        found = bench.compare(method, steps=steps)
        near = bench.compare(small, steps=smaller)
    except UserError as error:
        if attempts:
            return _at_step_sizes(bench, small, smaller, attempts - 1)
        finding = Finding("step size, as lr", method.lr, level="bad")
        return None, ("bad", f"at lr {method.lr:g} the chains diverge: {error}", (finding,), 0.0, {})
    here = _findings(bench, found.shift, found.error, "caution")
    top = max((f for f in here if f.level == "caution"), key=lambda f: abs(f.found), default=None)
    large = top is not None and abs(top.found) - 3 * top.error > LARGE
    if large and attempts == ATTEMPTS and abs(near.shift).max() < 0.5 * abs(found.shift).max():
        return _at_step_sizes(bench, small, smaller, attempts - 1)
    left = (DIVIDED * near.shift - found.shift) / (DIVIDED - 1)
    common = bench.expected.var(0) / len(bench.expected)  # the same draws of the joint distribution in both
    own = DIVIDED**2 * (near.error**2 - common) + (found.error**2 - common)
    error = np.sqrt(own / (DIVIDED - 1) ** 2 + common)
    # Of the second order in the step size, which this does not take away: a bias of 1/(1 − c) − 1 leaves c²/DIVIDED.
    limit = _findings(bench, left, error, "bad", 2 * found.shift**2 / DIVIDED, " at step size 0")
    p, level = min(f.p for f in limit), worst(f.level for f in (*here, *limit))
    amount = f"at lr {method.lr:g} the {top.about} is off by {top.found:+.2g} of its own spread" if top else ""
    if level == "bad":
        w = min(limit, key=lambda f: f.p)
        sentence = (
            f"a bias does not vanish with the step size: the {w.about} is off by {w.found:+.2g} of its own spread"
        )
    elif large:
        level, sentence = "bad", f"the step is too large: {amount}; take a smaller lr"
    elif top:
        remains = abs(left.ravel()[here.index(top)]) > 0.5 * abs(top.found)
        what = "and there are too few draws to tell whether that vanishes" if remains else "a bias that vanishes"
        sentence = f"{amount}, {what} with the step size"
    elif (blind := bench.blind(found)) > OF_INTEREST:
        level, sentence = "caution", _too_few(blind)
    else:
        sentence = f"no bias is seen at lr {method.lr:g}; variances off by {blind:.0%} would be"
    more = {"extrapolated": left, "extrapolated_error": error, "lr": method.lr}
    return found, (level, sentence, (*here, *limit), p, more)


def _too_few(blind: float) -> str:
    amount = f"by {blind:.0%}" if blind < 2 else "by any amount"
    return f"too few draws to tell: variances could be off {amount} and not be seen; take more chains or sweeps"


def _findings(
    bench: Bench, shift: np.ndarray, error: np.ndarray, level: str, allowed: Any = 0.0, what: str = ""
) -> tuple:
    """One for the mean and one for the variance of every quantity, in units of its own spread."""
    estimate = Estimate(shift.ravel(), error.ravel(), np.full(shift.size, np.inf))
    z = z_scores(estimate, np.zeros(shift.size), tolerance=np.ravel(allowed))
    p = np.minimum(1.0, len(z) * p_values(estimate, z))
    sides = [f"{side} of {name}{what}" for name in bench.quantities.names for side in ("mean", "variance")]
    rows = zip(sides, estimate.mean, estimate.error, p, strict=True)
    return tuple(
        Finding(about, float(m), 0.0, float(e), float(q), level if q < ALPHA else "good") for about, m, e, q in rows
    )
