"""Problems whose posterior is known: the answers themselves, that every claim holds, and that wrong ones do not."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conjugate import LinearGaussian, correlated
from scipy.stats import norm
from torch.distributions import MultivariateNormal

import bnn_pyro as bp
from bnn_pyro.checks import Subject
from bnn_pyro.checks.check import Estimate, judge
from bnn_pyro.checks.integration import best_normal, climb, curvature, grid, hermite, importance, normal, stationary
from bnn_pyro.checks.known_answers import ClosedForm, Logistic, Quadrature
from bnn_pyro.checks.predictive import PredictiveCheck
from bnn_pyro.checks.problems import linear_regression


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
    density, zero, standard = lambda w: target.log_prob(w) - 3.0, torch.zeros(2).double(), hermite(2, 5)
    mode = climb(density, zero)
    torch.testing.assert_close(mode, target.mean)
    torch.testing.assert_close(curvature(density, target.mean), target.precision_matrix)
    boxed = grid(density, 8.0)
    for nodes in (boxed, normal(target.mean, target.covariance_matrix, standard), importance(density, mode)):
        exact = 1e-3 if len(nodes.w) == 2**15 else 1e-9
        torch.testing.assert_close(nodes.expect(nodes.w), target.mean, rtol=exact, atol=exact)
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


@pytest.mark.parametrize(
    ("check", "variant", "method", "settings", "levels", "ratio"),
    [
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
    ],
)
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
