"""Deep ensembles: the members are point estimates of their own, and a stopped ensemble goes on to the same members."""

import signal

import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.trust.linear_regression import correlated

PROBLEM = correlated(num=30, noise=0.5)
SETTINGS = dict(epochs=6, batch_size=8)  # 24 steps a member


def fit(method, out=None, **settings):
    return bp.fit(bp.MLP(hidden=(3,)), PROBLEM.data, method, seed=2, out=out, progress=False, device="cpu", **settings)


@pytest.fixture(scope="module")
def ensemble():
    return fit(bp.Ensemble(members=3, **SETTINGS))


def test_members_are_point_estimates_from_different_starts(ensemble):
    alone = fit(bp.MAP(**SETTINGS))
    for site, value in ensemble.chains.items():
        assert value.shape[:2] == (3, 1)
        assert torch.equal(value[0], alone.chains[site][0])
    first = ensemble.chains["layers.0.weight"]
    assert (first[0] - first[1]).abs().max() > 0.1 and (first[1] - first[2]).abs().max() > 0.1
    assert len(ensemble.trace["log_joint"]) == 6


def test_every_member_is_at_an_optimum_of_its_own():
    """A linear model has one optimum, which every member must find from wherever it started."""
    method = bp.Ensemble(members=3, epochs=1500, lr=0.05, final_lr=0.0)
    with bp.isolated(0):
        posterior = method.run(PROBLEM.entry().model(PROBLEM.schema), None, PROBLEM.data)
    for member in range(3):
        w = torch.cat([posterior.chains[f"layers.0.{part}"][member, 0].flatten() for part in ("weight", "bias")])
        torch.testing.assert_close(w.double(), PROBLEM.mean, rtol=0, atol=2e-4)


def test_it_predicts_the_mean_of_its_members(ensemble):
    x = PROBLEM.x[:5].float()
    prediction = bp.predict(ensemble, x, num_draws=100)
    assert prediction.num_draws == 3
    members = [{site: value[m : m + 1] for site, value in ensemble.chains.items()} for m in range(3)]
    single = [bp.predict(bp.Posterior(ensemble.model, ensemble.schema, chains=chains), x) for chains in members]
    torch.testing.assert_close(prediction.mean, torch.stack([p.mean for p in single]).mean(0))
    assert (prediction.epistemic > 0).all() and all((p.epistemic == 0).all() for p in single)


@pytest.mark.parametrize("step", [5, 24, 25, 40, 70])
def test_a_stopped_ensemble_goes_on_to_the_same_result(tmp_path, monkeypatch, ensemble, step):
    steps = iter(range(1, 10_000))

    def due(self):
        if next(steps) == step:
            signal.raise_signal(signal.SIGINT)
        return self.stop

    monkeypatch.setattr(Checkpoint, "due", property(due))
    with pytest.raises(Interrupted):
        fit(bp.Ensemble(members=3, **SETTINGS), tmp_path)
    resumed = fit(bp.Ensemble(members=3, **SETTINGS), tmp_path, resume=True)
    for site, value in ensemble.chains.items():
        assert torch.equal(resumed.chains[site], value)
    assert resumed.trace == ensemble.trace


def test_it_needs_a_member():
    with pytest.raises(bp.UserError, match="members must be at least 1"):
        bp.Ensemble(members=0)
