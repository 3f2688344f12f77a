"""Steps of microcanonical dynamics against closed forms and BlackJAX, and what the warm-up of a chain learns."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conjugate import correlated
from densities import Density, Mapped

import bnn_pyro as bp
from bnn_pyro.inference import microcanonical
from bnn_pyro.inference.adaptation import DualAveraging
from bnn_pyro.inference.microcanonical import (
    EnergyTuning,
    State,
    direction,
    evaluator,
    integrate,
    langevin_steps,
    travel,
    turn,
)
from bnn_pyro.inference.mile import MILE, Kernel
from bnn_pyro.inference.potential import Potential

PROBLEM = correlated(inputs=2, noise=5.0, y_shift=40.0, y_scale=8.0)
NET = bp.MeanField(hidden=(4,), noise="heteroscedastic")
CURVED = Density([1.0, 0.25, 4.0, 1 / 9], quartic=0.1)


def state(potential, z, u, scale=1.0):
    z, (density, gradient) = np.array(z), evaluator(potential)(np.array(z))
    return State(z, np.array(u), density, scale * gradient, scale * np.ones_like(z))


def test_a_step_is_blackjax_s_turns_are_finite_and_directions_are_forgotten_over_the_length():
    """Its isokinetic_mclachlan, version 1.2.2, float64."""
    begin = state(CURVED, [[0.5, -1.0, 2.0, 0.3]], [[0.1, 0.7, -0.1, 0.7]])
    end, lost = integrate(evaluator(CURVED), begin, np.array([0.4]))
    z = [0.5211251534810577, -0.6670037460448335, 1.8811988717255268, 0.46101932319932043]
    u = [0.008184216312275025, 0.8879075433263721, -0.4514613638036768, 0.08795368156026623]
    np.testing.assert_allclose(end.z[0], z, rtol=1e-12)
    np.testing.assert_allclose(end.u[0], u, rtol=1e-12)
    assert lost[0] == pytest.approx(0.007368920079082297, rel=1e-10)
    scale = np.array([[2.0, 0.5, 1.0, 3.0]])
    other = state(Mapped(CURVED, np.diag(scale[0])), begin.z / scale, begin.u)  # z / scale, in coordinates of their own
    end, lost = integrate(evaluator(CURVED), state(CURVED, begin.z, begin.u, scale), np.array([0.4]))
    other, own = integrate(evaluator(Mapped(CURVED, np.diag(scale[0]))), other, np.array([0.4]))
    np.testing.assert_allclose([end.z, end.u, end.gradient], [other.z * scale, other.u, other.gradient], rtol=1e-12)
    assert lost == pytest.approx(own, rel=1e-10)
    g, u = np.array([1.0, -2.0, 0.5]), direction(np.array([[0.3, 1.0, -0.2]]))[0]
    still, nothing = turn(u[None], 0 * g[None], np.array([1.7]))
    np.testing.assert_allclose([*still[0], *nothing], [*u, 0], atol=1e-14)
    along, kinetic = turn(u[None], g[None], np.array([1e4]))  # sinh and cosh of its time are beyond float64
    np.testing.assert_allclose(along[0], g / np.linalg.norm(g), atol=1e-9)
    assert np.isfinite(kinetic).all()
    chains, size, flat = 20_000, 50, Density(np.full(50, 1e30))
    begin = state(flat, np.zeros((chains, size)), np.eye(1, size).repeat(chains, 0))
    noise = np.random.default_rng(0).standard_normal((chains, 10, size))
    end, lost = langevin_steps(flat, begin, np.full(chains, 0.3), np.full(chains, 3.0), noise)
    assert end.u[:, 0].mean() == pytest.approx(np.exp(-1), abs=0.02) and lost.shape == (chains, 10)


def test_compiled_steps_are_those_of_operators():
    with bp.isolated(0):
        potential = Potential(NET.model(PROBLEM.data.schema), PROBLEM.data.x_train, PROBLEM.data.y_train)
        z = 0.3 * potential.prior_draws(3).numpy()
        begin = state(potential, z, direction(np.random.default_rng(0).standard_normal(z.shape)), 0.5 + np.abs(z))
        steps, counts, noise = np.array([0.01, 0.02, 0.03]), np.array([1.0, 5.0, 3.0]), np.random.default_rng(1)
        ways = (
            (travel, (steps, counts)),
            (langevin_steps, (steps, 5 * steps, noise.standard_normal((3, 3, potential.size)))),
        )
        slow = [way(potential, begin, *how) for way, how in ways]
        assert potential.compile(3)
        quick = [way(potential, begin, *how) for way, how in ways]
        far = langevin_steps(potential, begin, 1e200 * steps, 1e200 * steps, ways[1][1][2])[1]
    for (one, own), (other, lost) in zip(slow, quick, strict=True):
        for a, b in zip((*one, own), (*other, lost), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    assert np.isnan(far[:, 1:]).all(), "a chain ends where it is not finite"


def test_the_step_meets_its_energy_error():
    """By one error of a step of 2 where Var ΔE ∝ ε⁶ is at its target at 1; a step learned anew holds it back."""
    begin, error = EnergyTuning(np.array([2.0])), np.array([(50 * 1e-3) ** 0.5 * 2**3])
    again, small = begin.anew(), np.array([1e-9])
    begin.learn(error, np.array([True]), 50, 1e-3)
    assert begin.step == pytest.approx(1, rel=1e-6)
    again.learn(small, np.array([True]), 50, 1e-3)
    assert 2 < again.step < 2 * 11 ** (1 / 6), "the weight of the error is at most 1"
    potential, size = Density(np.logspace(-2, 0, 50)), 50
    settings = MILE(warmup=1000, energy_variance=1e-3, first_energy_variance=1e-2)
    kernel = Kernel(settings, potential, np.random.default_rng(1).standard_normal((8, size)) * 0.1, range(8))
    for _ in range(1000):
        kernel.step()
    errors = np.stack([kernel.step()["energy_error"] for _ in range(300)])
    assert (errors**2).mean() / size == pytest.approx(1e-3, rel=1.0)
    assert 0.5 < np.median(kernel.length) / np.sqrt(np.logspace(-2, 0, 50).sum()) < 8


def test_a_fixed_step_is_changed_where_its_errors_are_not_those_asked_for():
    """To five times the target where it was more, to the target where it was less, of steps that were kept."""
    usual, good = (50 * 1e-3) ** 0.5, np.array([True, True, False])
    errors = usual * np.array([[8.0] * 6, [0.1, 0.2] * 3, [1e9] * 6])
    once, each = EnergyTuning(np.ones(3)), EnergyTuning(np.ones(3))
    once.observe(errors, good, 50, 1e-3)
    for s in range(6):
        each.observe(errors[:, s : s + 1], good, 50, 1e-3)
    np.testing.assert_allclose(once.factor, [0.5 * 5 ** (1 / 6), 2 ** (1 / 6), 1], rtol=1e-12)
    assert (once.excess == each.excess).all() and (once.seen == each.seen).all()
    again = once.anew()
    assert (again.factor == 1).all()
    again.observe(errors * np.sqrt([[3 / 64], [60], [1]]), good, 50, 1e-3)
    assert (again.factor == 1).all(), "three times the target, and one and a half times"


def test_a_step_that_leads_far_beyond_the_usual_error_is_taken_back_and_has_not_diverged(monkeypatch):
    kernel = Kernel(MILE(warmup=100), Density(np.ones(20)), np.full((2, 20), 0.1), (0, 1))
    for _ in range(60):
        kernel.step()
    before, step, usual = kernel.point, kernel.step_size.copy(), (20 * 1e-3) ** 0.5

    def steps(*args):
        state, errors = langevin_steps(*args)
        return state, np.broadcast_to(np.array([[51.0], [49.0]]) * usual, errors.shape).copy()

    monkeypatch.setattr("bnn_pyro.inference.mile.langevin_steps", steps)
    for shorter in (1.0, 0.5):  # where the way back is as bad, and chains would stay for ever
        figures = kernel.step()
        assert (kernel.point.z[0] == before.z[0]).all() and not (kernel.point.z[1] == before.z[1]).any()
        assert not figures["diverging"].any() and (kernel.step_size == step * [shorter, 1.0]).all()
    assert not np.allclose(kernel.point.u[0], before.u[0]) and not kernel.halved.any()
    assert kernel.tuning.factor[0] < 0.5, "they count as errors"


def test_directions_that_data_make_narrow_keep_their_width_at_the_default():
    """Three tenths of all, none of them a coordinate, so that scales help little. At 0.1 a fifth is lost."""
    variances, rng = np.repeat([1e-4, 1.0], [60, 140]), np.random.default_rng(0)
    turned = np.linalg.qr(rng.standard_normal((200, 200)))[0]
    start = (rng.standard_normal((24, 200)) * variances**0.5) @ turned.T
    kernel, narrow = Kernel(MILE(warmup=3000), Mapped(Density(variances), turned), start, range(24)), []
    for step in range(4000):
        kernel.step()
        if step >= 3000:
            narrow.append(((kernel.point.z @ turned)[:, :60] ** 2 / 1e-4).mean())
    assert 0.87 < np.mean(narrow) < 1.1


def test_the_way_of_a_direction_is_that_which_a_long_chain_tells():
    """Half of it at least, where draws stay correlated for longer than a tenth of the warm-up."""
    variances = np.logspace(-3, 0, 20)
    start = np.random.default_rng(1).standard_normal((8, 20)) * variances**0.5
    kernel, x = Kernel(MILE(warmup=1000), Density(variances), start, range(8)), []
    for step in range(6000):
        kernel.step()
        if step >= 1000:
            x.append(kernel.point.z)
    apart = [np.mean(len(one) / microcanonical.effective_draws(one)) for one in np.stack(x, 1)]
    assert 0.5 < np.median(kernel.length / (0.4 * kernel.step_size * apart)) < 1.5


def test_coordinates_are_scaled_by_what_each_chain_has_seen_of_their_widths(monkeypatch):
    """Nearly in proportion to the standard deviations, each chain by its own; draws come several times as fast."""
    deviations, apart = np.logspace(-2, 0, 20), []
    start = np.random.default_rng(1).standard_normal((8, 20)) * deviations
    for few in (100, 1e300):  # as the default has it; no scales at all
        monkeypatch.setattr(microcanonical, "FEW", few)
        kernel, x, seen = Kernel(MILE(warmup=6000), Density(deviations**2), start, range(8)), [], []
        for step in range(10_000):
            kernel.step()
            if step >= 6000:
                x.append(kernel.point.z)
            if 1800 <= step < 3000:
                seen.append((kernel.point.z / kernel.point.scale, np.tile(kernel.tuning.step[:, None], 20)))
            if step == 2999:
                z, weights = np.swapaxes(seen, 0, 1)
                middle = np.average(z, 0, weights)
                radius = np.sqrt(np.average((z - middle) ** 2, 0, weights).sum(1))
                np.testing.assert_allclose(kernel.length, radius, rtol=1e-9)
                np.testing.assert_allclose(kernel.step_size, np.exp(np.log(weights[..., 0]).mean(0)))
        apart.append(np.mean([np.mean(len(one) / microcanonical.effective_draws(one)) for one in np.stack(x, 1)]))
        scale = kernel.point.scale
        np.testing.assert_allclose(np.square(scale).mean(1), 1)
        if few > 100:
            np.testing.assert_allclose(scale, 1)
        else:
            slope = np.polyfit(np.log(deviations), np.log(scale).T, 1)[0]
            assert (np.abs(slope - 1) < 0.2).all() and (np.diff(scale, axis=0) != 0).all()
            kernel.start_at(start)
            assert (kernel.point.scale == scale).all()
            np.testing.assert_allclose(kernel.point.gradient, scale * evaluator(kernel.potential)(start)[1])
    assert apart[0] < apart[1] / 3, apart


def test_a_chain_that_diverges_turns_round_and_a_uniform_distribution_stays_one():
    """In a square beyond which no number is finite; var z of a uniform one is 1/12."""

    class Square(Density):
        def __init__(self):
            pass

        def __call__(self, z):
            return torch.where(((z > 0) & (z < 1)).all(1), 0.0, torch.nan).double(), torch.zeros_like(z)

    kernel = Kernel(MILE(warmup=10), Square(), np.random.default_rng(3).uniform(size=(500, 2)), range(500))
    kernel.done, kernel.step_size, kernel.length, found = 10, np.full(500, 0.3), np.full(500, 0.5), []
    for _ in range(2000):
        kernel.step()
        found.append(12 * np.square(kernel.point.z - 0.5).mean())
        kernel.turned[:] = False  # so that no step is halved
    error = np.mean(np.split(np.array(found), 20), 1).std() / math.sqrt(20)
    assert abs(np.mean(found) - 1) < 4 * error < 0.01


def test_names_that_are_keys_of_checkpoints_do_not_change():
    names = {
        EnergyTuning: "step average weight logs count excess seen",
        microcanonical.Moments: "weight mean squares",
        DualAveraging: "step centre count error log_step",
    }
    for kind, fields in names.items():
        assert [field.name for field in dataclasses.fields(kind)] == fields.split()
    assert State._fields == ("z", "u", "density", "gradient", "scale")
