"""Microcanonical dynamics of G chains in flat coordinates: integrator, refreshment, and statistics for their tuning.

    dz = u dt,    du = (1 − u uᵀ) ∇log p(z) / (d − 1) dt,    |u| = 1

The speed is fixed, and the direction u turns towards higher density; in continuous time the stationary distribution is
p(z), with u uniform on the sphere (Robnik & Seljak 2024, arXiv:2303.18221; Ver Steeg & Galstyan 2021,
arXiv:2111.02434). For a gradient g = |g| e that is constant for a time t, and δ = t |g| / (d − 1), the solution is

    u' = (u + e (sinh δ + e·u (cosh δ − 1))) / (cosh δ + e·u sinh δ)
    K' − K = (d − 1) log(cosh δ + e·u sinh δ)

A step of an integrator alternates such turns, B, with drifts A: z' = z + t u. Its energy error ΔE = K' − K −
(log p' − log p) is 0 in continuous time and of third order in the step. −ΔE is the log ratio of a Metropolis test
(arXiv:2503.01707). These z are z / scale in the code. Arrays are float64, z, u and gradients (G, d), others (G,).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from bnn_pyro.inference.trajectories import evaluator

#: Lengths of the turns and drifts B A B A B as shares of the step: the minimal-norm integrator of McLachlan 1995
#: (doi:10.1137/0916010) with the constant of Omelyan, Mryglod & Folk 2003 (arXiv:cond-mat/0110585).
LAMBDA = 0.1931833275037836
SHARES = (LAMBDA, 0.5, 1 - 2 * LAMBDA, 0.5, LAMBDA)
GRADIENTS = 2  # number of gradients in a step
#: Bounds of one call of compiled code: steps, and steps · chains · rows · weights (0.1 s, for which Ctrl-C waits).
AT_ONCE, WORK = 64, 1e8
#: Bounds on the mean ξ in ``EnergyTuning.factor``: a smaller one counts as MIN_MEAN, since few errors say little about
#: the largest ones; one up to MAX_EXCESS is tolerated, since chains with shorter steps would move too slowly.
MIN_MEAN, MAX_EXCESS = 0.5, 5.0
FEW = 100  # number of transitions of a window for which log scales are shrunk by half, as positions are correlated


class State(NamedTuple):
    """Chains at z (G, d), with log densities (G,) in nats; u and gradients (G, d) are of the coordinates z / scale."""

    z: np.ndarray
    u: np.ndarray
    density: np.ndarray
    gradient: np.ndarray
    scale: np.ndarray

    def where(self, chosen: np.ndarray, other: "State") -> "State":
        """This state for the chains that are chosen (G,), the other state for the rest."""
        pairs = zip(self, other, strict=True)
        return State(*(np.where(chosen.reshape(-1, *(1,) * (a.ndim - 1)), a, b) for a, b in pairs))


Moved = tuple[State, np.ndarray]  # (the state after some steps, their ΔE in nats)


def turn(u: np.ndarray, gradient: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(u', K' − K in nats) after a time (G,) with a constant gradient; exp(−δ) in place of cosh δ cannot overflow."""
    last = u.shape[1] - 1
    norm = np.sqrt(np.einsum("gd,gd->g", gradient, gradient))
    e = gradient / np.maximum(norm, 1e-300)[:, None]
    delta = time * norm / last
    decay = np.exp(-delta)
    along = np.einsum("gd,gd->g", e, u)
    turned = ((1 - decay) * (1 + decay + along * (1 - decay)))[:, None] * e + (2 * decay)[:, None] * u
    # Normalised, as rounding errors would add up.
    return direction(turned), last * (delta - math.log(2) + np.log1p(along + (1 - along) * decay**2))


def integrate(evaluate: Callable, state: State, step: np.ndarray) -> Moved:
    """(the state after one step (G,), ΔE (G,) in nats).   evaluate: z (G, d) -> (densities (G,), gradients (G, d))."""
    z, u, density, gradient, scale = state
    first, *rest = SHARES
    u, kinetic = turn(u, gradient, first * step)
    for drift, share in zip(rest[::2], rest[1::2], strict=True):
        z = z + (drift * step)[:, None] * scale * u
        density, gradient = evaluate(z)
        gradient = scale * gradient
        u, more = turn(u, gradient, share * step)
        kinetic = kinetic + more
    return State(z, u, density, gradient, scale), kinetic - (density - state.density)


