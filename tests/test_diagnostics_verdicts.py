"""What is said of a posterior: each trouble by its own sentence, the overall one first, whatever its draws are."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from conjugate import correlated, dataset

import bnn_pyro as bp
from bnn_pyro.diagnostics import diagnose, diagnose_chains, function_space
from bnn_pyro.diagnostics.verdicts import LEVELS
from bnn_pyro.parts.correlated_normal import FullNormal

with warnings.catch_warnings(action="ignore"):  # 0.23 announces 1.0 once a day
    import arviz

PROBLEM = correlated(num=60)
DATA = replace(PROBLEM.data, x_test=PROBLEM.data.x_train[:20] + 0.1, y_test=PROBLEM.data.y_train[:20])
CHAINS, DRAWS = 4, 500


def exact(change=None, chains=CHAINS, draws=DRAWS, stats=None, problem=PROBLEM, moments=None, **about):
    """Independent draws of the exact posterior; ``change`` takes and returns them (C, D, P) in units of its root.

    moments: (mean, precision) in place of the posterior's.
    """
    mean, precision = moments or (problem.mean, problem.precision)
    g = torch.Generator().manual_seed(0)
    unit = torch.randn(chains, draws, len(mean), generator=g, dtype=torch.float64)
    if change is not None:
        unit = change(unit)
    w = (mean + unit @ torch.linalg.cholesky(torch.linalg.inv(precision)).T).float()
    with bp.isolated(0):
        model = problem.entry().model(problem.schema)
    lp = -0.5 * unit.square().sum(-1)
    own = {"lp": lp, "energy": -lp + torch.rand(lp.shape, generator=g), "diverging": torch.zeros(lp.shape)}
    sites = {"layers.0.weight": w[..., None, :-1], "layers.0.bias": w[..., -1:]}
    return bp.Posterior(model, problem.schema, chains=sites, stats=own | (stats or {}), provenance=about)


def said(diagnosis, about):
    """The verdict about something; None where nothing was said."""
    return next((v for v in diagnosis.verdicts if v.about == about), None)


def sound(diagnosis):
    """Every diagnosis, of whatever posterior: an overall verdict first, sentences without NaN, JSON."""
    assert diagnosis.verdicts[0].about == "overall" and diagnosis.level == diagnosis.verdicts[0].level
    for verdict in diagnosis.verdicts:
        assert verdict.level in LEVELS and verdict.sentence.endswith(".") and "nan" not in verdict.sentence.split()
        assert verdict.sentence[0].isupper() or verdict.sentence[0].isdigit()
    plain = diagnosis.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["statistics"].keys() == diagnosis.statistics.keys()
    assert len(diagnosis.weights) == diagnosis.statistics["weights_shown"] <= 200
    return diagnosis


def test_exact_draws():
    steps = []
    found = sound(diagnose(exact(), DATA, progress=lambda done, of: steps.append((done, of))))
    s = found.statistics
    assert found.level == "good" and "The chains agree about what the network predicts" in found.verdicts[0].sentence
    assert all(v.level == "good" for v in found.verdicts)
    assert s["rhat_max"] < 1.01 and s["rhat_share"] == 1 and 1200 < s["ess_bulk_min"] <= 3000 and s["points"] == 20
    assert s["chains"] == 4 and s["draws"] == 500 and s["divergences"] == s["stuck_chains"] == 0 and "nested" not in s
    assert s["mcse_max"] == pytest.approx(2000**-0.5, rel=0.3)
    assert s["pareto_k_bad"] == 0 and s["loo_rows"] == 60 and "khat" not in s
    assert 3.5 < s["p_loo"] < 6.5  # five weights
    assert steps == [(i, 6) for i in range(7)]
    row = found.weights[4]
    assert row["name"] == "layers.0.bias[0]" and row["mean"] == pytest.approx(PROBLEM.mean[4].item(), abs=0.02)
    assert row["sd"] == pytest.approx(torch.linalg.inv(PROBLEM.precision)[4, 4].sqrt().item(), rel=0.1)


def test_outputs_are_those_of_the_predictions_draw_by_draw():
    series, prediction = diagnose(exact(), DATA).series, bp.predict(exact(), DATA.x_test, num_draws=2000)
    assert series["output_labels"][0] == "mean of y, test point 1" and series["outputs"].shape[:2] == (CHAINS, DRAWS)
    assert np.array_equal(series["outputs"][..., 0].ravel(), prediction.locs[:, 0].numpy())
    assert series["weights"].shape == (CHAINS, DRAWS, 5) and series["weight_labels"][0] == "layers.0.weight[0, 0]"


def autocorrelated(unit):
    for t in range(1, unit.shape[1]):
        unit[:, t] = 0.9 * unit[:, t - 1] + 0.19**0.5 * unit[:, t]
    return unit


def put(unit, where, value):
    unit[where] = value(unit) if callable(value) else unit[where] + value
    return unit


@pytest.mark.parametrize(
    ("change", "levels", "words", "stuck"),
    [
        (lambda u: put(u, 0, 1.0), ("bad",), "the chains disagree about what the network predicts", []),
        (autocorrelated, ("caution", "bad"), "effective draws of 2,000", []),
        (lambda u: put(u, 2, 6.0), ("bad",), "1 chain got stuck", [2]),
        (lambda u: put(u, 1, lambda u: u[1, :1]), ("bad",), "1 chain got stuck", [1]),
        (lambda u: u[:1, :1].expand(4, 20, 5).clone(), ("bad",), "did not move", [0, 1, 2, 3]),
        (lambda u: put(u, (3, slice(10, None)), torch.nan), ("bad",), "490 draws of 2,000 predict", [3]),
    ],
    ids=["apart", "slow", "poor mode", "frozen", "none moved", "not finite"],
)
def test_chains_in_trouble(change, levels, words, stuck):
    found = sound(diagnose(exact(change), DATA))
    assert found.level in levels and words in found.verdicts[0].sentence
    assert np.flatnonzero(found.series["stuck"]).tolist() == stuck
    assert found.statistics["stuck_chains"] == len(stuck) and (said(found, "stuck chains") is None) == (not stuck)
    assert found.statistics.get("rhat_max", 0.0) > 1.05 or "disagree" not in words
    assert found.statistics.get("ess_bulk_min", 0.0) < 250 or "effective" not in words


def test_divergences_and_the_other_warnings():
    g = torch.Generator().manual_seed(5)
    diverging = (torch.rand(CHAINS, DRAWS, generator=g) < 0.05).double()
    deep, slow = torch.full((CHAINS, DRAWS), 3.0), torch.randn(CHAINS, DRAWS, generator=g).cumsum(1)
    accepted = torch.full((CHAINS, DRAWS), 0.1)
    stats = {"diverging": diverging, "tree_depth": deep, "energy": slow, "acceptance_rate": accepted}
    settings = {"max_tree_depth": 3, "temperature": 0.5}
    found = sound(diagnose(exact(stats=stats, method_settings=settings), DATA))
    assert found.level == "caution" and found.statistics["divergences"] == diverging.sum()
    assert said(found, "divergences").level == "bad" and "target_accept" in said(found, "divergences").sentence
    assert said(found, "trajectories").sentence.startswith("100%")
    assert "BFMI" in said(found, "energy").sentence and "10%" in said(found, "acceptance").sentence
    assert "temperature 0.5" in said(found, "temperature").sentence
    few = exact(stats={"diverging": torch.zeros(CHAINS, DRAWS).index_fill(1, torch.tensor([7]), 1.0)})
    verdict = said(diagnose(few, DATA), "divergences")  # of a sampler that accepts every proposal
    assert verdict.level == "caution" and "energy_variance" in verdict.sentence and "accept" not in verdict.sentence


@pytest.mark.parametrize(("lr", "level"), [(0.05, "bad"), (0.001, "not bad")])
def test_a_step_size_that_is_too_large_is_named(lr, level):
    """SGHMC with a learned noise leaves the posterior at lr 0.05: predictions spread over 1e9 and more."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=g)
    y = 2 * x[:, 0] + 0.3 * torch.randn(40, generator=g)
    data = dataset(x, y, bp.Schema("regression", (2,), y_scale=2.0), x[:10], y[:10])
    posterior = bp.fit(bp.MeanField(hidden=(), prior="fan-in:1"), data, bp.SGHMC(epochs=600, lr=lr), progress=False)
    found = diagnose_chains(posterior, data)
    kinetic, sentence = found.statistics["kinetic_temperature"], found.verdicts[0].sentence
    if level == "bad":
        assert kinetic > 1.8 and found.statistics["spread_max"] > 1e9 and found.level == "bad"
        assert "kinetic temperature" in sentence and "ran away" in sentence and "--set lr=" in sentence
        assert "draws=" not in sentence and said(found, "kinetic temperature").level == "bad"
    else:
        assert abs(kinetic - 1) < 0.5 and "kinetic temperature" not in sentence and said(found, "spread") is None


