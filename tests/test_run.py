"""Every command end to end on small data, what bad input gets, and runs that were stopped."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import bnn_pyro as bp
from bnn_pyro.inference import optimise
from bnn_pyro.metrics import METRICS
from bnn_pyro.posterior import read_archive
from bnn_pyro.run import main, parse

SMALL = ["--hidden", "8", "--epochs", "3", "--num-draws", "5", "--device", "cpu", "--quiet"]


def small_table(path: Path, rows: int = 60, shift: float = 0.0) -> Path:
    rng = np.random.default_rng(0)
    area = rng.uniform(20, 200, rows).round(1)
    town = rng.choice(["north", "south"], rows)
    price = (3 * area + 40 * (town == "north") + rng.normal(0, 5, rows) + shift).round(2)
    pd.DataFrame({"area": area, "town": town, "price": price}).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two small runs: digits with its baseline, and a table of houses."""
    folder = tmp_path_factory.mktemp("runs")
    table = small_table(folder / "houses.csv")
    assert main(["train", "--data", "digits", "--limit", "150", "--out", str(folder / "digits"), *SMALL]) == 0
    assert main(["train", "--data", str(table), "--target", "price", "--out", str(folder / "houses"), *SMALL]) == 0
    return folder


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing takes most of the time of a small run."""
    monkeypatch.setattr("bnn_pyro.evaluation.draw_all", lambda scene, folder: [])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    guide, chains = (read_archive(folder)[0][key] for key in ("guide", "chains"))
    return guide if guide is not None else chains


def same(a: Path, b: Path) -> bool:
    a, b = tensors(a), tensors(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


# -- what a run folder holds -------------------------------------------------------------------------------------------
def test_train_writes_the_whole_folder(runs):
    folder = runs / "digits"
    names = {p.name for p in folder.iterdir()}
    expected = {"config.json", "metrics.json", "history.csv", "environment.json", "posterior.pt", "posterior.json"}
    assert expected | {"report.html", "README.md", "figures", "baseline"} <= names
    assert "checkpoint" not in names and not list(folder.rglob("*.part"))
    found = json.loads((folder / "metrics.json").read_text())
    for name in set(METRICS["classification"]) - {"auroc"}:
        assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"], name
        assert f"{name}_minus_baseline_low" in found
    history = pd.read_csv(folder / "history.csv")
    assert list(history) == ["epoch", "elbo", "log_likelihood", "kl"] and len(history) == 3
    assert list((folder / "figures").glob("*.png"))


def test_metrics_are_those_of_the_saved_posterior(runs):
    posterior, data = bp.load(runs / "digits"), bp.load_data("digits", limit=150)
    prediction = bp.predict(posterior, data.x_test, num_draws=5)
    baseline = bp.predict(bp.load(runs / "digits" / "baseline"), data.x_test, num_draws=5)
    found = json.loads((runs / "digits" / "metrics.json").read_text())
    assert found["nll"] == pytest.approx(bp.metrics.nll(prediction, data.y_test), abs=1e-6)
    difference = bp.metrics.nll(prediction, data.y_test) - bp.metrics.nll(baseline, data.y_test)
    assert found["nll_minus_baseline"] == pytest.approx(difference, abs=1e-6)


def test_baseline_is_a_run_of_the_same_architecture_and_schedule(runs):
    config = json.loads((runs / "digits" / "baseline" / "config.json").read_text())
    assert (config["variant"], config["inference"]) == ("mlp", "map")
    assert config["variant_settings"]["hidden"] == [8] and config["inference_settings"]["epochs"] == 3


@pytest.mark.usefixtures("no_figures")
def test_config_reproduces_bit_for_bit(runs, tmp_path):
    for name in ("digits", "houses"):
        again = tmp_path / name
        assert main(["train", "--config", str(runs / name / "config.json"), "--out", str(again), "--quiet"]) == 0
        assert same(runs / name, again) and same(runs / name / "baseline", again / "baseline")
        assert (again / "metrics.json").read_bytes() == (runs / name / "metrics.json").read_bytes()
        assert (again / "config.json").read_bytes() == (runs / name / "config.json").read_bytes()


@pytest.mark.usefixtures("no_figures")
def test_default_name_is_numbered_where_it_is_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for out in ("mean-field-toy-curve-3", "mean-field-toy-curve-3-2"):
        assert main(["train", "--data", "toy-curve", "--seed", "3", "--no-baseline", *SMALL]) == 0
        assert f"runs/{out}/report.html" in capsys.readouterr().out
    assert same(tmp_path / "runs/mean-field-toy-curve-3", tmp_path / "runs/mean-field-toy-curve-3-2")


def test_overwrite_replaces_the_run_and_nothing_else(tmp_path):
    out = tmp_path / "run"
    command = ["train", "--data", "toy-curve", "--out", str(out), *SMALL]
    assert main(command) == 0
    (out / "notes.txt").write_text("mine")
    (out / "figures" / "mine.txt").write_text("mine")
    assert main([*command, "--seed", "1", "--no-baseline", "--overwrite"]) == 0
    assert (out / "notes.txt").read_text() == (out / "figures" / "mine.txt").read_text() == "mine"
    assert json.loads((out / "config.json").read_text())["seed"] == 1
    assert not (out / "baseline").exists() and "mlp (map)" not in (out / "report.html").read_text()


# -- settings ----------------------------------------------------------------------------------------------------------
def test_flags_go_before_config_and_config_before_tuned(tmp_path, monkeypatch):
    from bnn_pyro.recipe import read_config, resolve
    from bnn_pyro.zoo import Fit

    best = {"toy-curve": {"svi": Fit({"hidden": (7,), "activation": "tanh"}, {"epochs": 11, "lr": 0.5})}}
    monkeypatch.setattr(bp.MeanField, "fits", best)
    (tmp_path / "c.toml").write_text('data = {name = "toy-curve"}\nseed = 4\n[inference_settings]\nepochs = 22\n')
    args = parse(["train", "--set", "epochs=33", "--set", "prior=normal:0.1", "--set", "temperature=0.5", "--no-bias"])
    flagless = resolve(parse(["train"]), read_config(tmp_path / "c.toml"))
    flagged = resolve(args, read_config(tmp_path / "c.toml"))
    assert (flagless.inference_settings["epochs"], flagged.inference_settings["epochs"]) == (22, 33)
    assert flagged.inference_settings["lr"] == 0.5 and flagged.seed == 4
    assert flagged.variant_settings["hidden"] == [7] and flagged.variant_settings["prior"] == "normal:0.1"
    assert flagged.variant_settings["bias"] is False and flagged.inference_settings["temperature"] == 0.5


def test_named_options_are_settings():
    settings = {f.name for kind in (bp.MeanField, bp.SVI) for f in fields(kind)}
    assert {"hidden", "activation", "prior", "noise", "bias", "epochs", "batch_size", "lr"} <= settings


@pytest.mark.usefixtures("no_figures")
def test_temperature_is_named_in_every_report(tmp_path, capsys):
    out = tmp_path / "cold"
    assert main(["train", "--data", "toy-curve", "--set", "temperature=0.1", "--out", str(out), *SMALL]) == 0
    assert "temperature 0.1" in capsys.readouterr().out
    assert "Temperature 0.1" in (out / "report.html").read_text()
    assert "temperature 0.1" in (out / "README.md").read_text()


# -- the other commands ------------------------------------------------------------------------------------------------
def test_list(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for table in (bp.ZOO, bp.METHODS, bp.DATASETS) for name in table)
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["variants"]) == list(bp.ZOO)
    assert {name: tuple(v["methods"]) for name, v in found["variants"].items()} == {
        name: kind.methods for name, kind in bp.ZOO.items()
    }


def test_evaluate_with_inputs_from_elsewhere(runs, capsys):
    command = ["evaluate", str(runs / "digits"), "--ood", "noise", "--limit", "50", "--quiet"]
    before = json.loads((runs / "digits" / "metrics.json").read_text())
    assert main(command) == 0
    found = json.loads((runs / "digits" / "metrics.json").read_text())
    assert all(found[k] == before[k] for k in before if not k.startswith("ood_"))
    for name in ("uniform-noise", "gaussian-noise"):
        for score in ("total_entropy", "max_prob", "mutual_information"):
            key = f"ood_{name}_{score}"
            assert 0 <= found[f"{key}_low"] <= found[key] <= found[f"{key}_high"] <= 1
    assert "uniform-noise" in capsys.readouterr().out
    assert "gaussian-noise" in (runs / "digits" / "report.html").read_text()


@pytest.mark.usefixtures("no_figures")
def test_evaluate_on_other_data(runs, tmp_path, capsys):
    other = small_table(tmp_path / "other.csv", rows=40, shift=1000)
    before = (runs / "houses" / "metrics.json").read_bytes()
    assert main(["evaluate", str(runs / "houses"), "--data", str(other), "--quiet"]) == 0
    found = json.loads((runs / "houses" / "metrics-other.json").read_text())
    assert found["rmse"] > 700 and "40 rows" in capsys.readouterr().out
    assert (runs / "houses" / "metrics.json").read_bytes() == before


def test_predict_regression(runs, tmp_path):
    new = tmp_path / "new.csv"
    pd.DataFrame({"town": ["south", "north"], "extra": [1, 2], "area": [50, 150]}).to_csv(new, index=False)
    output = tmp_path / "predictions.csv"
    command = [
        "predict",
        str(runs / "houses"),
        "--input",
        str(new),
        "--output",
        str(output),
        "--num-draws",
        "50",
        "--quiet",
    ]
    assert main(command) == 0
    found = pd.read_csv(output)
    assert list(found) == ["mean", "sd", "epistemic_sd", "aleatoric_sd", "q2.5", "q50", "q97.5"] and len(found) == 2
    assert np.allclose(found["sd"] ** 2, found["epistemic_sd"] ** 2 + found["aleatoric_sd"] ** 2, rtol=1e-4)
    assert (found["q2.5"] < found["q50"]).all() and (found["q50"] < found["q97.5"]).all()
    posterior = bp.load(runs / "houses")
    x = posterior.schema.standardise(torch.tensor([[50.0, 0.0, 1.0], [150.0, 1.0, 0.0]]))
    assert np.allclose(found["mean"], bp.predict(posterior, x, num_draws=50).mean, rtol=1e-5)
    written = output.read_bytes()
    assert main(command) == 2 and output.read_bytes() == written
    assert main([*command, "--overwrite"]) == 0


def test_predict_images(runs, tmp_path):
    data = bp.load_data("digits", limit=150)
    raw = data.schema.unstandardise(data.x_test[:3])
    np.savez(tmp_path / "x.npz", x=raw.numpy())
    Image.fromarray((raw[0, 0].numpy() * 255).round().astype(np.uint8)).save(tmp_path / "one.png")
    for name in ("x.npz", "one.png"):
        output = tmp_path / f"{name}.csv"
        arguments = ["--input", str(tmp_path / name), "--output", str(output), "--num-draws", "5", "--quiet"]
        assert main(["predict", str(runs / "digits"), *arguments]) == 0
    found, one = pd.read_csv(tmp_path / "x.npz.csv"), pd.read_csv(tmp_path / "one.png.csv")
    assert list(found) == ["digit", *(f"p({k})" for k in range(10)), "total_nats", "epistemic_nats", "aleatoric_nats"]
    prediction = bp.predict(bp.load(runs / "digits"), data.x_test[:3], num_draws=5)
    assert found["digit"].tolist() == prediction.mean.argmax(1).tolist()
    assert np.allclose(found["total_nats"], prediction.total, atol=1e-5)
    assert np.allclose(one.iloc[0, 1:11].astype(float), found.iloc[0, 1:11].astype(float), atol=0.02)


@pytest.mark.usefixtures("no_figures")
def test_compare(runs, capsys):
    first, second = runs / "digits", runs / "digits" / "baseline"
    assert main(["compare", str(first), str(second), "--quiet"]) == 0
    text = capsys.readouterr().out
    html = (first / "comparison.html").read_text()
    found = json.loads((first / "metrics.json").read_text())
    shown = f"{-found['nll_minus_baseline']:+.3g}"
    assert shown in text and shown in html
    density = f"{-found['nll'] * found['test_rows']:,.1f}"
    assert "Ranking by held-out log density" in text and density in text and density in html


# -- stopped runs ------------------------------------------------------------------------------------------------------
LONG = ["--data", "breast-cancer", "--features", "mean radius,mean texture", "--batch-size", "64", "--no-baseline"]


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_that_goes_on_to_the_same_result(number, tmp_path, monkeypatch, capsys):
    command = ["train", *LONG, *SMALL, "--epochs", "6"]
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    stopped = tmp_path / "stopped"
    check, calls = optimise._check_finite, []

    def check_and_stop(*args):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(number)
        check(*args)

    with monkeypatch.context() as patch:
        patch.setattr(optimise, "_check_finite", check_and_stop)
        assert main([*command, "--out", str(stopped)]) == 130
    told = capsys.readouterr().err
    assert f"train --resume --out {stopped}" in told and "Traceback" not in told
    assert (stopped / "checkpoint" / "training.pt").is_file() and not (stopped / "posterior.pt").exists()
    assert main(["train", "--resume", "--out", str(stopped), "--quiet"]) == 0
    assert same(stopped, tmp_path / "whole") and not (stopped / "checkpoint").exists()
    assert (stopped / "metrics.json").read_bytes() == (tmp_path / "whole" / "metrics.json").read_bytes()


@pytest.mark.usefixtures("no_figures")
def test_a_killed_run_resumes_to_the_same_weights(tmp_path):
    command = ["train", *LONG, *SMALL, "--epochs", "150"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    often = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from bnn_pyro.checkpoint import Checkpoint; Checkpoint.__init__.__defaults__ = (None, 0.0)\n"
        "from bnn_pyro.run import main; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen([sys.executable, "-c", often, *command, "--out", str(killed)])
    checkpoint = killed / "checkpoint" / "training.pt"
    limit = time.monotonic() + 60
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    step = torch.load(checkpoint, weights_only=True)["state"]["step"]
    assert 0 < step < 150 * 7 and not (killed / "posterior.pt").exists()
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


# -- bad input ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def bad(tmp_path, runs):
    """Files with something wrong in them, beside the two runs."""
    rows = {"area": [1.0, 2, 3, 4] * 8, "price": [2.0, 4, 6, 8.5] * 8}
    table = pd.DataFrame(rows)
    table.to_csv(tmp_path / "fine.csv", index=False)
    table.astype(object).replace({"area": {3.0: "three"}}).to_csv(tmp_path / "text.csv", index=False)
    table.replace({"area": {3.0: np.nan}}).to_csv(tmp_path / "missing.csv", index=False)
    table.replace({"area": {3.0: np.inf}}).to_csv(tmp_path / "infinite.csv", index=False)
    table.assign(price="yes").to_csv(tmp_path / "oneclass.csv", index=False)
    table[:2].to_csv(tmp_path / "short.csv", index=False)
    (tmp_path / "twice.csv").write_text("a,a,price\n" + "1,2,3\n" * 20)
    np.savez(tmp_path / "keys.npz", images=np.zeros((9, 3)))
    np.savez(tmp_path / "shapes.npz", x=np.zeros((9, 3)), y=np.zeros(8))
    np.savez(tmp_path / "labels.npz", x=np.random.default_rng(0).random((120, 8, 8)), y=np.arange(120) % 12)
    (tmp_path / "picture.png").write_text("no picture")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "key.json").write_text('{"varant": "mlp"}')
    for name in ("truncated", "tampered", "unfinished", "edited"):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("config.json", "posterior.json", "posterior.pt"):
            (folder / file).write_bytes((runs / "houses" / file).read_bytes())
    blob = (runs / "houses" / "posterior.pt").read_bytes()
    (tmp_path / "truncated" / "posterior.pt").write_bytes(blob[: len(blob) // 2])
    (tmp_path / "tampered" / "posterior.pt").write_bytes(blob[:-50] + bytes([blob[-50] ^ 1]) + blob[-49:])
    (tmp_path / "unfinished" / "posterior.pt").unlink()
    meta = json.loads((tmp_path / "edited" / "posterior.json").read_text())
    meta["schema"]["y_scale"] *= 2
    (tmp_path / "edited" / "posterior.json").write_text(json.dumps(meta))
    return tmp_path


TRAIN = {
    "unknown data": (["--data", "digit"], "did you mean 'digits'"),
    "unknown variant": (["men-field"], "did you mean 'mean-field'"),
    "unknown method": (["--inference", "svy"], "did you mean 'svi'"),
    "method of another variant": (["mlp", "--inference", "svi"], "unknown inference method for mlp"),
    "unknown activation": (["--activation", "relo"], "did you mean 'relu'"),
    "unknown prior": (["--prior", "norml:1"], "did you mean 'normal'"),
    "unknown task": (
        ["--data", "DIR/fine.csv", "--target", "price", "--task", "regresion"],
        "did you mean 'regression'",
    ),
    "unknown noise": (["--data", "toy-curve", "--noise", "lerned"], "noise must be"),
    "unknown setting": (["--set", "epoch=3"], "did you mean 'epochs'"),
    "setting without a value": (["--set", "epochs"], "KEY=VALUE"),
    "epochs that are none": (["--epochs", "ten"], "epochs takes whole numbers, got 'ten'"),
    "no epochs": (["--epochs", "0"], "epochs must be at least 1"),
    "negative learning rate": (["--lr=-1"], "lr must be positive"),
    "hidden that is none": (["--hidden", "4,x"], "hidden takes whole numbers"),
    "bias that is none": (["--set", "bias=perhaps"], "bias is true or false"),
    "no draws": (["--num-draws", "0"], "num_draws must be at least 1"),
    "unknown device": (["--device", "gpu"], "unknown device 'gpu'"),
    "missing file": (["--data", "DIR/none.csv"], "none.csv"),
    "no target": (["--data", "DIR/fine.csv", "--target", "prise"], "did you mean 'price'"),
    "text in a numeric column": (["--data", "DIR/text.csv", "--target", "price"], "'three'"),
    "missing value": (["--data", "DIR/missing.csv", "--target", "price"], "row 4"),
    "infinite value": (["--data", "DIR/infinite.csv", "--target", "price"], "inf"),
    "one class": (["--data", "DIR/oneclass.csv", "--target", "price"], "class"),
    "too few rows": (["--data", "DIR/short.csv", "--target", "price", "--task", "regression"], "2 rows"),
    "duplicate columns": (["--data", "DIR/twice.csv", "--target", "price"], "'a'"),
    "wrong keys": (["--data", "DIR/keys.npz"], "images"),
    "wrong shapes": (["--data", "DIR/shapes.npz"], "(8,)"),
    "unknown feature": (["--data", "breast-cancer", "--features", "mean radus"], "did you mean 'mean radius'"),
    "missing config": (["--config", "DIR/none.json"], "no config file"),
    "broken config": (["--config", "DIR/broken.json"], "not valid JSON"),
    "unknown config key": (["--config", "DIR/key.json"], "did you mean 'variant'"),
    "folder that is no run": (["--out", "DIR/other"], "is not a run"),
    "folder that is a file": (["--out", "DIR/file"], "is a file"),
    "overwriting what is no run": (["--out", "DIR/other", "--overwrite"], "is not a run"),
    "existing run": (["--out", "RUNS/digits"], "--resume"),
    "resuming nothing": (["--out", "DIR/new", "--resume"], "nothing to resume"),
    "resuming with another seed": (["--out", "RUNS/digits", "--resume", "--seed", "5"], "seed 0, not 5"),
    "resume and overwrite": (["--out", "RUNS/digits", "--resume", "--overwrite"], "one of them"),
}
OTHERS = {
    "no run": (["evaluate", "DIR/nowhere"], "no run folder"),
    "evaluating what is no run": (["evaluate", "DIR/other"], "is not a run"),
    "unfinished": (["evaluate", "DIR/unfinished"], "--resume"),
    "truncated posterior": (
        ["predict", "DIR/truncated", "--input", "DIR/fine.csv", "--output", "DIR/p.csv"],
        "truncated",
    ),
    "tampered posterior": (["evaluate", "DIR/tampered"], "altered"),
    "edited posterior": (["evaluate", "DIR/edited"], "altered"),
    "data of another shape": (["evaluate", "RUNS/digits", "--data", "breast-cancer"], "shape (30,)"),
    "data of another task": (["evaluate", "RUNS/digits", "--data", "diabetes"], "is regression"),
    "labels outside the classes": (["evaluate", "RUNS/digits", "--data", "DIR/labels.npz"], "class '10'"),
    "unknown outside data": (["evaluate", "RUNS/digits", "--ood", "nose"], "did you mean 'noise'"),
    "outside data of another shape": (["evaluate", "RUNS/digits", "--ood", "diabetes"], "(10,)"),
    "an image that is none": (
        ["predict", "RUNS/digits", "--input", "DIR/picture.png", "--output", "DIR/p.csv"],
        "no image",
    ),
    "a missing column": (["predict", "RUNS/houses", "--input", "DIR/fine.csv", "--output", "DIR/p.csv"], "'town'"),
    "an output that exists": (["predict", "RUNS/houses", "--input", "DIR/fine.csv", "--output", "DIR/file"], "exists"),
    "comparing other rows": (["compare", "RUNS/digits", "RUNS/houses"], "other test rows"),
    "comparing one": (["compare", "RUNS/digits"], "two run folders"),
    "diagnosing nothing": (["diagnose", "DIR/nowhere"], "no run folder"),
    "diagnosing what is no run": (["diagnose", "DIR/other"], "is not a run"),
    "diagnosing what is unfinished": (["diagnose", "DIR/unfinished"], "--resume"),
    "a diagnosis that exists": (["diagnose", "RUNS/houses", "--out", "DIR/other"], "exists; choose another name"),
    "unknown device to diagnose on": (["diagnose", "RUNS/houses", "--device", "gpu"], "unknown device 'gpu'"),
    "unknown option to diagnose": (["diagnose", "RUNS/houses", "--no-netcfd"], "did you mean '--no-netcdf'"),
    "unknown command": (["trian"], "did you mean 'train'"),
    "unknown option": (["evaluate", "RUNS/digits", "--odd", "noise"], "did you mean '--ood'"),
    "abbreviated option": (["train", "--epo", "3"], "did you mean '--epochs'"),
    "seed that is none": (["train", "--seed", "one"], "'one'"),
    "missing argument": (["predict", "RUNS/digits", "--input", "x.csv"], "--output"),
}


def check_refused(argv, words, bad, runs, capsys):
    argv = [a.replace("DIR", str(bad)).replace("RUNS", str(runs)) for a in argv]
    before = snapshot(bad), snapshot(runs)
    capsys.readouterr()
    assert main(argv) == 2
    told = capsys.readouterr()
    lines = told.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), told.err
    assert words in lines[0] and "Traceback" not in told.out + told.err
    assert (snapshot(bad), snapshot(runs)) == before


@pytest.mark.parametrize("case", TRAIN)
def test_bad_input_to_train(case, bad, runs, capsys):
    arguments, words = TRAIN[case]
    out = [] if "--out" in arguments else ["--out", "DIR/new"]
    check_refused(["train", *arguments, *out, "--quiet"], words, bad, runs, capsys)
    assert not (bad / "new").exists()


@pytest.mark.parametrize("case", OTHERS)
def test_bad_input_to_the_others(case, bad, runs, capsys):
    argv, words = OTHERS[case]
    quiet = ["--quiet"] if argv[0] in ("evaluate", "predict", "compare", "diagnose") else []
    check_refused([*argv, *quiet], words, bad, runs, capsys)


def test_cuda_asked_for_and_absent(bad, runs, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_refused(["train", "--device", "cuda", "--out", "DIR/new"], "--device cpu", bad, runs, capsys)


@pytest.mark.usefixtures("no_figures")
def test_changed_data_are_noticed(runs, tmp_path, capsys):
    table = small_table(tmp_path / "t.csv")
    assert main(["train", "--data", str(table), "--target", "price", "--out", str(tmp_path / "run"), *SMALL]) == 0
    small_table(table, shift=3)
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--quiet"]) == 2
    assert "fingerprint" in capsys.readouterr().err


def test_a_loss_that_turns_nan_stops_the_run(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "--data", "toy-curve", "--out", str(out), *SMALL, "--epochs", "50", "--lr", "1e30"]) == 2
    told = capsys.readouterr().err
    assert "at step" in told and "lr 1e+30" in told and "Traceback" not in told
    assert not (out / "posterior.pt").exists()


# -- speed of the answers that need no torch ---------------------------------------------------------------------------
def test_help_and_typos_do_not_import_torch():
    code = (
        "import sys, io, contextlib\n"
        "from bnn_pyro.run import main\n"
        "for argv in (['--help'], ['train', '--help'], ['predict', '--help'],\n"
        "  ['diagnose', '--help'], ['--version'], ['train', '--epocs']):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        try: code = main(argv)\n"
        "        except SystemExit as exit: code = exit.code\n"
        "    assert code == (2 if '--epocs' in argv else 0), (argv, code)\n"
        "    assert 'examples' in out.getvalue() or argv[1:] != ['--help']\n"
        "heavy = {'torch', 'pyro', 'numpy', 'pandas', 'sklearn', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.PIPE)


def test_a_warning_is_one_line(monkeypatch, capsys):
    """What happened and what to try, without the source line that warned."""
    from bnn_pyro import commands

    def said(args):
        print(warnings.formatwarning("the gradient was not compiled", UserWarning, "file.py", 7), end="")

    monkeypatch.setattr(commands, "list_", said)
    before = warnings.formatwarning
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "warning: the gradient was not compiled\n" and warnings.formatwarning is before
