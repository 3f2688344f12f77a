"""The order of the step-size bias: that of the recursion; other updates' is not, see ``test_planted_faults``."""

import math

import numpy as np
import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.checks import Subject
from bnn_pyro.checks.linear_regression import correlated, stationary_covariance
from bnn_pyro.checks.step_size import StepSize, order_of, shares

SMALL = StepSize(chains=300, times=15.0)


def subject(inference, **given):
    return Subject("mean-field", bp.MeanField(), inference, correlated(num=20, inputs=2).data, given)


@pytest.mark.parametrize("friction", [0.05, 1.0])
def test_the_recursion_and_its_closed_form(friction):
    """Of semi-implicit SGHMC: 1 / (λ (1 − ηλ/(4 − 2α))) in the directions of the precision."""
    precision = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    values, vectors = torch.linalg.eigh(precision)
    for eta in (1e-4, 0.3):
        factor = 1 / (1 - eta * values / (4 - 2 * friction))
        expected = vectors @ torch.diag(factor / values) @ vectors.T
        torch.testing.assert_close(stationary_covariance(precision, eta, friction), expected)
    problem = correlated(num=10, inputs=2)
    largest = torch.linalg.eigvalsh(problem.precision)[-1].item()
    assert shares(bp.SGHMC(friction=friction), problem, 10 * (4 - 2 * friction) / largest).max() == pytest.approx(1)


def test_order():
    """An exact power law has its power, whatever the weights; a bias that is not positive has none."""
    x = np.array([0.4, 0.2, 0.1])
    order, error = order_of(x, 3 * x**2, np.array([0.01, 0.02, 0.001]))
    assert order == pytest.approx(2) and 0 < error < 1
    assert math.isnan(order_of(x, x - 0.2, x)[0])


@pytest.mark.parametrize("inference", ["sghmc", "sgld"])
def test_the_bias_is_that_of_the_step_size(inference):
    lines = []
    outcome = SMALL.run(subject(inference), report=lambda *line: lines.append(line[:2]))
    assert outcome.level == "good" and "as it should" in outcome.sentence, outcome.sentence
    assert lines == [(1, 3), (2, 3), (3, 3)]
    evidence = outcome.evidence
    assert evidence["order"] == pytest.approx(evidence["expected_order"], abs=4 * evidence["order_error"])
    assert 1 < evidence["expected_order"] < 1.3 and (np.abs(evidence["bias"] / evidence["error"]) > 2).all()


def test_the_step_that_was_asked_for():
    """Judged by the recursion: small, known for its bias, too large, unstable."""
    tiny = StepSize(chains=100, times=2.0)
    levels = {lr: tiny.run(subject("sghmc", lr=lr)) for lr in (0.08, 0.5, 2.0)}
    assert [outcome.evidence["own_bias"] < 0.2 for outcome in levels.values()] == [True, False, False]
    assert levels[0.08].level == "caution"
    assert levels[0.5].level == levels[2.0].level == "bad"
    assert "too large" in levels[0.5].sentence and "explodes" in levels[2.0].sentence


def test_few_draws_are_told():
    outcome = StepSize(chains=20, times=1.0).run(subject("sghmc"))
    assert outcome.level == "caution" and "too few draws" in outcome.sentence


def test_other_methods_are_refused():
    assert "no bias of the step size" in StepSize().refuses(subject("nuts"))
    assert not StepSize().refuses(subject("sgld"))
