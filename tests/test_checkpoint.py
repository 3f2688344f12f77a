"""Training that is stopped at any step goes on to the very same result, and never resumes something else."""

import math
import signal
from unittest.mock import Mock

import pytest
import torch
from conjugate import correlated
from monte_carlo import interrupted, same
from properties import planted
from ranked import fit

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.files import write_whole
from bnn_pyro.inference import log_joint
from bnn_pyro.inference.log_joint import elbo_of

METHODS = {
    "svi, mini-batches": bp.SVI(epochs=6, batch_size=8, lr=0.01, lr_warmup=15, clip=0.9),
    "svi, full batch": bp.SVI(epochs=24, lr=0.01),
    "map": bp.MAP(epochs=6, batch_size=8, lr=0.01),
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
        with pytest.raises(bp.UserError, match="other settings, seed or data"):
            fit(**{"method": method, "out": tmp_path, "resume": True, **other})
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
    with pytest.raises(bp.UserError, match=r"training\.pt is damaged; start again"):
        fit(METHODS["map"], tmp_path, resume=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("what", "step", "saves", "message"),
    [
        ("loss", 11, 99, "loss became nan at step 11"),
        ("gradient", 11, 10, "loss became nan at step 12"),
        ("gradient", 11, 99, "weights stopped being finite at step 11"),
        ("gradient", STEPS, 23, f"weights stopped being finite at step {STEPS}"),
    ],
)
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
    with pytest.raises(bp.UserError, match=rf"{message} \(lr 0.01\).*such as 0.001"):
        fit(METHODS["svi, mini-batches"], tmp_path)
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
