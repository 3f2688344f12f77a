"""Sweeps from the command line: what is made and kept, what goes on after a kill, what is told of failures."""

import csv
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import own_networks
import pytest
from monte_carlo import stop_at
from run_folders import small_table
from torch import nn

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.files import lock_folder
from bnn_pyro.reports import read_texts
from bnn_pyro.run import main

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
def copied(made, tmp_path, monkeypatch, command):
    """(what runs another SPEC, a copy of the folder); reports have no figures, which take most time."""
    monkeypatch.setitem(read_texts("figures"), "scores", {})
    shutil.copytree(made[1], tmp_path / "out")
    spec = tmp_path / "s.toml"

    def write(*recipes, table=None, before="", splits=(0, 1), out=tmp_path / "out", more=(), code=0):
        data = DATA.format(table=table or made[0].with_name("houses.csv")).replace("[0, 1]", str([*splits]))
        spec.write_text(before + data + "".join(recipes))
        return command("sweep", spec, "--out", out, "--cores", 1, *more, code=code)

    return write, tmp_path / "out"


def sweep(spec, out):
    return main(["sweep", str(spec), "--out", str(out), "--cores", "1", "--quiet"])


def times(folder):
    return {p.name: p.stat().st_mtime_ns for p in folder.iterdir() if p.is_file()}


def scores(folder):
    return {path.parent.name: path.read_bytes() for path in sorted(folder.glob("*-split*/metrics.json"))}


def results(folder):
    return json.loads((folder / "sweep.json").read_text())


