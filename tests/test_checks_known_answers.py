"""Posteriors that are known, by formulas, integration or long runs: that right methods pass and wrong ones do not."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conjugate import LinearGaussian, correlated
from refused import refuses
from scipy.special import expit
from scipy.stats import norm
from torch.distributions import MultivariateNormal

import bnn_pyro as bp
from bnn_pyro.checks import ALPHA, Subject, reference
from bnn_pyro.checks.check import Estimate, judge
from bnn_pyro.checks.integration import best_normal, climb, curvature, grid, importance, normal, stationary
from bnn_pyro.checks.known_answers import ClosedForm, Logistic, Quadrature
from bnn_pyro.checks.predictive import PredictiveCheck
from bnn_pyro.checks.problems import linear_regression
from bnn_pyro.checks.reference import (
    Reference,
    ReferencePosterior,
    bounded,
    compared,
    coverage,
    load_reference,
    references,
)
from bnn_pyro.settings import build


class Linear(ClosedForm):
    def problems(self, subject):
        return [linear_regression(60, 2, 3)]


LINEAR = Linear(fits=3, effort=0.4)
SMALL = Quadrature(fits=2, effort=0.4)
MORE = Logistic(fits=3, effort=0.4)
#: What mean field makes of the standard deviations: 1/√Λᵢᵢ instead of √(Λ⁻¹)ᵢᵢ.
PRECISION = linear_regression(60, 2, 3).gaussian[1]
AMOUNT = (PRECISION.diagonal() * torch.linalg.inv(PRECISION).diagonal()).rsqrt().mean().item()


def subject(variant, method, **settings):
    """settings: of the variant, where it has them, and of the method."""
    own = {name: settings.pop(name) for name in list(settings) if hasattr(bp.ZOO[variant], name)}
    return Subject(bp.ZOO[variant](**own), bp.METHODS[method], correlated(20).data, settings)


def test_errors_are_larger_for_dependent_numbers_and_p_values_corrected_for_how_many_there_are():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4, 500, 3))
    for one in (Estimate.of_chains(values), Estimate.of_independent(values.reshape(-1, 20, 3).mean(1))):
        np.testing.assert_allclose(one.error, 1 / math.sqrt(2000), rtol=0.25)
        assert np.abs(one.mean).max() < 4 / math.sqrt(2000)
    slow = np.repeat(rng.normal(size=(4, 200, 1)), 10, axis=1)
    assert Estimate.of_chains(slow).error[0] > 2.5 * slow.std() / math.sqrt(slow.size)
    estimate, three = Estimate(np.array([0.0, 3.0]), np.ones(2)), Estimate(np.array([3.0]), np.ones(1))
    good, off = judge(["a", "b"], estimate, np.zeros(2))
    assert good.p == 1.0 and off.p == pytest.approx(2 * 2 * norm.sf(3))
    assert judge(["b"], three, np.zeros(1), tolerance=1.0)[0].p == pytest.approx(2 * norm.sf(2))
    assert judge(["b"], three, np.zeros(1), high=np.array([4.0]))[0].p == 1.0
    stuck = Estimate(np.array([0.1]), np.array([0.0]))
    assert [judge(["c"], stuck, np.array([x]))[0].level for x in (0.0, 0.1)] == ["bad", "good"]


@pytest.mark.parametrize("friction", [0.05, 1.0])
def test_the_stationary_law_of_a_finite_step(friction):
    """Full batch: every variance 1/λ is larger by 1/(1 − ηλ/(4 − 2α)); mini-batches only add to it."""
    problem, method = linear_regression(60, 3, 1), bp.SGHMC(lr=0.15, friction=friction)
    values, vectors = torch.linalg.eigh(problem.gaussian[1])
    exact = vectors @ torch.diag(1 / values / (1 - 0.15 / 60 * values / (4 - 2 * friction))) @ vectors.T
    low, high = stationary(method, problem)
    torch.testing.assert_close(low, exact)
    assert torch.equal(low, high)
    low, high = stationary(replace(method, lr=0.01, batch_size=15), problem)
    assert torch.linalg.eigvalsh(high - low).min() > 0
    low, high = problem.stationary(replace(method, lr=0.01, batch_size=15)).values()
    assert (low <= high).all() and (low < high).any()  # covariances may fall with the noise


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_quantities_of_linear_regression_are_in_the_order_of_their_labels(temperature):
    problem = replace(linear_regression(30, 2, 4), temperature=temperature)
    known = LinearGaussian(problem.inputs, problem.targets, problem.noise * temperature**0.5, problem.prior_scale)
    values = dict(zip(problem.labels(), problem.exact, strict=True))
    covariance = torch.linalg.inv(known.precision)
    assert len(values) == 3 + 4 + 6 + 4
    for one in ("mean of weight 2 (posterior sd)", "mean of the prediction at input 4 (posterior sd)"):
        assert values[one] == pytest.approx(0, abs=1e-12)
    for one in ("variance of weight 3", "variance of the prediction at input 1"):
        assert values[f"{one} (posterior variance)"] == pytest.approx(1)
    correlation = covariance[0, 2] / (covariance[0, 0] * covariance[2, 2]).sqrt()
    assert values["covariance of weights 1 and 3 (posterior sd)"] == pytest.approx(correlation.item())
    # The formula of the log joint has the posterior's mean and curvature.
    torch.testing.assert_close(problem.gaussian, (known.mean, known.precision))
    if temperature == 1:
        assert problem.elbo(known.mean, covariance) == pytest.approx(known.log_evidence)
        assert problem.elbo(*problem.best_normal(known.mean, False)) == pytest.approx(known.log_evidence - known.gap)


def test_a_correlated_normal_is_integrated_exactly():
    root = torch.tensor([[0.5, 0.0], [0.4, 0.3]], dtype=torch.float64)
    target = MultivariateNormal(torch.tensor([1.0, -0.5], dtype=torch.float64), scale_tril=root)
    density, zero = lambda w: target.log_prob(w) - 3.0, torch.zeros(2).double()
    standard = grid(lambda w: -0.5 * w.square().sum(1), 8.0, 81)
    mode = climb(density, zero)
    torch.testing.assert_close(mode, target.mean)
    torch.testing.assert_close(curvature(density, target.mean), target.precision_matrix)
    boxed = grid(density, 8.0)
    for nodes in (boxed, normal(target.mean, target.covariance_matrix, standard), importance(density, mode)):
        exact = 1e-3 if len(nodes.w) == 2**15 else 1e-9
        torch.testing.assert_close(nodes.mass @ nodes.w, target.mean, rtol=exact, atol=exact)
        off = nodes.w - target.mean
        spread = off.T @ (nodes.mass[:, None] * off)
        torch.testing.assert_close(spread, target.covariance_matrix, rtol=exact, atol=exact)
    # The best independent Normals: the same mean, and the conditional standard deviations; of any covariance: itself.
    mean, scale, elbo = best_normal(density, mode, standard)
    torch.testing.assert_close(mean, target.mean, atol=1e-5, rtol=0)
    torch.testing.assert_close(scale.diagonal(), target.precision_matrix.diagonal().rsqrt(), atol=1e-5, rtol=0)
    gap = 0.5 * (target.precision_matrix.diagonal().log().sum() - torch.logdet(target.precision_matrix))
    assert elbo == pytest.approx(-3.0 - gap.item(), abs=1e-8)
    _, scale, elbo = best_normal(density, mode, standard, correlated=True)
    torch.testing.assert_close(scale, root, atol=1e-4, rtol=0)
    assert elbo == pytest.approx(-3.0, abs=1e-8)


@pytest.mark.parametrize(("check", "variant", "method", "settings", "levels", "ratio"), [
    (LINEAR, "mean-field", "nuts", {}, "good", (0.93, 1.07)),
    (LINEAR, "last-layer", "laplace", {"temperature": 0.25}, "good", (0.98, 1.02)),
    (LINEAR, "mean-field", "sghmc", {}, "good caution", (0.95, 1.1)),
    (LINEAR, "hidden-layer", "svi", {}, "caution", (AMOUNT - 0.05, AMOUNT + 0.05)),
    (LINEAR, "last-layer", "svi", {"family": "low-rank:1"}, "caution", (0.6, 1.05)),
    (LINEAR, "mlp", "mle", {}, "caution", (0.0, 0.03)),
    (SMALL, "mean-field", "nuts", {}, "good caution", (0.85, 1.15)),
    (SMALL, "mean-field", "svi", {}, "caution", (0.4, 1.0)),
    (SMALL, "last-layer", "laplace", {}, "caution", (0.8, 1.05)),
    (MORE, "mean-field", "chees", {}, "good", (0.9, 1.1)),
    (MORE, "mean-field", "svi", {}, "caution", (0.4, 0.85)),
])  # fmt: skip
def test_methods_are_what_they_claim(check, variant, method, settings, levels, ratio):
    """Ratio: of standard deviations of the weights to the posterior's."""
    outcome = check.run(subject(variant, method, **settings))
    assert outcome.level in levels.split(), outcome.sentence
    assert ratio[0] <= next(iter(outcome.figures.values())) <= ratio[1]


