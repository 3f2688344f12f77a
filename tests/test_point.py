"""Point estimates against closed forms and an independent optimiser."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar

import bnn_pyro as bp
from bnn_pyro.checks.linear_regression import correlated, dataset

LONG = dict(epochs=600, lr=0.1, final_lr=0.0)


def weights(posterior):
    """All sites of the one draw, flat, in the order of the model's."""
    assert all(value.shape[:2] == (1, 1) for value in posterior.chains.values())
    return torch.cat([posterior.chains[site].flatten() for site in posterior.model.initial]).double()


def fit(problem, method):
    return bp.fit(problem.entry(), problem.data, method, progress=False, device="cpu")


# A strong prior, so that it matters, and a target in its own units.
PROBLEM = correlated(num=40, noise=5.0, y_shift=40.0, y_scale=8.0, prior_scale=0.3)


def test_map_is_the_posterior_mean_of_the_linear_model():
    """The posterior is Gaussian: its mode is its mean, Λ⁻¹ scale Aᵀ(y − shift) / σ²."""
    posterior = fit(PROBLEM, bp.MAP(**LONG))
    torch.testing.assert_close(weights(posterior), PROBLEM.mean, rtol=1e-3, atol=1e-3)
    a = PROBLEM.design(PROBLEM.x)
    log_prior = torch.distributions.Normal(0.0, 0.3).log_prob(PROBLEM.mean).sum()
    log_likelihood = torch.distributions.Normal(40 + 8 * a @ PROBLEM.mean, 5.0).log_prob(PROBLEM.y).sum()
    trace = {name: line[-1] for name, line in posterior.trace.items()}
    assert trace["log_prior"] == pytest.approx(log_prior.item(), rel=1e-4)
    assert trace["log_likelihood"] == pytest.approx(log_likelihood.item(), rel=1e-4)
    assert trace["log_joint"] == pytest.approx((log_prior + log_likelihood).item(), rel=1e-4)


def test_mle_is_least_squares():
    a = PROBLEM.design(PROBLEM.x).numpy()
    least_squares = np.linalg.lstsq(a, (PROBLEM.y.numpy() - 40) / 8, rcond=None)[0]
    found = weights(fit(PROBLEM, bp.MLE(**LONG))).numpy()
    np.testing.assert_allclose(found, least_squares, rtol=1e-3, atol=1e-3)
    assert np.abs(found - PROBLEM.mean.numpy()).max() > 0.05  # the prior would have shown


def test_mini_batches_find_the_same_point():
    """Within the spread that the gradient's noise leaves, in posterior standard deviations."""
    found = weights(fit(PROBLEM, bp.MAP(epochs=400, batch_size=10, lr=0.05, final_lr=0.0)))
    assert ((found - PROBLEM.mean).abs() / PROBLEM.mean_field_scale).max() < 0.1


def logistic(classes):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(50, 1, generator=g)
    y = (x[:, 0] + 0.8 * torch.randn(50, generator=g) > 0.3).long() + (classes == 3) * (x[:, 0] > 1.0).long()
    return x, y, dataset(x, y, bp.Schema("classification", (1,), classes=tuple("abc"[:classes])))


@pytest.mark.parametrize("bias", [False, True])
def test_map_of_logistic_regression(bias):
    x, y, data = logistic(2)
    signed = (2 * y - 1).double().numpy()

    def energy(w):
        f = x[:, 0].double().numpy() * w[0] + (w[1] if bias else 0.0)
        return np.logaddexp(0, -signed * f).sum() + 0.5 * (np.square(w) / 0.7**2).sum()

    best = minimize(energy, np.zeros(2), tol=1e-12).x if bias else [minimize_scalar(lambda w: energy(np.array([w]))).x]
    entry = bp.MLP(hidden=(), prior="normal:0.7", bias=bias)
    posterior = bp.fit(entry, data, bp.MAP(**LONG), progress=False, device="cpu")
    np.testing.assert_allclose(weights(posterior), best, rtol=1e-3, atol=1e-3)


def test_map_of_softmax_regression():
    x, y, data = logistic(3)
    a = np.stack([x[:, 0].double().numpy(), np.ones(50)], 1)

    def energy(flat):
        f = a @ flat.reshape(2, 3)
        normaliser = np.logaddexp.reduce(f, axis=1)
        return (normaliser - f[np.arange(50), y]).sum() + 0.5 * np.square(flat).sum()

    best = minimize(energy, np.zeros(6), tol=1e-10).x
    posterior = bp.fit(bp.MLP(hidden=(), prior="normal:1"), data, bp.MAP(**LONG), progress=False, device="cpu")
    np.testing.assert_allclose(weights(posterior), best, rtol=1e-3, atol=1e-3)


def test_learned_noise_of_the_constant_model():
    """MLE of the noise is the root mean square of the residuals, in target units."""
    problem = correlated(num=40, noise=5.0, y_shift=40.0, y_scale=8.0)
    posterior = bp.fit(bp.MLP(hidden=()), problem.data, bp.MLE(**LONG), progress=False, device="cpu")
    prediction = bp.predict(posterior, problem.data.x_train)
    rms = (problem.y - prediction.mean).square().mean().sqrt()
    torch.testing.assert_close(prediction.total.sqrt().double(), rms.expand(40), rtol=1e-3, atol=1e-3)
    assert prediction.num_draws == 1 and (prediction.epistemic == 0).all()
