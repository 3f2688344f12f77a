"""Pictures of a last layer by several methods: their artists hold hand-computed numbers, wrong input is told."""

import math
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from pyro.distributions import Categorical

import bnn_pyro as bp
from bnn_pyro import plots
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction
from bnn_pyro.reports.tables import RunFacts
from bnn_pyro.runs.compare import draw_comparison, short_labels
from bnn_pyro.runs.figures import draw_all, figures_of
from bnn_pyro.runs.scene import Scene

SCHEMA = Schema("classification", (2,), ("a", "b", "c"), ("first", "second"))


@pytest.fixture(autouse=True)
def clean_matplotlib():
    settings = dict(matplotlib.rcParams)
    yield
    assert pyplot.get_fignums() == [] and dict(matplotlib.rcParams) == settings


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chains(weight, bias=None):
    """A posterior of a linear classifier of two features; weight (C, D, 3, 2)."""
    bias = torch.zeros(*weight.shape[:2], 3) if bias is None else bias
    with bp.isolated(0):
        model = bp.MeanField(hidden=()).model(SCHEMA)
    return Posterior(model, SCHEMA, chains={"layers.0.weight": weight, "layers.0.bias": bias})


def guided(*hidden):
    """A mean-field posterior as it starts, untrained."""
    entry = bp.MeanField(hidden=hidden)
    with bp.isolated(0):
        model = entry.model(SCHEMA)
        return Posterior(model, SCHEMA, guide=entry.guide(model))


def stated(*probs):
    """A prediction from probabilities (S, B, K)."""
    return Prediction(Categorical(logits=torch.tensor(probs).log()))


def line_of(ax, label):
    return next(line for line in ax.lines if line.get_label().startswith(label))


def saved(axes, path):
    """Lays it out, where warnings are errors."""
    np.ravel(np.asarray(axes, dtype=object))[0].figure.savefig(path)


# -- the growing ensemble ----------------------------------------------------------------------------------------------
def by_hand(posterior, x, y, picks):
    """NLL of an ensemble of some (chain, draw)s."""
    total = 0.0
    for row, label in zip(x, y.tolist(), strict=True):
        probs = [
            torch.softmax(posterior.chains["layers.0.weight"][c, d] @ row + posterior.chains["layers.0.bias"][c, d], 0)
            for c, d in picks
        ]
        total -= math.log(sum(p[label].item() for p in probs) / len(probs))
    return total / len(x)


