"""Pictures of chains and of fits: their artists hold hand-computed numbers, and hundreds of chains stay readable."""

import numpy as np
import pytest
import torch
from pictures import (
    clean_matplotlib,  # noqa: F401 (a fixture of every test here)
    legend_of,
    line_of,
)

from bnn_pyro import plots
from bnn_pyro.errors import UserError
from bnn_pyro.plots import chains as chain_plots
from bnn_pyro.plots import diagnostics as diagnostic_plots
from bnn_pyro.plots.diagnostics import _simultaneous_band


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def page(axes):
    return np.ravel(np.asarray(axes, dtype=object))[0].figure


# -- every picture -----------------------------------------------------------------------------------------------------
def every_picture(rng):
    few, many = rng.normal(size=(4, 30, 2)), rng.normal(size=(512, 16, 40))
    labels = [f"test row {m}" for m in range(40)]
    return {
        "trace_ranks": lambda: plots.trace_ranks(few, labels[:2], diverging=few[..., 0] > 1, unit="log-odds"),
        "trace_ranks of 512": lambda: plots.trace_ranks(many, labels),
        "trace_ranks of one draw": lambda: plots.trace_ranks(many[:4, :1, :2], labels[:2]),
        "chain_traces": lambda: plots.chain_traces({"lp": torch.tensor(many[..., 0])}),
        "forest": lambda: plots.forest(few, labels[:2]),
        "forest of 512": lambda: plots.forest(many, labels, unit="weight"),
        "energy": lambda: plots.energy(few[..., 0]),
        "autocorrelation": lambda: plots.autocorrelation(0.5 ** np.arange(20)[None], ["a"], draws=100),
        "convergence": lambda: plots.convergence([1.0, 1.02, np.nan], [30.0, 500.0, np.nan], [40.0, 50.0, np.nan]),
        "nested": lambda: plots.convergence([3.0, 40.0], [3.0, 5.0], draws=8192, nested=True),
        "pareto_k": lambda: plots.pareto_k([0.1, 0.6, 0.9, -0.2]),
        "pareto_k of many": lambda: plots.pareto_k(rng.gamma(2, 0.1, 5000)),
        "loo_pit": lambda: plots.loo_pit(rng.uniform(size=50)),
        "regression": lambda: plots.posterior_predictive(few[..., 0], rng.normal(size=30), label="price"),
        "classes": lambda: plots.posterior_predictive([[0, 1, 1]], [0, 1, 0], classes=["a", "a long name of a class"]),
        "objective": lambda: plots.objective(-100 / np.arange(1, 200)),
        "importance_weights": lambda: plots.importance_weights(rng.normal(size=300), khat=0.2),
    }  # fmt: skip


def test_every_picture_can_be_saved_and_says_what_its_axes_are(rng, tmp_path):
    pictures = every_picture(rng)
    tested = {name.split(" of ")[0] for name in pictures} | {"posterior_predictive"}
    assert {*chain_plots.__all__, *diagnostic_plots.__all__} <= tested
    for name, draw in pictures.items():
        page(axes := draw()).savefig(tmp_path / "p.png")  # a layout that fails warns, and warnings are errors
        assert all(ax.get_xlabel() or ax.get_ylabel() for ax in np.ravel(np.asarray(axes, dtype=object))), name


# -- chains ------------------------------------------------------------------------------------------------------------
def test_few_chains_are_all_drawn_and_their_ranks_counted():
    values = np.arange(32.0).reshape(2, 16)[..., None]  # chain 1 lies above chain 0 throughout
    left, right = plots.trace_ranks(values, ["a"], diverging=np.eye(2, 16))
    assert [line.get_label() for line in left.lines] == ["chain 0", "chain 1", "divergent"]
    assert list(line_of(left, "chain 1").get_ydata()) == list(range(16, 32))
    assert list(line_of(left, "divergent").get_xdata()) == [1, 2]
    first, second = right.containers  # 16 draws in 2 bins: twice the 8 expected, and none
    assert [bar.get_height() for bar in first] == pytest.approx([0.84, 0])
    assert [bar.get_height() for bar in second] == pytest.approx([0, 0.84])
    assert [text.get_text() for text in right.get_yticklabels()] == ["0", "1"]


