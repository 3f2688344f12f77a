"""Parquet files are the tables that a frame or a CSV file of the same cells is."""

import sys

import numpy as np
import pandas as pd
import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.run import main


@pytest.fixture
def table(tmp_path):
    pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"area": rng.normal(80, 20, 90), "city": rng.choice(["Oslo", "Rome"], 90)})
    frame = frame.assign(zone=rng.integers(1, 4, 90), flat=rng.random(90) < 0.5, price=frame["area"] * 3)
    frame.to_parquet(tmp_path / "houses.parquet")
    frame.to_csv(tmp_path / "houses.csv", index=False)
    return tmp_path / "houses.parquet", frame


def test_a_file_is_the_frame_and_the_csv(table):
    path, frame = table
    data = bp.load_data(path, target="price", categorical=["zone"])
    for other in (bp.load_data(path.with_suffix(".csv"), target="price", categorical=["zone"]),
                  bp.dataset(frame.astype({"zone": "category"}), "price")):  # fmt: skip
        assert data.schema == other.schema
        torch.testing.assert_close(data.x_test, other.x_test)
        torch.testing.assert_close(data.y_train, other.y_train)
    torch.testing.assert_close(bp.load_inputs(path, data.schema), bp.load_inputs(path.with_suffix(".csv"), data.schema))


def test_commands_take_it_and_say_what_is_wrong(table, tmp_path, capsys):
    path, frame = table
    run, out = str(tmp_path / "run"), tmp_path / "p.csv"
    train = ["train", "mlp", "--data", str(path), "--quiet", "--no-baseline", "--device", "cpu", "--epochs", "20"]
    assert main([*train, "--target", "prize", "--out", run]) == 2
    assert "column of" in (error := capsys.readouterr().err) and "did you mean 'price'" in error
    assert main([*train, "--target", "price", "--out", run]) == 0
    assert main(["predict", run, "--input", str(path), "--output", str(out), "--quiet"]) == 0
    assert len(pd.read_csv(out)) == len(frame)
    assert main(["evaluate", run, "--data", str(path), "--quiet"]) == 0
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(bp.UserError, match="is no Parquet file, or damaged"):
        bp.load_data(tmp_path / "broken.parquet", target="price")


def test_without_pyarrow_the_way_out_is_named(tmp_path, monkeypatch):
    for name in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(bp.UserError, match=r'pip install "bnn_pyro\[parquet\]"'):
        bp.load_data(tmp_path / "x.parquet", target="y")
