"""`predict`: columns that are carried along, levels, thresholds, bad rows, and how unusual the inputs of a row are."""

import json

import numpy as np
import pandas as pd
import pytest
from run_folders import SMALL, small_table

import bnn_pyro as bp
from bnn_pyro.run import main

ROWS = ["A 1,50,south,1", "B 2,,north,2", "C 3,90,west,3", "D 4,much,,4", "E 5,1e3,south,5", "F 6,150,north,6"]
NEW = "\n".join(["street,area,town,price", *ROWS, ""])


@pytest.fixture
def predict(runs, tmp_path, capsys):
    """What a run predicts of the new rows with some options: the table, and what was said."""
    path = tmp_path / "new.csv"
    path.write_text(NEW)

    def run(*options, run="houses", code=0, file=path):
        files = ["--input", str(file), "--output", str(tmp_path / "p.csv"), "--overwrite", "--quiet"]
        assert main(["predict", str(runs / run), *files, *options]) == code
        said = capsys.readouterr()
        return said.err if code else (pd.read_csv(tmp_path / "p.csv"), said.out)

    return run


def test_bad_rows_are_refused_skipped_or_flagged(predict, tmp_path):
    assert "row 3: missing value ('')" in predict(code=2)
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


def test_predictions_that_are_not_finite_are_never_written(predict, tmp_path):
    (tmp_path / "far.csv").write_text("area,town\n3e38,south\n60,north\n")
    said = predict(code=2, file=tmp_path / "far.csv")
    assert "row 2: its prediction is not finite: area is " in said and "--on-bad-row skip or flag" in said
    table, said = predict("--on-bad-row", "flag", file=tmp_path / "far.csv")
    assert table["mean"].isna().tolist() == [True, False] and "its prediction is not finite" in table["problem"][0]


def test_levels_and_the_furthest_input_of_a_row(predict, runs):
    table, _ = predict("--on-bad-row", "skip", "--levels", "0.5,0.95")
    posterior = bp.load(runs / "houses")
    x = bp.load_inputs(pd.DataFrame({"area": [50.0, 150.0], "town": ["south", "north"]}), posterior.schema)
    low, high = bp.predict(posterior, x, num_draws=5).quantile([0.25, 0.75])
    np.testing.assert_allclose(table[["lower_50", "upper_50"]].to_numpy()[[0, 2]], np.stack([low, high], 1), rtol=1e-4)
    np.testing.assert_allclose(table["lower_95"], table["q2.5"], rtol=1e-5)
    far = np.abs((np.array([50, 1e3, 150]) - posterior.schema.x_shift[0]) / posterior.schema.x_scale[0])
    assert table["furthest_input"].tolist() == ["area"] * 3
    np.testing.assert_allclose(table["furthest_sd"], far, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--levels", "0.5,high"], "argument --levels: invalid numbers value: '0.5,high'"),
        (["--levels", "90"], "level must lie strictly between 0 and 1, got 90"),
        (["--threshold", "0.3"], "--threshold 0.3: give a probability between 0 and 1, for a run of two classes"),
        (["--on-bad-row", "skp"], "invalid choice: 'skp'"),
        (["--keep", "stret"], "did you mean 'street'"),
    ],
)
def test_options_that_are_none(predict, options, said):
    assert said in predict("--on-bad-row", "skip", *options, code=2)


def test_a_threshold_and_sets_of_two_classes_and_rows_in_the_report(tmp_path):
    table = pd.read_csv(small_table(tmp_path / "t.csv", rows=80))
    table["dear"] = np.where(table.pop("price") > 400, "yes", "no")
    table.to_csv(tmp_path / "t.csv", index=False)
    out, to = tmp_path / "run", ["--output", str(tmp_path / "p.csv"), "--quiet", "--threshold", "0.2"]
    assert main(["train", "mlp", "--data", str(tmp_path / "t.csv"), "--target", "dear", "--out", str(out), *SMALL]) == 0
    command = ["predict", str(out), "--input", str(tmp_path / "t.csv"), *to, "--keep", "dear", "--levels", "0.9"]
    assert main(command) == 0
    found = pd.read_csv(tmp_path / "p.csv")
    assert (found["dear"] == np.where(found["p(yes)"] >= 0.2, "yes", "no")).all() and (found["dear"] == "yes").any()
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


def test_train_offers_a_log_scale_and_takes_it(tmp_path, capsys):
    rng = np.random.default_rng(0)
    x = rng.normal(size=100)
    pd.DataFrame({"x": x, "price": np.exp(10 + x)}).to_csv(tmp_path / "t.csv", index=False)
    command = ["train", "mlp", "--data", str(tmp_path / "t.csv"), "--target", "price", *SMALL[:-1], "--no-baseline"]
    assert main([*command, "--out", str(tmp_path / "plain")]) == 0
    assert "price: positive and skewed" in (said := capsys.readouterr().err) and "--target-scale log" in said
    run, other = str(tmp_path / "log"), tmp_path / "new.csv"
    assert main([*command, "--target-scale", "log", "--conformal", "0.8", "--out", run]) == 0
    assert "skewed" not in capsys.readouterr().err
    other.write_text("x\n-60\n3\n")
    files = ["--input", str(other), "--output", str(tmp_path / "p.csv")]
    assert main(["predict", run, *files, "--levels", "0.5,0.99", "--quiet"]) == 0
    found = pd.read_csv(tmp_path / "p.csv")
    assert (found[["mean", "q2.5", "low", "lower_50"]] > 0).all(axis=None) and (found["upper_99"] == np.inf).all()
    assert "2 of 2 exclude nothing: a level of 0.99 needs 99 calibration rows" in capsys.readouterr().out
