"""Bad input, of commands and settings: one line that says what, where and the way out; nothing is written."""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from properties import answer, contents
from refused import refuses
from run_folders import MEAN_FIELD, SMALL, small_table

import bnn_pyro as bp
from bnn_pyro.fitting import provenance_of
from bnn_pyro.run import main
from bnn_pyro.runs.folder import ARCHIVE, RunFolder
from bnn_pyro.runs.recipe import Recipe
from bnn_pyro.settings import build, defaults, plain
from bnn_pyro.zoo.auto import make_setup


@pytest.fixture(scope="module")
def bad(tmp_path_factory, runs):
    """Files with something wrong in them, beside the two runs; no case changes them."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "fine.csv").write_text("area,price\n" + "1,2\n2,4\n3,6\n4,8.5\n" * 8)
    np.savez(folder / "labels.npz", x=np.random.default_rng(0).random((120, 8, 8)), y=np.arange(120) % 12)
    (folder / "other").mkdir()
    files = {"other/thesis.txt": "mine", "file": "mine", "broken.json": "{", "key.json": '{"varant": "mlp"}'}
    files |= {"list.json": '{"variant": ["mlp"]}', "text.json": '{"data": {"limit": "few"}}'}
    files |= {"one.json": '{"data": {"features": "a"}}'}
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "unfinished").mkdir()
    (folder / "saved").mkdir()
    (folder / "saved" / "posterior.json").touch()
    shutil.copy(runs / "houses" / "config.json", folder / "unfinished")
    return folder


TRAIN = {
    "unknown variant": (["men-field"], "did you mean 'mean-field'"),
    "unknown setting": (["--set", "epoch=3"], "did you mean 'epochs'"),
    "setting without a value": (["--set", "epochs"], "KEY=VALUE"),
    "no epochs": (["--epochs", "0"], "error: --epochs must be at least 1"),
    "a split of no file": (["--split", "2"], "split=2 is one of a file of given splits; give splits too"),
    "no minutes": (["--inference", "nuts", "--max-minutes", "0"], "--max-minutes must be a number above 0"),
    "minutes of what cannot end": (["--inference", "sgld", "--max-minutes", "1"], "can end early"),
    "no draws": (["--num-draws", "0"], "argument --num-draws: must be at least 1, got 0"),
    "broken config": (["--config", "DIR/broken.json"], "not valid JSON"),
    "unknown config key": (["--config", "DIR/key.json"], "did you mean 'variant'"),
    "a list for a text": (["--config", "DIR/list.json"], "'variant' must be a text"),
    "a text for a number": (["--config", "DIR/text.json"], "'limit' must be a whole"),
    "a text for a list": (["--config", "DIR/one.json"], "must be a list of texts"),
    "folder that is no run": (["--out", "DIR/other"], "is not a run"),
    "folder that is a file": (["--out", "DIR/file"], "is a file"),
    "existing run": (["--out", "RUNS/digits"], "--resume"),
    "resuming nothing": (["--out", "DIR/new", "--resume"], "nothing to resume"),
    "resuming with another seed": (["--out", "RUNS/digits", "--resume", "--seed", "5"], "seed 0, not 5"),
    "no backbone": (["last-layer", "--set", "backbone=convnt"], "is none of: auto, convnet, mlp"),
    "a backbone that is no run": (["last-layer", "--set", "backbone=DIR/other"], "no posterior.json"),
    "a backbone of images": (["last-layer", "--set", "backbone=convnet", "--data", "breast-cancer"], "images"),
    "resume and overwrite": (["--out", "RUNS/digits", "--resume", "--overwrite"], "one of them"),
}
TO = ["--output", "DIR/p.csv"]
CHECK = ["check", "mean-field", "--out", "DIR/new"]
PREDICT = ["predict", "RUNS/houses", "--input", "RUNS/houses.csv", *TO]
OTHERS = {
    "no run": (["evaluate", "DIR/nowhere"], "no run folder"),
    "unfinished": (["evaluate", "DIR/unfinished"], "--resume"),
    "what save() wrote": (["evaluate", "DIR/saved"], "posterior.save() wrote is for bp.load(…), and `train` makes"),
    "data of another shape": (["evaluate", "RUNS/digits", "--data", "breast-cancer"], "shape (30,)"),
    "labels outside the classes": (["evaluate", "RUNS/digits", "--data", "DIR/labels.npz"], "class '10'"),
    "no outside data": (["evaluate", "RUNS/digits", "--ood", "noise", "--limit", "0"], "--limit: must be at least 1"),
    "a missing column": (["predict", "RUNS/houses", "--input", "DIR/fine.csv", *TO], "'town'"),
    "an output that exists": (["predict", "RUNS/houses", "--input", "DIR/fine.csv", "--output", "DIR/file"], "exists"),
    "levels that are none": ([*PREDICT, "--levels", "0.5,high"], "--levels: invalid numbers value: '0.5,high'"),
    "a threshold of no classes": ([*PREDICT, "--threshold", "0.3"], "--threshold 0.3: give a probability between 0"),
    "comparing other rows": (["compare", "RUNS/digits", "RUNS/houses"], "other test rows"),
    "predictions over their inputs": (
        ["predict", "RUNS/houses", "--input", "RUNS/houses.csv", "--output", "RUNS/houses.csv", "--overwrite"],
        "houses.csv is the input itself",
    ),
    "a diagnosis that exists": (["diagnose", "RUNS/houses", "--out", "DIR/other"], "exists; choose another name"),
    "an unknown budget": ([*CHECK, "--budget", "large"], "unknown budget 'large'. Valid: full, quick"),
    "an unknown check": ([*CHECK, "--only", "predictiv"], "did you mean 'predictive'"),
    "settings of all variants": (["check", "--hidden", "3", *CHECK[2:]], "--hidden needs a variant"),
    "resuming no check": ([*CHECK, "--resume"], "nothing to resume"),
    "unknown command": (["trian"], "did you mean 'train'"),
    "abbreviated option": (["train", "--epo", "3"], "did you mean '--epochs'"),
}


@pytest.mark.parametrize("case", [*TRAIN, *OTHERS, "cuda asked for and absent"])
def test_bad_input(case, bad, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    argv, words = {**TRAIN, **OTHERS}.get(case, (["--device", "cuda"], "--device cpu"))
    if case not in OTHERS:
        argv = ["train", *argv, *([] if "--out" in argv else ["--out", "DIR/new"])]
    argv = [*argv, *(["--quiet"] if argv[0] != "trian" else [])]
    argv = [a.replace("DIR", str(bad)).replace("RUNS", str(runs)) for a in argv]
    before = contents(bad), contents(runs)
    told = answer(argv)
    assert told.code == 2 and words in told.err, told
    assert (contents(bad), contents(runs)) == before and not (bad / "new").exists()


@pytest.mark.usefixtures("no_figures")
def test_data_that_are_changed_or_missing_are_told_in_a_line(tmp_path):
    table = small_table(tmp_path / "t.csv")
    assert main([*MEAN_FIELD, "--data", str(table), "--target", "price", "--out", str(tmp_path / "run"), *SMALL]) == 0
    small_table(table, shift=3)
    before = contents(tmp_path / "run")
    for words in ("fingerprint", "t.csv"):
        for command in ("evaluate", "diagnose"):
            told = answer([command, str(tmp_path / "run"), "--quiet"])
            assert told.code == 2 and words in told.err
        assert contents(tmp_path / "run") == before
        table.unlink(missing_ok=True)


# -- settings of methods -----------------------------------------------------------------------------------------------
POSITIVE = ("epochs", "draws", "thin", "members", "max_draws", "num_particles", "max_tree_depth",
            "max_iterations", "lr", "length", "temperature")  # fmt: skip
#: {setting: a value that no method takes}
BEYOND = dict.fromkeys(POSITIVE, 0) | dict.fromkeys(("batch_size", "chains", "jitter", "patience", "cores"), -1)
BEYOND |= {"target_accept": 1.0, "friction": 1.1, "final_lr": 2.0, "start": "mode", "compiled": "maybe"}


@pytest.mark.parametrize("name", bp.METHODS)
def test_a_value_out_of_bounds(name):
    method = bp.METHODS[name]
    taken = {key: value for key, value in defaults(method).items() if key in BEYOND}
    for key in taken:
        refuses(rf"^unknown {key} '|^{key} must be ", method, **{key: BEYOND[key]})
        for value in (math.nan, math.inf) if isinstance(taken[key], float) else ():
            refuses(rf"^{key} must be ", method, **{key: value})
    assert len(taken) > 1


def test_settings_that_do_not_go_together():
    refuses("chains must be at least 1", bp.NUTS, chains=0)
    refuses("needs at least 2", bp.ChEES, chains=1)
    refuses("24 chains cannot be shared out evenly to 16 superchains", bp.ChEES, chains=24)
    for method in (bp.SGHMC, bp.SGLD):
        refuses("burn_in must lie between 0 and the 5000 epochs", method, burn_in=5000, epochs=5000)


@pytest.mark.parametrize("method", [bp.NUTS, bp.MILE, bp.SGHMC, bp.SGLD, bp.SVI, bp.Ensemble, bp.Laplace])
def test_settings_of_earlier_versions_have_one_value(method):
    """They are in the key of a fit as before, so that a run of then is resumed; with another value it is refused."""
    setup = make_setup({bp.Laplace: "last-layer", bp.Ensemble: "mlp"}.get(method, "mean-field"), method())
    key = provenance_of(setup, bp.load_data("toy-curve"), 0)["key"][3]
    assert method.former and method.former.items() <= key.items() and not method.former.keys() & plain(method()).keys()
    written = plain(method()) | method.former
    assert build(method, written) == method()
    for name, value in method.former.items():
        refuses(rf"takes {name}={value} alone, not other; leave '{name}' out", build, method, written | {name: "other"})


def test_a_run_of_earlier_settings_is_read_but_not_fitted_again(tmp_path):
    """What has been fitted is evaluated whatever its method's settings were then; the rest of the fit is refused."""
    recipe = Recipe.from_dict({"variant": "mean-field", "inference": "sghmc", "data": {"name": "toy-curve"}}).to_dict()
    recipe["inference_settings"] |= {"schedule": "cyclical:3", "chains": 7}
    (tmp_path / "config.json").write_text(json.dumps(recipe))
    refuses("takes schedule=constant alone, not cyclical:3", lambda: RunFolder(tmp_path).recipe)
    for name in ARCHIVE:
        (tmp_path / name).touch()
    assert RunFolder(tmp_path).recipe.method == bp.SGHMC(chains=7)
    assert RunFolder(tmp_path).former_settings["schedule"] == "cyclical:3"


def test_a_closed_pipe_ends_a_command_quietly():
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-m", "bnn_pyro.run", "list"], **how) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141
