"""Before anything is trained: how tables are read, what `inspect` says of them, and what `auto` chooses."""

import json
import shlex
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from refused import refuses
from run_folders import same, small_table

import bnn_pyro as bp
from bnn_pyro.csv_files import read_cells
from bnn_pyro.inspection import inspect_table
from bnn_pyro.run import main, parse
from bnn_pyro.runs.recipe import resolve
from bnn_pyro.zoo import auto as rules
from bnn_pyro.zoo.auto import RULES, choose, set_up


def table(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def rows(*columns):
    """Lines of 40 rows, of columns by functions of the row's number."""
    return "".join(",".join(str(column(k)) for column in columns) + "\n" for k in range(40))


@pytest.mark.parametrize(("text", "separator", "values"), [
    ("a;y\n1,5;2\n-0,25;3\n", ";", [1.5, -0.25]),
    ("a;y\n1.234,5;2\n7;3\n", ";", [1234.5, 7]),
    ('a,y\n"1,138",2\n12,3\n', ",", [1138, 12]),
    ('a,y\n"1,5",2\n"2,25",3\n', ",", [1.5, 2.25]),
    ("a|y\n1|2\n2|3\n", "|", [1, 2]),
    ('a;"b, in m";y\n1;2;3\n2;3;4\n', ";", [1, 2]),
])  # fmt: skip
def test_separators_and_commas_are_recognised(tmp_path, text, separator, values):
    frame = read_cells(table(tmp_path, text))
    assert frame.attrs["separator"] == separator
    assert [float(cell) for cell in frame["a"]] == values
    # Commas in columns that are no numbers stay, and names are composed.
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
    frame = pd.read_csv(path).astype({"zip": "Int64"}).assign(zip=lambda f: f.zip.where(f.id != 4))
    whole = bp.dataset(frame, "y", exclude="id", categorical="zip", missing="drop")
    assert whole.schema.features == ("zip=1000", "zip=1001", "zip=1002") and whole.split["dropped"] == 1
    new = bp.datasets.inputs(pd.DataFrame({"zip": [1001.0]}), whole.schema)
    assert whole.schema.unstandardise(new).round().tolist() == [[0, 1, 0]]
    refuses("X is no frame", bp.dataset, np.zeros((9, 2)), np.zeros(9), categorical="x1")
    left = bp.load_data("breast-cancer", exclude=["mean radius"]).schema.features
    assert len(left) == 29 and "mean radius" not in left
    for name, how, words in (
        (path, dict(exclude=["idd"]), "unknown column of .*'idd'.*did you mean 'id'"),
        (path, dict(exclude=["y"]), "'y' is the target; do not"),
        ("breast-cancer", dict(categorical=["mean radius"]), "categorical is for tables"),
    ):
        refuses(words, bp.load_data, name, **how)


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
        lambda k: np.exp(k * 7 % 40 / 4),
    ))  # fmt: skip
    report = inspect_table(path, "rent")
    said = {(finding.column, finding.refused): finding.sentence for finding in report.findings}
    assert "identifier" in said["id", False] and "leading zeros, such as '00'" in said["code", False]
    assert "dates, such as '2024-01-01'" in said["sold", True] and "40 different texts" in said["name", True]
    assert "'true', 'True'" in said["flag", False] and "'x' in every row" in said["same", False]
    assert "1 missing value ('?'), the first in row 5" in said["mixed", True]
    assert "9999 in row 7 is" in said["area", False] and "a unit, such as '$10'" in said["price", True]
    assert "text in 1, the first 'many' in row 9" in said["gap", True]
    assert "skewed" in said["rent", False] and report.missing == 1
    excluded = [report.command.split()[k + 1] for k, word in enumerate(report.command.split()) if word == "--exclude"]
    assert excluded == ["id", "name", "same", "price"] and report.command.endswith("--dates parts --missing indicator")