def travel(potential: Any, state: State, step: np.ndarray, steps: np.ndarray, *refresh: np.ndarray) -> Moved:
    """(the state after ``steps`` steps, Σ ΔE (G,) in nats), by compiled code if there is any.

    steps: (G,), float64, of each chain.   refresh: ζ (G, S, d) and ν (G,), with which u is refreshed before each step;
    then all chains take S steps, and ΔE is (G, S). A chain may stop at a ΔE that is infinite or NaN.
    """
    if potential.compiled is not None:
        end = State(*(part.copy() for part in state))
        errors = np.full(refresh[0].shape[:2] if refresh else len(step), np.nan)
        potential.compiled.microcanonical(*end, errors, step, steps, np.array(SHARES), *refresh)
        return end, errors
    evaluate, each = evaluator(potential), []
    for s in range(int(steps.max())):
        if refresh:
            state = state._replace(u=direction(state.u + refresh[1][:, None] * refresh[0][:, s]))
        state, error = integrate(evaluate, state, np.where(s < steps, step, 0.0))
        each.append(error)
    return state, np.stack(each, 1) if refresh else sum(each)


def langevin_steps(potential: Any, state: State, step: np.ndarray, length: np.ndarray, noise: np.ndarray) -> Moved:
    """(the state after S steps, ΔE (G, S) of each step in nats); u is refreshed before each step. See :func:`travel`.

        u' = (u + ν ζ) / |u + ν ζ|,  ν² = (exp(2 ε/L) − 1) / d:   L is the distance over which directions decorrelate

    length: L (G,).   noise: ζ (G, S, d), standard Normal.
    """
    spread = refreshment(step, length, noise.shape[2])
    return travel(potential, state, step, np.full(len(step), float(noise.shape[1])), noise, spread)


def refreshment(step: np.ndarray, length: np.ndarray, size: int) -> np.ndarray:
    """ν (G,), see :func:`langevin_steps`.   size: d.   2 ε/L is cut at 50, so that ν is finite; u is forgotten then."""
    return np.sqrt(np.expm1(np.minimum(2 * step / length, 50.0)) / size)


def at_once(potential: Any, chains: int) -> int:
    """Number of steps in one call of :func:`langevin_steps` for this number of chains."""
    if potential.compiled is None:
        return 1
    return max(1, min(AT_ONCE, int(WORK / (chains * len(potential.x) * potential.size))))


def direction(v: np.ndarray) -> np.ndarray:
    """v / |v| (G, d), which is uniform on the sphere if v is standard Normal."""
    return v / np.sqrt(np.einsum("gd,gd->g", v, v))[:, None]


