"""Training that is stopped, by a signal or a limit of time, goes on to the very same result, and to nothing else."""

import itertools
import math
import signal
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import monte_carlo
import numpy as np
import pytest
import torch
from conjugate import correlated
from monte_carlo import goes_on, interrupted, same
from properties import planted
from ranked import fit
from refused import refuses

import bnn_pyro as bp
from bnn_pyro import checkpoint
from bnn_pyro.checkpoint import Checkpoint, Run
from bnn_pyro.files import write_whole
from bnn_pyro.inference import cost, log_joint, optimise, svi
from bnn_pyro.inference.log_joint import elbo_of
from bnn_pyro.inference.training_loop import check_finite, settled
from bnn_pyro.progress import progress_bar

METHODS = {
    "svi, mini-batches": bp.SVI(epochs=6, batch_size=8, lr=0.01, lr_warmup=15, clip=0.9),
    "svi, full batch": bp.SVI(epochs=24, lr=0.01, scale_lr=0.1),
    "map": bp.MAP(epochs=6, batch_size=8, lr=0.01, patience=0),
    "svi, augmented": bp.SVI(epochs=6, batch_size=8, lr=0.01, augment=lambda x: x + torch.rand(()), workers=1),
}
STEPS = 24
CHAINS = bp.NUTS(draws=8, warmup=10, chains=2, compiled="no", cores=1, max_tree_depth=3)


@pytest.mark.parametrize("name", METHODS)
def test_a_stopped_run_goes_on_to_the_same_result(tmp_path, name):
    """After the first step, in the middle, and after the last; by either signal."""
    whole = fit(METHODS[name])
    for done, step, number in ((1, 1, signal.SIGINT), (10, 9, signal.SIGTERM), (STEPS, STEPS - 10, signal.SIGINT)):
        with interrupted(step, number, f"step {done} of {STEPS}"):
            fit(METHODS[name], tmp_path, resume=True)
        assert (tmp_path / "checkpoint" / "training.pt").is_file() and not (tmp_path / "posterior.json").exists()
    resumed = fit(METHODS[name], tmp_path, resume=True)
    assert same(resumed, whole) and same(bp.load(tmp_path), whole)
    assert not (tmp_path / "checkpoint").exists()


def test_a_fit_begun_before_scales_had_a_rate_of_their_own_goes_on_without(tmp_path, monkeypatch):
    with bp.isolated(1):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4000), torch.nn.Linear(4000, 1))
    method, how = bp.SVI(epochs=8, patience=0), dict(entry=bp.Bayesian(net))
    with monkeypatch.context() as earlier, interrupted(5):
        earlier.setattr(svi, "SCALE_LR", None)
        fit(method, tmp_path, **how)
    assert "scale_lr" not in fit(method, tmp_path, resume=True, **how).provenance["schedule"]
    assert fit(method, **how).provenance["schedule"]["scale_lr"] == 0.03
    monkeypatch.setattr(svi, "SCALE_LR", None)
    assert same(bp.load(tmp_path, module=net), fit(method, **how))
    with monkeypatch.context() as earlier, interrupted(5):
        earlier.setattr(svi, "SCALE_LR", 0.01)
        fit(method, tmp_path / "slower", **how)
    monkeypatch.setattr(svi, "SCALE_LR", 0.03)
    assert fit(method, tmp_path / "slower", resume=True, **how).provenance["schedule"]["scale_lr"] == 0.01


def test_a_fit_begun_with_one_rate_goes_on_with_it_where_held_out_rows_choose(tmp_path, monkeypatch):
    with bp.isolated(1):
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    method, how = bp.SVI(epochs=8, patience=20), dict(entry=bp.Bayesian(net))
    with monkeypatch.context() as earlier:
        earlier.setattr(svi, "SLOWER", 1.0)
        whole = fit(method, **how)
        with interrupted(5):
            fit(method, tmp_path, **how)
    assert same(fit(method, tmp_path, resume=True, **how), whole) and not same(fit(method, **how), whole)