#: A table, its target; the command that is printed ends with this, and a finding says this (and refuses the table).
COMMANDS = {
    "codes": ("zip,y", (lambda k: f"0{k % 3}" if k else 99999, lambda k: k + 0.5), "y",
              "--target y --categorical zip", ("zip", False, "")),
    "a code by its name": ("ZIP code,y", (lambda k: 8000 + k % 3, lambda k: k + 0.5), "y",
                           "--categorical 'ZIP code'", ("ZIP code", False, "named like a code")),
    "none among texts": ("heat,y", (lambda k: ("gas", "none")[k % 2], lambda k: k + 0.5), "y",
                         "--target y", ("heat", False, "'none' is a category of 20 rows")),
    "none among numbers": ("a,y", (lambda k: "none" if k == 1 else k % 9, lambda k: k + 0.5), "y",
                           "--missing indicator", ("a", True, "1 missing value ('none')")),
    "ambiguous dates": ("sold,y", (lambda k: f"{k % 12 + 1:02}/{k % 9 + 1:02}/2024", lambda k: k + 0.5), "y",
                        "--exclude sold", ("sold", True, "day or the month may be first")),
    "rare class": ("a,y", (lambda k: k % 7, lambda k: "yes" if k == 3 else "no"), "y",
                   "--target y", (None, None, "always says no is right in 97.5% of the rows")),
    "an identifier in any order": ("id,a,y", (lambda k: 900 + 7 * k % 40, lambda k: k % 7, lambda k: k + 0.5), "y",
                                   "--exclude id", ("id", False, "another whole number in every row")),
    "no answer": ("a,y", (lambda k: 50 + k % 7 if k % 3 else -999, lambda k: k + 0.5), "y",
                  "--target y", ("a", False, "more of it: a missing value?")),
    "units": ("w,y", (lambda k: f"{k % 9}kg", lambda k: k + 0.5), "y",
              "--target y", ("w", False, "'0kg': leave the unit out of the cells; as they are, each is a category")),
    "blanks for thousands": ("w,y", (lambda k: f"{10 + k} 500", lambda k: k + 0.5), "y",
                             "--exclude w", ("w", True, "a blank or an apostrophe for thousands")),
    "stars": ("a,y", (lambda k: k % 7, lambda k: k % 5 + 1), "y", "--target y", ("y", False, "--task ordinal has")),
    "numbers for dates": ("a,y", (lambda k: 20240101 + k % 28, lambda k: k + 0.5), "y",
                          "--target y", ("a", False, "may be dates, such as 20240101")),
    "the target again": ("a,b,y", (lambda k: k + 0.5, lambda k: k % 7, lambda k: k + 0.5), "y",
                         "--exclude a", ("a", False, "is the same as the target 'y'")),
    "the target and a tax": ("a,b,y", (lambda k: k % 7, lambda k: round(-1.19 * k * k, 1), lambda k: k * k + 0.5), "y",
                             "--target y", ("b", False, "follows the target 'y' on a line or curve")),
    "its curve": ("a,b,y", (lambda k: k % 7, lambda k: round(0.9**k, 6), lambda k: k * k + 0.5), "y",
                  "--target y", ("b", False, "follows the target 'y' on a line or curve")),
    "numbers with zeros": ("a,y", (lambda k: k % 7, lambda k: f"{k * k:05}"), "y",
                           "--target y", ("y", False, "has leading zeros, such as '00000'")),
    "classes with zeros": ("a,y", (lambda k: k % 7, lambda k: "0" * (k % 2) + "1"), "y",
                           "--categorical y", ("y", True, "has leading zeros, such as '01'")),
    "few of a class": ("a,y", (lambda k: k % 7, lambda k: "abc"[(k > 0) + (k > 9)]), "y",
                       "--target y", ("y", True, "1 with fewer than 5 rows: 'a'")),
    "counts": ("a,y", (lambda k: k % 7, lambda k: k % 23), "y", "--target y", ("y", False, "--task counts")),
    "nothing else": ("y", (lambda k: k + 0.5,), "y", "--target y", ("target", True, "only column")),
    "numbers and text": ("a,y", (lambda k: k % 7, lambda k: ("0", "1", "2-10")[k % 3 * (k % 2)]), "y",
                         "--target y", ("y", True, "correct it, or --task classification")),
    "several targets": ("a,b,c", (lambda k: k % 7, lambda k: k % 2, lambda k: "x" if k == 4 else k + 0.5), "b,c",
                        "--target b,c", ("c", True, "text in 1, the first 'x' in row 6")),
    "labels": ("a,b,c", (lambda k: k % 7, lambda k: k % 2, lambda k: k % 3 // 2), "b,c", "--target b,c", None),
    "text for a number": ("a,y", (lambda k: k % 7, lambda k: "uvw"[k % 3]), "y --task counts",
                          "--target y", ("target", True, "'y' is text, and task='counts' takes")),
    "text in no order": ("a,y", (lambda k: k % 7, lambda k: "uvw"[k % 3]), "y --task ordinal",
                         "--task ordinal --classes 'LOWEST,…,HIGHEST'", ("target", True, "u, v, w is not known")),
    "no count": ("a,y", (lambda k: k % 7, lambda k: k + 0.5), "y --task counts", "y", ("target", True, "no count")),
    "a code of an event": ("a,y,b", (lambda k: k % 7, lambda k: k**4 + 0.5, lambda k: k % 2 + 1), "y --event b",
                           "--event b=VALUE", ("target", True, "event 'b' holds 1, 2")),
    "many classes": ("a,y", (lambda k: k % 9, lambda k: k % 8), "y", "--fractions 0.6,0.2,0.2", ("y", True, "6 of 40")),
    "no target": ("a,b,y", (lambda k: k % 7, lambda k: "" if k > 5 else k, lambda k: k + 0.5 if k > 5 else ""), "y",
                  "--exclude b --missing indicator", ("b", True, "has no value in any row")),
    "too small": ("a,y", (lambda k: k % 7, lambda k: f"{k}.5e-300"), "y", "--target y", ("y", True, "; multiply by")),
    "too large": ("a,y", (lambda k: k % 7, lambda k: f"{k}.5e30"), "y", "--target y", ("y", True, "; divide by")),
    "too far": ("a,y,z", (lambda k: k % 7, lambda k: k % 9, lambda k: f"{1e6 + k / 9}"), "y,z",
                "--target y,z", ("z", True, "; subtract a")),
    "nothing": ("a,y", (lambda k: k % 7, lambda k: k % 2), "y", "--target y", None),
}  # fmt: skip


@pytest.mark.parametrize(("names", "columns", "target", "ending", "finding"), COMMANDS.values(), ids=COMMANDS)
def test_findings_and_the_command_to_train_with(tmp_path, names, columns, target, ending, finding):
    target, *words = target.replace("--", "").split()
    path, given = table(tmp_path, names + "\n" + rows(*columns)), dict([words] * bool(words))
    report = inspect_table(path, target, given)
    assert report.command.endswith(ending)
    first = "once that is corrected, train" in report.text() or ending.endswith(("VALUE", "HIGHEST'"))
    with pytest.raises(bp.UserError) if first else nullcontext():  # as it is, it trains
        resolve(parse(shlex.split(report.command)[1:]), {})
    if finding is None:
        assert not report.findings and ("nothing is wrong with it" in report.text()) is not bool(report.duplicates)
        assert report.task == bp.load_data(path, target=target.split(",")).schema.task
    else:
        said = [(f.column, f.refused) for f in report.findings if finding[2] in f.sentence]
        assert said and (finding[0] is None or said == [finding[:2]])
        titles = [f"\n{title}\n" in report.text() for title in ("`train` refuses:", "To look at:")]
        assert titles == [any(f.refused is refused for f in report.findings) for refused in (True, False)]
    try:
        data, refused = bp.load_data(path, target=target.split(","), **given), False
    except bp.UserError:
        data, refused = None, True
    assert refused == any(f.refused for f in report.findings)
    helps = {f"{f.column}: {f.sentence}" for f in report.findings if f.way and "'" not in f.sentence}
    assert refused or helps <= {*data.split.get("doubts", ())}
    refuses(r"unknown target column .* 'd'", inspect_table, path, "d")


def test_numbers_among_the_names_of_classes_are_names(tmp_path):
    path = table(tmp_path, "a,y\n" + rows(lambda k: k % 7, lambda k: ("0", "1", "2-10")[k % 3 * (k % 2)]))
    report = inspect_table(path, "y", {"task": "classification"})
    assert not [finding for finding in report.findings if finding.refused]
    resolve(parse(shlex.split(report.command)[1:]), {})


@pytest.mark.parametrize(("first", "way"), [("5000", "--groups customer_id"), ("", "--exclude customer_id")])
def test_codes_with_gaps_are_no_groups(tmp_path, first, way):
    codes = [first, *(str(5000 + 37 * (k % 30)) for k in range(1, 120))]
    path = table(tmp_path, "customer_id,a,y\n" + "\n".join(f"{code},{k % 7},{k + 0.5}" for k, code in enumerate(codes)))
    report = inspect_table(path)
    assert f" {way}" in report.command
    resolve(parse(shlex.split(report.command)[1:]), {})


def test_the_command_has_columns_to_leave_out_as_a_list_with_quotes_around_a_comma(tmp_path, command):
    k, path = np.arange(60), tmp_path / "t.csv"
    pd.DataFrame({"id, own": 100 + k, "a": k % 7, "b": k**2, "y": np.sqrt(k)}).to_csv(path, index=False)
    proposed = command("inspect", path, "--target", "y").split("train with: ")[1].strip()
    assert proposed == inspect_table(path, "y").command and proposed.endswith("""--exclude '"id, own"'""")
    command("inspect", tmp_path / "none.csv", code=2)
    for suffix, words in {".parquet": "train --data .* takes this as it is", ".xlsx": "save it as .csv, "}.items():
        refuses(f"can't read a '{suffix}' file; .*{words}", inspect_table, tmp_path / f"t{suffix}")
    flags = Namespace(data=str(path), target="y", exclude=['"id, own",b'], task="regression")
    assert resolve(flags, {}).load().schema.features == ("a",)


# -- auto: the rule that applies is taken, within the minutes; a run says what was chosen -----------------------------
TABLE = bp.Schema("regression", (10,), y_scale=2.0)
IMAGES = bp.Schema("classification", (1, 8, 8), tuple("0123456789"))
LABELS = replace(TABLE, task="classification", classes=("no", "yes"))
#: Settings by which a sampled posterior of a small table takes a moment.
SHORT = {"hidden": (3,), "epochs": 2, "warmup": 20, "thin": 1, "draws": 4, "chains": 2, "compiled": "no", "cores": 1}
FLAGS = [f"--set={k}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in SHORT.items()]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(rules, "usable_cores", lambda: 2)


@pytest.mark.parametrize("schema", [TABLE, LABELS, IMAGES], ids=["numbers", "labels", "images"])
def test_every_rule_is_reached_by_some_size_and_fits_into_the_minutes(schema):
    rules = [rule for rule in RULES if rule.inputs == ("image" if schema.is_image else "table")]
    methods, taken = [rule.method for rule in rules], []
    for rows in (100, 1000, 10_000, 100_000, 1_000_000):
        for minutes in (1, 5, 60):
            choice = choose(schema, rows, minutes=minutes)
            assert choice.auto["expected_seconds"] <= 60 * minutes or choice.inference == methods[-1]
            taken.append((choice.variant, choice.inference))
    assert set(taken) == {(rule.variant, rule.method) for rule in rules}
    order = [methods.index(method) for _, method in taken[1::3]]
    assert order == sorted(order)  # in the same minutes, more rows never bring an earlier rule


def test_small_tables_are_sampled_for_longer_and_shortened_where_there_is_no_time():
    def changed(rows, minutes):
        choice, usual = choose(TABLE, rows, minutes=minutes), vars(bp.MILE())
        assert choice.inference == "mile" and choice.auto["expected_seconds"] <= 60 * minutes
        return {k: v / usual[k] for k, v in vars(choice.method).items() if v != usual[k]}

    assert [changed(300, m) for m in (5, 20)] == [{"thin": k} for k in (rules.LONGER, 4 * rules.LONGER)]
    assert choose(TABLE, 300, settings={"thin": 7}).method == bp.MILE(thin=7)
    assert choose(TABLE, 300, settings={"adjusted": True}).method.thin < bp.MILE().thin  # a transition has many steps
    shares = changed(2000, 1)
    assert shares.keys() == {"warmup", "thin", "epochs"} and max(shares.values()) < 0.9
    assert max(shares.values()) - min(shares.values()) < 0.02


def test_noise_of_numbers_has_heavy_tails_and_a_scale_by_the_input_but_where_somebody_says_another():
    def noise(schema=TABLE, rows=100, **settings):
        return (entry := choose(schema, rows, settings=settings).entry).noise, entry.likelihood

    usual, none = ("heteroscedastic", "student-t"), (bp.MeanField().noise, bp.MeanField().likelihood)
    assert [noise(), noise(noise="heteroscedastic"), noise(likelihood="student-t")] == [usual] * 3
    assert noise(likelihood="normal") == ("heteroscedastic", "normal")
    assert noise(noise="learned") == ("learned", none[1]) and noise(likelihood="laplace") == (none[0], "laplace")
    assert noise(replace(TABLE, target_scale="log")) == noise(rows=99) == ("heteroscedastic", none[1])
    assert {noise(LABELS), noise(replace(TABLE, task="counts")), noise(replace(TABLE, task="survival"))} == {none}


def test_settings_go_over_the_rule_and_sizes_decide_the_prior_and_the_depth():
    rule = choose(TABLE, 300)
    setup = choose(TABLE, 300, settings={"hidden": "5", "lr": "0.1", "nonsense": 3})
    assert setup.entry == replace(rule.entry, hidden=(5,)) and setup.method == replace(rule.method, lr=0.1)
    assert [choose(replace(TABLE, input_shape=(w,)), 900).entry.prior for w in (16, 17)] == ["normal:1", "fan-in:4"]
    classes = replace(TABLE, task="classification", classes=("a", "b"))
    of_classes = [choose(replace(classes, input_shape=(w,)), n).entry.prior for w, n in ((9, 359), (9, 360), (3, 50))]
    assert of_classes == ["ard:0.5/gamma:1,1", "gamma:1,1", "gamma:1,1"]
    sizes = ((9, 359), (9, 360), (4, 50), (3, 50), (2, 29), (2, 30), (9, 29), (1, 29))
    priors = [choose(replace(TABLE, input_shape=(w,)), n).entry.prior for w, n in sizes]
    assert priors == ["ard:0.5/fan-in:2", "normal:1"] * 4
    assert [choose(TABLE, n).entry.hidden for n in (1000, 1001)] == [(16, 16), (16, 16, 16)]
    many = [choose(TABLE, n, minutes=m) for n, m in ((20_000, 60), (20_001, 60), (1_000_000, 1))]
    assert [(c.inference, c.entry.hidden[-1], c.entry.likelihood) for c in many] == [
        (method, width, "student-t") for method, width in (("mile", 16), ("ensemble", 100), ("svi", 50))
    ]
    few = bp.dataset(torch.arange(80.0).reshape(40, 2), torch.arange(40) % 4.0, task="regression")
    assert set_up("auto", None, lambda: few).entry.noise == "learned"
    refuses("auto takes mile, ensemble, svi for a table, not laplace", choose, TABLE, 300, method="laplace")


@pytest.mark.usefixtures("no_figures")
def test_a_run_says_what_was_chosen_and_is_run_again_alike(tmp_path, capsys):
    table, out, again = small_table(tmp_path / "houses.csv"), tmp_path / "run", tmp_path / "again"
    common = ["--num-draws", "5", "--device", "cpu", "--no-baseline"]
    data = ["--data", str(table), "--target", "price"]
    assert main(["train", *data, "--minutes", "2", *FLAGS, *common, "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    choice = choose(bp.load(out).schema, 42, minutes=2.0, settings=SHORT)
    assert config["auto"] == choice.auto | {"limited": True} == bp.load(out).provenance["auto"]
    assert config["variant_settings"]["hidden"] == [3] and config["inference_settings"]["draws"] == 4
    said = capsys.readouterr().err
    assert f"auto: {choice.variant} by {choice.inference}, about" in said and choice.auto["reason"] in said
    assert choice.auto["reason"] in (out / "report.html").read_text()
    for argv in (["--config", str(out / "config.json"), "--out", str(again)], ["auto", "--resume", "--out", str(out)]):
        assert main(["train", *argv, "--quiet"]) == 0
    assert same(out, again) and json.loads((again / "config.json").read_text()) == config
    assert main(["train", *data, "--set", "widht=3", "--out", str(tmp_path / "x")]) == 2
    assert "setting of mean-field or mile, which auto chose" in capsys.readouterr().err


def test_fit_chooses_and_takes_settings_of_a_method(tmp_path):
    data = bp.load_data("diabetes", limit=40)
    few = {k: v for k, v in SHORT.items() if k != "hidden"}
    about = bp.fit("auto", data, bp.MILE(**few), progress=False, device="cpu", out=tmp_path).provenance
    assert about["entry"] == choose(data.schema, 40).variant and about["method_settings"]["draws"] == 4
    assert "40 rows" in about["auto"]["reason"] and bp.load(tmp_path).provenance["auto"] == about["auto"]
