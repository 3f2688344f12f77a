"""Whatever lies in a table, an archive or a picture: it is trained on, or refused in one line, and never changed."""

import io

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from properties import NUMBER, SHORT, TEXT, WORD, Planted, answer, array, cases, contents, damage, place, planted, tally


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Figures take most of the time of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bnn_pyro.runs.evaluate.draw_all", lambda scene, folder: [])
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run on a table, and one on images."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [f"{i % 7},{'red' if i % 3 else 'blue'},{100 + 2.5 * i}" for i in range(40)]
    (folder / "t.csv").write_text("rooms,colour,price\n" + "\n".join(rows) + "\n")
    answer(["train", "--data", str(folder / "t.csv"), "--target", "price", "--out", str(folder / "table"), *SHORT])
    answer(["train", "--data", "digits", "--limit", "60", "--out", str(folder / "images"), *SHORT])
    return folder


# -- tables ----------------------------------------------------------------------------------------------------------
@st.composite
def column(draw, rows: int) -> list[str]:
    """Cells of one kind, with a few odd ones among them."""
    kind = draw(st.sampled_from(["numbers", "words", "labels", "constant", "dates", "texts", "anything", "huge"]))
    cell = {
        "numbers": NUMBER,
        "words": WORD,
        "labels": st.integers(0, 2).map(str),
        "constant": st.just(draw(TEXT)),
        "dates": st.dates().map(str),
        "texts": st.text(max_size=6),
        "anything": st.one_of(TEXT, NUMBER),
        "huge": st.sampled_from(["1e30", "3e38", "-3e38", "1e-40", "0", "1.7e9", "1.7000000001e9"]),
    }[kind]
    some = draw(st.lists(cell, min_size=min(rows, 1), max_size=min(rows, 12)))
    cells = [some[i % len(some)] for i in range(rows)]
    for at in draw(st.lists(st.integers(0, max(0, rows - 1)), max_size=2)) if rows else ():
        cells[at] = draw(TEXT)
    return cells


@st.composite
def table(draw) -> tuple[bytes, list[str]]:
    """The bytes of a table, and options that may fit it."""
    rows = draw(st.sampled_from([0, 1, 2, 3, 12, 30, 30, 30, 60]))
    width = draw(st.integers(1, 4))
    names = draw(st.lists(st.one_of(st.sampled_from(["a", "b", "y", "price"]), TEXT), min_size=width, max_size=width))
    if draw(st.booleans()):
        names = ["a", "b", "c", "y"][4 - width :]
    columns = [draw(column(rows)) for _ in range(width)]
    separator = draw(st.sampled_from([",", ",", ";", "\t"]))
    quoted = draw(st.booleans())

    def cell(text: str) -> str:
        return '"' + text.replace('"', '""') + '"' if quoted or separator in text else text

    end = draw(st.sampled_from(["\n", "\n", "\r\n", "\r", "\n\n"]))
    lines = [separator.join(map(cell, line)) for line in [names, *zip(*columns, strict=True)]]
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8-sig", "latin-1", "utf-16", "cp1252"]))
    blob = (end.join(lines) + draw(st.sampled_from(["", end]))).encode(encoding, errors="replace")
    if draw(st.integers(0, 5)) == 0:
        blob = draw(damage(blob))
    options = [] if draw(st.booleans()) else [f"--target={draw(st.sampled_from(names))}"]
    for option in draw(st.lists(st.sampled_from(OPTIONS), max_size=2)):
        options += option
    return blob, [" ".join(option.replace("\x00", "").split()) for option in options]


OPTIONS = [
    ["--task", "regression"], ["--task", "classification"], ["--drop-missing"], ["--features", "a"],
    ["--features", "a,b"], ["--limit", "5"], ["--limit", "1"], ["--limit", "0"], ["--validation", "3"],
    ["--validation", "0"], ["--validation", "-1"], ["--data-seed", "7"], ["--data-seed", "-1"], ["--split", "1"],
    ["--inference", "map"], ["--noise", "heteroscedastic"],
]  # fmt: skip


@cases(16)
@given(case=table(), suffix=st.sampled_from([".csv", ".csv", ".csv", ".tsv", ".CSV", ".txt", ".npz"]))
def test_a_table_is_trained_on_or_refused(case, suffix):
    tally("table to train on")
    blob, options = case
    with place() as folder:
        path = folder / f"table{suffix}"
        path.write_bytes(blob)
        done = answer(["train", "--data", str(path), "--no-baseline", "--out", str(folder / "run"), *options, *SHORT])
        assert path.read_bytes() == blob
        if done.code:
            assert not (folder / "run" / "posterior.pt").exists()
            return
        output = folder / "p.csv"
        found = answer(["predict", str(folder / "run"), "--input", str(path), "--output", str(output), "--quiet"])
        assert path.read_bytes() == blob
        if found.code == 0:
            assert np.isfinite(pd.read_csv(output).select_dtypes("number").to_numpy()).all()


@cases(8)
@given(case=table(), how=st.sampled_from(["predict", "evaluate"]), known=st.integers(0, 3))
def test_rows_for_a_run_are_predicted_or_refused(runs, case, how, known):
    tally("table to predict")
    blob, _ = case
    if known == 0:  # of the run's own columns
        blob = blob.replace(b"a", b"rooms", 1).replace(b"b", b"colour", 1).replace(b"y", b"price", 1)
    before = contents(runs / "table")
    with place() as folder:
        path, output = folder / "new.csv", folder / "p.csv"
        path.write_bytes(blob)
        if how == "predict":
            argv = ["predict", str(runs / "table"), "--input", str(path), "--output", str(output), "--quiet"]
        else:
            argv = ["evaluate", str(runs / "table"), "--data", str(path), "--quiet"]
        done = answer(argv)
        assert path.read_bytes() == blob
        assert output.exists() == (how == "predict" and done.code == 0)
    (runs / "table" / "metrics-new.json").unlink(missing_ok=True)
    assert contents(runs / "table") == before


