"""Benchmarks: like is compared with like, bytes are counted, results of committed code are kept and become tables."""

import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bnn_pyro as bp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import keep, mutants, provenance, tables
from benchmarks.accuracy.tables import sweep_table
from benchmarks.checks.references import RECIPES
from benchmarks.checks.tables import TABLES
from benchmarks.memory import Failed, asked_bytes, peak, run_apart, tree
from benchmarks.scaling import subjects
from benchmarks.scaling.formulae import expected
from benchmarks.scaling.subjects import SUBJECTS, measure
from benchmarks.speed import __main__ as speed
from benchmarks.speed.problem import Problem, Runner
from benchmarks.speed.steps import CONTESTANTS
from benchmarks.timing import Enough, clocked
from bnn_pyro.checks.reference_posterior import references
from bnn_pyro.files import resolve
from bnn_pyro.run import main
from bnn_pyro.runs.sweep_config import read_sweep_config

ROOT = Path(__file__).parents[1]
needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
CPU = torch.device("cpu")
CLASSES, CURVE = Problem((6, 5, 4, 3), 60, 12, CPU), Problem((1, 4, 1), 20, 20, CPU)
problems = pytest.mark.parametrize("problem", [CLASSES, CURVE], ids=lambda p: p.name)


# -- speed -------------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore")  # other packages' and Pyro's own
@problems
@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_contestant_takes_steps(name, problem):
    if CONTESTANTS[name].absent:
        pytest.skip("not installed")
    with bp.isolated(0):
        runner = Runner(CONTESTANTS[name], problem)
        with runner.active():
            losses = [float(runner.run(1)) for _ in range(2)]
        assert 0 < runner.seconds(2) < 10
    assert all(math.isfinite(loss) for loss in losses)


@problems
def test_local_reparametrization_has_one_loss(problem):
    """Of the same weights and noise, with and without Pyro, so that the ratio of their times is what Pyro costs."""
    losses = []
    for name in ("plain torch", "HiddenLayer in Pyro"):
        with bp.isolated(3):
            runner = Runner(CONTESTANTS[name], problem)
            with runner.active():
                losses.append(float(runner.run(1)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_timed_fit_stops_after_its_epochs():
    data, method = bp.load_data("toy-curve"), clocked(bp.SVI(epochs=100, lr=1e-3), 0.0, epochs_least=3)
    with pytest.raises(Enough):
        bp.fit(bp.MeanField(hidden=()), data, method, progress=False)
    assert len(method.ticks) == 3 and len(method.began) == 1 and len(method.epoch_seconds()) == 2


@pytest.mark.filterwarnings("ignore")
def test_the_program_writes_what_it_measured(tmp_path, capsys):
    out = tmp_path / "results.json"
    out.write_text('{"prediction": "of another day"}')
    options = ["--rounds", "2", "--steps", "1", "--sizes", "6-4-3", "--only", "deterministic", "mean-field"]
    speed.main(["steps", *options, "--out", str(out)])
    result = json.loads(out.read_text())
    found = result["steps"]["networks"]["6-4-3"]
    assert result["prediction"] == "of another day" and found["rounds"] == 2 and not found["failed"]
    assert found["ratios"]["mean-field / deterministic"]["median"] > 1
    assert "a training step" in capsys.readouterr().out


# -- scaling -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mean-field", {"width": 200}),
        ("hidden-layer", {"width": 200, "batch": 256}),
        ("map", {"width": 200}),
        ("last-svi", {"classes": 300}),
        ("last-sghmc", {"classes": 300, "draws": 2}),
        ("sghmc-chains", {"chains": 100, "draws": 2}),
        ("laplace", {"inputs": 40, "rows": 300}),
        ("predict", {"draws": 20, "points": 2000, "memory": 8, "width": 100}),
    ],
)
def test_formula_is_what_tensors_ask_for(name, sizes, monkeypatch):
    """Within a fifth or so."""
    subject = SUBJECTS[name]
    monkeypatch.setattr(subjects, "EPOCHS", 1)
    sizes = replace(subject.sizes, **sizes)
    quick = replace(sizes, rows=min(sizes.rows, 2 * sizes.batch), draws=min(sizes.draws, 40))
    subjects.run(subject, replace(quick, rows=32, points=4), 0.0)
    _, (asked,) = asked_bytes(lambda: subjects.run(subject, quick, 0.0))
    assert 0.8 < asked / expected(name, quick) < 1.25


def test_bytes_are_counted():
    kept = []

    def passing():  # 4 + 4 MB at once, in a product that goes again
        (torch.ones(1000, 1000) * 2)[:1].sum()

    held, peaks = asked_bytes(lambda: kept.append(torch.ones(500, 500)), passing, kept.clear)
    assert held == pytest.approx([1e6, 1e6, 0], abs=2e3)
    assert peaks == pytest.approx([1e6, 1e6 + 8e6, 1e6], abs=2e3)


