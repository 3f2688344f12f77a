"""What tests of Markov chains share: z-tests by Monte-Carlo standard errors with Bonferroni's correction; stopping."""

import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from scipy.stats import norm, t

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.checks.check import Estimate


def fit(entry, data, method, **settings):
    return bp.fit(entry, data, method, **{"progress": False, "device": "cpu", **settings})


def run_method(entry, data, method, seed=0, **settings):
    """``method.run`` as ``fit`` calls it."""
    with bp.isolated(seed):
        return method.run(entry.model(data.schema), None, data, seed=seed, **settings)


def weights(posterior):
    """(C, D, P) float64, in the order of the model's sites."""
    sites = map(posterior.chains.get, posterior.model.initial)
    return torch.cat([v.double().reshape(*v.shape[:2], -1) for v in sites], -1)


def tensors(posterior):
    """{name: tensor}: the draws with their stats, or the parameters of the guide."""
    return dict(posterior.guide.state_dict()) if posterior.chains is None else {**posterior.chains, **posterior.stats}


def same(a, b):
    """Whether two posteriors have the very same draws and stats, or guides, and traces."""
    return all(torch.equal(tensors(a)[name], value) for name, value in tensors(b).items()) and a.trace == b.trace


def check(values, exact, alpha=1e-4):
    """Means of (C, D, M) series agree with ``exact`` (M,) within their own Monte-Carlo error."""
    return check_same_parameters(values, None, alpha, Estimate(np.asarray(exact), np.zeros(len(exact))))


def check_same_parameters(values, others, alpha=1e-4, other=None):
    """Means of two sets of series (C, D, M) agree within the Monte-Carlo error of both."""
    one, other = Estimate.of_chains(values), other or Estimate.of_chains(others)
    z = np.abs(one.mean - other.mean) / np.hypot(one.error, other.error)
    assert z.max() < norm.isf(alpha / (2 * len(z))), f"series {z.argmax()} is off by {z.max():.1f} standard errors"
    return one.error


def check_by_chain(means, exact, alpha=1e-4):
    """Means of many independent chains, (C, M), agree with ``exact`` (M,): t-tests, however correlated draws are."""
    one = Estimate.of_independent(means)
    worst = (np.abs(one.mean - np.asarray(exact)) / one.error).max()
    assert worst < t.isf(alpha / (2 * len(one.error)), one.freedom), f"off by {worst:.1f} standard errors"
    return one.error


def moments(draws, mean, covariance):
    """(M first and second moments of draws (C, D, P) as series (C, D, M), what they are for this Normal (M,))."""
    scale = covariance.diagonal().sqrt()
    unit = (draws - mean) / scale
    upper = torch.triu_indices(len(scale), len(scale))
    products = torch.einsum("cdi,cdj->cdij", unit, unit)[..., upper[0], upper[1]]
    correlation = (covariance / torch.outer(scale, scale))[upper[0], upper[1]]
    return torch.cat([unit, products], -1).numpy(), torch.cat([torch.zeros_like(scale), correlation]).numpy()


def check_gaussian(problem, posterior):
    """Means, and every entry of the covariance, in posterior standard deviations."""
    error = check(*moments(weights(posterior), problem.mean, torch.linalg.inv(problem.precision)))
    assert error.max() < 0.15, "too noisy to tell"


def stop_at(step, number=signal.SIGINT, when=lambda: True):
    """A ``Checkpoint.due`` at which a signal comes, Ctrl-C if no other, at that step."""
    looks = iter(range(1, 10_000))

    def due(self):
        if next(looks) == step and when():
            signal.raise_signal(number)
        return self.stop

    return property(due)


@contextmanager
def interrupted(step, number=signal.SIGINT, words=None, **how):
    """A block that such a signal interrupts at that step."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted, match=words):
        patch.setattr(Checkpoint, "due", stop_at(step, number, **how))
        yield


def goes_on(whole, steps, fit, *of, **settings):
    """Whether a fit that is interrupted at these steps, one after the other, ends in the same posterior."""
    for step in steps:
        with interrupted(step):
            fit(*of, resume=True, **settings)
    return same(fit(*of, resume=True, **settings), whole)


def covariance(guide):
    """diag(σ) C Cᵀ diag(σ) of a guide of all weights jointly: C = I + A of a full one, [I, B] of one of low rank."""
    root, identity = getattr(guide, "lower", None), torch.eye(len(guide.loc))
    root = torch.cat([identity, guide.factor], 1) if root is None else identity + root
    root = guide.scale[:, None] * root
    return root @ root.mT
