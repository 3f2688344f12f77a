"""What is said of a posterior: each trouble by its own sentence, the overall one first, whatever its draws are."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from conjugate import correlated, dataset, model_of

import bnn_pyro as bp
from bnn_pyro.diagnostics import diagnose, diagnose_briefly, function_space
from bnn_pyro.diagnostics.verdicts import LEVELS
from bnn_pyro.parts.correlated_normal import FullNormal

with warnings.catch_warnings(action="ignore"):  # 0.23 announces 1.0 once a day
    import arviz

PROBLEM = correlated(num=60)
DATA = replace(PROBLEM.data, x_test=PROBLEM.data.x_train[:20] + 0.1, y_test=PROBLEM.data.y_train[:20])
CHAINS, DRAWS = 4, 500


def exact(change=None, chains=CHAINS, draws=DRAWS, stats=None, problem=PROBLEM, law=None, **about):
    """Independent draws of the exact posterior; ``change`` takes and returns them (C, D, P) in units of its root.

    law: the problem whose posterior they are of, where it is another one.
    """
    mean, precision = (law or problem).mean, (law or problem).precision
    g = torch.Generator().manual_seed(0)
    unit = torch.randn(chains, draws, len(mean), generator=g, dtype=torch.float64)
    if change is not None:
        unit = change(unit)
    w = (mean + unit @ torch.linalg.cholesky(torch.linalg.inv(precision)).T).float()
    model = model_of(problem.entry(), problem.schema)
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
    plain = diagnosis.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert len(diagnosis.weights) == diagnosis.statistics["weights_shown"] <= 200
    return diagnosis


def test_exact_draws():
    found, prediction = sound(diagnose(exact(), DATA)), bp.predict(exact(), DATA.x_test, num_draws=2000)
    s = found.statistics
    assert all(v.level == "good" for v in found.verdicts)
    assert s["rhat_max"] < 1.01 and s["rhat_share"] == 1 and 1200 < s["ess_bulk_min"] <= 3000 and s["points"] == 20
    assert s["chains"] == 4 and s["draws"] == 500 and s["divergences"] == s["stuck_chains"] == 0 and "nested" not in s
    assert s["mcse_max"] == pytest.approx(2000**-0.5, rel=0.3)
    assert s["pareto_k_bad"] == 0 and s["loo_rows"] == 60 and "khat" not in s
    assert 3.5 < s["p_loo"] < 6.5  # five weights
    row, outputs = found.weights[4], found.series["outputs"]
    assert row["name"] == "layers.0.bias[0]" and row["mean"] == pytest.approx(PROBLEM.mean[4].item(), abs=0.02)
    assert row["sd"] == pytest.approx(torch.linalg.inv(PROBLEM.precision)[4, 4].sqrt().item(), rel=0.1)
    assert np.array_equal(outputs[..., 0].ravel(), prediction.locs[:, 0].numpy()), "those of the predictions"
    assert outputs.shape[:2] == (CHAINS, DRAWS) and found.series["weights"].shape == (CHAINS, DRAWS, 5)


def autocorrelated(unit):
    for t in range(1, unit.shape[1]):
        unit[:, t] = 0.9 * unit[:, t - 1] + 0.19**0.5 * unit[:, t]
    return unit


def put(unit, where, value):
    unit[where] = value(unit) if callable(value) else unit[where] + value
    return unit


@pytest.mark.parametrize(("change", "words", "stuck"), [
    (lambda u: put(u, 0, 1.0), "the chains disagree about what the network predicts", []),
    (autocorrelated, "effective draws of 2,000 in 4 chains", []),
    (lambda u: put(u, 2, 6.0), "1 chain got stuck", [2]),
    (lambda u: put(u, 1, lambda u: u[1, :1]), "1 chain got stuck", [1]),
    (lambda u: u[:1, :1].expand(4, 20, 5).clone(), "did not move", [0, 1, 2, 3]),
    (lambda u: u[:2, :1].expand(2, 20, 5).clone(), "did not move", [0, 1]),
    (lambda u: u[:, :12].reshape(16, 3, 5), "16 chains of 3 draws are too few", []),
    (lambda u: put(u, (3, slice(10, None)), torch.nan), "490 draws of 2,000 predict", [3]),
], ids=["apart", "slow", "poor mode", "frozen", "none moved", "none moves", "many short", "not finite"])  # fmt: skip
def test_chains_in_trouble(change, words, stuck):
    found = sound(diagnose(exact(change), DATA))
    assert found.level == "bad" or (found.level == "caution" and change is autocorrelated)
    assert words in found.verdicts[0].sentence and np.flatnonzero(found.series["stuck"]).tolist() == stuck
    assert found.statistics["stuck_chains"] == len(stuck) and (said(found, "stuck chains") is None) == (not stuck)


def test_divergences_and_the_other_warnings():
    g = torch.Generator().manual_seed(5)
    diverging = (torch.rand(CHAINS, DRAWS, generator=g) < 0.05).double()
    deep, slow = torch.full((CHAINS, DRAWS), 3.0), torch.randn(CHAINS, DRAWS, generator=g).cumsum(1)
    stats = {"diverging": diverging, "tree_depth": deep, "energy": slow, "acceptance_rate": 0.1 + 0 * deep}
    settings = {"max_tree_depth": 3, "temperature": 0.5}
    found = sound(diagnose(exact(stats=stats, method_settings=settings), DATA))
    assert found.level == "caution" and said(found, "divergences").level == "bad"
    for about, words in (
        ("divergences", "target_accept"), ("trajectories", "100%"), ("energy", "BFMI"), ("acceptance", "10%"),
        ("temperature", "temperature 0.5"),
    ):  # fmt: skip
        assert words in said(found, about).sentence
    for every, level in ((200, "caution"), (10_000, "good")):  # a few are enough not to call the draws the posterior
        few = (torch.arange(DRAWS).expand(CHAINS, DRAWS) % every == every - 1).double()
        found = diagnose(exact(stats={"diverging": few, "acceptance_rate": 0.8 + 0 * deep}), DATA)
        assert found.verdicts[0].level == level and ("diverged" in found.verdicts[0].sentence) == (every == 200)
    half = torch.arange(DRAWS).expand(CHAINS, DRAWS) % 2
    thin = {"max_tree_depth": 3, "thin": 20}  # so that 5 % of the draws are 0.3 % of the transitions
    for kept, words in ((stats, "target_accept"), ({"diverging": half}, "taken back")):
        found = sound(diagnose(exact(stats=kept, method_settings=thin), DATA))
        sentence = said(found, "divergences").sentence
        assert "of 2,000 draws had among their 20 transitions one that diverged, in 4" in sentence and words in sentence
        assert said(found, "divergences").level == "caution"
        assert ("0.3% of the transitions diverged" in found.verdicts[0].sentence) == (kept is stats)
    shifted = exact(lambda u: u + torch.arange(4.0)[:, None, None], stats=stats, method_settings=settings)
    sentence = diagnose_briefly(shifted, DATA).verdicts[0].sentence  # causes come before more draws
    order = [sentence.index(word) for word in ("diverged", "cut at their longest", "draws=")]
    assert sentence.startswith("Not converged") and order == sorted(order)


@pytest.mark.parametrize(("apart", "adjusted", "modes"), [(1.0, False, True), (0.3, False, False), (1.0, True, False)])
def test_chains_of_mile_that_are_far_apart_are_called_an_ensemble(apart, adjusted, modes):
    quiet = {"diverging": torch.zeros(CHAINS, DRAWS)} | (
        {"acceptance_rate": torch.ones(CHAINS, DRAWS)} if adjusted else {}
    )
    found = diagnose_briefly(exact(lambda u: u + apart * torch.arange(4.0)[:, None, None], stats=quiet), DATA)
    sentence, rhat = found.verdicts[0].sentence, found.statistics["rhat_max"]
    assert found.level == "bad" and (rhat > 1.3) == (apart == 1.0) and rhat > 1.05
    assert ("they are an ensemble" in sentence) == modes and ("a smaller network" in sentence) != modes


def test_superchains():
    """Many short chains: judged by nested R-hat, near 1 where the plain one would not be."""
    groups = torch.arange(128).div(32, rounding_mode="floor")[:, None].expand(128, 10)
    nested = sound(diagnose(exact(autocorrelated, 128, 10, stats={"superchain": groups}), DATA))
    plain = diagnose(exact(autocorrelated, 128, 10), DATA)
    assert nested.statistics["nested"] == 1 and "nested R-hat" in nested.verdicts[0].sentence
    assert nested.statistics["rhat_max"] < 1.1 < 1.2 < plain.statistics["rhat_max"]


def test_a_step_size_that_is_too_large_is_named():
    """SGHMC with a learned noise leaves the posterior at lr 0.05: predictions spread over 1e9 and more."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=g)
    y = 2 * x[:, 0] + 0.3 * torch.randn(40, generator=g)
    data = dataset(x, y, bp.Schema("regression", (2,), y_scale=2.0), x[:10], y[:10])
    posterior = bp.fit(bp.MeanField(hidden=(), prior="fan-in:1"), data, bp.SGHMC(epochs=600, lr=0.05), progress=False)
    found = diagnose_briefly(posterior, data)
    assert found.level == "bad" and found.statistics["kinetic_temperature"] > 1.8
    sentence = found.verdicts[0].sentence
    assert "kinetic temperature" in sentence and "ran away" in sentence and "--set lr=" in sentence


