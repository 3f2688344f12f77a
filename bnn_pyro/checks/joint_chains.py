"""Chains of a sampler's own transitions, whose targets change between one and the next, beside the joint distribution.

    w ← one transition of the method that leaves p(w | y, x) as it is

The kernel, its step size and mass matrix are what ``run`` of the method makes in a short warm-up, on one data set, and
keeps from then on. Weights alone see little where the prior is wide beside the posterior: the log-likelihood and the
slopes of the log joint depend on the data too (Modrák et al. 2023, arXiv:2211.02383).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import norm
from torch import Tensor

from bnn_pyro.checks.check import ALPHA, Subject
from bnn_pyro.checks.simulation import Design, Simulator
from bnn_pyro.diagnostics.draws import even
from bnn_pyro.errors import UserError
from bnn_pyro.inference import Method
from bnn_pyro.inference.chees import Chains, Kernel
from bnn_pyro.inference.coordinates import coordinates
from bnn_pyro.inference.cost import TYPICAL, choose_compiled
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.sghmc import Chains as StochasticChains
from bnn_pyro.progress import Report

#: Weights and rows that are looked at one by one, at most; draws of the joint distribution, for every chain.
WEIGHTS, ROWS, REFERENCE = 8, 3, 20
#: Chains that ChEES is tuned with.
TUNED_WITH = 64

#: One transition of C chains, given targets of its own for each, y (C, N): {site: (C, *shape)}, where they then are.
Transition = Callable[[Tensor], dict[str, Tensor]]
Weights = dict[str, Tensor]  # {site: (C, *shape)}


def _one_by_one(method: Any, joint: "JointChains", w: Weights, steps: int) -> Transition:
    """All that a kernel remembers after its warm-up is where it is: it takes every chain's turn."""
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
        for row, own in zip(z.numpy(), y, strict=True):
            potential.give(own)
            kernel.start_at(row)
            kernel.step()
            row[:] = kernel.point.z
        return potential.weights(z)

    return move


def _all_at_once(method: Any, joint: "JointChains", w: Weights, steps: int) -> Transition:
    """Few chains tune the sampler; what they learned moves all of them."""
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
    """On all rows at a constant step size, ``steps`` of them a transition; momenta are kept."""
    chains, total = joint.check.chains, joint.check.sweeps * steps
    whole = dict(chains=chains, epochs=total, burn_in=0, batch_size=0, max_draws=1)
    run = StochasticChains(replace(method, **whole), joint.simulator.model, joint.data, joint.seed)
    run.w = run.log_joint.flat(w)

    def move(y: Tensor) -> dict[str, Tensor]:
        for _ in range(steps):
            run.advance(joint.data.x_train, y)
        run.record()  # raises UserError where something stops being finite
        return {site: value.clone() for site, value in run.log_joint.sites(run.w).items()}

    return move


def transitions_of(kind: type[Method]) -> Callable[..., Transition] | None:
    """What makes C chains of a method of this class; None where its transitions are not known."""
    # By what it has: chains that share a start, a kernel of one chain, a step of stochastic gradients.
    kinds = {"superchains": _all_at_once, "kernel": _one_by_one, "eta_share": _in_steps}
    return next((make for name, make in kinds.items() if hasattr(kind, name)), None)


