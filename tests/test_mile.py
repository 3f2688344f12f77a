"""Microcanonical Langevin ensembles: the integrator against closed forms, chains against exact posteriors, faults."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from conjugate import correlated
from monte_carlo import check_gaussian, fit
from scipy.integrate import solve_ivp

import bnn_pyro as bp
from bnn_pyro.checks.check import Estimate, z_scores
from bnn_pyro.inference import microcanonical, mile_kernel
from bnn_pyro.inference.microcanonical import (
    GRADIENTS,
    SHARES,
    State,
    direction,
    effective_draws,
    evaluator,
    integrate,
    refresh,
    travel,
    turn,
)
from bnn_pyro.inference.mile import MILE
from bnn_pyro.inference.mile_kernel import Kernel
from bnn_pyro.inference.potential import Potential

PROBLEM = correlated(inputs=2, noise=5.0, y_shift=40.0, y_scale=8.0)
TINY = MILE(**MILE.tiny)
NET = bp.MeanField(hidden=(4,), noise="heteroscedastic")


class Density:
    """What a kernel needs of a potential: a Normal of mean 0 with these variances, less a quartic."""

    compiled, initial = None, torch.zeros(1, dtype=torch.float64)

    def __init__(self, variances, quartic=0.0):
        self.precision, self.quartic = 1 / torch.as_tensor(variances, dtype=torch.float64), quartic

    def __call__(self, z):
        gradient = -self.precision * z - 4 * self.quartic * z**3
        return -(0.5 * self.precision * z**2 + self.quartic * z**4).sum(1), gradient


CURVED = Density([1.0, 0.25, 4.0, 1 / 9], quartic=0.1)


def state(potential, z, u):
    z = np.array(z)
    return State(z, np.array(u), *evaluator(potential)(z))


def start(potential, chains, size, seed=0):
    rng = np.random.default_rng(seed)
    return state(potential, rng.standard_normal((chains, size)), direction(rng.standard_normal((chains, size))))


#: The shares of a step of another integrator, of which closed forms are known.
LEAPFROG = (0.5, 1.0, 0.5)


# -- the integrator ----------------------------------------------------------------------------------------------------
def test_a_turn_is_the_solution_of_its_equation():
    """du/dt = (1 − u uᵀ) g/(d − 1), and K' = u·g, integrated by scipy."""
    g, u = np.array([1.0, -2.0, 0.5]), direction(np.array([[0.3, 1.0, -0.2]]))[0]

    def slope(_, v):
        return np.append((g - v[:3] * (v[:3] @ g)) / 2, v[:3] @ g)

    exact = solve_ivp(slope, (0, 1.7), np.append(u, 0.0), rtol=1e-11, atol=1e-12).y[:, -1]
    turned, kinetic = turn(u[None], g[None], np.array([1.7]))
    np.testing.assert_allclose(turned[0], exact[:3], atol=1e-9)
    np.testing.assert_allclose(kinetic, exact[3], atol=1e-9)


def test_a_turn_as_it_is_printed():
    rng = np.random.default_rng(1)
    u, g, time = direction(rng.standard_normal((3, 5))), rng.standard_normal((3, 5)), np.array([0.1, 2.0, 30.0])
    norm = np.linalg.norm(g, axis=1)
    e, delta = g / norm[:, None], time * norm / 4
    along = (e * u).sum(1)
    below = np.cosh(delta) + along * np.sinh(delta)
    turned, kinetic = turn(u, g, time)
    expected = (u + e * (np.sinh(delta) + along * (np.cosh(delta) - 1))[:, None]) / below[:, None]
    np.testing.assert_allclose(turned, expected, rtol=1e-9)
    np.testing.assert_allclose(kinetic, 4 * np.log(below), rtol=1e-9)
    still, nothing = turn(u, 0 * g, time)
    np.testing.assert_allclose(still, u, atol=1e-15)
    np.testing.assert_allclose(nothing, 0, atol=1e-14)


def test_reversible_and_on_the_sphere():
    there = begin = start(CURVED, 5, 4)
    step, lost = np.array([0.05, 0.1, 0.3, 0.5, 1.0]), 0.0
    for _ in range(10):
        there, error = integrate(evaluator(CURVED), there, step)
        lost = lost + error
        np.testing.assert_allclose((there.u**2).sum(1), 1, atol=1e-14)
    back = there._replace(u=-there.u)
    for _ in range(10):
        back, error = integrate(evaluator(CURVED), back, step)
        lost = lost + error
    np.testing.assert_allclose(back.z, begin.z, atol=1e-9)
    np.testing.assert_allclose(back.u, -begin.u, atol=1e-9)
    np.testing.assert_allclose(lost, 0, atol=1e-9)


