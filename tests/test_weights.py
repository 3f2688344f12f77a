"""Distributions of weights, the Gamma-Normal prior too: moments, densities and KLs against torch and quadrature."""

import math

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import gamma, kstest, norm
from torch.distributions import Normal, kl_divergence

from bnn_pyro.isolation import isolated
from bnn_pyro.parts.gradients import kl_log_uniform
from bnn_pyro.parts.priors import GammaNormal, parse_prior
from bnn_pyro.parts.weights import (
    CentredNormal,
    DropoutWeights,
    FreeWeights,
    LogUniform,
    NormalWeights,
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
def test_one_parametrisation_is_like_another(kind, draws=50_000):
    q, scale = KINDS[kind]
    assert (q.batch_shape, q.event_shape) == ((), (3, 5))
    for name, expected in (("scale", scale), ("variance", scale.square()), ("log_variance", 2 * scale.log())):
        torch.testing.assert_close(getattr(q, name), expected)
    value = torch.randn(7, 3, 5, generator=G, dtype=torch.float64)
    torch.testing.assert_close(q.log_prob(value), Normal(LOC, scale).log_prob(value).sum((-1, -2)))
    with isolated(0):
        assert q.expand(torch.Size((2,))).sample().shape == (2, 3, 5)
        drawn = q.sample((draws,))
    assert ((drawn.mean(0) - LOC).abs() < 5 * scale / math.sqrt(draws)).all()
    assert ((drawn.std(0) / scale - 1).abs() < 5 / math.sqrt(2 * draws)).all()


ROWS = torch.tensor([[0.5], [1.0], [2.0]]).double()
PRIORS = {
    "centred": (CentredNormal(ROWS[0, 0], LOC.shape), 0.0, ROWS[0, 0]),
    "a scale a row": (CentredNormal(ROWS, LOC.shape), 0.0, ROWS),
    "normal": (NormalWeights(LOC.flip(0), SCALE.flip(1)), LOC.flip(0), SCALE.flip(1)),
}
SENSITIVITY = torch.randn(3, 5, generator=G, dtype=torch.float64)


@every_kind
@pytest.mark.parametrize("prior", PRIORS)
def test_kl_of_normals_against_torch(kind, prior):
    (q, scale), (p, loc, width) = KINDS[kind], PRIORS[prior]
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(Normal(LOC, scale), Normal(loc, width)).sum())


@pytest.mark.parametrize(
    ("make", "second"),
    [(NormalWeights, SCALE), (FreeWeights, SCALE.log()), *[(DropoutWeights, alpha) for alpha in ALPHAS.values()]],
)
def test_gradients_through_the_parametrisations(make, second):
    """Of an objective that uses variance and KL together, as a layer in an ELBO does."""

    def objective(*parameters):
        q = make(*parameters)
        return kl_divergence(q, PRIORS["a scale a row"][0]) + (SENSITIVITY * (q.variance + q.mean)).sum()

    assert torch.autograd.gradcheck(objective, [t.clone().requires_grad_() for t in (LOC, second)])


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 1.0, 100.0])
def test_the_log_uniform_kl_against_its_integral(alpha):
    """−KL = ½ log α − E log|ε| + const, ε ~ Normal(1, α); the constant makes it vanish as α → ∞."""
    scale = math.sqrt(alpha)
    density = lambda z: math.log(abs(1 + scale * z)) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)  # noqa: E731
    expected = quad(density, -12, 12, points=[-1 / scale] if scale > 1 / 12 else None, limit=500)[0]
    limit = -0.5 * (0.5772156649015329 + math.log(2))  # E log|z| of a standard Normal
    exact = expected - 0.5 * math.log(alpha) - limit
    assert kl_log_uniform(torch.tensor(alpha).log()).item() == pytest.approx(exact, abs=0.008)


def test_the_log_uniform_kl_knows_only_alpha():
    a = torch.linspace(-9, 9, 13, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(kl_log_uniform, a)
    p = LogUniform(LOC.shape)
    for alpha in ALPHAS.values():
        q = DropoutWeights(LOC, alpha)
        free = NormalWeights(LOC, q.scale)  # the same weights by their scale have the same α, and the same KL
        torch.testing.assert_close(log_alpha(free), alpha.log().expand(3, 5))
        for one in (q, DropoutWeights(-7 * LOC, alpha), free):
            torch.testing.assert_close(kl_divergence(one, p), kl_log_uniform(alpha.log()).expand(3, 5).sum())


def test_an_improper_prior_has_no_samples():
    with pytest.raises(NotImplementedError, match="improper"):
        LogUniform(torch.Size((2,))).sample()
    ratio = LogUniform(torch.Size((2,))).log_prob(torch.tensor([[1.0, 2.0], [3.0, -2.0]]))
    assert (ratio[0] - ratio[1]).item() == pytest.approx(math.log(3))


# -- a Normal prior whose precision has a Gamma prior --------------------------------------------------------------
SHAPE, RATE = 2.5, 0.7
W = torch.tensor([[0.3, -1.2, 0.5], [0.9, 0.1, -0.4]])


def joint(t, w):
    return gamma.pdf(t, SHAPE, scale=1 / RATE) * math.exp(norm.logpdf(w, scale=t**-0.5).sum())


def test_density_and_precision_are_integrals_over_the_precision():
    prior, w = parse_prior(f"gamma:{SHAPE},{RATE}")(W), W.double().numpy()
    zeroth, first = (quad(lambda t, k=k: t**k * joint(t, w), 0, 60)[0] for k in (0, 1))
    assert prior.log_prob(W).item() == pytest.approx(math.log(zeroth), rel=1e-5)
    assert prior.precision_given(W).item() == pytest.approx(first / zeroth, rel=1e-5)
    several = torch.stack([W, 2 * W, -W])
    for own in (prior.log_prob, prior.expand([3]).log_prob, prior.precision_given):
        one = prior.precision_given if own == prior.precision_given else prior.log_prob
        torch.testing.assert_close(own(several), torch.stack([one(v) for v in several]))
    with isolated(0):
        assert prior.expand([3]).sample().shape == (3, 2, 3)


def test_draws_have_the_density():
    prior = GammaNormal(torch.tensor(SHAPE), torch.tensor(RATE), torch.Size([2]))
    with isolated(0):
        w = prior.sample((20_000,))
    assert kstest((w.square().sum(1) * SHAPE / RATE / 2).numpy(), "f", args=(2, 2 * SHAPE)).pvalue > 1e-3
