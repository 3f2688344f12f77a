"""Where chains start: apart, at the prior, at modes of their own; and fits that start at an earlier posterior."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conjugate import correlated
from monte_carlo import tensors
from refused import refuses
from scipy.stats import kstest

import bnn_pyro as bp
from bnn_pyro.checkpoint import Run
from bnn_pyro.inference.coordinates import coordinates
from bnn_pyro.inference.members import optimised
from bnn_pyro.inference.potential import Potential, Space
from bnn_pyro.inference.sampler import STARTS, starting_points
from bnn_pyro.zoo.auto import set_up


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


def test_jitter_is_the_priors_width_around_initial_values_and_prior_starts_are_its_draws():
    problem, num = correlated(num=10, prior_scale=0.5), 300
    potential, z = starts(problem, "jitter", num, jitter=2.0)
    offset = flat(potential, z) - torch.cat([v.flatten() for v in potential.model.initial.values()])
    assert offset.std() == pytest.approx(1.0, rel=0.1) and offset.mean().abs() < 4 / math.sqrt(offset.numel())
    _, same = starts(problem, "jitter", 2, jitter=0.0)
    assert torch.equal(same[0], same[1])
    unit = flat(*starts(correlated(num=10, prior_scale=0.5), "prior", 400)) / 0.5
    assert kstest(unit.flatten().numpy(), "norm").pvalue > 1e-4


def test_chains_of_a_linear_model_start_twice_as_far_apart_as_its_posterior_is_wide():
    problem = correlated(num=40, noise=1.4, prior_scale=0.3)
    potential, z = starts(problem, "jitter", num := 300, jitter=0.5, white=True)
    offset = (flat(potential, z) - problem.mean) @ torch.linalg.cholesky(problem.precision)  # in standard deviations
    assert offset.mean(0).abs().max() < 4 / math.sqrt(num)
    assert (offset.mT.cov() - torch.eye(offset.shape[1])).abs().max() < 4 * math.sqrt(2 / num)


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


@pytest.mark.parametrize("how", ["jitter", "prior", "map"])
def test_starts_under_gamma_priors_are_a_chains_own(how, monkeypatch):
    """Of these some coordinates are drawn; lp of a draw is its log joint all the same."""
    monkeypatch.setattr("bnn_pyro.inference.sampler.STEPS", 100)
    problem, entry = correlated(num=20), bp.MeanField(hidden=(2,), prior="gamma:2,1")
    potential, z = starts(problem, how, 3, entry, white=True)
    assert z.shape == (3, potential.size + 4)
    assert torch.equal(z[:2], starts(problem, how, 2, entry, white=True)[1])
    posterior = bp.fit(entry, problem.data, bp.HMC(draws=3, warmup=5, chains=2, start=how), seed=0, progress=False)
    potential.space = Space()
    found = potential(potential.position({site: v.flatten(0, 1) for site, v in posterior.chains.items()}))[0]
    torch.testing.assert_close(found, posterior.stats["lp"].flatten(), rtol=1e-5, atol=1e-4)


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
        refuses("no start where the log density .*are finite .start=", starting_points, Walled(-100.0), without, 2)


RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 2))
Y = X @ [1.0, -0.5] + 0.3 * RNG.normal(size=200)
FEW, MORE = (bp.dataset(X[:num], Y[:num], split=0.0, validation=0) for num in (60, 200))
NET = bp.MeanField(hidden=(4,))
#: Steps that hardly move: what is left is the start.
STILL = dict(epochs=1, lr=1e-9, batch_size=0, patience=0)


def fit(method, data=FEW, entry=NET, **options):
    return bp.fit(entry, data, method, progress=False, device="cpu", **options)


small = partial(bp.Ensemble, cores=1)
METHODS = {
    "svi": (NET, bp.SVI(epochs=40), bp.SVI(**STILL)),
    "map": (NET, bp.MAP(epochs=40, patience=0), bp.MAP(**STILL)),
    "ensemble": (bp.MLP(hidden=(4,)), small(epochs=40, members=2, patience=0), small(members=3, **STILL)),
}


@pytest.mark.parametrize(("entry", "method", "still"), METHODS.values(), ids=METHODS)
def test_it_starts_where_the_earlier_one_ended(entry, method, still):
    first = fit(method, entry=entry)
    again, cold = fit(still, MORE, entry, start=first), fit(still, MORE, entry)
    for site, value in tensors(first).items():
        torch.testing.assert_close(tensors(again)[site][: len(value)], value, atol=1e-5, rtol=1e-5)
    assert any((tensors(cold)[s][: len(v)] - v).abs().max() > 0.05 for s, v in tensors(first).items())
    assert again.provenance["start"]["fingerprint"] == FEW.fingerprint and "start" not in cold.provenance
    assert torch.isin(first.rows, again.rows).all() and len(again.rows) >= 200


def test_the_optimum_is_that_of_the_new_rows(tmp_path):
    """Of a linear network with a convex log joint, from wherever it starts; and a start is part of what is resumed."""
    linear = bp.MeanField(hidden=(), noise=0.3, prior="normal:1")
    method = bp.MAP(epochs=800, batch_size=0, lr=0.05, patience=0)
    first = fit(method, entry=linear)
    cold, warm = fit(method, MORE, linear), fit(method, MORE, linear, start=first, out=tmp_path)
    for site, value in cold.chains.items():
        torch.testing.assert_close(warm.chains[site], value, atol=1e-3, rtol=1e-3)
    same = fit(method, MORE, linear, start=first, out=tmp_path, resume=True)
    assert torch.equal(same.chains["layers.0.weight"], warm.chains["layers.0.weight"])
    refuses("holds a finished posterior of other settings", fit, method, MORE, linear, out=tmp_path, resume=True)


def test_points_start_at_the_mean_of_a_q_and_who_may_not():
    q = fit(bp.SVI(epochs=40))
    for start in (q, q.at_mean_weights()):
        point, mean = fit(bp.MAP(**STILL), MORE, start=start).chains, q.at_mean_weights().chains
        assert all(torch.allclose(point[site], value, atol=1e-5, rtol=1e-5) for site, value in mean.items())
    q, point = fit(bp.SVI(epochs=2)), fit(bp.MAP(epochs=2, patience=0))
    other = bp.dataset(X[:60], (Y[:60] > 0).astype(int), split=0.0, validation=0)
    for message, call in (
        ("nuts does not start from a posterior; svi, map", lambda: fit("nuts", start=q)),
        ("svi starts at a q, and this posterior by map has none", lambda: fit("svi", start=point)),
        ("same variant, inputs, task and classes; this is of mean-field", lambda: fit("svi", other, start=q)),
        ("not a str", lambda: fit("map", start="runs/first")),
        ("other shapes", lambda: fit("svi", entry=bp.MeanField(hidden=(5,)), start=q)),
        ("other shapes", lambda: fit("map", entry=bp.MeanField(hidden=(5,)), start=point)),
    ):
        refuses(message, call)


#: (noise, curvature, rows, whether targets are called linear): too few; noise alone; a curve in what is left, of rows
#: that tell it, or of few; so little left that it does not matter; more rows than ten for each input and four.
CASES = ((0.1, 0, 9, False), (0.1, 0, 12, True), (3, 0, 60, False), (0.3, 0, 80, True), (0.1, 0.2, 80, False),
         (0.1, 0.2, 20, True), (0.01, 0.01, 80, True), (0.3, 0, 95, False))  # fmt: skip


def test_targets_that_are_nearly_linear_take_no_hidden_layers():
    x, e = torch.randn(100, 6, generator=torch.Generator().manual_seed(0)).split([5, 1], 1)
    for noise, curve, rows, linear in CASES:
        y = x.sum(1) + curve * x[:, 0].square() + noise * e[:, 0]
        data = bp.dataset(x[:rows], y[:rows], split=0.0, validation=0)
        setup = set_up("auto", None, lambda data=data: data)
        assert (setup.entry.hidden == ()) == (setup.inference == "nuts") == linear, (noise, curve, rows)
        assert ("nearly linear" in setup.auto["reason"]) == linear
        assert set_up("auto", None, lambda data=data: data, settings={"hidden": (9,)}).entry.hidden == (9,)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_chain_of_a_linear_model_of_few_rows_is_lost(seed):
    """Where a trajectory leaves the numbers, compiled code counts it as rejected."""
    with bp.isolated(seed):
        x = torch.randn(5, 1)
        y = x[:, 0] + 3 + 0.05 * torch.randn(5)
    method = bp.NUTS(cores=1, compiled="yes", draws=100)
    posterior = fit(method, bp.dataset(x, y, split=0.0, validation=0), bp.MeanField(hidden=()), seed=seed)
    assert "stopped" not in posterior.provenance and len(posterior.stats["lp"]) == 4
