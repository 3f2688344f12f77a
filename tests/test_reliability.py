"""What the machine does to a program: full disks, other processes, SIGKILL; one fit in several processes."""

import os
import random
import re
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import monte_carlo
import numpy as np
import pytest
import ranked
import torch
from plain_tasks import free_port
from properties import SHORT, answer, contents
from refused import refuses
from run_folders import SMALL, same

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.files import LOCK, lock_folder
from bnn_pyro.run import main
from bnn_pyro.runs.folder import CheckFolder, RunFolder
from bnn_pyro.runs.sweep import SweepFolder


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two ranks found, [rank 0's, rank 1's], and the folder that they shared."""
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()
    with monte_carlo.interrupted(ranked.STOPPED):
        ranked.fit(ranked.SVI, folder / "alone")
    np.savez(folder / "rows.npz", x=np.random.default_rng(0).standard_normal((50, 4)), y=np.arange(50) % 5)
    both = [forked.start(forked.as_rank, task=ranked.main, number=k, port=port, folder=folder) for k in (0, 1)]
    for process in both:
        process.join(300)
    assert [process.exitcode for process in both] == [0, 0]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)], folder


def equal(a, b):
    return a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0]) and a[1] == b[1]


@pytest.mark.parametrize("rows", [31, 5, 1], ids="{} rows".format)
@pytest.mark.parametrize("kind", ["svi", "map"])
def test_objective_and_gradient_are_those_of_one_process(results, kind, rows):
    """With the same noise on both ranks; of 5 rows one has 3, of 1 row one has none."""
    elbo, gradient = ranked.objective(kind, rows)
    for rank in results[0]:
        its_elbo, its_gradient = rank["objectives"][kind, rows]
        torch.testing.assert_close(its_elbo, elbo, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max().item())


def test_a_point_estimate_is_that_of_one_process(results):
    """Every step: the order of rows, the learning rate, early stopping by validation rows that are divided as well.

    Equal up to the order in which float32 numbers were added.
    """
    values, trace = ranked.points()
    for rank in results[0]:
        torch.testing.assert_close(rank["points"][0], values, rtol=1e-3, atol=1e-5)
        assert {name: pytest.approx(line, rel=1e-3, abs=1e-4) for name, line in trace.items()} == rank["points"][1]


def test_ranks_agree_bit_for_bit_on_every_variant(results):
    first, second = results[0]
    done = {name: first[name] for name in ("points", "whole")} | first["contract"]
    others = {name: second[name] for name in ("points", "whole")} | second["contract"]
    assert done.keys() == others.keys() and all(equal(result, others[name]) for name, result in done.items())
    assert {method for _, method in first["contract"]} == {"svi", "map", "mle", "ensemble", "mc-dropout"}
    assert {name for name, _ in first["contract"]} == set(bp.ZOO)
    for values, trace in first["contract"].values():
        assert all(torch.isfinite(v).all() for v in values.values())
        assert all(torch.isfinite(torch.tensor(line)).all() for line in trace.values())


def test_a_stopped_fit_goes_on_also_in_another_number_of_processes_and_a_finished_one_is_loaded_by_all(results):
    """The signal came to rank 1 alone."""
    for rank in results[0]:
        assert equal(rank["stopped"], rank["whole"]) and equal(*rank["finished"])
    both, folder = results
    assert Checkpoint(folder / "left" / "checkpoint").path.is_file()
    alone = ranked.fit(ranked.SVI, folder / "left", resume=True)
    assert alone.trace["epoch"] == both[0]["whole"][1]["epoch"]
    whole = ranked.found(ranked.fit(ranked.SVI))[1]["elbo"]
    passed = ranked.STOPPED // 4  # lines of the trace before it was stopped
    assert alone.trace["elbo"][:passed] == both[0]["whole"][1]["elbo"][:passed]
    assert all(rank["taken_over"][1]["elbo"][:passed] == whole[:passed] for rank in both)
    assert equal(both[0]["taken_over"], both[1]["taken_over"])


def test_an_error_is_the_same_on_all_and_ranks_that_drift_apart_are_caught(results):
    for rank in results[0]:
        assert rank["drifted"]["kind"] == "SharedError"
        assert re.search(r"drifted apart \(after step 8 .*by up to .*e-0", rank["drifted"]["told"])
    for name, words in (
        ("seeds", r"processes 0 and 1 of a fit were given other things \(seed\)"),
        ("rows", r"processes 0 and 1 of a fit were given other things \(training rows\)"),
        ("method", r"nuts does not divide one fit among processes, as svi, .* do; start it without torchrun"),
        ("settings of a checkpoint", r"training\.pt was made with other settings"),
    ):
        for rank in results[0]:
            kind, told = rank["complaints"][name]
            assert kind == "SharedError" and re.search(words, told)


def test_every_process_has_the_data_set_or_the_error(results):
    data = bp.load_data(results[1] / "rows.npz")
    assert all(rank["loading"]["all"]["data"].fingerprint == data.fingerprint for rank in results[0])
    for error, case in enumerate(("first fails", "second fails")):
        both = [rank["loading"][case] for rank in results[0]]
        assert [result["error"] for result in both] == [("SharedError", f"rank {error} has no such file")] * 2
        assert both[1]["calls"] == error, "the first of a machine loads first"


def test_a_killed_rank_leaves_a_whole_checkpoint(tmp_path):
    out, port, log = tmp_path / "run", free_port(), tmp_path / "log"
    saved, train = out / "checkpoint" / "training.pt", ["train", "mean-field", *SMALL, "--data", "digits"]
    argv = [*train, "--no-baseline", "--batch-size", "50", "--epochs", "20", "--out", str(out)]

    def state():
        return torch.load(saved, weights_only=True)["state"] if saved.is_file() else {"step": 0}

    how = dict(task=forked.command, port=port, argv=argv)
    both = [forked.start(forked.as_rank, number=k, log=f"{log}-{k}", **how) for k in (0, 1)]
    end = time.monotonic() + 90
    while state()["step"] <= 3:
        assert time.monotonic() < end and both[0].exitcode is None
        time.sleep(0.05)
    both[1].kill()
    both[0].join(60)
    told = Path(f"{log}-0").read_text()
    assert both[0].exitcode != 0
    assert re.search(r"error: process 0 of 2: another process of this fit has ended .* --resume", told), told
    assert len(state()["others"]) == 1 and not (out / "posterior.pt").exists()
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0
    assert (out / "metrics.json").is_file() and not saved.exists()


# -- full disks, locks, SIGKILL; and the same seed again ---------------------------------------------------------------
DATA = ["mean-field", "--data", "toy-curve", "--no-baseline", *SHORT]

pytestmark = pytest.mark.usefixtures("quick")

HOLD = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, b"process %d on a test" % os.getpid())
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_in_use_is_refused_until_its_holder_has_ended_in_whatever_way(tmp_path):
    out = tmp_path / "run"
    assert answer(["train", *DATA, "--out", str(out)]).code == 0 and not (out / LOCK).exists()
    before = contents(out)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(out / LOCK)], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    for argv in (["train", "--overwrite", *DATA, "--out"], ["evaluate", "--quiet"], ["train", "--resume", "--out"]):
        told = answer([*argv, str(out)])
        assert told.code == 2 and f"process {holder.pid} on a test" in told.err and "stop it" in told.err
    refuses("is being written to by process", bp.fit, NET, bp.load_data("toy-curve"), SVI, out=out)
    assert {k: v for k, v in contents(out).items() if k != LOCK} == before
    holder.kill()
    holder.communicate()
    assert (out / LOCK).is_file()  # nobody was left to remove it, and it holds nobody up
    assert answer(["evaluate", str(out), "--quiet"]).code == 0 and not (out / LOCK).exists()


def test_a_run_that_was_begun_since_the_folder_was_claimed_is_left_alone(tmp_path):
    out = tmp_path / "run"
    late = RunFolder.claim(out)
    assert answer(["train", *DATA, "--out", str(out)]).code == 0
    before = contents(out)
    said = pytest.raises(bp.UserError, match=r"another run was begun in .* meanwhile")
    with said, late.begun(RunFolder.open(out).recipe, new=True):
        pass
    assert contents(out) == before


def test_a_lock_is_a_threads_and_leaves_nothing(tmp_path):
    with lock_folder(tmp_path / "new"), lock_folder(tmp_path / "new"), ThreadPoolExecutor(1) as thread:
        refuses("another thread", thread.submit(lock_folder(tmp_path / "new").__enter__).result)
        assert (tmp_path / "new" / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", [RunFolder, CheckFolder, SweepFolder], ids=lambda kind: kind.__name__)
def test_what_a_killed_process_left_half_written_holds_nobody_up_and_is_removed(tmp_path, folder):
    left = [tmp_path / "config.json.4711.part", tmp_path / "figures" / "map.png.4711.part"]
    mine = tmp_path / "film.part"
    for path in (tmp_path / LOCK, left[0]):
        path.write_text("half")
    assert folder.claim(tmp_path).path == tmp_path
    (tmp_path / "figures").mkdir()
    for path in (mine, left[1]):
        path.write_text("half")
    refuses("choose another folder", folder.claim, tmp_path)
    with lock_folder(tmp_path):
        assert mine.exists() and not any(path.exists() for path in left)


def test_a_disk_that_fills_up_is_told_and_the_run_goes_on_once_there_is_room(tmp_path, monkeypatch):
    """At the recipe, at the first checkpoint, at the posterior: no file may grow beyond so many bytes."""
    monkeypatch.setattr(Checkpoint, "due", property(lambda self: True))
    whole, former = tmp_path / "whole", resource.getrlimit(resource.RLIMIT_FSIZE)
    assert answer(["train", *DATA, "--out", str(whole)]).code == 0
    for size in (1, 900, 2500):
        out = tmp_path / f"run-{size}"
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
        try:
            told = answer(["train", *DATA, "--out", str(out)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
        assert told.code == 2 and "make room" in told.err and not (out / "posterior.json").exists()
        assert not list(tmp_path.rglob("*.part")) and not (out / LOCK).exists()
        again = ["--resume", "--quiet"] if (out / "config.json").exists() else DATA
        assert answer(["train", *again, "--out", str(out)]).code == 0 and same(out, whole)


RUNS = {
    "svi": ["mean-field", "--epochs", "60", "--hidden", "8"],
    "nuts": ["mean-field", "--inference", "nuts", "--hidden", "3", "--set", "draws=12", "--set", "warmup=12",
             "--set", "chains=2", "--set", "compiled=no", "--set", "cores=1", "--set", "max_tree_depth=3"],
}  # fmt: skip
FAST = ["--data", "toy-curve", "--no-baseline", "--num-draws", "3", "--device", "cpu", "--quiet"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed_goes_on_to_the_same_result(tmp_path, name):
    whole, out, log, start = tmp_path / "whole", tmp_path / "run", str(tmp_path / "log"), time.monotonic()
    argv = ["train", *RUNS[name], *FAST, "--out"]
    code = forked.run(forked.command, argv=[*argv, str(whole)], log=log)
    assert code == (4 if name == "nuts" else 0)  # of a few draws
    seconds = time.monotonic() - start
    for share in random.Random(name).sample([0.2, 0.4, 0.6, 0.8], 2):
        process = forked.start(forked.command, argv=[*argv, str(out)], log=log)
        time.sleep(share * seconds)
        process.kill()
        process.join()
        if (out / "config.json").is_file():
            argv = ["train", "--resume", "--quiet", "--out"]
    assert forked.run(forked.command, argv=[*argv, str(out)], log=log) == code, Path(log).read_text()
    assert same(out, whole) and (out / "metrics.json").read_bytes() == (whole / "metrics.json").read_bytes()
    assert contents(out).keys() == contents(whole).keys()


NET, SVI = bp.MeanField(hidden=(4,)), bp.SVI(epochs=30)


def test_the_same_seed_gives_the_same_again_and_with_two_threads():
    former, fits = torch.get_num_threads(), []
    data = bp.load_data("breast-cancer", features=["mean radius", "mean texture"], limit=60)
    try:
        for threads in (1, 1, 2):
            torch.set_num_threads(threads)
            fits.append(bp.fit(NET, data, SVI, seed=3, progress=False, device="cpu"))
    finally:
        torch.set_num_threads(former)
    assert monte_carlo.same(*fits[:2])
    one, _, two = (bp.predict(posterior, data.x_test).mean for posterior in fits)
    assert (one - two).abs().max() <= 1e-5  # sums that are split are rounded otherwise, over some hundred steps