def test_causes_of_a_sampler_that_has_not_converged_come_before_more_draws():
    deep = torch.full((CHAINS, DRAWS), 3.0)
    stats = {"tree_depth": deep, "acceptance_rate": 0.9 + 0 * deep}
    stats |= {"diverging": (torch.arange(CHAINS * DRAWS) % 5 == 0).double().view(CHAINS, DRAWS)}
    shifted = exact(lambda u: u + torch.arange(4.0)[:, None, None], stats=stats, method_settings={"max_tree_depth": 3})
    sentence = diagnose_chains(shifted, DATA).verdicts[0].sentence
    order = [sentence.index(word) for word in ("diverged", "cut at their longest", "target_accept", "draws=")]
    assert sentence.startswith("Not converged") and order == sorted(order)


def test_superchains():
    """Many short chains: judged by nested R-hat, near 1 where the plain one would not be."""
    groups = torch.arange(128).div(32, rounding_mode="floor")[:, None].expand(128, 10)
    nested = sound(diagnose(exact(autocorrelated, 128, 10, stats={"superchain": groups}), DATA))
    plain = diagnose(exact(autocorrelated, 128, 10), DATA)
    assert nested.statistics["nested"] == 1 and "nested R-hat" in nested.verdicts[0].sentence
    assert nested.statistics["rhat_max"] < 1.1 < 1.2 < plain.statistics["rhat_max"]
    found = function_space(exact(autocorrelated, 128, 10, stats={"superchain": groups}), DATA.x_test)
    assert found.nested and found.worst == pytest.approx(nested.statistics["rhat_max"], rel=1e-4)


