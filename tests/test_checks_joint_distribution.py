"""The joint distribution test: right samplers pass it; that wrong ones do not, see ``test_planted_faults``."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conjugate import correlated

import bnn_pyro as bp
from bnn_pyro.checks import Subject
from bnn_pyro.checks.joint_chains import normal_scores
from bnn_pyro.checks.joint_distribution import JointDistribution
from bnn_pyro.inference import chees

SMALL = JointDistribution(chains=600, sweeps=4, rows=6)
LINEAR, NETWORK = dict(hidden=(), noise=0.7, prior="normal:1"), dict(hidden=(2,), activation="tanh", noise=0.7)


def subject(inference, entry=NETWORK, classes=(), **given):
    data = correlated(num=30, inputs=2).data
    if classes:
        schema = bp.Schema("classification", (2,), classes=classes)
        y = torch.arange(30) % len(classes)
        data = bp.Dataset("by-hand", schema, data.x_train, y, data.x_val, y[:0], data.x_test, y[:0])
    return Subject("mean-field", bp.MeanField(**entry), inference, data, given)


def short(inference):
    return dict(warmup=40) if inference in ("nuts", "hmc", "chees") else {}


@pytest.mark.parametrize("inference", ["nuts", "hmc", "chees", "sghmc", "sgld"])
def test_samplers_leave_the_joint_distribution_as_it_is(inference):
    """No false alarm, and z-scores that are as large as chance makes them."""
    lines = []
    outcome = SMALL.run(subject(inference, **short(inference)), report=lambda *line: lines.append(line))
    assert outcome.level != "bad", outcome.sentence
    assert lines[-1][:2] == (4, 4)
    z = [f.z for f in outcome.findings if f.z is not None]
    assert len(z) % 2 == 0 and 0.5 < np.abs(z).mean() < 1.2  # 0.8 of standard Normals
    assert outcome.figures["joint_p"] > 1e-3


def test_compiled_code_and_classes():
    """NUTS in compiled code, whose targets are exchanged; three classes, whose prediction is a share."""
    case = subject("nuts", dict(hidden=(2,)), tuple("abc"), warmup=40, compiled="yes")
    outcome = JointDistribution(chains=300, sweeps=2).run(case)
    assert outcome.level != "bad" and outcome.figures["joint_p"] > 1e-3, outcome.sentence


def test_a_sampler_that_never_moves_passes_nothing():
    """It leaves every distribution as it is, and tells nothing."""
    own_move = chees.Chains.move

    def still(self, potential, *rest):
        held = self.z, self.density, self.gradient
        moved = own_move(self, potential, *rest)
        self.z, self.density, self.gradient = held
        return moved._replace(after=held[0])

    with patch.object(chees.Chains, "move", still):
        outcome = replace(SMALL, chains=2000).run(subject("chees", LINEAR, **short("chees")))
    assert outcome.level == "caution" and "off by any amount" in outcome.sentence


def test_too_few_draws_are_told():
    outcome = JointDistribution(chains=60, sweeps=1).run(subject("chees", LINEAR, warmup=30))
    assert outcome.level == "caution" and "too few draws to tell" in outcome.sentence


def test_too_large_a_step_is_bad():
    for lr, words in ((0.4, "too large|does not vanish"), (30.0, "diverge")):
        outcome = JointDistribution(chains=1000, sweeps=3).run(subject("sghmc", LINEAR, lr=lr))
        assert outcome.level == "bad"
        assert any(word in outcome.sentence for word in words.split("|")), outcome.sentence


def test_what_is_refused():
    check = JointDistribution()
    assert "no transitions" in check.refuses(subject("svi"))
    assert "temperature 1" in check.refuses(subject("nuts", temperature=0.5))
    assert "narrow" in check.refuses(subject("sgld", dict(prior="scale-mixture")))
    assert not check.refuses(subject("nuts", dict(prior="scale-mixture")))


def test_normal_scores():
    """By ranks: any increasing function of a standard Normal becomes it; ties share a rank."""
    rng = np.random.default_rng(0)
    sample, new = np.sort(rng.standard_normal((20_000, 1)), 0), rng.standard_normal((50, 1))
    np.testing.assert_allclose(normal_scores(np.exp(3 * sample), np.exp(3 * new)), new, atol=0.15)
    assert normal_scores(np.ones((10, 1)), np.ones((3, 1))).ravel().tolist() == [0.0] * 3
