"""The joint distribution test: transitions of a sampler in turn with new targets must leave p(w, y | x) invariant.

    marginal-conditional     w ~ p(w),  y ~ p(y | x, w), independently
    successive-conditional   w_k ~ K(· | w_{k−1}; y_{k−1}),  y_k ~ p(y | x, w_k),   where K keeps p(w | y, x)

Geweke 2004, JASA 99:799. Both have the same joint distribution if model, prior, gradient and kernel are right. Chains
start from draws of the first simulator; a wrong kernel drifts away from them. The test compares (w_k, y_{k−1}), the
weights after a transition with the targets that it was given; with y_k it would only test the prior. The kernel, with
step size and mass matrix, comes from a short warm-up of the method on one data set. Weights alone have little power if
the prior is much wider than the posterior; the log-likelihood and the slopes of the log joint also depend on the data
(Modrák et al. 2023, arXiv:2211.02383).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyro
from scipy.stats import norm
from torch import Tensor

from bnn_pyro.checks.check import ALPHA, Check, Estimate, Finding, Outcome, Subject, concluded, judge, worst
from bnn_pyro.checks.sbc_ranks import scores_beside
from bnn_pyro.checks.simulation import Simulator, design
from bnn_pyro.checks.user_module import few_rows
from bnn_pyro.diagnostics.draws import even
from bnn_pyro.errors import UserError
from bnn_pyro.inference import Method
from bnn_pyro.inference.chees import Chains, Kernel
from bnn_pyro.inference.coordinates import coordinates
from bnn_pyro.inference.cost import TYPICAL, choose_compiled
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.sghmc import Chains as StochasticChains
from bnn_pyro.isolation import isolated
from bnn_pyro.progress import Report

#: Largest number of weights of a user's module, as there are thousands of draws in memory.
MAX_WEIGHTS = 2000
#: Settings of a method, as far as it has them and the user gave no others. Long steps test the rejection of proposals.
SETTINGS = {"warmup": 150, "target_accept": 0.6, "lr": 0.01, "max_steps": 50}
#: Number of step sizes that are tried if the user gave none and the check is bad, and the divisor between two of them.
ATTEMPTS, DIVIDED = 3, 4
#: A bias of the step size is bad above this share of a standard deviation or variance, and errors of this size must be
#: detectable.
LARGE = OF_INTEREST = 0.25
#: Largest numbers of weights and of rows that are compared one by one.
WEIGHTS, ROWS = 8, 3
#: Number of draws of the joint distribution per chain.
REFERENCE = 20
#: Number of chains that ChEES is tuned with.
TUNED_WITH = 64

#: One transition of C chains, each with its own targets, y (C, N) -> the new weights {site: (C, *shape)}.
Transition = Callable[[Tensor], dict[str, Tensor]]
Weights = dict[str, Tensor]  # {site: (C, *shape)}


def _one_by_one(method: Any, joint: "JointChains", w: Weights, steps: int) -> Transition:
    """After its warm-up, a kernel has no state but its position: one kernel moves all chains in turn."""
    potential = joint.potential()
    z = potential.position(w)
    gradients = float(len(z) * joint.check.sweeps * method.typical(potential.space.whitened))
    if choose_compiled(method.compiled, gradients, potential):
        potential.compile(1)
    first = potential.position({site: value[None] for site, value in joint.first.items()})[0].numpy()
    kernel = method.kernel(potential, first, joint.seed)
    for _ in range(method.warmup):
        kernel.step()

    def move(y: Tensor) -> dict[str, Tensor]:
        for row, targets in zip(z.numpy(), y, strict=True):
            potential.give(targets)
            kernel.start_at(row)
            kernel.step()
            row[:] = kernel.point.z
        return potential.weights(z)

    return move


def _all_at_once(method: Any, joint: "JointChains", w: Weights, steps: int) -> Transition:
    """A few chains tune the sampler, whose settings are then used for all chains."""
    potential, chains = joint.potential(), dict(superchains=1, thin=1)
    z = potential.position(w)
    if choose_compiled(method.compiled, float(method.warmup * TYPICAL), potential):
        potential.compile(TUNED_WITH)
    tuned = Kernel(replace(method, chains=TUNED_WITH, **chains), potential)
    tuned.begin(potential.prior_draws(TUNED_WITH))
    for _ in range(method.warmup):
        tuned.step()
    kernel = Kernel(replace(method, chains=len(z), **chains), potential)
    kernel.first, kernel.adaptation, kernel.done = tuned.first, tuned.adaptation, tuned.done

    def move(y: Tensor) -> dict[str, Tensor]:
        nonlocal z
        potential.give(y)
        kernel.chains = Chains(z, *potential(z))
        kernel.step()
        z = kernel.chains.z
        return potential.weights(z)

    return move


def _in_steps(method: Any, joint: "JointChains", w: Weights, steps: int) -> Transition:
    """A transition is ``steps`` steps on all rows with a constant step size; momenta are kept between transitions."""
    settings = dict(chains=joint.check.chains, epochs=joint.check.sweeps * steps, burn_in=0, batch_size=0, max_draws=1)
    run = StochasticChains(replace(method, **settings), joint.simulator.model, joint.data, joint.seed)
    run.w = run.log_joint.flat(w)

    def move(y: Tensor) -> dict[str, Tensor]:
        for _ in range(steps):
            run.advance(joint.data.x_train, y)
        run.record()  # raises UserError where something stops being finite
        return {site: value.clone() for site, value in run.log_joint.sites(run.w).items()}

    return move


def transitions_of(kind: type[Method]) -> Callable[..., Transition] | None:
    """The function that makes the transitions of a method of this class; None if they are not known."""
    # Methods are recognised by their settings: superchains, a kernel of one chain, a step of stochastic gradients.
    kinds = {"superchains": _all_at_once, "kernel": _one_by_one, "eta_share": _in_steps}
    return next((make for name, make in kinds.items() if hasattr(kind, name)), None)


class JointChains:
    """The joint distribution p(w, y | x) of a reduced variant, compared with chains by M quantities of (w, y).

    first {site: (*shape)}, data: one exact draw and its targets, for the warm-up.
    """

    def __init__(self, check: "JointDistribution", subject: Subject, seed: int) -> None:
        self.check, self.seed = check, seed
        data = few_rows(subject.data, check.rows)
        x, schema = data.x_train, data.schema
        if not subject.own_module:
            x = x.flatten(1)
            varied = x.amax(0) > x.amin(0)
            x = x[:, varied] if varied.any() else x
            x = x[:, even(x.shape[1], check.inputs)].clone()
            schema = replace(schema, input_shape=(x.shape[1],), features=(), columns=())
        entry = subject.reduced()
        if hasattr(entry, "hidden"):
            entry = replace(entry, hidden=tuple(min(width, check.hidden) for width in entry.hidden))
        if subject.converges_to != "exact" and not schema.has_classes and isinstance(entry.noise, str):
            # If the noise is unknown, it is so small in some draws of the prior that no step is small enough.
            entry = replace(entry, noise=0.5 * float(np.mean(schema.y_scale)))
        data = replace(data, schema=schema, x_train=x, x_test=x[even(len(x), ROWS)])
        self.entry, self.simulator = entry, Simulator(entry, data)
        potential = self.simulator.potential
        places = [(site, place) for site, shape in potential.free.items() for place in np.ndindex(*shape)]
        self.picked = even(potential.size, WEIGHTS)
        self.weights = [f"{site}{list(place) or ''}" for site, place in (places[i] for i in self.picked)]
        w, y = self.simulator.draws(check.chains * REFERENCE)
        self.names, values = self.quantities(w, y)
        self.slopes = [i for i, name in enumerate(self.names) if name.startswith("slope along")]
        self.sample = np.sort(values, 0)
        scores = scores_beside(self.sample, values)
        self.expected = np.stack([scores, scores**2], 2)  # (S, M, 2)
        # The warm-up is given targets of median likelihood.
        likelihood = values[:, self.names.index("log-likelihood of the data")]
        middle = int(np.argsort(likelihood)[len(likelihood) // 2])
        self.first = {site: value[middle] for site, value in w.items()}
        self.data = replace(self.simulator.data(y[middle]), x_train=potential.x)

    def potential(self) -> Potential:
        """The log joint for the warm-up of a sampler, in suitable coordinates."""
        potential = Potential(self.simulator.model, self.data.x_train, self.data.y_train)
        potential.space = coordinates(potential)
        return potential

    def quantities(self, w: Mapping[str, Tensor], y: Tensor) -> tuple[list[str], np.ndarray]:
        """(M names, values (C, M)) of the quantities of weights w {site: (C, *shape)} and targets y (C, N)."""
        potential = self.simulator.potential
        potential.give(y)
        z = potential.position(w)
        log_joint, slopes = potential(z)
        questions, values = self.simulator.quantities(w, y)
        names = [*self.weights, *(f"slope along {name}" for name in self.weights)]
        names += ["log joint", "mean target", *(about for about, _ in questions)]
        columns = [z[:, self.picked], slopes[:, self.picked], log_joint, y.double().flatten(1).mean(1)]
        return names, np.column_stack([*(c.double().numpy() for c in columns), values])

    def compare(self, method: Method, steps: int, report: Report) -> tuple[Estimate, float]:
        """(difference of chains of this method to the joint distribution, (2M,): mean and variance of the normal scores
        of each quantity; smallest relative error of posterior variances that would be detected).

        steps: per transition, for a method with a constant step size.   Raises UserError if chains diverge.
        """
        sweeps, simulator = self.check.sweeps, self.simulator
        w, y = simulator.draws(self.check.chains)
        move = transitions_of(type(method))(method, self, w, steps)
        renewed, total = [], 0.0
        for k in range(sweeps):
            before = scores_beside(self.sample, self.quantities(w, y)[1])[:, self.slopes]
            w = move(y)
            if not np.isfinite(values := self.quantities(w, y)[1]).all():
                raise UserError(f"after {k + 1} transitions, densities or their slopes are no longer finite")
            scores = scores_beside(self.sample, values)
            after = scores[:, self.slopes]  # both have mean 0
            norms = np.sqrt((before**2).mean(0) * (after**2).mean(0)).clip(1e-300)
            renewed.append(1 - ((before * after).mean(0) / norms).clip(0, 1))
            total = total + np.stack([scores, scores**2], 2) / sweeps
            y = simulator.targets(w)
            report(k + 1, sweeps, {})
        shift = total.mean(0) - self.expected.mean(0)
        error = np.sqrt(total.var(0) / len(total) + self.expected.var(0) / len(self.expected))  # independent samples
        # The smallest error of posterior variances that the slopes' variances would show. After k transitions a part of
        # it is visible, as chains start from the joint distribution: a kernel that never moves would show nothing.
        visible = 1 - (1 - np.median(np.mean(renewed, 0))) ** np.arange(1, sweeps + 1)
        bound = norm.isf(ALPHA / (2 * shift.size))
        blind = float(bound * np.median(error[self.slopes, 1]) / max(visible.mean(), 1e-9))
        return Estimate(shift.ravel(), error.ravel()), blind


@dataclass(frozen=True)
class JointDistribution(Check):
    """Weights drawn from the prior, with targets simulated from them, must keep their joint distribution when the
    sampler moves the weights and new targets are simulated, again and again (Geweke 2004).

    chains, sweeps        number of independent chains, each with its own targets; transitions of each chain
    steps                 steps per transition, for a method with a constant step size
    rows, inputs, hidden  number of training rows; largest number of columns, and width of a hidden layer
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
            return f"{subject.inference} has no transitions of a Markov chain that this check knows"
        if subject.converges_to != "exact" and not hasattr(subject.kind, "eta_share"):
            return f"{subject.inference} has a bias of the step size whose order is not known"
        if subject.temperature != 1.0:
            return "targets can only be simulated at temperature 1"
        if subject.own_module:
            with isolated(0):
                simulator = Simulator(subject.entry, design(subject.data, self.rows, 2, 0))
            if simulator.potential.size > MAX_WEIGHTS or getattr(simulator.model, "statistics", None) is not None:
                return f"thousands of draws take too long with over {MAX_WEIGHTS:,} weights or batch statistics"
        if hasattr(subject.entry, "channels"):
            return "its layers are convolutions, too large for thousands of chains; mean-field has the same samplers"
        if subject.improper:
            return "its prior is improper and cannot be sampled"
        if subject.converges_to != "exact" and str(getattr(subject.entry, "prior", "")).startswith("scale-mixture"):
            return "its prior has a component so narrow that sufficiently small steps would take hours; use normal:1"
        return ""

    def _run(self, subject: Subject, seed: int, report: Report) -> Outcome:
        method, exact, blind = subject.method(SETTINGS), subject.converges_to == "exact", np.inf
        with isolated(seed), pyro.validation_enabled(False), np.errstate(all="ignore"):  # trajectories may diverge
            joint = JointChains(self, subject, seed)
            for k in range(1 if exact or "lr" in subject.given else ATTEMPTS):
                method = replace(method, lr=method.lr / DIVIDED) if k else method
                lr = 0.0 if exact else method.lr
                wrong = f"transitions{f' at lr {lr:g}' * bool(lr)} do not leave the joint distribution as it is"
                try:
                    estimate, blind = joint.compare(method, self.steps * DIVIDED**k, report)
                    findings = self._findings(joint.names, estimate, blind, lr)
                except UserError as error:
                    cause = "the warm-up of the sampler fails" if exact else "chains diverge"
                    findings = [Finding(f"{cause}: {error}: transitions", float("nan"), level="bad")]
                if worst(f.level for f in findings) != "bad":
                    break
        settings = subject.settings(method, joint.entry)
        figures = {"joint_p": min((f.p for f in findings if f.p is not None), default=0.0)}
        right = f"{self.chains * self.sweeps:,} transitions leave the joint distribution as it is"
        remark = f"Variances off by {blind:.2g} of themselves would be seen." * (blind <= OF_INTEREST)
        return concluded("joint-distribution", findings, settings, right, wrong, remark, figures=figures)

    def _findings(self, names: Sequence[str], estimate: Estimate, blind: float, lr: float) -> list[Finding]:
        """lr: the step size, whose bias is bad above ``LARGE``; 0 for exact methods, which must have none."""
        sides = [f"{side} of {name}" for name in names for side in ("mean", "variance")]
        findings = judge(sides, estimate, np.zeros(len(sides)), level="caution" if lr else "bad")
        if off := [f for f in findings if f.level != "good"]:
            top = max(off, key=lambda f: abs(f.estimate))
            if abs(top.estimate) - 3 * top.error > LARGE:
                findings[findings.index(top)] = replace(top, level="bad")
            return findings
        few = blind > OF_INTEREST
        about = f"{'too few draws to tell: ' * few}error of the variances that would be seen"
        return [*findings, Finding(about, blind, OF_INTEREST if few else None, level="caution" if few else "good")]
