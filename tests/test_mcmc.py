"""HMC and NUTS where the posterior is known: linear regression in all coordinates, and a learned noise."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conjugate import correlated, dataset
from monte_carlo import check, check_gaussian, fit, weights
from scipy.stats import norm

import bnn_pyro as bp
from bnn_pyro.inference import linear as whitening
from bnn_pyro.inference import sampler as samplers
from bnn_pyro.inference.potential import Space

UNITS = dict(noise=5.0, y_shift=40.0, y_scale=8.0)
SAMPLERS = {
    "nuts": bp.NUTS(chains=2, draws=500, warmup=150, compiled="yes"),
    "hmc": bp.HMC(chains=2, draws=600, warmup=150, compiled="yes"),
}


# -- the right posterior ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "space"),
    [("nuts", "hessian"), ("hmc", "kronecker"), ("nuts", "weights"), ("hmc", "weights")],
)
def test_linear_regression(name, space, monkeypatch):
    """The whole covariance, in units of a target that is not standardised, in whatever coordinates.

    In those of the weights these correlate.
    """
    sampler, problem = SAMPLERS[name], correlated(inputs=2, **UNITS)
    if space == "kronecker":
        monkeypatch.setattr(whitening, "DENSE", 0)
    elif space != "hessian":
        monkeypatch.setattr(samplers, "coordinates", lambda *_: Space())
        sampler, problem = replace(sampler, draws=800, warmup=300), correlated(inputs=3, num=30, noise=2.0)
    posterior = fit(problem.entry(), problem.data, sampler)
    check_gaussian(problem, posterior)
    if space in ("hessian", "kronecker"):
        assert posterior.stats["diverging"].sum() == 0


def test_a_learned_noise():
    """One weight and log σ against a grid: the site beside the weights, under a linear and a whitened kernel alike."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(15, 1, generator=g)
    y = (1.2 * x[:, 0] + 0.8 * torch.randn(15, generator=g)) * 2 + 5
    data = dataset(x, y, bp.Schema("regression", (1,), y_shift=5.0, y_scale=2.0))
    posterior = fit(bp.MeanField(hidden=(), bias=False, prior="normal:1"), data, SAMPLERS["nuts"])
    w, s = np.meshgrid(np.linspace(-2, 4, 801), np.linspace(-3, 2, 801), indexing="ij")
    z = (y.numpy() - 5) / 2 - np.multiply.outer(w, x[:, 0].numpy())
    log_p = norm.logpdf(z / np.exp(s)[..., None]).sum(-1) - 15 * s + norm.logpdf(w) + norm.logpdf(s, -1, 1)
    mass = np.exp(log_p - log_p.max())
    mass /= mass.sum()
    draws = weights(posterior).numpy()
    assert draws.shape[-1] == 2
    tests = [lambda w, s: w, lambda w, s: s, lambda w, s: w * w, lambda w, s: s * s, lambda w, s: w * s]
    check(
        np.stack([f(*np.moveaxis(draws, 2, 0)) for f in tests], -1), np.array([(mass * f(w, s)).sum() for f in tests])
    )


def test_many_rows_do_not_cost_acceptance():
    """The sum over 50,000 rows is exact enough: energies a float32 sum could not tell apart are."""
    problem = correlated(num=50_000, inputs=2)
    posterior = fit(problem.entry(), problem.data, bp.NUTS(chains=1, draws=60, warmup=60))
    assert posterior.stats["acceptance_rate"].mean() > 0.7 and posterior.stats["n_steps"].max() <= 31
    scale = torch.linalg.inv(problem.precision).diagonal().sqrt()
    assert ((weights(posterior).mean((0, 1)) - problem.mean) / scale).abs().max() < 0.8


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_recorded(name):
    problem = correlated(num=40)
    posterior = fit(problem.entry(), problem.data, replace(SAMPLERS[name], draws=400))
    stats = posterior.stats
    own = {"nuts": "tree_depth", "hmc": "trajectory_length"}[name]
    assert set(stats) == {"acceptance_rate", "diverging", "energy", "lp", "n_steps", "step_size", own}
    assert all(v.shape == (2, 400) and v.dtype == torch.float64 for v in stats.values())
    assert ((stats["acceptance_rate"] > -1e-9) & (stats["acceptance_rate"] <= 1 + 1e-9)).all()
    # lp is the log joint of the stored draw: quadratic around the mean, from its value there.
    w = weights(posterior) - problem.mean
    drop = 0.5 * torch.einsum("cdi,ij,cdj->cd", w, problem.precision, w)
    top = stats["lp"] + drop
    assert (top - top.mean()).abs().max() < 1e-3
    # The energy where a trajectory starts: that of the draw before, and a kinetic energy of ½ χ²(P).
    kinetic = stats["energy"][:, 1:] + stats["lp"][:, :-1]
    check(2 * kinetic.numpy()[..., None], np.array([w.shape[-1]]))
    assert stats["step_size"].unique().numel() == 2
    if name == "nuts":
        depth, steps = stats["tree_depth"], stats["n_steps"]
        assert (steps < 2 ** (depth + 1)).all() and (steps >= 2**depth - 1).all()
    else:
        assert torch.allclose(stats["trajectory_length"], stats["n_steps"] * stats["step_size"])
