"""Every command end to end on small data."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from run_folders import MEAN_FIELD, SMALL, same, small_table

import bnn_pyro as bp
from bnn_pyro.listing import tables
from bnn_pyro.metrics import METRICS
from bnn_pyro.run import main, parse
from bnn_pyro.runs.evaluate import labelled
from bnn_pyro.runs.recipe import Recipe, read_config, resolve
from bnn_pyro.settings import field_docs

pytestmark = pytest.mark.usefixtures("quick")


# -- what a run folder holds -------------------------------------------------------------------------------------------
def test_train_writes_the_whole_folder_with_its_baseline(runs):
    folder = runs / "digits"
    names = {p.name for p in folder.iterdir()}
    expected = {"config.json", "metrics.json", "history.csv", "environment.json", "posterior.pt", "posterior.json"}
    assert expected | {"report.html", "README.md", "baseline"} <= names
    assert "checkpoint" not in names and not list(folder.rglob("*.part"))
    found = json.loads((folder / "metrics.json").read_text())
    for name in set(METRICS["classification"]) - {"auroc", "average_precision"}:
        assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"], name
    history = pd.read_csv(folder / "history.csv")
    assert list(history) == ["epoch", "elbo", "log_likelihood", "kl"] and len(history) == 3
    config = json.loads((folder / "baseline" / "config.json").read_text())
    assert (config["variant"], config["inference"]) == ("mlp", "map")  # of the same architecture and schedule
    assert config["variant_settings"]["hidden"] == [8] and config["inference_settings"]["epochs"] == 3


def test_metrics_are_those_of_the_saved_posterior(runs):
    data = bp.load_data("digits", limit=150)
    posteriors = (bp.load(runs / "digits"), bp.load(runs / "digits" / "baseline"))
    nll, baseline = (bp.metrics.nll(bp.predict(p, data.x_test, num_draws=5), data.y_test) for p in posteriors)
    found = json.loads((runs / "digits" / "metrics.json").read_text())
    assert (found["nll"], found["nll_minus_baseline"]) == pytest.approx((nll, nll - baseline), abs=1e-6)


def test_config_reproduces_bit_for_bit(runs, tmp_path):
    run, again = runs / "houses", tmp_path / "again"
    assert main(["train", "--config", str(run / "config.json"), "--out", str(again), "--quiet"]) == 0
    assert same(run, again) and same(run / "baseline", again / "baseline")
    for name in ("metrics.json", "config.json"):
        assert (again / name).read_bytes() == (run / name).read_bytes()


def test_default_name_is_numbered_where_it_is_taken_and_temperature_is_named_everywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cold = [*MEAN_FIELD, "--data", "toy-curve", "--seed", "3", "--no-baseline", "--set", "temperature=0.1", *SMALL]
    for out in ("runs/mean-field-toy-curve-3", "runs/mean-field-toy-curve-3-2"):
        assert main(cold) == 0
        said = capsys.readouterr().out
        assert f"{out}/report.html" in said and "temperature 0.1" in said
    assert "Temperature 0.1" in (tmp_path / out / "report.html").read_text()
    assert "temperature 0.1" in (tmp_path / out / "README.md").read_text()


def test_overwrite_replaces_the_run_and_nothing_else(tmp_path):
    out = tmp_path / "run"
    command = [*MEAN_FIELD, "--data", "toy-curve", "--out", str(out), *SMALL]
    assert main(command) == 0
    (out / "figures").mkdir()
    for name in ("notes.txt", "figures/mine.txt", "figures/old.png"):
        (out / name).write_text("mine")
    assert main([*command, "--seed", "1", "--no-baseline", "--overwrite"]) == 0
    assert (out / "notes.txt").read_text() == (out / "figures" / "mine.txt").read_text() == "mine"
    assert json.loads((out / "config.json").read_text())["seed"] == 1
    assert not (out / "figures" / "old.png").exists() and not (out / "baseline").exists()


# -- settings ----------------------------------------------------------------------------------------------------------
def test_flags_go_before_config_and_config_before_defaults(tmp_path):
    (tmp_path / "c.toml").write_text(
        'variant = "mean-field"\ndata.name = "toy-curve"\nseed = 4\n'
        "[variant_settings]\nhidden = [7]\n[inference_settings]\nepochs = 22\nlr = 0.5\n"
    )
    args = parse(["train", "--set", "epochs=33", "--set", "prior=normal:0.1", "--set", "temperature=0.5", "--no-bias"])
    flagless, flagged = (resolve(one, read_config(tmp_path / "c.toml")) for one in (parse(["train"]), args))
    assert flagless.inference_settings["epochs"] == 22 and flagged.seed == 4
    inference = {"epochs": 33, "lr": 0.5, "temperature": 0.5}
    assert flagged.inference_settings.items() >= inference.items()
    assert flagged.variant_settings.items() >= {"hidden": [7], "prior": "normal:0.1", "bias": False}.items()


# -- the other commands ------------------------------------------------------------------------------------------------


def test_list_has_every_name_and_explains_every_setting(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for table in (bp.ZOO, bp.METHODS, bp.DATASETS) for name in table)
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == tables()  # which test_imports.py holds to the tables themselves
    for name, kind in {**bp.ZOO, **bp.METHODS}.items():
        fields = [field.name for field in dataclasses.fields(kind)]
        assert set(fields) <= set(field_docs(kind.__doc__)), f"help({kind.__name__}) leaves settings out"
        assert main(["list", name]) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {field} = " in text for field in fields) and "–\n" not in text
    assert main(["list", "nutz"]) == 2 and "did you mean 'nuts'" in capsys.readouterr().err


def test_evaluate_with_inputs_from_elsewhere(runs, capsys):
    before = json.loads((runs / "digits" / "metrics.json").read_text())
    assert main(["evaluate", str(runs / "digits"), "--ood", "noise", "--limit", "50", "--quiet"]) == 0
    found = json.loads((runs / "digits" / "metrics.json").read_text())
    assert all(found[k] == before[k] for k in before if not k.startswith("ood_"))
    for name in ("uniform-noise", "gaussian-noise"):
        for score in ("total_entropy", "max_prob", "mutual_information"):
            key = f"ood_{name}_{score}"
            assert 0 <= found[f"{key}_low"] <= found[key] <= found[f"{key}_high"] <= 1
    assert "uniform-noise" in capsys.readouterr().out


def test_evaluate_on_other_data(runs, tmp_path, capsys):
    other = small_table(tmp_path / "other.csv", rows=40, shift=1000)
    before = (runs / "houses" / "metrics.json").read_bytes()
    assert main(["evaluate", str(runs / "houses"), "--data", str(other), "--quiet"]) == 0
    said = capsys.readouterr().out
    assert json.loads((runs / "houses" / "metrics-other.json").read_text())["rmse"] > 700
    assert "40 rows" in said and "trained this run" not in said
    assert (runs / "houses" / "metrics.json").read_bytes() == before
    assert main(["evaluate", str(runs / "houses"), "--data", str(runs / "houses.csv"), "--quiet"]) == 0
    assert f"{bp.load(runs / 'houses').provenance['rows']['train']} of these rows trained" in capsys.readouterr().out


def test_labels_of_other_data_are_matched_by_name(tmp_path):
    """Where a file has some of the classes only, its numbers for them are others."""
    x = np.arange(12.0).reshape(6, 2)
    np.savez(tmp_path / "two.npz", x=x, y=np.array(["c", "b", "c", "c", "b", "b"]))
    schema = bp.Schema("classification", (2,), tuple("abc"))
    _, y = labelled(str(tmp_path / "two.npz"), schema, Recipe.from_dict({}))
    assert y.tolist() == [2, 1, 2, 2, 1, 1]


def test_predict_regression(runs, tmp_path):
    new, output = tmp_path / "new.csv", tmp_path / "predictions.csv"
    pd.DataFrame({"town": ["south", "north"], "extra": [1, 2], "area": [50, 150]}).to_csv(new, index=False)
    files = ["--input", str(new), "--output", str(output)]
    command = ["predict", str(runs / "houses"), *files, "--num-draws", "50", "--quiet"]
    assert main(command) == 0
    found, posterior = pd.read_csv(output), bp.load(runs / "houses")
    numbers = ["mean", "sd", "epistemic_sd", "aleatoric_sd", "q2.5", "q50", "q97.5"]
    assert list(found) == [*numbers, "furthest_input", "furthest_sd"] and len(found) == 2
    x = posterior.schema.standardise(torch.tensor([[50.0, 0.0, 1.0], [150.0, 1.0, 0.0]]))
    expected = bp.predict(posterior, x, num_draws=50)
    variances = [expected.total, expected.epistemic, expected.aleatoric]
    columns = [expected.mean, *(v.sqrt() for v in variances), *expected.quantile((0.025, 0.5, 0.975))]
    np.testing.assert_allclose(found[numbers].to_numpy(), torch.stack(columns, 1), rtol=1e-5)
    assert not np.allclose(expected.epistemic, expected.aleatoric, rtol=0.01)
    written = output.read_bytes()
    assert main(command) == 2 and output.read_bytes() == written, "a file that is there is kept"


def test_predict_images(runs, tmp_path):
    data = bp.load_data("digits", limit=150)
    raw, found = data.schema.unstandardise(data.x_test[:3]), {}
    np.savez(tmp_path / "x.npz", x=raw.numpy())
    (tmp_path / "new" / "b").mkdir(parents=True)
    Image.fromarray((raw[0, 0].numpy() * 255).round().astype(np.uint8)).save(tmp_path / "new" / "b" / "1.png")
    for name in ("x.npz", "new/b/1.png", "new"):
        files = ["--input", str(tmp_path / name), "--output", str(tmp_path / "p.csv"), "--overwrite"]
        assert main(["predict", str(runs / "digits"), *files, "--num-draws", "5", "--quiet"]) == 0
        found[name] = pd.read_csv(tmp_path / "p.csv")
    rows, one, folder = found.values()
    prediction = bp.predict(bp.load(runs / "digits"), data.x_test[:3], num_draws=5)
    assert rows["digit"].tolist() == prediction.mean.argmax(1).tolist()
    assert np.allclose(rows["total_nats"], prediction.total, atol=1e-5)
    assert np.allclose(one.iloc[0, 1:11].astype(float), rows.iloc[0, 1:11].astype(float), atol=0.02)
    assert folder.iloc[:, 1:].equals(one) and folder["file"].tolist() == ["b/1.png"]


def test_compare(runs, capsys):
    first, second = runs / "digits", runs / "digits" / "baseline"
    assert main(["compare", str(first), str(second), "--quiet"]) == 0
    text, html = capsys.readouterr().out, (first / "comparison.html").read_text()
    found = json.loads((first / "metrics.json").read_text())
    for words in (f"{-found['nll_minus_baseline']:+.3g}", f"{-found['nll'] * found['test_rows']:,.1f}"):
        assert words in text and words in html
