"""Microcanonical Langevin ensembles: the integrator against closed forms, chains against exact posteriors, faults."""

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conjugate import correlated
from monte_carlo import check_gaussian, fit, goes_on, same
from refused import refuses

import bnn_pyro as bp
from bnn_pyro import checkpoint
from bnn_pyro.checkpoint import Run
from bnn_pyro.checks.check import Estimate
from bnn_pyro.inference import microcanonical, mile
from bnn_pyro.inference.members import optimised
from bnn_pyro.inference.microcanonical import State, direction, evaluator, integrate, langevin_steps, travel, turn
from bnn_pyro.inference.mile import MILE, Kernel
from bnn_pyro.inference.potential import Potential
from bnn_pyro.isolation import chain_seed
from bnn_pyro.zoo.auto import make_setup

PROBLEM = correlated(inputs=2, noise=5.0, y_shift=40.0, y_scale=8.0)
NET = bp.MeanField(hidden=(4,), noise="heteroscedastic")


class Density:
    """What a kernel needs of a potential: a Normal of mean 0 with these variances, less a quartic."""

    compiled, initial = None, torch.zeros(1, dtype=torch.float64)

    def __init__(self, variances, quartic=0.0):
        self.precision, self.quartic = 1 / torch.as_tensor(variances, dtype=torch.float64), quartic

    def __call__(self, z):
        gradient = -self.precision * z - 4 * self.quartic * z**3
        return -(0.5 * self.precision * z**2 + self.quartic * z**4).sum(1), gradient


class Scaled(Density):
    """Another density, of coordinates that are so many times as small."""

    def __init__(self, other, scale):
        self.other, self.scale = other, torch.as_tensor(scale)

    def __call__(self, z):
        density, gradient = self.other(z * self.scale)
        return density, gradient * self.scale


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
    other = state(Scaled(CURVED, scale), begin.z / scale, begin.u)  # z / scale, in coordinates of their own
    end, lost = integrate(evaluator(CURVED), state(CURVED, begin.z, begin.u, scale), np.array([0.4]))
    other, own = integrate(evaluator(Scaled(CURVED, scale)), other, np.array([0.4]))
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


def test_a_step_that_diverges_among_several_is_found_and_its_chain_s_next_ones_are_shorter(monkeypatch):
    """At once or one by one: the same, bit for bit, and what the others do as well."""
    with bp.isolated(0):
        potential = Potential(NET.model(PROBLEM.data.schema), PROBLEM.data.x_train, PROBLEM.data.y_train)
        start = potential.prior_draws(2).numpy()
        assert potential.compile(2)
        kernels = [Kernel(replace(QUICK, warmup=40), potential, start, (0, 1)) for _ in range(2)]
        for kernel in kernels:
            for _ in range(40):
                kernel.step()
            kernel.step_size = kernel.step_size * [1, 1e6]
        at_once, singly = kernels[0].steps(30), [kernels[1].step() for _ in range(30)]
        lengths = [len(kernel.steps(1000)) for kernel in (kernels[0], Kernel(QUICK, potential, start, (0, 1)))]
        assert lengths == [microcanonical.AT_ONCE, 1], "several where nothing is learned of them"
        monkeypatch.setattr(microcanonical, "WORK", 7.9 * start.size * len(potential.x))
        assert len(kernels[0].steps(1000)) == 7, "no more than take a tenth of a second"
    for name in ("energy_error", "diverging", "step_size"):
        np.testing.assert_array_equal([one[name] for one in at_once], [one[name] for one in singly])
    flags = np.array([one["diverging"] for one in at_once])
    assert flags[:, 1].any() and not flags[:, 0].any() and at_once[-1]["step_size"][1] < at_once[0]["step_size"][1]


