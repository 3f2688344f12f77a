"""Calibration from the command line: train --conformal, calibrate, predict with its columns and --monitor."""

import json

import pandas as pd
import pytest
from run_folders import SMALL, small_table

import bnn_pyro as bp
from bnn_pyro.run import main


@pytest.fixture(scope="module")
def houses(tmp_path_factory, quick):
    """A run of which half of the validation rows calibrated."""
    folder = tmp_path_factory.mktemp("calibrated")
    table = small_table(folder / "houses.csv", rows=200)
    how = ["--data", str(table), "--target", "price", "--conformal", "0.8", "--no-baseline", "--out"]
    assert main(["train", "mean-field", *how, str(folder / "run"), *SMALL]) == 0
    return folder


def said(capsys, *arguments):
    code = main([*map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out + out.err


def test_train_sets_half_of_the_validation_rows_aside(houses, capsys):
    run = houses / "run"
    assert json.loads((run / "config.json").read_text())["conformal"] == 0.8
    meta, done = (json.loads((run / name).read_text()) for name in ("posterior.json", "guarantees.json"))
    assert meta["provenance"]["rows"]["val"] == 15 and done["calibration_rows"] == 15 and done["level"] == 0.8
    assert [row["prediction"] for row in done["table"][:2]] == ["predictive", "conformal: normalised"]
    assert [row["rows"] for row in done["table"][::2]] == ["all test rows", *(
        "least uncertain third", "middle third", "most uncertain third")]  # fmt: skip
    for row in done["table"]:
        assert 0 <= row["covered_low"] <= row["covered"] <= row["covered_high"] <= 1
    page = (run / "report.html").read_text()
    assert "<h2>Guarantees</h2>" in page and "exchangeable with the 15 calibration rows" in page
    assert bp.load(run).provenance["calibration"] == {"methods": ["normalised"], "rows": 15}
    code, text = said(capsys, "evaluate", run, "--quiet")
    assert code == 0 and "conformal: normalised" in text


def test_predictions_have_intervals_and_rows_are_monitored(houses, capsys):
    for name, shift in (("same", 0), ("other", 500)):
        frame = pd.read_csv(small_table(houses / f"{name}.csv", rows=120))
        frame.assign(area=frame.area + shift).to_csv(houses / f"{name}.csv", index=False)
        out = houses / f"{name}-out.csv"
        code, text = said(capsys, "predict", houses / "run", "--input", houses / f"{name}.csv", "--output", out,
                          "--monitor", "--overwrite", "--quiet")  # fmt: skip
        assert code == 0 and ("ALARM  inputs" in text) == (name == "other"), text
        table = pd.read_csv(out)
        assert {"mean", "low", "high", "share_as_uncertain"} <= {*table} and (table.low < table.high).all()
        assert (table.share_as_uncertain.median() < 0.1) == (name == "other")


def test_calibrate_a_run_by_other_rows(runs, houses, capsys, tmp_path):
    table = small_table(tmp_path / "new.csv", rows=80, shift=1.5)
    code, text = said(
        capsys, "calibrate", houses / "run", "--method", "cqr", "--level", "0.9", "--data", table, "--quiet"
    )
    assert code == 0 and "conformal: cqr" in text and "the 80 calibration rows" in text
    code, text = said(capsys, "calibrate", houses / "run", "--by-uncertainty", "--data", table, "--quiet")
    assert code == 0 and "the calibration rows of its group (80 in all groups)" in text
    assert len(set(bp.load(houses / "run").conformal.groups)) == 3
    train = ["train", "mean-field", "--data", table, "--target", "price", "--out", tmp_path / "x", "--conformal"]
    for arguments, words in (
        (["calibrate", houses / "run", "--method", "lac"], "is for classification"),
        (["calibrate", houses / "run", "--level", "1.5"], "strictly between 0 and 1"),
        (["calibrate", houses / "run", "--data", houses / "houses.csv"], "calibration rows trained"),
        (["predict", runs / "houses", "--input", table, "--output", tmp_path / "o.csv", "--monitor"], "has none"),
        ([*train, "2"], "below 1"),
        ([*train, "0.9", "--validation", "0"], "half of the validation rows"),
    ):
        code, text = said(capsys, *arguments, "--quiet")
        assert code == 2 and words in text and "Traceback" not in text, text


def test_sets_and_recalibrated_figures_are_written(runs, houses, capsys, monkeypatch):
    drawn = {}
    monkeypatch.setattr("bnn_pyro.runs.evaluate.draw_all", lambda figures, folder: drawn.update(figures) or [])
    for run, method, kind, figure in (
        (runs / "digits", "aps", "conformal", ""),
        (runs / "digits", "temperature", "recalibrated", "reliability-recalibrated"),
        (houses / "run", "isotonic", "recalibrated", "calibration-recalibrated"),
    ):
        drawn.clear()
        code, text = said(capsys, "calibrate", run, "--method", method, "--quiet")
        assert code == 0 and f"{kind}: {method}" in text and "most uncertain third" in text, text
        assert [name for name in drawn if name.endswith("recalibrated")] == [figure] * bool(figure)
        if figure:
            drawn[figure]()
    for name in ("calibration.json", "guarantees.json"):
        (runs / "digits" / name).unlink()
