"""Every command end to end on small data; `predict` in all its options."""

import dataclasses
import json
import shutil
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from refused import refuses
from run_folders import MEAN_FIELD, SMALL, small_table

import bnn_pyro as bp
from bnn_pyro import commands
from bnn_pyro.listing import tables
from bnn_pyro.metrics import METRICS
from bnn_pyro.run import parse
from bnn_pyro.runs.evaluate import labelled
from bnn_pyro.runs.recipe import EXAMPLE, Recipe, read_config, resolve
from bnn_pyro.settings import field_docs

pytestmark = pytest.mark.usefixtures("quick")


def test_train_writes_the_whole_folder_with_its_baseline_and_the_metrics_of_both(runs):
    folder = runs / "digits"
    names = {p.name for p in folder.iterdir()}
    expected = {"config.json", "metrics.json", "history.csv", "environment.json", "posterior.pt", "posterior.json"}
    assert expected | {"report.html", "README.md", "baseline"} <= names
    assert "checkpoint" not in names and not list(folder.rglob("*.part"))
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics.keys() >= set(METRICS["classification"]) - {"auroc", "average_precision"}
    history = pd.read_csv(folder / "history.csv")
    assert list(history) == ["epoch", "elbo", "log_likelihood", "kl"] and len(history) == 3
    config = json.loads((folder / "baseline" / "config.json").read_text())
    assert (config["variant"], config["inference"]) == ("mlp", "map")  # of the same architecture and schedule
    assert config["variant_settings"]["hidden"] == [8] and config["inference_settings"]["epochs"] == 3
    data = bp.load_data("digits", limit=150)
    posteriors = (bp.load(runs / "digits"), bp.load(runs / "digits" / "baseline"))
    nll, baseline = (bp.metrics.nll(bp.predict(p, data.x_test, num_draws=5), data.y_test) for p in posteriors)
    found = json.loads((runs / "digits" / "metrics.json").read_text())
    assert (found["nll"], found["nll_minus_baseline"]) == pytest.approx((nll, nll - baseline), abs=1e-6)


def test_overwrite_replaces_the_run_and_nothing_else(tmp_path, command):
    out = tmp_path / "run"
    train = [*MEAN_FIELD, "--data", "toy-curve", "--out", out, *SMALL]
    command(*train)
    (out / "figures").mkdir()
    for name in ("notes.txt", "figures/mine.txt", "figures/old.png"):
        (out / name).write_text("mine")
    command(*train, "--seed", 1, "--no-baseline", "--overwrite")
    assert (out / "notes.txt").read_text() == (out / "figures" / "mine.txt").read_text() == "mine"
    assert json.loads((out / "config.json").read_text())["seed"] == 1
    assert not (out / "figures" / "old.png").exists() and not (out / "baseline").exists()


def test_a_stop_before_there_is_a_checkpoint_says_how_to_go_on(tmp_path, monkeypatch, command):
    monkeypatch.setattr("bnn_pyro.commands.fit_run", Mock(side_effect=KeyboardInterrupt))
    said = command("train", "mlp", "--data", "diabetes", "--out", tmp_path, code=130)
    assert f"\nstopped; go on to the same result with: python -m bnn_pyro.run train --resume --out {tmp_path}\n" in said


def test_flags_go_before_config_and_config_before_defaults(tmp_path):
    (tmp_path / "c.toml").write_text(
        'variant = "mean-field"\ndata.name = "toy-curve"\nseed = 4\n'
        "[variant_settings]\nhidden = [7]\n[inference_settings]\nepochs = 22\nlr = 0.5\n"
    )
    args = parse(["train", "--set", "epochs=33", "--set", "prior=normal:0.1", "--set", "temperature=0.5", "--no-bias"])
    flagless, flagged = (resolve(one, read_config(tmp_path / "c.toml")) for one in (parse(["train"]), args))
    assert flagless.inference_settings["epochs"] == 22 and flagged.seed == 4
    assert flagged.inference_settings.items() >= {"epochs": 33, "lr": 0.5, "temperature": 0.5}.items()
    assert flagged.variant_settings.items() >= {"hidden": [7], "prior": "normal:0.1", "bias": False}.items()


