"""Bad input on the command line: one line that says what, where and the way out; nothing is written."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from run_folders import SMALL, small_table, snapshot

from bnn_pyro.run import main


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
    "method of another variant": (["mlp", "--inference", "svi"], "svi needs a guide"),
    "unknown activation": (["--activation", "relo"], "did you mean 'relu'"),
    "unknown prior": (["--prior", "norml:1"], "did you mean 'normal'"),
    "unknown task": (["--data", "DIR/fine.csv", "--target", "price", "--task", "regresion"], "mean 'regression'"),
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
TO = ["--output", "DIR/p.csv"]
OTHERS = {
    "no run": (["evaluate", "DIR/nowhere"], "no run folder"),
    "evaluating what is no run": (["evaluate", "DIR/other"], "is not a run"),
    "unfinished": (["evaluate", "DIR/unfinished"], "--resume"),
    "truncated posterior": (["predict", "DIR/truncated", "--input", "DIR/fine.csv", *TO], "truncated"),
    "tampered posterior": (["evaluate", "DIR/tampered"], "altered"),
    "edited posterior": (["evaluate", "DIR/edited"], "altered"),
    "data of another shape": (["evaluate", "RUNS/digits", "--data", "breast-cancer"], "shape (30,)"),
    "data of another task": (["evaluate", "RUNS/digits", "--data", "diabetes"], "is regression"),
    "labels outside the classes": (["evaluate", "RUNS/digits", "--data", "DIR/labels.npz"], "class '10'"),
    "unknown outside data": (["evaluate", "RUNS/digits", "--ood", "nose"], "did you mean 'noise'"),
    "outside data of another shape": (["evaluate", "RUNS/digits", "--ood", "diabetes"], "(10,)"),
    "an image that is none": (["predict", "RUNS/digits", "--input", "DIR/picture.png", *TO], "no image"),
    "a missing column": (["predict", "RUNS/houses", "--input", "DIR/fine.csv", *TO], "'town'"),
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
    assert (snapshot(bad), snapshot(runs)) == before and not (bad / "new").exists()


@pytest.mark.parametrize("case", [*TRAIN, *OTHERS])
def test_bad_input(case, bad, runs, capsys):
    argv, words = TRAIN.get(case) or OTHERS[case]
    if case in TRAIN:
        argv = ["train", *argv, *([] if "--out" in argv else ["--out", "DIR/new"]), "--quiet"]
    elif argv[0] in ("evaluate", "predict", "compare", "diagnose"):
        argv = [*argv, "--quiet"]
    check_refused(argv, words, bad, runs, capsys)


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