@needs_proc
@pytest.mark.parametrize("name", [n for n in SUBJECTS if n != "chees-net"])
def test_every_subject_is_measured(name, monkeypatch):
    monkeypatch.setattr(subjects, "SECONDS", 0.0)
    own = SUBJECTS[name].sizes
    small = dict(rows=40, inputs=5, width=min(own.width, 6), batch=20, chains=2, draws=3, points=7, threads=1)
    found = measure(name, replace(own, **small))
    assert 0 < found["seconds"] < 10
    assert found["peak"] < 2**30 and math.isfinite(found["anonymous"])


@needs_proc
def test_peaks_are_those_of_the_block_and_of_the_process(tmp_path):
    with peak() as found:
        block = bytearray(40_000_000)
        block[::4096] = b"x" * len(block[::4096])
        del block
    assert 38e6 < found.resident < 60e6 and tree(1 << 30) == 0
    program = """import time; block = b"x" * 40_000_000; time.sleep(0.5); print('{"seconds": 2}')"""
    (tmp_path / "some_measurement.py").write_text(program)
    run = run_apart("some_measurement", PYTHONPATH=str(tmp_path))
    assert run["seconds"] == 2 and 38e6 < run["memory"] < 80e6
    (tmp_path / "some_measurement.py").write_text("raise SystemExit('no such thing')")
    with pytest.raises(Failed, match="no such thing"):
        run_apart("some_measurement", PYTHONPATH=str(tmp_path))


# -- results -----------------------------------------------------------------------------------------------------------
SWEEP = """
seeds = [0, 1]
[data.toy-curve]
[recipes.short]
variant = "mlp"
inference_settings = { epochs = 2 }
[recipes.long]
variant = "mlp"
inference_settings = { epochs = 4 }
"""


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/accuracy/*.toml")), ids=lambda p: p.stem)
def test_sweep_files_are_understood(path):
    files = re.findall(r'"((?:uci|tabular)/[^"]+)"', path.read_text())
    if missing := [name for name in files if not resolve(name).exists()]:
        pytest.skip(f"needs {missing[0]}")
    recipes = tomllib.loads(path.read_text())["recipes"]
    assert {task.recipe_name for task in read_sweep_config(path).tasks} == set(recipes)


def test_a_sweep_of_committed_code_is_kept_and_tabulated(tmp_path, monkeypatch):
    (tmp_path / "small.toml").write_text(SWEEP)
    out = ["--out", str(tmp_path / "sweep"), "--cores", "1", "--quiet"]
    assert main(["sweep", str(tmp_path / "small.toml"), *out]) == 0
    monkeypatch.setattr(keep, "RESULTS", tmp_path)
    path = tmp_path / "sweep" / "sweep.json"
    held = json.loads(path.read_text())
    for commit in ("8c96fb3-dirty", None):
        path.write_text(json.dumps(held | {"facts": held["facts"] | {"commit": commit}}))
        with pytest.raises(SystemExit, match="uncommitted code"):
            keep.main([str(tmp_path / "sweep")])
    path.write_text(json.dumps(held | {"facts": held["facts"] | {"commit": "8c96fb3"}}))
    keep.main([str(tmp_path / "sweep")])
    lines = sweep_table(tmp_path / "sweep_small.json").splitlines()
    assert lines[0].startswith("| toy-curve | fits | RMSE | NLL |")
    assert [line.split(" | ")[:2] for line in lines[2:4]] == [["| short", "2"], ["| long", "2"]]
    assert "commit 8c96fb3" in lines[-1]
    monkeypatch.setattr(provenance, "commit", lambda: "8c96fb3-dirty")
    provenance.check_tree(tmp_path / "any.json")
    with pytest.raises(SystemExit, match="commit what is changed"):
        provenance.check_tree(provenance.RESULTS / "speed.json")


def test_tables_are_replaced_between_their_markers(tmp_path, monkeypatch, capsys):
    assert sorted(RECIPES) == references() and TABLES["references"]().count("\n") == len(RECIPES) + 1
    page = tmp_path / "docs" / "results" / "page.md"
    page.parent.mkdir(parents=True)
    old, other = (f"<!-- begin {name} -->\nold\n<!-- end {name} -->" for name in ("references", "other"))
    page.write_text(f"a\n{old}\n{other}")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    tables.main([])
    text = page.read_text()
    assert text.startswith("a\n<!-- begin references -->\n\n| reference |") and old not in text
    assert text.endswith(other) and "written: references" in capsys.readouterr().out


def test_the_tests_of_a_fault_are_stopped_with_the_benchmark(tmp_path, monkeypatch):
    """They have a process group of their own, which Ctrl-C does not reach."""
    monkeypatch.setattr(mutants, "FORKS", multiprocessing.get_context("fork"))
    monkeypatch.setattr(mutants, "run_tests", lambda copy, tests: (os.setpgid(0, 0), time.sleep(60)))
    copies = mutants.Copies(tmp_path, 0)
    (tmp_path / mutants.LOG).touch()
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(copies._failed, tmp_path, "test_x.py", 60)
        while not copies._running:
            time.sleep(0.01)
        (process,) = copies._running
        copies.stop()
        assert failed.result(10) and process.exitcode == -signal.SIGKILL
