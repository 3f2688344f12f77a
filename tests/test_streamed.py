"""Rows in files, of arrays or Parquet, give what rows in memory give, bit for bit; so do processes that read ahead."""

import os
import pickle
import signal
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from monte_carlo import interrupted, same
from PIL import Image
from refused import refuses
from torchvision.datasets import ImageFolder

import bnn_pyro as bp
from bnn_pyro.datasets.rows import Rows
from bnn_pyro.inference.mini_batches import MiniBatches


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """x.npy with y.npy, and table.npy of both with the target as its third column."""
    folder, generator = tmp_path_factory.mktemp("arrays"), np.random.default_rng(0)
    x = (generator.standard_normal((300, 4)) * [1, 5, 0.1, 3] + 7).astype(np.float32)
    y = x[:, 0] - x[:, 3] / 3 + generator.standard_normal(300).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    np.save(folder / "table.npy", np.insert(x, 2, y, 1))
    return folder


@pytest.fixture
def both(monkeypatch):
    """``make()`` in memory, and with rows that stay in their file."""

    def both(make):
        monkeypatch.delenv("BNN_PYRO_MEMORY", raising=False)
        in_memory = make()
        monkeypatch.setenv("BNN_PYRO_MEMORY", "1e-9")
        return in_memory, make()

    return both


def alike(data, streamed):
    assert isinstance(data.x_train, torch.Tensor) and isinstance(streamed.x_train, Rows)
    assert data.schema == streamed.schema and data.fingerprint == streamed.fingerprint
    for part in ("train", "val", "test"):
        x, rows = getattr(data, f"x_{part}"), getattr(streamed, f"x_{part}")
        assert rows.shape == x.shape and torch.equal(rows[:], x) and torch.equal(torch.cat([*rows.split(7)]), x)
        assert torch.equal(rows[torch.tensor([[3, 1], [0, 3]])], x[torch.tensor([[3, 1], [0, 3]])])
        assert torch.equal(getattr(streamed, f"y_{part}"), getattr(data, f"y_{part}"))


def test_files_of_arrays_stream_the_rows_that_they_hold(files, both):
    data, streamed = both(lambda: bp.load_data(files / "x.npy"))
    alike(data, streamed)
    again = pickle.loads(pickle.dumps(streamed.x_train))
    assert len(pickle.dumps(streamed.x_train.source)) < 1000 and torch.equal(again[:5], data.x_train[:5])
    alike(data, bp.dataset(np.load(files / "x.npy", mmap_mode="r"), np.load(files / "y.npy")))
    table, streamed = both(lambda: bp.load_data(files / "table.npy", target="x3", features=["x5", "x1"]))
    alike(table, streamed)
    assert table.schema.features == ("x5", "x1") and table.schema.target == "x3"
    assert torch.equal(table.x_test, data.x_test[:, [3, 0]]) and torch.equal(table.y_test, data.y_test)


FITS = {
    "svi": ("mean-field", bp.SVI(epochs=2, batch_size=32), {}),
    "map by held-out rows": ("mlp", bp.MAP(epochs=3, batch_size=32, patience=2), {"validation": 0}),
    "ensemble": ("mlp", bp.Ensemble(epochs=2, batch_size=32, members=2, cores=1), {"validation": 40}),
    "sghmc": ("mean-field", bp.SGHMC(start="jitter", epochs=3, batch_size=32, chains=2), {"validation": 40}),
}


@pytest.mark.parametrize(("variant", "method", "validation"), FITS.values(), ids=FITS)
def test_streamed_rows_give_the_same_posterior(variant, method, validation, files, both):
    x, y = np.load(files / "x.npy", mmap_mode="r"), np.load(files / "y.npy")
    pair = both(lambda: bp.dataset(x, y, split=0.2, **validation))
    first, second = (bp.fit(variant, data, method, seed=3, device="cpu", progress=False) for data in pair)
    assert first.provenance["key"] == second.provenance["key"] and torch.equal(first.rows, second.rows)
    a, b = (posterior.draw(3, seed=0) for posterior in (first, second))
    assert all(torch.equal(a[site], b[site]) for site in a)
    means = [bp.predict(p, d.x_test, num_draws=3).mean for p, d in zip((first, second), pair, strict=True)]
    assert torch.equal(*means)


def test_a_streamed_fit_goes_on_at_the_row_where_it_stopped(files, both, tmp_path):
    """Also where its rows are then in memory."""
    data, streamed = both(lambda: bp.load_data(files / "x.npy"))
    fit = dict(seed=1, device="cpu", progress=False)
    method = bp.SVI(epochs=3, batch_size=32)
    whole = bp.fit("mean-field", data, method, **fit)
    for rows, step in ((streamed, 9), (data, 3)):
        with interrupted(step):
            bp.fit("mean-field", rows, method, out=tmp_path, resume=True, **fit)
    assert same(bp.fit("mean-field", streamed, method, out=tmp_path, resume=True, **fit), whole)