def test_many_chains_are_a_few_lines_and_a_map_of_all(rng):
    values = rng.normal(size=(512, 16, 8))
    axes = plots.trace_ranks(values, list("abcdefgh"))
    assert len(axes) == 12 and "8 of 512 chains" in axes[-2].get_xlabel() and "6 of 8" in axes[-2].get_xlabel()
    assert all(len(ax.lines) == 8 and len(ax.collections) == 1 for ax in axes[::2])
    (mesh,) = axes[1].collections
    assert mesh.get_array().shape[0] == 64 and np.mean(mesh.get_array()) == pytest.approx(1)
    stuck = values.copy()
    stuck[:8, :, 0] = 100.0
    (mesh,) = plots.trace_ranks(stuck, list("abcdefgh"))[1].collections
    assert mesh.get_array()[0, -1] > 5 and mesh.get_array()[0, :-1].max() == 0


def test_traces_of_many_chains_have_few_lines(rng):
    stats = {"lp": torch.tensor(rng.normal(size=(300, 5))), "diverging": torch.zeros(300, 5)}
    stats["diverging"][7:9, 2] = 1
    ax = plots.chain_traces(stats)
    means = stats["lp"].mean(1)
    assert len(ax.lines) == 9 and {f"chain {c}" for c in (means.argmin(), means.argmax())} <= set(legend_of(ax))
    assert list(line_of(ax, "divergent").get_xdata()) == [3], "two chains at one draw: one mark"
    assert ax.get_title().startswith("2 of 1,500 transitions divergent")
    assert "5–95 % of 300 chains" in legend_of(ax)


def test_a_forest_has_quantiles_by_chain_or_of_all(rng):
    values = np.linspace(0, 100, 101)[None, :, None] + np.array([0.0, 1000.0])[:, None, None]
    ax = plots.forest(values, ["a"])
    assert line_of(ax, "chain 0").get_xdata()[0] == 50 and line_of(ax, "chain 1").get_xdata()[0] == 1050
    thin, thick = (lines.get_segments()[0] for lines in ax.collections[:2])
    assert thin[:, 0] == pytest.approx([2.5, 97.5]) and thick[:, 0] == pytest.approx([25, 75])
    ax = plots.forest(rng.normal(size=(100, 5, 40)), [str(m) for m in range(40)])
    assert ax.get_title().startswith("30 of 40") and legend_of(ax) == ["all draws", "medians of 64 chains"]
    assert len(ax.get_yticks()) == 30


def test_energy_says_its_bfmi():
    energies = np.array([[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 2.0, 3.0]])
    # E[ΔE²] / var E: 1 / 0.25 and 1 / 1.25
    assert plots.energy(energies).get_title() == "smallest BFMI 0.80: above 0.3"
    assert plots.energy(energies, bfmi=0.1).get_title() == "smallest BFMI 0.10: below 0.3"
    with pytest.raises(UserError, match="at least 3 draws"):
        plots.energy(energies[:, :2])


def test_autocorrelation_shows_the_band_of_independent_draws():
    ax = plots.autocorrelation([[1.0, 0.5]] * 8, list("abcdefgh"), draws=400)
    assert ax.patches[0].get_height() == pytest.approx(2 * 1.96 / 20)
    assert len([line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_label() in "abcdefgh"]) == 6
    with pytest.raises(UserError, match="8 autocorrelations"):
        plots.autocorrelation([[1.0, 0.5]] * 8, ["a"])


# -- convergence -------------------------------------------------------------------------------------------------------
def test_shares_of_rhat_and_ess_are_told_with_their_thresholds():
    left, right = plots.convergence([[1.0, 1.005], [1.04, np.nan]], [100, 500, 900, np.nan], [50, 60, 70, np.nan])
    assert left.get_title() == "largest R-hat 1.040; below 1.01: 67 %"
    assert right.get_title() == "fewest effective draws: 100 (bulk), 50 (tail)"
    assert line_of(left, "1.01").get_xdata()[0] == 1.01 and line_of(right, "400").get_xdata()[0] == 400
    curve = line_of(left, "R-hat")
    assert list(curve.get_xdata()[1:-1]) == [1.0, 1.005, 1.04]
    assert list(curve.get_ydata()[1:]) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert "nested R-hat" in plots.convergence([1.0, 1.001], [9, 9], nested=True)[0].get_title()
    with pytest.raises(UserError, match="no output varies"):
        plots.convergence([np.nan], [np.nan])