@pytest.mark.parametrize("numbers", [2**24, 40])
def test_an_ensemble_grows_by_the_stored_draws_in_their_order(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr("bnn_pyro.plots.ensembles.NUMBERS", numbers)  # 40: two rows at a time
    posterior = chains(random(2, 3, 3, 2), random(2, 3, 3, seed=1))
    x, y = random(7, 2, seed=2), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    ax = plots.growing_ensemble(posterior, x, y)
    together = line_of(ax, "ensemble of 2 chains")
    assert list(together.get_xdata()) == [2, 4, 6]
    expected = [by_hand(posterior, x, y, [(c, d) for c in range(2) for d in range(s)]) for s in (1, 2, 3)]
    assert list(together.get_ydata()) == pytest.approx(expected, rel=1e-5)
    for c, curve in enumerate((line_of(ax, "each of 2 chains"), line_of(ax, "_chain 1"))):
        alone = [by_hand(posterior, x, y, [(c, d) for d in range(s)]) for s in (1, 2, 3)]
        assert list(curve.get_ydata()) == pytest.approx(alone, rel=1e-5)
    single = np.array([by_hand(posterior, x, y, [(c, d)]) for c in range(2) for d in range(3)])
    assert line_of(ax, "a single draw").get_ydata()[0] == pytest.approx(single.mean(), rel=1e-5)
    assert f"{single.mean():.4f} ± {single.std():.4f}" in line_of(ax, "a single draw").get_label()
    assert ax.get_title() == f"NLL {expected[-1]:.4f} nats of all 6 draws"
    assert "nats" in ax.get_ylabel() and "draws" in ax.get_xlabel() and ax.get_xscale() == "log"
    saved(ax, tmp_path / "p.png")


def test_an_ensemble_of_single_draws_grows_by_its_members():
    posterior = chains(random(3, 1, 3, 2))
    x, y = random(7, 2, seed=2), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    curve = line_of(plots.growing_ensemble(posterior, x, y), "ensemble")
    expected = [by_hand(posterior, x, y, [(c, 0) for c in range(s)]) for s in (1, 2, 3)]
    assert list(curve.get_xdata()) == [1, 2, 3] and list(curve.get_ydata()) == pytest.approx(expected, rel=1e-5)


def test_a_distant_baseline_does_not_flatten_the_ensemble():
    posterior = chains(0.1 * random(1, 30, 3, 2))
    x, y = random(20, 2, seed=2), torch.arange(20) % 3
    near, far = (stated([[p, (1 - p) / 2, (1 - p) / 2]] * 20) for p in (0.34, 0.9999))
    ax = plots.growing_ensemble(posterior, x, y, baseline=near)
    nll = -near.log_prob(y).mean().item()
    assert (
        line_of(ax, "baseline").get_ydata()[0] == pytest.approx(nll)
        and "far" not in ax.get_legend().get_texts()[-1].get_text()
    )
    ax = plots.growing_ensemble(posterior, x, y, baseline=far)
    assert "far off" in line_of(ax, "baseline").get_label()
    assert ax.get_ylim()[1] < line_of(ax, "baseline").get_ydata()[0]


def test_what_cannot_grow_is_told():
    x, y = random(4, 2), torch.tensor([0, 1, 2, 0])
    with pytest.raises(UserError, match="single draw does not grow"):
        plots.growing_ensemble(chains(random(1, 1, 3, 2)), x, y)
    with pytest.raises(UserError, match="y has shape"):
        plots.growing_ensemble(chains(random(1, 2, 3, 2)), x, y[:3])
    with pytest.raises(UserError, match="grows by stored draws"):
        plots.growing_ensemble(guided(), x, y)
    with pytest.raises(UserError, match="baseline predicts 2 points"):
        plots.growing_ensemble(chains(random(1, 2, 3, 2)), x, y, baseline=stated([[0.2, 0.3, 0.5]] * 2))


# -- methods side by side ----------------------------------------------------------------------------------------------
METHODS = {
    "SVI": stated([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1]], [[0.6, 0.2, 0.2], [0.2, 0.5, 0.3]]),  # means .7 .15 .15; .4 .4 .2
    "NUTS": stated([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]]),
    "MAP": stated([[0.7, 0.1, 0.2], [0.4, 0.5, 0.1]]),
}


def test_the_most_disputed_point_has_the_largest_total_variation_of_any_pair():
    assert plots.most_disputed(METHODS) == 1
    assert plots.dispute(METHODS, 0) == pytest.approx(0.1)  # NUTS and MAP: ½ (0 + .1 + .1)
    assert plots.dispute(METHODS, 1) == pytest.approx(0.6)  # NUTS and MAP: ½ (.3 + .3 + .6)
    with pytest.raises(UserError, match="single method disputes nothing"):
        plots.most_disputed({"SVI": METHODS["SVI"]})


def test_methods_are_drawn_side_by_side_at_that_point(tmp_path):
    images, y = torch.arange(8.0).reshape(2, 1, 2, 2), torch.tensor([0, 2])
    axes = plots.method_predictions(METHODS, x=images, y=y, schema=SCHEMA)
    assert axes[0].images[0].get_array().ravel().tolist() == [4, 5, 6, 7] and axes[0].get_title() == "point 1, true: c"
    means = {"SVI": [0.4, 0.4, 0.2], "NUTS": [0.1, 0.2, 0.7], "MAP": [0.4, 0.5, 0.1]}
    for ax, (name, mean) in zip(axes[1:], means.items(), strict=True):
        assert [bar.get_height() for bar in ax.containers[0]] == pytest.approx(mean)
        assert ax.get_title().startswith(f"{name}\ntotal {METHODS[name].total[1]:.2f} = ") and "nats" in ax.get_title()
        assert [t.get_text() for t in ax.get_xticklabels() if t.get_fontweight() == "bold"] == ["c"]
    assert "probability" in axes[1].get_ylabel()
    medians = [
        line.get_ydata()[0] for line in axes[1].lines if len(line.get_ydata()) == 2 and line.get_color() == "0.1"
    ]
    assert medians == pytest.approx([0.4, 0.4, 0.2])
    assert not axes[2].lines, "a box of one draw is none"
    saved(axes, tmp_path / "p.png")
    plain = plots.method_predictions(METHODS, 0, y=y)
    assert len(plain) == 3 and plain[0].get_title().startswith("point 0, true: 0\nSVI")
    pair = Figure().subplots(1, 3)
    assert list(plots.method_predictions(METHODS, 0, axes=pair)) == list(pair)


