"""Ranks: exact null distributions, against brute force; what is found, and what the sums find that an ECDF does not."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from bnn_pyro.checks import sbc_ranks as r


def uniform(sets, total, num, seed=0):
    return np.random.default_rng(seed).integers(0, num, (sets, total), endpoint=True)


def posteriors(total, num, width=1.0, shift=0.0, seed=0):
    """Ranks of a standard Normal truth among draws of another width, and to one side."""
    rng = np.random.default_rng(seed)
    return r.ranks(rng.standard_normal(total), shift + width * rng.standard_normal((total, num)), rng)


# -- ranks -----------------------------------------------------------------------------------------------------------
def test_ranks_by_hand_and_ties_by_lot():
    rng = np.random.default_rng(0)
    assert r.ranks(np.array([0.5, -1.0, 9.0]), np.array([[0.0, 1.0, 2.0]] * 3), rng).tolist() == [1, 0, 3]
    tied = r.ranks(np.zeros(3000), np.tile([-1.0, 0.0, 0.0, 1.0], (3000, 1)), rng)
    assert set(tied) == {1, 2, 3} and np.abs(np.bincount(tied)[1:] - 1000).max() < 4 * math.sqrt(3000 * 2 / 9)


def test_coverage_counts_shares_of_ranks_exactly():
    """Of all ranks once, an interval holds its level, whether or not its ends fall between two ranks."""
    for num in (1, 7, 19, 39, 100):
        for level in r.LEVELS:
            assert r.covered(np.arange(num + 1), num, level).mean() == pytest.approx(level, abs=1e-12)
    ends = r.covered(np.array([0, 1, 38, 39]), 39, 0.95)  # 1 of 40 ranks is cut off at either end
    assert ends.tolist() == pytest.approx([0, 1, 1, 0])
    assert r.p_uniform(np.zeros(300, int), 39) == r.p_location(np.zeros(300, int), 39) == r.SMALLEST  # never 0


# -- the null distribution, exact ------------------------------------------------------------------------------------
def test_a_band_by_enumeration():
    """Two ranks on 0 … 2, nine pairs: every p-value is a ninth or more, worked out by listing all pairs."""
    pairs = [np.array([a, b]) for a in range(3) for b in range(3)]
    share = {1: 1 / 3, 2: 2 / 3}
    gamma = []
    for pair in pairs:
        counts = {i: (pair < i).sum() for i in (1, 2)}
        tails = [min(binom.cdf(counts[i], 2, share[i]), binom.sf(counts[i] - 1, 2, share[i])) for i in (1, 2)]
        gamma.append(2 * min(tails))
    for pair, own in zip(pairs, gamma, strict=True):
        assert r.p_uniform(pair, 2) == pytest.approx(np.mean([g <= own + 1e-12 for g in gamma]), abs=1e-12)


def test_a_band_is_left_by_those_whose_p_value_is_below_its_chance():
    for total, num in ((60, 19), (100, 7)):
        u, low, high = r.band(total, num, 0.1)
        assert u[0] == low[0] == high[0] == 0 and u[-1] == low[-1] == high[-1] == 1
        some = uniform(100, total, num, seed=1)
        curves = [r.ecdf_difference(found, num) + u for found in some]
        out = [bool(((c < low - 1e-9) | (c > high + 1e-9)).any()) for c in curves]
        assert out == [r.p_uniform(found, num) <= 0.1 for found in some]


@pytest.mark.parametrize("test", [r.p_uniform, r.p_location, r.p_width])
@pytest.mark.parametrize(("total", "num"), [(80, 19), (200, 159)])
def test_uniform_ranks_are_rejected_as_often_as_they_should_be(test, total, num):
    sets = 1000
    p = np.array([test(found, num) for found in uniform(sets, total, num, seed=2)])
    for chance in (0.01, 0.05, 0.3):
        error = math.sqrt(chance * (1 - chance) / sets)
        assert (p <= chance).mean() < chance + 4 * error
        assert (p <= chance).mean() > 0.8 * chance - 4 * error


def test_p_values_of_sums_by_enumeration():
    """Three ranks on 0 … 3: 64 triples, each as likely."""
    triples = np.stack(np.meshgrid(*[np.arange(4)] * 3), -1).reshape(-1, 3)
    for test, power in ((r.p_location, 1), (r.p_width, 2)):
        sums = (r.normal_scores(triples, 3) ** power).sum(1)
        for triple, own in zip(triples, sums, strict=True):
            two_sided = 2 * min((sums <= own + 1e-6).mean(), (sums >= own - 1e-6).mean())
            assert test(triple, 3) == pytest.approx(min(1.0, two_sided), abs=1e-9)


# -- what is found -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wrong", "test"), [({"width": 0.7}, r.p_width), ({"width": 1.4}, r.p_width), ({"shift": 0.5}, r.p_location)]
)
def test_wrong_posteriors_are_found(wrong, test):
    """At 500 data sets by every test that is meant for it; at 150 the sums still find what an ECDF does not."""
    found = posteriors(500, 159, **wrong)
    assert r.p_uniform(found, 159) < 1e-4 and test(found, 159) < 1e-8
    few = [posteriors(150, 159, **wrong, seed=s) for s in range(10)]
    p = np.array([[r.p_uniform(f, 159), test(f, 159)] for f in few])
    assert (p[:, 1] < 4e-5).mean() >= 0.8 and (p[:, 1] < p[:, 0]).mean() >= 0.8


def test_width_is_that_of_the_draws():
    for width in (0.75, 1.0, 1.3):
        assert r.width(posteriors(4000, 159, width), 159) == pytest.approx(width, rel=0.08)


@pytest.mark.parametrize(("total", "num"), [(20, 159), (80, 39)])
def test_widths_beyond_those_that_are_told_are_noticed_4_times_in_5(total, num):
    for width in r.seen(total, num, 1e-4):
        noticed = np.mean([r.p_width(posteriors(total, num, width, seed=s), num) < 1e-4 for s in range(150)])
        assert 0.65 < noticed < 0.95


# -- pictures ----------------------------------------------------------------------------------------------------------
