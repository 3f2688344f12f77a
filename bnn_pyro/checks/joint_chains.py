"""Chains of a sampler's own transitions, whose targets change between one and the next, beside the joint distribution.

    w ← one transition of the method that leaves p(w | y, x) as it is

The kernel, its step size and mass matrix are what ``run`` of the method makes in a short warm-up, on one data set, and
keeps from then on. Only the targets are exchanged, and what a chain remembers of its density with them.

Weights alone see little: where the prior is wide beside the posterior, a sampler that is too wide by a half moves them
by nothing. What sees it depends on the data too: the log-likelihood, and the slopes of the log joint, whose scale is
that of the posterior itself (Modrák et al. 2023, arXiv:2211.02383).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri
from scipy.stats import norm
from torch import Tensor, nn

from bnn_pyro.checks.check import ALPHA, Estimate, Finding, Subject, judge
from bnn_pyro.checks.simulation import Design, Simulator
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference import Method
from bnn_pyro.inference.chees import TYPICAL, Chains, ChEES, Sampling
from bnn_pyro.inference.hmc import HMC, NUTS
from bnn_pyro.inference.linear import coordinates
from bnn_pyro.inference.potential import Potential, Space, choose_compiled
from bnn_pyro.inference.sghmc import SGHMC, SGLD
from bnn_pyro.inference.sghmc import Chains as StochasticChains
from bnn_pyro.inference.trajectories import Point
from bnn_pyro.progress import Report

__all__ = ["QUANTILES", "JointChains", "Shift", "normal_scores", "transitions_of"]

#: Weights and rows that are looked at one by one, at most; draws of the joint distribution, for every chain.
WEIGHTS, ROWS, REFERENCE = 8, 3, 20
#: Quantiles of the normal scores that are kept for a figure.
QUANTILES = norm.ppf((np.arange(199) + 1) / 200)
#: Chains that ChEES is tuned with.
TUNED_WITH = 64

#: One transition of C chains, given targets of its own for each, y (C, N): {site: (C, *shape)}, where they then are.
Transition = Callable[[Tensor], dict[str, Tensor]]


class Start(NamedTuple):
    """Where chains begin.

    data         the inputs, and the targets that belong to ``first``
    first        {site: (*shape)}, an exact draw of that posterior, where a warm-up starts
    w            {site: (C, *shape)}, where the chains are
    transitions  how many are to come
    """

    model: nn.Module
    data: Dataset
    first: dict[str, Tensor]
    w: dict[str, Tensor]
    transitions: int
    seed: int


def _one_by_one(method: HMC | NUTS, start: Start) -> Transition:
    """All that a kernel remembers after its warm-up is where it is: it takes every chain's turn."""
    potential = _potential(start)
    z = potential.position(start.w)
    gradients = float(len(z) * start.transitions * method.typical(type(potential.space) is not Space))
    if choose_compiled(method.compiled, gradients, potential):
        potential.compile(1)
    first = potential.position({site: value[None] for site, value in start.first.items()})[0].numpy()
    kernel = method.kernel(potential, method.blocks(potential), first, start.seed)
    for _ in range(method.warmup):
        kernel.step()

    def move(y: Tensor) -> dict[str, Tensor]:
        for row, own in zip(z.numpy(), y, strict=True):
            potential.give(own)
            kernel.point = Point(row.copy(), *kernel.gradient(row))
            kernel.step()
            row[:] = kernel.point.z
        return potential.weights(z)

    return move


def _all_at_once(method: ChEES, start: Start) -> Transition:
    """ChEES is tuned with few chains; what they learned moves all of them."""
    potential, chains = _potential(start), dict(superchains=1, thin=1)
    z = potential.position(start.w)
    if choose_compiled(method.compiled, float(method.warmup * TYPICAL), potential):
        potential.compile(TUNED_WITH)
    tuned = Sampling(replace(method, chains=TUNED_WITH, **chains), potential)
    tuned.begin(potential.prior_draws(TUNED_WITH))
    while tuned.record.done < method.warmup:
        tuned.iterate()
    sampling = Sampling(replace(method, chains=len(z), draws=start.transitions, **chains), potential)
    sampling.first, sampling.adaptation, sampling.record.done = tuned.first, tuned.adaptation, tuned.record.done

    def move(y: Tensor) -> dict[str, Tensor]:
        nonlocal z
        potential.give(y)
        sampling.chains = Chains(z, *potential(z))
        sampling.iterate()
        z = sampling.chains.z
        return potential.weights(z)

    return move


