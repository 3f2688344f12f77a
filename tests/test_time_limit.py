"""How long a fit takes: the rule for its steps, when an objective has settled, forecasts, and limits of time."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conjugate import correlated
from monte_carlo import fit, goes_on, interrupted, same

import bnn_pyro as bp
from bnn_pyro import checkpoint
from bnn_pyro.checkpoint import Run
from bnn_pyro.inference import cost, optimise
from bnn_pyro.inference.training_loop import settled
from bnn_pyro.progress import progress_bar

PROBLEM = correlated(num=30, noise=0.5)
NET = bp.MeanField(hidden=(3,))


def test_without_a_terminal_progress_is_a_line_for_every_tenth(capsys):
    with progress_bar("fit") as report:
        for done in range(1, 251):
            report(done, 250, {"ELBO": -done})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("[")[0].split() for line in lines] == [["fit:", f"{k}0%"] for k in range(1, 11)]
    assert "<" in lines[0] and "ELBO=-25]" in lines[0]


def test_the_first_transitions_tell_how_long_it_takes(monkeypatch):
    """Of a transition of 0.06 s, four times as long in the first 100."""
    now = [0.0]
    monkeypatch.setattr(cost, "time", SimpleNamespace(monotonic=lambda: now[0]))
    report = cost.Forecast(bp.NUTS(warmup=500, draws=1000), Run()).run.report
    with pytest.warns(UserWarning, match="about 6 minutes; --set draws=200 takes 3 minutes, --max-minutes M"):
        for done in range(1, 400):
            now[0] += 0.24 if done < 100 else 0.06
            report(done, 6000, {})


def clock(monkeypatch):
    """A second passes from one look at the clock to the next: a chain looks after every transition."""
    seconds = itertools.count()
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(time=lambda: next(seconds), monotonic=time.monotonic))


TIMED = {
    "nuts": (bp.NUTS(chains=3, draws=12, warmup=10, max_tree_depth=3), 0.8, 6),
    "chees": (bp.ChEES(chains=6, superchains=3, draws=6, warmup=24), 0.45, 3),
    "mile": (bp.MILE(chains=2, draws=6, thin=3, warmup=20, start="prior", compiled="yes"), 0.53, 3),
}


@pytest.mark.parametrize("name", TIMED)
def test_a_limit_of_time_keeps_as_many_draws_of_every_chain(name, monkeypatch, tmp_path):
    method, minutes, kept = TIMED[name]
    whole = fit(NET, PROBLEM.data, method)
    clock(monkeypatch)
    stopped = f"limit of {minutes:g} min: {method.chains} of {method.chains} chains with {kept} of {method.draws} draws"
    with pytest.warns(UserWarning, match=stopped):
        some = fit(NET, PROBLEM.data, method, out=tmp_path, max_minutes=minutes)
    assert all(torch.equal(v[:, :kept], some.chains[site]) for site, v in whole.chains.items())
    assert not (tmp_path / "checkpoint").exists() and stopped in bp.load(tmp_path, NET).provenance["stopped"]


def test_a_chain_with_more_draws_gives_them_up(monkeypatch, tmp_path):
    method = TIMED["nuts"][0]
    whole = fit(NET, PROBLEM.data, method)
    with interrupted(17):
        fit(NET, PROBLEM.data, method, out=tmp_path)
    clock(monkeypatch)
    with pytest.warns(UserWarning, match="limit of 0.6 min: 3 of 3 chains with 2 of 12 draws each are kept"):
        some = fit(NET, PROBLEM.data, method, out=tmp_path, resume=True, max_minutes=0.6)
    assert all(torch.equal(v[:, :2], some.chains[site]) for site, v in whole.chains.items())


@pytest.mark.parametrize("name", TIMED)
def test_a_limit_in_the_warm_up_is_an_error_and_a_checkpoint(name, monkeypatch, tmp_path):
    method = TIMED[name][0]
    with monkeypatch.context() as patch:
        clock(patch)
        with pytest.raises(bp.UserError, match=rf"at transition \d+ of {method.warmup}: .*max-minutes 1 with --res"):
            fit(NET, PROBLEM.data, method, out=tmp_path, max_minutes=0.3)
        with pytest.raises(bp.UserError, match=r"take --max-minutes [12]; all draws take \d+ (s|minutes) more"):
            fit(NET, PROBLEM.data, method, max_minutes=0.3)
    resumed = fit(NET, PROBLEM.data, method, out=tmp_path, resume=True, max_minutes=60)  # a warning would be an error
    assert same(resumed, fit(NET, PROBLEM.data, method))


POINTS = {
    "svi": (NET, bp.SVI(epochs=40, batch_size=10)),
    "map": (bp.MLP(hidden=(3,)), bp.MAP(epochs=40, batch_size=10)),
}


@pytest.mark.parametrize("name", POINTS)
def test_an_optimisation_ends_with_the_weights_of_that_step(name, monkeypatch, tmp_path):
    net, method = POINTS[name]
    seen, advance = [], optimise.Training.advance

    def watched(self, *batch):
        advance(self, *batch)
        seen.append(torch.cat([value.flatten().clone() for value in self.guide.state_dict().values()]))

    with monkeypatch.context() as patch:
        patch.setattr(optimise.Training, "advance", watched)
        whole = fit(net, PROBLEM.data, method)
        steps = len(seen)
        clock(patch)
        with pytest.warns(UserWarning, match=r"stopped at the limit of 1 min, at step \d+ of 120"):
            some = fit(net, PROBLEM.data, method, out=tmp_path, max_minutes=1.0)
    done, saved = len(seen) - steps, bp.load(tmp_path, net)
    assert 40 < done < 70 and torch.equal(seen[-1], seen[done - 1])
    assert some.trace["epoch"] == [*map(float, range(1, done // 3 + 1)), *([done / 3] if done % 3 else [])]
    assert f"at step {done} of 120" in saved.provenance["stopped"] and "stopped" not in whole.provenance
    values = [*(saved.chains or saved.guide.state_dict()).values()]
    assert torch.equal(torch.cat([value.flatten() for value in values]), seen[-1])


ROWS = 400


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


def test_the_learning_rate_falls_once_the_objective_has_settled(monkeypatch):
    posterior = fit(NET, PROBLEM.data, bp.SVI())
    chosen = posterior.provenance["schedule"]
    assert (chosen["batch_size"], chosen["lr"], chosen["epochs"]) == (0, 0.02, posterior.trace["epoch"][-1])
    assert 200 <= chosen["epochs"] < 10_000
    monkeypatch.setattr("bnn_pyro.inference.training_loop.settled", lambda *_: False)
    monkeypatch.setattr(optimise, "MAX_STEPS", 600)
    assert fit(NET, PROBLEM.data, bp.SVI()).trace["epoch"][-1] == 600


@pytest.mark.parametrize("method", [bp.SVI(), bp.SVI(batch_size=8), bp.MAP(patience=0)], ids=["all rows", "8", "map"])
def test_a_stopped_run_goes_on_to_the_same_result(tmp_path, monkeypatch, method):
    """Before the objective has settled, right after that, and while the learning rate falls."""
    monkeypatch.setattr(optimise, "MAX_STEPS", 48)
    whole = fit(NET, PROBLEM.data, method)
    assert goes_on(whole, (10, 14, 10), fit, NET, PROBLEM.data, method, out=tmp_path)
