"""What the machine does to a program: full disks, other processes, little memory, SIGKILL; and the same seed again."""

import os
import random
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import monte_carlo
import pytest
import torch
from properties import SHORT, answer, contents
from refused import refuses
from run_folders import same

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.files import LOCK, lock_folder
from bnn_pyro.runs.folder import CheckFolder, RunFolder
from bnn_pyro.runs.sweep import SweepFolder

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
    "sghmc": ["mean-field", "--inference", "sghmc", "--hidden", "8", "--epochs", "150", "--set", "chains=2",
              "--set", "start=jitter"],
}  # fmt: skip
FAST = ["--data", "toy-curve", "--no-baseline", "--num-draws", "3", "--device", "cpu", "--quiet"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed_goes_on_to_the_same_result(tmp_path, name):
    whole, out, log, start = tmp_path / "whole", tmp_path / "run", str(tmp_path / "log"), time.monotonic()
    argv = ["train", *RUNS[name], *FAST, "--out"]
    assert forked.run(forked.command, argv=[*argv, str(whole)], log=log) == 0
    seconds = time.monotonic() - start
    for share in random.Random(name).sample([0.2, 0.4, 0.6, 0.8], 2):
        process = forked.start(forked.command, argv=[*argv, str(out)], log=log)
        time.sleep(share * seconds)
        process.kill()
        process.join()
        if (out / "config.json").is_file():
            argv = ["train", "--resume", "--quiet", "--out"]
    assert forked.run(forked.command, argv=[*argv, str(out)], log=log) == 0, Path(log).read_text()
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
