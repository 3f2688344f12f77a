"""Reference posteriors: what is stored, that nothing else is taken for it, that the comparison sees what is off."""

import dataclasses

import numpy as np
import pytest
from refused import refuses
from scipy.special import expit
from scipy.stats import norm

import bnn_pyro as bp
from bnn_pyro.checks import ALPHA, Subject, reference
from bnn_pyro.checks.reference import Reference, compared, coverage
from bnn_pyro.checks.reference_posterior import Outputs, ReferencePosterior, bounded, load_reference, references
from bnn_pyro.plots import reference_outputs
from bnn_pyro.settings import build

TOY = {"hidden": (32,), "prior": "normal:3", "noise": 1.0}


def subject(variant="mean-field", inference="svi", data="toy-curve", given=None, **settings):
    return Subject(build(bp.ZOO[variant], settings), bp.METHODS[inference], bp.load_data(data), given or {})


@pytest.mark.parametrize("name", references())
def test_a_stored_reference_meets_the_bar_and_its_parts_fit(name):
    found = load_reference(name)
    criteria = found.about["criteria"]
    assert found.about["met"] and all(met for *_, met in criteria.values()) and criteria["draws"][0] >= 10_000
    assert max(criteria["rhat_split_max"][0], criteria["rhat_of_starts_max"][0]) < 1.01
    assert criteria["divergences"][0] == 0 and criteria["bfmi_min"][0] > 0.2 and criteria["second_run_p"][0] > ALPHA
    # The stored draws are some of those that the averages are of.
    z, draws = found.draws.astype(float), len(found.draws)
    assert np.abs(z.mean(0)).max() < 5 / np.sqrt(draws) and np.abs(z.std(0) - 1).max() < 0.35
    outputs, known = found.outputs(), found.mean[found.points]
    means = (outputs if len(found.noise) else expit(outputs)).mean(0)
    means = np.concatenate([1 - means, means], 1) if known.shape[1] == 2 else means
    assert (np.abs(means - known) <= 5 * found.mean_sd[found.points] / np.sqrt(draws) + 1e-3).all()
    averages = bounded(outputs, found.centre[found.points], found.spread[found.points]).mean(1)
    assert np.abs(averages - found.expected[:, found.points]).max() < 5 * 0.7 / np.sqrt(draws)


@pytest.mark.parametrize("name", ["breast-cancer", "digits-last-layer", "toy-curve"])  # every installation has the data
def test_the_density_knows_its_own_posterior_and_no_other(name):
    stored = load_reference(name)
    data, own = stored.data(), build(bp.ZOO[stored.about["variant"]], stored.settings())
    assert stored.unlike(own, data) == stored.unlike(dataclasses.replace(own, init_scale=0.3), data) == ""
    for change in ({"prior": "normal:2.99"}, {"bias": False}, {"noise": 1.001}, {"activation": "gelu"}):
        if hasattr(own, *change) and not (stored.about["task"] != "regression" and "noise" in change):
            assert "is another one" in stored.unlike(dataclasses.replace(own, **change), data)
    if stored.about["task"] == "classification":  # the same rows, one of them with another label
        wrong = data.y_train.clone()
        wrong[0] = 1 - wrong[0].clamp(max=1)
        assert "is another one" in stored.unlike(own, dataclasses.replace(data, y_train=wrong))
    assert "of another kind" in stored.unlike(own, bp.load_data("diabetes"))


QUICK = build(Reference, Reference.quick)


def test_a_sampler_passes_and_a_broken_one_does_not(monkeypatch):
    of = subject(inference="chees", given={"draws": 60, "warmup": 200}, **TOY)
    fit, fitted = reference.fit, []
    monkeypatch.setattr(reference, "fit", lambda *args, **how: fitted.append(fit(*args, **how)) or fitted[-1])
    right = QUICK.run(of)
    assert right.level == "good", right.sentence
    assert right.settings["reference"] == "toy-curve" and "cannot be told" in right.sentence
    assert right.figures["posterior_coverage_95"] == pytest.approx(0.95, abs=0.04)
    for factor, words in ((1.05, "does not sample the posterior"), (np.nan, "not finite")):
        wide = dataclasses.replace(fitted[0], chains={k: factor * v for k, v in fitted[0].chains.items()})
        monkeypatch.setattr(reference, "fit", lambda *args, wide=wide, **how: wide)
        wrong = QUICK.run(of)
        assert wrong.level == "bad" and words in wrong.sentence
        assert factor != 1.05 or min(f.p for f in wrong.findings if f.p is not None) < ALPHA


