"""Microcanonical Langevin ensembles: chains against exact posteriors, members, resuming, faults."""

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conjugate import correlated
from densities import Density
from monte_carlo import check_gaussian, fit, goes_on, same
from refused import refuses

import bnn_pyro as bp
from bnn_pyro import checkpoint
from bnn_pyro.checkpoint import Run
from bnn_pyro.checks.check import Estimate
from bnn_pyro.inference import microcanonical, mile
from bnn_pyro.inference.members import optimised
from bnn_pyro.inference.mile import MILE, Kernel
from bnn_pyro.inference.potential import Potential
from bnn_pyro.isolation import chain_seed
from bnn_pyro.zoo.auto import make_setup

PROBLEM = correlated(inputs=2, noise=5.0, y_shift=40.0, y_scale=8.0)
NET = bp.MeanField(hidden=(4,), noise="heteroscedastic")


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
    kernel.step_size, before = np.array([1e-4, 1e4]), kernel.point
    first = kernel.step_size.copy()
    assert kernel.step()["diverging"].tolist() == [0, 1] and (kernel.point.z[1] == before.z[1]).all()
    assert (kernel.step_size == first).all(), "as it came, it may go"
    kernel.step()
    assert (kernel.step_size == first * [1, 0.5]).all() and not kernel.lost.any(), "a shorter step may do"
    kernel.halved[1] = mile.HALVINGS
    kernel.step()
    again.restore(kernel.state())
    assert again.lost.tolist() == [False, True]
    before = kernel.state()
    del before["own"]["ends"], before["own"]["turned"], before["point"]["scale"]
    before["tuning"]["limit"] = np.inf
    again.restore(before)
    assert kernel.ends == [1, 3, 5, 10] and again.ends == [8, 8, 9, 10], "of a version whose windows were others"
    assert (again.point.scale == 1).all() and (kernel.point.scale != 1).any()
    again.step_size, again.halved, again.turned = np.array([1e4, 1e-4]), np.full(2, mile.HALVINGS), np.full(2, True)
    refuses(r"chain 1 diverged at transition 14: .* smaller energy_variance", again.step)


def test_a_run_with_former_windows_keeps_the_last_step_that_it_has_found():
    kernel, again = (Kernel(MILE(warmup=200), Density(np.ones(9)), np.full((2, 9), 0.1), (0, 1)) for _ in "ab")
    for _ in range(20):
        kernel.step()
    state = kernel.state()
    del state["own"]["ends"], state["point"]["scale"], state["tuning"]["logs"], state["tuning"]["count"]
    again.restore(state)
    while again.done < again.ends[2]:
        again.step()
    assert again.done == 180 and (again.step_size == again.tuning.step).all()


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
    refuses("chain 1 of 1: a chain diverged at transition 55", fit, NET, PROBLEM.data, replace(method, chains=1))


def test_a_step_that_is_not_finite_is_taken_back_in_the_warm_up():
    class Wall(Density):
        def __call__(self, z):
            density, gradient = super().__call__(z)
            return torch.where(z[:, 0].abs() > 1, torch.nan, density), gradient

    kernel, met = Kernel(MILE(warmup=200), Wall([1.0, 1.0]), np.zeros((4, 2)), range(4)), 0
    for _ in range(100):
        step = kernel.step_size
        kernel.step()
        assert np.isfinite(kernel.point.density).all() and (np.abs(kernel.point.z[:, 0]) <= 1).all()
        assert (kernel.tuning.step[kernel.turned] < step[kernel.turned]).all()
        met += kernel.turned.sum()
    assert met > 3
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
