"""One fit in several processes: the fit of all rows that one process makes, or a clear error on every one of them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import numpy as np
import pytest
import ranked
import torch
from plain_tasks import free_port
from run_folders import SMALL

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.distributed import joined
from bnn_pyro.run import main

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def start(num, *command, **how):
    """torchrun, its processes in a group of their own, as a terminal's are."""
    return subprocess.Popen(
        [*LAUNCH, str(num), *map(str, command)],
        env={**os.environ, **ENVIRONMENT},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **how,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two ranks found, [rank 0's, rank 1's], and the folder that they shared."""
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()
    with ranked.stopping(ranked.STOPPED, by=0), pytest.raises(KeyboardInterrupt):
        ranked.fit(ranked.SVI, folder / "alone")
    x = np.random.default_rng(0).standard_normal((2000, 1024), dtype=np.float32)
    np.savez(folder / "rows.npz", x=x, y=np.arange(len(x)) % 5)
    both = [forked.start(forked.as_rank, task=ranked.main, number=k, port=port, folder=folder) for k in (0, 1)]
    for process in both:
        process.join(300)
    assert [process.exitcode for process in both] == [0, 0]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)], folder


def equal(a, b):
    return a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0]) and a[1] == b[1]


def assert_close(a, b):
    """Equal up to the order in which float32 numbers were added."""
    for name, value in a[0].items():
        torch.testing.assert_close(value, b[0][name], rtol=1e-3, atol=1e-5)
    assert a[1].keys() == b[1].keys()
    for name, line in a[1].items():
        assert line == pytest.approx(b[1][name], rel=1e-3, abs=1e-4), name


# -- the fit is that of the full data ----------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [31, 5, 1], ids="{} rows".format)
@pytest.mark.parametrize("kind", ["svi", "map"])
def test_objective_and_gradient_are_those_of_one_process(results, kind, rows):
    """With the same noise on both ranks; of 5 rows one has 3, of 1 row one has none."""
    elbo, gradient = ranked.objective(kind, rows)
    for rank in results[0]:
        its_elbo, its_gradient = rank["objectives"][kind, rows]
        torch.testing.assert_close(its_elbo, elbo, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max().item())


def test_ranks_have_noise_of_their_own_and_rank_0_that_of_one_process(results):
    first, second = results[0][0]["generators"]
    with bp.isolated(2):
        assert torch.equal(first, torch.randn(2000))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 4 / 2000**0.5


def test_a_point_estimate_is_that_of_one_process(results):
    """Every step: the order of rows, the learning rate, early stopping by validation rows that are divided as well."""
    for rank in results[0]:
        assert_close(rank["points"], ranked.points())


def test_ranks_agree_bit_for_bit_on_every_variant(results):
    """With batches that are smaller than the number of ranks, too."""
    first, second = results[0]
    done = {name: first[name] for name in ("points", "whole")} | first["contract"]
    others = {name: second[name] for name in ("points", "whole")} | second["contract"]
    assert done.keys() == others.keys() and all(equal(result, others[name]) for name, result in done.items())
    assert {method for _, method in first["contract"]} == {"svi", "map", "mle", "ensemble", "mc-dropout"}
    assert {name for name, _ in first["contract"]} == set(bp.ZOO)
    for values, trace in first["contract"].values():
        assert all(torch.isfinite(v).all() for v in values.values())
        assert all(torch.isfinite(torch.tensor(line)).all() for line in trace.values())


# -- stopping and going on ---------------------------------------------------------------------------------------
def test_a_stopped_fit_goes_on_to_the_very_same_result_and_a_finished_one_is_loaded_by_all(results):
    """The signal came to rank 1 alone."""
    for rank in results[0]:
        assert equal(rank["stopped"], rank["whole"]) and equal(*rank["finished"])


def test_a_checkpoint_is_resumed_by_another_number_of_processes(results):
    both, folder = results
    state = Checkpoint(folder / "left" / "checkpoint").path
    assert state.is_file()
    alone = ranked.fit(ranked.SVI, folder / "left", resume=True)
    assert alone.trace["epoch"] == both[0]["whole"][1]["epoch"]
    whole = ranked.found(ranked.fit(ranked.SVI))[1]["elbo"]
    passed = ranked.STOPPED // 4  # lines of the trace before it was stopped
    assert alone.trace["elbo"][:passed] == both[0]["whole"][1]["elbo"][:passed]
    for rank in both:
        assert rank["taken_over"][1]["elbo"][:passed] == whole[:passed]
    assert equal(both[0]["taken_over"], both[1]["taken_over"])


# -- what goes wrong is told -------------------------------------------------------------------------------------
def test_ranks_that_drift_apart_are_caught(results):
    for rank in results[0]:
        assert rank["drifted"]["kind"] == "Agreed"
        assert re.search(r"drifted apart \(after step 8 .*by up to .*e-0", rank["drifted"]["told"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("seeds", r"processes 0 and 1 of this fit were given other things \(seed\)"),
        ("rows", r"processes 0 and 1 of this fit were given other things \(training rows\)"),
        ("one fails", r"^rank 1 has no such file$"),
        ("method", r"nuts does not divide one fit among processes, as svi, .* do; start it without torchrun"),
        ("settings of a checkpoint", r"training\.pt was made with other settings"),
    ],
)
def test_an_error_is_the_same_on_all(results, name, words):
    for rank in results[0]:
        kind, told = rank["complaints"][name]
        assert kind == "Agreed" and re.search(words, told)


def test_processes_that_find_no_connection_are_told(monkeypatch):
    for name, value in dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="none").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(bp.UserError, match=r"process 1 of 2 found no connection .* 127\.0\.0\.1:none"), joined():
        pass


# -- the data ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("case", "error"), [("first fails", 0), ("second fails", 1)])
def test_where_one_process_cannot_load_all_have_its_error(results, case, error):
    both = [rank["loading"][case] for rank in results[0]]
    assert [result["error"] for result in both] == [("Agreed", f"rank {error} has no such file")] * 2
    assert both[1]["calls"] == error, "the first of a machine loads first"


def test_every_process_has_the_data_set(results):
    data = bp.load_data(results[1] / "rows.npz")
    for found in (rank["loading"]["all"]["data"] for rank in results[0]):
        assert (found.schema, found.split, found.fingerprint) == (data.schema, data.split, data.fingerprint)
        assert all(torch.equal(rows, found.parts()[name]) for name, rows in data.parts().items())


# -- the command line --------------------------------------------------------------------------------------------
TRAIN = ["train", "mean-field", *SMALL, "--data", "digits", "--no-baseline", "--batch-size", "50"]


@pytest.mark.parametrize("command", ranked.COMMANDS)
def test_an_error_of_all_is_told_once(results, command):
    first, second = (rank["commands"][command] for rank in results[0])
    assert first.count("error: ") == 1 and ranked.COMMANDS[command] in first and len(first.splitlines()) == 1
    assert not second


def until(condition, ended, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and ended() is None
        time.sleep(0.05)


@pytest.mark.usefixtures("no_figures")
def test_a_killed_rank_and_ctrl_c_leave_a_whole_checkpoint(tmp_path):
    """Two ranks, of which one is killed; two go on, until Ctrl-C comes to all of them; one makes the end."""
    out, port = tmp_path / "run", free_port()
    saved, log = out / "checkpoint" / "training.pt", tmp_path / "log"
    argv = [*TRAIN, "--epochs", "20", "--out", str(out)]

    def steps():
        state = torch.load(saved, weights_only=True)["state"] if saved.is_file() else {"step": 0}
        return state["step"]

    how = dict(task=forked.command, port=port, argv=argv)
    both = [forked.start(forked.as_rank, number=k, log=f"{log}-{k}", **how) for k in (0, 1)]
    until(lambda: steps() > 3, lambda: both[0].exitcode)
    both[1].kill()
    both[0].join(60)
    told = Path(f"{log}-0").read_text()
    assert both[0].exitcode != 0
    assert re.search(r"error: process 0 of 2: another process of this fit has ended .* --resume", told), told
    killed_at = steps()

    often = tmp_path / "often.py"  # as `-m bnn_pyro.run`, but with a checkpoint after every step
    often.write_text(
        "import sys; from bnn_pyro import checkpoint; import bnn_pyro.run\n"
        "checkpoint.Checkpoint.__init__.__defaults__ = (None, 0.0)\n"
        "sys.exit(bnn_pyro.run.main())\n"
    )
    process = start(2, often, "train", "--resume", "--quiet", "--out", out)
    until(lambda: steps() > killed_at + 3, process.poll)
    os.killpg(process.pid, signal.SIGINT)
    told, _ = process.communicate(timeout=60)
    assert re.search(rf"stopped after step \d+ of .*go on to the same result with: .*--resume --out {out}", told), told
    assert steps() > killed_at

    assert len(torch.load(saved, weights_only=True)["state"]["others"]) == 1
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0
    assert (out / "metrics.json").is_file() and not saved.exists()