def test_list_has_every_name_and_explains_every_setting(command):
    assert json.loads(command("list", "--json")) == tables()  # which test_imports.py holds to the tables themselves
    for name, kind in {**bp.ZOO, **bp.METHODS}.items():
        fields = [field.name for field in dataclasses.fields(kind)]
        assert set(fields) <= set(field_docs(kind.__doc__)), f"help({kind.__name__}) leaves settings out"
        text = command("list", name)
        assert all(f"\n  {field} = " in text for field in fields) and "–\n" not in text
        assert max(map(len, text.splitlines())) <= 80
    assert "did you mean 'nuts'" in command("list", "nutz", code=2)


def test_evaluate_on_other_data(runs, tmp_path, command):
    other, run = small_table(tmp_path / "other.csv", rows=40, shift=1000), runs / "houses"
    before = (run / "metrics.json").read_bytes()
    said = command("evaluate", run, "--data", other)
    assert json.loads((run / "metrics-other.json").read_text())["rmse"] > 700
    assert "40 rows" in said and "trained this run" not in said
    assert (run / "metrics.json").read_bytes() == before
    rows = bp.load(run).provenance["rows"]["train"]
    told = command("evaluate", run, "--data", runs / "houses.csv")
    assert f"{rows} of these rows trained" in told and "calibrated it" not in told


def test_labels_of_other_data_are_matched_by_name(tmp_path):
    """Where a file has some of the classes only, its numbers for them are others."""
    x = np.arange(12.0).reshape(6, 2)
    np.savez(tmp_path / "two.npz", x=x, y=np.array(["c", "b", "c", "c", "b", "b"]))
    schema = bp.Schema("classification", (2,), tuple("abc"))
    _, y = labelled(str(tmp_path / "two.npz"), schema, Recipe.from_dict({}))
    assert y.tolist() == [2, 1, 2, 2, 1, 1]


def test_predict_regression(predict, runs, tmp_path):
    new, posterior = tmp_path / "new.csv", bp.load(runs / "houses")
    pd.DataFrame({"town": ["south", "north"], "extra": [1, 2], "area": [50, 150]}).to_csv(new, index=False)
    found, _ = predict("--num-draws", "50", file=new)
    numbers = ["mean", "sd", "epistemic_sd", "aleatoric_sd", "q2.5", "q50", "q97.5"]
    assert list(found) == [*numbers, "furthest_input", "furthest_sd"] and len(found) == 2
    x = posterior.schema.standardise(torch.tensor([[50.0, 0.0, 1.0], [150.0, 1.0, 0.0]]))
    expected = bp.predict(posterior, x, num_draws=50)
    variances = [expected.total, expected.epistemic, expected.aleatoric]
    columns = [expected.mean, *(v.sqrt() for v in variances), *expected.quantile((0.025, 0.5, 0.975))]
    np.testing.assert_allclose(found[numbers].to_numpy(), torch.stack(columns, 1), rtol=1e-5)
    assert not np.allclose(expected.epistemic, expected.aleatoric, rtol=0.01)


def test_predict_images(predict, runs, tmp_path):
    data = bp.load_data("digits", limit=150)
    raw = data.schema.unstandardise(data.x_test[:3])
    np.savez(tmp_path / "x.npz", x=raw.numpy())
    (tmp_path / "new" / "b").mkdir(parents=True)
    Image.fromarray((raw[0, 0].numpy() * 255).round().astype(np.uint8)).save(tmp_path / "new" / "b" / "1.png")
    inputs = (tmp_path / name for name in ("x.npz", "new/b/1.png", "new"))
    rows, one, folder = (predict("--num-draws", "5", run="digits", file=file)[0] for file in inputs)
    prediction = bp.predict(bp.load(runs / "digits"), data.x_test[:3], num_draws=5)
    assert rows["digit"].tolist() == prediction.mean.argmax(1).tolist()
    assert np.allclose(rows["total_nats"], prediction.total, atol=1e-5)
    assert np.allclose(one.iloc[0, 2:12].astype(float), rows.iloc[0, 1:11].astype(float), atol=0.02)
    assert folder.iloc[:, 1:].equals(one.iloc[:, 1:]) and [*folder["file"], *one["file"]] == ["b/1.png", "1.png"]
    (tmp_path / "new" / "a.png").write_bytes(b"half")
    assert "a.png: is no image" in predict("--num-draws", "5", run="digits", file=tmp_path / "new", code=2)
    for how in ("skip", "flag"):
        some, said = predict("--num-draws", "5", "--on-bad-row", how, run="digits", file=tmp_path / "new")
        assert some["total_nats"].dropna().tolist() == one["total_nats"].tolist() and "row 0: " in said
        assert len(some) == 1 + (how == "flag") and some["file"].tolist()[-1] == "b/1.png"


