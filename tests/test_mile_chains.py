"""Microcanonical Langevin ensembles: their members, and runs that are stopped, resumed, shared out, or diverge."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conjugate import correlated
from monte_carlo import fit, same, stop_at
from test_mile import NET, PROBLEM, Density

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted, Run
from bnn_pyro.checks import Subject
from bnn_pyro.checks.joint_distribution import JointDistribution
from bnn_pyro.errors import UserError
from bnn_pyro.inference import mile_kernel
from bnn_pyro.inference.members import optimised
from bnn_pyro.inference.microcanonical import travel
from bnn_pyro.inference.mile import MILE
from bnn_pyro.inference.mile_kernel import Kernel
from bnn_pyro.isolation import chain_seed

QUICK = MILE(chains=2, draws=5, thin=3, warmup=40, epochs=3)


# -- members -----------------------------------------------------------------------------------------------------------
def test_members_are_optimised_stopped_and_differ():
    told, how = [], dict(epochs=60, lr=0.02, batch_size=16)
    with bp.isolated(0):
        model = NET.model(PROBLEM.data.schema)
        found = optimised(model, PROBLEM.data, 3, Run(report=lambda *a: told.append(a)), patience=5, **how)
        two = optimised(model, PROBLEM.data, 2, Run(), patience=5, **how)
        whole = optimised(model, PROBLEM.data, 3, Run(), patience=0, **how)
    weights = found["layers.0.weight"]
    assert len(weights) == 3 and not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert told[-1][0] <= told[-1][1] == 180 and told[-1][2]["NLL"] < told[0][2]["NLL"]
    assert two["layers.0.weight"].shape[0] == 2 and not torch.equal(whole["layers.0.weight"], weights)
    with bp.isolated(0), pytest.raises(UserError, match=r"limit of 1e-09 min was reached at epoch 1 of 60"):
        optimised(model, PROBLEM.data, 3, Run(max_minutes=1e-9), patience=5, **how)
    with bp.isolated(0), pytest.raises(UserError, match="member 1 of 2 has no finite loss"):
        optimised(model, PROBLEM.data, 2, Run(), patience=5, epochs=3, lr=1e30, batch_size=0)


def test_how_many_members():
    posterior = fit(NET, PROBLEM.data, replace(QUICK, chains=0, draws=1, warmup=10, epochs=1))
    assert next(iter(posterior.chains.values())).shape[:2] == (8, 1)


# -- running -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("compiled", ["yes", "no"])
def test_resumed_bit_for_bit(tmp_path, monkeypatch, adjusted, compiled):
    method = replace(QUICK, adjusted=adjusted, compiled=compiled, cores=1)
    whole = fit(NET, PROBLEM.data, method)
    for step in (1, 38, 50):  # of the members, in the warm-up, between draws
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(Checkpoint, "due", stop_at(step))
            fit(NET, PROBLEM.data, method, out=tmp_path / str(step))
        assert same(fit(NET, PROBLEM.data, method, out=tmp_path / str(step), resume=True), whole)


def test_two_processes_are_one():
    method = replace(QUICK, compiled="yes", chains=3)
    assert same(fit(NET, PROBLEM.data, replace(method, cores=2)), fit(NET, PROBLEM.data, replace(method, cores=1)))


def test_chains_that_diverge_stay_where_they_are_until_all_have():
    kernel = Kernel(MILE(warmup=10), Density(np.full(3, 1e-4)), np.full((2, 3), 0.01), seed=0)
    for _ in range(10):
        kernel.step()
    kernel.step_size, before = np.array([1e-4, 1e4]), kernel.point.z
    first = kernel.step_size.copy()
    assert kernel.step()["diverging"].tolist() == [0, 1] and (kernel.point.z[1] == before[1]).all()
    assert (kernel.step_size == first * [1, 0.5]).all() and not kernel.lost.any(), "a shorter step may do"
    kernel.halved[1] = mile_kernel.HALVINGS
    kernel.step()
    again = Kernel(MILE(warmup=10), Density(np.full(3, 1e-4)), np.full((2, 3), 0.01), seed=0)
    again.restore(kernel.state())
    assert again.lost.tolist() == [False, True]
    again.step_size, again.halved = np.array([1e4, 1e-4]), np.full(2, mile_kernel.HALVINGS)
    with pytest.raises(UserError, match=r"chain 1 diverged at transition 13: .* smaller energy_variance"):
        again.step()


@pytest.mark.parametrize("compiled", ["yes", "no"])
def test_a_chain_that_diverges_leaves_the_others(compiled, monkeypatch, tmp_path):
    method, step = replace(QUICK, chains=3, compiled=compiled, cores=1), mile_kernel.Kernel.step
    whole = fit(NET, PROBLEM.data, method)

    def diverges(self):
        """The first chain, by the fifth transition after the warm-up."""
        if self.done == 44 and self.rngs[0].bit_generator.seed_seq.entropy == first:
            self.step_size = self.step_size * np.where(np.arange(len(self.step_size)) == 0, 1e6, 1)
        return step(self)

    first = [chain_seed(0, 0, stream=2), 0]
    monkeypatch.setattr(mile_kernel.Kernel, "step", diverges)
    with pytest.warns(UserWarning, match=r"chain 1 .*diverged.*: 2 of 3 chains with 5 of 5 draws each are kept"):
        rest = fit(NET, PROBLEM.data, method, out=tmp_path)
    assert all(torch.equal(whole.chains[site][1:], v) for site, v in rest.chains.items())
    with pytest.raises(UserError, match="chain 1 of 1: a chain diverged at transition 55"):
        fit(NET, PROBLEM.data, replace(method, chains=1))


def test_a_step_that_is_not_finite_is_taken_back_in_the_warm_up():
    class Wall(Density):
        def __call__(self, z):
            density, gradient = super().__call__(z)
            return torch.where(z[:, 0].abs() > 1, torch.nan, density), gradient

    kernel = Kernel(MILE(warmup=200), Wall([1.0, 1.0]), np.zeros((4, 2)), seed=0)
    for _ in range(100):
        kernel.step()
        assert np.isfinite(kernel.point.density).all() and (np.abs(kernel.point.z[:, 0]) <= 1).all()
    assert np.isfinite(kernel.tuning.limit).any()
    nowhere = Kernel(MILE(warmup=200), Wall([1.0, 1.0]), np.full((1, 2), 5.0), seed=0)
    with pytest.raises(UserError, match="the step size fell"):
        for _ in range(200):
            nowhere.step()


def test_one_weight_has_no_direction_to_turn():
    one = bp.MeanField(hidden=(), bias=False, noise=1.0)
    data = correlated(inputs=1).data
    with pytest.raises(UserError, match="need two weights or more"):
        fit(one, data, replace(QUICK, start="prior"))


def test_trajectories_leave_the_joint_distribution_as_it_is(monkeypatch):
    """Geweke's test, of weights and targets: none of it is said to be off, and one that is never rejected is."""
    check = JointDistribution(chains=600, sweeps=4, rows=6)
    adjusted = Subject("mean-field", bp.MeanField(), "mile", PROBLEM.data, {"adjusted": True})
    assert "bias of the step size" in check.refuses(replace(adjusted, given={})) and not check.refuses(adjusted)
    assert check.run(adjusted).level != "bad"
    monkeypatch.setattr(mile_kernel, "travel", lambda *a: (travel(*a)[0], np.minimum(travel(*a)[1], 0.0)))
    assert check.run(adjusted).level == "bad"