def test_other_settings_are_refused(tmp_path):
    method = METHODS["svi, mini-batches"]
    with interrupted(5):
        fit(method, tmp_path)
    before = (tmp_path / "checkpoint" / "training.pt").read_bytes()
    for other in (
        dict(method=bp.SVI(epochs=7, batch_size=8)),
        dict(method=bp.MAP(epochs=6, batch_size=8)),
        dict(seed=3),
        dict(entry=bp.MeanField(hidden=(4,))),
        dict(data=correlated(num=30, noise=0.5, seed=9).data),
    ):
        refuses("other settings, seed or data", fit, **{"method": method, "out": tmp_path, "resume": True, **other})
        assert (tmp_path / "checkpoint" / "training.pt").read_bytes() == before


@pytest.mark.parametrize("method", [METHODS["svi, mini-batches"], CHAINS], ids=["svi", "nuts"])
def test_a_run_started_over_is_not_mistaken_for_the_finished_one(tmp_path, method):
    """The old posterior stays until the new one is whole; a run in chains has checkpoints of its chains alone."""
    old = fit(method, tmp_path, seed=1)
    with interrupted(12, signal.SIGTERM):
        fit(method, tmp_path)
    assert same(bp.load(tmp_path), old)
    new = fit(method, tmp_path, resume=True)
    assert same(new, fit(method)) and same(bp.load(tmp_path), new)
    assert same(fit(method, tmp_path, resume=True), new)


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "planted", "altered"])
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    with interrupted(5):
        fit(METHODS["map"], tmp_path)
    path = tmp_path / "checkpoint" / "training.pt"
    blob = path.read_bytes()
    weights = torch.load(path, weights_only=True)["state"]["guide"]["loc"].numpy().tobytes()
    path.write_bytes({
        "truncated": blob[:-200],
        "empty": b"",
        "foreign": b"PK not a checkpoint",
        "planted": planted(tmp_path / "executed"),
        "altered": blob.replace(weights, weights[::-1]),  # which torch itself reads without a word
    }[damage])  # fmt: skip
    refuses(r"training\.pt is damaged; start again", fit, METHODS["map"], tmp_path, resume=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(("what", "step", "saves", "message"), [
    ("loss", 11, 99, "loss became nan at step 11"),
    ("gradient", 11, 10, "loss became nan at step 12"),
    ("gradient", 11, 99, "weights stopped being finite at step 11"),
    ("gradient", STEPS, 23, f"weights stopped being finite at step {STEPS}"),
])  # fmt: skip
def test_a_loss_or_its_gradient_that_is_not_finite(tmp_path, monkeypatch, what, step, saves, message):
    """The checkpoint on disk stays the last good one. saves: up to which step a checkpoint is due after each."""
    looks, calls = iter(range(1, 100)), iter(range(1, 100))
    monkeypatch.setattr(Checkpoint, "due", property(lambda self: next(looks) <= saves))

    def broken(*args, **how):
        elbo, likelihood = elbo_of(*args, **how)
        if next(calls) == step:
            if what == "loss":
                return elbo * math.nan, likelihood
            elbo.register_hook(lambda gradient: gradient * math.nan)
        return elbo, likelihood

    monkeypatch.setattr(log_joint, "elbo_of", broken)
    refuses(rf"{message} \(lr 0.01\).*such as 0.001", fit, METHODS["svi, mini-batches"], tmp_path)
    refuses("inf at step 1, before .* that the likelihood is given", check_finite, torch.tensor([[math.inf]]), 1, 9)
    state = torch.load(tmp_path / "checkpoint" / "training.pt", weights_only=True)["state"]
    assert state["step"] == step - 1 and all(torch.isfinite(value).all() for value in state["guide"].values())


def test_a_file_is_whole_or_absent_and_a_childs_file_alone_is_something_to_resume_from(tmp_path, monkeypatch):
    path, checkpoint = tmp_path / "file", Checkpoint(tmp_path / "run")
    assert not checkpoint.exists
    checkpoint.child("member-1").save({})
    assert checkpoint.exists
    write_whole(path, b"old")
    monkeypatch.setattr("os.fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new, half written")
    assert path.read_bytes() == b"old"


def test_signal_handlers_come_back_and_a_second_signal_stops_at_once(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Checkpoint(tmp_path) as checkpoint:
        signal.raise_signal(signal.SIGTERM)
        assert checkpoint.stop and checkpoint.due
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the second signal was swallowed")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert not list(tmp_path.iterdir())


# -- how long a fit takes: its steps, when an objective has settled, forecasts, limits of time ------------------------
PROBLEM = correlated(num=30, noise=0.5)
NET = bp.MeanField(hidden=(3,))
timed = partial(monte_carlo.fit, NET, PROBLEM.data)


def test_without_a_terminal_progress_is_a_line_for_every_tenth(capsys):
    with progress_bar("fit") as report:
        for done in range(1, 251):
            report(done, 250, {"ELBO": -done})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("[")[0].split() for line in lines] == [["fit:", f"{k}0%"] for k in range(1, 11)]
    assert "<" in lines[0] and "ELBO=-25]" in lines[0]


@pytest.mark.parametrize(("limit", "words"), [
    ({}, r"; max_minutes=M \(--max-minutes M\) ends after M minutes with the draws so far"),
    ({"max_minutes": 2, "least": 0.2}, "; it ends after 2 min .*, once every chain has 20% of its draws"),
    ({"max_minutes": 2}, "; it ends after 2 min .* or an error without any"),
    ({"max_minutes": 60}, ""),
])  # fmt: skip
def test_the_first_transitions_tell_how_long_it_takes(limit, words, monkeypatch):
    """Four times as long in the first 100 of each of four chains; nobody is told to set a limit that there is."""
    now = [0.0]
    monkeypatch.setattr(cost, "time", SimpleNamespace(monotonic=lambda: now[0]))
    report = cost.Forecast(bp.NUTS(warmup=500, draws=4500), Run(**limit)).run.report
    with pytest.warns(UserWarning, match=rf"6 minutes; draws=900 \(--set draws=900\) takes 2 minutes{words}$"):
        for done in range(1, 800):
            now[0] += 0.07 if done < 400 else 0.0175
            report(done, 20_000, {})


def clock(monkeypatch):
    """A second passes from one look at the clock to the next: a chain looks after every transition."""
    seconds = itertools.count()
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(time=lambda: next(seconds), monotonic=time.monotonic))


