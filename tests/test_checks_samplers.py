"""Samplers by the joint distribution and by the step size's bias; estimators: right ones (see test_planted_faults)."""

import math
import re
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conjugate import correlated, dataset

import bnn_pyro as bp
from bnn_pyro.checks import Subject
from bnn_pyro.checks.check import Estimate
from bnn_pyro.checks.estimators import Estimators, _alike
from bnn_pyro.checks.joint_distribution import JointDistribution
from bnn_pyro.checks.step_size import StepSize, order_of
from bnn_pyro.inference import chees
from bnn_pyro.inference.potential import Potential

SMALL, STEPS = JointDistribution(chains=600, sweeps=4, rows=6), StepSize(chains=200, times=12.0)
LINEAR, NETWORK = dict(hidden=(), noise=0.7, prior="normal:1"), dict(hidden=(2,), activation="tanh", noise=0.7)


def subject(inference, entry=NETWORK, **given):
    return Subject(bp.MeanField(**entry), bp.METHODS[inference], correlated(num=30, inputs=2).data, given)


@pytest.mark.parametrize("inference", ["nuts", "hmc", "chees", "sghmc", "sgld"])
def test_samplers_leave_the_joint_distribution_as_it_is(inference):
    short = {} if inference in ("sghmc", "sgld") else {"warmup": 40}
    outcome = SMALL.run(subject(inference, **short))
    assert outcome.level != "bad" and outcome.figures["joint_p"] > 1e-3, outcome.sentence
    z = [f.z for f in outcome.findings if f.z is not None]
    assert len(z) % 2 == 0 and 0.5 < np.abs(z).mean() < 1.2  # 0.8 of standard Normals


def test_a_sampler_that_never_moves_passes_nothing():
    own_move = chees.Chains.move

    def still(self, potential, *rest):
        held = self.z, self.density, self.gradient
        moved = own_move(self, potential, *rest)
        self.z, self.density, self.gradient = held
        return moved._replace(after=held[0])

    with patch.object(chees.Chains, "move", still):
        outcome = replace(SMALL, chains=2000).run(subject("chees", LINEAR, warmup=40))
    assert outcome.level == "caution" and "off by any amount" in outcome.sentence


def test_order():
    """An exact power law has its power; a bias that is not positive has none."""
    order, error = order_of(Estimate(3 * np.array([0.4, 0.2]) ** 2, np.array([0.01, 0.02])))
    assert order == pytest.approx(2) and error == pytest.approx(math.hypot(0.01 / 0.48, 0.02 / 0.12) / math.log(2))
    assert math.isnan(order_of(Estimate(np.array([0.2, 0.0]), np.ones(2)))[0])


@pytest.mark.parametrize("inference", ["sghmc", "sgld"])
def test_the_bias_is_that_of_the_step_size(inference):
    outcome = STEPS.run(subject(inference, {}))
    assert outcome.level == "good" and "as it should" in outcome.sentence, outcome.sentence
    order, error = map(float, re.search(r"power of (.+) ± (.+), as", outcome.sentence).groups())
    assert order == pytest.approx(1.1, abs=0.1 + 4 * error)  # 1 of small steps; 1.2 of these, along the steepest


@pytest.mark.parametrize(
    ("lr", "level", "words"), [(0.08, "caution", ""), (0.5, "bad", "too large"), (2.0, "bad", "explodes")]
)
def test_the_step_that_was_asked_for(lr, level, words):
    outcome = StepSize(chains=30, times=1.0).run(subject("sghmc", {}, lr=lr))
    assert (outcome.level, outcome.findings[-1].estimate < 0.2) == (level, lr == 0.08) and words in outcome.sentence


def test_too_few_draws_and_too_large_steps():
    few = JointDistribution(chains=60, sweeps=1).run(subject("chees", LINEAR, warmup=30))
    assert few.level == "caution" and "too few draws to tell" in few.sentence
    few = StepSize(chains=20, times=0.5).run(subject("sghmc", {}))
    assert few.level == "caution" and "too few draws" in few.sentence
    large = JointDistribution(chains=1000, sweeps=3).run(subject("sghmc", LINEAR, lr=0.4))
    assert large.level == "bad" and re.search("too large|does not vanish", large.sentence), large.sentence


def test_what_is_refused():
    joint, steps = JointDistribution(), StepSize()
    assert "no transitions" in joint.refuses(subject("svi"))
    assert "temperature 1" in joint.refuses(subject("nuts", temperature=0.5))
    assert "narrow" in joint.refuses(subject("sgld", dict(prior="scale-mixture")))
    assert "no bias of the step size" in steps.refuses(subject("nuts", {}))
    assert joint.refuses(subject("sghmc")) == steps.refuses(subject("sghmc")) == ""


# -- estimators ----------------------------------------------------------------------------------------------------
QUICK = Estimators(rows=24, repeats=25, warm=20)


def labels(classes):
    data = correlated(24, 2)
    y = torch.bucketize(data.y, data.y.quantile(torch.linspace(0, 1, classes + 1)[1:-1].double()))
    return dataset(data.x, y, bp.Schema("classification", (2,), classes=tuple("abc"[:classes])))


DATA = {"regression": correlated(24, 2, y_shift=5.0, y_scale=3.0).data, "three classes": labels(3)}


def estimated(variant, method, task="regression", settings=None, **given):
    small = {} if variant == "last-layer" else {"hidden": (4,)}
    return Subject(bp.ZOO[variant](**{**small, **(settings or {})}), bp.METHODS[method], DATA[task], given)


@pytest.mark.parametrize(
    ("variant", "method", "task", "settings"),
    [
        ("mean-field", "svi", "regression", {}),
        ("mean-field", "svi", "three classes", {"prior": "scale-mixture:1,0.1,0.5"}),
        ("variational-dropout", "svi", "regression", {}),
        ("last-layer", "svi", "regression", {"family": "full", "backbone": "mlp"}),
        ("mlp", "map", "three classes", {}),
        ("dropout-mlp", "mc-dropout", "regression", {}),
        ("mean-field", "nuts", "regression", {"activation": "tanh"}),
        ("mean-field", "sghmc", "three classes", {"prior": "gamma:2,1"}),
    ],
)
def test_right_ones_pass(variant, method, task, settings):
    outcome = QUICK.run(estimated(variant, method, task, settings))
    assert outcome.level == "good", [f for f in outcome.findings if f.level != "good"]


def test_a_point_estimate_is_held_to_the_log_joint_unless_masks_fall():
    for variant in ("mlp", "dropout-mlp"):
        abouts = [f.about for f in QUICK.run(estimated(variant, "map")).findings]
        assert any("log p(y, w)" in about for about in abouts) == (variant == "mlp")
    assert "all rows at once" in QUICK.refuses(estimated("last-layer", "laplace"))


def test_a_wrong_gradient_is_seen(monkeypatch):
    """By up to a tenth; and a reference that is no number is no pass."""
    own = Potential._gradient

    def wrong(self, z, *rest):
        density, gradient = own(self, z, *rest)
        return density, gradient * torch.linspace(1, 1.1, gradient.shape[1], dtype=gradient.dtype)

    monkeypatch.setattr(Potential, "_gradient", wrong)
    outcome = QUICK.run(estimated("mean-field", "nuts"))
    assert outcome.level == "bad" and "finite differences" in outcome.sentence
    assert _alike(["a"], np.ones((5, 1)), np.full((5, 1), np.nan), 0.1)[0].level == "bad"