def test_pictures_larger_than_memory_are_read_once_into_a_file(both, tmp_path, monkeypatch):
    monkeypatch.setenv("BNN_PYRO_CACHE", str(tmp_path / "cache"))
    generator = np.random.default_rng(0)
    for number in range(40):
        place = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (5, 6, 3), np.uint8)).save(place)
    data, streamed = both(lambda: bp.dataset(ImageFolder(tmp_path / "photos")))
    alike(data, streamed)
    assert list((tmp_path / "cache").iterdir())
    floats = [(torch.from_numpy(generator.random((1, 4, 4), np.float32)), k % 2) for k in range(40)]
    alike(*both(lambda: bp.dataset(torch.utils.data.Subset(floats, range(40)))))
    larger = torch.utils.data.Subset([*floats, (torch.zeros(1, 4, 5), 0)], range(41))
    refuses(r"X\[40\] is float32 \(1, 4, 5\).*resize", bp.dataset, larger)


def test_what_takes_all_rows_says_how_much_memory_that_is(files, both):
    data = both(lambda: bp.load_data(files / "x.npy"))[1]
    for variant, method, what in (
        ("mean-field", "nuts", "nuts takes all 210 training rows at once, 3.13e-06 GiB"),
        ("mean-field", bp.SGHMC(batch_size=0), "batch_size=0 takes all"),
        ("last-layer", "svi", "a backbone takes all"),
    ):
        refuses(f"{what}.*svi", bp.fit, variant, data, method, progress=False)


def test_bad_files_of_arrays_get_one_line(files, tmp_path, monkeypatch):
    x, y, table = (np.load(files / f"{name}.npy") for name in ("x", "y", "table"))
    x[250, 2] = np.nan
    monkeypatch.setenv("BNN_PYRO_MEMORY", "1e-9")
    arrays = {"x": x, "y": y, "f_x": np.asfortranarray(x), "f_y": y, "s_x": y, "s_y": y[:9], "table": table}
    for name, values in arrays.items():
        np.save(tmp_path / f"{name}.npy", values)
    (tmp_path / "broken.npy").write_bytes(b"no array")
    for name, how, message in (
        ("x.npy", {}, r"x\[250, 2\] is nan; correct or remove row 250"),
        ("x.npy", {"missing": "drop"}, "no rows are dropped"),
        ("f_x.npy", {}, "Fortran's order"),
        ("s_x.npy", {}, r"it must be \(N, features\)"),
        ("broken.npy", {}, "is no NPY file"),
        ("table.npy", {"target": "x9"}, "no column 'x9'"),
    ):
        refuses(message, bp.load_data, tmp_path / name, **how)
    monkeypatch.setenv("BNN_PYRO_MEMORY", "much")
    refuses("BNN_PYRO_MEMORY is a number of GiB", bp.load_data, files / "x.npy")


@pytest.fixture
def table(tmp_path):
    pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"area": rng.normal(80, 20, 90), "city": rng.choice(["Oslo", "Rome"], 90)})
    frame = frame.assign(zone=rng.integers(1, 4, 90), flat=rng.random(90) < 0.5, price=frame["area"] * 3)
    frame.to_parquet(tmp_path / "houses.parquet")
    frame.to_csv(tmp_path / "houses.csv", index=False)
    return tmp_path / "houses.parquet", frame


def test_a_parquet_file_is_the_frame_and_the_csv_and_what_is_wrong_with_it_names_the_way_out(table, monkeypatch):
    path, frame = table
    data = bp.load_data(path, target="price", categorical=["zone"])
    for other in (bp.load_data(path.with_suffix(".csv"), target="price", categorical=["zone"]),
                  bp.dataset(frame.astype({"zone": "category"}), "price")):  # fmt: skip
        assert data.schema == other.schema
        torch.testing.assert_close(data.x_test, other.x_test)
        torch.testing.assert_close(data.y_train, other.y_train)
    torch.testing.assert_close(bp.load_inputs(path, data.schema), bp.load_inputs(path.with_suffix(".csv"), data.schema))
    refuses(r"column of .*did you mean 'price'", bp.load_data, path, target="prize")
    frame.assign(when=pd.date_range("2020", periods=len(frame))).to_parquet(path)  # dates are text, as in CSV
    refuses("column 'when' holds .* --dates parts or elapsed", bp.load_data, path, target="price", categorical=["zone"])
    without = bp.load_data(path, target="price", categorical=["zone"], exclude=["when"])
    assert without.fingerprint == data.fingerprint
    assert torch.equal(bp.load_inputs(path, data.schema), bp.load_inputs(path.with_suffix(".csv"), data.schema))
    path.write_bytes(b"PAR1 nothing")
    refuses("is no Parquet file, or damaged", bp.load_data, path, target="price")
    for name in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, name, None)
    refuses(r'pip install "bnn_pyro\[parquet\]"', bp.load_data, path, target="price")


