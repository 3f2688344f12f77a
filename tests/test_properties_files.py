"""Whatever lies in a table, an archive or a run, or is asked of a command: it is used, or refused in one line."""

import contextlib
import csv
import dataclasses
import io
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import properties
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import NUMBER, SHORT, TEXT, answer, cases, damage, place
from run_folders import MEAN_FIELD

import bnn_pyro as bp
from bnn_pyro.inference import methods_for
from bnn_pyro.posterior import read_archive

pytestmark = pytest.mark.usefixtures("quick")

# -- data --------------------------------------------------------------------------------------------------------------
CELLS = {
    "numbers": NUMBER,
    "words": properties.WORD,
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


# -- runs and options -----------------------------------------------------------------------------------------------
#: What the runs of this file are: quick ones of a guide, of chains, and of a last layer.
RUNS = {
    "svi": ["mean-field", "--epochs", "2", "--hidden", "3"],
    "nuts": ["mean-field", "--inference", "nuts", "--hidden", "3", "--set", "draws=4", "--set", "warmup=4",
             "--set", "chains=2", "--set", "compiled=no", "--set", "cores=1", "--set", "max_tree_depth=3"],
    "laplace": ["last-layer", "--inference", "laplace", "--set", "backbone=RUNS/svi/baseline"],
}  # fmt: skip
COMMON = ["--data", "toy-curve", "--num-draws", "3", "--device", "cpu", "--quiet"]
#: Files that hold numbers to be trusted: a change in one of them is always noticed.
SEALED = ("posterior.pt", "posterior.json")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: a finished run}, the first of them diagnosed."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in RUNS.items():
        small = ["--no-baseline"] if name == "nuts" else []
        options = [option.replace("RUNS", str(folder)) for option in options]
        done = answer(["train", *options, *COMMON, *small, "--out", str(folder / name)])
        assert done.code == 0, done.err
    assert answer(["diagnose", str(folder / "nuts"), "--no-netcdf", "--quiet"]).code == 0
    return {name: folder / name for name in RUNS}


COMMANDS = {
    "evaluate": ["evaluate", "RUN", "--quiet"],
    "prune": ["evaluate", "RUN", "--prune", "--quiet"],
    "predict": ["predict", "RUN", "--input", "toy-curve", "--output", "CASE/p.csv", "--quiet"],
    "compare": ["compare", "RUN", "OTHER", "--out", "CASE/c.html", "--quiet"],
    "resume": ["train", "--resume", "--out", "RUN", "--quiet"],
    "again": ["train", "--config", "RUN/config.json", "--out", "CASE/again", "--quiet"],
    "overwrite": ["train", "--overwrite", "--out", "RUN", *RUNS["svi"], *COMMON],
    "diagnose": ["diagnose", "RUN", "--no-netcdf", "--out", "CASE/d", "--quiet"],
}


@cases(34)
@given(
    data=st.data(),
    name=st.sampled_from(["svi", "svi", "nuts", "laplace"]),
    command=st.sampled_from([*COMMANDS, *[c for c in COMMANDS if c not in ("diagnose", "again")] * 3]),
)
def test_a_damaged_run_is_used_or_refused(runs, data, name, command):
    with place("damaged run") as folder:
        run = folder / "run"
        shutil.copytree(runs[name], run)
        files = sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.is_file())
        for _ in range(data.draw(st.sampled_from([1, 1, 1, 2]))):
            path = run / data.draw(st.sampled_from([*files, *SEALED, "config.json", "config.json"]))
            blob = path.read_bytes() if path.is_file() else b""
            how = data.draw(st.sampled_from(["bytes", "json", "json", "swap", "remove", "code"]))
            if how == "json" and path.suffix == ".json" and blob:
                path.write_bytes(data.draw(properties.changed_json(blob)))
            elif how == "swap":
                path.write_bytes((run / data.draw(st.sampled_from(files))).read_bytes())
            elif how == "remove":
                path.unlink(missing_ok=True)
            elif how == "code":
                path.write_bytes(properties.planted(folder / "executed"))
            else:
                path.write_bytes(data.draw(damage(blob)))
        before = properties.contents(run)
        sealed = all((run / f).is_file() and (run / f).read_bytes() == (runs[name] / f).read_bytes() for f in SEALED)
        here = {"RUN": str(run), "OTHER": str(runs["svi"]), "CASE": str(folder)}
        argv = COMMANDS[command]
        for word, value in here.items():
            argv = [arg.replace(word, value) for arg in argv]
        done = answer(argv)
        if done.code == 2:
            told = ("environment.json", "history.csv") if command == "resume" else ()  # of when it was last run
            before = {k: v for k, v in before.items() if Path(k).name not in told}
            kept = {k: v for k, v in properties.contents(run).items() if k in before}
            assert kept == before, "a failing command changed the run"
        elif command not in ("overwrite", "again", "resume") and not sealed:
            same = all(read_archive(run)[1][k] == read_archive(runs[name])[1][k] for k in ("schema", "provenance"))
            assert same, "an altered posterior was used"
        elif command == "resume":
            bp.load(run)


