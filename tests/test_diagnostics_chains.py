"""R-hat, effective sample size and what the sampler says of itself: ArviZ's numbers, and hand numbers."""

import math
import warnings
from importlib.metadata import version

import numpy as np
import pytest
from scipy.stats import f_oneway

from bnn_pyro.diagnostics import bfmi, chain_statistics, nested_rhat
from bnn_pyro.diagnostics.convergence import _chance, ess_mean
from bnn_pyro.diagnostics.draws import sampler_statistics, stuck_chains
from bnn_pyro.diagnostics.verdicts import Findings, verdicts

with warnings.catch_warnings(action="ignore"):  # 0.23 announces 1.0 once a day
    import arviz

OLD = version("arviz").startswith("0.")


def series(num, chains, draws, phi, seed=0):
    """Series as of ``stationary``, (M, C, D); some with ties, heavy tails, or a chain apart."""
    values = stationary(num, chains, draws, phi, seed)
    values[1] = np.round(values[1])
    values[2] = np.exp(values[2])
    values[3, 0] += 2.0
    values[4] = -np.abs(values[4])
    return values


def number(name, values, **settings):
    return float(np.asarray(getattr(arviz, name)(values, **settings)).item())


@pytest.mark.parametrize(
    ("chains", "draws", "phi"),
    [(4, 100, 0.5), (3, 101, -0.5), (15, 11, 0.0), (16, 50, 0.9), (2, 10, 0.9), (4, 400, 0.99), (1, 50, 0.3)],
)
def test_the_numbers_are_arviz_s(chains, draws, phi):
    values = series(8, chains, draws, phi)
    found = chain_statistics(values)
    for i, one in enumerate(values):
        if chains > 1:
            assert found.rhat[i] == pytest.approx(number("rhat", one, method="rank"), rel=1e-12)
        assert found.ess_bulk[i] == pytest.approx(number("ess", one, method="bulk"), rel=1e-9)
        assert found.ess_tail[i] == pytest.approx(number("ess", one, method="tail", prob=(0.05, 0.95)), rel=1e-9)
        mean = number("ess", one, method="mean")
        assert ess_mean(values)[i] == pytest.approx(mean, rel=1e-9)
        assert found.mcse[i] == pytest.approx(mean**-0.5, rel=1e-9)
        assert found.mcse[i] == pytest.approx(number("mcse", one, method="mean") / one.std(ddof=1), rel=1e-9)
    assert np.isnan(found.rhat).all() == (chains == 1)


@pytest.mark.parametrize("draws", [1, 2, 4, 9, 20])
@pytest.mark.parametrize("phi", [0.0, 0.5, 0.99])
def test_effective_draws_of_short_chains(draws, phi):
    """Of a stationary process: C·D / (1 + 2 Σ (1 − k/D) φᵏ); the autocorrelations of so few draws count too many."""
    values, k = stationary(20, 256, draws, phi), np.arange(1, draws)
    exact = 256 * draws / (1 + 2 * ((1 - k / draws) * phi**k).sum())
    found = chain_statistics(values)
    assert found.ess_bulk.mean() == pytest.approx(exact, rel=0.1)
    assert (found.mcse**-2).mean() == pytest.approx(exact, rel=0.1)
    if 4 <= draws < 20:
        assert number("ess", values[0], method="bulk") > 1.2 * exact
    if phi == 0 and draws > 4:  # the tails of independent draws are as well known as their centre, and less by the min
        assert found.ess_tail.mean() == pytest.approx(exact, rel=0.2)


@pytest.mark.skipif(OLD, reason="ArviZ 0.x has no nested R-hat")
@pytest.mark.parametrize("draws", [4, 9, 100])
def test_nested_rhat_is_arviz_s(draws):
    values, groups = series(8, 12, draws, 0.5), np.arange(12) % 3
    found = chain_statistics(values, groups).rhat
    for i, one in enumerate(values):
        expected = number("rhat_nested", one, superchain_ids=groups, method="rank")
        assert found[i] == pytest.approx(expected, rel=1e-12)


def test_nested_rhat_by_hand():
    """Chain means 2, 4 | 6, 8, variance 2 in each: W = 2 + 2, superchain means 3 and 7: B = 8."""
    values = np.array([[[1.0, 3], [3, 5], [5, 7], [7, 9]]])
    groups = np.array([5, 5, 2, 2])
    assert nested_rhat(values, groups)[0] == pytest.approx(math.sqrt(1 + 8 / 4))
    assert nested_rhat(values[:, [2, 0, 1, 3]], groups[[2, 0, 1, 3]])[0] == pytest.approx(math.sqrt(3))
    # One draw a chain: W is between the chains alone. Chains of their own: W is within them alone.
    assert nested_rhat(np.array([[[2.0], [4], [6], [8]]]), groups)[0] == pytest.approx(math.sqrt(1 + 8 / 2))
    assert nested_rhat(values, np.arange(4))[0] == pytest.approx(math.sqrt(1 + (20 / 3) / 2))
    # Superchains of different sizes weigh the same: means 2 and 6, W = (2 + 0)/2 + (2 + 4)/2.
    assert nested_rhat(values, np.array([0, 1, 1, 1]))[0] == pytest.approx(math.sqrt(1 + 8 / 4))


