"""Samplers by the joint distribution and the bias of their steps; estimators; planted faults, which are caught."""

import math
import re
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conjugate import correlated, dataset
from test_checks_known_answers import LINEAR as CLOSED_FORM

import bnn_pyro as bp
from bnn_pyro.checks import Subject
from bnn_pyro.checks.check import Estimate
from bnn_pyro.checks.estimators import Estimators, _alike
from bnn_pyro.checks.joint_distribution import JointDistribution
from bnn_pyro.checks.predictive import PredictiveCheck
from bnn_pyro.checks.step_size import StepSize, order_of
from bnn_pyro.inference import chees, hmc, log_joint, sghmc
from bnn_pyro.inference.log_joint import Rescale
from bnn_pyro.inference.potential import Potential
from bnn_pyro.parts import guides, weights
from bnn_pyro.parts.mixtures import ClassMixture, Mixture

SMALL, STEPS = JointDistribution(chains=600, sweeps=4, rows=6), StepSize(chains=200, times=12.0)
LINEAR, NETWORK = dict(hidden=(), noise=0.7, prior="normal:1"), dict(hidden=(2,), activation="tanh", noise=0.7)


def subject(inference, entry=NETWORK, **given):
    return Subject(bp.MeanField(**entry), bp.METHODS[inference], correlated(num=30, inputs=2).data, given)


@pytest.mark.parametrize("inference", ["nuts", "hmc", "chees", "sghmc", "sgld"])
def test_samplers_leave_the_joint_distribution_as_it_is(inference):
    outcome = SMALL.run(subject(inference, **({} if inference in ("sghmc", "sgld") else {"warmup": 40})))
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
    assert outcome.level == "caution" and outcome.findings[-1].estimate > 2


@pytest.mark.parametrize("inference", ["sghmc", "sgld"])
def test_the_order_of_the_bias_is_that_of_the_step_size(inference):
    """An exact power law has its power; a bias that is not positive has none."""
    order, error = order_of(Estimate(3 * np.array([0.4, 0.2]) ** 2, np.array([0.01, 0.02])))
    assert order == pytest.approx(2) and error == pytest.approx(math.hypot(0.01 / 0.48, 0.02 / 0.12) / math.log(2))
    assert math.isnan(order_of(Estimate(np.array([0.2, 0.0]), np.ones(2)))[0])
    outcome = STEPS.run(subject(inference, {}))
    assert outcome.level == "good", outcome.sentence
    order, error = map(float, re.search(r"power of (.+) ± ([\d.]+), and", outcome.sentence).groups())
    assert order == pytest.approx(1.1, abs=0.1 + 4 * error)  # 1 of small steps; 1.2 of these, along the steepest