class JointChains:
    """The joint distribution p(w, y | x) of a variant made small, and chains beside it, by M numbers of each (w, y).

    check: a ``JointDistribution``.   first {site: (*shape)}, data: one exact draw and its targets, for a warm-up.
    """

    def __init__(self, check: Any, subject: Subject, seed: int) -> None:
        self.check, self.seed = check, seed
        x, schema = subject.data.x_train[even(len(subject.data.x_train), check.rows)].clone(), subject.data.schema
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
            # Where the noise is unknown, some draws of the prior have so little that no step is small enough.
            entry = replace(entry, noise=0.5 * float(np.mean(schema.y_scale)))
        points = x[even(len(x), ROWS)]
        self.entry, self.simulator = entry, Simulator(entry, Design(schema, x, points, len(points)))
        potential = self.simulator.potential
        places = [(site, place) for site, shape in potential.free.items() for place in np.ndindex(*shape)]
        self.picked = even(potential.size, WEIGHTS)
        self.weights = [f"{site}{list(place) or ''}" for site, place in (places[i] for i in self.picked)]
        w, y = self.simulator.draws(check.chains * REFERENCE)
        self.names, values = self.quantities(w, y)
        self.slopes = [i for i, name in enumerate(self.names) if name.startswith("slope along")]
        self.sample = np.sort(values, 0)
        scores = normal_scores(self.sample, values)
        self.expected = np.stack([scores, scores**2], 2)  # (S, M, 2)
        # The targets that a warm-up is given: none out of the ordinary.
        likelihood = values[:, self.names.index("log-likelihood of the data")]
        middle = int(np.argsort(likelihood)[len(likelihood) // 2])
        self.first = {site: value[middle] for site, value in w.items()}
        self.data = replace(self.simulator.inputs.data(y[middle]), x_train=potential.x)

    def potential(self) -> Potential:
        """The log joint that a sampler's warm-up is given, in the coordinates that suit it."""
        potential = Potential(self.simulator.model, self.data.x_train, self.data.y_train)
        potential.space = coordinates(potential)
        return potential

    def quantities(self, w: Mapping[str, Tensor], y: Tensor) -> tuple[list[str], np.ndarray]:
        """(M names, their values (C, M)) of C sets of weights w {site: (C, *shape)} and targets y (C, N)."""
        potential = self.simulator.potential
        potential.give(y)
        z = potential.position(w)
        log_joint, slopes = potential(z)
        questions, values = self.simulator.quantities(w, y)
        names = [*self.weights, *(f"slope along {name}" for name in self.weights)]
        names += ["log joint", "mean target", *(question.about for question in questions)]
        columns = [z[:, self.picked], slopes[:, self.picked], log_joint, y.double().flatten(1).mean(1)]
        return names, np.column_stack([*(c.double().numpy() for c in columns), values])

    def compare(self, method: Method, steps: int, report: Report) -> dict[str, Any]:
        """The evidence of chains of this method, beside the joint distribution.

        quantities (M,); shift, error (M, 2), by which mean and variance of normal scores are off the joint ones; bound,
        of all |shift / error| with probability 1 − ALPHA; renewed, the share of a slope that a transition makes anew.

        steps: of a step size, which make one transition.   Raises UserError where chains diverge.
        """
        sweeps, simulator = self.check.sweeps, self.simulator
        w, y = simulator.draws(self.check.chains)
        move = transitions_of(type(method))(method, self, w, steps)
        renewed, total = [], 0.0
        for k in range(sweeps):
            before = normal_scores(self.sample, self.quantities(w, y)[1])[:, self.slopes]
            w = move(y)
            values = self.quantities(w, y)[1]
            if not np.isfinite(values).all():
                raise UserError(f"after {k + 1} transitions, densities or their slopes are no longer finite")
            scores = normal_scores(self.sample, values)
            after = scores[:, self.slopes]  # with means of 0, as before
            norms = np.sqrt((before**2).mean(0) * (after**2).mean(0)).clip(1e-300)
            renewed.append(1 - ((before * after).mean(0) / norms).clip(0, 1))
            total = total + np.stack([scores, scores**2], 2) / sweeps
            y = simulator.targets(w)
            report(k + 1, sweeps, {})
        shift = total.mean(0) - self.expected.mean(0)
        error = np.sqrt(total.var(0) / len(total) + self.expected.var(0) / len(self.expected))  # of independent samples
        numbers = {"bound": float(norm.isf(ALPHA / (2 * shift.size))), "renewed": float(np.median(np.mean(renewed, 0)))}
        return {"quantities": self.names, "shift": shift, "error": error, **numbers}


def normal_scores(sample: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(C, M) -> (C, M) as the standard Normal has them, whose tails are light: by ranks in a sorted sample (S, M)."""
    pairs, num = list(zip(sample.T, values.T, strict=True)), len(sample)
    below, upto = (np.stack([np.searchsorted(s, v, side) for s, v in pairs], 1) for side in ("left", "right"))
    return ndtri((0.5 * (below + upto) / num).clip(0.5 / num, 1 - 0.5 / num))
