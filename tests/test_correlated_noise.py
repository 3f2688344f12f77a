"""Several targets with correlated noise, against SciPy's multivariate Normal."""

import math

import numpy as np
import pyro.poutine as poutine
import pytest
import torch
from scipy import stats

import bnn_pyro as bp
from bnn_pyro import metrics
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.several import CorrelatedNoise
from bnn_pyro.runs.compare import _left_out


def test_correlated_noise_is_a_multivariate_normal():
    """Of several draws: joint density, variances, and the covariance of draws of y."""
    likelihood, g = CorrelatedNoise((5.0, -1.0, 2.0), (3.0, 0.2, 1.0)), torch.Generator().manual_seed(0)
    f, y = torch.randn(4, 7, 3, generator=g), torch.randn(4, 7, 3, generator=g)
    own = {site: 0.5 * torch.randn(4, 3, generator=g) for site in likelihood.initial}
    with isolated(0), poutine.trace() as trace, poutine.condition(data=own):
        likelihood(f, y)
        drawn = trace.trace.nodes["y"]["fn"].base_dist.rsample((20_000,))
    trace.trace.compute_log_prob()
    components = trace.trace.nodes["y"]["fn"].base_dist
    scale, lower = torch.tensor([3.0, 0.2, 1.0]), torch.tril_indices(3, 3, -1)
    for s in range(4):
        b = torch.zeros(3, 3)
        b[lower[0], lower[1]] = own["noise_slopes"][s]
        root = scale[:, None] * torch.linalg.inv(torch.eye(3) - b) * own["log_noise"][s].exp()
        exact = stats.multivariate_normal([0, 0, 0], (root @ root.T).numpy())
        error = y[s] - torch.tensor([5.0, -1.0, 2.0]) - scale * f[s]
        np.testing.assert_allclose(trace.trace.nodes["y"]["log_prob"][s], exact.logpdf(error.numpy()), rtol=1e-4)
        np.testing.assert_allclose(components.variance[s, 0], exact.cov.diagonal(), rtol=1e-4)
        correlation = np.corrcoef(drawn[:, s, 0].T.numpy())
        deviation = exact.cov.diagonal() ** 0.5
        np.testing.assert_allclose(correlation, exact.cov / np.outer(deviation, deviation), atol=4 / 20_000**0.5)


def test_correlated_noise_is_learned_and_predicted(tmp_path):
    """Of a correlation ρ knowing one target is worth −½ log(1 − ρ²) nats of the other; each by itself is the same."""
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=(700, 2)), rng.multivariate_normal([0, 0], [[1, 0.9], [0.9, 1]], 700)
    data = bp.dataset(x, x @ [[2.0, 0.0], [0.0, 1.0]] + noise)
    fits = {kind: bp.fit(bp.MLP(hidden=(), noise=kind), data, bp.MAP(epochs=800), progress=False)
            for kind in ("learned", "correlated")}  # fmt: skip
    apart, joint = (bp.predict(posterior, data.x_test) for posterior in fits.values())
    gain = (joint.log_prob(data.y_test) - apart.log_prob(data.y_test)).double()
    error = gain.std().item() / len(gain) ** 0.5
    assert abs(gain.mean().item() + 0.5 * math.log(1 - 0.81)) < 4 * error + 0.05
    np.testing.assert_allclose(joint.total.mean(0), [1, 1], rtol=0.2)
    covariance = torch.linalg.inv(joint.components.rows[0, 0].mT @ joint.components.rows[0, 0]).numpy()
    exact = stats.multivariate_normal([0, 0], covariance).logpdf((data.y_test - joint.mean).numpy())
    np.testing.assert_allclose(joint.log_prob(data.y_test), exact, rtol=1e-3)
    assert metrics.evaluate(joint, data.y_test).flat()["nll"] == pytest.approx(-exact.mean(), rel=1e-3)
    assert joint.noise_correlation[0, 1].item() == pytest.approx(0.9, abs=4 * (1 - 0.81) / len(data.x_train) ** 0.5)
    fits["correlated"].save(tmp_path / "fit")
    again = bp.predict(bp.load(tmp_path / "fit"), data.x_test)[:3].of_draws([0])
    assert torch.equal(again.target(1).mean, joint.mean[:3, 1])
    with pytest.raises(bp.UserError, match="noise=correlated is of several targets"):
        bp.MLP(noise="correlated").model(bp.Schema("regression", (2,)))
    labels = bp.dataset(np.eye(9)[:, :2], np.eye(9)[:, :3].astype(int), validation=0, split=0)
    with pytest.raises(bp.UserError, match="noise=correlated is of several targets"):
        bp.MLP(noise="correlated").model(labels.schema)


def test_compare_leaves_no_rows_out_of_several_targets():
    """The report says why, and the runs are compared on the test rows alone."""
    rng = np.random.default_rng(0)
    data = bp.dataset(rng.normal(size=(60, 2)), rng.normal(size=(60, 2)))
    method = bp.NUTS(warmup=10, draws=30, chains=2, compiled="no")
    posterior = bp.fit(bp.MeanField(hidden=(), noise="correlated"), data, method, progress=False)
    assert "several targets" in _left_out(posterior, data, data)
