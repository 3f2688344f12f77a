"""The benchmark of scaling: formulae of bytes count what there is, and every measurement runs."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bnn_pyro as bp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.memory import Failed, asked_bytes, peak, run_apart, tree
from benchmarks.scaling import many, processes, subjects, tables
from benchmarks.scaling.formulae import FORMULAE, TEXTS, expected
from benchmarks.scaling.growth import SWEEPS
from benchmarks.scaling.sizes import Sizes
from benchmarks.scaling.subjects import SUBJECTS, measure

needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
NET = Sizes(rows=64, inputs=30, width=20, batch=16)


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("name", ["mean-field", "map", "hidden-layer"])
def test_what_a_fit_holds_is_counted_exactly(name, monkeypatch):
    """Between two steps: the network, q's parameters, their gradients and the optimiser's state."""
    kept = {}
    adam = torch.optim.Adam

    def watched(parameters, **settings):
        kept["optimiser"] = made = adam(parameters, **settings)
        return made

    monkeypatch.setattr(torch.optim, "Adam", watched)
    subject, data = SUBJECTS[name], NET.data()
    entry, how = subject.entry(NET), subject.method(NET)
    with bp.isolated(0):
        model = entry.model(data.schema)
        replace(how, epochs=1).run(model, entry.guide(model) if hasattr(entry, "guide") else None, data)
    parameters = [p for group in kept["optimiser"].param_groups for p in group["params"]]
    moments = [v for state in kept["optimiser"].state.values() for k, v in state.items() if k.startswith("exp_avg")]
    parts = FORMULAE[name](NET)["training"]
    locations = "locations" if name == "map" else "locations_and_scales"
    assert name == "hidden-layer" or size(p for p in model.net.parameters()) == parts["network"]
    assert size(parameters) == parts[locations]
    assert size(p.grad for p in parameters) == parts["gradients"]
    assert size(moments) == parts["adam"]


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


def test_prediction_of_more_draws_takes_no_more_than_its_result():
    """With a bound: what is beside the result stays, once draws fill a block."""
    base = Sizes(draws=256)
    beside = {s: expected("predict", replace(base, draws=s)) - 4 * s * base.points * base.classes for s in (256, 1024)}
    joined = 4 * 1024 * base.points * base.classes
    assert beside[1024] - beside[256] <= joined
    many_points = replace(base, points=16_000, draws=32)
    bounded, unbounded = (expected("predict", replace(many_points, memory=mib)) for mib in (32, 0))
    assert bounded < 0.3 * unbounded


def test_sizes_count_weights():
    assert Sizes(inputs=784, width=400, classes=10).weights == 784 * 400 + 400 + 400 * 400 + 400 + 400 * 10 + 10
    assert Sizes(inputs=30, width=0, classes=2).weights == 31
    with bp.isolated(0):
        model = bp.MeanField(hidden=NET.hidden).model(NET.data().schema)
    assert sum(p.numel() for p in model.net.parameters()) == NET.weights


def test_every_formula_is_of_something_measured():
    assert {sweep[0] for sweep in SWEEPS} <= FORMULAE.keys() <= SUBJECTS.keys()
    assert TEXTS.keys() <= FORMULAE.keys()
    for name, grows, values, fixed in SWEEPS:
        sizes = [replace(SUBJECTS[name].sizes, **fixed, **{grows: value}) for value in values]
        grown = [expected(name, s) for s in sizes]
        assert grown == sorted(grown), (name, grows)


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
    assert 38e6 < found.resident < 60e6
    assert tree(1 << 30) == 0
    program = """import time; block = b"x" * 40_000_000; time.sleep(0.5); print('{"seconds": 2}')"""
    (tmp_path / "some_measurement.py").write_text(program)
    run = run_apart("some_measurement", PYTHONPATH=str(tmp_path))
    assert run["seconds"] == 2 and 38e6 < run["memory"] < 80e6
    (tmp_path / "some_measurement.py").write_text("raise SystemExit('no such thing')")
    with pytest.raises(Failed, match="no such thing"):
        run_apart("some_measurement", PYTHONPATH=str(tmp_path))


@needs_proc
def test_a_fit_is_timed(monkeypatch):
    monkeypatch.setattr(bp, "load_data", lambda name, limit: replace(NET, rows=limit, inputs=784).data(), raising=False)
    found = processes.time_fit("mean-field", 32, rows=64)
    assert found["rows"] == 64 and found["rows_per_second"] > 0
    assert {way.processes * way.threads for way in processes.ways(4)} == {1, 4}


def test_many_fits_run_here(monkeypatch):
    monkeypatch.setitem(many.JOBS, "fits", ("", lambda seed: many.svi(seed, steps=4), 2, ()))
    here, loop = (many.run_job("fits", way, 2) for way in ("here, one thread", "a plain loop"))
    assert here["results"] == loop["results"] and len(here["results"]) == 2


def test_tables_are_of_the_least_run_and_the_last_power():
    assert tables.best({"runs": [{"seconds": 2.0}, {"seconds": 1.0}]}, "seconds") == 1.0
    assert tables.exponent([1, 2, 4], [1, 1, 2]) == pytest.approx(1)
    for name, made in tables.TABLES.items():
        assert made().count("|") > 20, name
