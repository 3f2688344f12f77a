"""Is the largest of many R-hats too large, or is that chance? Of chains that agree, and of chains apart by so much."""

import numpy as np
import pytest
from scipy.stats import f_oneway

from bnn_pyro.diagnostics import chain_statistics
from bnn_pyro.diagnostics.chain_statistics import _chance
from bnn_pyro.diagnostics.diagnosis import _largest
from bnn_pyro.diagnostics.verdicts import Findings, overall

SHARED = np.repeat(np.arange(16), 4)


def series(num, chains, draws, phi, seed=0, latent=None):
    """Stationary autoregressive series of variance 1, (M, C, D); of ``latent`` independent ones, M mixtures."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((latent or num, chains, draws))
    for t in range(1, draws):
        values[..., t] = phi * values[..., t - 1] + (1 - phi**2) ** 0.5 * values[..., t]
    if latent is None:
        return values
    mix = rng.standard_normal((num, latent))
    return np.einsum("ml,lcd->mcd", mix / np.linalg.norm(mix, axis=1, keepdims=True), values)


# -- p-values --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("chains", "draws", "phi", "groups"),
    [(4, 400, 0.5, None), (4, 250, 0.0, None), (2, 400, -0.3, None), (64, 30, 0.8, SHARED), (64, 2, 0.8, SHARED)],
)
def test_p_values_of_chains_that_agree_are_uniform(chains, draws, phi, groups):
    p = chain_statistics(series(1000, chains, draws, phi), groups).rhat_p
    for level in (
        0.05,
        0.3,
    ):  # what was doubled, as of two R-hats the larger counts, is a little too large in the middle
        assert 0.6 * level < (p < level).mean() < 1.8 * level
    assert (p < 0.001).mean() < 0.008


def test_superchains_are_compared_by_an_analysis_of_variance():
    scores = np.random.default_rng(0).standard_normal((3, 64, 7))
    scores[1] += 0.3 * SHARED[:, None]
    means = scores.mean(2)
    expected = [f_oneway(*(m[k == SHARED] for k in range(16))).pvalue for m in means]
    assert _chance(scores, SHARED, 64) == pytest.approx(expected, rel=1e-9)
    halves = np.concatenate([scores[..., :3], scores[..., 4:]], 1)
    whole = halves.mean(2).reshape(3, 2, 64).mean(1)
    expected = [f_oneway(*(m[k == SHARED] for k in range(16))).pvalue for m in whole]
    assert _chance(halves, SHARED, 64) == pytest.approx(expected, rel=1e-9), "of whole chains"


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_chains_apart_are_no_chance(phi):
    """Apart by one standard deviation in place, or by a half in spread: not excused by slow chains."""
    values = series(2, 4, 2000, phi)
    values[0, 0] += 1.0
    values[1, 0] *= 1.5 if phi < 0.9 else 2.0
    assert (chain_statistics(values).rhat_p < 1e-4).all()
    lone = chain_statistics(series(1, 4, 2000, phi) + np.arange(4)[:, None], np.arange(4))
    assert lone.rhat_p[0] < 1e-4, "superchains of one chain each have the chain's own draws as their yardstick"
    short = series(1, 64, 10, phi) + 1.5 * np.random.default_rng(1).standard_normal(16)[SHARED][:, None]
    assert chain_statistics(short, SHARED).rhat_p[0] < 1e-4, "superchains that have not forgotten their starts"


def test_the_largest_of_many():
    found = chain_statistics(series(50, 4, 300, 0.3))
    large = found.rhat > 1.01
    assert large.any() and _largest(found) == {
        "rhat_max": found.rhat.max(),
        "rhat_p": min(1.0, 50 * found.rhat_p[large].min()),
    }
    calm = chain_statistics(series(50, 4, 3000, 0.0))
    assert _largest(calm).keys() == {"rhat_max"}, "below 1.01 there is nothing to explain"
    assert _largest(chain_statistics(np.ones((2, 4, 100)))) == {}


# -- verdicts --------------------------------------------------------------------------------------------------------
def judged(values):
    """The overall verdict on outputs (M, C, D)."""
    found = chain_statistics(values)
    least = {"ess_bulk_min": found.ess_bulk.min(), "ess_tail_min": found.ess_tail.min()}
    sizes = {"chains": values.shape[1], "draws": values.shape[2], "points": len(values)}
    return findings(**sizes, **least, **_largest(found))


def findings(**statistics):
    about = dict(tested=True, temperature=1.0, stochastic=False, rows=100)
    return overall(Findings("chains", {"divergences": 0.0, "stuck_chains": 0.0, **statistics}, **about))


def test_short_chains_that_agree_are_good_and_those_apart_are_not():
    """By one chain of four, of 100 outputs: 0.35 posterior standard deviations, from when R-hat is 1.02 or so."""
    agree = [judged(series(100, 4, 500, 0.35, seed, latent=5)) for seed in range(30)]
    assert sum(v.level == "good" for v in agree) >= 27
    assert any("by chance" in v.sentence or "chance alone" in v.sentence for v in agree if v.level == "good")
    for seed in range(30):
        values = series(100, 4, 500, 0.35, seed, latent=5)
        values[50:, 0] += 0.35
        assert judged(values).level != "good"


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
