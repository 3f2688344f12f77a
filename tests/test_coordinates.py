"""Coordinates of linear models: their curvature, their centre by the closed form of the evidence, and NUTS in them."""

import math

import arviz
import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import f, gamma, kstest, norm

import bnn_pyro as bp
from bnn_pyro.inference.coordinates import NonCentred, Rounded, Whitened, centre_of, coordinates, mode_of
from bnn_pyro.inference.linear import Curvature, summed
from bnn_pyro.inference.potential import Potential


@pytest.mark.parametrize(("classes", "bias"), [(0, True), (2, False), (3, True)])
@pytest.mark.parametrize("dense", [0, 4096], ids=["kronecker", "whole"])
def test_coordinates(dense, classes, bias, monkeypatch):
    """There and back is the identity; by all of Λ the log joint is −½ zᵀz around its mode, to second order."""
    monkeypatch.setattr("bnn_pyro.inference.coordinates.DENSE", dense)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=g) + 1
    y = torch.randint(classes, (60,), generator=g) if classes else 3 + torch.randn(60, generator=g)
    kind, units = ("classification", {}) if classes else ("regression", dict(y_shift=2.0, y_scale=2.0))
    schema = bp.Schema(kind, (2,), classes=tuple("abc"[:classes]), **units)
    entry = bp.MeanField(hidden=(), prior="normal:2", noise=0.7, bias=bias)
    with bp.isolated(0):
        target = Potential(entry.model(schema), x, y, 0.5)
        space = coordinates(target)
        mode = mode_of(target.log_density, Whitened(Curvature(target), target.initial), target.initial)
    assert type(space) is (Rounded if dense else Whitened)
    there = space.inverse(mode)
    many = torch.stack([there, there + 1, there - 1])
    torch.testing.assert_close(space.forward(many)[0], mode, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(space.inverse(space.forward(many)), many, rtol=1e-5, atol=1e-5)
    curve = torch.autograd.functional.hessian(lambda z: -target.log_density(space.forward(z)[None]).sum(), there)
    if dense:
        assert (curve - torch.eye(len(curve))).abs().max() < 0.02
    else:  # an approximation, near enough to be of use: the weights' own has a ratio of scales above 5
        values = torch.linalg.eigvalsh(curve)
        assert values[0] > 0.2 and values[-1] < 5


def linear(rows, two=False):
    """30 weights without a bias, and their evidence up to a constant: of log σ and log τ, with their priors.

    two: of columns so small that weights of 1 leave what depends on them to the noise, a second maximum.
    """
    g = torch.Generator().manual_seed(2)
    x, w, noise = torch.randn(rows, 30, generator=g), torch.full((30,), 0.5), 0.3
    w[4:] = 0
    if two:
        x[:, 4:], w[:4], w[4:], noise = 0.001 * x[:, 4:], 1.0, 50 * torch.randn(26, generator=g), 0.02
    y = x @ w + noise * torch.randn(rows, generator=g)
    values, vectors = np.linalg.eigh((x.double() @ x.double().mT).numpy())
    along = vectors.T @ y.double().numpy()

    def log_p(log_noise, log_tau, gamma):
        variances = math.exp(2 * log_noise) + values.clip(0) / math.exp(log_tau)
        found = -(np.log(variances) + along**2 / variances).sum() / 2 - (log_noise + 1) ** 2 / 2
        return found + gamma * (log_tau - 0.1 * math.exp(log_tau))

    return x, y, log_p


def linear_model(prior):
    return bp.MeanField(hidden=(), prior=prior, noise="learned", bias=False)


@pytest.mark.parametrize(
    ("rows", "prior", "two"),
    [*((rows, prior, False) for rows in (20, 80) for prior in ("fan-in:1", "gamma:1,0.1")), (80, "gamma:1,0.1", True)],
)
def test_the_centre_has_the_scales_of_the_highest_evidence(rows, prior, two):
    """Against its closed form; of 30 weights given 20 rows, the mode of weights and noise together has none."""
    (x, y, log_p), gamma = linear(rows, two), "gamma" in prior
    with bp.isolated(0):
        target = Potential(linear_model(prior).model(bp.Schema("regression", (30,))), x, y)
        curvature = Curvature(target)
        mode = mode_of(target.log_density, Whitened(curvature, target.initial), target.initial)
        centre = centre_of(target, curvature)
    found = [centre[-1].item(), curvature.prior_precision[0].log().item()]
    starts = [[-1, 2], [-3, -8]][: 1 + two]
    maxima = [
        minimize(lambda v: -log_p(*v, *found[len(v) :], gamma), at[: 1 + gamma], method="Nelder-Mead").fun
        for at in starts
    ]
    assert -log_p(*found, gamma) < min(maxima) + 0.2 and (not two or maxima[0] > maxima[1] + 50)
    if two:  # where a run of an earlier version stays
        target.centred = 1
        with bp.isolated(0):
            centre = centre_of(target, curvature)
        assert -log_p(centre[-1].item(), curvature.prior_precision[0].log().item(), gamma) > maxima[0] - 0.2
    assert rows == 80 or -log_p(mode[-1].item(), math.log(30), gamma) > maxima[0] + 2


@pytest.mark.parametrize(("prior", "two"), [("fan-in:1", False), ("gamma:1,0.1", False), ("gamma:1,0.1", True)])
def test_nuts_has_the_noise_of_numerical_integration(prior, two):
    """Of fewer rows than weights; and where the evidence has two maxima."""
    (x, y, log_p), gamma = linear(80 if two else 20, two), "gamma" in prior
    method = bp.NUTS(cores=1, warmup=250 if two else 500, draws=250 if two else 1000)
    data = bp.Dataset("by-hand", bp.Schema("regression", (30,)), x, y, x[:0], y[:0], x[:0], y[:0])
    posterior = bp.fit(linear_model(prior), data, method, seed=0, progress=False, device="cpu")
    grid, taus = np.linspace(-7, 2, 181), np.linspace(-12 if two else -2, 7, 61 + 60 * two) if gamma else [math.log(30)]
    p = np.array([[log_p(noise, tau, gamma) for tau in taus] for noise in grid])
    p = np.exp(p - p.max()).sum(1)
    mean = (p * grid).sum() / p.sum()
    sd = math.sqrt((p * (grid - mean) ** 2).sum() / p.sum())
    draws = posterior.chains["log_noise"].double().numpy()
    effective = float(arviz.ess(draws))
    assert effective > 100 and draws.mean() == pytest.approx(mean, abs=4 * sd / math.sqrt(effective))
    assert draws.std() == pytest.approx(sd, rel=4 / math.sqrt(effective))


def test_a_compiled_gradient_is_held_to_the_rounding_of_the_operators(monkeypatch):
    """Of nearly equal columns, such as the channels of a spectrum, single precision leaves less than 1e-4."""
    g = torch.Generator().manual_seed(0)
    x = (
        torch.randn(150, 60, generator=g)
        * 0.7 ** torch.arange(60.0)
        @ torch.linalg.qr(torch.randn(60, 60, generator=g))[0]
    )
    x = x / x.std(0)
    y = torch.linalg.svd(x, full_matrices=False)[0][:, :20].sum(1) * 3 + 0.05 * torch.randn(150, generator=g)
    with bp.isolated(0):
        target = Potential(linear_model("gamma:1,0.1").model(bp.Schema("regression", (60,))), x, y)
        target.space = coordinates(target)
    assert target.compile(1)
    monkeypatch.setattr("bnn_pyro.inference.potential.MAX_ROUNDING", 0.0)
    with pytest.warns(UserWarning, match="its result is off by 0.00"):
        assert not target.compile(1)


def test_the_centre_has_a_scale_for_each_input():
    """τ = (shape + γ/2) / (rate + Σ w²/2) of each input, γ = Σ (1 − τ var w), var w of Λ⁻¹: MacKay's fixed point."""
    with bp.isolated(0):
        x, schema = torch.randn(90, 3), bp.Schema("classification", (3,), classes=("a", "b", "c"))
        y = torch.distributions.Categorical(logits=4 * torch.stack([x[:, 0], x[:, 1], 0 * x[:, 2]], 1)).sample()
        target = Potential(bp.MeanField(hidden=(), prior="ard:0.5,0.01").model(schema), x, y)
        u = centre_of(target, curvature := Curvature(target))
    variances = torch.linalg.inv(curvature.precision(u, summed)).diagonal()
    tau, w, variances = (v[:9].view(3, 3) for v in (curvature.prior_precision, u, variances))
    fixed = (0.5 + (1 - tau * variances).sum(0) / 2) / (0.01 + w.square().sum(0) / 2)
    assert (tau == tau[0]).all() and (tau[0] / fixed).log().abs().max() < 0.1
    assert tau[0, 2] > 10 * tau[0, :2].max()  # of the input that says nothing


SHAPE, RATE = 1.5, 0.7
GAMMA = f"gamma:{SHAPE},{RATE}"


def test_scales_of_gamma_priors_are_coordinates_that_integrate_out():
    """∫ p(v, t) |∂v/∂w| dt = p(w | data) but for a constant, numerically; t is drawn from its distribution given w."""
    with bp.isolated(0):
        x, y, schema = torch.randn(8, 2), torch.randn(8), bp.Schema("regression", (2,))
        assert type(coordinates(Potential(bp.MeanField(hidden=(3,), prior=GAMMA).model(schema), x, y))) is NonCentred
        target = Potential(bp.MeanField(hidden=(), prior=GAMMA, noise=0.5, bias=False).model(schema), x, y)
        u = target.prior_draws(6)
        plain, target.space = target(u)[0], NonCentred(target)
        given, found = target.space.inverse(u[:1].expand(4000, -1)), target.prior_draws(4000)
    torch.testing.assert_close(target.space.forward(given), u[:1].expand(4000, -1))
    rates, integrals = (RATE + u.square().sum(1) / 2).tolist(), []
    for w, density, rate in zip(u, plain, rates, strict=True):

        def p(t, w=w, density=density):
            z = torch.cat([w * math.exp(-t), torch.tensor([t])])[None]
            return math.exp((target(z)[0] - density).item() - 2 * t)

        integrals.append(quad(p, -6, 8, points=[0.5 * math.log(rate / (SHAPE + 1))])[0])
    np.testing.assert_allclose(integrals, integrals[0], rtol=1e-4)
    for t, distribution in (
        (given[:, 2], gamma(SHAPE + 1, scale=1 / rates[0])),
        (found[:, 2], gamma(SHAPE, scale=1 / RATE)),
    ):
        assert kstest((-2 * t).exp(), distribution.cdf).pvalue > 1e-3
    assert kstest(found[:, :2].flatten(), norm.cdf).pvalue > 1e-3


@pytest.mark.parametrize("prior", [GAMMA, f"ard:{SHAPE},{RATE}/{GAMMA}"])
def test_nuts_samples_gamma_priors_where_rows_say_nothing(prior):
    """shape · |w|² / (rate · n), w the n weights of a scale, has the F distribution of n and 2 · shape."""
    data = bp.dataset(np.eye(4), np.arange(4.0))
    entry, method = bp.MeanField(hidden=(3,), prior=prior, noise=1e4), bp.NUTS(draws=100, warmup=300, thin=3)
    posterior = bp.fit(entry, data, method, seed=0, progress=False)
    sizes = []
    for site, w in posterior.chains.items():
        by_input = site == "layers.0.weight" and prior != GAMMA
        for one in w.unbind(-1) if by_input else [w]:
            size, found = one[0, 0].numel(), one.flatten(2).square().sum(2) * SHAPE / RATE
            assert arviz.ess({"x": found.log().numpy()})["x"].item() > 200
            assert kstest((found / size).flatten(), f(size, 2 * SHAPE).cdf).pvalue > 1e-3
            sizes.append(size)
    assert sizes == ([12] if prior == GAMMA else [3] * 4) + [3, 3, 1]
