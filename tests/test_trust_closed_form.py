"""Linear regression as a check: what each method claims, that it holds where it should, and that it can fail."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

import bnn_pyro as bp
from bnn_pyro import plots
from bnn_pyro.checks import ALPHA, CHECKS, Subject
from bnn_pyro.checks.gaussian_claims import expected_of, quantities, stationary
from bnn_pyro.checks.known_answers import ClosedForm
from bnn_pyro.checks.linear_regression import correlated
from bnn_pyro.checks.predictive import PredictiveCheck
from bnn_pyro.checks.z_tests import Estimate, judge, of_chains, of_independent, of_runs
from bnn_pyro.zoo import ZOO

SMALL = ClosedForm(rows=60, inputs=2, points=3, fits=5, effort=0.5)


def subject(variant, method, settings=None, **given):
    return Subject(variant, ZOO[variant](**(settings or {})), method, correlated(20).data, given)


def test_what_is_far_off_is_named():
    labels = [f"mean of weight {i + 1} (posterior sd)" for i in range(8)]
    ax = plots.standard_errors(labels, [0.3, -1, 0, 9.0, 0, 0, -np.inf, 1], 4.0)
    assert {text.get_text() for text in ax.texts} == {"mean of weight 4", "mean of weight 7"}
    assert ax.get_title().startswith("2 of 8") and ax.get_legend().get_texts()[0].get_text() == "mean of weight"


# -- z-tests -----------------------------------------------------------------------------------------------------
def test_errors_are_those_of_independent_numbers():
    values = np.random.default_rng(0).normal(size=(4, 500, 3))
    for found in (of_chains(values), of_independent(values.reshape(-1, 3)), of_runs(values.reshape(-1, 20, 3).mean(1))):
        np.testing.assert_allclose(found.error, 1 / math.sqrt(2000), rtol=0.25)
        assert np.abs(found.mean).max() < 4 / math.sqrt(2000)


def test_dependent_draws_count_for_fewer():
    values = np.repeat(np.random.default_rng(0).normal(size=(4, 200, 1)), 10, axis=1)
    assert of_chains(values).error[0] > 2.5 * values.std() / math.sqrt(values.size)


def test_p_values_are_corrected_for_how_many_there_are():
    found = Estimate(np.array([0.0, 3.0]), np.array([1.0, 1.0]), np.array([np.inf, np.inf]))
    good, three = judge(["a", "b"], found, np.zeros(2))
    assert good.p == 1.0 and three.p == pytest.approx(2 * 2 * norm.sf(3))
    assert judge(["b"], found[[1]], np.zeros(1), tolerance=1.0)[0].p == pytest.approx(2 * norm.sf(2))
    assert judge(["b"], found[[1]], np.zeros(1), high=np.array([4.0]))[0].p == 1.0
    stuck = Estimate(np.array([0.1]), np.array([0.0]), np.array([np.inf]))
    assert judge(["c"], stuck, np.zeros(1))[0].level == "bad"
    assert judge(["c"], stuck, np.array([0.1]))[0].level == "good"


# -- what is claimed ---------------------------------------------------------------------------------------------
def test_the_stationary_law_of_a_finite_step():
    """Full batch: every variance 1/λ is larger by 1/(1 − ηλ/(4 − 2α)); mini-batches only add to it."""
    problem = correlated(60, 3)
    method = bp.SGHMC(lr=0.15, friction=0.1)
    values, vectors = torch.linalg.eigh(problem.precision)
    exact = vectors @ torch.diag(1 / values / (1 - 0.15 / 60 * values / 3.8)) @ vectors.T
    low, high = stationary(method, problem)
    torch.testing.assert_close(low, exact)
    assert torch.equal(low, high)
    low, high = stationary(replace(method, lr=0.01, batch_size=15), problem)
    assert torch.linalg.eigvalsh(high - low).min() > 0
    assert stationary(replace(method, schedule="decaying"), problem) == (None, None)


def test_quantities_are_in_the_order_of_their_labels():
    problem = correlated(30, 2)
    x, covariance = problem.x[:4].float(), torch.linalg.inv(problem.precision)
    names, values = quantities(3, 4), expected_of(covariance, problem, x)
    assert len(names) == len(values) == 3 + 6 + 4 + 4
    assert values[names.index("mean of weight 2 (posterior sd)")] == 0
    assert values[names.index("variance of weight 3 (posterior variance)")] == pytest.approx(1)
    correlation = covariance[0, 2] / (covariance[0, 0] * covariance[2, 2]).sqrt()
    assert values[names.index("covariance of weights 1 and 3 (posterior sd)")] == pytest.approx(correlation.item())
    assert values[names.index("variance of the prediction at input 1 (posterior variance)")] == pytest.approx(1)


# -- the check ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variant", "method", "level", "ratio"),
    [
        ("mean-field", "nuts", "good", (0.93, 1.07)),
        ("last-layer", "laplace", "good", (0.98, 1.02)),
        ("mean-field", "sghmc", "good", (0.95, 1.05)),
        ("hidden-layer", "svi", "caution", (0.5, 0.9)),
        ("mlp", "map", "caution", (0.0, 1e-6)),
    ],
)
def test_methods_are_what_they_claim(variant, method, level, ratio):
    outcome = SMALL.run(subject(variant, method))
    assert outcome.level in {level, "caution"} - ({"good"} if level == "caution" else set())
    assert not [f for f in outcome.findings if f.level == "bad"], outcome.sentence
    assert ratio[0] <= outcome.figures["closed_form"] <= ratio[1]
    assert outcome.evidence["found"].shape == (len(outcome.evidence["labels"]),)
    assert outcome.to_dict()["findings"]


def test_the_amount_is_the_known_one():
    """Mean field: 1/√Λᵢᵢ instead of √(Λ⁻¹)ᵢᵢ, and coverage follows."""
    outcome = replace(SMALL, effort=1.0).run(subject("mean-field", "svi"))
    problem = SMALL._problem()
    share = problem.mean_field_scale * torch.linalg.inv(problem.precision).diagonal().rsqrt()
    assert outcome.figures["closed_form"] == pytest.approx(share.mean().item(), abs=0.05)
    covered = (2 * norm.cdf(norm.ppf(0.9) * share.numpy()) - 1).mean()
    assert outcome.evidence["weight_coverage"][1] == pytest.approx(covered, abs=0.05)
    assert "of the exact standard deviation" in outcome.sentence
    e = outcome.evidence
    off = plots.standard_errors(e["labels"], e["z"], e["bound"])
    assert off.get_title().startswith("0 of") and len(off.get_legend().get_texts()) == 5
    shown = ("exact_mean", "exact_sd", "found_mean", "found_sd", "levels", "coverage", "weight_coverage")
    left, right = plots.exact_intervals(*(e[name] for name in shown))
    assert left.get_xlabel() == "new input" and len(right.get_lines()) == 3


def test_a_cold_posterior_is_held_to_the_cold_one():
    given = dict(temperature=0.25)
    assert SMALL.run(subject("mean-field", "nuts", **given)).level in ("good", "caution")
    outcome = SMALL.run(subject("last-layer", "laplace", **given))
    assert not [f for f in outcome.findings if f.level == "bad"]


def test_what_cannot_be_reduced_is_refused():
    for variant, method, why in (
        ("dropout-mlp", "mc-dropout", "settings, not inferred"),
        ("convnet", "map", "convolutions"),
        ("variational-dropout", "svi", "improper"),
        ("sparse-dropout", "svi", "improper"),
    ):
        assert why in SMALL.refuses(subject(variant, method))
    assert "in proportion to the mean" in SMALL.refuses(subject("hidden-layer", "svi", {"scale": "layer"}))
    assert SMALL.refuses(subject("dropout-mlp", "map")) == ""


def test_a_wrong_sampler_is_bad(monkeypatch):
    """Draws of the posterior at another noise."""
    own = bp.NUTS.run

    def colder(self, *rest, **settings):
        return own(replace(self, temperature=0.6), *rest, **settings)

    monkeypatch.setattr(bp.NUTS, "run", colder)
    outcome = SMALL.run(subject("mean-field", "nuts"))
    assert outcome.level == "bad" and "not the exact posterior" in outcome.sentence
    assert min(f.p for f in outcome.findings if f.p is not None) < ALPHA


def test_predictions_of_every_way_to_store_draws():
    check = PredictiveCheck(draws=200, effort=0.2)
    for variant, method in (("mean-field", "nuts"), ("last-layer", "laplace"), ("mlp", "map")):
        outcome = check.run(subject(variant, method))
        assert outcome.level == "good", outcome.sentence
        assert outcome.evidence["log_density"].shape == outcome.evidence["exact"].shape == (24,)
    shown = ("log_density", "log_of_mean", "mean_of_log", "exact")
    assert len(plots.mixture_densities(*(outcome.evidence[name] for name in shown)).get_lines()) == 4
    assert CHECKS["predictive"] is PredictiveCheck