# -- archives --------------------------------------------------------------------------------------------------------
@st.composite
def archive(draw) -> bytes:
    """An NPZ file whose arrays may be of any type and shape, or damaged."""
    rows = draw(st.sampled_from([None, 30, 30, 30]))
    arrays = {"x": draw(array(rows)), "y": draw(array(rows))}
    if draw(st.booleans()) and rows:  # targets of a kind that will do
        arrays["y"] = np.arange(rows) % 3 if draw(st.booleans()) else np.linspace(0, 1, rows)
    if draw(st.integers(0, 4)) == 0:
        arrays["classes"] = np.array(draw(st.lists(TEXT, max_size=4)), dtype="U6")
    if draw(st.integers(0, 6)) == 0:
        arrays = {draw(st.sampled_from(["arr_0", "X", "x", "labels", "a/b", "x.npy"])): arrays["x"]}
    file = io.BytesIO()
    (np.savez_compressed if draw(st.booleans()) else np.savez)(file, **arrays, allow_pickle=True)
    blob = file.getvalue()
    return draw(damage(blob)) if draw(st.integers(0, 2)) == 0 else blob


@cases(13)
@given(
    blob=archive(), options=st.sampled_from([[], ["--drop-missing"], ["--task", "regression"], ["--features", "x1"]])
)
def test_an_archive_is_trained_on_or_refused(blob, options):
    tally("archive to train on")
    with place() as folder:
        path = folder / "a.npz"
        path.write_bytes(blob)
        done = answer(["train", "--data", str(path), "--no-baseline", "--out", str(folder / "run"), *options, *SHORT])
        assert path.read_bytes() == blob
        if done.code:
            assert not (folder / "run" / "posterior.pt").exists()


@cases(2)
@given(data=st.data(), name=st.sampled_from(["x", "y", "classes", "arr_0"]))
def test_code_in_an_archive_is_not_executed(data, name):
    tally("archive with code")
    with place() as folder:
        arrays = {"x": np.zeros((30, 2)), "y": np.arange(30) % 2}
        arrays[name] = data.draw(st.sampled_from([(), (30,), (30, 2)]).map(lambda shape: np.full(shape, None, object)))
        arrays[name][...] = Planted(folder / "executed")
        np.savez(folder / "a.npz", **arrays)
        if data.draw(st.booleans()):  # or no NPZ file at all
            (folder / "a.npz").write_bytes(planted(folder / "executed"))
        done = answer(["train", "--data", str(folder / "a.npz"), "--out", str(folder / "run"), *SHORT])
        assert done.code == 2


@cases(3)
@given(chosen=array(), name=st.sampled_from(["test_0", "test_0", "test_1", "rows"]), harm=st.booleans(), data=st.data())
def test_given_splits_are_used_or_refused(chosen, name, harm, data):
    tally("splits")
    with place() as folder:
        rows = "\n".join(f"{i},{i * i % 11}.5" for i in range(30))
        (folder / "t.csv").write_text(f"a,y\n{rows}\n")
        if data.draw(st.booleans()):
            chosen = np.array(data.draw(st.lists(st.integers(-1, 31), max_size=6)), dtype=int)
        np.savez(folder / "s.npz", **{name: chosen})
        if harm:
            (folder / "s.npz").write_bytes(data.draw(damage((folder / "s.npz").read_bytes())))
        before = {name: (folder / name).read_bytes() for name in ("t.csv", "s.npz")}
        where = ["--data", str(folder / "t.csv"), "--splits", str(folder / "s.npz"), "--out", str(folder / "run")]
        answer(["train", *where, "--no-baseline", *SHORT])
        assert before == {name: (folder / name).read_bytes() for name in before}


# -- pictures --------------------------------------------------------------------------------------------------------
@st.composite
def picture(draw) -> bytes:
    """A PNG, JPG, or something else of that name."""
    mode = draw(st.sampled_from(["L", "RGB", "RGBA", "P", "1", "I;16", "LA", "CMYK", "F"]))
    size = draw(st.sampled_from([(8, 8), (1, 1), (3, 50), (40, 20)]))
    kind = {"CMYK": "JPEG", "F": "TIFF"}.get(mode, "PNG" if mode != "L" or draw(st.booleans()) else "JPEG")
    file = io.BytesIO()
    Image.new(mode, size, draw(st.integers(0, 255)) if mode not in ("RGB", "RGBA", "CMYK", "LA") else 0).save(
        file, kind
    )
    return draw(damage(file.getvalue())) if draw(st.booleans()) else file.getvalue()


@cases(4)
@given(blob=picture(), suffix=st.sampled_from([".png", ".jpg", ".JPEG", ".gif"]), invert=st.booleans())
def test_a_picture_is_predicted_or_refused(runs, blob, suffix, invert):
    tally("picture")
    with place() as folder:
        path, output = folder / f"p{suffix}", folder / "p.csv"
        path.write_bytes(blob)
        inputs = ["--input", str(path), "--output", str(output), "--quiet", *(["--invert"] if invert else [])]
        done = answer(["predict", str(runs / "images"), *inputs])
        assert path.read_bytes() == blob and output.exists() == (done.code == 0)
