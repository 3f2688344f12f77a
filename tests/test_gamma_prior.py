"""The Normal prior with a Gamma precision: against quadrature, and the exact conditional of its precision."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import gamma, kstest, multivariate_t, norm

import bnn_pyro as bp
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.gamma_prior import GammaNormal
from bnn_pyro.parts.priors import parse_prior

SHAPE, RATE = 2.5, 0.7
W = torch.tensor([[0.3, -1.2, 0.5], [0.9, 0.1, -0.4]])


def joint(t, w):
    return gamma.pdf(t, SHAPE, scale=1 / RATE) * math.exp(norm.logpdf(w, scale=t**-0.5).sum())


def test_density_is_the_integral_over_the_precision():
    prior = parse_prior(f"gamma:{SHAPE},{RATE}")(W)
    w = W.double().numpy()
    assert prior.log_prob(W).item() == pytest.approx(math.log(quad(joint, 0, 60, args=(w,))[0]), rel=1e-5)
    student = multivariate_t(np.zeros(6), RATE / SHAPE * np.eye(6), 2 * SHAPE)
    assert prior.log_prob(W).item() == pytest.approx(student.logpdf(w.ravel()), rel=1e-5)
    several = torch.stack([W, 2 * W, -W])
    one_by_one = torch.stack([prior.log_prob(v) for v in several])
    torch.testing.assert_close(prior.log_prob(several), one_by_one)
    torch.testing.assert_close(prior.expand([3]).log_prob(several), one_by_one)
    with isolated(0):
        assert prior.expand([3]).sample().shape == (3, 2, 3)


def test_precision_given_weights():
    """By quadrature of p(τ) p(w | τ), and its draws by Kolmogorov and Smirnov."""
    prior = parse_prior(f"gamma:{SHAPE},{RATE}")(W)
    w = W.double().numpy()
    evidence = quad(joint, 0, 60, args=(w,))[0]
    conditional = prior.precision_given(W)
    for t in (0.2, 1.0, 3.0):
        exact = joint(t, w) / evidence
        assert conditional.log_prob(torch.tensor(t)).exp().item() == pytest.approx(exact, rel=1e-4)
        given = prior.log_prob_given(W, torch.tensor(t)).item()
        assert given == pytest.approx(norm.logpdf(w, scale=t**-0.5).sum(), rel=1e-5)
    exact = gamma(SHAPE + 3, scale=1 / (RATE + 0.5 * (w**2).sum()))
    with isolated(0):
        draws = prior.precision_given(W.expand(4000, 2, 3)).sample()
    assert draws.shape == (4000,) and kstest(draws.numpy(), exact.cdf).pvalue > 1e-3
    assert kstest(draws.numpy(), gamma(SHAPE + 6, scale=exact.kwds["scale"]).cdf).pvalue < 1e-6


def test_draws_have_the_density():
    prior = GammaNormal(torch.tensor(SHAPE), torch.tensor(RATE), torch.Size([2]))
    with isolated(0):
        w = prior.sample((20_000,))
    assert kstest((w.square().sum(1) * SHAPE / RATE / 2).numpy(), "f", args=(2, 2 * SHAPE)).pvalue > 1e-3
    lone = GammaNormal(torch.tensor(SHAPE), torch.tensor(RATE), torch.Size([]))
    assert lone.log_prob(torch.zeros(5)).shape == (5,)


def test_every_method_takes_it():
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    schema = bp.Schema("regression", (2,))
    data = bp.Dataset("d", schema, x, x[:, 0], x[:0], x[:0, 0], x[:0], x[:0, 0])
    entry = bp.MeanField(hidden=(), prior="gamma:1,1", noise=0.5)
    methods = [bp.SVI(epochs=2), bp.MAP(epochs=2), bp.NUTS(chains=1, draws=2, warmup=2), bp.SGHMC(epochs=3)]
    for method in methods:
        posterior = bp.fit(entry, data, method, progress=False, device="cpu")
        assert torch.isfinite(bp.predict(posterior, x, num_draws=2).mean).all()
    for wrong in ("gamma:0,1", "gamma:1,1,1"):
        with pytest.raises(bp.UserError, match="gamma:SHAPE,RATE"):
            parse_prior(wrong)