TIMED = {
    "nuts": (bp.NUTS(chains=3, draws=12, warmup=10, max_tree_depth=3), 0.8, 6),
    "chees": (bp.ChEES(chains=6, superchains=3, draws=6, warmup=24), 0.45, 3),
    "mile": (bp.MILE(chains=2, draws=6, thin=3, warmup=20, start="prior", compiled="yes"), 0.39, 3),
}


@pytest.mark.parametrize("name", TIMED)
def test_a_limit_of_time_keeps_as_many_draws_of_every_chain(name, monkeypatch, tmp_path):
    """In the warm-up it is an error, and a checkpoint."""
    method, minutes, kept = TIMED[name]
    whole, some_of_it, none_of_it = timed(method), tmp_path / "some", tmp_path / "none"
    stopped = f"limit of {minutes:g} min: {method.chains} of {method.chains} chains with {kept} of {method.draws} draws"
    with monkeypatch.context() as patch:
        clock(patch)
        with pytest.warns(UserWarning, match=stopped):
            some = timed(method, out=some_of_it, max_minutes=minutes)
        words = rf"at transition \d+ of {method.warmup}: .*max-minutes 1 with --resume"
        refuses(words, timed, method, out=none_of_it, max_minutes=0.3)
        refuses(r"take --max-minutes [12]; all draws take \d+ (s|minutes) more", timed, method, max_minutes=0.3)
    assert all(torch.equal(v[:, :kept], some.chains[site]) for site, v in whole.chains.items())
    assert not (some_of_it / "checkpoint").exists() and stopped in bp.load(some_of_it, NET).provenance["stopped"]
    assert same(timed(method, out=none_of_it, resume=True, max_minutes=60), whole)  # a warning would be an error


def test_a_chain_with_more_draws_gives_them_up(monkeypatch, tmp_path):
    method = TIMED["nuts"][0]
    whole = timed(method)
    with interrupted(17):
        timed(method, out=tmp_path)
    clock(monkeypatch)
    with pytest.warns(UserWarning, match="limit of 0.6 min: 3 of 3 chains with 2 of 12 draws each are kept"):
        some = timed(method, out=tmp_path, resume=True, max_minutes=0.6)
    assert all(torch.equal(v[:, :2], some.chains[site]) for site, v in whole.chains.items())


