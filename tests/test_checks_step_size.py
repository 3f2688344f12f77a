"""The order of the step-size bias: that of the recursion; other updates' is not, see ``test_planted_faults``."""

import math
import re

import numpy as np
import pytest
from conjugate import correlated

import bnn_pyro as bp
from bnn_pyro.checks import Subject
from bnn_pyro.checks.check import Estimate
from bnn_pyro.checks.step_size import StepSize, order_of

SMALL = StepSize(chains=200, times=12.0)


def subject(inference, **given):
    return Subject("mean-field", bp.MeanField(), inference, correlated(num=20, inputs=2).data, given)


def test_order():
    """An exact power law has its power; a bias that is not positive has none."""
    order, error = order_of(Estimate(3 * np.array([0.4, 0.2]) ** 2, np.array([0.01, 0.02])))
    assert order == pytest.approx(2) and error == pytest.approx(math.hypot(0.01 / 0.48, 0.02 / 0.12) / math.log(2))
    assert math.isnan(order_of(Estimate(np.array([0.2, 0.0]), np.ones(2)))[0])


@pytest.mark.parametrize("inference", ["sghmc", "sgld"])
def test_the_bias_is_that_of_the_step_size(inference):
    lines = []
    outcome = SMALL.run(subject(inference), report=lambda *line: lines.append(line[:2]))
    assert outcome.level == "good" and "as it should" in outcome.sentence, outcome.sentence
    assert lines == [(1, 2), (2, 2)]
    order, error = map(float, re.search(r"power of (.+) ± (.+), as", outcome.sentence).groups())
    assert order == pytest.approx(1.1, abs=0.1 + 4 * error)  # 1 of small steps; 1.2 of these, along the steepest


def test_the_step_that_was_asked_for():
    """Judged by the recursion: small, known for its bias, too large, unstable."""
    tiny = StepSize(chains=30, times=1.0)
    levels = {lr: tiny.run(subject("sghmc", lr=lr)) for lr in (0.08, 0.5, 2.0)}
    assert [outcome.findings[-1].estimate < 0.2 for outcome in levels.values()] == [True, False, False]
    assert levels[0.08].level == "caution"
    assert levels[0.5].level == levels[2.0].level == "bad"
    assert "too large" in levels[0.5].sentence and "explodes" in levels[2.0].sentence


def test_few_draws_are_told():
    outcome = StepSize(chains=20, times=0.5).run(subject("sghmc"))
    assert outcome.level == "caution" and "too few draws" in outcome.sentence


def test_other_methods_are_refused():
    assert "no bias of the step size" in StepSize().refuses(subject("nuts"))
    assert not StepSize().refuses(subject("sgld"))
