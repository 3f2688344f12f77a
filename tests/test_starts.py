"""Where chains start: apart, at the prior, at modes of their own, or where SVI found the posterior to be."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from conjugate import correlated
from scipy.stats import kstest

import bnn_pyro as bp
from bnn_pyro.checkpoint import Run
from bnn_pyro.inference.linear import coordinates
from bnn_pyro.inference.members import optimised
from bnn_pyro.inference.potential import Potential, Space
from bnn_pyro.inference.sampler import STARTS, starting_points


def starts(problem, how, num=8, entry=None, jitter=1.0, seed=3, white=False, temperature=1.0, method=bp.NUTS):
    """(potential, weights of the starts (num, P))."""
    entry = problem.entry() if entry is None else entry
    with bp.isolated(0):
        model = entry.model(problem.schema)
        potential = Potential(model, problem.data.x_train, problem.data.y_train, temperature)
        if white:
            potential.space = coordinates(potential)
        z = method(start=how, jitter=jitter)._starts(potential, problem.data, Run(seed))(num)
    return potential, z


def flat(potential, z):
    return torch.cat([v.flatten(1).double() for v in potential.weights(z).values()], 1)


@pytest.mark.parametrize("white", [False, True], ids=["plain", "whitened"])
def test_jitter_is_the_priors_width_around_the_initial_values(white):
    problem, num = correlated(num=10, prior_scale=0.5), 300
    potential, z = starts(problem, "jitter", num, jitter=2.0, white=white)
    offset = flat(potential, z) - torch.cat([v.flatten() for v in potential.model.initial.values()])
    assert offset.std() == pytest.approx(1.0, rel=0.1) and offset.mean().abs() < 4 / math.sqrt(offset.numel())
    _, same = starts(problem, "jitter", 2, jitter=0.0, white=white)
    assert torch.equal(same[0], same[1])


def test_prior_starts_are_draws_of_the_prior():
    unit = flat(*starts(correlated(num=10, prior_scale=0.5), "prior", 400)) / 0.5
    assert kstest(unit.flatten().numpy(), "norm").pvalue > 1e-4


@pytest.mark.parametrize(("white", "temperature"), [(False, 0.25), (True, 1.0)], ids=["plain", "whitened"])
def test_map_starts_are_at_the_mode(white, temperature):
    """Of a linear model there is one, and it is the mean: of the posterior at the temperature that is sampled."""
    problem = correlated(num=40, noise=1.4, prior_scale=0.3)
    potential, z = starts(problem, "map", 3, white=white, temperature=temperature)
    exact = replace(problem, noise=1.4 * math.sqrt(temperature))
    scale = torch.linalg.inv(exact.precision).diagonal().sqrt()
    assert ((flat(potential, z) - exact.mean) / scale).abs().max() < 0.05


@pytest.mark.parametrize("how", STARTS)
def test_starts_are_finite_and_repeat(how, monkeypatch):
    monkeypatch.setattr("bnn_pyro.inference.sampler.STEPS", 100)
    monkeypatch.setattr("bnn_pyro.inference.sampler.optimised", partial(optimised, epochs=3))
    problem, entry = correlated(num=20), bp.MeanField(hidden=(2,))
    potential, z = starts(problem, how, 3, entry)
    assert z.shape == (3, potential.size) and z.dtype == torch.float64
    assert all(torch.isfinite(value).all() for value in potential(z))
    assert torch.equal(z, starts(problem, how, 3, entry)[1])
    assert not torch.equal(z, starts(problem, how, 3, entry, seed=4)[1]) and not torch.equal(z[0], z[1])
    if how in ("jitter", "prior"):  # a chain's start is its own
        assert torch.equal(z[:2], starts(problem, how, 2, entry)[1])


def test_wide_networks_start_from_members(monkeypatch):
    monkeypatch.setattr("bnn_pyro.inference.sampler.optimised", partial(optimised, epochs=3))
    problem = correlated(num=20)
    for hidden, method, how in (
        ((20, 20), bp.NUTS, "jitter"),
        ((20,), bp.ChEES, "prior"),
        ((4, 21), bp.HMC, "members"),
        ((21,), bp.ChEES, "members"),
        ((), bp.NUTS, "jitter"),
    ):
        auto, explicit = (
            starts(problem, one, 2, bp.MeanField(hidden=hidden), method=method)[1] for one in ("auto", how)
        )
        assert torch.equal(auto, explicit), (hidden, method)


class Walled:
    """A standard normal that ends at ``wall``: no density beyond."""

    def __init__(self, wall):
        self.wall, self.initial, self.space, self.size = wall, torch.zeros(2, dtype=torch.float64), Space(), 2

    def prior_draws(self, num):
        return torch.randn(num, 2, dtype=torch.float64)

    def log_density(self, z):
        return torch.where(z[:, 0] > self.wall, -math.inf, -0.5 * z.square().sum(1))

    def __call__(self, z):
        return self.log_density(z), -z


@pytest.mark.parametrize("how", ["jitter", "prior"])
def test_a_start_without_density_is_drawn_again(how):
    z = starting_points(Walled(-1.0), how, 20)
    assert (z[:, 0] <= -1).all() and z[:, 0].std() > 0.1
    for without in (how, "map"):
        with pytest.raises(bp.UserError, match=r"chain 1 has no start where the log density .*are finite \(start="):
            starting_points(Walled(-100.0), without, 2)
