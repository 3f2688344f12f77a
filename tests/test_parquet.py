"""Parquet files are the tables that a frame or a CSV file of the same cells is."""

import sys

import numpy as np
import pandas as pd
import pytest
import torch

import bnn_pyro as bp


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


def test_what_is_wrong_names_the_way_out(table, tmp_path, monkeypatch):
    path, _ = table
    with pytest.raises(bp.UserError, match=r"column of .*did you mean 'price'"):
        bp.load_data(path, target="prize")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(bp.UserError, match="is no Parquet file, or damaged"):
        bp.load_data(tmp_path / "broken.parquet", target="price")
    for name in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(bp.UserError, match=r'pip install "bnn_pyro\[parquet\]"'):
        bp.load_data(path, target="price")
