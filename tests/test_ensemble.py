"""Deep ensembles: the members are point estimates of their own, and a stopped ensemble goes on to the same members."""

import signal
import time
from dataclasses import replace

import pytest
import torch
from conjugate import correlated
from monte_carlo import same, stop_at

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted

PROBLEM = correlated(num=30, noise=0.5)
SETTINGS = dict(epochs=6, batch_size=8)  # 24 steps a member


def fit(method, out=None, seed=2, **settings):
    how = dict(seed=seed, out=out, progress=False, device="cpu")
    return bp.fit(bp.MLP(hidden=(3,)), PROBLEM.data, method, **how, **settings)


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
    other = fit(bp.Ensemble(members=3, **SETTINGS), seed=1).chains["layers.0.weight"]
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_every_member_is_at_an_optimum_of_its_own():
    """A linear model has one optimum, which every member must find from wherever it started."""
    method = bp.Ensemble(members=2, epochs=500, lr=0.1, final_lr=0.0)
    with bp.isolated(0):
        posterior = method.run(PROBLEM.entry().model(PROBLEM.schema), None, PROBLEM.data)
    for member in range(2):
        w = torch.cat([posterior.chains[f"layers.0.{part}"][member, 0].flatten() for part in ("weight", "bias")])
        torch.testing.assert_close(w.double(), PROBLEM.mean, rtol=0, atol=2e-4)


@pytest.mark.parametrize("step", [5, 25, 70])
def test_a_stopped_ensemble_goes_on_to_the_same_result(tmp_path, monkeypatch, ensemble, step):
    monkeypatch.setattr(Checkpoint, "due", stop_at(step))
    with pytest.raises(Interrupted):
        fit(bp.Ensemble(members=3, **SETTINGS), tmp_path)
    assert same(fit(bp.Ensemble(members=3, **SETTINGS), tmp_path, resume=True), ensemble)


def test_a_member_does_not_depend_on_how_many_there_are(ensemble):
    two = fit(bp.Ensemble(members=2, **SETTINGS))
    first = {site: value[:2] for site, value in ensemble.chains.items()}
    assert all(torch.equal(two.chains[site], value) for site, value in first.items())


def run(method, **settings):
    """``method.run`` as ``fit`` calls it."""
    with bp.isolated(2):
        return method.run(bp.MLP(hidden=(3,)).model(PROBLEM.schema), None, PROBLEM.data, seed=2, **settings)


def test_processes_are_stopped_and_this_one_has_the_rest_to_do(tmp_path):
    """SIGTERM comes while two members are at it."""
    plain, lines = bp.Ensemble(members=3, epochs=30, batch_size=8), []

    class Slow(bp.Ensemble):  # travels by value
        def find(self, model, data, run):
            def slow(*line):
                time.sleep(0.02)
                run.tell(*line)

            return super().find(model, data, replace(run, report=slow))

    def signalled(done, of, figures):
        if done > 1 and not checkpoint.stop:  # of both, as a member has 120 steps
            signal.raise_signal(signal.SIGTERM)

    folder = tmp_path / "checkpoint"
    with pytest.raises(Interrupted, match=r"stopped with . of 3 members found"), Checkpoint(folder) as checkpoint:
        run(Slow(**{**vars(plain), "cores": 2}), checkpoint=checkpoint, report=signalled)
    assert list(folder.glob("*.member-*.pt"))  # what they had when they were stopped
    posterior = run(plain, checkpoint=Checkpoint(folder), report=lambda done, *_: lines.append(done))
    assert lines[0] > 1 and same(posterior, run(plain))
