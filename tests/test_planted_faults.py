"""Mistakes that people make in Bayesian networks, each a small patch of the package: a check calls every one bad.

That the same checks call nothing bad where nothing is wrong is tested beside each of them.
"""

from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from conjugate import correlated
from test_checks_known_answers import LINEAR

import bnn_pyro as bp
from bnn_pyro.checks import Subject
from bnn_pyro.checks.estimators import Estimators
from bnn_pyro.checks.joint_distribution import JointDistribution
from bnn_pyro.checks.predictive import PredictiveCheck
from bnn_pyro.checks.step_size import StepSize
from bnn_pyro.inference import chees, hmc, linear, log_joint, sghmc
from bnn_pyro.inference.log_joint import Rescale
from bnn_pyro.parts import guides, weights
from bnn_pyro.parts.mixtures import ClassMixture, Mixture

PREDICTIVE = PredictiveCheck(draws=200, effort=0.2)
ESTIMATORS = Estimators(rows=24, repeats=25, warm=20)
EXACT = replace(LINEAR, fits=8, effort=0.5)
JOINT = JointDistribution(chains=600, sweeps=4, rows=6)
STEPS = StepSize(chains=100, times=6.0)

own_nuts, move = hmc.nuts, chees.Chains.move
kl, log_joints, FlatNormals = log_joint._kl, log_joint.log_joints, guides.FlatNormals
log_prob, step, pull = weights.CentredNormal.log_prob, sghmc.step, linear.prior_pull


def rescale_neither(likelihood=1.0, latent=1.0):
    return Rescale(1.0, latent)


def rescale_both(likelihood=1.0, latent=1.0):
    """Latent sites are scaled with the likelihood: with it, all of the KL in each of the N/B batches of an epoch."""
    return Rescale(likelihood, latent * likelihood)


def unscaled(model, w, x, y, likelihood=1.0):
    return log_joints(model, w, x, y, 1.0)


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


def wide(self, value):
    """A prior of twice the width, but for a constant; its draws are as they were."""
    return 0.25 * log_prob(self, value)


def noisier(share):
    def noisy(w, v, gradient, eta, friction):
        mean = (1 - friction) * v + eta * gradient
        new = mean + share * (step(w, v, gradient, eta, friction)[1] - mean)
        return w + new, new

    return noisy


def old_momentum(w, v, *rest):
    return w + v, step(w, v, *rest)[1]


WIDE = [(weights.CentredNormal, "log_prob", wide), (linear, "prior_pull", lambda p, w: 0.25 * pull(p, w))]
WARM = [(sghmc, "step", noisier(1.1))]
OLD = [(sghmc, "step", old_momentum)]
PER_BATCH = [(log_joint, "Rescale", rescale_both), (log_joint, "_kl", lambda q, p: p["scale"] * kl(q, p))]
UNSCALED = [(linear, "log_joints", unscaled), (log_joint, "log_joints", unscaled)]
GEOMETRIC = property(lambda self: self.probs.log().mean(0).exp())
AVERAGED = [(ClassMixture, "mean", GEOMETRIC), (Mixture, "log_prob", log_of_draws)]
#: Name -> method that has the fault, the check that catches it, patches of the package.
FAULTS = {
    "wrong KL sign": ("svi", ESTIMATORS, [(log_joint, "_kl", lambda q, p: -kl(q, p))]),
    "KL counted twice": ("svi", EXACT, [(log_joint, "_kl", lambda q, p: 2 * kl(q, p))]),
    "KL counted once per batch": ("svi", ESTIMATORS, PER_BATCH),
    "likelihood not rescaled": ("svi", ESTIMATORS, [(log_joint, "Rescale", rescale_neither)]),
    "likelihood not rescaled, SGHMC": ("sghmc", ESTIMATORS, UNSCALED),
    "averaged log-probabilities": ("svi", PREDICTIVE, AVERAGED),
    "a guide that ignores a weight": ("svi", EXACT, [(guides, "FlatNormals", first_weight_stays)]),
    "NUTS without acceptance": ("nuts", JOINT, [(hmc, "nuts", newest_always)]),
    "ChEES without acceptance": ("chees", JOINT, [(chees.Chains, "move", all_move)]),
    "another prior, ChEES": ("chees", JOINT, WIDE),
    "another prior, SGHMC": ("sghmc", JOINT, WIDE),
    "a tenth more noise, SGHMC": ("sghmc", STEPS, WARM),
    "positions move with the old momentum, SGHMC": ("sghmc", STEPS, OLD),
}


def run(method, check):
    network = {"hidden": (3,), "activation": "tanh", "noise": 0.7}
    linear = {"hidden": (), "noise": 0.7, "prior": "normal:1"}
    short = {} if check is not JOINT else {"lr": 0.01} if method.startswith("sg") else {"warmup": 40}
    entry = bp.MeanField(**(linear if check is JOINT else network))
    return check.run(Subject(entry, bp.METHODS[method], correlated(24, 2).data, short))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name):
    method, check, patches = FAULTS[name]
    with ExitStack() as stack:
        for target in patches:
            stack.enter_context(patch.object(*target))
        outcome = run(method, check)
    assert outcome.level == "bad", f"{name} passed: {outcome.sentence}"