@pytest.mark.parametrize(
    ("chains", "draws", "words"),
    [(4, 9, "4 chains of 9 draws"), (1, 2, "1 chain of 2 draws")],
)
def test_too_few_draws(chains, draws, words):
    found = sound(diagnose(exact(chains=chains, draws=draws), DATA))
    assert found.level == "bad" and words in found.verdicts[0].sentence and "set chains=4" in found.verdicts[0].sentence
    assert "ess_bulk_min" not in found.statistics


def test_no_test_rows():
    found = sound(diagnose(exact(), PROBLEM.data))
    assert "60 training points" in found.verdicts[0].sentence and "no test rows" in said(found, "test rows").sentence
    with pytest.raises(bp.UserError, match=r"inputs of shape \(3,\)"):
        diagnose(exact(), correlated(num=20, inputs=3).data)


def test_a_wrong_model_is_noticed():
    """Targets far from the fitted line: outliers that the noise does not know of, and rows that matter too much."""
    y = DATA.y_train.clone()
    y[5] += 20.0
    found = sound(diagnose(exact(), replace(DATA, y_train=y)))
    assert said(found, "predictive check").level == "caution" and found.statistics["ppc_p"] == 0
    wide = sound(diagnose(exact(), replace(DATA, y_train=PROBLEM.mean[4] + 0 * y + 5 * (y > 0))))
    assert said(wide, "calibration").level == "caution"


# -- what is no chain ----------------------------------------------------------------------------------------------
def guided(narrower=1.0, problem=PROBLEM, moments=None, **about):
    """The exact posterior as a guide, with all standard deviations divided by ``narrower``; moments as of ``exact``."""
    mean, precision = moments or (problem.mean, problem.precision)
    lower, w = torch.linalg.cholesky(torch.linalg.inv(precision)).float() / narrower, mean.float()
    sites = {"layers.0.weight": w[None, :-1], "layers.0.bias": w[-1:]} if problem.bias else {"layers.0.weight": w[None]}
    with bp.isolated(0):
        model = problem.entry().model(problem.schema)
    trace = {"epoch": list(range(100)), "elbo": [-50.0 - 100 * 0.5**i for i in range(100)]}
    guide = FullNormal.of(sites, lower)
    return bp.Posterior(model, problem.schema, guide=guide, trace=trace, provenance=about)