def test_predictions_of_other_points_are_not_compared():
    with pytest.raises(UserError, match="'SVI' predicts 2 points and 3 classes, 'MAP' 1 and 3"):
        plots.method_predictions(METHODS | {"MAP": METHODS["MAP"][:1]}, 0)
    with pytest.raises(UserError, match="row must be 0 to 1, got 2"):
        plots.method_predictions(METHODS, 2)
    with pytest.raises(UserError, match="draws on 3 axes, but 2"):
        plots.method_predictions(METHODS, 0, axes=Figure().subplots(2))
    with pytest.raises(UserError, match="no prediction"):
        plots.method_predictions({}, 0)


# -- weights -----------------------------------------------------------------------------------------------------------
def test_weights_are_those_of_the_largest_disagreement():
    """By Wasserstein-2 in units of the mean σ: 3 at [2, 0] (a shift), 2·(2 − 1)/(2 + 1) at [0, 1] (a scale)."""
    one = random(1, 4000, 3, 2)
    one = (one - one.mean(1, keepdim=True)) / one.std(1, keepdim=True)
    one[..., 1, 1] *= 10
    other = one.clone()
    other[..., 1, 1] += 5  # half of its σ
    other[..., 2, 0] += 3
    other[..., 0, 1] *= 2
    both = {"SVI": chains(one), "NUTS": chains(other)}
    axes = plots.weight_posteriors(both, num=2, num_draws=4000)
    assert [ax.get_title() for ax in axes] == ["layers.0.weight[2, 0]", "layers.0.weight[0, 1]"]
    x, density = line_of(axes[0], "NUTS").get_xydata().T
    assert x[density.argmax()] == pytest.approx(3, abs=0.25) and np.trapezoid(density, x) == pytest.approx(1, abs=0.02)
    assert line_of(axes[1], "SVI").get_ydata().max() == pytest.approx(0.4, rel=0.08)  # of a standard Normal
    assert line_of(axes[1], "NUTS").get_ydata().max() == pytest.approx(0.2, rel=0.08)
    assert axes[0].get_xlabel() == "weight" and axes[0].get_ylabel() == "density"
    assert line_of(axes[0], "SVI").get_linestyle() != line_of(axes[0], "NUTS").get_linestyle()


