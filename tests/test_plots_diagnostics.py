"""Pictures of chains, fits, checks and sweeps: hand-computed numbers, and hundreds of chains stay readable."""

import math

import numpy as np
import pytest
import torch
from pictures import clean_matplotlib, legend_of, line_of, refuses  # noqa: F401 (a fixture)
from scipy.stats import norm

from bnn_pyro import plots
from bnn_pyro.checks import Finding
from bnn_pyro.plots import Scores

RNG = np.random.default_rng(0)


# -- chains ------------------------------------------------------------------------------------------------------------
def test_few_chains_are_all_drawn_and_their_ranks_counted():
    values = np.arange(32.0).reshape(2, 16)[..., None]  # chain 1 lies above chain 0 throughout
    left, right = plots.trace_ranks(values, ["a"], diverging=np.eye(2, 16))
    assert list(line_of(left, "chain 1").get_ydata()) == list(range(16, 32))
    assert list(line_of(left, "divergent").get_xdata()) == [1, 2]
    (mesh,) = right.collections  # 16 draws in 2 bins: twice the 8 expected, and none
    assert mesh.get_array().tolist() == [[2, 0], [0, 2]]


def test_many_chains_are_a_few_lines_and_a_map_of_all():
    values = RNG.normal(size=(512, 16, 8))
    axes = plots.trace_ranks(values, list("abcdefgh"))
    assert len(axes) == 12 and "8 of 512 chains" in axes[-2].get_xlabel()
    assert all(len(ax.lines) == 8 and len(ax.collections) == 1 for ax in axes[::2])
    values[:8, :, 0] = 100.0
    (mesh,) = plots.trace_ranks(values, list("abcdefgh"))[1].collections
    assert mesh.get_array()[0, -1] > 5 and mesh.get_array()[0, :-1].max() == 0


def test_chains_are_lines_and_divergent_transitions_are_marked():
    stats = {
        "lp": torch.tensor([[-3.0, -2.0, -1.0], [-2.0, -2.0, -2.0]]),
        "diverging": torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
    }
    ax = plots.chain_traces(stats)
    assert line_of(ax, "chain 0").get_xydata().tolist() == [[1, -3], [2, -2], [3, -1]]
    assert list(line_of(ax, "divergent").get_xdata()) == [2]
    assert ax.get_title().startswith("1 of 6 transitions divergent; mean −2") and "nats" in ax.get_ylabel()
    refuses("no log joint density", plots.chain_traces, {})


# -- convergence, leave-one-out, replicated data -----------------------------------------------------------------------
def test_shares_of_rhat_and_ess_are_told_with_their_thresholds():
    left, right = plots.convergence([[1.0, 1.005], [1.04, np.nan]], [100, 500, 900, np.nan], [50, 60, 70, np.nan])
    assert left.get_title() == "largest R-hat 1.040; below 1.01: 67 %"
    assert right.get_title() == "fewest effective draws: 100 (bulk), 50 (tail)"
    curve = line_of(left, "R-hat")
    assert list(curve.get_xdata()[1:]) == [1.0, 1.005, 1.04]
    assert list(curve.get_ydata()[1:]) == pytest.approx([1 / 3, 2 / 3, 1])
    assert "nested R-hat" in plots.convergence([1.0, 1.001], [9, 9], nested=True)[0].get_title()
    refuses("no output varies", plots.convergence, [np.nan], [np.nan])


def test_pareto_k_counts_and_names_the_rows_beyond_each_threshold():
    ax = plots.pareto_k([0.5, 0.51, 0.7, 0.71, 0.95, np.nan])
    assert ax.get_title() == "largest k 0.95; 2 of 6 rows above 0.7"
    assert legend_of(ax) == ["up to 0.5: good (2)", "0.5 to 0.7: usable (2)", "above 0.7: unreliable (2)"]
    assert {text.get_text() for text in ax.texts} == {"4", "3"}


def test_loo_pit_says_whether_it_is_uniform():
    even = (np.arange(100) + 0.5) / 100
    assert plots.loo_pit(even)[1].get_title() == "stays in the band"
    assert plots.loo_pit(even**3)[1].get_title() == "leaves the band"
    refuses("between 0 and 1", plots.loo_pit, [0.5, np.nan])


def test_replicated_targets_lie_under_the_observed_ones():
    left, right = plots.posterior_predictive(RNG.normal(size=(200, 10)), np.full(10, 3.0) + np.arange(10), label="k€")
    assert list(line_of(left, "observed").get_xdata()[1:]) == list(range(3, 13)) and left.get_xlabel() == "k€"
    assert right.get_title() == "0 % of the replicated ones are larger"
    refuses("10 rows", plots.posterior_predictive, RNG.normal(size=(3, 9)), np.zeros(10))


# -- checks ------------------------------------------------------------------------------------------------------------
def test_z_scores():
    names, z = ("mean of a", "mean of b (sd)", "variance of c"), (-1.0, 20.0, np.nan)
    ax = plots.standard_errors([Finding(name, 1.0, z=own) for name, own in zip(names, z, strict=True)])
    bound = norm.isf(0.001 / 6)
    assert line_of(ax, "mean").get_xydata().tolist() == [[1, -1], [2, 20]]
    assert line_of(ax, "variance").get_ydata() == pytest.approx([0.97 * 6 * bound])
    assert {text.get_text() for text in ax.texts} == {"mean of b", "variance of c"}
    assert ax.get_title() == f"2 of 3 beyond ±{bound:.1f} (shaded)"


# -- sweeps ------------------------------------------------------------------------------------------------------------
def scores(*points, kind=""):
    return Scores(points, float(np.mean(points)), float(np.std(points, ddof=1)) if len(points) > 1 else math.nan, kind)


def test_a_mean_and_its_error_and_a_mark_for_every_fit():
    by = {"good": scores(1.0, 2.0, 3.0, kind="best"), "bad": scores(4.0, 6.0, kind="worse"), "one": scores(5.0)}
    (ax,) = plots.sweep_points({"energy": by}, "RMSE, target units", nominal=95.0)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["good", "bad", "one"] and ax.yaxis_inverted()
    drawn = {container.lines[0].get_ydata()[0]: container.lines[0] for container in ax.containers}
    assert [drawn[y].get_xdata()[0] for y in sorted(drawn)] == [2.0, 5.0, 5.0]
    (low, high), *_ = (segment[:, 0] for segment in ax.containers[0].lines[2][0].get_segments())
    assert (low, high) == pytest.approx((1.0, 3.0))
    assert len({drawn[y].get_marker() for y in drawn}) == 3, "markers tell what colours tell"
    for expected in ([1.0, 2.0, 3.0], [95.0, 95.0]):
        assert any(np.array_equal(line.get_xdata(), expected) for line in ax.lines)
    refuses("no fit to draw", plots.sweep_points, {}, "RMSE")
