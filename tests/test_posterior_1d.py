"""SVI where the posterior is not Gaussian: one and two weights, and the best Gaussian q found by quadrature."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import bnn_pyro as bp
from bnn_pyro.checks.linear_regression import dataset

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()  # E over a standard Normal
TAU = 2.0
X = torch.linspace(-1.5, 2.5, 12)[:, None]
Y = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1])


def log_joint(*w):
    """log p(y | x, w) + log p(w) of logistic regression on a grid of weights (and a bias, if two are given)."""
    x, signed = X[:, 0].double().numpy(), (2 * Y - 1).numpy()
    f = np.multiply.outer(w[0], x) + (np.asarray(w[1])[..., None] if len(w) == 2 else 0.0)
    prior = sum(-0.5 * np.square(v / TAU) - math.log(TAU * math.sqrt(2 * math.pi)) for v in w)
    return -np.logaddexp(0, -signed * f).sum(-1) + prior


def elbo(parameters):
    """E_q log p(y, w) + H[q] by Gauss–Hermite quadrature; parameters are the means, then the log scales."""
    loc, log_scale = np.split(np.asarray(parameters), 2)
    grids = [m + math.exp(s) * NODES for m, s in zip(loc, log_scale, strict=True)]
    if len(loc) == 1:
        expected = WEIGHTS @ log_joint(grids[0])
    else:
        first, second = np.meshgrid(*grids, indexing="ij")
        expected = WEIGHTS @ log_joint(first, second) @ WEIGHTS
    return expected + log_scale.sum() + len(loc) * 0.5 * math.log(2 * math.pi * math.e)


def log_evidence(dims):
    line = np.linspace(-14, 14, 4001)
    if dims == 1:
        return math.log(np.trapezoid(np.exp(log_joint(line)), line))
    line = line[::8]
    values = np.exp(log_joint(*np.meshgrid(line, line, indexing="ij")))
    return math.log(np.trapezoid(np.trapezoid(values, line), line))


@pytest.fixture(scope="module", params=[1, 2], ids=["one weight", "two weights"])
def case(request):
    """(dims, fits from three seeds, parameters of the best q)."""
    dims = request.param
    best = minimize(lambda p: -elbo(p), np.zeros(2 * dims), tol=1e-10).x
    data = dataset(X, Y, bp.Schema("classification", (1,), classes=("a", "b")))
    entry = bp.MeanField(hidden=(), prior=f"normal:{TAU}", bias=dims == 2, init_scale=0.3)
    svi = bp.SVI(epochs=500, lr=0.05, final_lr=0.0, num_particles=2)
    return dims, [bp.fit(entry, data, svi, seed=s, progress=False, device="cpu") for s in range(3)], best


def parameters(posterior):
    q = posterior.guide
    return torch.cat([q.loc, q.scale.log()]).detach().double().numpy()


def test_svi_finds_the_best_gaussian(case):
    """Its ELBO falls short of the best by no more than the gradient's noise: ½ × (number of parameters) × spread²."""
    dims, posteriors, best = case
    top, evidence = elbo(best), log_evidence(dims)
    assert top < evidence  # the posterior is skewed, and in two dimensions correlated
    found = np.stack([parameters(p) for p in posteriors])
    unit = np.concatenate([np.exp(best[dims:]), np.ones(dims)])
    errors = (found - best) / unit  # posterior standard deviations, and log scales
    spread = math.sqrt(np.square(errors - errors.mean(0)).sum() / (2 * errors.shape[1]))
    assert spread < 0.15
    # Means of three: 4.5 standard errors, at the spread's own uncertainty of 1/√(2·df).
    assert np.abs(errors.mean(0)).max() < 4.5 * 1.5 * spread / math.sqrt(3) and np.abs(errors).max() < 0.5
    for p in found:
        assert 0 <= top - elbo(p) < 0.05


def test_the_trace_is_an_elbo(case):
    """Averages of the recorded estimates stay below the exact log evidence, and end at the exact ELBO."""
    dims, posteriors, best = case
    for posterior in posteriors:
        line = np.array(posterior.trace["elbo"])
        for first, last in pairwise(range(0, 501, 100)):
            part = line[first:last]
            assert part.mean() < log_evidence(dims) + 4 * part.std() / 10
        tail = line[-100:]
        assert tail.mean() == pytest.approx(elbo(best), abs=4 * tail.std() / 10 + 0.02)


def test_predictive_against_quadrature(case):
    """P(y = 1 | x, q) is an integral of the sigmoid over q."""
    dims, posteriors, _ = case
    prediction = bp.predict(posteriors[0], X, num_draws=4000)
    loc, log_scale = np.split(parameters(posteriors[0]), 2)
    x = X[:, 0].double().numpy()
    # f = a·w is Normal under q: one integral whatever the number of weights.
    mean = loc[0] * x + (loc[1] if dims == 2 else 0.0)
    variance = np.square(x * math.exp(log_scale[0])) + (math.exp(2 * log_scale[1]) if dims == 2 else 0.0)
    exact = (1 / (1 + np.exp(-(mean[:, None] + np.sqrt(variance)[:, None] * NODES)))) @ WEIGHTS
    error = prediction.probs[..., 1].std(0).numpy() / math.sqrt(4000)
    assert (np.abs(prediction.mean[:, 1].numpy() - exact) < 4.5 * error + 1e-6).all()
    assert error.max() < 0.01