def test_an_approximation_is_told_by_how_much():
    of = subject(data="breast-cancer", given={"epochs": 150, "lr": 0.02}, hidden=(4,))
    found = dataclasses.replace(QUICK, draws=1000).run(of)
    assert found.level == "caution" and found.settings["reference"] == "breast-cancer"
    assert found.settings["variant"]["prior"] == "fan-in:1.5" and found.settings["variant"]["hidden"] == [5, 5]
    assert found.figures["posterior_coverage_95"] < 0.9 and found.figures["sd_ratio"] < 0.9
    assert f"hold {found.figures['posterior_coverage_95']:.0%}" in found.sentence
    across, up = reference_outputs(found.evidence)[1].lines[1].get_data()
    assert len(across) == 150 and (np.asarray(up) < np.asarray(across)).mean() > 0.5  # below the diagonal: too sure


def test_which_reference_is_taken_and_what_is_refused():
    refuses(r"unknown reference 'toy'.*toy-curve", load_reference, "toy")

    def taken(of):
        assert QUICK.refuses(of) == ""
        reference, entry, data = QUICK.pose(of)
        assert not reference.unlike(entry, data)
        return reference.name

    assert taken(subject(**TOY)) == taken(subject(data="diabetes")) == "toy-curve"
    assert taken(subject(data="breast-cancer")) == taken(subject(inference="sghmc")) == "breast-cancer"
    assert {taken(subject("last-layer", data=data)) for data in ("digits", "toy-curve")} == {"digits-last-layer"}
    for of, why in (
        (subject(given={"temperature": 0.5}, **TOY), "temperature 1, and this is of 0.5"),
        (subject("last-layer", "nuts", data="digits"), "take the full budget"),
        (subject("bayesian-convnet", data="digits"), "convolutions"),
        (subject("dropout-mlp", "mc-dropout"), "no posterior that is known"),
    ):
        assert why in QUICK.refuses(of)


# -- the comparison, of series whose law is known ----------------------------------------------------------------------
def normal_reference(num=30, draws=500, seed=5):
    """Of independent standard Normal outputs at ``num`` inputs, whose every average is known by integration."""
    u, zero, one = norm.ppf((np.arange(100_000) + 0.5) / 100_000), np.zeros((num, 1)), np.ones((num, 1))
    expected = np.broadcast_to(bounded(u[:, None, None], 0.0, np.ones(1)).mean(1), (2, num, 1))
    error = np.broadcast_to(np.array([0.63, 0.23])[:, None, None] / 100, (2, num, 1))
    stored, noise = np.random.default_rng(seed).standard_normal((draws, num, 1)), np.full((draws, 1), 0.5)
    about = {"task": "regression", "draws": 10_000, "title": "standard Normals"}
    parts = zero, zero, one, zero, one, expected, error, np.arange(num), stored, noise
    return ReferencePosterior("normal", about, *parts)


def chains(rng, shape=(4, 400), num=30, rho=0.0, shift=0.0, width=1.0, markov=True):
    """Found: AR(1) series of correlation rho, standard Normals but for shift and width."""
    values = rng.standard_normal((*shape, num, 1))
    for i in range(1, shape[1]):
        values[:, i] = rho * values[:, i - 1] + np.sqrt(1 - rho**2) * values[:, i]
    return Outputs((shift + width * values).astype(np.float32), markov)


def test_the_test_has_its_level_for_dependent_draws_and_coverage_that_of_normals():
    """p below 5 % in some 5 % of 200 posteriors that are right (with Bonferroni, in fewer), and never below 0.1 %."""
    rng, stored = np.random.default_rng(1), normal_reference()
    for rho in (0.0, 0.7):
        p = np.array([compared(chains(rng, rho=rho), stored)[0] for _ in range(100)])
        assert (p < 0.05).sum() <= 12 and p.min() > ALPHA
    for off in ({"shift": 0.2}, {"shift": -0.2}, {"width": 0.85}, {"width": 1.2}):
        p, _, visible = compared(chains(rng, shape=(4, 1000), rho=0.3, **off), stored)
        assert p < ALPHA and visible < 0.2
    # 2Φ(σ q) − 1.
    stored, rng = normal_reference(num=60, draws=1000), np.random.default_rng(3)
    narrow = coverage(chains(rng, shape=(1, 4000), num=60, width=0.5, markov=False), stored)
    for level, (share, error) in narrow.items():
        assert share == pytest.approx(2 * norm.cdf(0.5 * norm.ppf((1 + level) / 2)) - 1, abs=3 * error)
