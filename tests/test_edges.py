"""What commands and data sets do at their edges: rare tasks pruned, names that meet, columns that are left out."""

import json

import cloudpickle
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from refused import refuses
from torch import nn

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import LogJoint

SMALL = ("--hidden", 4, "--epochs", 2, "--no-baseline")


@pytest.fixture
def table(tmp_path):
    """60 rows: inputs a and g, of three whole numbers; two numbers, two labels, times with an event."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "g": rng.integers(0, 3, 60)})
    frame = frame.assign(u=frame.a + rng.normal(size=60), v=rng.normal(size=60), l1=rng.integers(0, 2, 60))
    frame = frame.assign(l2=(frame.a > 0).astype(int), t=np.exp(rng.normal(size=60)), e=rng.integers(0, 2, 60))
    frame.to_csv(path := tmp_path / "table.csv", index=False)
    return path


@pytest.mark.parametrize("target", [("u,v",), ("l1,l2",), ("t", "--event", "e")])
def test_runs_of_every_task_are_pruned_and_evaluated_again(target, table, tmp_path, command):
    out, others = tmp_path / "run", [c for c in ("u", "v", "l1", "l2", "t", "e") if c not in ",".join(target)]
    command("train", "mean-field", "--inference", "svi", "--data", table, "--target", *target, "--exclude",
            ",".join(others), "--out", out, *SMALL)  # fmt: skip
    assert command("evaluate", out, "--prune", code=(0, 4)) and (out / "pruning.json").is_file()
    command("evaluate", out, "--num-draws", 7, code=(0, 4))
    assert "7 draws" in (out / "README.md").read_text() and "100 draws" not in (out / "README.md").read_text()


def test_a_resume_without_a_folder_is_a_new_run(table, command, monkeypatch, tmp_path):
    command("train", "mean-field", "--data", table, "--target", "u", "--out", tmp_path / "run", *SMALL)
    monkeypatch.chdir(tmp_path / "run")
    command("train", "mean-field", "--data", table, "--target", "u", "--resume", *SMALL, code=(0, 2))


def test_guarantees_go_with_the_calibration_and_groups_have_their_own_names(table, command, tmp_path):
    out = tmp_path / "run"
    command("train", "mean-field", "--data", table, "--target", "u", "--out", out, *SMALL)
    command("calibrate", out, "--groups", "g", code=(0, 4))
    assert "e-0" not in (out / "guarantees.json").read_text()
    assert "that `predict` writes" in command("evaluate", out, code=(0, 4))
    (out / "calibration.json").unlink()
    assert "that `predict` writes" not in command("evaluate", out, code=(0, 4))


def test_two_sets_of_one_name_are_refused_and_former_metrics_go(tmp_path, command):
    images = np.random.default_rng(0).integers(0, 255, (60, 6, 6), dtype=np.uint8)
    for folder in ("A", "B"):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "o.npz", x=images)
    np.savez(tmp_path / "x.npz", x=images, y=np.arange(60) % 2)
    train = ("train", "mean-field", "--data", tmp_path / "x.npz", "--out", tmp_path / "run", *SMALL)
    command(*train)
    paths = [tmp_path / folder / "o.npz" for folder in ("A", "B")]
    assert "have one name, but for their folders" in command(
        "evaluate", tmp_path / "run", "--ood", paths[0], "--ood", paths[1], code=2
    )
    (tmp_path / "run" / "metrics-other.json").write_text("{}")
    command(*train, "--overwrite")
    assert not (tmp_path / "run" / "metrics-other.json").exists()


def test_names_that_meet():
    X = pd.DataFrame({"exposure": np.arange(1.0, 41), "b": np.arange(40.0) % 7})
    refuses("X has a column 'exposure'", bp.dataset, X, np.arange(40) % 3, task="counts", exposure=np.ones(40))
    t = pd.Series(np.arange(1.0, 41), name="t")
    data = bp.dataset(X[["b"]], t, event=(t <= 30))
    assert data.schema.task == "survival" and data.schema.event[0] == "event"


def test_given_splits_hold_rows_that_are_dropped_at_the_end_and_parquet_leaves_an_index_out(tmp_path, monkeypatch):
    frame = pd.DataFrame({"a": np.arange(40.0), "y": np.arange(40.0) % 7})
    frame.loc[38:, "a"] = np.nan
    frame.to_csv(tmp_path / "t.csv", index=False)
    np.savez(tmp_path / "s.npz", test_0=[0, 5, 39])
    how = dict(target="y", task="regression", splits=str(tmp_path / "s.npz"), split=0)
    data = bp.load_data(str(tmp_path / "t.csv"), missing="drop", **how)
    assert len(data.x_test) == 2
    frame[:38].sample(frac=1, random_state=0).to_parquet(tmp_path / "t.parquet")
    monkeypatch.setenv("BNN_PYRO_MEMORY", "1e-9")
    assert bp.load_data(str(tmp_path / "t.parquet"), target="y", task="regression").schema.features == ("a",)


def test_distances_of_several_targets_are_refused():
    d = bp.dataset(np.arange(40.0)[:, None], np.stack([np.arange(40.0)] * 2, 1))
    p = bp.predict(bp.fit("mean-field", d, bp.SVI(epochs=1), progress=False), d.x_test)
    refuses("task with distances", bp.metrics.distances, p, p)


def test_an_observed_site_beside_y_is_of_no_row():
    """In a mini-batch's log joint it counts once, as a prior does: the mean over batches is that of all rows."""

    class Pushed(bp.BayesianNet):
        def forward(self, x, y=None):
            f = super().forward(x, y)
            pyro.factor("pushed", dist.Normal(0.0, 1.0).log_prob(torch.tensor(9.0)))
            return f

    x, y = torch.randn(20, 1, generator=torch.Generator().manual_seed(0)), torch.zeros(20)
    with bp.isolated(0):
        entry = bp.MeanField(hidden=(), noise=1.0)
        made = entry.model(bp.Schema("regression", (1,), features=("a",)))
        model = Pushed(made.net, made.likelihood, "normal:1")
    joint = LogJoint(model, x, y)
    z = torch.zeros(1, joint.size)
    parts = [sum(joint.terms(z, x[s : s + 5], y[s : s + 5])) for s in range(0, 20, 5)]
    assert torch.stack(parts).mean().item() == pytest.approx(joint.log_density(z).item(), rel=1e-5)


