"""Positive targets on a log scale: densities of y itself, against SciPy, integrals, and a fit to log y by hand."""

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from test_parts import read

import bnn_pyro as bp
from bnn_pyro.calibration.conformal import SCORES, Conformal
from bnn_pyro.calibration.recalibration import Affine, CdfMap
from bnn_pyro.diagnostics.failures import _knows_nothing
from bnn_pyro.parts.likelihoods import LogNormalMixture, make_likelihood

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("noise", ["learned", "heteroscedastic", 0.3])
def test_likelihoods_of_the_logarithm_have_its_jacobian(noise):
    schemas = [bp.Schema("regression", (1,), y_shift=1.0, y_scale=0.5, target_scale=s) for s in ("log", "identity")]
    log, plain = (make_likelihood(schema, noise) for schema in schemas)
    f, y = torch.randn(3, log.outputs, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 3.0, 9.0])
    own = {name: torch.tensor(-0.5) for name in log.own_sites}
    of_y, of_log = read(log, f, **own), read(plain, f, **own)
    reference = stats.lognorm(of_log.scale.numpy(), scale=np.exp(of_log.loc.numpy()))
    np.testing.assert_allclose(of_y.log_prob(y), reference.logpdf(y.numpy()), rtol=2e-5)
    np.testing.assert_allclose(of_y.mean, reference.mean(), rtol=1e-5)
    assert torch.equal(log.information(f, own), plain.information(f, own)) and log.quadratic is plain.quadratic


@pytest.fixture(scope="module")
def pair():
    """Data on a log scale, the same data logged by hand, and a fit with the same seed to each."""
    x = RNG.normal(size=(240, 2))
    y = np.exp(3 + x[:, 0] + 0.3 * RNG.normal(size=240))
    data = [bp.dataset(x, y, target_scale="log"), bp.dataset(x, np.log(y))]
    return data, [bp.fit("mlp", d, bp.MAP(epochs=40, patience=10), progress=False) for d in data]