def test_what_has_no_number():
    constant = np.ones((1, 4, 100))
    broken = series(6, 4, 100, 0.0)[5:]
    broken[0, 1, 3] = np.nan
    short = series(6, 4, 3, 0.0)[5:]
    for values in (constant, broken, short):
        assert all(np.isnan(v).all() for v in vars(chain_statistics(values)).values())
    together = chain_statistics(np.concatenate([constant, series(6, 4, 100, 0.0)]))
    assert np.isnan(together.rhat[0]) and np.isfinite(together.rhat[1:]).all()


def test_bfmi_by_hand():
    energy = np.array([[1.0, 2, 4, 1], [1, 1, 1, 1]])
    # Differences 1, 2, −3: mean square 14/3; variance of (1, 2, 4, 1) is 6/3.
    assert bfmi(energy)[0] == pytest.approx((14 / 3) / 2) and np.isnan(bfmi(energy)[1])
    assert np.isnan(bfmi(energy[:, :3])).all()
    if OLD:
        draws = np.random.default_rng(0).standard_normal((3, 500)).cumsum(1)
        assert bfmi(draws) == pytest.approx(arviz.bfmi(draws), rel=0.01)  # which divides by n instead of n − 1


# -- the sampler ---------------------------------------------------------------------------------------------------
def log_joints(chains=4, draws=300, weights=20, seed=0):
    """−½ χ² of as many degrees of freedom as weights: what a Gaussian posterior's log joint is."""
    return -0.5 * np.random.default_rng(seed).chisquare(weights, (chains, draws))


def test_stuck_chains():
    lp, moving = log_joints(), np.random.default_rng(1).standard_normal((5, 4, 300))
    sd, wave = lp.std(), lp[2].mean() + 12 * np.sin(np.linspace(0, 3, 300)) - 14

    def stuck(row, value):
        found = lp.copy()
        found[row] = value
        return np.flatnonzero(stuck_chains(found, moving)).tolist()

    assert not stuck_chains(lp, moving).any() and not stuck_chains(None, moving).any()
    assert stuck(2, lp[2] - 4 * sd) == [2], "a poor mode"
    assert stuck_chains(lp[1:3] - [[0], [4 * sd]], moving[:, :2]).tolist() == [False, True], "of two, the lower one"
    assert stuck(2, lp[2] - sd) == [], "a slow chain; R-hat says so"
    assert stuck(2, wave) == [], "far below, and one long wave: no certainty"
    assert stuck(2, lp[2] + 4 * sd) == [], "a better mode: no other is far below others, each has two beside it"
    assert stuck(0, -np.inf) == [0]
    frozen = moving.copy()
    frozen[:, 1] = frozen[:, 1, :1]
    assert stuck_chains(lp, frozen).tolist() == [False, True, False, False]
    assert not stuck_chains(lp[:, :3], moving[..., :3]).any(), "too short to tell"


def test_many_chains_raise_no_false_alarm():
    moving = np.random.default_rng(1).standard_normal((2, 512, 20))
    assert not stuck_chains(log_joints(512, 20), moving).any()
    slow = series(6, 512, 220, 0.95)[5, :, 200:]  # twenty draws, of which each chain remembers the first to the last
    assert not stuck_chains(slow, moving).any()
    slow[7] -= 8 * slow.std()
    assert np.flatnonzero(stuck_chains(slow, moving)).tolist() == [7]


def test_sampler_statistics():
    diverging = np.zeros((3, 4))
    diverging[1, :2] = diverging[2, 0] = 1
    steps = np.array([[7.0, 7, 3, 1]] * 3)
    stats = dict(diverging=diverging, n_steps=steps, acceptance_rate=np.full((3, 4), 0.75), energy=steps)
    assert sampler_statistics(stats, {"max_tree_depth": 3}) == pytest.approx({
        "divergences": 3, "divergent_chains": 2, "acceptance_mean": 0.75, "max_tree_share": 0.5,
        "bfmi_min": (20 / 3) / 6.75,  # differences 0, −4, −2; variance of 7, 7, 3, 1
    })  # fmt: skip
    assert sampler_statistics(stats, {"max_steps": 8})["max_tree_share"] == 0
    depth = dict(tree_depth=np.array([[3.0, 2, 2, 2]]))
    assert sampler_statistics(depth, {"max_tree_depth": 3}) == {"max_tree_share": 0.25}
    assert sampler_statistics({}, {"max_tree_depth": 3}) == {}
    assert sampler_statistics({"n_steps": steps * 2}, {"max_steps": 7, "thin": 2}) == {"max_tree_share": 0.5}
    short, energy = np.random.default_rng(0).standard_normal((256, 10)), series(6, 4, 500, 0.5)[5]
    assert sampler_statistics({"energy": short}, {})["bfmi_min"] == pytest.approx(2, rel=0.1)  # pooled
    assert sampler_statistics({"energy": energy}, {})["bfmi_min"] == pytest.approx(bfmi(energy).min())


