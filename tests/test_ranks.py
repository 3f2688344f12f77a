"""One fit in several processes: the fit of all rows that one process makes, or a clear error on every one of them."""

import re
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
from bnn_pyro.run import main


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two ranks found, [rank 0's, rank 1's], and the folder that they shared."""
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()
    with ranked.stopping(ranked.STOPPED, by=0), pytest.raises(KeyboardInterrupt):
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
        assert rank["drifted"]["kind"] == "Agreed"
        assert re.search(r"drifted apart \(after step 8 .*by up to .*e-0", rank["drifted"]["told"])
    for name, words in (
        ("seeds", r"processes 0 and 1 of this fit were given other things \(seed\)"),
        ("rows", r"processes 0 and 1 of this fit were given other things \(training rows\)"),
        ("method", r"nuts does not divide one fit among processes, as svi, .* do; start it without torchrun"),
        ("settings of a checkpoint", r"training\.pt was made with other settings"),
    ):
        for rank in results[0]:
            kind, told = rank["complaints"][name]
            assert kind == "Agreed" and re.search(words, told)


def test_every_process_has_the_data_set_or_the_error(results):
    data = bp.load_data(results[1] / "rows.npz")
    assert all(rank["loading"]["all"]["data"].fingerprint == data.fingerprint for rank in results[0])
    for error, case in enumerate(("first fails", "second fails")):
        both = [rank["loading"][case] for rank in results[0]]
        assert [result["error"] for result in both] == [("Agreed", f"rank {error} has no such file")] * 2
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