# -- leave-one-out -----------------------------------------------------------------------------------------------------
def test_pareto_k_counts_and_names_the_rows_beyond_each_threshold():
    ax = plots.pareto_k([0.5, 0.51, 0.7, 0.71, 0.95, np.nan])
    assert ax.get_title() == "largest k 0.95; 2 of 6 rows above 0.7"
    assert legend_of(ax) == ["up to 0.5: good (2)", "0.5 to 0.7: usable (2)", "above 0.7: unreliable (2)"]
    assert {text.get_text() for text in ax.texts} == {"4", "3"}
    assert {line.get_ydata()[0] for line in ax.lines[3:]} == {0.5, 0.7}


def test_the_band_holds_at_all_places_at_once(rng):
    place, low, high = _simultaneous_band(80)
    inside = []
    for _ in range(2000):
        u = np.sort(rng.uniform(size=80))
        path = np.searchsorted(u, place, side="right") / 80 - place
        inside.append(((path >= low - 1e-12) & (path <= high + 1e-12)).all())
    assert 0.935 < np.mean(inside) < 0.975  # sd 0.005; discrete, so a little more than 95 %


def test_loo_pit_says_whether_it_is_uniform():
    even = (np.arange(100) + 0.5) / 100
    assert plots.loo_pit(even)[1].get_title() == "stays in the band"
    assert plots.loo_pit(even**3)[1].get_title() == "leaves the band"
    assert [bar.get_height() for bar in plots.loo_pit(even)[0].containers[0]] == [10] * 10
    with pytest.raises(UserError, match="between 0 and 1"):
        plots.loo_pit([0.5, np.nan])


# -- replicated data ---------------------------------------------------------------------------------------------------
def test_replicated_classes_are_counted():
    replicated = np.array([[0, 0, 1], [0, 1, 1], [1, 1, 1]])
    (ax,) = plots.posterior_predictive(replicated, [0, 0, 0], classes=["a", "b"])
    assert list(line_of(ax, "observed").get_ydata()) == [3, 0]
    assert list(line_of(ax, "replicated, median").get_ydata()) == [1, 2]
    assert ax.get_title() == "2 of 2 outside their 95 %"
    replicated = np.tile(np.arange(30), (4, 1))
    (ax,) = plots.posterior_predictive(replicated, np.arange(30), classes=[str(k) for k in range(30)])
    assert ax.get_title().startswith("20 of 30 classes; 0 of 20")


def test_replicated_targets_lie_under_the_observed_ones(rng):
    left, right = plots.posterior_predictive(rng.normal(size=(200, 10)), np.full(10, 3.0) + np.arange(10), label="k€")
    assert list(line_of(left, "observed").get_xdata()[1:-1]) == list(range(3, 13)) and left.get_xlabel() == "k€"
    assert len([line for line in left.lines if line.get_label() != "observed"]) == 40
    assert right.get_title() == "0 % of the replicated ones are larger"
    with pytest.raises(UserError, match="10 rows"):
        plots.posterior_predictive(rng.normal(size=(3, 9)), np.zeros(10))


# -- variational -------------------------------------------------------------------------------------------------------
def test_importance_weights_are_told_by_the_largest():
    ax = plots.importance_weights(np.log([1.0, 1, 1, 1, 6]), khat=0.9)
    assert ax.get_title() == "k-hat 0.90; the largest weight is 60 % of all 5"
    heaviest = line_of(ax, "tail").get_ydata()[0]
    assert heaviest == pytest.approx(np.log10(3.0))  # 6 of a mean of 2
    with pytest.raises(UserError, match="at least 5"):
        plots.importance_weights([0.0, 1.0])


def test_a_pareto_tail_lies_on_the_curve_of_its_khat():
    share = (np.arange(1000) + 0.5) / 1000
    ax = plots.importance_weights(-0.8 * np.log(share), khat=0.8)
    points, curve = (line_of(ax, name).get_ydata() for name in ("tail", "fit with k-hat"))
    assert curve[:-1] == pytest.approx(points, abs=0.02)
    worse = line_of(ax, "with k = 0.7").get_ydata()
    assert worse[0] < points[0] - 0.1