# -- chance: of chains that agree, and of chains apart by so much ------------------------------------------------------
SHARED = np.repeat(np.arange(16), 4)


def stationary(num, chains, draws, phi, seed=0):
    """Stationary autoregressive series of variance 1, (M, C, D)."""
    values = np.random.default_rng(seed).standard_normal((num, chains, draws))
    for t in range(1, draws):
        values[..., t] = phi * values[..., t - 1] + (1 - phi**2) ** 0.5 * values[..., t]
    return values


@pytest.mark.parametrize(
    ("chains", "draws", "phi", "groups"),
    [(4, 400, 0.5, None), (4, 250, 0.0, None), (2, 400, -0.3, None), (64, 30, 0.8, SHARED), (64, 2, 0.8, SHARED)],
)
def test_p_values_of_chains_that_agree_are_uniform(chains, draws, phi, groups):
    p = chain_statistics(stationary(1000, chains, draws, phi), groups).rhat_p
    for level in (0.05, 0.3):  # doubled, as of two R-hats the larger counts, it is a little too large in the middle
        assert 0.6 * level < (p < level).mean() < 1.8 * level
    assert (p < 0.001).mean() < 0.008


def test_superchains_are_compared_by_an_analysis_of_variance():
    scores = np.random.default_rng(0).standard_normal((3, 64, 7))
    scores[1] += 0.3 * SHARED[:, None]
    means = scores.mean(2)
    expected = [f_oneway(*(m[k == SHARED] for k in range(16))).pvalue for m in means]
    assert _chance(scores, SHARED, 64) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_chains_apart_are_no_chance(phi):
    """Apart by one standard deviation in place, or by a half in spread: not excused by slow chains."""
    values = stationary(2, 4, 2000, phi)
    values[0, 0] += 1.0
    values[1, 0] *= 1.5 if phi < 0.9 else 2.0
    assert (chain_statistics(values).rhat_p < 1e-4).all()
    lone = chain_statistics(stationary(1, 4, 2000, phi) + np.arange(4)[:, None], np.arange(4))
    assert lone.rhat_p[0] < 1e-4, "superchains of one chain each have the chain's own draws as their yardstick"
    short = stationary(1, 64, 10, phi) + 1.5 * np.random.default_rng(1).standard_normal(16)[SHARED][:, None]
    assert chain_statistics(short, SHARED).rhat_p[0] < 1e-4, "superchains that have not forgotten their starts"


def findings(**statistics):
    about = dict(tested=True, temperature=1.0, stochastic=False, rows=100)
    return verdicts(Findings("chains", {"divergences": 0.0, "stuck_chains": 0.0, **statistics}, **about))[0]


SIZES = dict(chains=4.0, draws=250.0, points=100.0)


@pytest.mark.parametrize(
    ("statistics", "level", "words"),
    [
        (dict(rhat_max=1.009, ess_bulk_min=800.0, ess_tail_min=800.0), "good", "(it should be below 1.01), with"),
        (dict(rhat_max=1.013, rhat_p=0.3, ess_bulk_min=600.0, ess_tail_min=700.0), "good", "chance alone"),
        (dict(rhat_max=1.013, rhat_p=0.009, ess_bulk_min=600.0, ess_tail_min=700.0), "caution", "Nearly converged"),
        (dict(rhat_max=1.013, ess_bulk_min=600.0, ess_tail_min=700.0), "caution", "Nearly converged"),
        (dict(rhat_max=1.02, rhat_p=0.3, ess_bulk_min=399.0, ess_tail_min=700.0), "caution", "Nearly converged"),
        (dict(rhat_max=1.06, rhat_p=1e-9, ess_bulk_min=600.0, ess_tail_min=700.0), "bad", "the chains disagree"),
        (dict(rhat_max=1.06, rhat_p=0.4, ess_bulk_min=200.0, ess_tail_min=200.0), "bad", "too few effective draws"),
        (dict(rhat_max=1.005, ess_bulk_min=99.0, ess_tail_min=200.0), "bad", "too few effective draws"),
    ],
)
def test_what_is_said(statistics, level, words):
    verdict = findings(**SIZES, **statistics)
    assert verdict.level == level and words in verdict.sentence
    assert ("disagree" in verdict.sentence) == (words == "the chains disagree")
