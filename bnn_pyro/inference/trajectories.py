"""Transitions of HMC and NUTS in flat coordinates, numpy arrays of length P.

    H(z, u) = −log p(z) + ½ uᵀu        M⁻¹ = diag(s²),  u = s r        z' = s u,  u' = s ∇ log p(z)

u is the momentum r in units of its own standard deviation, so that neither the energy nor the U-turn criterion needs
M. The tree is the one of Pyro's NUTS, with multinomial weights and the generalised criterion of summed momenta (Hoffman
& Gelman 2014, arXiv:1111.4246; Betancourt 2017, arXiv:1701.02434, A.4), whose own leapfrog step takes 300 µs for any P.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

MAX_ENERGY_ERROR = 1000.0  # a trajectory with a larger energy error in nats has diverged (as in Stan and Pyro)
End = tuple[np.ndarray, np.ndarray, np.ndarray]  # z, u and gradient at an end of a trajectory, (P,) each
Gradient = Callable[[np.ndarray], tuple[float, np.ndarray]]  # z (P,) -> (log density, its gradient (P,))


class Point(NamedTuple):
    """The position of a chain: z (P,), the log density there in nats, and its gradient (P,)."""

    z: np.ndarray
    log_density: float
    gradient: np.ndarray


class Transition(NamedTuple):
    """The outcome of one transition.

    point       the new position of the chain
    energy      H at the start of the trajectory, in nats
    acceptance  mean acceptance probability, to which the step size is adapted
    diverging   whether the energy error exceeded ``MAX_ENERGY_ERROR`` or was not finite
    steps       number of gradients
    depth       number of doublings of the tree; 0 for HMC
    """

    point: Point
    energy: float
    acceptance: float
    diverging: bool
    steps: int
    depth: int = 0


class Tree(NamedTuple):
    """A subtree of a trajectory, in its direction of travel."""

    end: End  # of the last leaf
    first: np.ndarray  # u of the first leaf; needed only inside ``Dynamics.subtree``
    proposal: Point
    momentum: np.ndarray  # the sum of u over the leaves
    weight: float  # the log of the sum over the leaves of exp(energy of the start − energy of the leaf)
    turning: bool
    diverging: bool
    acceptance: float  # the sum of acceptance probabilities over the leaves
    steps: int


class Dynamics:
    """Leapfrog steps of a chain. Compiled code, if there is any, takes a whole trajectory or subtree in one call.

    scale: s (P,), the square root of the diagonal of M⁻¹.   compiled: the ``CompiledGradient`` of a potential, or None.
    """

    def __init__(self, gradient: Gradient, scale: np.ndarray, compiled: Any = None) -> None:
        self.gradient, self.scale, self.compiled = gradient, scale, compiled

    def trajectory(self, start: Point, u: np.ndarray, step: float, steps: int) -> tuple[Point, float, int]:
        """Take steps from ``start`` with momentum u; returns (the end, its kinetic energy, number of steps taken)."""
        if self.compiled is not None:
            scale = self.scale
            z, r, g = (torch.from_numpy(v.copy())[None] for v in (start.z, u / scale, start.gradient))
            density, size = (torch.tensor([value], dtype=torch.float64) for value in (start.log_density, step))
            self.compiled.leapfrog(z, r, density, g, torch.from_numpy(scale * scale), size, steps=steps)
            u = r.numpy()[0] * scale
            return Point(z.numpy()[0], density.item(), g.numpy()[0]), 0.5 * float(u.dot(u)), steps
        leap, (z, log_density, g) = self.leap(step), start
        kinetic, taken = math.nan, 0
        while taken < steps:
            z, u, log_density, g, kinetic = leap(z, u, g)
            taken += 1
            if not math.isfinite(kinetic):  # it stays so in all further steps
                break
        return Point(z, log_density, g), kinetic, taken

    def leap(self, step: float) -> Callable[[np.ndarray, np.ndarray, np.ndarray], tuple]:
        """A leapfrog step: (z, u, gradient) -> (z, u, log density, gradient, kinetic energy).   step: may be < 0."""
        gradient, whole = self.gradient, step * self.scale
        half = 0.5 * whole

        def leap(z: np.ndarray, u: np.ndarray, g: np.ndarray) -> tuple:
            u = u + half * g
            z = z + whole * u
            log_density, g = gradient(z)
            u = u + half * g
            return z, u, log_density, g, 0.5 * float(u.dot(u))

        return leap

    def subtree(self, rng: np.random.Generator, depth: int, end: End, step: float, energy: float) -> Tree:
        """A subtree of at most 2^depth leaves that begins after ``end``.   energy: at the trajectory's start."""
        if self.compiled is not None:
            size = len(self.scale)
            arrays = np.concatenate(end), np.empty(3 * size), np.empty(6), self.scale, rng.random(2**depth)
            self.compiled.subtree(*(a.ctypes.data for a in arrays), step=step, energy=energy, depth=depth)
            (z, u, g), (momentum, *proposal) = (a.reshape(3, size) for a in arrays[:2])
            log_density, weight, acceptance, steps, turning, diverging = arrays[2].tolist()
            leaf = Point(proposal[0], log_density, proposal[1])
            return Tree((z, u, g), u, leaf, momentum, weight, bool(turning), bool(diverging), acceptance, int(steps))
        leap, uniform = self.leap(step), rng.random

        def build(depth: int, end: End) -> Tree:
            if not depth:
                z, u, log_density, g, kinetic = leap(*end)
                error = _error(kinetic - log_density - energy)
                leaf, accepted = Point(z, log_density, g), math.exp(min(-error, 0.0))
                return Tree((z, u, g), u, leaf, u, -error, False, error > MAX_ENERGY_ERROR, accepted, 1)
            if (one := build(depth - 1, end)).turning or one.diverging:
                return one
            two = build(depth - 1, one.end)
            weight = np.logaddexp(one.weight, two.weight)
            momentum = one.momentum + two.momentum
            proposal = (two if uniform() < math.exp(two.weight - weight) else one).proposal
            turning = two.turning or _turns(one.first, two.end[1], momentum)
            acceptance, steps = one.acceptance + two.acceptance, one.steps + two.steps
            return Tree(two.end, one.first, proposal, momentum, weight, turning, two.diverging, acceptance, steps)

        return build(depth, end)