ROWS = ["A 1,50,south,1", "B 2,,north,2", "C 3,90,west,3", "D 4,much,,4", "E 5,1e3,south,5", "F 6,150,north,6"]
NEW = "\n".join(["street,area,town,price", *ROWS, ""])


@pytest.fixture
def predict(runs, tmp_path, command):
    """What a run predicts of the new rows with some options: the table, and what was said."""
    path, out = tmp_path / "new.csv", tmp_path / "p.csv"
    path.write_text(NEW)

    def run(*options, run="houses", code=0, file=path):
        said = command("predict", runs / run, "--input", file, "--output", out, "--overwrite", *options, code=code)
        return said if code else (pd.read_csv(out), said)

    return run


def test_bad_rows_and_those_whose_prediction_is_not_finite_are_refused_skipped_or_flagged(predict, tmp_path):
    assert all(text in predict(code=2) for text in ("row 3: missing value ('')", "give --on-bad-row skip or flag"))
    table, said = predict("--on-bad-row", "skip", "--keep", "street,price")
    assert table["street"].tolist() == ["A 1", "E 5", "F 6"] and table["row"].tolist() == [2, 6, 7]
    assert "3 of 6 rows are left out (row 3: area is missing; row 4: town: 'west' is a category new to" in said
    flagged, _ = predict("--on-bad-row", "flag", "--keep", "all")
    assert list(flagged)[:5] == ["row", "street", "area", "town", "price"] and len(flagged) == 6
    assert flagged["mean"].isna().tolist() == [False, True, True, True, False, False]
    assert flagged["problem"][3] == "area: 'much' is no number, or too large a one; town is missing"
    np.testing.assert_allclose(flagged.dropna(subset=["mean"])["mean"], table["mean"])
    good = tmp_path / "good.csv"
    good.write_text("\n".join(NEW.splitlines()[i] for i in (0, 1, 5, 6)))
    np.testing.assert_allclose(predict(file=good)[0]["mean"], table["mean"])  # other rows change nothing
    good.write_text("area,town\n,north\n")
    assert "no row can be predicted; row 2: area is missing" in predict("--on-bad-row", "skip", code=2, file=good)
    pd.read_csv(tmp_path / "good.csv").assign(area=60.0, town="north", id=10_000_000_001).to_parquet(
        tmp_path / "p.parquet"
    )
    kept, _ = predict("--keep", "id", file=tmp_path / "p.parquet")
    assert kept["id"].tolist() == [10_000_000_001]
    (tmp_path / "far.csv").write_text("area,town\n3e38,south\n60,north\n")
    said = predict(code=2, file=tmp_path / "far.csv")
    assert "row 2: its prediction is not finite: area is " in said and "--on-bad-row skip or flag" in said
    table, said = predict("--on-bad-row", "flag", file=tmp_path / "far.csv")
    assert table["mean"].isna().tolist() == [True, False] and "its prediction is not finite" in table["problem"][0]


def test_categories_that_are_ignored_are_marked(predict, runs, tmp_path):
    run = shutil.copytree(runs / "houses", tmp_path / "ignoring")
    posterior = bp.load(run)
    dataclasses.replace(posterior, schema=dataclasses.replace(posterior.schema, unseen="ignore")).save(run)
    table, said = predict("--on-bad-row", "skip", run=run)
    assert "1 rows have a category new to the model" in said and "(row 4: town: 'west' is a category new" in said
    assert table["unseen"].fillna("").str.contains("west").tolist() == [False, True, False, False]


