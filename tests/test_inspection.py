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
        ('a,y\n"1,5",2\n"2,25",3\n', ",", [1.5, 2.25]),
        ("a|y\n1|2\n2|3\n", "|", [1, 2]),
        ('a;"b, in m";y\n1;2;3\n2;3;4\n', ";", [1, 2]),
    ],
)
def test_separators_and_commas_are_recognised(tmp_path, text, separator, values):
    frame = read_cells(table(tmp_path, text))
    assert frame.attrs["separator"] == separator
    assert [float(cell) for cell in frame["a"]] == values


def test_commas_in_columns_that_are_no_numbers_stay_and_names_are_composed(tmp_path):
    frame = read_cells(table(tmp_path, 'gro\u0308\u00dfe,b,y\n"1,138",x,1\nmany,"p,q",2\n'))
    assert list(frame["gr\u00f6\u00dfe"]) == ["1,138", "many"] and list(frame["b"]) == ["x", "p,q"]


@pytest.mark.parametrize("names", [("1", "2", "7"), ("Arctic fox", "7", "Owl monkey")])
def test_a_saved_index_is_no_column(tmp_path, names):
    text = '"","a","y"\n' + "".join(f'"{name}",{k},{2 * k}\n' for k, name in enumerate(names)) + "\n\n"
    assert list(read_cells(path := table(tmp_path, text))) == ["a", "y"]
    assert "row names, left out" in inspect_table(path, "y").text()
    assert "row names" not in inspect_table(table(tmp_path, "a,y\n1,2\n2,4\n"), "y").text()


def test_columns_are_left_out_or_taken_for_codes(tmp_path):
    path = table(tmp_path, "id,zip,y\n" + rows(lambda k: k, lambda k: f"0100{k % 3}", lambda k: k % 7 + 0.5))
    data = bp.load_data(path, exclude=["id"], categorical=["zip"])
    assert data.schema.features == ("zip=01000", "zip=01001", "zip=01002")
    labels = bp.load_data(path, target="zip", exclude="y", categorical="zip").schema
    assert (labels.task, labels.classes) == ("classification", ("01000", "01001", "01002"))
    left = bp.load_data("breast-cancer", exclude=["mean radius"]).schema.features
    assert len(left) == 29 and "mean radius" not in left
    for name, how, words in (
        (path, dict(exclude=["idd"]), "unknown column of .*'idd'.*did you mean 'id'"),
        (path, dict(exclude=["y"]), "'y' is the target; do not"),
        (path, dict(categorical=["zap"]), "'zap'"),
        (path, dict(exclude=["id", "zip"]), "no column is left"),
        ("breast-cancer", dict(categorical=["mean radius"]), "is for tables of text"),
    ):
        with pytest.raises(bp.UserError, match=words):
            bp.load_data(name, **how)


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
    assert excluded == ["id", "name", "same"] and report.command.endswith("--dates parts --missing indicator")
    with pytest.raises(bp.UserError, match="did you mean 'rent'"):
        inspect_table(path, "rennt")


#: A table, its target; the command that is printed ends with this, and a finding says this (and refuses the table).
COMMANDS = {
    "missing values": ("id,a,y", (str, lambda k: "" if k == 1 else k, lambda k: k % 2), "y",
                       "--target y --exclude id --missing indicator", ("a", True, "1 missing values")),
    "codes": ("zip,y", (lambda k: f"0{k % 3}", lambda k: k + 0.5), "y",
              "--target y --categorical zip", ("zip", False, "leading zeros")),
    "ambiguous dates": ("sold,y", (lambda k: f"{k % 12 + 1:02}/{k % 9 + 1:02}/2024", lambda k: k + 0.5), "y",
                        "--exclude sold", ("sold", True, "day or the month may be first")),
    "rare class": ("a,y", (lambda k: k % 7, lambda k: "yes" if k == 3 else "no"), "y",
                   "--target y", (None, None, "always says no is right in 97.5% of the rows")),
    "few of a class": ("a,y", (lambda k: k % 7, lambda k: "abc"[(k > 0) + (k > 9)]), "y",
                       "--target y", ("y", True, "1 with fewer than 5 rows: 'a'")),
    "counts": ("a,y", (lambda k: k % 7, lambda k: k % 23), "y", "--target y", ("y", False, "--task counts")),
    "nothing else": ("y", (lambda k: k + 0.5,), "y", "--target y", ("y", True, "only column")),
    "several targets": ("a,b,c", (lambda k: k % 7, lambda k: k % 2, lambda k: "x" if k == 4 else k + 0.5), "b,c",
                        "--target b,c", ("c", True, "is no number in every row")),
    "labels": ("a,b,c", (lambda k: k % 7, lambda k: k % 2, lambda k: k % 3 // 2), "b,c", "--target b,c", None),
    "nothing": ("a,y", (lambda k: k % 7, lambda k: k % 2), "y", "--target y", None),
}  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS)
def test_findings_and_the_command_to_train_with(tmp_path, case):
    names, columns, target, ending, finding = COMMANDS[case]
    report = inspect_table(path := table(tmp_path, names + "\n" + rows(*columns)), target)
    assert report.command.endswith(ending)
    if finding is None:
        assert not report.findings and "nothing is wrong with it" in report.text()
        assert report.task == bp.load_data(path, target=target.split(",")).schema.task
    else:
        said = [(f.column, f.refused) for f in report.findings if finding[2] in f.sentence]
        assert said and (finding[0] is None or said == [finding[:2]])
    with pytest.raises(bp.UserError, match=r"unknown target column .* 'd'"):
        inspect_table(path, "d")


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
