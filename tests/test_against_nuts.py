"""Every approximation of a last layer against NUTS on the same weights: digits through random features.

Softmax regression is log-concave, so that NUTS converges; what its own halves show of Monte Carlo is what an exact
method may show. Eight features and 100 rows leave enough doubt for the methods to differ in.
"""

import pytest
from torch import nn

import bnn_pyro as bp

DRAWS = 600
#: Total variation, in that of two exact sets of draws, up to which a method counts as near.
NEAR = 1.6


def backbone():
    with bp.isolated(4):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU()).requires_grad_(False)


@pytest.fixture(scope="module")
def data():
    return bp.load_data("digits", limit=100)


def fit(data, method, **settings):
    entry = bp.LastLayer(backbone(), **{"prior": "normal:2", "init_scale": 0.1, **settings})
    return bp.fit(entry, data, method, seed=1, progress=False, device="cpu")


def predict(posterior, data):
    return bp.predict(posterior, data.x_test, num_draws=DRAWS)


@pytest.fixture(scope="module")
def nuts(data):
    return fit(data, bp.NUTS(draws=DRAWS // 2, warmup=60, chains=2))


@pytest.fixture(scope="module")
def reference(nuts, data):
    return predict(nuts, data)


@pytest.fixture(scope="module")
def floor(reference):
    """What two sets of DRAWS exact draws would show: √½ of what the two halves of as many do."""
    return bp.metrics.distance_floor(reference)["total_variation"].value / 2**0.5


def test_the_reference_converged(nuts, data):
    found = bp.diagnostics.function_space(nuts, data.x_test[:20])
    # The standard error of the log of R-hat is about 1/ESS·C at convergence: a few hundredths at the worst of 200.
    assert found.worst < 1.05 and found.least > 200
    assert nuts.stats["diverging"].sum() == 0


def test_sghmc_is_as_near_as_monte_carlo_lets_it_and_a_posterior_of_another_prior_is_not(data, reference, floor):
    """The measure can fail: a prior of half the width is seen."""
    method = bp.SGHMC(epochs=3000, batch_size=20, lr=0.05, max_draws=DRAWS // 4)
    far = bp.metrics.distances(predict(fit(data, method), data), reference)
    assert far["total_variation"].value < NEAR * floor  # its draws depend on one another: fewer count
    assert far["agreement"].value > 0.95
    other = fit(data, bp.Laplace(), prior="normal:1")
    assert bp.metrics.total_variation(predict(other, data), reference).value > 5 * floor


def test_families_of_normals_come_nearer_with_their_covariance(data, reference, floor):
    """Mean field, then a full covariance by the ELBO; Laplace has one too, but at the mode of a skewed posterior."""
    svi = dict(epochs=800, lr=0.05)
    near = {
        name: bp.metrics.total_variation(predict(posterior, data), reference).value
        for name, posterior in {
            "mean-field": fit(data, bp.SVI(**svi)),
            "full": fit(data, bp.SVI(**svi), family="full"),
            "laplace": fit(data, bp.Laplace()),
        }.items()
    }
    assert NEAR * floor < near["mean-field"] < 0.1
    assert near["full"] < near["mean-field"] < near["laplace"] < 0.15


def test_the_point_estimate_is_further(data, reference, floor):
    point = predict(fit(data, bp.MAP(epochs=300, lr=0.05)), data)
    assert point.epistemic.max() < 1e-6
    assert bp.metrics.total_variation(point, reference).value > NEAR * floor
