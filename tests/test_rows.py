"""Data sets that are worked on a chunk at a time: the same bits, the same errors, little more memory than they take."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bnn_pyro.datasets import load_data, load_inputs, rows
from bnn_pyro.datasets.rows import chunks, mean_and_scale, median, standardised, taken
from bnn_pyro.errors import UserError

PARTS = ("x_train", "y_train", "x_val", "y_val", "x_test", "y_test")
NOISE = np.random.default_rng(0)
TABLE = NOISE.normal(size=(90, 5)) * [1, 10, 1e-3, 20, 0] + [0, 50, 0, 2, 7]
PICTURES = NOISE.random((90, 4, 6, 3))
INPUTS = {
    **{f"table {kind}": TABLE.astype(kind) for kind in ("f2", "f4", ">f4", "f8", "i4", "u2", "?")},
    "table by columns": np.asfortranarray(TABLE),
    **{f"pictures {kind}": PICTURES.astype(kind) for kind in ("f2", "f4", ">f8")},
    "pictures u1": (PICTURES * 256).astype("u1"),
    "grey pictures": PICTURES[..., 0],
    "pictures of one grey": np.full((90, 4, 4), 0.3),
}


def archive(folder, x, y=None):
    path = folder / "rows.npz"
    np.savez(path, x=x, y=np.arange(len(x)) % 3 if y is None else y)
    return path


@pytest.fixture
def small(monkeypatch):
    """Makes chunks small: a few rows, or one."""
    return lambda values=24: monkeypatch.setattr(rows, "CHUNK", values)


# -- the same as all at once -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", INPUTS)
def test_chunks_change_nothing(tmp_path, small, kind):
    x = INPUTS[kind]
    path = archive(tmp_path, x)
    whole = load_data(path)
    outside = load_inputs(path, whole.schema)
    small()
    parts = load_data(path)
    assert (parts.split, parts.source, parts.schema.input_shape) == (
        whole.split,
        whole.source,
        whole.schema.input_shape,
    )
    for name in PARTS:
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-6, atol=1e-6)
    if "u1" in kind:
        assert parts.schema == whole.schema and parts.fingerprint == whole.fingerprint
    assert torch.equal(load_inputs(path, whole.schema), outside)  # with the same statistics the same bits
    np.testing.assert_allclose(parts.schema.x_scale, whole.schema.x_scale, rtol=1e-13)
    np.testing.assert_allclose(parts.schema.x_shift, whole.schema.x_shift, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("values", [1, 7, 64, 10**6])
def test_standardised_rows_have_the_bits_of_the_formula(small, values):
    schema = load_data("diabetes").schema
    x, order = torch.from_numpy(NOISE.normal(size=(50, 10))) + 40, torch.from_numpy(NOISE.permutation(50)[:31])
    small(values)
    shift, scale = (torch.tensor(v, dtype=torch.float64) for v in (schema.x_shift, schema.x_scale))
    assert torch.equal(standardised(x, schema, rows=order), ((x[order] - shift) / scale).float())
    assert torch.equal(standardised(x.float(), schema), ((x.float().double() - shift) / scale).float())
    assert torch.equal(torch.cat([torch.arange(50)[part] for part in chunks(50, (10,))]), torch.arange(50))
    assert torch.equal(torch.cat(list(taken(x, order))), x[order])


def test_no_rows_are_no_rows():
    schema = load_data("diabetes").schema
    assert standardised(torch.empty(0, 10), schema).shape == (0, 10)
    assert standardised(torch.ones(4, 10), schema, rows=torch.arange(0)).shape == (0, 10)


# -- statistics --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("parts", [1, 2, 13, 500])
def test_mean_and_scale_are_exact_however_the_rows_come(parts):
    """Seconds since 1970, one apart; a large and a small column; one that is constant; against 80-bit numbers."""
    columns = [NOISE.permutation(1000) + 1.7e9, NOISE.normal(size=1000) * 1e12, np.full(1000, 0.1), NOISE.random(1000)]
    x = torch.from_numpy(np.stack(columns, axis=1))
    mean, scale = mean_and_scale(x.tensor_split(parts))
    exact = x.numpy().astype(np.longdouble)
    np.testing.assert_allclose(mean.numpy(), exact.mean(0).astype(float), rtol=1e-14)
    np.testing.assert_allclose(scale.numpy()[[1, 3]], exact.std(0).astype(float)[[1, 3]], rtol=1e-13)
    assert scale[0].item() == pytest.approx(exact.std(0)[0].astype(float), rel=1e-9)  # of 16 digits 7 are the offset's
    assert scale[2] == 1.0


def test_one_part_has_the_bits_of_torch():
    x = torch.from_numpy(TABLE)[:, :4].float()
    mean, scale = mean_and_scale([x])
    assert torch.equal(mean, x.double().mean(0)) and torch.equal(scale, x.double().std(0, correction=0))


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1001])
def test_the_median_is_that_of_torch(small, count):
    """Among ties, ones, the smallest numbers and a negative zero."""
    values = [0.0, -0.0, 1.0, 1e-45, 1e-38, 0.3, 0.3, np.nextafter(np.float32(0.3), np.float32(1))]
    for x in (NOISE.random(count), NOISE.choice(values, count), NOISE.choice([0.0, 1.0], count)):
        x = torch.from_numpy(x).float()
        for size in (10**6, 4):
            small(size)
            assert median(x, torch.arange(count)) == x.median().item()


# -- errors ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("values", [1, 24, 10**6])
def test_a_bad_value_is_told_with_its_place(tmp_path, small, values):
    small(values)
    table, pictures = TABLE.copy(), PICTURES.copy()
    table[88, 1], table[89, 0], pictures[70, 2, 5, 1] = np.inf, np.nan, np.nan
    with pytest.raises(UserError, match=r"x\[88, 1\] is inf; correct or remove row 88 \(from 0\)$"):
        load_data(archive(tmp_path, table))
    with pytest.raises(UserError, match=r"x\[70, 2, 5, 1\] is nan; .* row 70 \(from 0\), or train with drop_missing"):
        load_data(archive(tmp_path, pictures))
    y = np.linspace(0, 1, 90)
    y[61] = np.nan
    with pytest.raises(UserError, match=r"y\[61\] is nan"):
        load_data(archive(tmp_path, TABLE, y))


@pytest.mark.parametrize("values", [1, 24, 10**6])
def test_rows_with_nan_are_dropped_from_every_chunk(tmp_path, small, values):
    small(values)
    x, y = TABLE.copy(), np.linspace(0, 1, 90)
    x[[0, 41, 89], [1, 4, 0]], y[60] = np.nan, np.nan
    data = load_data(archive(tmp_path, x, y), drop_missing=True)
    kept = torch.cat([getattr(data, name) for name in ("y_train", "y_val", "y_test")]).double().sort().values
    expected = np.delete(np.linspace(0, 1, 90), [0, 41, 60, 89])
    torch.testing.assert_close(kept, torch.from_numpy(expected), rtol=1e-6, atol=0)


# -- memory ------------------------------------------------------------------------------------------------------------
MEASURE = """
import sys
from pathlib import Path
from bnn_pyro.datasets import load_data

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

load_data(sys.argv[1])  # what is imported on the way
before = peak()
data = load_data(sys.argv[2])
held = peak()
assert data.fingerprint
print(held - before, peak() - held)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_large_file_takes_twice_its_size_to_load(tmp_path):
    """The file's array and the standardised rows; then their fingerprint, of which no copy is made."""
    (tmp_path / "few").mkdir()
    few = archive(tmp_path / "few", np.arange(80.0).reshape(40, 2))
    many = archive(tmp_path, NOISE.standard_normal((12_500, 2048), dtype=np.float32))
    command = [sys.executable, "-c", MEASURE, few, many]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    size = many.stat().st_size
    assert int(told[0]) < 3 * size and int(told[1]) < 0.1 * size, [int(n) / size for n in told]