def test_orders_of_the_energy_error():
    """Third in one step, second over a way of given length."""
    begin, way = start(CURVED, 20, 4), 0.32
    for steps, order in ((1, 3), (None, 2)):
        errors = []
        for h in (0.04, 0.02, 0.01):
            count = np.full(20, float(steps or round(way / h)))
            errors.append(np.abs(travel(CURVED, begin, np.full(20, h), count)[1]).mean())
        for coarse, fine in pairwise(errors):
            assert np.log2(coarse / fine) == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize(
    ("shares", "z", "u", "error"),
    [
        (LEAPFROG, [0.5202094754738628, -0.6594512059415285, 1.877232890659339, 0.4689566004349352],
         [0.007749248710131829, 0.887981538071746, -0.4490991872498019, 0.09868463507422234], 0.0043263255080090435),
        (SHARES, [0.5211251534810577, -0.6670037460448335, 1.8811988717255268, 0.46101932319932043],
         [0.008184216312275025, 0.8879075433263721, -0.4514613638036768, 0.08795368156026623], 0.007368920079082297),
    ],
)  # fmt: skip
def test_a_step_is_blackjax_s(shares, z, u, error, monkeypatch):
    """Its isokinetic_velocity_verlet and isokinetic_mclachlan, version 1.2.2, float64."""
    monkeypatch.setattr(microcanonical, "SHARES", shares)
    begin = state(CURVED, [[0.5, -1.0, 2.0, 0.3]], [[0.1, 0.7, -0.1, 0.7]])
    end, lost = integrate(evaluator(CURVED), begin, np.array([0.4]))
    np.testing.assert_allclose(end.z[0], z, rtol=1e-12)
    np.testing.assert_allclose(end.u[0], u, rtol=1e-12)
    assert lost[0] == pytest.approx(error, rel=1e-10)


def test_the_energy_error_of_an_isotropic_normal(monkeypatch):
    """E[ΔE²]/d = h⁶/144 by the leapfrog, h = ε/√d: of its shadow energy, |u| being fixed, −h²/24 |z|² alone changes."""
    monkeypatch.setattr(microcanonical, "SHARES", LEAPFROG)
    size, h = 400, 0.2
    begin = start(Density(np.ones(size)), 500, size)
    _, lost = travel(Density(np.ones(size)), begin, np.full(500, h * size**0.5), np.ones(500))
    assert (lost**2).mean() / size == pytest.approx(h**6 / 144, rel=0.2)