def test_the_step_meets_its_energy_error():
    potential, size = Density(np.logspace(-2, 0, 50)), 50
    settings = MILE(warmup=1000, energy_variance=1e-3, first_energy_variance=1e-2)
    kernel = Kernel(settings, potential, np.random.default_rng(1).standard_normal((8, size)) * 0.1, range(8))
    for _ in range(1000):
        kernel.step()
    errors = np.stack([kernel.step()["energy_error"] for _ in range(300)])
    assert (errors**2).mean() / size == pytest.approx(1e-3, rel=1.0)
    assert 0.5 < np.median(kernel.length) / np.sqrt(np.logspace(-2, 0, 50).sum()) < 8


def test_directions_that_data_make_narrow_keep_their_width_at_the_default():
    """Where they are a tenth of all. At the published 0.1 steps are at the limit of stability: a tenth is left."""
    variances = np.repeat([1e-4, 1.0], [20, 180])
    start = np.random.default_rng(0).standard_normal((8, 200)) * variances**0.5
    kernel = Kernel(MILE(warmup=1000), Density(variances), start, range(8))
    for _ in range(1000):
        kernel.step()
    narrow = np.mean([(kernel.step(), kernel.point.z[:, :20] ** 2 / 1e-4)[1] for _ in range(1000)])
    assert 0.4 < narrow < 1.1


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
        kernel, x = Kernel(MILE(warmup=6000), Density(deviations**2), start, range(8)), []
        for step in range(10_000):
            kernel.step()
            if step >= 6000:
                x.append(kernel.point.z)
        apart.append(np.mean([np.mean(len(one) / microcanonical.effective_draws(one)) for one in np.stack(x, 1)]))
        scale = kernel.point.scale
        np.testing.assert_allclose(np.square(scale).mean(1), 1)
        if few > 100:
            np.testing.assert_allclose(scale, 1)
        else:
            slope = np.polyfit(np.log(deviations), np.log(scale).T, 1)[0]
            assert (np.abs(slope - 1) < 0.2).all() and (np.diff(scale, axis=0) != 0).all()
            gradient = evaluator(kernel.potential)(kernel.point.z)[1]
            np.testing.assert_allclose(kernel.point.gradient, scale * gradient)
    assert apart[0] < apart[1] / 3, apart


VARIANCES = np.logspace(-1.0, 0.5, 5)


def moments(settings, transitions=200, chains=128):
    """Standard errors by which second moments of an ill-conditioned Normal are off, (5,), from one start."""
    kernel = Kernel(settings, Density(VARIANCES), np.zeros((chains, 5)), range(chains))
    for _ in range(settings.warmup):
        kernel.step()
    figures, z = [], []
    for _ in range(transitions):
        figures.append(kernel.step())
        z.append(kernel.point.z)
    means = (np.stack(z) ** 2 / VARIANCES).mean(0)  # of each chain: they are independent
    return Estimate.of_independent(np.concatenate([means, np.stack(z).mean(0) / VARIANCES**0.5], 1)), figures


EXACT = np.repeat([1.0, 0.0], 5)


def most_off(estimate, tolerance=0.0):
    """The largest error beyond a tolerance, in standard errors."""
    return (np.maximum(np.abs(estimate.mean - EXACT) - tolerance, 0.0) / estimate.error).max()


def test_adjusted_is_exact():
    estimate, figures = moments(MILE(adjusted=True, warmup=200, max_steps=30))
    assert most_off(estimate) < 4.5 and estimate.error.max() < 0.06
    rate = np.mean([one["acceptance_rate"] for one in figures])
    assert rate == pytest.approx(0.9, abs=0.06)


def bias(figures):
    """By which an estimate may be off, as the energy errors tell."""
    return (16 * np.mean([one["energy_error"] ** 2 for one in figures])) ** (1 / 3) / 4