@pytest.mark.parametrize(
    ("lr", "level", "words"), [(0.08, "caution", ""), (0.5, "bad", "too large"), (2.0, "bad", ": inf")]
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
    assert large.level == "bad" and "at lr 0.4 do not leave" in large.sentence, large.sentence


def test_what_is_refused():
    joint, steps = JointDistribution(), StepSize()
    assert "no transitions" in joint.refuses(subject("svi"))
    assert "temperature 1" in joint.refuses(subject("nuts", temperature=0.5))
    assert "narrow" in joint.refuses(subject("sgld", dict(prior="scale-mixture")))
    assert "no known bias of the step size" in steps.refuses(subject("nuts", {}))
    assert joint.refuses(subject("sghmc")) == steps.refuses(subject("sghmc")) == ""


# -- estimators ----------------------------------------------------------------------------------------------------
QUICK = Estimators(rows=24, repeats=25, warm=20)


LINE = correlated(24, 2)
THIRDS = torch.bucketize(LINE.y, LINE.y.quantile(torch.tensor([1 / 3, 2 / 3]).double()))
DATA = {
    "regression": correlated(24, 2, y_shift=5.0, y_scale=3.0).data,
    "three classes": dataset(LINE.x, THIRDS, bp.Schema("classification", (2,), classes=("a", "b", "c"))),
}


def estimated(variant, method, task="regression", settings=None):
    small = {} if variant == "last-layer" else {"hidden": (4,)}
    return Subject(bp.ZOO[variant](**{**small, **(settings or {})}), bp.METHODS[method], DATA[task])


@pytest.mark.parametrize(("variant", "method", "task", "settings"), [
    ("mean-field", "svi", "regression", {}),
    ("mean-field", "svi", "three classes", {"prior": "scale-mixture:1,0.1,0.5"}),
    ("variational-dropout", "svi", "regression", {}),
    ("last-layer", "svi", "regression", {"family": "full", "backbone": "mlp"}),
    ("mlp", "map", "three classes", {}),
    ("dropout-mlp", "mc-dropout", "regression", {}),
    ("mean-field", "nuts", "regression", {"activation": "tanh"}),
    ("mean-field", "sghmc", "three classes", {"prior": "gamma:2,1"}),
])  # fmt: skip
def test_right_ones_pass(variant, method, task, settings):
    outcome = QUICK.run(estimated(variant, method, task, settings))
    assert outcome.level == "good", [f for f in outcome.findings if f.level != "good"]


def test_a_point_estimate_is_held_to_the_log_joint_unless_masks_fall_and_no_number_is_no_pass():
    for variant in ("mlp", "dropout-mlp"):
        abouts = [f.about for f in QUICK.run(estimated(variant, "map")).findings]
        assert any("log p(y, w)" in about for about in abouts) == (variant == "mlp")
    assert "all rows at once" in QUICK.refuses(estimated("last-layer", "laplace"))
    assert _alike(["a"], np.ones((5, 1)), np.full((5, 1), np.nan), 0.1)[0].level == "bad"


# -- mistakes that people make, each a small patch of the package: a check calls every one bad -------------------------
PREDICTIVE = PredictiveCheck(draws=200, effort=0.2)
EXACT = replace(CLOSED_FORM, fits=8, effort=0.5)
FEW_STEPS = StepSize(chains=100, times=6.0)

own_nuts, move, gradient_of = hmc.nuts, chees.Chains.move, Potential._gradient
kl, log_joints, FlatNormals = log_joint.joint_kl, log_joint.log_joints, guides.FlatNormals
one_kl, objective = log_joint._kl, log_joint.Objective.forward
log_prob, step = weights.CentredNormal.log_prob, sghmc.step


def log_of_draws(self, y):
    y = y.float() if self.task == "regression" or self.probs.shape[-1] == 2 else y
    return self.components.log_prob(y).mean(0)


def first_weight_stays(loc, *rest):
    return FlatNormals(torch.cat([loc[:1].detach(), loc[1:]]), *rest)


def newest_always(rng, start, dynamics, step, max_depth):
    """NUTS that takes the proposal of every new half of the tree, whatever its weight."""
    certain = copy(dynamics)
    certain.subtree = lambda rng, depth, *rest: dynamics.subtree(rng, depth, *rest)._replace(weight=1e6 * (depth + 1))
    return own_nuts(rng, start, certain, step, max_depth)


def all_move(self, potential, *rest):
    moved = move(self, potential, *rest)
    self.z = moved.end
    self.density, self.gradient = potential(moved.end)
    return moved


def stretched(self, z, *rest):
    density, gradient = gradient_of(self, z, *rest)
    return density, gradient * torch.linspace(1, 1.1, gradient.shape[1], dtype=gradient.dtype)


def noisier(w, v, gradient, eta, friction):
    mean = (1 - friction) * v + eta * gradient
    new = mean + 1.1 * (step(w, v, gradient, eta, friction)[1] - mean)
    return w + new, new


#: A prior of twice the width, but for a constant; its draws are as they were.
WIDE = [(weights.CentredNormal, "log_prob", lambda self, value: 0.25 * log_prob(self, value))]
#: The KL is scaled with the likelihood: all of it in each of the N/B batches of an epoch.
PER_BATCH = [(log_joint.Objective, "forward", lambda self, x, y, a, b: objective(self, x, y, a, a * b))]
NEITHER = [(log_joint, "Rescale", lambda likelihood=1.0, latent=1.0: Rescale(1.0, latent))]
UNSCALED = [(m, "log_joints", lambda model, w, x, y, *_: log_joints(model, w, x, y)) for m in (log_joint,)]
OLD = [(sghmc, "step", lambda w, v, *rest: (w + v, step(w, v, *rest)[1]))]
GEOMETRIC = property(lambda self: self.probs.log().mean(0).exp())
AVERAGED = [(ClassMixture, "mean", GEOMETRIC), (Mixture, "log_prob", log_of_draws)]
#: Name -> method that has the fault, the check that catches it, patches of the package.
FAULTS = {
    "wrong KL sign": ("svi", QUICK, [(log_joint, "joint_kl", lambda arrays: -kl(arrays))]),
    "a constant beside the KL": ("svi", CLOSED_FORM, [(log_joint, "_kl", lambda q, p: one_kl(q, p) + 2.0)]),
    "KL counted twice": ("svi", EXACT, [(log_joint, "joint_kl", lambda arrays: 2 * kl(arrays))]),
    "KL counted once per batch": ("svi", QUICK, PER_BATCH),
    "likelihood not rescaled": ("svi", QUICK, NEITHER),
    "likelihood not rescaled, SGHMC": ("sghmc", QUICK, UNSCALED),
    "averaged log-probabilities": ("svi", PREDICTIVE, AVERAGED),
    "a guide that ignores a weight": ("svi", EXACT, [(guides, "FlatNormals", first_weight_stays)]),
    "a wrong gradient, NUTS": ("nuts", QUICK, [(Potential, "_gradient", stretched)]),
    "NUTS without acceptance": ("nuts", SMALL, [(hmc, "nuts", newest_always)]),
    "ChEES without acceptance": ("chees", SMALL, [(chees.Chains, "move", all_move)]),
    "another prior, ChEES": ("chees", SMALL, WIDE),
    "another prior, SGHMC": ("sghmc", SMALL, WIDE),
    "a tenth more noise, SGHMC": ("sghmc", FEW_STEPS, [(sghmc, "step", noisier)]),
    "positions move with the old momentum, SGHMC": ("sghmc", FEW_STEPS, OLD),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name):
    method, check, patches = FAULTS[name]
    with ExitStack() as stack:
        for target in patches:
            stack.enter_context(patch.object(*target))
        short = {} if check is not SMALL else {"lr": 0.01} if method.startswith("sg") else {"warmup": 40}
        outcome = check.run(subject(method, LINEAR if check is SMALL else NETWORK, **short))
    assert outcome.level == "bad", f"{name} passed: {outcome.sentence}"
