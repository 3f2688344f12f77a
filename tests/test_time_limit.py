"""How long a run of chains takes, and a limit to it; the clock is a fake one."""

import itertools
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conjugate import correlated
from monte_carlo import fit, same, stop_at

import bnn_pyro as bp
from bnn_pyro import checkpoint
from bnn_pyro.checkpoint import Checkpoint, Interrupted, Run
from bnn_pyro.inference import cost, optimise

PROBLEM = correlated(num=30, noise=0.5)
NET = bp.MeanField(hidden=(3,))


def forecast(method, per_transition, total, monkeypatch, first=0):
    """What is said of a run whose transitions take so many seconds, four times as many in the first 100."""
    now, said = [0.0], []
    monkeypatch.setattr(cost, "time", SimpleNamespace(monotonic=lambda: now[0]))
    report = cost.Forecast(method, Run()).run.report
    for done in range(first + 1, min(total, first + 400)):
        now[0] += per_transition * (4 if done < 100 else 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report(done, total, {})
        said += [(done, str(one.message)) for one in caught]
    return said


def test_the_first_transitions_tell_how_long_it_takes(monkeypatch):
    method = bp.NUTS(warmup=500, draws=1000)
    ((done, line),) = forecast(method, 0.06, 6000, monkeypatch)
    assert 120 <= done < 125 and line.startswith("about 6 minutes; --set draws=200 takes 3 minutes, --max-minutes M")
    assert not forecast(method, 0.009, 6000, monkeypatch)  # less than a minute
    ((done, line),) = forecast(method, 20.0, 6000, monkeypatch)  # so slow that the first transitions have to do
    assert done < 10 and "hours" in line
    ((done, line),) = forecast(bp.NUTS(draws=1), 0.1, 6000, monkeypatch, first=3000)  # resumed
    assert 3100 < done < 3125 and line.startswith("about 5 minutes; --max-minutes M")


def clock(monkeypatch):
    """A second passes from one look at the clock to the next: a chain looks after every transition."""
    seconds = itertools.count()
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(time=lambda: next(seconds), monotonic=time.monotonic))


TIMED = {
    "nuts": (bp.NUTS(chains=3, draws=12, warmup=10, max_tree_depth=3), 0.8, 6),
    "chees": (bp.ChEES(chains=6, superchains=3, draws=6, warmup=24), 0.45, 3),
    "mile": (bp.MILE(chains=2, draws=6, thin=3, warmup=20, start="prior", compiled="yes"), 1.05, 3),
}


@pytest.mark.parametrize("name", TIMED)
def test_a_limit_of_time_keeps_as_many_draws_of_every_chain(name, monkeypatch, tmp_path):
    method, minutes, kept = TIMED[name]
    whole = fit(NET, PROBLEM.data, method)
    clock(monkeypatch)
    with pytest.warns(UserWarning, match=rf"limit of {minutes:g} min: .* with {kept} of {method.draws} draws"):
        some = fit(NET, PROBLEM.data, method, out=tmp_path, max_minutes=minutes)
    assert all(torch.equal(v[:, :kept], some.chains[site]) for site, v in whole.chains.items())
    assert len(some.stats["lp"]) == method.chains and not (tmp_path / "checkpoint").exists()
    stopped = f"limit of {minutes:g} min: {method.chains} of {method.chains} chains with {kept} of"
    assert stopped in bp.load(tmp_path, NET).provenance["stopped"]


def test_a_chain_with_more_draws_gives_them_up(monkeypatch, tmp_path):
    method = TIMED["nuts"][0]
    whole = fit(NET, PROBLEM.data, method)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Checkpoint, "due", stop_at(17))
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(
            fit(NET, PROBLEM.data, method, out=tmp_path, resume=True, max_minutes=60), fit(NET, PROBLEM.data, method)
        )


def test_limits_of_time_that_are_none():
    for minutes in (0, -1, float("nan"), float("inf")):
        with pytest.raises(bp.UserError, match="max_minutes must be a number above 0"):
            fit(NET, PROBLEM.data, bp.NUTS(), max_minutes=minutes)
    with pytest.raises(bp.UserError, match=r"can end with what they have \(svi, mc-dropout, map, mle, ensemble, hmc, "):
        fit(NET, PROBLEM.data, bp.SGLD(), max_minutes=1)


POINTS = {
    "svi": (NET, bp.SVI(epochs=40, batch_size=10)),
    "map": (bp.MLP(hidden=(3,)), bp.MAP(epochs=40, batch_size=10)),
}


@pytest.mark.parametrize("name", POINTS)
def test_an_optimisation_ends_with_the_weights_of_that_step(name, monkeypatch, tmp_path):
    """In the middle of an epoch; they are those of the whole fit after as many steps."""
    net, method = POINTS[name]
    net, seen, advance = replace(net), [], optimise.Training.advance

    def watched(self, rows):
        advance(self, rows)
        seen.append({key: value.clone() for key, value in self.guide.state_dict().items()})

    with monkeypatch.context() as patch:
        patch.setattr(optimise.Training, "advance", watched)
        whole = fit(net, PROBLEM.data, method)
        steps = len(seen)
        clock(patch)
        with pytest.warns(UserWarning, match=r"stopped at the limit of 1 min, at step \d+ of 120"):
            some = fit(net, PROBLEM.data, method, out=tmp_path, max_minutes=1.0)
    done = len(seen) - steps
    assert 40 < done < 70 and all(torch.equal(seen[-1][key], value) for key, value in seen[done - 1].items())
    assert some.trace["epoch"] == [*map(float, range(1, done // 3 + 1)), *([done / 3] if done % 3 else [])]
    assert f"at step {done} of 120" in bp.load(tmp_path, net).provenance["stopped"]
    assert "stopped" not in whole.provenance and not (tmp_path / "checkpoint").exists()
    held = bp.load(tmp_path, net)
    values = [*held.guide.state_dict().values()] if held.guide is not None else [*held.chains.values()]
    assert sum(v.double().sum() for v in values) == pytest.approx(sum(v.double().sum() for v in seen[-1].values()))


def test_members_of_an_ensemble_share_the_minutes(monkeypatch, tmp_path):
    """Of 3, one after the other, each has a third; the rows that stop them have scored the weights of its end."""
    data, net = correlated(num=80, noise=0.5).data, bp.MLP(hidden=(3,))
    clock(monkeypatch)
    method = bp.Ensemble(members=3, cores=1, epochs=60, batch_size=20)
    with pytest.warns(UserWarning, match=r"limit of 0\.\d+ min, at step \d+ of 240"):
        some = fit(net, data, method, max_minutes=2.0)
    assert 30 < 4 * some.trace["epoch"][-1] < 45 and len(some.trace["epoch"]) == len(some.trace["validation_nll"])
    whole = fit(net, data, method)
    assert "stopped" not in whole.provenance and whole.trace["epoch"][-1] > 2 * some.trace["epoch"][-1]
