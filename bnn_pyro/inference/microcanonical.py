"""Microcanonical dynamics of G chains in flat coordinates: integrators, refreshment, and what their tuning measures.

    dz = u dt,    du = (1 − u uᵀ) ∇log p(z) / (d − 1) dt,    |u| = 1

The speed is fixed and the direction u alone turns towards where the density is higher; in continuous time p(z) is
stationary with u uniform on the sphere (Robnik & Seljak 2024, arXiv:2303.18221; Ver Steeg & Galstyan 2021,
arXiv:2111.02434). With the gradient g = |g| e held fixed for a time t, and δ = t |g| / (d − 1), the turn is exact:

    u' = (u + e (sinh δ + e·u (cosh δ − 1))) / (cosh δ + e·u sinh δ)
    K' − K = (d − 1) log(cosh δ + e·u sinh δ)

and a step of an integrator is turns B between drifts A: z' = z + t u. Its error ΔE = K' − K − (log p' − log p) is 0 in
continuous time, of the third order in the step, and less the log ratio of a Metropolis test (arXiv:2503.01707).

z stands for z / scale here. Arrays are numpy's, float64: z, u, gradients (G, d), what is one number a chain (G,).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from bnn_pyro.inference.trajectories import evaluator

#: The step's shares of turns and drifts, B A B A B: the minimal-norm integrator of McLachlan 1995
#: (doi:10.1137/0916010) with the constant of Omelyan, Mryglod & Folk 2003 (arXiv:cond-mat/0110585).
LAMBDA = 0.1931833275037836
SHARES = (LAMBDA, 0.5, 1 - 2 * LAMBDA, 0.5, LAMBDA)
#: Gradients of a step; steps that compiled code takes at once, where nothing is learned of them, at most; and steps ·
#: chains · rows · weights of one call, about a tenth of a second, for which Ctrl-C waits.
GRADIENTS, AT_ONCE, WORK = 2, 64, 1e8
#: Least mean ξ that a step grows by, as a few errors tell little of the largest; the most of stiffer places, as with
#: shorter steps chains would not get around there.
LEAST, MOST = 0.5, 5.0
#: Transitions of a window after which log scales count half: positions are correlated.
FEW = 100


class State(NamedTuple):
    """Chains at z (G, d), with log densities (G,) in nats; u and gradients (G, d) are of the coordinates z / scale."""

    z: np.ndarray
    u: np.ndarray
    density: np.ndarray
    gradient: np.ndarray
    scale: np.ndarray

    def where(self, chosen: np.ndarray, other: "State") -> "State":
        """This one of chains that are chosen (G,), the other one of the rest."""
        pairs = zip(self, other, strict=True)
        return State(*(np.where(chosen.reshape(-1, *(1,) * (a.ndim - 1)), a, b) for a, b in pairs))


Moved = tuple[State, np.ndarray]  # the state after steps, and their ΔE in nats


def turn(u: np.ndarray, gradient: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(u', K' − K in nats) after a time (G,) in a fixed gradient; see the top of the file.

    By exp(−δ) alone, which does not overflow; u' is normalised, as rounding would add up.
    """
    last = u.shape[1] - 1
    norm = np.sqrt(np.einsum("gd,gd->g", gradient, gradient))
    e = gradient / np.maximum(norm, 1e-300)[:, None]
    delta = time * norm / last
    decay = np.exp(-delta)
    along = np.einsum("gd,gd->g", e, u)
    turned = ((1 - decay) * (1 + decay + along * (1 - decay)))[:, None] * e + (2 * decay)[:, None] * u
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
    """(state after so many steps (G,), float64, of each chain, Σ ΔE (G,) in nats), by compiled code if there is any.

    refresh: ζ (G, S, d), ν (G,), with which u is refreshed before each step; all steps are S then, and ΔE is (G, S).
    A chain that is not finite may stop there, with a ΔE that is not finite.
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
    """(state after S steps, ΔE of each (G, S) in nats), u refreshed before each; see :func:`travel`.

        u' = (u + ν ζ) / |u + ν ζ|,  ν² = (exp(2 ε/L) − 1) / d: directions are forgotten over a way of length L

    length: L (G,).   noise: ζ (G, S, d), standard Normal.
    """
    spread = refreshment(step, length, noise.shape[2])
    return travel(potential, state, step, np.full(len(step), float(noise.shape[1])), noise, spread)


def refreshment(step: np.ndarray, length: np.ndarray, size: int) -> np.ndarray:
    """ν (G,), see :func:`langevin_steps`; finite, as after so long a step nothing is left of u.   size: d."""
    return np.sqrt(np.expm1(np.minimum(2 * step / length, 50.0)) / size)


def at_once(potential: Any, chains: int) -> int:
    """Steps that these chains take in one call of :func:`langevin_steps`."""
    if potential.compiled is None:
        return 1
    return max(1, min(AT_ONCE, int(WORK / (chains * len(potential.x) * potential.size))))


def direction(v: np.ndarray) -> np.ndarray:
    """v / |v| (G, d): of standard Normal numbers uniform on the sphere."""
    return v / np.sqrt(np.einsum("gd,gd->g", v, v))[:, None]


@dataclass
class EnergyTuning:
    """Step sizes (G,) at which E[ΔE²]/d is a given number, by Var ΔE ∝ ε⁶.

        ε⁻⁶ = mean of ξ/ε⁶ over recent steps,  ξ = ΔE²/(d · target),  a step of ξ far from 1 weighing less

    Robnik et al. 2023, arXiv:2212.08549; in Sommer et al. 2025, arXiv:2502.06335, the target falls in the warm-up.

    step             ε of the next step
    average, weight  the sums of that mean
    logs, count      Σ ln ε and its terms so far: ``step`` is what suits the place where a chain is, ``mean`` the chain
    excess, seen     Σ ξ and its terms (G,) of steps of one ε, which may meet stiffer places than before
    """

    step: np.ndarray
    average: np.ndarray | float = 0.0
    weight: np.ndarray | float = 0.0
    logs: np.ndarray | float = 0.0
    count: int = 0
    excess: np.ndarray | float = 0.0
    seen: np.ndarray | float = 0.0

    #: How many of the last steps count, the width of ln ξ within which a step counts, and the share of itself to which
    #: one that diverges falls.
    MEMORY, TRUST, FALL = 100, 9.0, 0.75

    def learn(self, error: np.ndarray, good: np.ndarray, size: int, target: float) -> None:
        """From one step of each chain.   error: ΔE (G,).   good: whether it did not diverge (G,).   size: d."""
        xi = np.where(good, error, 0.0) ** 2 / (size * target) + 1e-8
        weight = np.where(good, np.exp(-0.5 * (np.log(xi) / self.TRUST) ** 2), 0.0)
        decay = (self.MEMORY - 1) / (self.MEMORY + 1)
        fall = np.where(good, 1.0, self.FALL)
        self.average = (decay * self.average + weight * xi / self.step**6) / fall**6
        self.weight = decay * self.weight + weight
        self.step = np.where(self.weight > 0, (self.average / self.weight) ** (-1 / 6), fall * self.step)
        self.logs, self.count = self.logs + np.log(self.step), self.count + 1

    def observe(self, errors: np.ndarray, good: np.ndarray, size: int, target: float) -> None:
        """Steps of one ε, of which those of a chain that is ``good`` count.   errors: ΔE (G, S)."""
        xi = np.where(good[:, None], np.square(errors) / (size * target), 0.0)
        before = np.broadcast_to(self.excess, good.shape)
        self.excess = np.cumsum(np.column_stack([before, xi]), 1)[:, -1]  # one by one, however many come at once
        self.seen = self.seen + good * errors.shape[1]

    @property
    def factor(self) -> np.ndarray:
        """What ε is to be multiplied by for a mean ξ of 1 to ``MOST``, (G,); it grows by an eighth at most."""
        mean = np.where(self.seen > 0, self.excess / np.maximum(self.seen, 1), 1.0)
        return np.maximum(mean / np.clip(mean, 1.0, MOST), LEAST) ** (-1 / 6)

    def anew(self) -> "EnergyTuning":
        """For other coordinates: the step counts as a tenth of one at its target, lest one error make the next."""
        return EnergyTuning(self.step, 0.1 / self.step**6, 0.1)

    #: The geometric mean of the steps that these observations asked for.
    mean = property(lambda self: np.exp(self.logs / self.count))


@dataclass
class Moments:
    """Means and squared deviations (G, d) of positions so far, each counted with its weight (G,)."""

    weight: np.ndarray | float = 0.0
    mean: np.ndarray | float = 0.0
    squares: np.ndarray | float = 0.0

    def add(self, z: np.ndarray, weight: np.ndarray) -> None:
        """One position of each chain."""
        self.weight = self.weight + weight
        before = z - self.mean
        self.mean = self.mean + (weight / self.weight)[:, None] * before
        self.squares = self.squares + weight[:, None] * before * (z - self.mean)

    def scales(self, transitions: int) -> np.ndarray:
        """√Var zᵢ (G, d), of root mean square 1; closer to one another where a window had few transitions."""
        variance = self.squares / self.weight[:, None]
        log = 0.5 * np.log(np.maximum(variance, 1e-12 * variance.mean(1, keepdims=True)) + 1e-300)
        scale = np.exp((log - log.mean(1, keepdims=True)) * transitions / (transitions + FEW))
        return scale / np.sqrt(np.square(scale).mean(1, keepdims=True))

    #: √ Σ_i Var z_i of each chain, (G,).
    radius = property(lambda self: np.sqrt(self.squares.sum(1) / self.weight))


def effective_draws(x: np.ndarray) -> np.ndarray:
    """Effective draws of each column of one chain x (n, M), (M,): n / (1 + 2 Σ ρ), Geyer's initial positive pairs.

    Geyer 1992, doi:10.1214/ss/1177011137, section 3.3. At least 1; n where a column never moves.
    """
    n = len(x)
    x = x - x.mean(0)
    spectrum = rfft(x, next_fast_len(2 * n), axis=0)
    covariance = irfft(spectrum.real**2 + spectrum.imag**2, next_fast_len(2 * n), axis=0)[: n - n % 2]
    pairs = (covariance[::2] + covariance[1::2]) / np.where(covariance[0] > 0, covariance[0], np.inf)
    time = 2 * np.where(np.minimum.accumulate(pairs > 0, axis=0), pairs, 0.0).sum(0) - 1
    return np.clip(n / np.maximum(time, 1.0), 1.0, n)
