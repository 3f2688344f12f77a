"""The speed benchmark compares like with like: steps of one loss, bytes counted exactly, rounds that are whole."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.inference.optimise import Optimisation

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import hidden_layer
from speed import CONTESTANTS
from speed.memory import peak_bytes
from speed.problem import Contestant, Problem, Runner
from speed.timing import ratio, spread, take_turns
from speed.zoo import svi_step, variant

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
        with runner.at_work():
            first = float(runner.run(1))
        with runner.at_work():
            losses = [float(runner.run(1)) for _ in range(len(problem.batches) * 5)]
    assert all(math.isfinite(loss) for loss in [first, *losses])
    assert len(set(losses)) > 1 or "no update" in name


@pytest.mark.parametrize("problem", [CLASSES, CURVE], ids=lambda p: p.name)
def test_ours_and_plain_torch_have_one_loss(problem):
    """The same weights, noise and updates, so that their ratio is what Pyro costs."""
    found = {}
    for name in ("plain torch", "plain torch, plain autograd", "HiddenLayer by hand"):
        with bp.isolated(3):
            runner = Runner(CONTESTANTS[name], problem)
            with runner.at_work():
                found[name] = [float(runner.run(1)) for _ in range(5)]
    ours = found.pop("HiddenLayer by hand")
    for losses in found.values():
        assert losses == pytest.approx(ours, rel=1e-4)


def test_our_step_is_that_of_the_training_loop():
    x, y = CLASSES.batches[0]
    data = bp.Dataset("rows", CLASSES.schema, x, y, x[:0], y[:0], x[:0], y[:0])
    with bp.isolated(0):
        model, trained = variant("mean-field", CLASSES)
        start = {k: v.clone() for k, v in trained.state_dict().items()}
        stepped = variant("mean-field", CLASSES)[1]
        stepped.load_state_dict(start)
    with bp.isolated(1):
        Optimisation(epochs=3, batch_size=0, lr=1e-3, final_lr=1.0).minimise(model, trained, data, seed=0)
    with bp.isolated(1):
        step = svi_step(model, stepped, len(x))
        for _ in range(3):
            step(x, y)
    for name, value in stepped.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name]) and not torch.equal(value, start[name]), name


def test_bytes_are_counted():
    kept = []

    def passing():  # 4 + 2 MB at once, in a product that goes again
        (torch.ones(1000, 1000) * 2)[:1].sum()

    held, peaks = peak_bytes(CPU, lambda: kept.append(torch.ones(500, 500)), passing, kept.clear)
    assert held == pytest.approx([1e6, 1e6, 0], abs=2e3)
    assert peaks == pytest.approx([1e6, 1e6 + 8e6, 1e6], abs=2e3)


def test_ratios_are_taken_within_rounds():
    times = {"a": [2.0, 40.0, 6.0], "b": [1.0, 10.0, 2.0]}
    assert ratio(times, "a", "b") == {"median": 3.0, "quartiles": [2.5, 3.5]}
    assert ratio(times, "a", "absent") is None
    assert spread([5.0]) == {"median": 5.0, "quartiles": [5.0, 5.0]}


def test_an_interrupt_keeps_the_whole_rounds():
    calls = []

    def build(problem):
        def step(x, y):
            calls.append(1)
            if len(calls) > 8:
                raise KeyboardInterrupt

        return step

    runners = {name: Runner(Contestant(build, ""), CLASSES) for name in "ab"}
    times = {}
    with pytest.raises(KeyboardInterrupt):
        take_turns(runners, times, rounds=50, steps=1, block=1.0, report=lambda done: None)
    assert len(times["a"]) == len(times["b"]) == 1


@pytest.mark.filterwarnings("ignore")
def test_the_program(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hidden_layer, "PREDICTION", "6-4-3")
    monkeypatch.setattr(hidden_layer, "LARGE", 40)
    out = tmp_path / "results.json"
    out.write_text('{"cuda": "of another day"}')
    few = "--rounds 2 --steps 1 --images 30 --draws 3 --prediction-rounds 2 --sizes 6-4-3 1-3-1"
    hidden_layer.main([*few.split(), "--only", "deterministic", "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["cuda"] == "of another day"
    found = result["cpu"]
    assert found["steps"]["6-4-3"]["rounds"] == 2 and not found["steps"]["6-4-3"]["failed"]
    assert found["steps"]["1-3-1"]["ms"]["deterministic"]["median"] > 0
    assert found["memory"].keys() == {"6-4-3"}
    assert found["memory"]["6-4-3"]["deterministic"]["held"] >= 4 * 4 * (7 * 4 + 5 * 3)
    assert found["prediction"]["seconds"].keys() >= {"deterministic", "mean-field, predict", "mean-field, naive loop"}
    assert "a training step" in capsys.readouterr().out