def test_rows_of_a_log_scale_whose_mean_alone_is_beyond_the_numbers_are_predicted(predict, runs, tmp_path):
    run = shutil.copytree(runs / "houses", tmp_path / "log")
    schema = dataclasses.replace((posterior := bp.load(run)).schema, target_scale="log", y_shift=5.0, y_scale=40.0)
    dataclasses.replace(posterior, schema=schema).save(run)
    table, said = predict("--on-bad-row", "flag", run=run)
    known = table[table["problem"].isna()]
    assert np.isinf(known["mean"]).any() and np.isfinite(known[["q2.5", "q50", "q97.5"]]).all(axis=None)
    assert "take q50" in said


def test_levels_and_the_furthest_input_of_a_row(predict, runs):
    table, said = predict("--on-bad-row", "skip", "--levels", "0.5,0.95")
    posterior = bp.load(runs / "houses")
    x = bp.load_inputs(pd.DataFrame({"area": [50.0, 150.0], "town": ["south", "north"]}), posterior.schema)
    low, high = bp.predict(posterior, x, num_draws=5).quantile([0.25, 0.75])
    np.testing.assert_allclose(table[["lower_50", "upper_50"]].to_numpy()[[0, 2]], np.stack([low, high], 1), rtol=1e-4)
    np.testing.assert_allclose(table["lower_95"], table["q2.5"], rtol=1e-5)
    far = np.abs((np.array([50, 1e3, 150]) - posterior.schema.x_shift[0]) / posterior.schema.x_scale[0])
    assert table["furthest_input"].tolist() == ["area"] * 3
    np.testing.assert_allclose(table["furthest_sd"], far, rtol=1e-5)
    assert "1 of 3 rows are unlike those that trained" in said and f"(row 6: area, {far[1]:.0f})" in said


def test_a_threshold_and_sets_of_two_classes_and_rows_in_the_report(tmp_path, command):
    file, out, predictions = small_table(tmp_path / "t.csv", rows=80), tmp_path / "run", tmp_path / "p.csv"
    table = pd.read_csv(file)
    table["dear"] = np.where(table.pop("price") > 400, "yes", "no")
    table.to_csv(file, index=False)
    command("train", "mlp", "--data", file, "--target", "dear", "--out", out, *SMALL)
    more = ["--threshold", 0.2, "--keep", "dear", "--levels", 0.9]
    command("predict", out, "--input", file, "--output", predictions, *more)
    found = pd.read_csv(predictions)
    assert (found["dear"] == np.where(found["p(yes)"] >= 0.2, "yes", "no")).all() and (found["dear"] == "yes").any()
    digits = pd.read_csv(predictions, dtype=str)["p(yes)"].str.lstrip("0.")
    assert digits.str.len().max() == 9  # as many as tell numbers of 32 bits apart
    assert (found["dear (input)"] == table["dear"]).all() and set(found["set_90"]) <= {"no", "yes", "no|yes", "yes|no"}
    rows = json.loads((out / "rows.json").read_text())
    for row in rows["worst"] + rows["uncertain"]:
        written = table.iloc[int(row["row"]) - 2]  # as in the file, whose header is row 1
        assert row["observed dear"] == written["dear"] and row["row"] in (out / "report.html").read_text()
        inputs = row["inputs, the most unusual first"].split(", ")
        assert sorted(inputs) == [f"area {written['area']:g}", f"town={written['town']}"]
    p = {row["row"]: float(found["p(yes)"][int(row["row"]) - 2]) for row in rows["worst"]}
    true = [p[row["row"]] if row["observed dear"] == "yes" else 1 - p[row["row"]] for row in rows["worst"]]
    assert true == sorted(true)


def test_without_data_it_is_digits_with_most_rows_to_test(tmp_path):
    def data(*argv):
        made = commands._train_target(parse(["train", "mlp", "--out", str(tmp_path / "none"), *argv]))[0].data
        assert made.pop("scale") == "auto"
        return made

    (tmp_path / "old.toml").write_text("seed = 1")  # configs of before say no more
    assert data("--config", str(tmp_path / "old.toml")) == data("--data", "digits") == {"name": "digits"}
    assert data("--data", "digits", "--fractions", "0.5,0.25,.25") == EXAMPLE | {"fractions": [0.5, 0.25, 0.25]}
    assert data() == EXAMPLE
    refuses("--fractions: invalid numbers value: 'half'", data, "--fractions", "half")