def test_no_test_rows_few_draws_and_members():
    found = sound(diagnose(exact(), PROBLEM.data))
    assert "60 training points" in found.verdicts[0].sentence and "no test rows" in said(found, "test rows").sentence
    few = sound(diagnose(exact(chains=4, draws=9), DATA))
    assert few.level == "bad" and "4 chains of 9 draws" in few.verdicts[0].sentence
    members = sound(diagnose(replace(exact(chains=5, draws=1), stats={}), DATA))
    assert members.level == "caution" and members.verdicts[0].sentence.startswith("5 networks")
    with pytest.raises(bp.UserError, match="holds 1 of 1"):
        function_space(exact(chains=1, draws=1), PROBLEM.data.x_train)


def test_a_wrong_model_is_noticed():
    """Targets far from the fitted line: outliers that the noise does not know of, and rows that matter too much."""
    y = DATA.y_train.clone()
    y[5] += 20.0
    found = sound(diagnose(exact(), replace(DATA, y_train=y)))
    assert said(found, "predictive check").level == "caution" and found.statistics["ppc_p"] == 0
    wide = sound(diagnose(exact(), replace(DATA, y_train=PROBLEM.mean[4] + 0 * y + 5 * (y > 0))))
    assert said(wide, "calibration").level == "caution"