def test_whole_numbers_among_several_inputs():
    """A network of the package is told of them, their effects are at values that exist, and all variants take them."""
    rng = np.random.default_rng(0)
    codes, y = rng.integers(0, 60, (200, 1)), rng.normal(size=200)
    data = bp.dataset({"c": codes, "a": rng.normal(size=(200, 2))}, y)
    for variant in ("mlp", "last-layer"):
        with pytest.warns(UserWarning, match=f"whole numbers in 'c' .* {variant} takes them for quantities"):
            bp.fit(variant, data, bp.MAP(epochs=1), progress=False)
    assert "bp.fit(net, data)" in repr(data)

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(60, 1)

        def forward(self, c, a):
            return self.table(c[:, 0]) + a[:, :1]

    with bp.isolated(0):
        net = Table()
    posterior = bp.fit(net, data, bp.SVI(epochs=1), progress=False)
    values = bp.explain(posterior, data).dependence["c[0]"].values
    assert len(values) > 10 and set(values) <= set(range(60))


def test_crps_takes_targets_of_32_bits_where_it_is_an_integral():
    data = bp.dataset(np.arange(40.0)[:, None], np.arange(40.0))
    posterior = bp.fit(bp.MeanField(likelihood="student-t"), data, bp.SVI(epochs=1), progress=False)
    prediction = bp.predict(posterior, data.x_test, num_draws=3)
    assert torch.equal(prediction.crps(data.y_test), prediction.crps(data.y_test.double()))


def test_a_row_that_is_no_prediction_is_told_in_a_sentence(tmp_path, command, table):
    command("train", "mean-field", "--data", table, "--target", "u", "--out", tmp_path / "run", *SMALL)
    num = json.loads((tmp_path / "run" / "metrics.json").read_text())["test_rows"]
    pd.DataFrame({"mean": np.zeros(num), "sd": np.zeros(num)}).to_csv(tmp_path / "p.csv", index=False)
    said = command("compare", tmp_path / "run", tmp_path / "p.csv", "--out", tmp_path / "c", code=2)
    assert "row 2: sd must be above 0" in said


