"""A user's own tables, given splits, rows to predict; and what bad ones get."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from refused import refuses

from bnn_pyro.cells import MISSING, parsed
from bnn_pyro.csv_files import read_cells
from bnn_pyro.datasets import Column, load_data, read_rows
from bnn_pyro.datasets.tables import encode_rows


def table(path, num=40, **columns):
    """A table of num rows: rooms (numbers), city (two texts), price (numbers), changed by columns."""
    cells = {
        "rooms": [i % 7 + 0.5 for i in range(num)],
        "city": ["Oslo" if i % 3 else "Bergen" for i in range(num)],
        "price": [100.0 + 2.5 * i for i in range(num)],
    } | columns
    pd.DataFrame(cells).to_csv(path, index=False)
    return path


def test_a_table_becomes_numbers_and_one_hot_features(tmp_path):
    data = load_data(table(tmp_path / "houses.csv"), target="price", features=["city", "rooms"])
    schema = data.schema
    assert (data.name, schema.task, schema.target) == ("houses", "regression", "price")
    assert schema.features == ("city=Bergen", "city=Oslo", "rooms")
    assert schema.x_shift[:2] == (0.0, 0.0) and schema.x_scale[:2] == (1.0, 1.0)
    assert data.split["rows"] == [28, 6, 6]
    raw = schema.unstandardise(data.x_train)
    assert set(raw[:, 0].tolist()) == {0.0, 1.0} and torch.equal(raw[:, 0] + raw[:, 1], torch.ones(28))
    row = ((data.y_train - 100) / 2.5).round().int()  # the price tells which row it was
    torch.testing.assert_close(raw[:, 2], row % 7 + 0.5)
    assert torch.equal(raw[:, 0] == 1, row % 3 == 0)


def test_the_task_is_inferred_and_classes_are_in_the_order_of_numbers_or_letters(tmp_path):
    few = [["yes", "no"] * 20, [1.0, 2.0] * 20, [True, False] * 20, [*range(5)] * 8, [0] * 20 + [1] * 18 + [2] * 2]
    many = [[*range(10)] * 4, [0] * 20 + [1] * 19 + [2], [0.5, 1.5] * 20, [*range(40)]]
    for task, targets in (("classification", few), ("regression", many)):
        for cells in targets:
            assert load_data(table(tmp_path / "t.csv", price=cells), target="price").schema.task == task, cells
    numbers = load_data(table(tmp_path / "a.csv", price=[10, 9, 2, 9] * 10), target="price", task="classification")
    texts = load_data(table(tmp_path / "b.csv", price=["no", "yes"] * 20), target="price")
    assert numbers.schema.classes == ("2", "9", "10") and texts.schema.classes == ("no", "yes")
    halves = load_data(table(tmp_path / "c.csv", price=[1.5, 0.5, 1.0, 0] * 10), target="price", task="classification")
    assert halves.schema.classes == ("0", "0.5", "1", "1.5")
    counts = sum(torch.bincount(getattr(numbers, f"y_{p}"), minlength=3) for p in ("train", "val", "test"))
    assert counts.tolist() == [10, 20, 10]


def test_tabs_semicolons_blank_lines_a_byte_order_mark_and_paths_under_the_data_root_are_read(tmp_path, root):
    expected = load_data(table(tmp_path / "t.csv"), target="price")
    text = (tmp_path / "t.csv").read_text()
    (tmp_path / "t.tsv").write_text(text.replace(",", "\t"))
    (tmp_path / "s.csv").write_text("\ufeff" + text.replace(",", ";").replace("\n", "\n\n"), encoding="utf-8")
    for name in ("t.tsv", "s.csv"):
        assert load_data(tmp_path / name, target="price").fingerprint == expected.fingerprint
    (root / "uci").mkdir()
    table(root / "uci" / "t.csv")
    for name in ("uci/t.csv", "$BNN_PYRO_DATA/uci/t.csv"):
        assert load_data(name, target="price").name == "t"


def test_a_column_may_divide_the_rows_of_a_file(tmp_path):
    path = table(tmp_path / "t.csv", age=[i % 7 for i in range(40)])
    for way in ("time", "groups"):
        data = load_data(path, target="price", fractions=(0.6, 0.0, 0.4), **{way: "age"})
        train, test = ({(int(r) - 2) % 7 for r in rows} for rows in (data.index_train, data.index_test))
        assert not train & test and len(train | test) == 7 and not len(data.y_val)
        assert (way == "groups" or train == {0, 1, 2, 3}) and "age" not in data.schema.features
    for bad, match in (
        ({"validation": 5}, "fractions"), ({"groups": "ages"}, "did you mean 'age'"),
        ({"groups": "price"}, "is the target"), ({"missing": "indicator", "drop_missing": True}, "leave it out"),
        *(({"fractions": f}, "three shares .* sum to 1") for f in ((0.5, 0.5), (0.5, 0.2, 0.2), ("a", 1, 2))),
    ):  # fmt: skip
        refuses(match, load_data, path, **{"target": "price", "groups": "age", **bad})
    refuses("time is for tables", load_data, "digits", time="age")


def test_a_constant_column_gets_scale_one_and_a_large_offset_keeps_its_digits(tmp_path):
    """Seconds since 1970, one apart: 32 bits would make them all alike."""
    seconds = [1_700_000_000 + i for i in range(40)]
    data = load_data(table(tmp_path / "t.csv", rooms=[0.1] * 40, age=seconds, city=seconds), target="price")
    constant, *offset = data.x_train.T
    assert data.schema.x_scale[0] == 1.0 and constant.abs().max() < 1e-6
    assert all(len(column.unique()) == 28 for column in offset)
    torch.testing.assert_close(torch.stack(offset).std(1, correction=0), torch.ones(2))


def test_given_splits_decide_the_test_rows(tmp_path):
    """They count the rows of the file, of which one is dropped."""
    path = table(tmp_path / "t.csv", rooms=[None if i == 3 else i for i in range(40)])
    np.savez(tmp_path / "s.npz", test_0=np.array([0, 1]), test_1=np.array([39, 5, 20, 3]))
    data = load_data(path, target="price", drop_missing=True, splits=tmp_path / "s.npz", split=1)
    assert data.y_test.tolist() == [112.5, 150.0, 197.5]
    assert data.split["rows"] == [36, 0, 3] and data.split["split"] == 1
    assert sorted(data.y_train.tolist()) == [100 + 2.5 * i for i in range(40) if i not in (39, 5, 20, 3)]
    held = load_data(path, target="price", missing="drop", splits=tmp_path / "s.npz", validation=7)
    assert held.split["rows"] == [30, 7, 2]
    filled = load_data(path, target="price", missing="indicator", unseen="ignore").schema
    assert "rooms missing" in filled.features and filled.unseen == "ignore"


def test_none_is_a_category_among_texts_and_a_missing_value_among_numbers(tmp_path):
    heat = ["none", "gas", "None", "oil"] * 10
    path = table(tmp_path / "t.csv", city=heat, rooms=["none", *range(39)])
    schema = load_data(path, target="price", missing="drop").schema
    assert schema.features == ("rooms", "city=None", "city=gas", "city=none", "city=oil")
    new, _ = read_rows(table(tmp_path / "new.csv", city=["none"] * 40), schema)  # no other text is there
    assert schema.unstandardise(new)[:, 1:].round().tolist() == [[0, 0, 1, 0]] * 40
    refuses(r"'rooms', row 2: missing value \('none'\)", read_rows, table(tmp_path / "new.csv", rooms=heat), schema)
    earlier = replace(schema, columns=(Column("city", ("gas", "oil", "(missing)")),))
    assert encode_rows("new", read_cells(path)[:1], earlier, MISSING)[0].tolist() == [[0, 0, 1]]
    assert set(load_data(path, target="city", exclude=["rooms"]).schema.classes) == {"None", "gas", "none", "oil"}


@pytest.fixture
def trained(tmp_path):
    return load_data(table(tmp_path / "train.csv", price=["low", "high"] * 20), target="price")


def test_new_rows_are_read_as_the_training_rows_were(tmp_path, trained):
    path = tmp_path / "new.csv"
    path.write_text("city,extra,rooms,price\nOslo,?,2.5,low\nBergen,7,4.5,high\n")
    x, y = read_rows(path, trained.schema)
    torch.testing.assert_close(trained.schema.unstandardise(x), torch.tensor([[2.5, 0, 1], [4.5, 1, 0]]))
    assert y.tolist() == [1, 0] and trained.schema.classes == ("high", "low")
    for text in ("city,rooms\nOslo,2.5\n", "city,rooms,price\nOslo,2.5,\n"):
        path.write_text(text)
        assert read_rows(path, trained.schema)[1] is None


def test_rows_that_do_not_fit_the_model_are_refused(tmp_path, trained):
    for text, message in (
        ("city,price\nOslo,low\n", "no column 'rooms', which this model needs; it has city, price"),
        ("city,rooms\nOslo,1\nOslo,2\nBargen,3\n", "'city', row 4: unknown category 'Bargen'.*'Bergen'"),
        ("city,rooms,price\nOslo,1,low\nOslo,1,lov\n", "'price', row 3: unknown class 'lov'.*'low'"),
        ("city,rooms\nOslo,many\n", "'rooms', row 2: 'many' is not a number"),
        ("city,rooms,price\nOslo,1,low\nOslo,1,\n", "'price', row 3: missing value"),
    ):
        (tmp_path / "new.csv").write_text(text)
        refuses(message, read_rows, tmp_path / "new.csv", trained.schema)


NUMBERED = "\n".join(f"{i},{i * i}" for i in range(20)) + "\n"
BAD_TABLES = {
    "no target": ("a,b\n" + NUMBERED, {"target": "price"}, "unknown target column .*'price'.*Valid: a, b"),
    "target not told": ("a,b\n" + NUMBERED, {}, "which column is the target.*a, b"),
    "text": ("a,y\n1,2\n1,3\nx1,4\n3,5\n", {}, "column 'a', row 4: 'x1' is not a number"),
    "inf": ("a,y\n1,2\n2,3\ninf,4\n", {"drop_missing": True}, "column 'a', row 4: 'inf' is not finite"),
    "huge": ("a,y\n1,2\n2,1e39\n", {}, "column 'y', row 3: '1e\\+39' is too large"),
    "doubtful comma": ("a;y\n1,5;2\n2.5;3\n", {}, "'1,5' is not a number.*write 15 or 1.5, as it is meant"),
    "one class": ("a,y\n1,no\n2,no\n", {}, "one class only, 'no'"),
    "one number": ("a,y\n1,5\n2,5\n", {}, "is 5 in every row; there is nothing to learn"),
    "constant": ("a,y\n1,2.5\n2,2.5\n3,2.5\n", {}, "is 2.5 in every row"),
    "few rows": ("a,y\n1,2.5\n2,3.5\n", {}, "has 2 rows, too few"),
    "rare class": ("a,y\n" + "1,u\n2,v\n" * 20 + "3,w\n", {}, "too few rows of class 'w' of 'y'"),
    "a currency": ("a,y\n" + NUMBERED.replace(",", ",$"), {}, "leave units out of the cells, such as '\\$"),
    "many classes": ("a,y\n" + NUMBERED, {"task": "classification"}, "20 classes in 20 rows"),
    "names": ("a,b,y\n" + "".join(f"{i},n{i},{i}\n" for i in range(30)), {}, "'b' holds 30 different texts"),
    "duplicate": ("a,b,a\n1,2,3\n", {}, "columns 1 and 3 are both called 'a'"),
    "nameless": ("a,,y\n0,1,2\n", {}, "column 2 has no name"),
    "nameless codes": (",a,y\n1,1,2\n1,2,3\n", {}, "column 1 has no name"),
    "ragged": ("a,y\n1,2\n1,2,3\n", {}, "Expected 2 fields in line 3, saw 3"),
    "empty": ("", {}, "is empty"),
    "target only": ("y\n1\n", {}, "no column is left but the target"),
    "feature": ("height,y\n" + NUMBERED, {"features": ["heigth"]}, "did you mean 'height'"),
    "comments": ("# by X\n# date\na,y\n1,2\n", {}, "saw 2; remove the lines above the names that start with '#'"),
    "UTF-16": ("ÿþa\0,\0y\0", {}, "is UTF-16 text, .* save the table as CSV in UTF-8"),
    "no header": ("0.5,2\n" + NUMBERED, {}, r"\(numbers where names .* is that line missing\?\): which column"),
    "no such target": ("0.5,2\n" + NUMBERED, {"target": "z"}, r"\(numbers where names .* missing\?\) 'z'. Valid: 0.5"),
    "another encoding": ("a,y\nÅ,1\n", {}, "byte 4 is not UTF-8"),
    "gaps": ("a,y\n1,2\n,3\n,4\n", {}, r"column 'a', row 3: missing value \(''\), and 1 more rows.*--missing"),
    "all missing": ("a,b,y\n,1,2\n,2,3\n", {"drop_missing": True}, "every row has a missing value.*'a'"),
}


@pytest.mark.parametrize(("text", "arguments", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_bad_tables_get_one_line_with_the_place(tmp_path, text, arguments, message):
    path = tmp_path / "bad.csv"
    path.write_bytes(text.encode("latin-1"))
    refuses(f"(?=.*bad).*{message}", load_data, path, **arguments)
    assert path.read_bytes() == text.encode("latin-1")


def test_bad_splits_get_one_line(tmp_path):
    path, how = table(tmp_path / "t.csv"), dict(target="price", splits=tmp_path / "s.npz")
    refuses(r"s\.npz: no such file", load_data, path, **how)
    for rows, split, message in (
        ([1], 4, "no array test_4; it has test_0 to test_0"),
        ([-1], 0, "test_0 names rows -1 to -1, but there are rows 0 to 39"),
        ([1, 1], 0, "names a row twice"),
        (range(40), 0, "takes 40 of 40 rows .*two or more to train on"),
    ):
        np.savez(tmp_path / "s.npz", test_0=rows)
        refuses(message, load_data, path, **how, split=split)


def test_numbers_are_the_same_read_as_numbers_and_as_text(tmp_path):
    path, x = tmp_path / "t.csv", np.random.default_rng(0).standard_normal((50, 2)) * [1e-7, 1e9]
    lines = [f"{a!r},{b:.25g},{k % 3:03d},{'TRUE' if k % 2 else ' b'}" for k, (a, b) in enumerate(x.tolist())]
    path.write_text("\n".join(["a,b,code,flag", *lines]))
    typed, text = read_cells(path, text=["code"]), read_cells(path)
    assert [typed[name].dtype.kind for name in typed] == ["f", "f", "O", "O"]
    for name in "ab":
        assert np.array_equal(typed[name], parsed(text[name]))
    for name in ("code", "flag"):
        assert list(typed[name]) == list(text[name])
    assert list(typed.index) == list(text.index)


@pytest.mark.parametrize(
    ("area", "price", "read"),
    [("82,5", "248.000", 248000), ("82,5", "1.250.000", 1250000), ("82,5", "0.125", 0.125), ("82.5", "248.000", 248)],
)
def test_a_point_is_for_thousands_beside_decimal_commas(tmp_path, area, price, read):
    """Where every cell of the column can be such a number; one convention holds for a file."""
    path = tmp_path / "t.csv"
    path.write_text("area;price\n" + "".join(f"{area};{price}\n{area[:-1]}{k};{price}\n" for k in range(20)))
    assert load_data(path, target="area").schema.x_shift == pytest.approx([read], rel=1e-6)
