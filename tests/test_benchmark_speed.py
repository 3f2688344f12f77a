"""The speed benchmarks compare like with like: steps of one loss, bytes counted exactly, rounds that are whole."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import bnn_pyro as bp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.memory import asked_bytes
from benchmarks.speed import __main__ as speed
from benchmarks.speed.main_figures_worker import FIGURES
from benchmarks.speed.problem import Problem, Runner
from benchmarks.speed.steps import CONTESTANTS
from benchmarks.timing import Enough, clocked, ratio, spread, take_turns

CPU = torch.device("cpu")
CLASSES, CURVE = Problem((6, 5, 4, 3), 60, 12, CPU), Problem((1, 4, 1), 20, 20, CPU)


@pytest.mark.filterwarnings("ignore")  # other packages' and Pyro's own
@pytest.mark.parametrize("problem", [CLASSES, CURVE], ids=lambda p: p.name)
@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_contestant_takes_steps(name, problem):
    if CONTESTANTS[name].absent:
        pytest.skip("not installed")
    with bp.isolated(0):
        runner = Runner(CONTESTANTS[name], problem)
        with runner.active():
            losses = [float(runner.run(1)) for _ in range(4)]
        assert 0 < runner.seconds(2) < 10
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("problem", [CLASSES, CURVE], ids=lambda p: p.name)
def test_local_reparametrization_has_one_loss(problem):
    """Of the same weights and noise, with and without Pyro, so that the ratio of their times is what Pyro costs."""
    losses = []
    for name in ("plain torch", "HiddenLayer in Pyro"):
        with bp.isolated(3):
            runner = Runner(CONTESTANTS[name], problem)
            with runner.active():
                losses.append(float(runner.run(1)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_bytes_are_counted():
    kept = []

    def passing():  # 4 + 4 MB at once, in a product that goes again
        (torch.ones(1000, 1000) * 2)[:1].sum()

    held, peaks = asked_bytes(lambda: kept.append(torch.ones(500, 500)), passing, kept.clear)
    assert held == pytest.approx([1e6, 1e6, 0], abs=2e3)
    assert peaks == pytest.approx([1e6, 1e6 + 8e6, 1e6], abs=2e3)


def test_ratios_are_taken_within_rounds():
    times = {"a": [2.0, 40.0, 6.0], "b": [1.0, 10.0, 2.0]}
    assert ratio(times, "a", "b") == {"median": 3.0, "quartiles": [2.5, 3.5]}
    assert ratio(times, "a", "absent") is None
    assert spread([5.0]) == {"median": 5.0, "quartiles": [5.0, 5.0]}


def test_an_interrupt_keeps_the_whole_rounds():
    calls = []

    def run():
        calls.append(1)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return 1.0

    times = {}
    with pytest.raises(KeyboardInterrupt):
        take_turns({"a": run, "b": run}, 50, times)
    assert times == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_a_timed_fit_stops_after_its_epochs():
    data = bp.load_data("toy-curve")
    method = clocked(bp.SVI(epochs=100, lr=1e-3), 0.0, epochs_least=3)
    with pytest.raises(Enough):
        bp.fit(bp.MeanField(hidden=()), data, method, progress=False)
    assert len(method.ticks) == 3 and len(method.began) == 1 and len(method.epoch_seconds()) == 2
    whole = clocked(bp.SVI(epochs=4, lr=1e-3))
    trace = bp.fit(bp.MeanField(hidden=()), data, whole, progress=False).trace["elbo"]
    assert len(trace) == len(whole.ticks) == 4


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


def test_main_figures_repeat_their_numbers(monkeypatch):
    monkeypatch.setattr(bp, "SVI", lambda epochs, **rest: bp.inference.SVI(epochs=2, **rest), raising=False)
    first, again = (FIGURES["small step"](bp) for _ in range(2))
    assert first[0] > 0 and first[1] == again[1]