def test_unadjusted_has_the_bias_that_its_energy_error_tells(monkeypatch):
    """Within Monte-Carlo error of 1 at a small step; at a large one too wide, by no more than is said."""
    small = MILE(warmup=1500, energy_variance=3e-7, first_energy_variance=1e-5)
    estimate, figures = moments(small, transitions=1500)
    assert bias(figures) < 0.03 and estimate.error.max() < 0.06
    assert most_off(estimate, bias(figures)) < 4.5
    monkeypatch.setattr(microcanonical, "SHARES", (0.5, 1.0, 0.5))  # a leapfrog step
    estimate, figures = moments(MILE(warmup=1500, energy_variance=0.01), transitions=800)
    assert most_off(estimate) > 6
    assert most_off(estimate, bias(figures)) < 4.5


@pytest.mark.parametrize("adjusted", [False, True])
def test_linear_regression(adjusted):
    settings = dict(draws=400, warmup=600) if adjusted else dict(draws=800, warmup=2000, thin=10)
    method = replace(MILE(**MILE.tiny), adjusted=adjusted, compiled="yes", **settings)
    posterior = fit(PROBLEM.entry(), PROBLEM.data, method)
    check_gaussian(PROBLEM, posterior)
    stats = posterior.stats
    assert method.converges_to == ("exact" if adjusted else "exact as lr → 0")
    assert posterior.provenance["method"] == "mile" and stats["diverging"].sum() == 0
    assert ("acceptance_rate" in stats) == adjusted and ("energy_error" in stats) == (not adjusted)
    per = stats["n_steps"] / method.thin / microcanonical.GRADIENTS
    assert (per >= 1).all() and (adjusted or (per == 1).all())


QUICK = MILE(chains=2, draws=5, thin=3, warmup=40, epochs=3)


def test_members_are_optimised_stopped_and_differ():
    told, how = [], dict(epochs=60, lr=0.02, batch_size=16)
    with bp.isolated(0):
        model = NET.model(PROBLEM.data.schema)
        found = optimised(model, PROBLEM.data, 3, Run(report=lambda *a: told.append(a)), patience=5, **how)
        whole = optimised(model, PROBLEM.data, 3, Run(), patience=0, **how)
    weights = found["layers.0.weight"]
    assert len(weights) == 3 and not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert told[-1][0] <= told[-1][1] == 180 and told[-1][2]["NLL"] < told[0][2]["NLL"]
    assert not torch.equal(whole["layers.0.weight"], weights)
    for settings, message in (
        (dict(run=Run(max_minutes=1e-9)), "limit of 1e-09 min was reached at epoch 1 of 60"),
        (dict(run=Run(), lr=1e30, batch_size=0), "member 1 of 2 has no finite loss"),
    ):
        with bp.isolated(0), pytest.raises(bp.UserError, match=message):
            optimised(model, PROBLEM.data, 2, patience=5, **how | settings)


@pytest.mark.parametrize(("adjusted", "compiled"), [(False, "yes"), (True, "no")])
def test_two_processes_are_one_and_it_is_resumed_bit_for_bit(tmp_path, monkeypatch, adjusted, compiled):
    method = replace(QUICK, adjusted=adjusted, compiled=compiled, cores=1)
    whole = fit(NET, PROBLEM.data, method)
    assert same(fit(NET, PROBLEM.data, replace(method, cores=2)), whole)
    monkeypatch.setattr(microcanonical, "AT_ONCE", 2)  # so that it ends between draws, which are the same
    for step in (1, 38, 51):  # of the members, in the warm-up, between draws
        assert goes_on(whole, [step], fit, NET, PROBLEM.data, method, out=tmp_path / str(step))


