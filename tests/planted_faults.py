"""Mistakes that people make in Bayesian networks, each a small patch of the package: the bench must catch them all."""

from contextlib import contextmanager

import pytest
import torch

from bnn_pyro.inference import elbo, kernel, linear, log_joint, many_chains, optimise, sghmc
from bnn_pyro.inference import trajectories as hamiltonian
from bnn_pyro.inference.log_joint import Rescale
from bnn_pyro.parts import guides
from bnn_pyro.predictive import Prediction

_nuts, _move = hamiltonian.nuts, many_chains.Chains.move
_kl, _log_joints, _cut, _mean = elbo._kl, log_joint.log_joints, guides._Flat._cut, Prediction.mean.fget


@contextmanager
def _patched(*patches):
    with pytest.MonkeyPatch.context() as patch:
        for target, name, value in patches:
            patch.setattr(target, name, value)
        yield


class _Unscaled(Rescale):
    """The likelihood of B rows stands for B rows, not for N."""

    def __init__(self, likelihood=1.0, latent=1.0):
        super().__init__(1.0, latent)


class _PerBatch(Rescale):
    """Latent sites are scaled with the likelihood."""

    def __init__(self, likelihood=1.0, latent=1.0):
        super().__init__(likelihood, latent * likelihood)


def wrong_kl_sign():
    """The KL is maximised."""
    return _patched((elbo, "_kl", lambda q, p: -_kl(q, p)))


def kl_twice():
    """Once in the guide, once in the model."""
    return _patched((elbo, "_kl", lambda q, p: 2 * _kl(q, p)))


def kl_per_batch():
    """All of the KL in each of the N/B batches of an epoch, whose likelihoods are scaled as well."""
    return _patched((optimise, "Rescale", _PerBatch), (elbo, "_kl", lambda q, p: p["scale"] * _kl(q, p)))


def likelihood_not_rescaled():
    """Of a mini-batch, in the ELBO."""
    return _patched((optimise, "Rescale", _Unscaled))


def likelihood_not_rescaled_in_sghmc():
    """Of a mini-batch, in the log joint that stochastic gradients are of."""

    def unscaled(model, w, x, y, likelihood=1.0, precision=None):
        return _log_joints(model, w, x, y, 1.0, precision)

    return _patched((linear, "log_joints", unscaled), (log_joint, "log_joints", unscaled))


def averaged_log_probabilities():
    """Over the draws, in place of probabilities: predictions that are too sure, or do not sum to 1."""

    def mean(self):
        probs = self.probs.log().mean(0).exp() if self.task == "classification" else None
        return _mean(self) if probs is None else probs

    def log_prob(self, y):
        y = y.float() if self.task == "regression" or self.probs.shape[-1] == 2 else y
        return self.components.log_prob(y).mean(0)

    return _patched((Prediction, "mean", property(mean)), (Prediction, "log_prob", log_prob))


def a_guide_that_ignores_a_weight():
    """The first weight of q stays where it starts, as one that the optimiser never heard of."""

    def cut(self, flat):
        return _cut(self, torch.cat([flat[:1].detach(), flat[1:]]))

    return _patched((guides._Flat, "_cut", cut))


def too_large_an_sghmc_step():
    """η is the step on the mean over the rows, not divided by how many there are."""
    return _patched((sghmc.Chains, "_eta", lambda run, k: run.settings.eta_share * run.settings.lr))


def nuts_without_acceptance():
    """The proposal of every new half of the tree is taken, whatever its weight."""

    def nuts(rng, start, subtree, step, max_depth):
        def certain(rng, depth, end, step, energy):
            return subtree(rng, depth, end, step, energy)._replace(weight=1e6 * (depth + 1))

        return _nuts(rng, start, certain, step, max_depth)

    return _patched((kernel, "nuts", nuts))


def chees_without_acceptance():
    """Every trajectory's end is where the chain goes on."""

    def move(chains, potential, *rest):
        moved = _move(chains, potential, *rest)
        chains.z = moved.end
        chains.density, chains.gradient = potential(moved.end)
        return moved

    return _patched((many_chains.Chains, "move", move))


#: Name -> a context manager within which the package has the fault.
FAULTS = {
    "wrong KL sign": wrong_kl_sign,
    "KL counted twice": kl_twice,
    "KL counted once per batch": kl_per_batch,
    "likelihood not rescaled": likelihood_not_rescaled,
    "likelihood not rescaled, SGHMC": likelihood_not_rescaled_in_sghmc,
    "averaged log-probabilities": averaged_log_probabilities,
    "a guide that ignores a weight": a_guide_that_ignores_a_weight,
    "too large an SGHMC step": too_large_an_sghmc_step,
    "NUTS without acceptance": nuts_without_acceptance,
    "ChEES without acceptance": chees_without_acceptance,
}

#: Name -> (variant, method) that has it; mean-field weights by SVI where none is told.
SUFFERS = {
    "likelihood not rescaled, SGHMC": ("mean-field", "sghmc"),
    "too large an SGHMC step": ("mean-field", "sghmc"),
    "NUTS without acceptance": ("mean-field", "nuts"),
    "ChEES without acceptance": ("mean-field", "chees"),
}

#: Name -> the checks of samplers that catch it, where those of a few seconds do not, or do not get to their end.
CAUGHT_BY = {
    "too large an SGHMC step": ("step-size",),
    "NUTS without acceptance": ("joint-distribution",),
    "ChEES without acceptance": ("joint-distribution",),
}
