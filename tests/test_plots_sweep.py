"""Pictures of a sweep: what is drawn where, what is off the scale, and what is refused."""

import math

import numpy as np
import pytest
from pictures import clean_matplotlib  # noqa: F401

from bnn_pyro import plots
from bnn_pyro.errors import UserError
from bnn_pyro.plots import Scores


def scores(*points, kind=""):
    return Scores(points, float(np.mean(points)), float(np.std(points, ddof=1)) if len(points) > 1 else math.nan, kind)


def means(ax):
    return {container.lines[0].get_ydata()[0]: container.lines[0] for container in ax.containers}


def test_a_mean_and_its_error_and_a_mark_for_every_fit():
    by = {"good": scores(1.0, 2.0, 3.0, kind="best"), "bad": scores(4.0, 6.0, kind="worse"), "one": scores(5.0)}
    (ax,) = plots.sweep_points({"energy": by}, "RMSE, target units")
    assert [text.get_text() for text in ax.get_yticklabels()] == ["one", "bad", "good"], "the first is on top"
    drawn = means(ax)
    assert [drawn[y].get_xdata()[0] for y in sorted(drawn)] == [5.0, 5.0, 2.0]
    (low, high), *_ = (segment[:, 0] for segment in ax.containers[0].lines[2][0].get_segments())
    assert (low, high) == pytest.approx((1.0, 3.0))
    assert len({drawn[y].get_marker() for y in drawn}) == 3, "markers tell what colours tell"
    marks = [line.get_xdata() for line in ax.lines if line.get_marker() == "|" and len(line.get_xdata()) in (2, 3)]
    assert any(np.array_equal(x, [1.0, 2.0, 3.0]) for x in marks)
    assert (ax.get_title(), ax.get_xlabel()) == ("energy", "RMSE, target units")
    words = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert words == ["best mean", "worse than the best", "mean ± its standard error", "one fit"]


@pytest.mark.parametrize("panels", [1, 2, 3, 4, 5, 7])
def test_a_panel_a_data_set(panels):
    by = {"a recipe with a name that does not fit on one line of it": scores(1.0, 2.0)}
    axes = plots.sweep_points({f"d{k}": by for k in range(panels)}, "NLL, nats per test row")
    assert len(axes) == panels == len(axes[0].figure.axes)
    assert "\n" in axes[0].get_yticklabels()[0].get_text()


def test_far_off_recipes_do_not_hide_the_others():
    (ax,) = plots.sweep_points(
        {"d": {"a": scores(1.0, 1.1), "b": scores(1.2, 1.3), "far": scores(900.0, 910.0)}}, "RMSE"
    )
    assert ax.get_xscale() == "log"
    (ax,) = plots.sweep_points({"d": {"a": scores(-1.0, -0.9), "b": scores(-0.5, -0.4), "far": scores(900.0)}}, "NLL")
    assert ax.get_xscale() == "linear" and ax.get_xlim()[1] < 10
    assert [text.get_text() for text in ax.texts] == ["900 →"]


def test_where_a_coverage_should_be_is_marked():
    (ax,) = plots.sweep_points({"d": {"a": scores(90.0, 94.0)}}, "coverage, %", nominal=95.0)
    assert any(np.array_equal(line.get_xdata(), [95.0, 95.0]) for line in ax.lines)


def test_a_line_a_recipe_through_the_settings():
    lines = {"energy": {"mlp": {1.0: scores(3.0, 5.0), 0.1: scores(6.0, 8.0), 10.0: scores(1.0, 1.0)}}}
    (ax,) = plots.sweep_settings(lines, "prior (fan-in:…)", "RMSE, target units")
    line = ax.containers[0].lines[0]
    assert line.get_xdata().tolist() == [0.1, 1.0, 10.0] and line.get_ydata().tolist() == [7.0, 4.0, 1.0]
    assert ax.get_xscale() == "log" and [t.get_text() for t in ax.get_xticklabels()] == ["0.1", "1", "10"]


def test_axes_of_ones_own_are_drawn_on():
    page = plots.sweep_points({"d": {"a": scores(1.0)}, "e": {"a": scores(2.0)}}, "RMSE")[0].figure
    page.clear()
    axes = page.subplots(1, 2)
    assert plots.sweep_points({"d": {"a": scores(1.0)}, "e": {"a": scores(2.0)}}, "RMSE", axes=axes)[0] is axes[0]
    with pytest.raises(UserError, match="draws on 1 axes, but 2"):
        plots.sweep_points({"d": {"a": scores(1.0)}}, "RMSE", axes=axes)


def test_nothing_to_draw_and_too_much_are_refused():
    with pytest.raises(UserError, match="no fit to draw"):
        plots.sweep_points({}, "RMSE")
    with pytest.raises(UserError, match="no fit to draw"):
        plots.sweep_settings({"d": {}}, "lr", "RMSE")
    with pytest.raises(UserError, match="9 lines cannot be told apart"):
        plots.sweep_settings({"d": {str(k): {1.0: scores(1.0)} for k in range(9)}}, "lr", "RMSE")
