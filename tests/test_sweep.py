"""Sweeps from the command line: what is made and kept, what goes on after a kill, what is told of failures."""

import csv
import json
import math
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from run_folders import same, small_table

from bnn_pyro.files import lock_folder
from bnn_pyro.inference import optimise
from bnn_pyro.run import main
from bnn_pyro.runs.train import typed_command

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
MLP = MEAN_FIELD.replace("mean-field", "mlp")
DIVERGING = MLP.replace("recipes.mlp]", 'recipes.diverging]\nvariant = "mlp"').replace("= 4", "= 4, lr = 1e20")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the SPEC, its folder, the exit code): three recipes, one of them diverging, on two splits."""
    folder = tmp_path_factory.mktemp("made")
    spec = folder / "s.toml"
    spec.write_text(DATA.format(table=small_table(folder / "houses.csv")) + MEAN_FIELD + MLP + DIVERGING)
    return spec, folder / "out", sweep(spec, folder / "out")


@pytest.fixture
def copied(made, tmp_path, monkeypatch):
    """(what writes another SPEC, that SPEC, a copy of the folder); reports have no figures, which take most time."""
    monkeypatch.setattr("bnn_pyro.runs.sweep_report.LABELS", {})
    shutil.copytree(made[1], tmp_path / "out")
    spec = tmp_path / "s.toml"

    def write(*recipes, table=made[0].with_name("houses.csv"), before=""):
        spec.write_text(before + DATA.format(table=table) + "".join(recipes))

    return write, spec, tmp_path / "out"


def sweep(spec, out, *more):
    return main(["sweep", str(spec), "--out", str(out), "--cores", "1", "--quiet", *more])


def times(folder):
    return {p.name: p.stat().st_mtime_ns for p in folder.iterdir() if p.is_file()}


def scores(folder):
    return {path.parent.name: path.read_bytes() for path in sorted(folder.glob("*-split*/metrics.json"))}


def results(folder):
    return json.loads((folder / "sweep.json").read_text())


def test_a_fit_that_fails_is_told_and_the_others_are_made(made):
    _, out, code = made
    assert code == 1
    fits = results(out)["fits"]
    assert [(fit["name"], fit["status"]) for fit in fits[::2]] == [
        ("mean-field-houses-seed0-split0", "finished"),
        ("diverging-houses-seed0-split0", "failed"),
        ("mlp-houses-seed0-split1", "finished"),
    ]
    assert all("the loss became" in fit["error"] for fit in fits[2::3])
    page = (out / "sweep.html").read_text()
    assert "Fits that failed" in page and "the loss became" in page and "4 of 6 fits · 2 failed" in page
    assert (out / "figures" / "sweep-rmse.png").read_bytes()[:4] == b"\x89PNG"
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == [fit["status"] for fit in fits]
    assert float(rows[0]["rmse"]) == fits[0]["metrics"]["rmse"] and rows[0]["train_rows"] == "42"


def test_errors_over_seeds_include_the_test_rows_that_all_share(copied):
    write, spec, out = copied
    write(MEAN_FIELD, MLP, before="seeds = [0, 1]\n")
    spec.write_text(spec.read_text().replace("splits = [0, 1]", "splits = [1]"))
    assert sweep(spec, out) == 0
    values, resampled = [], []
    for name in ("mean-field", "mlp"):
        runs = [out / f"{name}-houses-seed{seed}-split1" for seed in (0, 1)]
        values.append([json.loads((run / "metrics.json").read_text())["nll"] for run in runs])
        resampled.append([np.load(run / "test-replicates.npz")["nll"] for run in runs])
    of_seeds, of_rows = np.subtract(*values), np.subtract(*resampled).mean(0)
    (on,) = results(out)["summary"]
    (found,) = on["best"]["nll"]["differences"].values()
    assert found["error"] == pytest.approx(math.sqrt(of_seeds.var(ddof=1) / 2 + of_rows.var(ddof=1)))
    assert "the finite number of test rows" in (out / "sweep.html").read_text()


@pytest.mark.usefixtures("no_figures")
def test_every_fit_is_a_run_that_other_commands_take_and_train_makes(made, copied, tmp_path):
    _, _, out = copied
    first, second = (out / f"mean-field-houses-seed0-split{k}" for k in (0, 1))
    assert not (first / "report.html").exists()
    # What the user typed, not what a worker was started with.
    assert json.loads((first / "environment.json").read_text())["command"] == typed_command()
    assert main(["evaluate", str(first), "--quiet"]) == 0
    assert (first / "report.html").exists()
    table = made[0].with_name("houses.csv")
    assert main(["predict", str(second), "--input", str(table), "--output", str(second / "p.csv"), "--quiet"]) == 0
    again = tmp_path / "again"
    assert main(["train", "--config", str(second / "config.json"), "--out", str(again), "--quiet"]) == 0
    assert same(second, again) and (second / "metrics.json").read_bytes() == (again / "metrics.json").read_bytes()


def test_the_same_command_again_makes_only_what_is_missing(copied, capsys):
    write, spec, out = copied
    write(MEAN_FIELD)
    first, second = (out / f"mean-field-houses-seed0-split{k}" for k in (0, 1))
    before, scored = (times(first), times(second)), scores(out)
    assert sweep(spec, out) == 0
    assert (times(first), times(second)) == before
    (second / "test-replicates.npz").unlink()  # as if it had been killed before it was scored
    write(MEAN_FIELD, before="seeds = [0, 1]\n")
    capsys.readouterr()
    assert main(["sweep", str(spec), "--out", str(out), "--dry-run", "--quiet"]) == 0
    told = capsys.readouterr().out
    assert "4 fits" in told and "1 finished" in told and "1 begun" in told and "2 missing" in told
    assert sweep(spec, out) == 0
    assert times(first) == before[0]
    assert times(second)["posterior.pt"] == before[1]["posterior.pt"]
    assert scores(out).items() > scored.items() and len(scores(out)) == len(scored) + 2
    write(MEAN_FIELD.replace("num_draws = 5", "num_draws = 7"))  # scored again without training
    assert sweep(spec, out) == 0 and json.loads((first / "metrics.json").read_text())["num_draws"] == 7
    assert times(first)["posterior.pt"] == before[0]["posterior.pt"]


def test_other_settings_under_the_same_name_are_refused_or_replaced(copied, capsys):
    write, spec, out = copied
    kept, before = out / "mlp-houses-seed0-split0", scores(out)
    untouched = times(kept)
    write(MEAN_FIELD.replace("epochs = 4", "epochs = 5"), MLP)
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


def test_changed_data_are_noticed(made, copied, tmp_path, capsys):
    write, spec, _ = copied
    own, out = tmp_path / "own.csv", tmp_path / "own"
    own.write_bytes(made[0].with_name("houses.csv").read_bytes())
    write(MLP, table=own)
    assert sweep(spec, out) == 0
    before = scores(out)
    small_table(own, rows=64)
    write(MLP, MEAN_FIELD, table=own)
    assert sweep(spec, out) == 2
    assert "the rows of data 'houses' are not those" in capsys.readouterr().err
    assert sweep(spec, out, "--overwrite") == 0
    after = scores(out)
    assert len(after) == 4 and all(after[name] != before[name] for name in before)
    for name in after:
        (out / name / "metrics.json").unlink()  # cut off, and the rows then changed
    small_table(own, rows=68)
    assert sweep(spec, out) == 1 and "other settings, seed or data" in results(out)["fits"][0]["error"]
    assert sweep(spec, out, "--overwrite") == 0 and len(scores(out)) == 4


def test_processes_make_the_same_fits_as_this_one(copied, tmp_path):
    write, spec, here = copied
    write(MEAN_FIELD)
    assert main(["sweep", str(spec), "--out", str(tmp_path / "two"), "--executor", "processes:2", "--quiet"]) == 0
    assert len(scores(tmp_path / "two")) == 2 and scores(tmp_path / "two").items() < scores(here).items()
    assert all(same(here / name, tmp_path / "two" / name) for name in scores(tmp_path / "two"))


def test_a_signal_stops_with_the_command_that_goes_on_to_the_very_same_results(copied, tmp_path, monkeypatch, capsys):
    write, spec, whole = copied
    out = tmp_path / "new"
    write(MLP, MEAN_FIELD)
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
    assert (out / "mean-field-houses-seed0-split0" / "checkpoint" / "training.pt").is_file()
    assert sweep(spec, out) == 0 and len(scores(out)) == 4 and scores(out) == scores(whole)


def test_two_sweeps_cannot_write_to_one_folder(made, capsys):
    spec, out, _ = made
    with lock_folder(out), ThreadPoolExecutor(1) as thread:
        assert thread.submit(sweep, spec, out).result() == 2
    assert "is being written to by another thread" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--executor", "dsk:3"), "unknown executor 'dsk:3'"),
        (("--cores", "-1"), "cores must be a number of processes"),
        (("--dryrun",), "did you mean '--dry-run'?"),
        ((), "exists and is not a sweep"),
    ],
)
def test_options_and_folder_are_checked(more, said, made, tmp_path, capsys):
    out = tmp_path / "out"
    if not more:
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
    assert main(["sweep", str(made[0]), "--out", str(out), "--quiet", *more]) == 2
    assert said in capsys.readouterr().err
    assert more or [p.name for p in out.iterdir()] == ["thesis.tex"]