def test_compiled_steps_are_those_of_operators():
    with bp.isolated(0):
        potential = Potential(NET.model(PROBLEM.data.schema), PROBLEM.data.x_train, PROBLEM.data.y_train)
        z = potential.prior_draws(3).numpy()
        begin = state(potential, z, direction(np.random.default_rng(0).standard_normal(z.shape)))
        how = np.array([0.01, 0.02, 0.03]), np.array([1.0, 5.0, 3.0])
        slow = travel(potential, begin, *how)
        assert potential.compile(3)
        quick = travel(potential, begin, *how)
    for one, other in zip((*slow[0], slow[1]), (*quick[0], quick[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


# -- what the warm-up measures -----------------------------------------------------------------------------------------
def test_directions_are_forgotten_over_the_length():
    rng, share, chains = np.random.default_rng(0), np.array([0.1]), 20_000
    u = np.zeros((chains, 50))
    u[:, 0] = 1
    for _ in range(10):
        u = refresh(u, rng.standard_normal(u.shape), share)
    assert u[:, 0].mean() == pytest.approx(np.exp(-1), abs=0.02)


def test_effective_draws_of_autoregressions():
    rng, rho = np.random.default_rng(0), np.array([0.0, 0.9, 0.98])
    x = np.zeros((20_000, 3))
    for i in range(1, len(x)):
        x[i] = rho * x[i - 1] + rng.standard_normal(3)
    np.testing.assert_allclose(effective_draws(x), len(x) * (1 - rho) / (1 + rho), rtol=0.25)
    assert effective_draws(np.ones((20, 1))) == 20


@pytest.mark.parametrize("shares", [SHARES, LEAPFROG], ids=["minimal-norm", "leapfrog"])
def test_the_step_meets_its_energy_error(shares, monkeypatch):
    monkeypatch.setattr(microcanonical, "SHARES", shares)
    potential, size = Density(np.logspace(-2, 0, 50)), 50
    settings = MILE(warmup=1000, energy_variance=1e-3, first_energy_variance=1e-2)
    kernel = Kernel(settings, potential, np.random.default_rng(1).standard_normal((8, size)) * 0.1, seed=0)
    for _ in range(1000):
        kernel.step()
    errors = np.stack([kernel.step()["energy_error"] for _ in range(300)])
    assert (errors**2).mean() / size == pytest.approx(1e-3, rel=1.0)
    assert 0.5 < np.median(kernel.length) / np.sqrt(np.logspace(-2, 0, 50).sum()) < 8


# -- the right distribution --------------------------------------------------------------------------------------------
VARIANCES = np.logspace(-1.0, 0.5, 5)


def worst(settings, transitions=200, chains=128):
    """Standard errors by which second moments of an ill-conditioned Normal are off, (5,), from one start."""
    kernel = Kernel(settings, Density(VARIANCES), np.zeros((chains, 5)), seed=3)
    for _ in range(settings.warmup):
        kernel.step()
    figures, z = [], []
    for _ in range(transitions):
        figures.append(kernel.step())
        z.append(kernel.point.z)
    means = (np.stack(z) ** 2 / VARIANCES).mean(0)  # of each chain: they are independent
    return Estimate.of_independent(np.concatenate([means, np.stack(z).mean(0) / VARIANCES**0.5], 1)), figures


EXACT = np.repeat([1.0, 0.0], 5)
ADJUSTED = MILE(adjusted=True, warmup=200, max_steps=30)


def test_adjusted_is_exact():
    estimate, figures = worst(ADJUSTED)
    assert np.abs(z_scores(estimate, EXACT)).max() < 4.5 and estimate.error.max() < 0.06
    rate = np.mean([one["acceptance_rate"] for one in figures])
    assert rate == pytest.approx(0.9, abs=0.06)


def wrong_factor(u, gradient, time):
    """d in the place of d − 1."""
    size = u.shape[1]
    turned, kinetic = turn(u, gradient, time * (size - 1) / size)
    return turned, kinetic * size / (size - 1)


@pytest.mark.parametrize("fault", ["factor d", "no refreshment", "accepts always"])
def test_planted_faults_are_seen(fault, monkeypatch):
    if fault == "factor d":
        monkeypatch.setattr(microcanonical, "turn", wrong_factor)
    elif fault == "no refreshment":
        drawn = []
        monkeypatch.setattr(
            mile_kernel, "direction", lambda noise: (drawn or drawn.append(direction(noise)) or drawn)[0]
        )
    else:
        monkeypatch.setattr(microcanonical, "SHARES", LEAPFROG)
        monkeypatch.setattr(mile_kernel, "travel", lambda *a: (travel(*a)[0], np.minimum(travel(*a)[1], 0.0)))
        monkeypatch.setattr(mile_kernel.DualAveraging, "learn_step", lambda self, error: None)
        monkeypatch.setattr(
            mile_kernel.EnergyTuning, "learn", lambda self, *a: setattr(self, "step", self.step * 0 + 1.1)
        )
    estimate, _ = worst(ADJUSTED)
    assert np.abs(z_scores(estimate, EXACT)).max() > 6


def test_unadjusted_has_the_bias_that_its_energy_error_tells(monkeypatch):
    """Within Monte-Carlo error of 1 at a small step; at a large one too wide, by no more than is said."""
    small = MILE(warmup=1500, energy_variance=3e-7, first_energy_variance=1e-5)
    estimate, figures = worst(small, transitions=1500)
    told = (16 * np.mean([one["energy_error"] ** 2 for one in figures])) ** (1 / 3) / 4
    assert told < 0.03
    assert np.abs(z_scores(estimate, EXACT, tolerance=told)).max() < 4.5 and estimate.error.max() < 0.06
    monkeypatch.setattr(microcanonical, "SHARES", LEAPFROG)
    estimate, figures = worst(MILE(warmup=1500, energy_variance=0.01), transitions=800)
    told = (16 * np.mean([one["energy_error"] ** 2 for one in figures])) ** (1 / 3) / 4
    assert np.abs(z_scores(estimate, EXACT)).max() > 6
    assert np.abs(z_scores(estimate, EXACT, tolerance=told)).max() < 4.5


@pytest.mark.parametrize("adjusted", [False, True])
def test_linear_regression(adjusted):
    settings = dict(draws=400, warmup=600) if adjusted else dict(draws=800, warmup=2000, thin=10)
    method = replace(TINY, adjusted=adjusted, compiled="yes", **settings)
    posterior = fit(PROBLEM.entry(), PROBLEM.data, method)
    check_gaussian(PROBLEM, posterior)
    stats = posterior.stats
    assert posterior.provenance["method"] == "mile" and stats["diverging"].sum() == 0
    assert ("acceptance_rate" in stats) == adjusted and ("energy_error" in stats) == (not adjusted)
    per = stats["n_steps"] / method.thin / GRADIENTS
    assert (per >= 1).all() and (adjusted or (per == 1).all())


def test_what_it_claims():
    assert MILE().converges_to == MILE.converges_to == "exact as lr → 0"
    assert MILE(adjusted=True).converges_to == "exact"
    assert replace(MILE(adjusted=True), adjusted=False).converges_to == "exact as lr → 0"