def test_a_point_estimate_is_a_line_and_does_not_choose(tmp_path):
    draws = random(1, 200, 3, 2)
    far = torch.zeros(1, 1, 3, 2)
    far[..., 1, 1] = 50.0
    shifted = draws + torch.tensor([[0.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    found = {"SVI": chains(draws), "MAP": chains(far), "NUTS": chains(shifted)}
    axes = plots.weight_posteriors(found, num=1)
    assert axes[0].get_title() == "layers.0.weight[2, 0]"
    assert list(line_of(axes[0], "MAP").get_xdata()) == [0, 0]
    named = plots.weight_posteriors(found, ["layers.0.weight[1,1]", "layers.0.bias[2]"])
    assert list(line_of(named[0], "MAP").get_xdata()) == [50, 50] and named[0].get_xlim()[1] > 50
    assert named[1].get_title() == "layers.0.bias[2]"
    saved(named, tmp_path / "p.png")


def test_the_draws_of_a_guide_are_seeded():
    posterior = guided()
    a, b = (line_of(plots.weight_posteriors({"SVI": posterior}, num=1)[0], "SVI").get_ydata() for _ in range(2))
    assert np.array_equal(a, b)


def test_weights_of_other_models_and_wrong_names_are_told():
    posterior, other = chains(random(1, 5, 3, 2)), guided(4)
    with pytest.raises(
        UserError, match=r"'a' and 'b' are not posteriors of one model: 'layers.0.weight' has shape \(3, 2"
    ):
        plots.weight_posteriors({"a": posterior, "b": other})
    for name, words in {
        "layers.0.weight": r"named like 'layers\.0\.weight\[3, 17\]'",
        "layers.0.weigth[0, 0]": "did you mean 'layers.0.weight'",
        "layers.0.weight[3, 0]": r"there is no .* has shape \(3, 2\)",
        "layers.0.weight[1]": r"there is no .* has shape \(3, 2\)",
    }.items():
        with pytest.raises(UserError, match=words):
            plots.weight_posteriors({"a": posterior}, [name])


# -- traces ------------------------------------------------------------------------------------------------------------
def test_a_samplers_trace_has_its_temperature_against_one(tmp_path):
    trace = {
        "epoch": [1.0, 2.0, 3.0, 4.0],
        "step_size": [0.1, 0.1, 0.05, 0.05],
        "kinetic_temperature": [9.0, 1.5, 1.1, 0.9],
        "draws": [0.0, 0.0, 2.0, 4.0],
        "validation_nll": [math.nan, math.nan, 0.5, 0.4],
        "log_joint": [-9.0, -8.0, -7.5, -7.0],
    }
    axes = plots.sampler_trace(trace)
    temperature, step, nll, joint = axes
    assert list(line_of(temperature, "kinetic").get_ydata()) == [9, 1.5, 1.1, 0.9]
    assert list(line_of(temperature, "expected: 1").get_ydata()) == [1, 1]
    assert temperature.get_title() == "mean 1.000 while draws are stored"
    assert all(list(line_of(ax, "first stored draw").get_xdata()) == [3, 3] for ax in axes)
    assert step.get_ylabel() == "step size" and step.get_ylim()[0] == 0
    assert "nats per validation row" in nll.get_ylabel() and nll.get_title().endswith("0.4000 at last")
    assert joint.get_ylabel() == "nats, all training rows" and all(ax.get_xlabel() == "epoch" for ax in axes)
    saved(axes, tmp_path / "p.png")
    few = plots.sampler_trace({"kinetic_temperature": [1.0, 1.2], "validation_nll": [math.nan, math.nan]})
    assert len(few) == 1, "a panel without a number is none"
    with pytest.raises(UserError, match="'kinetic_temperature' or 'step_size'; this one holds elbo"):
        plots.sampler_trace({"elbo": [1.0]})


def test_chains_are_lines_and_divergent_transitions_are_marked(tmp_path):
    stats = {
        "lp": torch.tensor([[-3.0, -2.0, -1.0], [-2.0, -2.0, -2.0]]),
        "diverging": torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
    }
    ax = plots.chain_traces(stats)
    assert line_of(ax, "chain 0").get_xydata().tolist() == [[1, -3], [2, -2], [3, -1]]
    assert list(line_of(ax, "chain 1").get_ydata()) == [-2, -2, -2]
    assert list(line_of(ax, "divergent").get_xdata()) == [2]
    assert ax.get_title().startswith("1 of 6 transitions divergent; mean −2") and "nats" in ax.get_ylabel()
    saved(ax, tmp_path / "p.png")
    with pytest.raises(UserError, match="unknown statistic 'energy'"):
        plots.chain_traces(stats, name="energy")
    with pytest.raises(UserError, match="no statistics"):
        plots.chain_traces({})


def scene(posterior, **options):
    x, y = random(6, 2), torch.arange(6) % 3
    data = Dataset("three", SCHEMA, x, y, x[:0], y[:0], x, y)
    return Scene(posterior, data, 4, bp.predict(posterior, x, num_draws=4), **options)


def test_a_report_of_a_sampler_shows_its_trace_and_its_growing_ensemble(tmp_path):
    sghmc = replace(chains(random(2, 3, 3, 2)), trace={"kinetic_temperature": [1.0], "log_joint": [-3.0]})
    nuts = replace(chains(random(2, 3, 3, 2)), stats={"lp": random(2, 3)})
    for posterior, last in ((sghmc, "sampler-trace"), (nuts, "transitions")):
        names = list(figures_of(scene(posterior)))
        assert names[-1] == last and "growing-ensemble" in names and "training-curves" not in names
    assert "growing-ensemble" not in figures_of(scene(guided()))
    drawn = draw_all(scene(sghmc), tmp_path)
    assert (tmp_path / "sampler-trace.png").read_bytes() == drawn[-1].png


def test_doubt_is_shown_where_most_rows_are_sure():
    unsure = chains(0.1 * random(1, 3, 3, 2))
    bias = torch.tensor([9.0, 0.0, 0.0]).expand(1, 3, 3)
    assert "doubt-calibration" not in figures_of(scene(unsure))
    assert "doubt-calibration" in figures_of(scene(chains(0.1 * random(1, 3, 3, 2), bias)))


def test_early_stopping_marks_the_epoch_that_it_kept(tmp_path):
    trace = {
        "epoch": [1.0, 2.0, 3.0, 4.0],
        "log_joint": [-1000.0, -990.0, -985.0, -984.0],
        "log_likelihood": [-30.0, -20.0, -16.0, -14.0],
        "log_prior": [-970.0, -970.0, -969.0, -970.0],
        "validation_nll": [0.5, 0.3, 0.3, 0.4],
    }
    axes = plots.training_curves(trace)
    kept = line_of(axes[2], "lowest: epoch 2, 0.3000 nats")
    assert (kept.get_xdata()[0], kept.get_ydata()[0]) == (2, 0.3), "the first of equals"
    assert "nats" in axes[2].get_ylabel()
    # 956 nats apart and 16 wide: as changes to the last values, which the legend adds back
    assert list(line_of(axes[1], "log likelihood + 14").get_ydata()) == [-16, -6, -2, 0]
    assert list(line_of(axes[1], "log prior density + 970").get_ydata()) == [0, 0, 1, 0]
    saved(axes, tmp_path / "p.png")


# -- doubt -------------------------------------------------------------------------------------------------------------
def test_doubt_is_spread_over_a_log_scale_and_its_errors_counted(tmp_path):
    doubt = [0.2] * 10 + [0.002] * 30
    prediction = stated([[1 - d, d / 2, d / 2] for d in doubt])
    y = torch.tensor([1] * 3 + [0] * 37)
    top, bottom = plots.doubt_calibration(prediction, y)
    (dot,) = [line for line in top.lines if line.get_label() == "error of the bin"]
    assert dot.get_xydata().ravel() == pytest.approx([0.2, 0.3], rel=1e-4)
    (bound,) = [line for line in top.lines if line.get_label().startswith("no error")]
    z = 1.959964
    assert bound.get_xydata().ravel() == pytest.approx(
        [0.002, z**2 / (30 + z**2)], rel=1e-3
    )  # Wilson's upper end of 0/30
    assert [bar.get_height() for bar in bottom.containers[0]] == [30, 10]
    assert [t.get_text() for t in bottom.texts] == ["30", "10"]
    assert top.get_title() == f"3 of 40 wrong, mean doubt {np.mean(doubt):.2%}"
    assert (top.get_xscale(), top.get_yscale()) == ("log", "log") and "1 − largest" in bottom.get_xlabel()
    saved(top, tmp_path / "p.png")


# -- comparison --------------------------------------------------------------------------------------------------------
def run(inference, variant="last-layer", seed=0):
    recipe = {"variant": variant, "inference": inference, "seed": seed}
    return RunFacts(f"runs/{variant}-{inference}-{seed}", "", "classification", recipe, {}, {}, {})


def test_runs_are_told_apart_by_as_little_as_it_takes():
    assert short_labels([run("svi"), run("nuts")]) == ["SVI", "NUTS"]
    assert short_labels([run("svi"), run("svi", "mlp")]) == ["last-layer (svi)", "mlp (svi)"]
    assert short_labels([run("svi"), run("svi", seed=1)])[1] == "last-layer (svi), seed 1"
    assert short_labels([run("svi"), run("svi")]) == ["1: runs/last-layer-svi-0", "2: runs/last-layer-svi-0"]


def test_a_comparison_draws_what_applies():
    x, y = random(6, 2), torch.arange(6) % 3
    data = Dataset("three", SCHEMA, x, y, x[:0], y[:0], x, y)
    posteriors = [chains(random(1, 20, 3, 2, seed=s)) for s in (0, 1)]
    predictions = [bp.predict(p, x, num_draws=20) for p in posteriors]
    pictures = draw_comparison([run("svi"), run("nuts")], posteriors, predictions, data)
    assert [p.name for p in pictures] == ["method-predictions", "weight-posteriors"]
    assert all(p.png.startswith(b"\x89PNG") and p.sentence.endswith(".") for p in pictures)
    row = plots.most_disputed(dict(enumerate(predictions)))
    assert f"total variation {plots.dispute(dict(enumerate(predictions)), row):.3f}" in pictures[0].sentence
    unlike = draw_comparison([run("svi"), run("svi", "mlp")], [posteriors[0], guided(4)], predictions, data)
    assert [p.name for p in unlike] == ["method-predictions"], "weights of two models are not compared"
