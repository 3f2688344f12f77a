"""Columns that give the class away, and those that number persons: what is said of them, and what is not."""

import shlex

import numpy as np
import pandas as pd
import pytest
from refused import refuses

import bnn_pyro as bp
from bnn_pyro.cells import follows
from bnn_pyro.doubts import between
from bnn_pyro.inspection import inspect_table
from bnn_pyro.run import parse
from bnn_pyro.runs.recipe import resolve

K = np.arange(400)
DRAW = np.random.default_rng(0)
NOISE, MANY = DRAW.normal(size=400), DRAW.permutation(400)
DENY = pd.Series(np.where(DRAW.random(400) < 0.3, "yes", "no"))
GRADE = pd.Series(np.digitize(NOISE, (-1, 0.3)) + 1)
#: The target, a column, and what is said of it: rows, where it tells the class; None where nothing is.
TELLS = {
    "a copy in numbers": (DENY, (DENY == "yes") * 1, 400),
    "other words": (DENY, DENY.map({"yes": "rejected", "no": "accepted"}), 400),
    "more categories than classes": (DENY, DENY.where(K % 2 == 0, DENY + "!"), 400),
    "a threshold": (DENY, 100 + MANY + 1000 * (DENY == "no"), 400),
    "all but one row": (DENY, (DENY == "yes") ^ (K == 3), 399),
    "all but eight of four hundred": (DENY, (DENY == "yes") ^ (K % 50 == 0), None),
    "thresholds of three classes": (GRADE, NOISE, 400),
    "where it is known": (DENY, (DENY == "yes").where(K % 2 == 0) * 1.0, 200),
    "one class of three": (GRADE, (GRADE == 1) * 1, None),
    "most of a rare class": (np.where(K < 16, "yes", "no"), (K < 12) * 1, None),
    "another in every row": (DENY, [f"n{k}" for k in K], None),
    "few rows": (DENY[:9], (DENY[:9] == "yes") * 1, None),
    "chance": (DENY, NOISE, None),
    "two values of many that are mixed": (DENY, np.where(K % 4, 0, 1 + MANY), None),
    "a quantity": (MANY // 4, (MANY - 190) ** 2, None),
}


@pytest.mark.parametrize(("y", "column", "right"), TELLS.values(), ids=TELLS)
def test_a_column_that_alone_tells_the_class(y, column, right, tmp_path):
    frame = pd.DataFrame({"a": column, "b": DRAW.normal(size=len(y)), "y": y})
    said = [doubt.sentence for doubt in between(frame[["a", "b"]], frame[["y"]])]
    known = frame["a"].notna().sum()
    assert said == ([] if right is None else [s for s in said if f"the target 'y' in {right} of {known} rows" in s][:1])
    if right == len(y):
        frame.assign(b=[99.0, *frame.b[1:]]).to_csv(tmp_path / "t.csv", index=False)
        both = [f.sentence for f in inspect_table(tmp_path / "t.csv", "y").findings if "alone" in f.sentence]
        first, outlier = bp.load_data(tmp_path / "t.csv").split["doubts"]
        assert said == both and first == f"a: {said[0]}" and outlier.startswith("b: 99 in row 2")


T, ZERO = np.arange(50_000.0), (K % 100 > 0) * 1.0


@pytest.mark.parametrize(
    ("a", "b", "curves", "holds"),
    [
        (MANY * 1.0, np.exp(MANY / 40), True, True), (MANY * 1.0, np.exp(MANY / 40), False, False),
        (MANY * 1.0, 3 - MANY / 7, False, True), (MANY * 1.0, np.exp(MANY / 40) + 9 * NOISE, True, False),
        (MANY // 200 * 1.0, MANY // 200 * 1.0, True, True), (MANY // 100 * 1.0, 2.0 ** (MANY // 100), True, False),
        (np.where(ZERO, 0, NOISE), np.where(ZERO, 0, NOISE**2), True, False),  # nearly all are zero in both
        (T, np.where(T < 12_000, T**0.5, np.sin(T)), True, False), (T, T**0.5, True, True),
    ],
)  # fmt: skip
def test_columns_follow_each_other_on_a_line_or_a_curve(a, b, curves, holds):
    assert follows(a, b, curves) == follows(b, a, curves) == holds


#: Three rows of each of 40 persons, with what is of a person, of the time and of the row.
WHO, FEW = K[:120] // 3, NOISE[:120]
SEX = np.where(MANY[WHO] % 2, "f", "m")
PANEL = pd.DataFrame({"nr": 7 * WHO + 100, "year": 1980 + K[:120] % 3, "sex": SEX, "y": FEW})
NUMBERS = {
    "nothing else": (PANEL[["nr", "y"]].rename(columns={"nr": "id"}), "id", ""),
    "by the name": (PANEL.rename(columns={"nr": "id"}), "id", "named like a code; a code is no quantity: --groups"),
    "texts": (
        pd.DataFrame({"patient": [f"P{k % 40:03d}" for k in range(240)], "year": K[:240] % 7, "y": NOISE[:240]}),
        "patient",
        "named like a code: --groups patient keeps rows of the same in one part",
    ),
    "another name": (PANEL, None, ""),
    "once each": (PANEL.assign(nr=K[:120]).rename(columns={"nr": "id"}), None, ""),
}


@pytest.mark.parametrize(("frame", "name", "words"), NUMBERS.values(), ids=NUMBERS)
def test_persons_are_offered_as_groups(frame, name, words, tmp_path):
    frame.to_csv(tmp_path / "t.csv", index=False)
    report = inspect_table(tmp_path / "t.csv", "y")
    found = [f for f in report.findings if f.way == "groups"]
    assert [f.column for f in found] == [name] * (name is not None) and all(words in f.sentence for f in found)
    assert report.command.endswith(f"--groups {name}") is bool(found and len(frame.columns) > 2)
    doubts = [line for line in bp.load_data(tmp_path / "t.csv").split.get("doubts", ()) if "--groups" in line]
    assert doubts == [f"{name}: {f.sentence}" for f in found]
    if report.command.endswith(f"--groups {name}"):
        assert "--exclude" not in report.command
        data = resolve(parse(shlex.split(report.command)[1:]), {}).load()
        assert data.split["kind"] == "groups" and "--groups" not in "".join(data.split.get("doubts", ()))


def test_half_as_many_categories_as_rows_are_taken_where_one_says_so(tmp_path):
    frame = pd.DataFrame({"make": [f"m{k // 2}" for k in K], "y": NOISE})
    assert len(bp.dataset(frame, "y", categorical="make").schema.features) == 200
    refuses("200 different texts .* keep it: --categorical", bp.dataset, frame, "y")
    more = frame.assign(make=["m", *frame.make[1:]])
    refuses("201 different texts .* exclude=$", bp.dataset, more, "y", categorical="make")
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert "200 different texts in 400 rows" in (said := inspect_table(tmp_path / "t.csv", "y").text())
    assert "; --categorical takes them" in said


@pytest.mark.filterwarnings("ignore:data. ")
def test_what_is_doubtful_in_one_of_several_inputs_is_named_by_it():
    both, one = np.stack([NOISE] * 2, 1), np.ones(len(NOISE))
    data = bp.dataset((both, one), NOISE)
    said = ["0[1]: is the same as column '0[0]' in every row: --exclude", "1[0]: is 1 in every row, and tells nothing"]
    assert list(data.split["doubts"]) == said
    series, mask = both[:, :, None], np.zeros((len(NOISE), 2), bool)  # are no columns that one may leave out
    assert "doubts" not in bp.dataset((series, mask), NOISE).split
    assert list(bp.dataset((series, mask, both, one), NOISE).split["doubts"]) == [
        line.replace("1[0]", "3[0]").replace("0[1]", "2[1]").replace("0[0]", "2[0]") for line in said
    ]


def test_a_class_called_na_is_asked_about_where_it_would_be_left_out(tmp_path):
    y = np.where(K % 3 == 0, "NA", DENY)
    pd.DataFrame({"a": NOISE, "y": y}).to_csv(tmp_path / "t.csv", index=False)
    asked = "; if 'NA' is a class, write another word in these 134 cells"
    assert [f.sentence for f in inspect_table(tmp_path / "t.csv").findings if asked in f.sentence and f.refused]
    first = bp.load_data(tmp_path / "t.csv", missing="indicator").split["doubts"][0]
    assert first == f"y: missing in 134 of the rows, which are left out{asked}"
    for gap, other in (("NA", NOISE), ("", DENY), ("?", DENY)):  # of numbers, and what is no word
        pd.DataFrame({"a": NOISE, "y": np.where(K % 3 == 0, gap, other)}).to_csv(tmp_path / "t.csv", index=False)
        assert "is a class" not in inspect_table(tmp_path / "t.csv").text()
    pd.DataFrame({"a": NOISE, "y": np.where(K < 4, "NA", DENY)}).to_csv(tmp_path / "t.csv", index=False)
    assert "is a class" not in inspect_table(tmp_path / "t.csv").text()  # too few to be one


ONE = np.where(K == 7, 2.0, K % 2)
FEW_VALUES = {
    "a slip": (ONE, "has 3 different values, of which 2 stands in row 9 alone (a mistake?): --task classification"),
    "two that are not whole": (1.5 + K % 2, "has 2 different values: --task classification, if they are classes"),
    "ten": (K % 10 / 4, "has 10 different values: --task classification"),
    "eleven": (K % 11 / 4, None),
    "a quantity": (NOISE, None),
}


@pytest.mark.parametrize(("y", "words"), FEW_VALUES.values(), ids=FEW_VALUES)
def test_few_different_numbers_to_predict_may_be_classes_where_nobody_says_the_task(y, words, tmp_path):
    pd.DataFrame({"a": NOISE, "y": y}).to_csv(tmp_path / "t.csv", index=False)
    lines = [f"y: {f.sentence}" for f in inspect_table(tmp_path / "t.csv").findings if "different values" in f.sentence]
    given = inspect_table(tmp_path / "t.csv", given={"task": "regression"}).text()
    data = bp.load_data(tmp_path / "t.csv"), bp.load_data(tmp_path / "t.csv", task="regression")
    assert len(lines) == (words is not None) and all(words in line for line in lines)
    assert "different values" not in given + "".join(data[1].split.get("doubts", ()))
    assert [*data[0].split.get("doubts", ())][: len(lines)] == lines
    arrays = bp.dataset(NOISE[:, None], y).split.get("doubts", [])
    assert len(arrays) == len(lines) and all("different values" in line for line in arrays)


def test_a_value_or_none_may_tell_something(tmp_path):
    """A column of one value says something where rows lack it, but if these are left out."""
    pd.DataFrame({"a": NOISE, "half": np.where(K % 3, 1.0, np.nan), "y": DENY}).to_csv(tmp_path / "t.csv", index=False)
    report = inspect_table(tmp_path / "t.csv")
    said = [f.sentence for f in report.findings if f.column == "half"]
    assert said[1] == "is '1.0' or missing, which may tell something: --missing indicator keeps that"
    assert "--exclude" not in report.command and report.command.endswith("--missing indicator")
    doubts = {how: bp.load_data(tmp_path / "t.csv", missing=how).split.get("doubts") for how in ("indicator", "drop")}
    assert doubts == {"indicator": None, "drop": ["half: is 1 in every row, and tells nothing"]}


def test_a_peak_of_the_target_and_categories_among_numbers(tmp_path):
    """Each is named with what helps, and the command that `inspect` prints then trains."""
    zeros = np.where(K % 2 == 0, 0.0, 3 + NOISE)
    doors, two = np.array(["2", "3", "4", "5more"])[MANY % 4], np.where(K % 9 == 0, 4.375, -0.228)
    pd.DataFrame({"doors": doors, "two": two, "y": zeros}).to_csv(tmp_path / "t.csv", index=False)
    found = inspect_table(tmp_path / "t.csv", "y")
    said = {finding.column: finding.sentence for finding in found.findings}
    assert said.keys() == {"doors", "y"} and "text in 100" in said["doors"] and "is 0 in 50% of the rows" in said["y"]
    refuses("'5more' is not a number", bp.load_data, tmp_path / "t.csv", target="y")
    data = bp.load_data(tmp_path / "t.csv", target="y", categorical=["doors"])
    assert "is 0 in 50% of the rows" in data.split["doubts"][0] and "--categorical doors" in found.command
    smooth = pd.DataFrame({"a": NOISE, "y": np.where(K % 6 == 0, 0.0, 3 + NOISE)})  # a sixth
    smooth.to_csv(tmp_path / "t.csv", index=False)
    assert not [f for f in inspect_table(tmp_path / "t.csv", "y").findings if "peak" in f.sentence]
    counts = pd.DataFrame({"a": NOISE, "y": np.where(K % 2 == 0, 0, 1 + K % 40)})  # of which there is a noise
    counts.to_csv(tmp_path / "t.csv", index=False)
    assert not [f for f in inspect_table(tmp_path / "t.csv", "y", {"task": "counts"}).findings if "peak" in f.sentence]
    lengths = [*map(str, NOISE[:17].round(3)), "n.n."]  # as many different ones as rows are no categories
    pd.DataFrame({"a": lengths, "y": NOISE[:18]}).to_csv(tmp_path / "t.csv", index=False)
    assert "--categorical" not in inspect_table(tmp_path / "t.csv", "y").text()
    one = pd.DataFrame({"a": NOISE[:40], "b": np.where(K[:40] == 7, 3.5, np.nan), "y": NOISE[:40]})
    assert bp.dataset(one, "y", missing="indicator").schema.features == ("a", "b", "b missing")


DAYS = pd.Series(pd.date_range("2020-01-01", periods=len(K)).strftime("%Y-%m-%d"))
TIMES, WIDE = np.exp(NOISE), np.exp(4 * np.random.default_rng(1).normal(size=len(K)))
OFFERS = {
    "an identifier of which two are the same": (
        {"PID": 10**8 + 977 * np.maximum(K, 1)},
        NOISE,
        "PID",
        "nearly every row",
    ),
    "a serial number with a gap": ({"s": 5000 + K + (K == 9)}, NOISE, "s", "nearly every row: an identifier"),
    "a permutation with many again": ({"s": 5000 + K // 2 * 2}, NOISE, "s", None),
    "days in order": ({"day": DAYS}, NOISE, "day", "rows are in their order: --time day (time=)"),
    "days in another order": (
        {"day": DAYS[::-1].sample(frac=1, random_state=0).to_numpy()},
        NOISE,
        "day",
        "dates, such",
    ),
    "counts from 1 on": ({}, 1 + (K % 37) * (K % 5), "y", "whole numbers from 1 on; if they are counts, --task counts"),
    "whole numbers from 40 on": ({}, 40 + K % 37, "y", None),
    "a death and its time": ({"age": 40.0 + K % 50, "time": TIMES}, K % 2, "y", None),
    "a status beside a time": ({"status": K % 2}, TIMES, "status", "--target y --event status"),
    "a status of words": ({"status": np.where(K % 2, "True", "False")}, TIMES, "status", "--target y --event status"),
    "a status of codes": ({"status": K % 2 + 1}, TIMES, "status", "--target y --event status=VALUE"),
    "a status beside a grade": ({"status": K % 2}, 1 + K % 5, "status", None),
    "a marital status": ({"marital_status": K % 2}, TIMES, "marital_status", None),
    "a deadline": ({"deadline_met": K % 2}, TIMES, "deadline_met", None),
    "a status beside a score": ({"status": K % 2}, NOISE, "status", None),
}


@pytest.mark.parametrize(("columns", "y", "name", "words"), OFFERS.values(), ids=OFFERS)
def test_identifiers_times_counts_and_events_are_offered(columns, y, name, words, tmp_path):
    pd.DataFrame({**columns, "a": NOISE[::-1], "y": y}).to_csv(tmp_path / "t.csv", index=False)
    report = inspect_table(tmp_path / "t.csv", "y")
    said = [f.sentence for f in report.findings if f.column == name]
    assert any(words in one for one in said) if words else not [one for one in said if "skewed" not in one]
    assert report.command.endswith("--time day") is ("--time day" in str(words))
    resolve(parse(shlex.split(report.command)[1:]), {}).load()


def test_an_event_that_is_the_target_is_offered_with_the_time_and_a_far_value_is_named_unless_tails_are_long(tmp_path):
    frame = pd.DataFrame({"age": 40.0 + K % 50, "time": TIMES, "DEATH_EVENT": K % 2})
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert "--target time --event DEATH_EVENT" in inspect_table(tmp_path / "t.csv", "DEATH_EVENT").text()
    tails, two = np.exp(2 * np.random.default_rng(0).normal(size=400)), NOISE[:400].copy()
    two[[7, 9]] = 60.0, 90.0  # three so far out would be a tail
    columns = {"c0": WIDE, "two": two, "tails": tails, "y": NOISE}
    pd.DataFrame(columns).to_csv(tmp_path / "t.csv", index=False)
    findings = inspect_table(tmp_path / "t.csv", "y").findings
    assert [f.column for f in findings if "standard deviations of the others" in f.sentence] == ["c0", "two"]
    pd.DataFrame({"c0": WIDE, "y": tails}).to_csv(tmp_path / "t.csv", index=False)
    assert "y: " + f"{tails.max():.7g}" in inspect_table(tmp_path / "t.csv", "y").text()  # of a target it is said
