"""The rule for batch size, learning rate and the end of an optimisation, and when an objective has settled."""

import math

import numpy as np
import pytest
from conjugate import correlated
from monte_carlo import same, stop_at

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.inference import schedule as rules
from bnn_pyro.inference.schedule import schedule, settled
from bnn_pyro.settings import parse_value, plain

DATA = correlated(num=30, noise=0.5).data
ENTRY = bp.MeanField(hidden=(3,))
ROWS = 400


def fit(method, out=None, **how):
    return bp.fit(ENTRY, DATA, method, seed=2, out=out, progress=False, device="cpu", **how)


def test_the_rule_at_its_bounds():
    assert schedule(1, 1) == (0, 0.02, 10_000) and schedule(512, 1000) == (0, 0.01, 10_000)
    assert schedule(513, 8000).batch_size == 64 and schedule(513, 8000).lr == 0.005
    assert schedule(60_000, 10**7) == (256, 0.001, 10_000 // math.ceil(60_000 / 256))
    assert schedule(10**7, 1000).epochs == rules.MIN_EPOCHS


def noisy(rise, noise, lines=300, seed=0):
    """Lines that rise by so many nats a row over their last third."""
    return ROWS * (np.linspace(0, 3 * rise, lines) + np.random.default_rng(seed).normal(0, noise, lines))


def test_flat_is_settled_and_a_rise_is_not():
    assert settled(noisy(0.0, 0.05), ROWS) and settled(noisy(0.008, 0.001), ROWS)
    assert not settled(noisy(0.0, 0.05)[:19], ROWS), "too few lines"
    assert not settled(noisy(0.1, 0.05), ROWS) and not settled(noisy(0.02, 0.001), ROWS)
    assert not settled(noisy(0.0, 1.0), ROWS), "noise that would hide a rise"
    assert settled(noisy(-0.5, 0.01), ROWS), "an objective that falls has nothing to wait for"
    assert not settled(noisy(0.008, 0.001) * 100, ROWS * 100), "more rows tell smaller rises apart"


def test_how_often_noise_is_taken_for_a_rise():
    """Of flat objectives, a one-sided test at 2 standard errors refuses 2.3 %."""
    refused = np.mean([not settled(noisy(0.0, 0.025, seed=k), ROWS) for k in range(2000)])
    assert abs(refused - 0.0228) < 4 * math.sqrt(0.0228 * 0.9772 / 2000) + 0.003  # t of 98 degrees of freedom


def test_the_learning_rate_falls_once_the_objective_has_settled(monkeypatch):
    posterior = fit(bp.SVI())
    chosen = posterior.provenance["schedule"]
    assert (chosen["batch_size"], chosen["lr"], chosen["epochs"]) == (0, 0.02, posterior.trace["epoch"][-1])
    assert 200 <= chosen["epochs"] < 10_000
    monkeypatch.setattr("bnn_pyro.inference.optimise.settled", lambda *_: False)
    monkeypatch.setattr(rules, "MAX_STEPS", 600)
    assert fit(bp.SVI()).trace["epoch"][-1] == 600


@pytest.mark.parametrize("method", [bp.SVI(), bp.SVI(batch_size=8), bp.MAP(patience=0)], ids=["all rows", "8", "map"])
def test_a_stopped_run_goes_on_to_the_same_result(tmp_path, monkeypatch, method):
    """Before the objective has settled, right after that, and while the learning rate falls."""
    monkeypatch.setattr(rules, "MAX_STEPS", 48)
    whole = fit(method)
    for step in (10, 14, 10):
        monkeypatch.setattr(Checkpoint, "due", stop_at(step))
        with pytest.raises(Interrupted):
            fit(method, tmp_path, resume=True)
    assert same(fit(method, tmp_path, resume=True), whole)


def test_settings_may_be_left_out():
    settings = dict(epochs=20, batch_size=8, lr=0.01)
    assert "schedule" not in fit(bp.SVI(**settings)).provenance
    assert plain(bp.SVI(**settings)).items() >= settings.items() and not plain(bp.SVI()).keys() & settings.keys()
    assert [parse_value("lr", text, None) for text in ("5", "0.5", "none", "fan-in:1")] == [5, 0.5, None, "fan-in:1"]