def test_chains_that_diverge_stay_where_they_are_until_all_have():
    kernel, again = (Kernel(MILE(warmup=10), Density(np.full(3, 1e-4)), np.full((2, 3), 0.01), (0, 1)) for _ in "ab")
    for _ in range(10):
        kernel.step()
    kernel.step_size, before = np.array([1e-4, 1e4]), kernel.point.z
    first = kernel.step_size.copy()
    assert kernel.step()["diverging"].tolist() == [0, 1] and (kernel.point.z[1] == before[1]).all()
    assert (kernel.step_size == first * [1, 0.5]).all() and not kernel.lost.any(), "a shorter step may do"
    kernel.halved[1] = mile.HALVINGS
    kernel.step()
    again.restore(kernel.state())
    assert again.lost.tolist() == [False, True]
    before = kernel.state()
    del before["own"]["ends"], before["point"]["scale"]
    again.restore(before)
    assert kernel.ends == [1, 3, 5, 10] and again.ends == [8, 8, 9, 10], "of a version whose windows were others"
    assert (again.point.scale == 1).all() and (kernel.point.scale != 1).any()
    again.step_size, again.halved = np.array([1e4, 1e-4]), np.full(2, mile.HALVINGS)
    refuses(r"chain 1 diverged at transition 13: .* smaller energy_variance", again.step)


@pytest.mark.parametrize("compiled", ["yes", "no"])
def test_a_chain_that_diverges_leaves_the_others(compiled, monkeypatch, tmp_path):
    method, steps = replace(QUICK, chains=3, compiled=compiled, cores=1), mile.Kernel.steps
    whole = fit(NET, PROBLEM.data, method)

    def diverges(self, most):
        """The first chain, from the fourth transition after the warm-up on; or in the last draw alone."""
        if self.done == at and self.rngs[0].bit_generator.seed_seq.entropy == first:
            self.step_size = self.step_size * np.where(np.arange(len(self.step_size)) == 0, 1e6, 1)
        return steps(self, most)

    first, at = chain_seed(0, 0, stream=2), method.warmup + (method.draws - 1) * method.thin
    monkeypatch.setattr(mile.Kernel, "steps", diverges)
    flags = fit(NET, PROBLEM.data, method).stats["diverging"]
    assert flags.shape == (3, 5) and flags.nonzero().tolist() == [[0, 4]]
    at = 43
    with pytest.warns(UserWarning, match=r"chain 1 .*diverged.*: 2 of 3 chains with 5 of 5 draws each are kept"):
        rest = fit(NET, PROBLEM.data, method, out=tmp_path)
    assert all(torch.equal(whole.chains[site][1:], v) for site, v in rest.chains.items())
    refuses("chain 1 of 1: a chain diverged at transition 54", fit, NET, PROBLEM.data, replace(method, chains=1))


def test_a_step_that_is_not_finite_is_taken_back_in_the_warm_up():
    class Wall(Density):
        def __call__(self, z):
            density, gradient = super().__call__(z)
            return torch.where(z[:, 0].abs() > 1, torch.nan, density), gradient

    kernel = Kernel(MILE(warmup=200), Wall([1.0, 1.0]), np.zeros((4, 2)), range(4))
    for _ in range(100):
        kernel.step()
        assert np.isfinite(kernel.point.density).all() and (np.abs(kernel.point.z[:, 0]) <= 1).all()
    assert np.isfinite(kernel.tuning.limit).any()
    nowhere = Kernel(MILE(warmup=200), Wall([1.0, 1.0]), np.full((1, 2), 5.0), (0,))
    with pytest.raises(bp.UserError, match="the step size fell"):
        for _ in range(200):
            nowhere.step()


def test_minutes_given_to_auto_end_the_draws_but_not_what_comes_before(monkeypatch):
    method = MILE(chains=2, draws=6, thin=3, warmup=20, epochs=30, cores=1)
    setup = replace(make_setup(NET, method), auto={"minutes": 0.3})
    looks = itertools.count()  # a second passes from one look at the clock to the next
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(time=lambda: next(looks), monotonic=time.monotonic))
    whole = fit(setup, PROBLEM.data, None)
    with pytest.warns(UserWarning, match="limit of 0.3 min: 2 of 2 chains with 2 of 6 draws"):
        some = fit(replace(setup, auto={"minutes": 0.3, "limited": True}), PROBLEM.data, None)
    assert all(torch.equal(v[:, :2], some.chains[site]) for site, v in whole.chains.items())
