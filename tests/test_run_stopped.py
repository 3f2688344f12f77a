"""Runs that were stopped, by a signal or for good, go on to the very same result."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from programs import OFTEN, wait_for
from run_folders import SMALL, same, tensors

from bnn_pyro.inference import optimise
from bnn_pyro.run import main

LONG = ["--data", "breast-cancer", "--features", "mean radius,mean texture", "--batch-size", "64", "--no-baseline"]


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_that_goes_on_to_the_same_result(number, tmp_path, monkeypatch, capsys):
    command = ["train", *LONG, *SMALL, "--epochs", "6"]
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    stopped = tmp_path / "stopped"
    check, calls = optimise.check_finite, []

    def check_and_stop(*args):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(number)
        check(*args)

    with monkeypatch.context() as patch:
        patch.setattr(optimise, "check_finite", check_and_stop)
        assert main([*command, "--out", str(stopped)]) == 130
    told = capsys.readouterr().err
    assert f"train --resume --out {stopped}" in told and "Traceback" not in told
    assert (stopped / "checkpoint" / "training.pt").is_file() and not (stopped / "posterior.pt").exists()
    assert main(["train", "--resume", "--out", str(stopped), "--quiet"]) == 0
    assert same(stopped, tmp_path / "whole") and not (stopped / "checkpoint").exists()
    assert (stopped / "metrics.json").read_bytes() == (tmp_path / "whole" / "metrics.json").read_bytes()


@pytest.mark.usefixtures("no_figures")
def test_a_killed_run_resumes_to_the_same_weights(tmp_path):
    command = ["train", *LONG, *SMALL, "--epochs", "100"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen([sys.executable, "-c", OFTEN, *command, "--out", str(killed)])
    checkpoint = killed / "checkpoint" / "training.pt"
    wait_for(checkpoint, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    step = torch.load(checkpoint, weights_only=True)["state"]["step"]
    assert 0 < step < 100 * 7 and not (killed / "posterior.pt").exists()
    assert main(["train", "--resume", "--out", str(killed), "--quiet"]) == 0
    assert main([*command, "--out", str(whole)]) == 0
    assert same(killed, whole)


@pytest.mark.usefixtures("no_figures")
def test_resume_of_a_finished_run_changes_nothing_but_needs_the_same_settings(runs, capsys):
    before = tensors(runs / "houses")
    assert main(["train", "--resume", "--out", str(runs / "houses"), "--quiet"]) == 0
    after = tensors(runs / "houses")
    assert all(torch.equal(before[k], after[k]) for k in before)
    capsys.readouterr()
    assert main(["train", "--resume", "--out", str(runs / "houses"), "--epochs", "9"]) == 2
    assert "epochs 3, not 9" in capsys.readouterr().err