def guided(narrower=1.0, problem=PROBLEM, law=None, **about):
    """The exact posterior as a guide, with all standard deviations divided by ``narrower``; law: as of ``exact``."""
    mean, precision = (law or problem).mean, (law or problem).precision
    lower, w = torch.linalg.cholesky(torch.linalg.inv(precision)).float() / narrower, mean.float()
    sites = {"layers.0.weight": w[None, :-1], "layers.0.bias": w[-1:]} if problem.bias else {"layers.0.weight": w[None]}
    model = model_of(problem.entry(), problem.schema)
    trace = {"epoch": list(range(100)), "elbo": [-50.0 - 100 * 0.5**i for i in range(100)]}
    return bp.Posterior(model, problem.schema, guide=FullNormal.of(sites, lower), trace=trace, provenance=about)


def test_a_good_and_a_bad_approximation():
    good, bad = sound(diagnose(guided(1.0), DATA)), sound(diagnose(guided(10.0), DATA))
    assert good.level == "good" and good.statistics["khat"] < 0.7 and "close to the exact" in good.verdicts[0].sentence
    assert said(good, "training").level == "good" and "rhat_max" not in good.statistics
    assert bad.level == "caution" and bad.statistics["khat"] > 0.7 and "--inference nuts" in bad.verdicts[0].sentence
    assert "elpd_loo" not in bad.statistics and "left out" in said(bad, "leave-one-out").sentence
    rising = replace(guided(1.0), trace={"elbo": [-500.0 + i for i in range(100)]})
    found = sound(diagnose(rising, DATA))
    assert said(found, "training").level == "caution" and found.statistics["elbo_rise"] == pytest.approx(10)
    assert diagnose_briefly(rising, DATA).verdicts == (said(found, "training"),)  # 10 nats, and sqrt(60) are 7.7
    slower, stopped = {"elbo": [-500.0 + 0.7 * i for i in range(100)]}, {"early_stopping": {"rows": 20, "epoch": 99}}
    assert diagnose_briefly(replace(rising, trace=slower), DATA) is None
    assert diagnose_briefly(replace(rising, provenance=stopped), DATA) is None
    rise = {"elbo": [min(9.0 * i, 600.0) for i in range(100)]}
    found = sound(diagnose(replace(guided(1.0, method_settings={"epochs": 100}), trace=rise), DATA))
    assert said(found, "training").level == "caution" and "half-way through" in said(found, "training").sentence
    assert found.statistics["elbo_rise_halfway"] == pytest.approx(90) and found.statistics["elbo_rise"] == 0


def classifier(classes, draws):
    """(four chains of random weights of a linear classifier of two inputs, the generator)."""
    schema = bp.Schema("classification", (2,), classes=tuple(classes))
    g, outputs = torch.Generator().manual_seed(1), 1 if len(classes) == 2 else len(classes)
    model = model_of(bp.MeanField(hidden=()), schema)
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


def test_exchanged_units_are_no_disagreement():
    """A network's chains with signs flipped: weights apart, functions together."""
    schema, g = bp.Schema("regression", (1,)), torch.Generator().manual_seed(2)
    model = model_of(bp.MeanField(hidden=(2,), activation="tanh", noise=0.5), schema)
    place = {s: torch.randn(v.shape, generator=g) for s, v in model.initial.items()}
    chains = {s: v + 0.1 * torch.randn(2, 100, *v.shape, generator=g) for s, v in place.items()}
    for site in ("layers.0.weight", "layers.0.bias", "layers.1.weight"):
        chains[site][1] *= -1  # tanh is odd
    found = function_space(bp.Posterior(model, schema, chains=chains), torch.linspace(-1, 1, 5)[:, None])
    assert arviz.rhat(chains["layers.0.weight"][:, :, 0, 0].numpy()) > 1.5 and found.rhat.max() < 1.1
