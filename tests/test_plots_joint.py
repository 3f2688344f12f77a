"""The pictures of the joint distribution test and of the step-size bias show the numbers that they are given."""

import numpy as np
import pytest

from bnn_pyro import plots


def test_z_scores():
    z = np.array([[0.5, -1.0], [20.0, 2.0], [0.0, -7.0]])
    ax = plots.joint_z_scores(z, 4.0, ["a", "b", "c"])
    drawn = np.concatenate([np.asarray(c.get_offsets()) for c in ax.collections if len(c.get_offsets())])
    assert sorted(drawn[:, 0]) == pytest.approx(sorted(z.ravel()))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b", "c"] and ax.get_xscale() == "symlog"
    top = drawn[np.isclose(drawn[:, 0], 20.0)][0, 1]
    assert round(top) == 1  # b is in the middle
    assert plots.joint_z_scores(z / 20, 4.0, ["a", "b", "c"]).get_xscale() == "linear"


def test_quantiles_and_drift():
    levels = np.linspace(-2, 2, 9)
    scores = levels[:, None] * [1.0, 1.5, 1.0, 1.0] + [0.0, 0.0, 0.2, 0.0]
    z = np.array([[0.1, 0.2], [0.3, 9.0], [5.0, 0.1], [0.0, 0.1]])
    drift = np.arange(24.0).reshape(3, 4, 2)
    left, right = plots.joint_quantiles(levels, scores, z, drift, 0.1 + 0 * drift, list("abcd"))
    shown = {line.get_label(): line.get_ydata() for line in left.get_lines()}
    assert shown["b"] == pytest.approx(0.5 * levels) and shown["c"] == pytest.approx(0.2) and "d" not in shown
    names = right.get_legend_handles_labels()[1]
    assert names == ["variance of b", "mean of c", "variance of a"]
    assert right.containers[0].lines[0].get_ydata() == pytest.approx(drift[:, 1, 1])


def test_step_size_bias():
    lr = np.array([0.1, 0.05, 0.025])
    grid = np.geomspace(0.01, 0.2, 20)
    ax = plots.step_size_bias(
        lr, lr, 0.001 + 0 * lr, grid, grid / (1 - grid), largest_lr=0.3, own_lr=0.01, own_bias=0.01, order=(1.0, 0.05)
    )
    assert ax.get_xscale() == ax.get_yscale() == "log"
    names = ax.get_legend_handles_labels()[1]
    assert any("slope 1.00 ± 0.05" in name for name in names) and any("lr 0.01" in name for name in names)
    exact, first = (next(line for line in ax.get_lines() if line.get_label() == n).get_ydata()
                    for n in ("exact, by the recursion", "slope 1"))  # fmt: skip
    assert exact == pytest.approx(grid / (1 - grid)) and first[-1] / first[0] == pytest.approx(20)