def test_what_cannot_be_reduced_is_refused():
    for variant, method, settings, why in (
        ("dropout-mlp", "mc-dropout", {}, "settings, not inferred"),
        ("convnet", "map", {}, "convolutions"),
        ("variational-dropout", "svi", {}, "improper"),
        ("hidden-layer", "svi", {"scale": "layer"}, "in proportion to the mean"),
    ):
        assert why in LINEAR.refuses(subject(variant, method, **settings))
    assert LINEAR.refuses(subject("dropout-mlp", "map")) == ""


@pytest.mark.parametrize(("check", "variant", "method"), [(SMALL, "last-layer", "nuts"), (MORE, "mean-field", "chees")])
def test_a_wrong_prior_is_bad(monkeypatch, check, variant, method):
    own = Subject.reduced
    monkeypatch.setattr(Subject, "reduced", lambda self, **settings: own(self, **settings | {"prior": "normal:1"}))
    wrong = [f.about for f in check.run(subject(variant, method)).findings if f.level == "bad"]
    assert any("log joint" in about for about in wrong) and sum("of weight" in about for about in wrong) >= 3


@pytest.mark.parametrize(("variant", "method"), [("mean-field", "nuts"), ("last-layer", "laplace"), ("mlp", "map")])
def test_predictions_of_every_way_to_store_draws(variant, method):
    outcome = PredictiveCheck(draws=100, effort=0.1).run(subject(variant, method))
    assert outcome.level == "good", outcome.sentence
    assert ("agree with the exact" in outcome.sentence) == (method == "nuts")
    assert ("nats a label" in outcome.sentence) == (method != "nuts")


