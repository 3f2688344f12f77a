"""Sweeps from the command line: what is made and kept, what goes on after a kill, what is told of failures."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from run_folders import same, small_table

from bnn_pyro.errors import UserError
from bnn_pyro.run import main
from bnn_pyro.runs.environment import typed_command
from bnn_pyro.runs.sweep import failure_text
from bnn_pyro.runs.sweep_report import sweep_text

DATA = """
splits = [0, 1]
[data.houses]
name = "{table}"
target = "price"
"""
MEAN_FIELD = """
[recipes.mean-field]
variant_settings = { hidden = [6] }
inference_settings = { epochs = 4, batch_size = 16 }
num_draws = 5
device = "cpu"
"""
MLP = """
[recipes.mlp]
variant = "mlp"
variant_settings = { hidden = [6] }
inference_settings = { epochs = 4, batch_size = 16 }
device = "cpu"
"""
DIVERGING = MLP.replace("recipes.mlp", "recipes.diverging").replace("epochs = 4", "epochs = 4, lr = 1e20")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return small_table(tmp_path_factory.mktemp("table") / "houses.csv")


@pytest.fixture(scope="module")
def made(tmp_path_factory, table):
    """(the SPEC, its folder, the exit code): two recipes, one of them diverging, on two splits."""
    folder = tmp_path_factory.mktemp("made")
    spec = folder / "s.toml"
    spec.write_text(DATA.format(table=table) + MEAN_FIELD + DIVERGING)
    return spec, folder / "out", sweep(spec, folder / "out")


def sweep(spec, out, *more):
    return main(["sweep", str(spec), "--out", str(out), "--cores", "1", "--quiet", *more])


def times(folder):
    return {p.name: p.stat().st_mtime_ns for p in folder.iterdir() if p.is_file()}


def scores(folder):
    return {path.parent.name: path.read_bytes() for path in sorted(folder.glob("*-split*/metrics.json"))}


def results(folder):
    return json.loads((folder / "sweep.json").read_text())


def test_a_fit_that_fails_is_told_and_the_others_are_made(made, capsys):
    _, out, code = made
    assert code == 1
    fits = results(out)["fits"]
    assert [(fit["name"], fit["status"]) for fit in fits] == [
        ("mean-field-houses-seed0-split0", "finished"),
        ("diverging-houses-seed0-split0", "failed"),
        ("mean-field-houses-seed0-split1", "finished"),
        ("diverging-houses-seed0-split1", "failed"),
    ]
    assert all("the loss became" in fit["error"] for fit in fits[1::2])
    page = (out / "sweep.html").read_text()
    assert "Fits that failed" in page and "the loss became" in page and "2 of 4 fits · 2 failed" in page
    assert (out / "figures" / "sweep-rmse.png").read_bytes()[:4] == b"\x89PNG"
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == [fit["status"] for fit in fits]
    assert float(rows[0]["rmse"]) == fits[0]["metrics"]["rmse"] and rows[0]["train_rows"] == "42"


def test_the_summary_is_that_of_the_metrics(made):
    _, out, _ = made
    found = results(out)
    (on,) = found["summary"]
    values = [fit["metrics"]["nll"] for fit in found["fits"] if fit["status"] == "finished"]
    told = on["recipes"]["mean-field"]["metrics"]["nll"]
    half = abs(values[0] - values[1]) / 2  # sd/√2 of two values
    assert told["value"] == pytest.approx(sum(values) / 2)
    assert told["error"] == pytest.approx(half * (1 + 2 * 9 / 42) ** 0.5)  # 9 test rows, 42 to train on


def test_errors_over_seeds_include_the_test_rows_that_all_share(table, tmp_path):
    spec, out = tmp_path / "s.toml", tmp_path / "out"
    spec.write_text("seeds = [0, 1]\n" + DATA.format(table=table).replace("[0, 1]", "[3]") + MEAN_FIELD + MLP)
    assert sweep(spec, out) == 0
    values, resampled = [], []
    for name in ("mean-field", "mlp"):
        runs = [out / f"{name}-houses-seed{seed}-split3" for seed in (0, 1)]
        values.append([json.loads((run / "metrics.json").read_text())["nll"] for run in runs])
        resampled.append([np.load(run / "test-replicates.npz")["nll"] for run in runs])
    of_seeds, of_rows = np.subtract(*values), np.subtract(*resampled).mean(0)
    (on,) = results(out)["summary"]
    (found,) = on["best"]["nll"]["differences"].values()
    assert found["error"] == pytest.approx(math.sqrt(of_seeds.var(ddof=1) / 2 + of_rows.var(ddof=1)))
    assert "the finite number of test rows" in (out / "sweep.html").read_text()


@pytest.mark.usefixtures("no_figures")
def test_every_fit_is_a_run_that_other_commands_take(made, table):
    _, out, _ = made
    first, second = (out / f"mean-field-houses-seed0-split{k}" for k in (0, 1))
    assert not (first / "report.html").exists()
    # What the user typed, not what a worker was started with.
    assert json.loads((first / "environment.json").read_text())["command"] == typed_command()
    assert main(["evaluate", str(first), "--quiet"]) == 0
    assert (first / "report.html").exists()
    assert main(["predict", str(second), "--input", str(table), "--output", str(second / "p.csv"), "--quiet"]) == 0


def test_a_fit_is_what_train_makes_of_its_recipe(made, tmp_path, monkeypatch):
    monkeypatch.setattr("bnn_pyro.runs.evaluate.draw_all", lambda scene, folder: [])
    _, out, _ = made
    run = out / "mean-field-houses-seed0-split1"
    assert main(["train", "--config", str(run / "config.json"), "--out", str(tmp_path / "again"), "--quiet"]) == 0
    assert same(run, tmp_path / "again")
    assert json.loads((run / "metrics.json").read_text()) == json.loads((tmp_path / "again/metrics.json").read_text())


def test_the_same_command_again_makes_only_what_is_missing(table, tmp_path, capsys):
    spec, out = tmp_path / "s.toml", tmp_path / "out"
    spec.write_text(DATA.format(table=table) + MEAN_FIELD)
    assert sweep(spec, out) == 0
    first, second = (out / f"mean-field-houses-seed0-split{k}" for k in (0, 1))
    before, scored = (times(first), times(second)), scores(out)
    assert sweep(spec, out) == 0
    assert (times(first), times(second)) == before
    (second / "metrics.json").unlink()  # as if it had been killed before it was scored
    spec.write_text("seeds = [0, 1]\n" + DATA.format(table=table) + MEAN_FIELD + MLP)
    capsys.readouterr()
    assert main(["sweep", str(spec), "--out", str(out), "--dry-run", "--quiet"]) == 0
    told = capsys.readouterr().out
    assert "8 fits" in told and "1 finished" in told and "1 begun" in told and "6 missing" in told
    assert sweep(spec, out) == 0
    assert times(first) == before[0]
    assert times(second)["posterior.pt"] == before[1]["posterior.pt"]
    assert scores(out).items() > scored.items() and len(scores(out)) == 8


def test_other_settings_under_the_same_name_are_refused_or_replaced(table, tmp_path, capsys):
    spec, out = tmp_path / "s.toml", tmp_path / "out"
    spec.write_text(DATA.format(table=table) + MEAN_FIELD + MLP)
    assert sweep(spec, out) == 0
    kept, before = out / "mlp-houses-seed0-split0", scores(out)
    untouched = times(kept)
    spec.write_text(DATA.format(table=table) + MEAN_FIELD.replace("epochs = 4", "epochs = 5") + MLP)
    capsys.readouterr()
    assert sweep(spec, out) == 2
    told = capsys.readouterr().err
    assert (
        "mean-field-houses-seed0-split0 (and 1 more) was fitted with epochs 4, not 5" in told and "--overwrite" in told
    )
    assert scores(out) == before
    assert sweep(spec, out, "--overwrite") == 0
    after = scores(out)
    assert times(kept) == untouched
    assert [name for name in before if after[name] != before[name]] == [
        "mean-field-houses-seed0-split0", "mean-field-houses-seed0-split1"
    ]  # fmt: skip


def test_other_numbers_of_draws_are_scored_again_without_training(table, tmp_path):
    spec, out = tmp_path / "s.toml", tmp_path / "out"
    spec.write_text(DATA.format(table=table) + MEAN_FIELD)
    assert sweep(spec, out) == 0
    run = out / "mean-field-houses-seed0-split0"
    before, scored = times(run), scores(out)
    spec.write_text(DATA.format(table=table) + MEAN_FIELD.replace("num_draws = 5", "num_draws = 7"))
    assert sweep(spec, out) == 0
    assert times(run)["posterior.pt"] == before["posterior.pt"] and scores(out) != scored
    assert json.loads((run / "metrics.json").read_text())["num_draws"] == 7


def test_changed_data_are_noticed(table, tmp_path, capsys):
    own = tmp_path / "own.csv"
    own.write_bytes(table.read_bytes())
    spec, out = tmp_path / "s.toml", tmp_path / "out"
    spec.write_text(DATA.format(table=own) + MEAN_FIELD)
    assert sweep(spec, out) == 0
    before = scores(out)
    small_table(own, rows=64)
    spec.write_text(DATA.format(table=own) + MEAN_FIELD + MLP)
    capsys.readouterr()
    assert sweep(spec, out) == 2
    assert "the rows of data 'houses' are not those" in capsys.readouterr().err
    assert sweep(spec, out, "--overwrite") == 0
    after = scores(out)
    assert len(after) == 4 and all(after[name] != before[name] for name in before)


def test_a_failed_fit_can_be_mended_in_the_spec(made, table, tmp_path):
    spec, out = tmp_path / "s.toml", tmp_path / "out"
    spec.write_text(DATA.format(table=table) + DIVERGING)
    assert sweep(spec, out) == 1
    assert "No fit is finished" in (out / "sweep.html").read_text()
    assert sweep(spec, out) == 1, "it is tried again"
    spec.write_text(DATA.format(table=table) + DIVERGING.replace("1e20", "0.01"))
    assert sweep(spec, out) == 0


def test_processes_make_the_same_fits_as_this_one(table, tmp_path):
    spec = tmp_path / "s.toml"
    spec.write_text(DATA.format(table=table) + MEAN_FIELD + MLP)
    assert main(["sweep", str(spec), "--out", str(tmp_path / "here"), "--executor", "here", "--quiet"]) == 0
    assert main(["sweep", str(spec), "--out", str(tmp_path / "two"), "--executor", "processes:2", "--quiet"]) == 0
    assert scores(tmp_path / "here") == scores(tmp_path / "two") and len(scores(tmp_path / "two")) == 4
    for name in scores(tmp_path / "two"):
        assert same(tmp_path / "here" / name, tmp_path / "two" / name)


def test_fits_that_failed_alike_are_one_line():
    error = UserError("task 2 of 4 (mlp-houses-seed0-split0): its process died")
    assert failure_text(SimpleNamespace(name="mlp-houses-seed0-split0"), error) == "its process died"
    fits = [{"name": f"a-{k}", "recipe": "a", "data": "d", "status": "failed", "error": "it died"} for k in range(3)]
    assert sweep_text({"fits": fits}, []) == "\nfailed: a on d, 3 fits: it died"


OFTEN = (
    "import sys, torch; torch.set_num_threads(1)\n"
    "from bnn_pyro.checkpoint import Checkpoint; Checkpoint.__init__.__defaults__ = (None, 0.0)\n"
    "from bnn_pyro.run import main; sys.exit(main(sys.argv[1:]))"
)


def test_a_killed_sweep_goes_on_to_the_very_same_results(table, tmp_path):
    spec, killed, whole = tmp_path / "s.toml", tmp_path / "killed", tmp_path / "whole"
    text = DATA.format(table=table) + MLP + MEAN_FIELD.replace("epochs = 4", "epochs = 100")
    spec.write_text(text)
    command = [sys.executable, "-c", OFTEN, "sweep", str(spec), "--out", str(killed), "--cores", "1", "--quiet"]
    process = subprocess.Popen(command)
    checkpoint = killed / "mean-field-houses-seed0-split0" / "checkpoint" / "training.pt"
    limit = time.monotonic() + 60
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = killed / "mlp-houses-seed0-split0"
    assert checkpoint.is_file() and not (checkpoint.parents[1] / "posterior.pt").exists()
    before = times(finished)
    assert sweep(spec, killed) == 0 and sweep(spec, whole) == 0
    assert times(finished) == before
    assert scores(killed) == scores(whole) and len(scores(whole)) == 4
    for name in scores(whole):
        assert same(killed / name, whole / name)


def test_a_signal_stops_with_the_command_that_goes_on(table, tmp_path, monkeypatch, capsys):
    from bnn_pyro.inference import optimise

    spec, out = tmp_path / "s.toml", tmp_path / "out"
    spec.write_text(DATA.format(table=table) + MLP + MEAN_FIELD)
    check, calls = optimise.check_finite, []

    def check_and_stop(*args):
        calls.append(1)
        if len(calls) == 7:  # in the second fit
            signal.raise_signal(signal.SIGINT)
        check(*args)

    with monkeypatch.context() as patch:
        patch.setattr(optimise, "check_finite", check_and_stop)
        assert sweep(spec, out) == 130
    told = capsys.readouterr().err
    assert "finished fits are kept, the same command goes on: " in told and "Traceback" not in told
    states = [fit["status"] for fit in results(out)["fits"]]
    assert states[0] == "finished" and "begun" in states and states[-1] == "missing"
    assert sweep(spec, out) == 0


def test_two_sweeps_cannot_write_to_one_folder(made, capsys):
    spec, out, _ = made
    code = (
        f"import sys; from bnn_pyro.files import lock_folder; lock = lock_folder({str(out)!r}); "
        "lock.__enter__(); print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert sweep(spec, out) == 2
        assert "is being written to by process" in capsys.readouterr().err
        other.communicate(b"")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--executor", "dsk:3"), "unknown executor 'dsk:3'"),
        (("--cores", "-1"), "cores must be a number of processes"),
        (("--dryrun",), "did you mean '--dry-run'?"),
    ],
)
def test_options_are_checked(more, said, table, tmp_path, capsys):
    spec = tmp_path / "s.toml"
    spec.write_text(DATA.format(table=table) + MLP)
    assert main(["sweep", str(spec), "--out", str(tmp_path / "out"), "--quiet", *more]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_of_something_else_is_not_touched(table, tmp_path, capsys):
    spec = tmp_path / "s.toml"
    spec.write_text(DATA.format(table=table) + MLP)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    assert sweep(spec, tmp_path / "out") == 2
    assert "exists and is not a sweep" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.tex"]
