"""ChEES-HMC where the posterior is known, or another sampler's; what it learns; what bad luck gets."""

from dataclasses import replace
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from conjugate import correlated, dataset
from monte_carlo import check_by_chain, fit, interrupted, moments, run_method, weights
from torch import nn

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.inference import chees
from bnn_pyro.inference.chees import Adaptation, Chains, Transition
from bnn_pyro.inference.potential import Potential

PROBLEM = correlated(inputs=2, noise=5.0, y_shift=40.0, y_scale=8.0)
SMALL = bp.ChEES(chains=64, draws=50, warmup=150)
EMPTY = dataset(torch.zeros(1, 1), torch.zeros(1), bp.Schema("regression", (1,)))


class Density(nn.Module):
    """One latent site "w" of a given law, and a target that tells nothing of it."""

    def __init__(self, law, start):
        super().__init__()
        self.law, self.initial = law, {"w": start}

    def forward(self, x, y=None):
        w = pyro.sample("w", self.law)
        with pyro.plate("data", len(x), dim=-1):
            return pyro.sample("y", dist.Normal(0.0 * w.sum(-1, keepdim=True), 1.0), obs=y)


def sample(law, start, method, seed=0):
    with bp.isolated(seed):
        return method.run(Density(law, start), None, EMPTY, seed=seed)


@pytest.mark.parametrize("kind", ["correlated", "ill-conditioned"])
def test_gaussian(kind):
    size = 8
    scale = torch.logspace(-2, 1, size) if kind == "ill-conditioned" else torch.ones(size)
    correlation = torch.full((size, size), 0.95 if kind == "correlated" else 0.0)
    correlation.fill_diagonal_(1.0)
    root = scale[:, None] * torch.linalg.cholesky(correlation)
    law = dist.MultivariateNormal(torch.arange(8.0), scale_tril=root)
    posterior = sample(law, torch.arange(8.0) + 20 * scale, replace(SMALL, start="jitter", jitter=2.0))
    unit = torch.linalg.solve_triangular(root.double(), (weights(posterior) - torch.arange(8.0)).mT, upper=False).mT
    values, exact = moments(unit, 0.0, torch.eye(size))
    error = check_by_chain(values.mean(1), exact)
    assert error.max() < 0.1, "too noisy to tell"
    assert posterior.stats["diverging"].sum() == 0


def test_a_transition_leaves_exact_draws_exact():
    """At a step size near its limit, where four of ten trajectories must be refused."""
    law = dist.Normal(torch.zeros(2), torch.ones(2)).to_event(1)
    with bp.isolated(0):
        potential = Potential(Density(law, torch.zeros(2)), EMPTY.x_train, EMPTY.y_train, 1.0)
        z = torch.randn(4000, 2, dtype=torch.float64)
        chains = Chains(z, *potential(z))
        moved = chains.move(potential, torch.ones(2, dtype=torch.float64), torch.full_like(z[:, 0], 1.5), 1)
    assert moved.acceptance.mean() < 0.7 and moved.end.var() > 2
    assert chains.z.var().item() == pytest.approx(1, abs=0.06)  # 4 standard errors


def test_shares_of_a_trajectory():
    assert [chees._van_der_corput(i) for i in range(1, 8)] == [0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]


def adapt(learned, z, share=1.0):
    """One iteration whose trajectories grow by a half."""
    rate = torch.ones(len(z), dtype=torch.float64)
    learned.learn(Transition(z, 1.5 * z, z, z, rate, rate, rate), share, 0.65, 10.0)


def test_the_gradient_of_chees_is_with_respect_to_the_whole_length():
    """Of a trajectory of the share h of T, d/dT is h times that of its own length (equation 9)."""
    z = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states = [Adaptation.begin(torch.ones(8).double(), z, torch.ones(2).double()) for _ in range(2)]
    for state, share in zip(states, (1.0, 0.5), strict=True):
        adapt(state, z, share)
    assert states[1].square == pytest.approx(states[0].square / 4)


def test_the_mass_forgets_the_first_iterations():
    """70 % of the weight is that of the last third of the iterations."""
    z = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    learned = Adaptation.begin(torch.ones(2).double(), z, torch.ones(1).double())
    for iteration in range(300):
        adapt(learned, z if iteration < 200 else 2 * z)
    assert learned.variance.item() == pytest.approx(0.3 * 1 + 0.7 * 4, abs=0.1)


def test_not_a_number_is_a_divergence(monkeypatch):
    with bp.isolated(0):
        potential = Potential(PROBLEM.entry().model(PROBLEM.schema), PROBLEM.data.x_train, PROBLEM.data.y_train)
        z = potential.prior_draws(6)
        chains, evaluate = Chains(z, *potential(z)), potential.evaluate

        def broken(z):
            density, gradient = evaluate(z)
            gradient[2], density[4] = torch.nan, torch.inf
            return density, gradient

        monkeypatch.setattr(potential, "evaluate", broken)
        moved = chains.move(potential, torch.ones(potential.size).double(), torch.full((6,), 0.01).double(), 3)
    assert moved.diverging.tolist() == [0, 0, 1, 0, 1, 0] and moved.acceptance[[2, 4]].tolist() == [0, 0]
    assert torch.equal(chains.z[[2, 4]], z[[2, 4]]) and torch.isfinite(chains.density).all()
    assert not torch.equal(chains.z[[0, 1, 3, 5]], z[[0, 1, 3, 5]])


TINY = bp.ChEES(chains=6, superchains=3, draws=6, warmup=12, thin=2)


def test_superchains_lp_is_the_log_joint_and_thinning_adds_up():
    posterior = fit(PROBLEM.entry(), PROBLEM.data, TINY)
    with bp.isolated(0):
        potential = Potential(posterior.model, PROBLEM.data.x_train, PROBLEM.data.y_train)
    density, _ = potential(potential.position({site: w.flatten(0, 1) for site, w in posterior.chains.items()}))
    torch.testing.assert_close(density, posterior.stats["lp"].flatten(), rtol=1e-4, atol=0.01)
    assert (posterior.stats["n_steps"] >= 2).all()  # two transitions a draw
    assert posterior.stats["superchain"].tolist() == [[k] * 6 for k in (0, 0, 1, 1, 2, 2)]


def test_a_checkpoint_of_an_earlier_version_goes_on_to_the_same_draws(tmp_path):
    """It had the chains, and what they learned, beside the record."""

    run, part = partial(run_method, PROBLEM.entry(), PROBLEM.data, TINY), Checkpoint(tmp_path / "part")
    whole = run(checkpoint=Checkpoint(tmp_path / "whole"))
    with interrupted(10), part:
        run(checkpoint=part)
    state = part.load()
    kernel = state.pop("kernel")
    del kernel["done"]
    part.save(kernel | state)
    again = run(checkpoint=Checkpoint(tmp_path / "part"))
    assert all(torch.equal(w, whole.chains[site]) for site, w in again.chains.items())
