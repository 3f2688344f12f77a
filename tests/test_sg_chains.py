"""What SGHMC and SGLD are made of: mini-batches, schedules, stored draws, traces, resuming, refused settings."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from monte_carlo import stop_at

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.checks.linear_regression import correlated, dataset
from bnn_pyro.inference.sg_chains import Batches, Stored
from bnn_pyro.inference.sg_schedule import Plan, parse_schedule

PROBLEM = correlated(num=60, inputs=3)


def sample(problem, method, **settings):
    return bp.fit(problem.entry(**settings), problem.data, method, progress=False, device="cpu")


def test_batches_belong_to_seed_epoch_and_chain():
    x, y = torch.arange(14.0)[:, None], torch.arange(14.0)
    batches = Batches(x, y, 4, 2, 3, independent=False)
    steps = list(batches.steps(0, 8))
    assert batches.per_epoch == 4 and all(a.shape == (2, 3, 1) and torch.equal(a[..., 0], b) for a, b in steps)
    again = list(batches.steps(6, 8))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(steps[6:], again, strict=True))
    for chain in range(2):
        rows = torch.cat([b[chain] for _, b in steps[:4]])
        assert len(rows.unique()) == 12
    assert not torch.equal(steps[0][1][0], steps[0][1][1]) and not torch.equal(steps[0][1], steps[4][1])


# -- schedules and stored draws --------------------------------------------------------------------------------------
def test_draws_at_equal_increments_of_time():
    plan = Plan.make(parse_schedule("decaying:0.05,0.7"), 4000, 400, 0, 50)
    due = np.array([k for k in range(4000) if plan.due(k)])
    assert len(due) == 50 and due[0] >= 400 and due[-1] == 3999
    time = np.cumsum(np.where(np.arange(4000) >= 400, plan.share, 0))[due]
    gaps = np.diff(time)
    assert np.ptp(gaps) <= 2 * plan.share.max() and gaps.mean() == pytest.approx(time[-1] / 50, rel=0.02)
    assert np.diff(due)[-1] > 4 * np.diff(due)[0]  # in steps they are anything but even
    assert plan.share[0] == 1 and plan.share[-1] == pytest.approx(0.05, rel=1e-3)


def test_cycles():
    plan = Plan.make(parse_schedule("cyclical:4,0.5"), 400, 0, 0, 40)
    due = [k for k in range(400) if plan.due(k)]
    assert len(due) == 40 and all(plan.samples[k] and k % 100 >= 50 for k in due)
    assert plan.share[[0, 100, 200]].tolist() == [1, 1, 1] and plan.share[99] < 1e-3
    assert [sum(a <= k < a + 100 for k in due) for a in (0, 100, 200, 300)] == [10] * 4
    thinned = Plan.make(parse_schedule("constant"), 100, 20, 8, 1000)
    assert [k for k in range(100) if thinned.due(k)] == list(range(27, 100, 8))


@pytest.mark.parametrize("cap", [1, 6, 7])
def test_a_capped_ensemble_stays_evenly_spread(cap):
    ensemble = Stored(cap)
    for serial in range(1, 60):
        wanted, before = ensemble.wants(serial), len(ensemble.draws)
        ensemble.add(serial, torch.full((2, 1), float(serial)), torch.zeros(2), None)
        kept = [int(draw[0, 0]) for draw in ensemble.draws]
        assert len(kept) <= cap and kept == [ensemble.stride * i for i in range(1, len(kept) + 1)]
        assert wanted == (kept[-1:] == [serial]) and (len(kept) >= cap // 2 or len(kept) > before)
        assert serial - (kept[-1] if kept else 0) < ensemble.stride


def regression(rows_val=20):
    x, y = PROBLEM.data.x_train, PROBLEM.data.y_train
    return replace(dataset(x, y, PROBLEM.schema), x_val=x[:rows_val] + 0.1, y_val=y[:rows_val])


def test_what_is_recorded_and_shown():
    data, lines = regression(), []
    method = bp.SGHMC(epochs=30, batch_size=20, chains=3, burn_in=10, thin=2, max_draws=16)
    with bp.isolated(0):
        model = PROBLEM.entry().model(data.schema)
        posterior = method.run(model, None, data, report=lambda *line: lines.append(line))
    draws = posterior.chains["layers.0.weight"].shape[1]
    assert posterior.stats["log_joint"].shape == (3, draws) and 8 <= draws <= 16  # 30 were due
    assert [line[0] for line in lines] == list(range(3, 91, 3)) and lines[0][1] == 90
    assert set(lines[0][2]) == {"lr", "draws", "kinetic T", "validation NLL"}
    trace = posterior.trace
    assert {"epoch", "step_size", "kinetic_temperature", "draws", "validation_nll", "log_joint"} == set(trace)
    assert all(len(values) == 30 and np.isfinite(values).all() for values in trace.values())
    assert trace["draws"][9] == 0 and trace["draws"][-1] == 3 * draws and trace["step_size"] == [0.01] * 30
    mixture = bp.predict(posterior, data.x_val, num_draws=10_000).log_prob(data.y_val)
    assert trace["validation_nll"][-1] == pytest.approx(-mixture.mean().item(), rel=1e-4)
    assert "validation_nll" not in sample(PROBLEM, replace(method, epochs=3, burn_in=1)).trace


def test_chains_start_around_the_initial_weights_and_burn_in_is_a_fifth_of_the_epochs():
    """At a step size of almost 0 the draws are the starts, and every line of the trace scores the same mixture."""
    data, method = regression(), bp.SGHMC(lr=1e-14, epochs=10, batch_size=20, chains=500, thin=1, jitter=0.7)
    with bp.isolated(0):
        posterior = method.run(model := PROBLEM.entry().model(data.schema), None, data)
    assert [draws > 0 for draws in posterior.trace["draws"]] == [False] * 2 + [True] * 8
    nll = posterior.trace["validation_nll"]
    assert nll[0] == pytest.approx(nll[-1], abs=1e-4)
    offset = torch.cat([(posterior.chains[s][:, 0] - model.initial[s].detach()).flatten(1) for s in model.initial], 1)
    assert offset.std() == pytest.approx(0.7 * PROBLEM.prior_scale, rel=0.08)  # 4 standard errors


# -- runs ------------------------------------------------------------------------------------------------------------
RUNS = {
    "subtracted": bp.SGHMC(epochs=12, batch_size=20, chains=2, burn_in=6, gradient_noise="subtracted", max_draws=5,
                           thin=1, resample_prior=3, resample_momentum=7),
    "cyclical": bp.SGHMC(epochs=12, batch_size=20, chains=2, schedule="cyclical:2,0.5"),
    "sgld": bp.SGLD(epochs=36, chains=2, schedule="decaying"),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_goes_on_to_the_same_draws(name, tmp_path, monkeypatch):
    data, entry = regression(), bp.MeanField(hidden=(3,), prior="gamma:2,1")
    run = dict(progress=False, device="cpu", seed=4)
    whole = bp.fit(entry, data, RUNS[name], **run)
    real = Checkpoint.due
    for stops in ((1,), (7, 12), (20, 15), (36,)):
        out, done = tmp_path / "-".join(map(str, stops)), 0
        for stop in stops:
            monkeypatch.setattr(Checkpoint, "due", stop_at(stop))
            done += stop
            with pytest.raises(Interrupted, match=f"step {done} of 36"):
                bp.fit(entry, data, RUNS[name], out=out, resume=True, **run)
        monkeypatch.setattr(Checkpoint, "due", real)
        resumed = bp.fit(entry, data, RUNS[name], out=out, resume=True, **run)
        assert all(torch.equal(v, whole.chains[s]) for s, v in resumed.chains.items()), stops
        assert torch.equal(resumed.stats["log_joint"], whole.stats["log_joint"]) and resumed.trace == whole.trace


def test_a_run_that_diverges_says_so():
    for hidden in ((), (3,)):
        with pytest.raises(bp.UserError, match="smaller --lr, such as 10"):
            sample(PROBLEM, bp.SGHMC(lr=100.0, epochs=300, burn_in=10), hidden=hidden)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(epochs=0), "epochs must be at least 1"),
        (dict(chains=0), "chains must be at least 1"),
        (dict(lr=0.0), "lr must be positive"),
        (dict(temperature=math.nan), "temperature must be positive"),
        (dict(jitter=-1.0), "jitter must be"),
        (dict(burn_in=5000), "burn_in must lie between 0 and the 5000 epochs"),
        (dict(max_draws=0), "max_draws must be at least 1"),
        (dict(schedule="cosine"), "unknown schedule 'cosine'"),
        (dict(schedule="cyclical:2.5"), "must have the form cyclical:CYCLES,EXPLORE"),
        (dict(schedule="decaying:2"), "must have the form decaying:FINAL,POWER"),
    ],
)
def test_impossible_settings(settings, message):
    for method in (bp.SGHMC, bp.SGLD):
        with pytest.raises(bp.UserError, match=message):
            method(**settings)


def test_more_impossible_settings():
    for settings, message in (
        (dict(friction=0.0), "friction must lie"),
        (dict(friction=1.1), "friction must lie"),
        (dict(gradient_noise="none"), "unknown gradient_noise"),
        (dict(gradient_noise="subtracted", burn_in=0, batch_size=5), "burn_in is 0"),
        (dict(resample_momentum=-1), "resample_momentum"),
    ):
        with pytest.raises(bp.UserError, match=message):
            bp.SGHMC(**settings)
    with pytest.raises(bp.UserError, match="no draw would be kept"):
        sample(PROBLEM, bp.SGHMC(epochs=10, thin=9))
    with pytest.raises(bp.UserError, match="proper prior"):
        sample(PROBLEM, bp.SGHMC(epochs=10), prior="log-uniform")
    with pytest.raises(TypeError, match="friction"):
        bp.SGLD(friction=0.1)