# -- reference posteriors: what is stored, that nothing else is taken for it, that the comparison sees what is off -----
TOY = {"hidden": (32,), "prior": "normal:3", "noise": 1.0}


def on_reference(variant="mean-field", inference="svi", data="toy-curve", given=None, **settings):
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
    assert stored.unlike(own, data) == stored.unlike(replace(own, init_scale=0.3), data) == ""
    for change in ({"prior": "normal:2.99"}, {"bias": False}, {"noise": 1.001}, {"activation": "gelu"}):
        if hasattr(own, *change) and not (stored.about["task"] != "regression" and "noise" in change):
            assert "density differs" in stored.unlike(replace(own, **change), data)
    if stored.about["task"] == "classification":  # the same rows, one of them with another label
        wrong = data.y_train.clone()
        wrong[0] = 1 - wrong[0].clamp(max=1)
        assert "density differs" in stored.unlike(own, replace(data, y_train=wrong))
    assert "another task or input shape" in stored.unlike(own, bp.load_data("diabetes"))


QUICK = build(Reference, Reference.quick)


def test_a_sampler_passes_and_a_broken_one_does_not(monkeypatch):
    of = on_reference(inference="chees", given={"draws": 60, "warmup": 200}, **TOY)
    fit, fitted = reference.fit, []
    monkeypatch.setattr(reference, "fit", lambda *args, **how: fitted.append(fit(*args, **how)) or fitted[-1])
    right = QUICK.run(of)
    assert right.level == "good", right.sentence
    assert right.settings["reference"] == "toy-curve" and "cannot be told" in right.sentence
    assert right.figures["posterior_coverage_95"] == pytest.approx(0.95, abs=0.04)
    for factor, words in ((1.05, "does not sample the posterior"), (np.nan, "not finite")):
        wide = replace(fitted[0], chains={k: factor * v for k, v in fitted[0].chains.items()})
        monkeypatch.setattr(reference, "fit", lambda *args, wide=wide, **how: wide)
        wrong = QUICK.run(of)
        assert wrong.level == "bad" and words in wrong.sentence
        assert factor != 1.05 or min(f.p for f in wrong.findings if f.p is not None) < ALPHA


def test_an_approximation_is_told_by_how_much():
    of = on_reference(data="breast-cancer", given={"epochs": 150, "lr": 0.02}, hidden=(4,))
    found = replace(QUICK, draws=1000).run(of)
    assert found.level == "caution" and found.settings["reference"] == "breast-cancer"
    assert found.settings["variant"]["prior"] == "fan-in:1.5" and found.settings["variant"]["hidden"] == [5, 5]
    assert found.figures["posterior_coverage_95"] < 0.9 and found.figures["sd_ratio"] < 0.9
    assert f"hold {found.figures['posterior_coverage_95']:.0%}" in found.sentence


def test_which_reference_is_taken_and_what_is_refused():
    refuses(r"unknown reference 'toy'.*toy-curve", load_reference, "toy")

    def taken(of):
        assert QUICK.refuses(of) == ""
        reference, entry, data = QUICK.pose(of)
        assert not reference.unlike(entry, data)
        return reference.name

    assert taken(on_reference(**TOY)) == taken(on_reference(data="diabetes")) == "toy-curve"
    assert taken(on_reference(data="breast-cancer")) == taken(on_reference(inference="sghmc")) == "breast-cancer"
    assert {taken(on_reference("last-layer", data=data)) for data in ("digits", "toy-curve")} == {"digits-last-layer"}
    for of, why in (
        (on_reference(given={"temperature": 0.5}, **TOY), "temperature 1, but this posterior has 0.5"),
        (on_reference("last-layer", "nuts", data="digits"), "use the full budget"),
        (on_reference("bayesian-convnet", data="digits"), "convolutions"),
        (on_reference("dropout-mlp", "mc-dropout"), "limit of its draws is not known"),
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
    values = values if markov else values.reshape(-1, 1, num, 1)
    return (shift + width * values).astype(np.float32)


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
