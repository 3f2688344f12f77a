"""The figure of a comparison: scores with their intervals."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure as Page
from pictures import clean_matplotlib  # noqa: F401 (a fixture)
from test_report import BASELINE, RUN

from bnn_pyro import plots
from bnn_pyro.runs.compare import draw_scores


def test_a_comparison_has_a_forest_of_scores_with_their_intervals(monkeypatch):
    """A row a run, shares in per cent, each by how it differs from the first in pairs."""
    found, sweep_points = {}, plots.sweep_points
    monkeypatch.setattr(
        plots, "sweep_points", lambda scores: found.update(scores) or Page().add_subplot(), raising=False
    )
    other = replace(BASELINE, metrics=BASELINE.metrics | {"error": 0.3, "error_low": 0.2, "error_high": 0.45})
    paired = {"error": 0.2, "error_low": 0.1, "error_high": 0.3, "nll": 0.0, "nll_low": -0.1, "nll_high": 0.1}
    assert draw_scores([RUN, replace(other, label="b")], {"b": paired})[0].name == "forest"
    error, nll = found.values()
    assert list(error) == ["1: mean-field (svi)", "2: mlp (map)"]
    first, second = error.values()
    assert (first.mean, first.kind, second.kind) == (10.0, "first", "worse")
    assert second[1:3] == (30.0, pytest.approx((10.0, 15.0))) and nll["2: mlp (map)"].kind == "no clear difference"
    (ax, _) = sweep_points(found)
    segments = ax.containers[1].lines[2][0].get_segments()
    assert segments[0][:, 0] == pytest.approx([20.0, 45.0]) and ax.get_xlabel() == "error, % of test rows"
