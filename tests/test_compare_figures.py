"""Figures of a comparison: scores with their intervals, the most disputed row, and weights of one model."""

from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure as Page
from pictures import SCHEMA, chains, clean_matplotlib, guided, random  # noqa: F401 (a fixture)
from test_report import BASELINE, RUN

import bnn_pyro as bp
from bnn_pyro import plots
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.reports.tables import RunFacts
from bnn_pyro.runs.compare import draw_comparison


def run(inference, variant="last-layer", seed=0):
    recipe = {"variant": variant, "inference": inference, "seed": seed}
    return RunFacts(f"runs/{variant}-{inference}-{seed}", "", "classification", recipe, {}, {}, {})


def test_a_comparison_draws_what_applies():
    x, y = random(6, 2), torch.arange(6) % 3
    data = Dataset("three", SCHEMA, x, y, x[:0], y[:0], x, y)
    posteriors = [chains(random(1, 20, 3, 2, seed=s)) for s in (0, 1)]
    predictions = [bp.predict(p, x, num_draws=20) for p in posteriors]
    pictures = draw_comparison([run("svi"), run("nuts")], posteriors, predictions, data, {})
    assert [p.name for p in pictures] == ["method-predictions", "weight-posteriors"]
    assert all(p.png.startswith(b"\x89PNG") and p.sentence.endswith(".") for p in pictures)
    row = plots.most_disputed(dict(enumerate(predictions)))
    assert f"total variation {plots.dispute(dict(enumerate(predictions)), row):.3f}" in pictures[0].sentence
    unlike = draw_comparison([run("svi"), run("svi", "mlp")], [posteriors[0], guided(4)], predictions, data, {})
    assert [p.name for p in unlike] == ["method-predictions"], "weights of two models are not compared"


def test_a_comparison_has_a_forest_of_scores_with_their_intervals(monkeypatch):
    """A row a run, shares in per cent, each by how it differs from the first in pairs."""
    found, sweep_points = {}, plots.sweep_points
    monkeypatch.setattr(
        plots, "sweep_points", lambda scores: found.update(scores) or Page().add_subplot(), raising=False
    )
    other = replace(BASELINE, metrics=BASELINE.metrics | {"error": 0.3, "error_low": 0.2, "error_high": 0.45})
    paired = {"error": 0.2, "error_low": 0.1, "error_high": 0.3, "nll": 0.0, "nll_low": -0.1, "nll_high": 0.1}
    x, y = random(6, 2), torch.arange(6) % 3
    data = Dataset("three", SCHEMA, x, y, x[:0], y[:0], x, y)
    posteriors = [chains(random(1, 20, 3, 2, seed=s)) for s in (0, 1)]
    predictions = [bp.predict(p, x, num_draws=20) for p in posteriors]
    runs = [RUN, replace(other, label="b")]
    assert draw_comparison(runs, posteriors, predictions, data, {"b": paired})[0].name == "forest"
    error, nll = found.values()
    assert list(error) == ["1: mean-field (svi)", "2: mlp (map)"]
    first, second = error.values()
    assert (first.mean, first.kind, second.kind) == (10.0, "first", "worse")
    assert second[1:3] == (30.0, pytest.approx((10.0, 15.0))) and nll["2: mlp (map)"].kind == "no clear difference"
    (ax, _) = sweep_points(found)
    segments = ax.containers[1].lines[2][0].get_segments()
    assert segments[0][:, 0] == pytest.approx([20.0, 45.0]) and ax.get_xlabel() == "error, % of test rows"