@pytest.mark.parametrize(("net", "kind"), [(NET, bp.SVI), (bp.MLP(hidden=(3,)), bp.MAP)], ids=["svi", "map"])
def test_an_optimisation_ends_with_the_weights_of_that_step(net, kind, monkeypatch, tmp_path, capsys):
    method, seen, advance = kind(epochs=40, batch_size=10, patience=0), [], optimise.Training.advance

    def watched(self, *batch):
        advance(self, *batch)
        seen.append(torch.cat([value.flatten().clone() for value in self.guide.state_dict().values()]))

    with monkeypatch.context() as patch:
        patch.setattr(optimise.Training, "advance", watched)
        whole = monte_carlo.fit(net, PROBLEM.data, method)
        steps = len(seen)
        clock(patch)
        with pytest.warns(UserWarning, match=r"stopped at the limit of 1 min, at step \d+ of 120"):
            some = monte_carlo.fit(net, PROBLEM.data, method, out=tmp_path, max_minutes=1.0)
    done, saved = len(seen) - steps, bp.load(tmp_path, net)
    assert 40 < done < 70 and torch.equal(seen[-1], seen[done - 1])
    assert some.trace["epoch"] == [*map(float, range(1, done // 3 + 1)), *([done / 3] if done % 3 else [])]
    assert f"at step {done} of 120" in saved.provenance["stopped"] and "stopped" not in whole.provenance
    again = monte_carlo.fit(net, PROBLEM.data, method, out=tmp_path, resume=True, max_minutes=9.0, progress=True)
    assert again.provenance["seconds"] == saved.provenance["seconds"]
    assert f"at step {done} of 120, and finished there; for a longer fit start again" in capsys.readouterr().err
    values = [*(saved.chains or saved.guide.state_dict()).values()]
    assert torch.equal(torch.cat([value.flatten() for value in values]), seen[-1])


ROWS = 400


def noisy(rise, noise, lines=300, seed=0):
    """Lines that rise by so many nats a row over their last third."""
    return ROWS * (np.linspace(0, 3 * rise, lines) + np.random.default_rng(seed).normal(0, noise, lines))


def test_flat_is_settled_a_rise_is_not_and_the_learning_rate_falls_then(monkeypatch):
    def over(objective, kl=(100.0,) * 300, rows=ROWS):
        return settled({"elbo": objective, "kl": kl[: len(objective)]}, rows)

    assert over(noisy(0.0, 0.05)) and over(noisy(0.008, 0.001))
    assert not over(noisy(0.0, 0.05)[:19]), "too few lines"
    assert not over(noisy(0.1, 0.05)) and not over(noisy(0.02, 0.001))
    assert not over(noisy(0.0, 1.0)), "noise that would hide a rise"
    assert over(noisy(-0.5, 0.01)), "an objective that falls has nothing to wait for"
    assert over([-1.0] * 60), "one number again and again"
    assert not over(noisy(0.008, 0.001) * 100, rows=ROWS * 100), "more rows tell smaller rises apart"
    assert not over(noisy(0.0, 0.05), noisy(-0.02, 0.001)), "q still moves"
    assert over(noisy(0.0, 0.05), noisy(-0.01, 0.03)), "the KL's own noise"
    posterior = timed(bp.SVI())
    chosen = posterior.provenance["schedule"]
    assert (chosen["batch_size"], chosen["lr"], chosen["epochs"]) == (0, 0.02, posterior.trace["epoch"][-1])
    assert 200 <= chosen["epochs"] < 10_000
    monkeypatch.setattr("bnn_pyro.inference.training_loop.settled", lambda *_: False)
    monkeypatch.setattr(optimise, "MAX_STEPS", 600)
    assert timed(bp.SVI()).trace["epoch"][-1] == 600


@pytest.mark.parametrize("method", [bp.SVI(), bp.SVI(batch_size=8), bp.MAP(patience=0)], ids=["all rows", "8", "map"])
def test_a_run_of_as_many_steps_as_it_takes_goes_on_to_the_same_result(tmp_path, monkeypatch, method):
    """Before the objective has settled, right after that, and while the learning rate falls."""
    monkeypatch.setattr(optimise, "MAX_STEPS", 48)
    assert goes_on(timed(method), (10, 14, 10), timed, method, out=tmp_path)
