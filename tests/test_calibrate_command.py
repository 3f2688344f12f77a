"""Calibration by a command: rows set aside in training, rows of another file, groups, and what a run says of it."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from refused import refuses
from run_folders import SMALL, small_table
from scipy import stats

import bnn_pyro as bp
from bnn_pyro.run import main
from bnn_pyro.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("quick", "no_figures")


@pytest.fixture(scope="module")
def houses(tmp_path_factory, quick):
    """A run of which half of the validation rows calibrated."""
    folder = tmp_path_factory.mktemp("calibrated")
    table = small_table(folder / "houses.csv", rows=200)
    how = ["--data", str(table), "--target", "price", "--conformal", "0.8", "--no-baseline", "--out"]
    assert main(["train", "mean-field", "--noise", "heteroscedastic", *how, str(folder / "run"), *SMALL]) == 0
    return folder


def test_train_sets_half_of_the_validation_rows_aside(houses):
    run = houses / "run"
    meta, done = (json.loads((run / name).read_text()) for name in ("posterior.json", "guarantees.json"))
    assert meta["provenance"]["rows"]["val"] == 15 and done["calibration_rows"] == 15 and done["level"] == 0.8
    assert [row["prediction"] for row in done["table"][:2]] == ["predictive", "conformal: normalised"]
    assert [row["rows"] for row in done["table"][::6]] == ["all test rows", "most uncertain third"]
    page = (run / "report.html").read_text()
    assert "<h2>Guarantees</h2>" in page and "exchangeable with the 15 calibration rows" in page


@pytest.mark.parametrize(("variant", "way"), [("mean-field", "calibrate"), ("mlp", "train … --conformal 0.9")])
def test_a_run_shows_what_calibration_would_change(variant, way, command, tmp_path, monkeypatch):
    """By validation rows, or where these stopped the training by every second test row."""
    drawn = {}
    monkeypatch.setattr("bnn_pyro.runs.evaluate.draw_all", lambda figures, folder: drawn.update(figures) or [])
    monkeypatch.setattr("bnn_pyro.runs.coverage.MIN_ROWS", 15)
    table, run = small_table(tmp_path / "houses.csv", rows=200), tmp_path / "run"
    train = ["train", variant, "--target", "price", "--no-baseline", *SMALL]
    text = command(*train, "--data", table, "--out", run)
    data, posterior = RunFolder(run).recipe.load(), bp.load(run)
    known, shown, other = (data.x_val, data.y_val), (data.x_test, data.y_test), ""
    if variant == "mlp":
        refuses("stopped its training", bp.calibrate, posterior, *known)
        known, shown, other = (data.x_test[::2], data.y_test[::2]), (data.x_test[1::2], data.y_test[1::2]), "other "
    calibrated = [bp.calibrate(posterior, *known, method, num_draws=5) for method in ("normalised", "isotonic")]
    content = json.loads((run / "metrics.json").read_text())["if_calibrated"]
    assert content["calibration_rows"] == len(known[1]) and f"`{way}" in text
    every = "the other test rows" if other else "all test rows"
    assert "calibration-recalibrated" in drawn and [row["rows"] for row in content["table"]].count(every) == 3
    for line, made in zip(content["table"], (posterior, *calibrated), strict=False):
        low, high, *_ = bp.predict(made, shown[0], num_draws=5).interval(0.9)
        assert line["covered"] == pytest.approx(((low <= shown[1]) & (shown[1] <= high)).double().mean().item())
        assert line["size"] == pytest.approx((high - low).mean().item(), rel=1e-5)
    page = (run / "report.html").read_text()
    assert "<h2>What calibration would change</h2>" in page and f"Coverage on the {other}test rows" in page
    assert not (run / "calibration.json").exists()
    if variant == "mlp":  # rows between those of later times promise too much
        command(*train, "--data", table, "--time", "area", "--out", tmp_path / "times")
        assert "if_calibrated" not in json.loads((tmp_path / "times" / "metrics.json").read_text())
    few = small_table(tmp_path / "few.csv", rows=50)  # 8 validation and 8 test rows, and 0.9 takes 9
    command(*train, "--data", few, "--out", tmp_path / "few")
    assert "if_calibrated" not in json.loads((tmp_path / "few" / "metrics.json").read_text())


def test_predictions_have_intervals_and_rows_are_monitored(houses, command):
    for name, shift in (("same", 0), ("other", 500)):
        table, out = small_table(houses / f"{name}.csv", rows=120), houses / f"{name}-out.csv"
        (frame := pd.read_csv(table)).assign(area=frame.area + shift).to_csv(table, index=False)
        text = command("predict", houses / "run", "--input", table, "--output", out, "--monitor", "--overwrite")
        assert ("ALARM  inputs" in text) == (name == "other"), text
        table = pd.read_csv(out)
        assert {"mean", "low", "high", "share_as_uncertain"} <= {*table} and (table.low < table.high).all()
        assert (table.share_as_uncertain.median() < 0.1) == (name == "other")
        blank = houses / f"{name}-blank.csv"  # the first price is to be predicted
        frame.assign(area=frame.area + shift, price=frame.price.where(frame.index > 0)).to_csv(blank, index=False)
        command("predict", houses / "run", "--input", blank, "--output", blank.with_suffix(".out"), "--monitor")
        assert pd.read_csv(blank.with_suffix(".out"))["mean"].equals(table["mean"])
        said = command("evaluate", houses / "run", "--data", houses / f"{name}.csv")
        both = json.loads((houses / "run" / f"metrics-{name}.json").read_text())["calibrated"]["table"]
        assert "conformal: normalised" in said and both[0]["size"] != both[1]["size"]
        assert both[1]["covered"] == frame.price.between(table.low, table.high).mean()


def test_calibrate_a_run_by_other_rows(runs, houses, command, tmp_path):
    table = small_table(tmp_path / "new.csv", rows=80, shift=1.5)
    text = command("calibrate", houses / "run", "--groups", "uncertainty", "--data", table)
    assert "the calibration rows of its group (80 in all groups)" in text
    train = ["train", "mean-field", "--data", table, "--target", "price", "--out", tmp_path / "x", "--conformal"]
    tested = pd.read_csv(houses / "houses.csv").iloc[RunFolder(houses / "run").recipe.load().index_test.numpy() - 2]
    tested.to_csv(tmp_path / "tested.csv", index=False)
    for arguments, words in (
        (["calibrate", houses / "run", "--data", houses / "houses.csv"], "calibration rows trained"),
        (["calibrate", houses / "run", "--data", tmp_path / "tested.csv"], "30 of 30 calibration rows are test rows"),
        (["predict", runs / "houses", "--input", table, "--output", tmp_path / "o.csv", "--monitor"], "has none"),
        ([*train, "2"], "below 1"),
        ([*train, "0.9", "--validation", "0"], "half of the validation rows"),
    ):
        text = command(*arguments, code=2)
        assert words in text and "Traceback" not in text, text


def test_calibrate_for_each_value_of_a_column(houses, command, tmp_path):
    run, table = houses / "run", small_table(tmp_path / "new.csv", rows=80, shift=1.5)
    text = command("calibrate", run, "--groups", "town", "--data", table)
    data, calibrated = RunFolder(run).recipe.load(), bp.load(run)
    low, high, *_ = bp.predict(calibrated, data.x_test).interval(0.8)
    inside = ((low <= data.y_test) & (data.y_test <= high)).numpy()
    content = json.loads((run / "guarantees.json").read_text())
    assert content["data"] == str(table)  # which `predict --monitor` reads again
    done = {row["rows"]: row for row in content["table"][1::2]}
    for name, rows in zip(("north", "south"), data.x_test[:, 1:].T > 0, strict=True):
        held, num = inside[rows].sum(), int(rows.sum())
        ends = stats.beta.ppf(0.025, held, num - held + 1), stats.beta.ppf(0.975, held + 1, num - held)
        found = [done[f"town {name}"][key] for key in ("covered", "covered_low", "covered_high")]
        np.testing.assert_allclose(found, [held / num, *np.nan_to_num(ends, nan=1.0)], rtol=1e-9)
        assert f"town {name}" in text and f"town {name}" in (run / "report.html").read_text()
    pd.read_csv(table).query("town == 'north'").to_csv(table, index=False)
    before = (run / "calibration.json").read_bytes()
    text = command("calibrate", run, "--groups", "town", "--data", table, code=2)
    assert "no calibration row has 'south' in column 'town'" in text
    assert (run / "calibration.json").read_bytes() == before


def test_recalibrated_figures_are_drawn(runs, houses, command, monkeypatch, tmp_path):
    drawn = {}
    monkeypatch.setattr("bnn_pyro.runs.evaluate.draw_all", lambda figures, folder: drawn.update(figures) or [])
    ways = (runs / "digits", "temperature", "reliability"), (houses / "run", "isotonic", "calibration")
    for of, method, name in ways:
        text = command("calibrate", shutil.copytree(of, tmp_path / name), "--method", method)
        assert f"recalibrated: {method}" in text and "most uncertain third" in text, text
        drawn.pop(f"{name}-recalibrated")()


# -- the first box says what matters: of rare classes, a skewed target, few rows, many columns ------------------------