def test_a_good_and_a_bad_approximation():
    good, bad = sound(diagnose(guided(1.0), DATA)), sound(diagnose(guided(10.0), DATA))
    assert good.level == "good" and good.statistics["khat"] < 0.7 and "close to the exact" in good.verdicts[0].sentence
    assert said(good, "training").level == "good" and "rhat_max" not in good.statistics
    assert bad.level == "caution" and bad.statistics["khat"] > 0.7 and "--inference nuts" in bad.verdicts[0].sentence
    chains = diagnose(exact(), DATA).statistics
    assert good.statistics["elpd_loo"] == pytest.approx(chains["elpd_loo"], abs=0.3)
    assert "elpd_loo" not in bad.statistics and "left out" in said(bad, "leave-one-out").sentence


def test_training_that_had_not_settled():
    rising = replace(guided(1.0), trace={"elbo": [-500.0 + i for i in range(100)]})
    found = sound(diagnose(rising, DATA))
    assert said(found, "training").level == "caution" and found.statistics["elbo_rise"] == pytest.approx(10)
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 20
    assert diagnose(replace(rising, trace={"elbo": noise.tolist()}), DATA).statistics["elbo_rise"] == 0
    assert "elbo_rise" not in diagnose(replace(rising, trace={"elbo": [-1.0] * 19}), DATA).statistics


def test_members():
    members = sound(diagnose(replace(exact(chains=5, draws=1), stats={}), DATA))
    assert members.level == "caution" and members.verdicts[0].sentence.startswith("5 networks")
    assert members.series["outputs"].shape == (5, 1, 6) and "elpd_loo" not in members.statistics


def classifier(classes, draws):
    """(four chains of random weights of a linear classifier of two inputs, the generator)."""
    schema = bp.Schema("classification", (2,), classes=tuple(classes))
    g, outputs = torch.Generator().manual_seed(1), 1 if len(classes) == 2 else len(classes)
    with bp.isolated(0):
        model = bp.MeanField(hidden=()).model(schema)
    weight, bias = torch.randn(4, draws, outputs, 2, generator=g), torch.randn(4, draws, outputs, generator=g)
    return bp.Posterior(model, schema, chains={"layers.0.weight": weight, "layers.0.bias": bias}), g


@pytest.mark.parametrize("classes", [("no", "yes"), ("no", "yes", "maybe")], ids=["two_classes", "three"])
def test_classes_and_the_label_of_an_output(classes):
    posterior, g = classifier(classes, draws=100)
    x, y = torch.randn(30, 2, generator=g), torch.arange(30) % len(classes)
    found = sound(diagnose(posterior, dataset(x, y, posterior.schema, x[:4], y[:4])))
    assert found.series["rhat"].shape == (4 * (len(classes) if len(classes) > 2 else 1),)
    assert found.series["output_labels"][-1] == f"log-odds of {classes[-1]}, test point 4"
    assert found.statistics["points"] == 4 and found.series["replicated"].max() < len(classes)


# -- function space ------------------------------------------------------------------------------------------------
def test_exchanged_units_are_no_disagreement():
    """A network's chains with their hidden units renamed and signs flipped: weights apart, functions together."""
    schema, g = bp.Schema("regression", (1,)), torch.Generator().manual_seed(2)
    with bp.isolated(0):
        model = bp.MeanField(hidden=(2,), activation="tanh", noise=0.5).model(schema)
    chains = {s: torch.randn(v.shape, generator=g) + torch.zeros(2, 100, *v.shape) for s, v in model.initial.items()}
    chains = {s: v + 0.1 * torch.randn(v.shape, generator=g) for s, v in chains.items()}
    for site in ("layers.0.weight", "layers.0.bias", "layers.1.weight"):
        chains[site][1] *= -1  # tanh is odd
    posterior = bp.Posterior(model, schema, chains=chains)
    assert arviz.rhat(chains["layers.0.weight"][:, :, 0, 0].numpy()) > 1.5
    assert function_space(posterior, torch.linspace(-1, 1, 5)[:, None]).rhat.max() < 1.1


def test_function_space_refuses_what_is_no_chain():
    for posterior, why in ((guided(1.0), "this posterior is a guide"), (exact(chains=1, draws=1), "holds 1 of 1")):
        with pytest.raises(bp.UserError, match=why):
            function_space(posterior, PROBLEM.data.x_train)
