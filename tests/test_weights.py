"""Distributions of a layer's weights: moments, densities and KLs against torch and against numerical integration."""

import math

import pytest
import torch
from scipy.integrate import quad
from torch.distributions import Independent, Normal, kl_divergence

from bnn_pyro.isolation import isolated
from bnn_pyro.parts.priors import IsotropicNormal
from bnn_pyro.parts.weights import (
    CentredNormal,
    DropoutWeights,
    FreeWeights,
    LogUniform,
    NormalWeights,
    _DropoutVariance,
    kl_log_uniform,
    log_alpha,
)

G = torch.Generator().manual_seed(4)
LOC = torch.randn(3, 5, generator=G, dtype=torch.float64)
SCALE = 0.1 + torch.rand(3, 5, generator=G, dtype=torch.float64)
ALPHAS = {"layer": torch.tensor(0.4).double(), "unit": torch.tensor([[0.2], [0.5], [0.9]]).double(), "weight": SCALE}
KINDS = {
    "normal": (NormalWeights(LOC, SCALE), SCALE),
    "free": (FreeWeights(LOC, 2 * SCALE.log()), SCALE),
    **{name: (DropoutWeights(LOC, a), (a.sqrt() * LOC.abs()).expand(3, 5)) for name, a in ALPHAS.items()},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_one_parametrisation_is_like_another(kind):
    q, scale = KINDS[kind]
    assert (q.batch_shape, q.event_shape) == ((), (3, 5))
    torch.testing.assert_close(q.scale, scale)
    torch.testing.assert_close(q.variance, scale.square())
    torch.testing.assert_close(q.log_variance, 2 * scale.log())
    value = torch.randn(7, 3, 5, generator=G, dtype=torch.float64)
    torch.testing.assert_close(q.log_prob(value), Normal(LOC, scale).log_prob(value).sum((-1, -2)))
    with isolated(0):
        assert q.expand(torch.Size((2,))).sample().shape == (2, 3, 5)


@every_kind
def test_draws_have_the_moments(kind, draws=50_000):
    q, scale = KINDS[kind]
    with isolated(0):
        drawn = q.sample((draws,))
    assert ((drawn.mean(0) - LOC).abs() < 5 * scale / math.sqrt(draws)).all()
    assert ((drawn.std(0) / scale - 1).abs() < 5 / math.sqrt(2 * draws)).all()


@every_kind
@pytest.mark.parametrize("prior", ["centred", "a scale a row", "isotropic", "normal"])
def test_kl_of_normals_and_its_gradient(kind, prior):
    q, scale = KINDS[kind]
    rows = torch.tensor([[0.5], [1.0], [2.0]]).double()
    p, loc, width = {
        "centred": (CentredNormal(rows[0, 0], LOC.shape), 0.0, rows[0, 0]),
        "a scale a row": (CentredNormal(rows, LOC.shape), 0.0, rows),
        "isotropic": (IsotropicNormal(rows[0, 0], LOC.shape), 0.0, rows[0, 0]),
        "normal": (NormalWeights(LOC.flip(0), SCALE.flip(1)), LOC.flip(0), SCALE.flip(1)),
    }[prior]
    if prior == "isotropic" and kind != "normal":
        pytest.skip("for guides over weights, which are NormalWeights")
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(Normal(LOC, scale), Normal(loc, width)).sum())


def test_gradients_through_the_parametrisations():
    """Of an objective that uses variance and KL together, as a layer in an ELBO does."""
    p = CentredNormal(torch.tensor([[0.5], [1.0], [2.0]]).double(), LOC.shape)
    sensitivity = torch.randn(3, 5, generator=G, dtype=torch.float64)

    def objective(make):
        def of(*parameters):
            q = make(*parameters)
            return kl_divergence(q, p) + (sensitivity * q.variance).sum() + (sensitivity * q.mean).sum()

        return of

    def inputs(*tensors):
        return [t.clone().requires_grad_() for t in tensors]

    assert torch.autograd.gradcheck(objective(NormalWeights), inputs(LOC, SCALE))
    assert torch.autograd.gradcheck(objective(FreeWeights), inputs(LOC, SCALE.log()))
    for alpha in ALPHAS.values():
        assert torch.autograd.gradcheck(objective(DropoutWeights), inputs(LOC, alpha))
        assert torch.autograd.gradcheck(_DropoutVariance.apply, inputs(LOC, alpha))


@pytest.mark.parametrize("alpha", [1e-4, 1e-2, 0.1, 0.5, 1.0, 5.0, 100.0])
def test_the_log_uniform_kl_against_its_integral(alpha):
    """−KL = ½ log α − E log|ε| + const, ε ~ Normal(1, α); the constant makes it vanish as α → ∞."""
    scale = math.sqrt(alpha)
    density = lambda z: math.log(abs(1 + scale * z)) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)  # noqa: E731
    expected = quad(density, -12, 12, points=[-1 / scale] if scale > 1 / 12 else None, limit=500)[0]
    limit = -0.5 * (0.5772156649015329 + math.log(2))  # E log|z| of a standard Normal
    exact = expected - 0.5 * math.log(alpha) - limit
    assert kl_log_uniform(torch.tensor(alpha).log()).item() == pytest.approx(exact, abs=0.008)


def test_the_gradient_of_the_log_uniform_kl():
    a = torch.linspace(-9, 9, 13, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(kl_log_uniform, a)


def test_the_log_uniform_kl_knows_only_alpha():
    p = LogUniform(LOC.shape)
    for alpha in ALPHAS.values():
        q = DropoutWeights(LOC, alpha)
        each = kl_log_uniform(alpha.log()).expand(3, 5).sum()
        torch.testing.assert_close(kl_divergence(q, p), each)
        torch.testing.assert_close(kl_divergence(DropoutWeights(-7 * LOC, alpha), p), each)
        # The same weights given by their scale have the same α, and the same KL.
        free = NormalWeights(LOC, q.scale)
        torch.testing.assert_close(log_alpha(free), alpha.log().expand(3, 5))
        torch.testing.assert_close(kl_divergence(free, p), each)


def test_an_improper_prior_has_no_samples():
    with pytest.raises(NotImplementedError, match="improper"):
        LogUniform(torch.Size((2,))).sample()
    ratio = LogUniform(torch.Size((2,))).log_prob(torch.tensor([[1.0, 2.0], [3.0, -2.0]]))
    assert (ratio[0] - ratio[1]).item() == pytest.approx(math.log(3))


def test_weights_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"other shapes .*\(3, 5\).*\(3, 4\)"):
        kl_divergence(NormalWeights(LOC, SCALE), NormalWeights(LOC[:, :4], SCALE[:, :4]))
    with pytest.raises(NotImplementedError):
        kl_divergence(Independent(Normal(LOC, SCALE), 2), LogUniform(LOC.shape))