def evaluator(potential: Any) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """A ``Potential`` as a function from numpy to numpy: z (C, P) -> (log densities (C,), their gradients (C, P))."""

    def evaluate(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        density, gradient = potential(torch.from_numpy(z).to(potential.initial.device))
        return density.cpu().numpy(), gradient.cpu().numpy()

    return evaluate


def gradient_of(potential: Any) -> Gradient:
    """A ``Potential`` as a function from one z (P,) to (its log density, its gradient (P,)), with numpy's arrays."""
    evaluate = evaluator(potential)

    def gradient(z: np.ndarray) -> tuple[float, np.ndarray]:
        density, gradient = evaluate(z[None])
        return density.item(), gradient[0]

    return gradient


def hmc(rng: np.random.Generator, start: Point, dynamics: Dynamics, step: float, steps: int) -> Transition:
    """One trajectory of ``steps`` steps, accepted or rejected as a whole."""
    u = rng.standard_normal(len(start.z))
    energy = 0.5 * float(u.dot(u)) - start.log_density
    end, kinetic, taken = dynamics.trajectory(start, u, step, steps)
    error = _error(kinetic - end.log_density - energy)
    acceptance = math.exp(min(-error, 0.0))
    return Transition(end if rng.random() < acceptance else start, energy, acceptance, error > MAX_ENERGY_ERROR, taken)


def nuts(rng: np.random.Generator, start: Point, dynamics: Dynamics, step: float, max_depth: int) -> Transition:
    """One trajectory, extended in both directions until it turns back, diverges or was doubled ``max_depth`` times."""
    u = rng.standard_normal(len(start.z))
    energy = 0.5 * float(u.dot(u)) - start.log_density
    ends = [(start.z, u, start.gradient)] * 2  # the past end and the future one
    point, momentum, weight = start, u, 0.0
    depth, steps, acceptance, diverging = 0, 0, 0.0, False
    while depth < max_depth:
        forwards = int(rng.random() < 0.5)
        tree = dynamics.subtree(rng, depth, ends[forwards], step if forwards else -step, energy)
        ends[forwards] = tree.end
        acceptance += tree.acceptance
        steps += tree.steps
        diverging = tree.diverging
        if diverging or tree.turning:
            break
        depth += 1
        if rng.random() < math.exp(min(tree.weight - weight, 0.0)):
            point = tree.proposal
        momentum = momentum + tree.momentum
        if _turns(ends[0][1], ends[1][1], momentum):
            break
        weight = np.logaddexp(weight, tree.weight)
    return Transition(point, energy, acceptance / steps, diverging, steps, depth)


def _turns(first: np.ndarray, last: np.ndarray, momentum: np.ndarray) -> bool:
    """Whether a longer trajectory would bring its two ends closer to each other (a U-turn)."""
    between = momentum - 0.5 * (first + last)
    return first.dot(between) <= 0 or last.dot(between) <= 0


def _error(error: float) -> float:
    """The energy error, ∞ for a value that is not finite: such a state is a divergence and never accepted."""
    return error if math.isfinite(error) else math.inf