def test_an_archive_with_a_test_part_is_divided_as_its_arrays_are(tmp_path):
    x, y = np.random.default_rng(0).random((60, 5, 5), dtype=np.float32), np.arange(60) % 3
    np.savez(tmp_path / "a.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    data, arrays = bp.load_data(tmp_path / "a.npz"), bp.dataset(x[:40], y[:40], x_test=x[40:], y_test=y[40:])
    assert data.fingerprint == arrays.fingerprint and data.split["kind"] == "own test part"
    assert torch.equal(data.x_test, arrays.x_test) and torch.equal(data.y_test, arrays.y_test)
    assert torch.equal(bp.load_inputs(tmp_path / "a.npz", data.schema), data.x_test)
    names = dict(classes=["a", "b", "c"], x=x[:40], y=y[:40])
    np.savez(tmp_path / "c.npz", **names, x_test=x[40:], y_test=y[40:])
    named = bp.load_data(tmp_path / "c.npz")
    assert named.schema.classes == ("a", "b", "c") and torch.equal(named.y_test, data.y_test)
    refuses(r"unknown class 'c'. Valid: a, b", bp.dataset, x[:4], [*"abab"], x_test=x[:2], y_test=["a", "c"])
    refuses(r"unknown class 'c'. Valid: a, b", bp.dataset, x[:4], [*"abab"], x_test=x[:2], y_test=["c", "c"])
    np.savez(tmp_path / "b.npz", x=x[:40], y=y[:40], x_test=x[40:])
    refuses("b.npz: has x_test alone; x_test and y_test are the test part together", bp.load_data, tmp_path / "b.npz")


def test_a_network_with_batch_normalisation_goes_to_other_processes():
    """Members and chains do; the weak references to its last draws cannot."""
    with bp.isolated(0):
        net, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(60, 4)
    data = bp.dataset(x, x[:, 0])
    posterior = bp.fit(net, data, bp.MAP(epochs=2), seed=0, progress=False)
    mean = bp.predict(posterior, data.x_test).mean
    assert posterior.model.statistics._last is not None
    there = cloudpickle.loads(cloudpickle.dumps(posterior))
    assert there.model.statistics._last is None and torch.equal(bp.predict(there, data.x_test).mean, mean)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_q_of_few_weights_is_not_chosen_by_a_handful_of_rows(seed):
    """Four weights, 48 rows, two inputs that are nearly the same: beside the exact predictive means."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)) * [1, 10, 0.1] + [5, -3, 0]
    x[:, 1] += 8 * x[:, 0]
    data = bp.dataset(x, x @ [2, -0.5, 7] + 3 + 2 * rng.normal(size=60), validation=0, split=0.2)
    with bp.isolated(0):
        entry = bp.Bayesian(nn.Linear(3, 1), family="full", prior="normal:0.7", noise=2.0)
    posterior = bp.fit(entry, data, bp.SVI(), seed=seed, progress=False)
    features, new = (torch.cat([part.double(), torch.ones(len(part), 1)], 1) for part in (data.x_train, data.x_test))
    scale, shift = data.schema.y_scale, data.schema.y_shift
    precision = features.T @ features * (scale / 2.0) ** 2 + torch.eye(4) / 0.7**2
    y = (data.y_train.double() - shift) / scale
    exact = new @ torch.linalg.solve(precision, features.T @ y * (scale / 2.0) ** 2) * scale + shift
    error = (bp.predict(posterior, data.x_test, num_draws=1000).mean - exact).square().mean().sqrt()
    assert error < 0.7  # 2.6 for the q of the lowest held-out NLL, with the first seed


def test_truth_values_of_new_rows_may_be_0_and_1():
    b = np.arange(40) % 3 > 0
    frame = pd.DataFrame({"b": b, "a": np.arange(40.0), "y": np.arange(40.0) ** 2})
    data = bp.dataset(frame, "y")
    for kind in (int, float):
        assert torch.equal(*(bp.load_inputs(rows, data.schema) for rows in (frame, frame.assign(b=b.astype(kind)))))
    refuses("unknown category '2'. Valid: False, True", bp.load_inputs, frame.assign(b=2), data.schema)
