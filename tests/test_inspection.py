"""Tables as people have them: how they are read, and what `inspect` says of them before anything is trained."""

import subprocess
import sys
from argparse import Namespace

import numpy as np
import pandas as pd
import pytest

import bnn_pyro as bp
from bnn_pyro.cells import read_cells
from bnn_pyro.inspection import inspect_table
from bnn_pyro.run import main
from bnn_pyro.runs.recipe import resolve

COUNTS = "whole numbers from 0 on; if they are counts, --task counts"


def table(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def rows(*columns):
    """Lines of 40 rows, of columns by functions of the row's number."""
    return "".join(",".join(str(column(k)) for column in columns) + "\n" for k in range(40))


@pytest.mark.parametrize(
    ("text", "separator", "values"),
    [
        ("a;y\n1,5;2\n-0,25;3\n", ";", [1.5, -0.25]),
        ("a;y\n1.234,5;2\n7;3\n", ";", [1234.5, 7]),
        ('a,y\n"1,138",2\n12,3\n', ",", [1138, 12]),
        ('a,y\n"1,234,567.5",2\n"2,000",3\n', ",", [1234567.5, 2000]),
        ('a,y\n"1,5",2\n"2,25",3\n', ",", [1.5, 2.25]),
        ("a|y\n1|2\n2|3\n", "|", [1, 2]),
        ("a\ty\n1\t2\n2\t3\n", "\t", [1, 2]),
        ('a;"b, in m";y\n1;2;3\n2;3;4\n', ";", [1, 2]),
    ],
)
def test_separators_and_commas_are_recognised(tmp_path, text, separator, values):
    frame = read_cells(table(tmp_path, text))
    assert frame.attrs["separator"] == separator
    assert [float(cell) for cell in frame["a"]] == values


def test_commas_in_columns_that_are_no_numbers_stay(tmp_path):
    frame = read_cells(table(tmp_path, 'a,b,y\n"1,138",x,1\nmany,"p,q",2\n'))
    assert list(frame["a"]) == ["1,138", "many"] and list(frame["b"]) == ["x", "p,q"]


def test_a_rating_with_decimal_commas_is_a_quantity(tmp_path):
    path = table(tmp_path, "a;y\n" + "".join(f"{k};{1 + k % 3 / 2:.1f}\n".replace(".", ",") for k in range(40)))
    data = bp.load_data(path)
    assert data.schema.task == "regression" and set(np.unique(data.y_train)) <= {1.0, 1.5, 2.0}


@pytest.mark.parametrize("names", [("1", "2", "7"), ("Arctic fox", "7", "Owl monkey")])
def test_a_saved_index_is_no_column(tmp_path, names):
    text = '"","a","y"\n' + "".join(f'"{name}",{k},{2 * k}\n' for k, name in enumerate(names)) + "\n\n"
    assert list(read_cells(path := table(tmp_path, text))) == ["a", "y"]
    assert "row names, left out" in inspect_table(path, "y").text()
    assert "row names" not in inspect_table(table(tmp_path, "a,y\n1,2\n2,4\n"), "y").text()


def test_names_are_the_same_composed_or_not(tmp_path):
    assert list(read_cells(table(tmp_path, "gro\u0308\u00dfe,y\n1,2\n"))) == ["gr\u00f6\u00dfe", "y"]


def test_columns_are_left_out_or_taken_for_codes(tmp_path):
    path = table(tmp_path, "id,zip,y\n" + rows(lambda k: k, lambda k: f"0100{k % 3}", lambda k: k % 7 + 0.5))
    data = bp.load_data(path, exclude=["id"], categorical=["zip"])
    assert data.schema.features == ("zip=01000", "zip=01001", "zip=01002")
    labels = bp.load_data(path, target="zip", exclude="y", categorical="zip").schema
    assert (labels.task, labels.classes) == ("classification", ("01000", "01001", "01002"))
    for how, words in (
        (dict(exclude=["idd"]), "unknown column of .*'idd'.*did you mean 'id'"),
        (dict(exclude=["y"]), "'y' is the target; do not"),
        (dict(categorical=["zap"]), "'zap'"),
        (dict(exclude=["id", "zip"]), "no column is left"),
    ):
        with pytest.raises(bp.UserError, match=words):
            bp.load_data(path, **how)
    left = bp.load_data("breast-cancer", exclude=["mean radius"]).schema.features
    assert len(left) == 29 and "mean radius" not in left
    with pytest.raises(bp.UserError, match="is for tables of text"):
        bp.load_data("breast-cancer", categorical=["mean radius"])


def test_inspect_says_all_that_is_doubtful_at_once_and_a_command_that_works(tmp_path):
    names = "id,code,sold,name,flag,same,mixed,area,price,gap,rent"
    path = table(tmp_path, names + "\n" + rows(
        lambda k: 1000 + k,
        lambda k: f"0{k % 4}",
        lambda k: f"2024-01-{k % 28 + 1:02}",
        lambda k: f"house {k}",
        lambda k: ("true", "True", "no")[k % 3],
        lambda k: "x",
        lambda k: "?" if k == 3 else k % 9 + 0.5,
        lambda k: 9999 if k == 5 else 50 + k % 11,
        lambda k: f"${k}",
        lambda k: "many" if k == 7 else k,
        lambda k: np.exp(k / 4),
    ))  # fmt: skip
    report = inspect_table(path, "rent")
    said = {(finding.column, finding.refused): finding.sentence for finding in report.findings}
    assert "identifier" in said["id", False] and "leading zeros, such as '00'" in said["code", False]
    assert "dates, such as '2024-01-01'" in said["sold", True] and "40 different texts" in said["name", True]
    assert "'true', 'True'" in said["flag", False] and "'x' in every row" in said["same", False]
    assert "1 missing values ('?'), the first in row 5" in said["mixed", True]
    assert "9999 in row 7 is" in said["area", False] and "a unit, such as '$0'" in said["price", True]
    assert "text in 1, the first 'many' in row 9" in said["gap", True]
    assert "skewed" in said["rent", False] and report.missing == 1
    excluded = [report.command.split()[k + 1] for k, word in enumerate(report.command.split()) if word == "--exclude"]
    assert excluded == ["id", "sold", "name", "same"] and report.command.endswith("--missing indicator")
    with pytest.raises(bp.UserError, match="did you mean 'rent'"):
        inspect_table(path, "rennt")


def test_the_command_that_it_prints_loads_the_table(tmp_path):
    path = table(
        tmp_path, "id,a,b,y\n" + rows(lambda k: k, lambda k: k % 5, lambda k: "" if k == 1 else k, lambda k: k % 2)
    )
    words = inspect_table(path).command.split()
    assert words[2:] == ["--data", str(path), "--target", "y", "--exclude", "id", "--missing", "indicator"]
    data = bp.load_data(path, target="y", exclude=["id"], drop_missing=True)
    assert data.split["dropped"] == 1
    assert data.schema.features == ("a", "b") and data.schema.task == "classification"
    path = table(tmp_path, "zip,y\n" + rows(lambda k: f"0{k % 3}", lambda k: k + 0.5))
    assert inspect_table(path).command.endswith("--target y --categorical zip")


def test_several_targets_are_looked_at_as_train_takes_them(tmp_path, capsys):
    path = table(tmp_path, "a,b,c\n" + rows(lambda k: k % 7, lambda k: k % 2, lambda k: "x" if k == 4 else k + 0.5))
    found = inspect_table(path, "b, c")
    assert found.task == "targets" and found.columns["b"].endswith("one of several targets")
    assert [f.column for f in found.findings if "is no number in every row" in f.sentence] == ["c"]
    labels = table(tmp_path, "a,b,c\n" + rows(lambda k: k % 7, lambda k: k % 2, lambda k: k % 3 // 2), "labels.csv")
    report = inspect_table(labels, "b,c")
    assert report.task == "labels" == bp.load_data(labels, target=["b", "c"]).schema.task
    assert report.command.endswith("--target b,c")
    with pytest.raises(bp.UserError, match=r"unknown target column .* 'd'"):
        inspect_table(path, "b,d")
    assert (
        "only column" in inspect_table(table(tmp_path, "b,c\n" + rows(lambda k: k, lambda k: k), "t.csv"), "b,c").text()
    )


def test_unbalanced_classes_and_clean_tables(tmp_path):
    rare = inspect_table(table(tmp_path, "a,y\n" + rows(lambda k: k % 7, lambda k: "yes" if k == 3 else "no")))
    assert "always says no is right in 97.5% of the rows" in " ".join(f.sentence for f in rare.findings)
    clean = inspect_table(table(tmp_path, "a,y\n" + rows(lambda k: k % 7, lambda k: k % 2)))
    assert not clean.findings and "nothing is wrong with it" in clean.text()


def test_what_a_target_is_refused_for(tmp_path):
    alone = inspect_table(table(tmp_path, "y\n" + rows(lambda k: k + 0.5)))
    few = inspect_table(path := table(tmp_path, "a,y\n" + rows(lambda k: k % 7, lambda k: "abc"[(k > 0) + (k > 9)])))
    counts = inspect_table(table(tmp_path, "a,y\n" + rows(lambda k: k % 7, lambda k: k % 23), "counts.csv"))
    said = [(f.column, f.refused, f.sentence) for report in (alone, few, counts) for f in report.findings]
    assert said[0][:2] == ("y", True) and "only column" in said[0][2]
    assert said[1] == ("y", True, "1 with fewer than 5 rows: 'a'") and said[2][1:] == (False, COUNTS) and len(said) == 3
    with pytest.raises(bp.UserError, match="too few rows of class 'a'"):
        bp.load_data(path)


def test_inspect_is_a_command_that_loads_no_torch(tmp_path, capsys):
    path = table(tmp_path, "a,y\n1,2\n2,3.5\n")
    assert main(["inspect", str(path)]) == 0
    assert "train with: bnn-pyro train --data" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none.csv")]) == 2
    code = f"import sys, bnn_pyro.run as r; r.main(['inspect', {str(path)!r}]); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0


def test_columns_to_leave_out_are_a_list_with_quotes_around_a_comma(tmp_path):
    table = pd.DataFrame(
        {"id, own": range(100, 160), "a": np.arange(60) % 7, "b": np.arange(60) ** 2, "y": np.sqrt(np.arange(60))}
    )
    table.to_csv(path := tmp_path / "t.csv", index=False)
    assert inspect_table(path, "y").command.endswith("""--exclude '"id, own"'""")
    flags = Namespace(data=str(path), target="y", exclude=['"id, own",b'], task="regression")
    assert resolve(flags, {}).load().schema.features == ("a",)
