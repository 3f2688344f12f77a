"""SVI where the posterior is not Gaussian: logistic regression with two weights; the best Gaussian q by quadrature."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.checks.two_weights import TWO_WEIGHTS, best_normal

#: Of the samplers' tests: logistic regression with one weight, or two.
TAU = 2.0
X = torch.linspace(-1.5, 2.5, 12)[:, None]
Y = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1])
PROBLEM = TWO_WEIGHTS["logistic"]


def log_joint(*w):
    """log p(y | x, w) + log p(w) of logistic regression on a grid of weights (and a bias, if two are given)."""
    x, signed = X[:, 0].double().numpy(), (2 * Y - 1).numpy()
    f = np.multiply.outer(w[0], x) + (np.asarray(w[1])[..., None] if len(w) == 2 else 0.0)
    prior = sum(-0.5 * np.square(v / TAU) - math.log(TAU * math.sqrt(2 * math.pi)) for v in w)
    return -np.logaddexp(0, -signed * f).sum(-1) + prior


@pytest.fixture(scope="module")
def posteriors():
    entry = bp.MeanField(**PROBLEM.settings, init_scale=0.3)
    svi = bp.SVI(epochs=400, lr=0.05, final_lr=0.0, num_particles=2)
    return [bp.fit(entry, PROBLEM.data, svi, seed=s, progress=False, device="cpu") for s in range(3)]


@pytest.fixture(scope="module")
def best():
    """(mean, scale, ELBO) of the best q, and the log evidence."""
    mean, root, elbo = best_normal(PROBLEM.log_joint, PROBLEM.mode(1.0))
    first, second = PROBLEM.grid.axes
    cell = (first[1] - first[0]) * (second[1] - second[0])
    evidence = (PROBLEM.log_joint(PROBLEM.grid.points).logsumexp(0) + cell.log()).item()
    return mean, root.diagonal(), elbo, evidence


def test_svi_finds_the_best_gaussian(posteriors, best):
    """Up to the gradient's noise, over three seeds."""
    mean, scale, elbo, evidence = best
    assert elbo < evidence  # the posterior is skewed and correlated
    qs = [p.guide for p in posteriors]
    errors = torch.stack([torch.cat([(q.loc - mean) / scale, (q.scale / scale).log()]) for q in qs]).detach()
    spread = math.sqrt((errors - errors.mean(0)).square().sum() / (2 * errors.shape[1]))
    assert spread < 0.15
    # Means of three: 4.5 standard errors, at the spread's own uncertainty of 1/√(2·df).
    assert errors.mean(0).abs().max() < 4.5 * 1.5 * spread / math.sqrt(3) and errors.abs().max() < 0.5


def test_the_trace_is_an_elbo(posteriors, best):
    """Averages of the recorded estimates stay below the exact log evidence, and end at the best ELBO."""
    *_, elbo, evidence = best
    for posterior in posteriors:
        trace = np.array(posterior.trace["elbo"])
        for first, last in pairwise(range(0, 401, 100)):
            part = trace[first:last]
            assert part.mean() < evidence + 4 * part.std() / 10
        tail = trace[-100:]
        assert tail.mean() == pytest.approx(elbo, abs=4 * tail.std() / 10 + 0.02)


def test_predictive_against_quadrature(posteriors):
    """P(y = 1 | x, q) is an integral of the sigmoid over q."""
    q, x = posteriors[0].guide, torch.linspace(-1.5, 1.5, 12)
    prediction = bp.predict(posteriors[0], x[:, None], num_draws=4000)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    # f = a·w is Normal under q: one integral whatever the number of weights.
    loc, scale = (v.detach().double().numpy() for v in (q.loc, q.scale))
    mean, sd = loc[0] * x.numpy() + loc[1], np.hypot(x.numpy() * scale[0], scale[1])
    exact = (1 / (1 + np.exp(-(mean[:, None] + sd[:, None] * nodes)))) @ weights / weights.sum()
    error = prediction.probs[..., 1].std(0).numpy() / math.sqrt(4000)
    assert (np.abs(prediction.mean[:, 1].numpy() - exact) < 4.5 * error + 1e-6).all()
    assert error.max() < 0.01
