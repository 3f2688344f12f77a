"""Whatever lies in a table, an archive or a picture: it is trained on, or refused in one line, and never changed."""

import csv
import io

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import MEAN_FIELD, NUMBER, SHORT, TEXT, WORD, answer, cases, damage, place

pytestmark = pytest.mark.usefixtures("quick")


CELLS = {
    "numbers": NUMBER,
    "words": WORD,
    "labels": st.integers(0, 2).map(str),
    "dates": st.dates().map(str),
    "texts": st.text(max_size=6),
    "anything": st.one_of(TEXT, NUMBER),
    "huge": st.sampled_from(["1e30", "3e38", "-3e38", "1e-40", "0", "1.7e9", "1.7000000001e9"]),
}


@st.composite
def column(draw, rows: int) -> list[str]:
    """Cells of one kind, or one and the same, with an odd one among them."""
    some = draw(st.lists(CELLS[draw(st.sampled_from(sorted(CELLS)))], min_size=1, max_size=12))
    cells = [some[i % len(some)] for i in range(rows)]
    if rows and draw(st.booleans()):
        cells[draw(st.integers(0, rows - 1))] = draw(TEXT)
    return cells


@st.composite
def table(draw) -> tuple[bytes, list[str]]:
    """The bytes of a table, and options that may fit it."""
    rows, width = draw(st.sampled_from([0, 1, 2, 3, 12, 30, 30, 30, 60])), draw(st.integers(1, 4))
    names = draw(st.lists(st.one_of(st.sampled_from(["a", "b", "y", "price"]), TEXT), min_size=width, max_size=width))
    names = ["a", "b", "c", "y"][4 - width :] if draw(st.booleans()) else names
    lines = [names, *zip(*[draw(column(rows)) for _ in range(width)], strict=True)]
    text, quoting = io.StringIO(), draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    end, separator = draw(st.sampled_from(["\n", "\n", "\r\n", "\r", "\n\n"])), draw(st.sampled_from(",,;\t"))
    csv.writer(text, delimiter=separator, lineterminator=end, quoting=quoting).writerows(lines)
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8-sig", "latin-1", "utf-16", "cp1252"]))
    blob = text.getvalue().encode(encoding, errors="replace")
    blob = blob if draw(st.integers(0, 5)) else draw(damage(blob))
    options = [] if draw(st.booleans()) else [f"--target={draw(st.sampled_from(names))}"]
    options += [word for option in draw(st.lists(st.sampled_from(OPTIONS), max_size=2)) for word in option]
    return blob, [" ".join(option.replace("\x00", "").split()) for option in options]


OPTIONS = [
    ["--task", "regression"], ["--task", "classification"], ["--drop-missing"], ["--features", "a"],
    ["--features", "a,b"], ["--limit", "5"], ["--limit", "0"], ["--validation", "3"], ["--validation", "-1"],
    ["--data-seed", "7"], ["--split", "1"], ["--inference", "map"], ["--noise", "heteroscedastic"],
]  # fmt: skip


@st.composite
def archive(draw) -> bytes:
    """An NPZ file that will do, or a damaged one."""
    file, shape = io.BytesIO(), draw(st.sampled_from([(30, 3), (30, 4, 4), (30, 2, 3, 1), (30,), (29, 3)]))
    np.savez(file, x=np.random.default_rng(0).normal(size=shape), y=np.arange(30) % draw(st.sampled_from([1, 3, 30])))
    return draw(st.one_of(st.just(file.getvalue()), damage(file.getvalue())))


TABLES = st.tuples(st.sampled_from([".csv", ".csv", ".csv", ".tsv", ".CSV", ".txt", ".npz"]), table())
FEW = st.sampled_from([[], ["--drop-missing"], ["--task", "regression"], ["--features", "x1"]])


@cases(46)
@given(file=st.one_of(TABLES, TABLES, st.tuples(st.just(".npz"), st.tuples(archive(), FEW))))
def test_a_file_is_trained_on_or_refused(file):
    suffix, (blob, options) = file
    with place("file to train on") as folder:
        path, run, output = folder / f"data{suffix}", folder / "run", folder / "p.csv"
        path.write_bytes(blob)
        done = answer([*MEAN_FIELD, "--data", str(path), "--no-baseline", "--out", str(run), *options, *SHORT])
        assert path.read_bytes() == blob
        if done.code:
            assert not (run / "posterior.pt").exists()
            return
        found = answer(["predict", str(run), "--input", str(path), "--output", str(output), "--quiet"])
        assert path.read_bytes() == blob
        if found.code == 0:
            assert np.isfinite(pd.read_csv(output).select_dtypes("number").to_numpy()).all()