#: What every training by options says last, so that it ends within a second.
QUICK = {
    "epochs": 2, "draws": 3, "warmup": 3, "chains": 2, "cycles": 1, "max_tree_depth": 2, "max_steps": 3, "members": 2,
    "map_epochs": 2, "start_epochs": 2, "samples": 2,
}  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(["0", "1", "2", "3", "-1", "0.5", "1e-3", "nan", "inf", "-inf", "1e30", "1e-30", "", ",", "3,2",
                     "3,,2", "true", "no", "None", "normal:1", "normal:0", "normal:nan", "normal", "fan-in:-1",
                     "scale-mixture:1,0.1,0.5", "scale-mixture:1,0.1,2", "gamma:1", "relu", "learned",
                     "heteroscedastic", "svi", "map", "nuts", "auto", "full", "low-rank:2", "4:8"]),
    properties.LINE,
)  # fmt: skip
FLAGS = ["--hidden", "--activation", "--prior", "--noise", "--inference", "--epochs", "--batch-size", "--lr", "--seed",
         "--limit", "--validation", "--data-seed", "--target", "--task", "--features", "--device", "--num-draws",
         "--split", "--splits", "--config", "--data"]  # fmt: skip
SWITCHES = ["--bias", "--no-bias", "--baseline", "--no-baseline", "--drop-missing", "--resume", "--overwrite", "--fast",
            "extra", "--", "-x", "--epoch=3"]  # fmt: skip
NAMES = sorted({f.name for table in (bp.ZOO, bp.METHODS) for kind in table.values() for f in dataclasses.fields(kind)})


def costly(text: str) -> bool:
    """Whether a value asks for more than a test has, and rightly gets it."""
    for part in text.replace(":", ",").split(","):
        with contextlib.suppress(ValueError):
            if float(part) > 200:
                return True
    return False


@st.composite
def arguments(draw) -> list[str]:
    """A training that is short, with a few options that may be good or bad."""
    data = draw(st.sampled_from(["toy-curve", "toy-curve", "breast-cancer", "digits"]))
    variant = draw(st.sampled_from(["mean-field", "mean-field", "mlp", *bp.ZOO]))
    argv = [variant, "--data", data, "--limit", "20", *SHORT]
    for _ in range(draw(st.integers(0, 4))):
        what, value, flag, name = draw(
            st.tuples(st.integers(0, 5), VALUES, st.sampled_from(FLAGS), st.sampled_from(NAMES))
        )
        if what == 0:
            argv.append(draw(st.sampled_from(SWITCHES)))
        elif what < 4:
            assume(not (flag in ("--hidden", "--epochs", "--num-draws") and costly(value)))
            argv.append(f"{flag}={value}")
        else:
            assume(not costly(value) or name in ("lr", "temperature", "prior", "noise", "init_scale"))
            argv += ["--set", f"{name}={value}"]
    method = draw(st.sampled_from([None, None, *methods_for(bp.ZOO[variant])]))
    kinds = [bp.ZOO[variant], bp.METHODS[method or methods_for(bp.ZOO[variant])[0]]]
    names = {f.name for kind in kinds for f in dataclasses.fields(kind)} & set(QUICK)
    short = [f"--set={name}={QUICK[name]}" for name in sorted(names) if name not in " ".join(argv)]
    return [*argv, *([] if method is None else ["--inference", method]), *short]


@cases(20)
@given(argv=arguments())
def test_a_training_runs_or_is_refused(argv):
    with place("options of train") as folder:
        done = answer(["train", "--out", str(folder / "run"), *argv])
        if done.code == 0:
            assert (folder / "run" / "report.html").is_file() and not list(folder.rglob("*.part"))
        else:
            assert not (folder / "run" / "posterior.pt").exists()
