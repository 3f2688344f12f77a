"""Named sets, the one split, standardisation by the training part, chunks of rows; and what bad requests get."""

import json
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from refused import refuses
from test_images import fake_images
from test_own_data import ARRAY, FRAME, PRICE

import bnn_pyro as bp
from bnn_pyro.datasets.dataset import PARTS
from bnn_pyro.datasets.prepare import mean_and_scale, row_texts
from bnn_pyro.datasets.tables import read_table, row_problems
from bnn_pyro.dates import find_dates


@pytest.mark.parametrize("name", bp.DATASETS)
def test_every_set_loads_with_the_promised_shapes_and_types(name, root):
    for folder in ("MNIST", "FashionMNIST", "KMNIST"):
        fake_images(root / folder)
    data = bp.load_data(name)
    schema = data.schema
    for part in ("train", "val", "test"):
        x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
        assert x.dtype == torch.float32 and tuple(x.shape) == (len(y), *schema.input_shape)
        assert y.dtype == (torch.float32 if schema.task == "regression" else torch.int64)
    assert data.split["rows"] == [len(data.y_train), len(data.y_val), len(data.y_test)]
    if schema.task == "classification":
        assert set(data.y_train.tolist()) == set(range(len(schema.classes)))
    written = json.loads(json.dumps(schema.to_dict()))
    assert bp.Schema.from_dict(written) == schema and written.pop("target_scale") == "identity"
    assert bp.Schema.from_dict(written) == schema  # of before there were scales


def test_toy_curve_is_the_six_points_and_breast_cancer_has_malignant_as_one():
    data = bp.load_data("breast-cancer", fractions=(0.5, 0, 0.5))
    labels = torch.cat([data.y_train, data.y_test])
    assert data.schema.classes == ("benign", "malignant") and len(labels) == 569 and labels.sum() == 212
    assert len(data.y_train) == 285 and len(data.y_val) == 0
    names = ["mean texture", "mean radius"]
    data = bp.load_data("breast-cancer", features=names)
    assert data.schema.features == tuple(names)
    torch.testing.assert_close(data.x_train, bp.load_data("breast-cancer").x_train[:, [1, 0]])
    assert bp.load_data("breast-cancer", features="mean radius").schema.features == ("mean radius",)
    assert bp.load_inputs("breast-cancer", data.schema).shape == (569, 2)
    data = bp.load_data("toy-curve")
    x, order = (found := data.schema.unstandardise(data.x_train)[:, 0]), found.argsort()
    torch.testing.assert_close(x[order], torch.tensor([-2.0, -1.8, -1.0, 1.0, 1.8, 2.0]))
    torch.testing.assert_close(data.y_train[order], torch.tensor([-3.0, 0.2224, 3.0, 3.0, 0.2224, -3.0]))
    grid = data.schema.unstandardise(data.x_test)[:, 0]
    assert len(data.x_val) == 0 and grid.min() >= -2.001 and grid.max() <= 2.001
    assert data.y_test[grid.abs().argmin()].item() == pytest.approx(1.0, abs=1e-4)
    assert data.y_test.max().item() == pytest.approx(3.25, abs=2e-3)  # at x² = 3/2


def test_the_split_is_reproducible_disjoint_and_stratified():
    first, same, other = (bp.load_data("breast-cancer", seed=s) for s in (0, 0, 1))
    assert all(torch.equal(getattr(first, part), getattr(same, part)) for part in PARTS)
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert first.fingerprint != replace(first, y_train=1 - first.y_train).fingerprint
    rows = [{tuple(r) for r in x.tolist()} for x in (first.x_train, first.x_val, first.x_test)]
    assert [len(r) for r in rows] == [399, 85, 85] and len(set.union(*rows)) == 569
    for y in (first.y_train, first.y_val, first.y_test):
        assert abs(y.float().mean().item() - 212 / 569) < 0.006