def test_a_fit_is_that_of_the_logarithm(pair, tmp_path):
    """With early stopping, which sets the noise by residuals: of the logarithm."""
    (data, logged), fits = pair
    assert (data.y_train > 0).all() and data.schema.y_scale == pytest.approx(logged.schema.y_scale, rel=1e-5)
    assert data.fingerprint != bp.dataset(data.x_train.numpy(), data.y_train.numpy(), validation=0).fingerprint
    one, other = (bp.predict(p, d.x_test) for p, d in zip(fits, (data, logged), strict=True))
    assert type(one) is LogNormalMixture
    torch.testing.assert_close(one.quantile([0.05, 0.5]), other.quantile([0.05, 0.5]).exp(), rtol=1e-3, atol=0)
    torch.testing.assert_close(one.log_prob(data.y_test), other.log_prob(logged.y_test) - logged.y_test,
                               rtol=1e-3, atol=1e-3)  # fmt: skip
    np.testing.assert_allclose(bp.metrics.pit(one, data.y_test), bp.metrics.pit(other, logged.y_test), atol=1e-3)
    fits[0].save(tmp_path)
    assert torch.equal(bp.predict(bp.load(tmp_path), data.x_test).mean, one.mean)
    density, *errors = _knows_nothing(data, one, data.y_test)
    log_density, *log_errors = _knows_nothing(logged, other, logged.y_test)
    torch.testing.assert_close(density, log_density - logged.y_test.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(errors, log_errors, rtol=1e-2, atol=1e-3)
    assert bp.diagnostics.failure(fits[0], data) is None


def test_calibration_is_of_the_logarithm():
    """Intervals are the exponential of those of log y, for every score; recalibrated ones too."""
    loc = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    scale = torch.full_like(loc, 0.4)
    mixture = LogNormalMixture(dist.LogNormal(loc, scale))
    log_y = loc[0] + torch.randn(200, generator=torch.Generator().manual_seed(1))
    base, y = mixture.untransformed, log_y.double().exp()
    for method in (name for name, score in SCORES.items() if score.task == "regression"):
        low, high, *_ = Conformal.fit(method, mixture, y, loc.mT).at(200, x=loc.mT).interval(mixture, 0.9)
        ends = Conformal.fit(method, base, log_y.double(), loc.mT).at(200, x=loc.mT).interval(base, 0.9)
        torch.testing.assert_close(torch.stack([low, high]), torch.stack(ends[:2]).exp(), rtol=1e-5, atol=0)
        assert ((low <= y) & (y <= high)).double().mean() >= (0.85 if method == "local" else 0.9)  # by half of the rows
    for kind in (Affine, CdfMap):
        made, logged = kind.fit(mixture, y), kind.fit(base, log_y)
        after, before = made.apply(mixture), logged.apply(base)
        torch.testing.assert_close(after.quantile(0.9), before.quantile(0.9).exp(), rtol=1e-3, atol=0)
        jacobian = (after.log_prob(y.float()) - before.log_prob(log_y)).float()
        torch.testing.assert_close(jacobian, -log_y, rtol=1e-3, atol=1e-3)
        low, high, *_ = Conformal.fit("normalised", after, y).at(200).interval(after, 0.9)
        assert (low > 0).all() and ((low <= y) & (y <= high)).double().mean() >= 0.9
    same = CdfMap([0.0, 1.0], [0.0, 1.0]).apply(mixture)  # moments by integration
    np.testing.assert_allclose(same.total, mixture.total, rtol=2e-2)


def test_what_has_no_logarithm_is_refused_with_its_row(tmp_path):
    path, x = tmp_path / "houses.csv", np.arange(40.0)[:, None]
    path.write_text("area,price\n" + "1,2\n\n2,0\n3,-6\n" + "4,8.5\n" * 30)
    logarithm = bp.Schema("regression", (1,), target_scale="log")
    for call, message in (
        (lambda: bp.load_data(path, target="price", target_scale="log"), "row 4: 0 has no logarithm, and 1 more"),
        (lambda: bp.dataset(x, x[:, 0], target_scale="log"), "row 0: 0 has no logarithm; leave"),
        (lambda: bp.dataset(x, x[:, 0], task="counts", target_scale="log"), "is for the task regression, not counts"),
        (lambda: bp.load_data("diabetes", target_scale="lag"), "unknown target scale 'lag'; did you mean 'log'"),
        (lambda: make_likelihood(logarithm, "learned", "laplace"), "goes with likelihood=normal, not laplace"),
    ):
        with pytest.raises(bp.UserError, match=message):
            call()


def test_schemas_of_before_are_on_the_identity():
    plain = bp.Schema("regression", (1,)).to_dict()
    del plain["target_scale"]
    assert bp.Schema.from_dict(plain) == bp.Schema("regression", (1,), target_scale="identity")


def test_parts_know_the_numbers_of_their_rows(tmp_path):
    """Of a file as an editor counts, without empty lines and dropped rows; else from 0."""
    path = tmp_path / "houses.csv"
    path.write_text("area,price\n" + "".join(f"{k},{k}.5\n" + "\n" * (k == 7) + "NA,1\n" * (k == 9) for k in range(40)))
    data = bp.load_data(path, target="price", drop_missing=True, limit=20)
    lines = path.read_text().splitlines()
    for part in ("train", "val", "test"):
        y, index = getattr(data, f"y_{part}"), getattr(data, f"index_{part}")
        assert len(y) == len(index) and [float(lines[i - 1].split(",")[1]) for i in index.tolist()] == y.tolist()
    x = np.arange(50.0)[:, None]
    data = bp.dataset(x[:30], x[:30, 0], x_test=x[30:], y_test=x[30:, 0])
    assert torch.equal(data.index_train.float(), data.y_train) and data.index_test.tolist() == list(range(20))