def _in_steps(method: SGHMC | SGLD, start: Start, steps: int = 1) -> Transition:
    """On all rows at a constant step size, ``steps`` of them a transition; momenta are kept."""
    total = start.transitions * steps
    whole = dict(epochs=total, burn_in=0, batch_size=0, schedule="constant", thin=total, max_draws=1)
    chains = len(next(iter(start.w.values())))
    run = StochasticChains(replace(method, chains=chains, **whole), start.model, start.data, start.seed)
    run.start_at(start.w)

    def move(y: Tensor) -> dict[str, Tensor]:
        for _ in range(steps):
            run.advance(start.data.x_train, y)
        run.record()  # raises UserError where something stops being finite
        return {site: value.clone() for site, value in run.log_joint.sites(run.w).items()}

    return move


def _potential(start: Start) -> Potential:
    potential = Potential(start.model, start.data.x_train, start.data.y_train)
    potential.space = coordinates(potential)
    return potential


_KINDS = {HMC: _one_by_one, NUTS: _one_by_one, ChEES: _all_at_once, SGHMC: _in_steps, SGLD: _in_steps}


def transitions_of(kind: type[Method]) -> Callable[..., Transition] | None:
    """What makes C chains from (method, start) of a method of this class; None where its transitions are not known."""
    return next((made for known, made in _KINDS.items() if issubclass(kind, known)), None)


# -- beside the joint distribution -------------------------------------------------------------------------------------
class Shift(NamedTuple):
    """How far chains are off the joint distribution: shifts of means and variances of normal scores, (M, 2)."""

    shift: np.ndarray
    error: np.ndarray
    drift: np.ndarray  # (sweeps, M, 2)
    drift_error: np.ndarray
    scores: np.ndarray  # (199, M), quantiles
    renewed: float  # by one transition: 1 less the correlation of slopes before and after, given the same targets

    @property
    def bound(self) -> float:
        """What all of |z| stay below with probability 1 − ALPHA."""
        return float(norm.isf(ALPHA / (2 * self.shift.size)))