def test_statistics_are_those_of_the_training_part_alone_and_a_limit_keeps_its_first_rows():
    data, few = bp.load_data("diabetes"), bp.load_data("diabetes", limit=20)
    for part in (data, few):
        torch.testing.assert_close(part.x_train.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
        torch.testing.assert_close(part.x_train.std(0, correction=0), torch.ones(10), atol=1e-5, rtol=0)
        y = part.y_train.mean().item(), part.y_train.std(correction=0).item()
        assert (part.schema.y_shift, part.schema.y_scale) == pytest.approx(y, rel=1e-6)
    torch.testing.assert_close(few.y_train, data.y_train[:20])
    torch.testing.assert_close(few.y_test, data.y_test)
    assert bp.load_data("diabetes", validation=7).split["rows"] == [369, 7, 66]


def test_bad_requests_get_one_clear_line(root):
    for name, options, message in (
        ("mnits", {}, "unknown data set 'mnits'; did you mean 'mnist'"),
        ("houses.csv", {}, r"houses.csv: no such file"),
        ("breast-cancer", dict(features=["mean radios"]), "did you mean 'mean radius'"),
        ("digits", dict(features=["a"]), "digits holds images"),
        ("digits", dict(target="price"), "its target is 'digit', not 'price'"),
        ("toy-curve", dict(fractions=(0.5, 0, 0.5)), "its test part is given"),
        ("toy-curve", dict(validation=6), "validation=6 of 6 training rows"),
    ):
        refuses(message, bp.load_data, name, **options)


NOISE = np.random.default_rng(0)
TABLE = NOISE.normal(size=(90, 5)) * [1, 10, 1e-3, 20, 0] + [0, 50, 0, 2, 7]
PICTURES = NOISE.random((90, 4, 6, 3))
INPUTS = {
    **{f"table {kind}": TABLE.astype(kind) for kind in (">f4", "?")},
    "pictures f2": PICTURES.astype("f2"),
    "pictures u1": (PICTURES * 256).astype("u1"),
    "pictures of one grey": np.full((90, 4, 4), 0.3),
}


def archive(folder, x, y=None):
    path = folder / "rows.npz"
    np.savez(path, x=x, y=np.arange(len(x)) % 3 if y is None else y)
    return path


@pytest.mark.parametrize("kind", INPUTS)
def test_chunks_change_nothing(tmp_path, monkeypatch, kind):
    x, unit = INPUTS[kind], 255 if "u1" in kind else 1
    path = archive(tmp_path, x)
    whole = bp.load_data(path)
    outside = bp.load_inputs(path, whole.schema)
    monkeypatch.setattr(sys.modules["bnn_pyro.datasets.rows"], "CHUNK", 24)  # a few rows, or one
    parts = bp.load_data(path)
    for name in PARTS:
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-6, atol=1e-6)
    if x.ndim > 2:
        pixels = (whole.schema.unstandardise(whole.x_train) * unit).double()
        assert whole.schema.x_shift[0] * unit == pytest.approx(pixels.median().item(), abs=1e-4)
    assert unit == 1 or (parts.schema == whole.schema and parts.fingerprint == whole.fingerprint)
    assert torch.equal(bp.load_inputs(path, whole.schema), outside)  # with the same statistics the same bits
    np.testing.assert_allclose(parts.schema.x_scale, whole.schema.x_scale, rtol=1e-13)
    np.testing.assert_allclose(parts.schema.x_shift, whole.schema.x_shift, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("parts", [1, 13, 500])
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


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_values_that_differ_by_rounding_alone_are_on_the_scale_of_their_size(kind):
    shares = NOISE.dirichlet(np.ones(3), 200).astype(kind)
    sums = 4 * (shares[:, 0] + shares[:, 1] + shares[:, 2])
    _, scale = mean_and_scale([torch.from_numpy(np.stack([sums, sums + kind(1e-4) * shares[:, 0]], axis=1))])
    assert np.ptp(sums) > 0 and scale[0].item() == pytest.approx(4.0, rel=1e-6)
    assert scale[1].item() == pytest.approx(1e-4 * shares[:, 0].std(), rel=0.02)


def test_a_bad_value_is_told_with_its_place_and_rows_with_nan_are_dropped(tmp_path):
    table, pictures, y = TABLE.copy(), PICTURES.copy(), np.linspace(0, 1, 90)
    table[88, 1], table[89, 0], pictures[70, 2, 5, 1] = np.inf, np.nan, np.nan
    y[61] = np.nan
    for x, target, words in (
        (table, None, r"x\[88, 1\] is inf; correct or remove row 88 \(from 0\)$"),
        (pictures, None, r"x\[70, 2, 5, 1\] is nan; .* row 70 \(from 0\), as missing='drop'"),
        (TABLE, y, r"column 'y', row 61: missing value.*missing='drop'"),
    ):
        refuses(words, bp.load_data, archive(tmp_path, x, target))
    x = TABLE.copy()
    x[[0, 41, 89], [1, 4, 0]] = np.nan
    np.savez(tmp_path / "splits.npz", test_0=np.array([3, 41, 88]))
    path = archive(tmp_path, x, y)
    assert bp.load_data(path, drop_missing=True, splits=tmp_path / "splits.npz").split["rows"] == [84, 0, 2]
    data = bp.load_data(path, drop_missing=True)
    rows = torch.cat([getattr(data, name) for name in ("y_train", "y_val", "y_test")]).double().sort().values
    expected = np.delete(np.linspace(0, 1, 90), [0, 41, 61, 89])
    torch.testing.assert_close(rows, torch.from_numpy(expected), rtol=1e-6, atol=0)


# -- labels ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words", ["yes no", "Y n", "TRUE False", "ja nein", "t f", "oui non"])
def test_labels_and_new_rows_may_be_yes_and_no_in_any_spelling(words):
    word = dict(zip((True, False), words.split(), strict=True))
    labels = pd.DataFrame({"large": FRAME["area"] > 80, "flat": FRAME["flat"]})
    data, same = bp.dataset(ARRAY, labels.replace(word), seed=1), bp.dataset(ARRAY, labels, seed=1)  # booleans
    assert data.schema.task == same.schema.task == "labels" and data.fingerprint == same.fingerprint
    schema = bp.dataset(FRAME[["area"]].assign(flat=FRAME["flat"].astype(float)), PRICE).schema
    new = bp.load_inputs(FRAME[["area"]].assign(flat=FRAME["flat"].map(word)), schema)
    assert (new[:, 1] > 0).tolist() == FRAME["flat"].tolist()
    new = FRAME[["area"]].assign(flat=["perhaps", *FRAME["flat"].map(word)[1:]])
    refuses("column 'flat', row 0: 'perhaps' is not a number", bp.load_inputs, new, schema)


def test_numbers_of_classes_are_their_places_in_arrays_and_names_in_frames_that_have_them():
    names, labels = sorted(str(k) for k in range(11)), np.tile(np.arange(11), 6)  # as folders are: 0, 1, 10, 2, …
    x, test = np.random.default_rng(0).normal(size=(66, 2)), np.arange(66) >= 33
    data = bp.dataset(x, labels, classes=names, split=test)
    assert data.schema.classes[2] == "10" and data.y_test.tolist() == labels[33:].tolist()
    table = bp.dataset(pd.DataFrame(x), labels, classes=names, split=test)
    assert [table.schema.classes[k] for k in table.y_test] == [str(k) for k in labels[33:]]


MOMENTS = pd.date_range("2023-01-14 03:30", periods=60, freq="143h")


@pytest.mark.parametrize(
    "form", ["%Y-%m-%d %H:%M", "%d.%m.%Y %H:%M", "%m/%d/%Y %H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "frame"]
)
def test_dates_become_parts_or_elapsed_days_however_they_are_written(tmp_path, form):
    frame = FRAME[["area"]].assign(sold=MOMENTS if form == "frame" else MOMENTS.strftime(form), price=PRICE)
    year = (MOMENTS.day_of_year - 1) / 365.25 * 2 * np.pi
    hour = (MOMENTS.hour + MOMENTS.minute / 60) / 24 * 2 * np.pi
    parts = np.stack([MOMENTS.year, np.sin(year), np.cos(year), np.sin(hour), np.cos(hour)], 1)
    days = np.asarray((MOMENTS - pd.Timestamp("2023-01-14")) / pd.Timedelta(days=1))[:, None]
    frame.to_csv(tmp_path / "t.csv", index=False)
    for how, values in (("parts", parts), ("elapsed", days)):
        data = bp.dataset(frame, "price", dates=how, seed=3)
        raw = data.schema.unstandardise(data.x_test.double())[:, :-1]
        np.testing.assert_allclose(raw, values[data.index_test], atol=2e-3)
        schema = bp.Schema.from_dict(json.loads(json.dumps(data.schema.to_dict())))
        assert schema == data.schema
        torch.testing.assert_close(bp.load_inputs(frame.iloc[data.index_test], schema), data.x_test)
        table = bp.load_data(tmp_path / "t.csv", target="price", dates=how, seed=3)
        assert table.fingerprint == data.fingerprint and table.schema.features == data.schema.features
        torch.testing.assert_close(bp.load_inputs(tmp_path / "t.csv", schema)[data.index_test], data.x_test)
        form = "%Y-%m-%d" if form == "frame" else form[:8]
        written = MOMENTS[data.index_test.numpy()].strftime(f"{form} %H:%M")
        assert all(f"sold {day}" in row for day, row in zip(written, row_texts(data.x_test, schema), strict=True))
        days = pd.Series(pd.date_range("2023-12-31", "2025-01-02", freq="719min"))  # the ends of a leap year's days
        dates, texts = schema.dates[0], days.dt.strftime(f"{form} %H:%M")
        assert dates.texts(dates.numbers(texts).to_numpy(np.float32) - np.float32(1e-7)) == texts.tolist()


def test_dates_that_cannot_be_read_are_one_line(tmp_path):
    frame = FRAME[["area"]].assign(sold=MOMENTS.strftime("%d/%m/%Y"), price=PRICE)
    data = bp.dataset(frame, "price", dates="parts")
    assert data.schema.dates[0].order == "day" and len(data.schema.features) == 4
    late = pd.Series(["soon"] * 390 + frame["sold"].tolist() * 10)
    assert find_dates("", late, "elapsed").start == "2023-01-14" and find_dates("", late[:700]) is None
    assert find_dates("", pd.Series(["Block 1200-3", "Hall"] * 9)) is None  # which is no time with an offset
    for text in ("2024-11-16 02:04:05,5", "2024-11-16T02:04:05.5+02", "11/16/2024 2:04:05.5 a.m.",
                 "2024-11-16 02:04:05.5 UTC"):  # fmt: skip
        moment = find_dates("", pd.Series([text] * 9)).read(pd.Series([text])).item()
        assert moment == pd.Timestamp("2024-11-16 02:04:05.5")
    for rest in ("%d.%m.%Y", "%m/%d/%Y"):  # the first one has the year first, the others have not
        mixed = find_dates("", pd.Series(["2023-01-05", *MOMENTS.strftime(rest)]))
        assert mixed.form == rest and mixed.start == "" and mixed.read(pd.Series(["2023-01-05"])).notna().all()
    early = frame[MOMENTS.day <= 12].reset_index(drop=True)
    refuses("'sold', row 0: the day or the month may be first in '0", bp.dataset, early, "price", dates="parts")
    for value, words in (
        ("31/02/2024", "row 5: '31/02/2024' is no date such as 31/12/2024 or 2024-12-31"),
        ("", "'sold', row 5: missing"),
    ):
        new = frame.assign(sold=frame["sold"].where(frame.index != 5, value))
        refuses(words, bp.load_inputs, new, data.schema)
        refuses(words, bp.dataset, new, "price", dates="parts")
        new.to_csv(tmp_path / "new.csv", index=False)
        bad = row_problems(read_table(tmp_path / "new.csv", data.schema), data.schema)
        assert bad[bad != ""].to_dict() == {
            7: "sold is missing" if value == "" else f"sold: '{value}' is no date such as 31/12/2024 or 2024-12-31"
        }
    iso, real = (frame.assign(sold=MOMENTS.strftime("%Y-%m-%d")), frame.assign(sold=MOMENTS.normalize()))
    for unambiguous in (iso, real):
        assert torch.equal(bp.load_inputs(unambiguous, data.schema), bp.load_inputs(frame, data.schema))
    filled = bp.dataset(new, "price", dates="elapsed", missing="indicator").schema
    assert filled.features[:2] == ("sold in days since 2023-01-14", "sold in days since 2023-01-14 missing")
    texts = row_texts(bp.load_inputs(new.iloc[5:7], filled), filled)
    assert "sold missing" in texts[0] and "sold in" not in texts[0] and f"sold {frame['sold'][6]}" in texts[1]
    refuses("no column 'sold'", bp.load_inputs, frame[["area"]], data.schema)
    refuses(r"holds dates or times.*--dates parts or elapsed", bp.dataset, frame.assign(sold=MOMENTS), "price")


def test_a_robust_scale_is_that_of_the_rows_without_the_outlier():
    rows = FRAME[["area"]].assign(same=1.0, rare=np.arange(60) > 54)
    far = rows.assign(area=rows["area"].where(rows.index != 7, 1e6))
    train = np.setdiff1d(np.arange(60), np.arange(0, 30, 10))
    data = bp.dataset(far, PRICE, scale="robust", split=~np.isin(np.arange(60), train), validation=0)
    area = far["area"].to_numpy()[train]
    assert data.schema.x_shift[0] == pytest.approx(np.median(area))
    assert data.schema.x_scale[0] == pytest.approx(scipy.stats.iqr(area, scale="normal"))
    assert data.schema.x_scale[1:] == (1.0, 1.0, 1.0) and data.schema.x_shift[1:] == (1.0, 0.0, 0.0)
    refuses("scale=robust is for columns", bp.load_data, "digits", scale="robust")


@pytest.mark.parametrize("scale", ["standard", "robust"])
def test_among_several_inputs_series_are_standardised_by_column_and_frames_matched_by_name(scale):
    series, two = np.random.default_rng(0).normal(np.arange(5)[:, None], 1, (60, 5, 2)), FRAME[["area", "rooms"]]
    schema = bp.dataset({"s": series, "f": two}, PRICE, scale=scale, split=0.0, validation=0).schema
    one = bp.dataset(series.reshape(-1, 2), np.arange(300.0), scale=scale, split=0.0, validation=0).schema
    assert schema.x_shift[:10] == pytest.approx(5 * one.x_shift) and schema.x_scale[:10] == pytest.approx(
        5 * one.x_scale
    )
    ways = (two[["rooms", "area"]], two.to_numpy())
    assert torch.equal(*(bp.load_inputs({"f": way, "s": series}, schema) for way in ways))
    others = {"s": series, "f": two.set_axis(["area", "floors"], axis=1)}
    refuses(r"X\['f'\] has the columns area, floors; .* trained on area, rooms", bp.load_inputs, others, schema)


def test_rows_are_shown_with_the_digits_that_32_bits_keep():
    rare = np.where(np.arange(90) % 9, np.arange(90) % 80, 5_000_000)
    frame = pd.DataFrame({"rare": rare, "y": np.arange(90.0) ** 2})
    schema = bp.dataset(frame, "y").schema
    shown = row_texts(bp.load_inputs(frame[["rare"]], schema), schema)
    assert shown[2] == "rare 2" and shown[79] == "rare 79" and shown[0] == "rare 5e+06"


def test_rows_of_exactly_one_1_may_be_classes(capsys):
    x, y = np.random.default_rng(0).normal(size=(60, 2)), np.eye(3)[np.arange(60) % 3]
    for task, said in ((None, True), ("labels", False)):
        assert bp.dataset(x, y, task=task).schema.task == "labels"
        assert ("has exactly one 1; if they are classes" in capsys.readouterr().err) == said
