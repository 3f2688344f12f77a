"""What tests of Markov chains share: z-tests by Monte-Carlo standard errors with Bonferroni's correction; stopping."""

import signal

import numpy as np
import torch
from scipy.stats import norm

import bnn_pyro as bp
from bnn_pyro.diagnostics.convergence import ess_mean


def fit(entry, data, method, **settings):
    return bp.fit(entry, data, method, **{"progress": False, "device": "cpu", **settings})


def weights(posterior):
    """(C, D, P) float64, in the order of the model's sites."""
    return torch.cat(
        [v.double().reshape(*v.shape[:2], -1) for v in map(posterior.chains.get, posterior.model.initial)], -1
    )


def same(a, b):
    """Whether two posteriors have the very same draws and stats."""
    return all(torch.equal(a.chains[s], v) for s, v in b.chains.items()) and all(
        torch.equal(a.stats[s], v) for s, v in b.stats.items()
    )


def estimate(values):
    """(mean, its Monte-Carlo standard error) of each of (C, D, M) series, (M,)."""
    return values.mean((0, 1)), values.std((0, 1)) / np.sqrt(ess_mean(np.moveaxis(values, 2, 0)))


def check(values, exact, alpha=1e-4):
    """Means of (C, D, M) series agree with ``exact`` (M,) within their own Monte-Carlo error."""
    mean, error = estimate(values)
    z = np.abs(mean - exact) / error
    assert z.max() < norm.isf(alpha / (2 * len(z))), f"off the exact posterior by {z.max():.1f} standard errors"
    return error


def check_alike(values, others, alpha=1e-4):
    """Means of two sets of series (C, D, M) agree within the Monte-Carlo error of both."""
    (a, error), (b, other) = estimate(values), estimate(others)
    z = np.abs(a - b) / np.hypot(error, other)
    assert z.max() < norm.isf(alpha / (2 * len(z))), f"series {z.argmax()} differ by {z.max():.1f} standard errors"


def check_gaussian(problem, posterior):
    """Means, and every entry of the covariance, in posterior standard deviations."""
    covariance = torch.linalg.inv(problem.precision)
    scale = covariance.diagonal().sqrt()
    unit = (weights(posterior) - problem.mean) / scale
    products = torch.einsum("cdi,cdj->cdij", unit, unit)
    upper = torch.triu_indices(len(scale), len(scale))
    correlation = (covariance / torch.outer(scale, scale))[upper[0], upper[1]]
    values = torch.cat([unit, products[..., upper[0], upper[1]]], -1).numpy()
    error = check(values, torch.cat([torch.zeros_like(scale), correlation]).numpy())
    assert error.max() < 0.15, "too noisy to tell"


def stop_at(step, number=signal.SIGINT):
    """A ``Checkpoint.due`` at which a signal comes, Ctrl-C if no other, at that step."""
    looks = iter(range(1, 10_000))

    def due(self):
        if next(looks) == step:
            signal.raise_signal(number)
        return self.stop

    return property(due)
