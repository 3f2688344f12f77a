"""Samplers of many chains at once (SGHMC, SGLD, ChEES-HMC) where the answer is known; what their runs are made of."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conjugate import correlated
from monte_carlo import check_by_chain, fit, goes_on, interrupted, moments, run_method, same, weights
from refused import refuses

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.checks.integration import stationary_covariance
from bnn_pyro.inference import chees, sghmc
from bnn_pyro.inference.chees import Adaptation, Chains, Transition
from bnn_pyro.inference.mini_batches import Batches, draws_due
from bnn_pyro.inference.potential import Potential, log_likelihood

CHAINS, FRICTION = 400, 0.1
PROBLEM = correlated(num=60, inputs=3)
SMALL = bp.SGHMC(
    batch_size=0, start="jitter", epochs=1400, lr=0.004, chains=CHAINS, friction=FRICTION, burn_in=400, max_draws=200
)
MINI = replace(SMALL, batch_size=15, epochs=350, burn_in=100)
LARGE = replace(SMALL, epochs=700, burn_in=200, lr=0.15)


def sample(problem, method, **settings):
    return fit(problem.entry(**settings), problem.data, method)


def check_gaussian(posterior, mean, covariance):
    values, exact = moments(weights(posterior), mean, covariance)
    error = check_by_chain(values.mean(1), exact)
    assert error.max() < 0.025, f"too noisy to tell: {error.max():.3f}"


def test_the_bias_is_the_one_that_theory_tells_and_none_of_small_steps_on_mini_batches():
    """Stationary covariance of the recursion, and the kinetic temperature: the same factor in every direction."""
    values, vectors = torch.linalg.eigh(PROBLEM.precision)
    factor = 1 / (1 - LARGE.lr / 60 * values / (4 - 2 * FRICTION))
    assert factor.max() > 1.15
    posterior = sample(PROBLEM, LARGE)
    check_gaussian(posterior, PROBLEM.mean, vectors @ torch.diag(factor / values) @ vectors.T)
    temperature = torch.tensor(posterior.trace["kinetic_temperature"][200:]).mean().item()
    assert temperature == pytest.approx(factor.mean().item(), rel=0.01) and temperature > 1.05
    check_gaussian(sample(PROBLEM, MINI), PROBLEM.mean, torch.linalg.inv(PROBLEM.precision))


def test_batches_belong_to_seed_epoch_and_chain():
    x, y = torch.arange(14.0)[:, None], torch.arange(14.0)
    batches = Batches(x, y, 4, 2, 3)
    steps = list(batches.steps(0, 8))
    assert batches.per_epoch == 4 and all(a.shape == (2, 3, 1) and torch.equal(a[..., 0], b) for a, b in steps)
    again = list(batches.steps(6, 8))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(steps[6:], again, strict=True))
    for chain in range(2):
        rows = torch.cat([b[chain] for _, b in steps[:4]])
        assert len(rows.unique()) == 12
    assert not torch.equal(steps[0][1][0], steps[0][1][1]) and not torch.equal(steps[0][1], steps[4][1])


@pytest.mark.parametrize(("burn_in", "num"), [(20, 8), (20, 80), (0, 1000), (99, 1)])
def test_draws_are_evenly_spaced_after_the_burn_in(burn_in, num):
    due = np.flatnonzero(draws_due(100, burn_in, num))
    assert len(due) == min(num, 100 - burn_in) and due[0] >= burn_in and due[-1] == 99
    assert len(set(np.diff(due))) <= 1


DATA = replace(PROBLEM.data, x_val=PROBLEM.data.x_train[:20] + 0.1, y_val=PROBLEM.data.y_train[:20])


def test_what_is_recorded():
    method = bp.SGHMC(lr=0.01, start="jitter", epochs=30, batch_size=20, chains=3, burn_in=10, max_draws=16)
    posterior = fit(PROBLEM.entry(), DATA, method)
    draws, trace = posterior.chains["layers.0.weight"].shape[1], posterior.trace
    assert posterior.stats["log_joint"].shape == (3, draws) and 8 <= draws <= 16  # 30 were due
    assert {"epoch", "step_size", "kinetic_temperature", "draws", "validation_nll", "log_joint"} == set(trace)
    assert all(len(values) == 30 and np.isfinite(values).all() for values in trace.values())
    assert trace["draws"][9] == 0 and trace["draws"][-1] == 3 * draws and trace["step_size"] == [0.01] * 30
    mixture = bp.predict(posterior, DATA.x_val, num_draws=10_000).log_prob(DATA.y_val)
    assert trace["validation_nll"][-1] == pytest.approx(-mixture.mean().item(), rel=1e-4)


def test_chains_start_around_the_initial_weights_and_burn_in_is_a_fifth_of_the_epochs():
    """At a step size of almost 0 the draws are the starts, and every line of the trace scores the same mixture."""
    method = bp.SGHMC(lr=1e-14, start="jitter", epochs=10, batch_size=20, chains=500, jitter=0.7)
    posterior = fit(PROBLEM.entry(), DATA, method)
    assert [draws > 0 for draws in posterior.trace["draws"]] == [False] * 2 + [True] * 8
    nll = posterior.trace["validation_nll"]
    assert nll[0] == pytest.approx(nll[-1], abs=1e-4)
    initial = posterior.model.initial
    offset = torch.cat([(posterior.chains[s][:, 0] - initial[s].detach()).flatten(1) for s in initial], 1)
    assert offset.std() == pytest.approx(0.7 * PROBLEM.prior_scale, rel=0.08)  # 4 standard errors


def test_a_run_that_diverges_or_has_no_proper_prior_says_so():
    for hidden in ((), (3,)):
        refuses("smaller --lr, such as 10", sample, PROBLEM, bp.SGHMC(lr=100.0, epochs=300, burn_in=10), hidden=hidden)
    refuses("proper prior", sample, PROBLEM, bp.SGHMC(epochs=10), prior="log-uniform")


# -- what is found and chosen ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [bp.SGHMC, bp.SGLD])
def test_the_step_size_that_is_found_is_that_of_the_rule(kind):
    """With the exact curvature of the stiffest direction, whose variance is then too large by 1/(1 − 0.03)."""
    alpha, share = (0.05, 1.0) if kind is bp.SGHMC else (1.0, 0.5)
    posterior = sample(PROBLEM, kind(chains=CHAINS, epochs=3600, burn_in=1200, jitter=0.3))
    eta = share * posterior.trace["step_size"][-1] / 60
    largest = torch.linalg.eigvalsh(PROBLEM.precision).max().item()
    assert eta * largest == pytest.approx(0.03 * (4 - 2 * alpha), rel=0.02)
    check_gaussian(posterior, PROBLEM.mean, stationary_covariance(PROBLEM.precision, eta, alpha))
    batches = sample(PROBLEM, kind(chains=20, epochs=60, batch_size=20))
    eta = share * batches.provenance["schedule"]["lr"] / 60
    assert eta * largest == pytest.approx(min(0.03 * (4 - 2 * alpha), 4 * alpha * share / 3), rel=0.5)


def test_a_divergence_in_the_burn_in_begins_again_and_a_stopped_run_goes_on_all_the_same(tmp_path, monkeypatch):
    """As where the curvature that was found is too small by far."""
    monkeypatch.setattr(sghmc, "stiffest", lambda log_joint, w, x, y: torch.full((len(w),), 0.05))
    entry = PROBLEM.entry(hidden=(3,))
    method = bp.SGHMC(start="jitter", epochs=150, burn_in=120, batch_size=20, chains=2, max_draws=20)
    whole = fit(entry, PROBLEM.data, method, seed=1)
    assert whole.trace["epoch"][-1] == 150 and np.mean(whole.trace["kinetic_temperature"][-50:]) < 3
    assert goes_on(whole, (3, 40, 300), fit, entry, PROBLEM.data, method, seed=1, out=tmp_path)


def test_chains_of_a_network_start_from_members_which_validation_rows_do_not_stop():
    entry = PROBLEM.entry(hidden=(3,))
    posterior = bp.fit(entry, DATA, bp.SGHMC(lr=1e-14, epochs=5, chains=3), progress=False)
    model, first = posterior.model, {site: value[:, 0] for site, value in posterior.chains.items()}
    fit_of = lambda w: log_likelihood(model, w, DATA.x_train, DATA.y_train).mean(1)  # noqa: E731
    assert (fit_of(first) > fit_of({site: value[None] for site, value in model.initial.items()}) + 0.3).all()
    assert len(posterior.rows) == len(DATA.x_train)


# -- ChEES-HMC: where the posterior is known, what it learns, what bad luck gets ------------------------------------
def test_a_transition_leaves_exact_draws_exact():
    """Of the prior, at a step size near its limit, where most trajectories must be refused."""
    with bp.isolated(0):
        potential = Potential(PROBLEM.entry().model(PROBLEM.schema), PROBLEM.data.x_train, PROBLEM.data.y_train, 1e12)
        chains = Chains(z := potential.prior_draws(4000), *potential(z))
        variance = torch.full((potential.size,), PROBLEM.prior_scale**2, dtype=torch.float64)
        moved = chains.move(potential, variance, torch.full_like(z[:, 0], 1.5), 1)
    assert moved.acceptance.mean() < 0.7 and moved.end.var() > 2 * variance[0]
    assert chains.z.var().item() == pytest.approx(variance[0].item(), rel=0.05)  # 4 standard errors


def adapt(learned, z, share=1.0):
    """One iteration whose trajectories grow by a half."""
    rate = torch.ones(len(z), dtype=torch.float64)
    learned.learn(Transition(z, 1.5 * z, z, z, rate, rate, rate), share, 0.65, 10.0)


def test_what_chees_learns_shares_of_a_trajectory_its_length_and_the_mass():
    """Of a trajectory of the share h of T, d/dT is h times that of its own length (equation 9)."""
    z = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states = [Adaptation.begin(torch.ones(8).double(), z, torch.ones(2).double()) for _ in range(2)]
    for state, share in zip(states, (1.0, 0.5), strict=True):
        adapt(state, z, share)
    assert states[1].square == pytest.approx(states[0].square / 4)
    # 70 % of the weight is that of the last third of the iterations.
    z = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    learned = Adaptation.begin(torch.ones(2).double(), z, torch.ones(1).double())
    for iteration in range(300):
        adapt(learned, z if iteration < 200 else 2 * z)
    assert learned.variance.item() == pytest.approx(0.3 * 1 + 0.7 * 4, abs=0.1)
    assert [chees._van_der_corput(i) for i in range(1, 8)] == [0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]


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
    with interrupted(10), part:
        run(checkpoint=part)
    state = part.load()
    kernel = state.pop("kernel")
    del kernel["done"]
    part.save(kernel | state)
    assert same(run(checkpoint=Checkpoint(tmp_path / "part")), run())