def test_a_fit_that_fails_is_told_and_the_others_are_made(made):
    _, out, code = made
    fits = results(out)["fits"]
    assert code == 1 and [(fit["name"], fit["status"]) for fit in fits[::2]] == [
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
    assert all("the loss became" in row["failure"] for row in rows[2::3])  # "error" is a metric
    assert float(rows[0]["rmse"]) == fits[0]["metrics"]["rmse"] and rows[0]["train_rows"] == "42"


def test_errors_over_seeds_include_the_test_rows_that_all_share(copied):
    write, out = copied
    write(MEAN_FIELD, MLP, before="seeds = [0, 1]\n", splits=[1])
    values, resampled = [], []
    for name in ("mean-field", "mlp"):
        runs = [out / f"{name}-houses-seed{seed}-split1" for seed in (0, 1)]
        values.append([json.loads((run / "metrics.json").read_text())["nll"] for run in runs])
        resampled.append([np.load(run / "test-replicates.npz")["nll"] for run in runs])
    of_seeds, of_rows = np.subtract(*values), np.subtract(*resampled).mean(0)
    (found,) = results(out)["summary"][0]["best"]["nll"]["differences"].values()
    assert found["error"] == pytest.approx(math.sqrt(of_seeds.var(ddof=1) / 2 + of_rows.var(ddof=1)))


def test_the_same_command_again_makes_only_what_is_missing(copied):
    write, out = copied
    first, second = (out / f"mean-field-houses-seed0-split{k}" for k in (0, 1))
    before, scored = (times(first), times(second)), scores(out)
    write(MEAN_FIELD)
    assert (times(first), times(second)) == before
    (second / "test-replicates.npz").unlink()  # as if it had been killed before it was scored
    write(MEAN_FIELD, before="seeds = [0, 1]\n")
    assert times(first) == before[0] and times(second)["posterior.pt"] == before[1]["posterior.pt"]
    assert scores(out).items() > scored.items() and len(scores(out)) == len(scored) + 2
    write(MEAN_FIELD.replace("num_draws = 5", "num_draws = 7"))  # scored again without training
    assert json.loads((first / "metrics.json").read_text())["num_draws"] == 7
    assert times(first)["posterior.pt"] == before[0]["posterior.pt"]


def test_other_settings_under_the_same_name_are_refused_or_replaced(copied):
    write, out = copied
    kept, before = out / "mlp-houses-seed0-split0", scores(out)
    untouched, other = times(kept), (MEAN_FIELD.replace("epochs = 4", "epochs = 5"), MLP)
    told = write(*other, code=2)
    assert scores(out) == before
    assert "split0 (and 1 more) was fitted with epochs 4, not 5" in told and "--overwrite" in told
    write(*other, more=["--overwrite"])
    assert times(kept) == untouched
    changed = [name for name, score in scores(out).items() if score != before[name]]
    assert changed == [f"mean-field-houses-seed0-split{k}" for k in (0, 1)]


def test_a_module_of_other_layers_is_refused_or_fitted_anew(copied, monkeypatch):
    write, out = copied
    own = MEAN_FIELD.replace("mean-field]", 'own]\nvariant = "my-network"')
    own = own.replace("hidden = [6]", 'module = "own_networks:net"')
    monkeypatch.setattr(own_networks, "net", lambda schema: nn.Linear(*schema.input_shape, 1), raising=False)
    write(own)
    monkeypatch.setattr(own_networks, "net", lambda schema: nn.Sequential(nn.Linear(*schema.input_shape, 1)))
    assert "own-houses-seed0-split0 (and 1 more) was fitted with other layers" in write(own, code=2)
    before = scores(out)
    write(own, more=["--overwrite"])
    write(own)
    changed = [name for name, score in scores(out).items() if score != before[name]]
    assert changed == [f"own-houses-seed0-split{k}" for k in (0, 1)]


def test_changed_data_are_noticed(copied, tmp_path):
    write, own = copied[0], {"table": small_table(tmp_path / "own.csv"), "out": tmp_path / "own"}
    write(MLP, **own)
    before = scores(own["out"])
    small_table(own["table"], rows=64)
    for recipes in ([MLP, MEAN_FIELD], [MLP]):  # also where all are finished
        assert "the rows of data 'houses' are not those" in write(*recipes, **own, code=2)
    gone = own["table"].rename(tmp_path / "gone.csv")  # what is finished may outlive its data
    write(MLP, **own)
    write(MLP, MEAN_FIELD, **own, code=2)
    gone.rename(own["table"])
    write(MLP, **own, splits=[0, 1, 2], code=2)  # the split that is loaded for the new fits has none finished
    write(MLP, MEAN_FIELD, **own, more=["--overwrite"])
    after = scores(own["out"])
    assert len(after) == 4 and all(after[name] != before[name] for name in before)
    for name in after:
        (own["out"] / name / "metrics.json").unlink()  # cut off, and the rows then changed
    small_table(own["table"], rows=68)
    write(MLP, **own, code=1)
    assert "other settings, seed or data" in results(own["out"])["fits"][0]["error"]


def test_a_signal_stops_with_the_command_that_goes_on_to_the_very_same_results(copied, tmp_path, monkeypatch):
    write, whole = copied
    out = tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "due", stop_at(18))  # in the second fit
        told = write(MLP, MEAN_FIELD, out=out, code=130)
    assert "finished fits are kept, the same command goes on: " in told and "Traceback" not in told
    states = [fit["status"] for fit in results(out)["fits"]]
    assert states[0] == "finished" and "begun" in states and states[-1] == "missing"
    write(MLP, MEAN_FIELD, out=out)
    assert len(scores(out)) == 4 and scores(out) == scores(whole)


def test_folders_in_use_are_refused(made, tmp_path, capsys):
    spec, out, _ = made
    (mine := tmp_path / "mine").mkdir()
    (mine / "thesis.tex").write_text("mine")
    assert sweep(spec, mine) == 2 and "exists and is not a sweep" in capsys.readouterr().err
    assert [p.name for p in mine.iterdir()] == ["thesis.tex"]
    with lock_folder(out), ThreadPoolExecutor(1) as thread:
        assert thread.submit(sweep, spec, out).result() == 2
    assert "is being written to by another thread" in capsys.readouterr().err