@dataclass
class EnergyTuning:
    """Step sizes (G,) ε for which E[ΔE²]/d equals a target, by Var ΔE ∝ ε⁶.

        ε⁻⁶ = weighted mean of ξ/ε⁶ over recent steps,  ξ = ΔE²/(d · target),  with small weights of ξ far from 1

    Robnik et al. 2023, arXiv:2212.08549; in Sommer et al. 2025, arXiv:2502.06335, the target falls in the warm-up.

    step             ε of the next step, which suits the present position of the chain
    average, weight  the weighted sum of ξ/ε⁶, and the sum of weights
    logs, count      Σ ln ε and the number of terms; ``mean`` suits all positions of the chain so far
    excess, seen     Σ ξ and the number of terms (G,) of steps with a fixed ε; see ``factor``
    """

    step: np.ndarray
    average: np.ndarray | float = 0.0
    weight: np.ndarray | float = 0.0
    logs: np.ndarray | float = 0.0
    count: int = 0
    excess: np.ndarray | float = 0.0
    seen: np.ndarray | float = 0.0

    #: Number of recent steps that count; width in ln ξ of the weights; factor of ε after a divergence.
    MEMORY, TRUST, FALL = 100, 9.0, 0.75

    def learn(self, error: np.ndarray, good: np.ndarray, size: int, target: float) -> None:
        """Learn from one step of each chain.   error: ΔE (G,).   good: (G,), False for a divergence.   size: d."""
        xi = np.where(good, error, 0.0) ** 2 / (size * target) + 1e-8
        weight = np.where(good, np.exp(-0.5 * (np.log(xi) / self.TRUST) ** 2), 0.0)
        decay = (self.MEMORY - 1) / (self.MEMORY + 1)
        fall = np.where(good, 1.0, self.FALL)
        self.average = (decay * self.average + weight * xi / self.step**6) / fall**6
        self.weight = decay * self.weight + weight
        self.step = np.where(self.weight > 0, (self.average / self.weight) ** (-1 / 6), fall * self.step)
        self.logs, self.count = self.logs + np.log(self.step), self.count + 1

    def observe(self, errors: np.ndarray, good: np.ndarray, size: int, target: float) -> None:
        """Count steps with a fixed ε of the chains that are ``good`` (G,).   errors: ΔE (G, S)."""
        xi = np.where(good[:, None], np.square(errors) / (size * target), 0.0)
        before = np.broadcast_to(self.excess, good.shape)
        self.excess = np.cumsum(np.column_stack([before, xi]), 1)[:, -1]  # the same rounding whatever S is
        self.seen = self.seen + good * errors.shape[1]

    @property
    def factor(self) -> np.ndarray:
        """Factor (G,) of ε with which the mean ξ comes to lie between 1 and ``MAX_EXCESS``; it is 1.12 at most."""
        mean = np.where(self.seen > 0, self.excess / np.maximum(self.seen, 1), 1.0)
        return np.maximum(mean / np.clip(mean, 1.0, MAX_EXCESS), MIN_MEAN) ** (-1 / 6)

    def anew(self) -> "EnergyTuning":
        """Tuning for other coordinates. The present step has a weight of 0.1, lest the next error alone decide."""
        return EnergyTuning(self.step, 0.1 / self.step**6, 0.1)

    #: The geometric mean of ``step`` over all calls of ``learn``.
    mean = property(lambda self: np.exp(self.logs / self.count))


@dataclass
class Moments:
    """Weighted means and sums of squared deviations (G, d) of positions, by their weights (G,)."""

    weight: np.ndarray | float = 0.0
    mean: np.ndarray | float = 0.0
    squares: np.ndarray | float = 0.0

    def add(self, z: np.ndarray, weight: np.ndarray) -> None:
        """Add one position of each chain."""
        self.weight = self.weight + weight
        before = z - self.mean
        self.mean = self.mean + (weight / self.weight)[:, None] * before
        self.squares = self.squares + weight[:, None] * before * (z - self.mean)

    def scales(self, transitions: int) -> np.ndarray:
        """√Var zᵢ (G, d), scaled to root mean square 1; after few transitions they are shrunk towards each other."""
        variance = self.squares / self.weight[:, None]
        log = 0.5 * np.log(np.maximum(variance, 1e-12 * variance.mean(1, keepdims=True)) + 1e-300)
        scale = np.exp((log - log.mean(1, keepdims=True)) * transitions / (transitions + FEW))
        return scale / np.sqrt(np.square(scale).mean(1, keepdims=True))

    #: √ Σ_i Var z_i of each chain, (G,).
    radius = property(lambda self: np.sqrt(self.squares.sum(1) / self.weight))


def effective_draws(x: np.ndarray) -> np.ndarray:
    """Effective sample size (M,) of each column of a chain x (n, M): n / (1 + 2 Σ ρ), from 1 to n; n if it never moves.

    By Geyer's initial positive sequence (1992, doi:10.1214/ss/1177011137, section 3.3).
    """
    n = len(x)
    x = x - x.mean(0)
    spectrum = rfft(x, next_fast_len(2 * n), axis=0)
    covariance = irfft(spectrum.real**2 + spectrum.imag**2, next_fast_len(2 * n), axis=0)[: n - n % 2]
    pairs = (covariance[::2] + covariance[1::2]) / np.where(covariance[0] > 0, covariance[0], np.inf)
    time = 2 * np.where(np.minimum.accumulate(pairs > 0, axis=0), pairs, 0.0).sum(0) - 1
    return np.clip(n / np.maximum(time, 1.0), 1.0, n)