def test_a_large_parquet_file_of_numbers_stays_on_disk(table, both, tmp_path, monkeypatch):
    path, frame = tmp_path / "n.parquet", table[1].drop(columns=["city", "flat"])
    monkeypatch.setenv("BNN_PYRO_CACHE", str(tmp_path / "cache"))
    frame.to_parquet(path, row_group_size=16)
    alike(*both(lambda: bp.load_data(path, target="price", exclude=["zone"])))
    assert isinstance(bp.load_data(table[0], target="price").x_train, torch.Tensor)  # one of text is read whole
    frame.assign(area=frame["area"].where(frame.index != 40)).to_parquet(path)
    refuses(r"n.parquet: x\[40, 0\] is nan; correct or remove row 40", bp.load_data, path, target="price")


# -- augmentation drawn anew in every step, and processes that read ahead ------------------------------------------
RNG = np.random.default_rng(0)
DATA = bp.dataset(RNG.integers(0, 255, (60, 6, 6), dtype=np.uint8), np.arange(60) % 2, split=0, validation=12)
METHOD = bp.SVI(epochs=5, batch_size=16, patience=3)
KILL = {"process": 0}


def noisy(x):
    assert x.shape == (1, 6, 6) and x.min() >= 0 and x.max() <= 1
    return x + 0.3 * torch.rand(()) + 0.1 * np.random.rand()  # noqa: NPY002 (the generator that Pyro seeds)


def killed(x):
    """Ends the process that reads, once."""
    if KILL["process"] not in (0, os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def loc(method, **how):
    return bp.fit(bp.MeanField(hidden=(4,)), DATA, method, progress=False, device="cpu", **how).guide.loc


def test_it_is_drawn_anew_and_the_same_by_any_number_of_processes():
    batches = MiniBatches(DATA, 0, METHOD.__class__(augment=noisy).augment)
    (first, y), (again, _), (other, _) = (batches[step, slice(4)] for step in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other) and torch.equal(y, DATA.y_train[:4])
    difference = (DATA.schema.unstandardise(first) - DATA.schema.unstandardise(DATA.x_train[:4])).flatten(1)
    assert (difference.std(1) < 1e-5).all() and difference.mean(1).unique().numel() == 4
    augmented = replace(METHOD, augment=noisy)
    expected = loc(augmented)
    assert not torch.equal(expected, loc(METHOD))
    assert torch.equal(expected, loc(replace(augmented, workers=2)))
    assert torch.equal(loc(METHOD), loc(replace(METHOD, workers=1)))


def test_a_process_that_dies_is_said_and_a_bad_function_is_named():
    KILL["process"] = os.getpid()
    refuses("reads mini-batches died .* set workers to 0", loc, replace(METHOD, augment=killed, workers=1))
    refuses("augment: .* makes .1, 3, 6. of .1, 6, 6.", loc, replace(METHOD, augment=lambda x: x[:, :3]))
    refuses("augment: .* failed: .*division", loc, replace(METHOD, augment=lambda x: x / (1 // 0)))
    refuses("there is no nowhere:flip", loc, replace(METHOD, augment="nowhere:flip"))


@pytest.mark.parametrize("kind", ["images", "numbers", "one column", "two columns"])
def test_a_run_of_rows_in_a_file_is_evaluated_and_has_its_report(kind, tmp_path, command, monkeypatch):
    generator = np.random.default_rng(0)
    shape = {"images": (80, 6, 6), "one column": (80, 1), "two columns": (80, 2)}.get(kind, (80, 3))
    np.save(tmp_path / "x.npy", x := generator.random(shape).astype(np.float32))
    y = x.reshape(80, -1)[:, 0]
    np.save(tmp_path / "y.npy", (y > 0.5).astype(np.int64) if kind in ("images", "two columns") else y)
    monkeypatch.setenv("BNN_PYRO_MEMORY", "1e-9")
    out = tmp_path / "run"
    command("train", "mean-field", "--data", tmp_path / "x.npy", "--out", out, "--hidden", 4, "--epochs", 2,
            "--batch-size", 20, "--no-baseline")  # fmt: skip
    assert (out / "report.html").is_file() and (out / "metrics.json").is_file()