class JointChains:
    """The joint distribution p(w, y | x) of a variant made small, and chains beside it, by M numbers of each (w, y).

    check: the settings of ``JointDistribution``.
    """

    def __init__(self, check: Any, subject: Subject, seed: int, report: Report | None) -> None:
        self.check, self.seed, self.report = check, seed, report
        x = subject.data.x_train.flatten(1)
        x = x[_spread(len(x), check.rows)]
        varied = [k for k in range(x.shape[1]) if x[:, k].amax() > x[:, k].amin()] or list(range(x.shape[1]))
        x = x[:, [varied[k] for k in _spread(len(varied), check.inputs)]].clone()
        schema = replace(subject.data.schema, input_shape=(x.shape[1],), features=(), columns=())
        entry = subject.reduced()
        if hasattr(entry, "hidden"):
            entry = replace(entry, hidden=tuple(min(width, check.hidden) for width in entry.hidden))
        if subject.converges_to != "exact" and not schema.has_classes and isinstance(entry.noise, str):
            # Where the noise is unknown, some draws of the prior have so little that no step is small enough.
            entry = replace(entry, noise=0.5 * schema.y_scale)
        points = x[_spread(len(x), ROWS)]
        self.entry, self.simulator = entry, Simulator(entry, Design(schema, x, points, len(points)))
        potential = self.simulator.potential
        self.picked = _spread(potential.size, WEIGHTS)
        places = [(site, place) for site, shape in potential.free.items() for place in np.ndindex(*shape)]
        self.weights = [f"{site}[{', '.join(map(str, place))}]" if place else site for site, place in places]
        w, y = self.simulator.draws(check.chains * REFERENCE)
        potential.give(y)
        self.scale = potential(potential.position(w))[1].square().mean(0).clamp_min(1e-300)
        self.names, values = self.quantities(w, y)
        self.slopes = [i for i, name in enumerate(self.names) if name.startswith("slope along")]
        self.sample = np.sort(values, 0)
        self.expected = self._moments(values)  # (S, M, 2)
        # The targets that a warm-up is given: none out of the ordinary.
        likelihood = values[:, self.names.index("log-likelihood of the data")]
        middle = int(np.argsort(likelihood)[len(likelihood) // 2])
        self.first, self.y = {site: value[middle] for site, value in w.items()}, y[middle]

    def quantities(self, w: Mapping[str, Tensor], y: Tensor) -> tuple[list[str], np.ndarray]:
        """(M names, their values (C, M)) of C sets of weights w {site: (C, *shape)} and targets y (C, N)."""
        potential, names = self.simulator.potential, [self.weights[i] for i in self.picked]
        potential.give(y)
        z = potential.position(w)
        log_joint, slopes = potential(z)
        questions, values = self.simulator.quantities(w, y)
        names = [
            *names,
            *(f"{a} · {b}" for a, b in pairwise(names)),
            *(f"slope along {name}" for name in names),
            *("squared slopes", "log joint", "mean target"),
            *(question.about for question in questions),
        ]
        chosen, squares = z[:, self.picked], (slopes.square() / self.scale).mean(1)
        columns = [chosen, chosen[:, 1:] * chosen[:, :-1], slopes[:, self.picked], squares, log_joint]
        return names, np.column_stack([*(c.double().numpy() for c in columns), y.double().mean(1).numpy(), values])

    def compare(self, method: Method, **settings: Any) -> Shift:
        """Chains of this method, against the joint distribution."""
        check, simulator = self.check, self.simulator
        w, y = simulator.draws(check.chains)
        data = replace(simulator.inputs.data(self.y), x_train=simulator.potential.x)
        move = transitions_of(type(method))(
            method, Start(simulator.model, data, self.first, w, check.sweeps, self.seed), **settings
        )
        drift, last, renewed, total = [], [], [], 0.0
        for k in range(check.sweeps):
            before = normal_scores(self.sample, self.quantities(w, y)[1])[:, self.slopes]
            w = move(y)
            values = self.quantities(w, y)[1]
            if not np.isfinite(values).all():
                raise UserError(f"after {k + 1} transitions, densities or their slopes are no longer finite")
            now = self._moments(values)
            after = now[:, self.slopes, 0]  # with means of 0, as before
            norms = np.sqrt((before**2).mean(0) * (after**2).mean(0)).clip(1e-300)
            renewed.append(1 - ((before * after).mean(0) / norms).clip(0, 1))
            total = total + now / check.sweeps
            drift.append((now.mean(0) - self.expected.mean(0), self._error(now)))
            if 2 * k >= check.sweeps - 1:
                last.append(now[..., 0])
            y = simulator.targets(w)
            if self.report is not None:
                self.report(k + 1, check.sweeps, {})
        shifts, quantiles = map(np.stack, zip(*drift, strict=True)), norm.cdf(QUANTILES)
        last = np.quantile(np.concatenate(last), quantiles, axis=0)
        shift = total.mean(0) - self.expected.mean(0)
        return Shift(shift, self._error(total), *shifts, last, float(np.median(np.mean(renewed, 0))))

    def _moments(self, values: np.ndarray) -> np.ndarray:
        """Normal scores and their squares, (S, M) -> (S, M, 2)."""
        scores = normal_scores(self.sample, values)
        return np.stack([scores, scores**2], 2)

    def _error(self, values: np.ndarray) -> np.ndarray:
        """Standard error of the difference of the means of two independent samples (…, M, 2)."""
        return np.sqrt(values.var(0) / len(values) + self.expected.var(0) / len(self.expected))

    def findings(
        self, shift: np.ndarray, error: np.ndarray, level: str, tolerance: Any = 0.0, where: str = ""
    ) -> list[Finding]:
        """One for the mean and one for the variance of every quantity, in units of its own spread."""
        sides = [f"{side} of {name}{where}" for name in self.names for side in ("mean", "variance")]
        estimate = Estimate(shift.ravel(), error.ravel())
        return judge(sides, estimate, np.zeros(shift.size), tolerance=np.ravel(tolerance), level=level)


def normal_scores(sample: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(C, M) -> (C, M) as the standard Normal would have them, by their ranks in a sorted sample (S, M).

    A test of means needs tails that are not heavy; ranks have none, whatever the prior.
    """
    pairs, num = list(zip(sample.T, values.T, strict=True)), len(sample)
    below, upto = (np.stack([np.searchsorted(s, v, side) for s, v in pairs], 1) for side in ("left", "right"))
    return ndtri((0.5 * (below + upto) / num).clip(0.5 / num, 1 - 0.5 / num))


def _spread(size: int, most: int) -> list[int]:
    """At most so many of the numbers below ``size``, evenly spaced."""
    return sorted({int(i) for i in np.linspace(0, size - 1, min(size, most)).round()})
