"""Predictions beside a reference: a test that has its level and sees what is off, and coverage."""

import dataclasses

import numpy as np
import pytest
from scipy.stats import norm

from bnn_pyro.checks import ALPHA
from bnn_pyro.checks.reference import compared, coverage
from bnn_pyro.checks.reference_posterior import Outputs, ReferencePosterior, bounded


def normal_reference(num=30, draws=500, seed=5):
    """Of independent standard Normal outputs at ``num`` inputs, whose every average is known by integration."""
    u = norm.ppf((np.arange(100_000) + 0.5) / 100_000)
    expected = np.broadcast_to(bounded(u[:, None, None], 0.0, np.ones(1)).mean(1), (2, num, 1))
    error = np.broadcast_to(np.array([0.63, 0.23])[:, None, None] / 100, (2, num, 1))
    one = np.ones((num, 1))
    stored = np.random.default_rng(seed).standard_normal((draws, num, 1))
    about = {"task": "regression", "draws": 10_000, "title": "standard Normals"}
    return ReferencePosterior(
        "normal", about, np.zeros((num, 1)), 0 * one, one, 0 * one, one, expected, error, np.arange(num), stored,
        np.full((draws, 1), 0.5),
    )  # fmt: skip


def chains(rng, shape=(4, 400), num=30, rho=0.0, shift=0.0, width=1.0, markov=True):
    """Found: AR(1) series of correlation rho, standard Normals but for shift and width."""
    noise = rng.standard_normal((*shape, num, 1))
    values = noise.copy()
    for i in range(1, shape[1]):
        values[:, i] = rho * values[:, i - 1] + np.sqrt(1 - rho**2) * noise[:, i]
    values = (shift + width * values).astype(np.float32)
    return Outputs(values, markov)


def test_the_test_has_its_level_for_dependent_draws():
    """p below 5 % in some 5 % of 200 posteriors that are right (with Bonferroni, in fewer), and never below 0.1 %."""
    rng, stored = np.random.default_rng(1), normal_reference()
    for rho in (0.0, 0.7):
        p = np.array([compared(chains(rng, rho=rho), stored)[0] for _ in range(100)])
        assert (p < 0.05).sum() <= 12 and p.min() > ALPHA


@pytest.mark.parametrize(("what", "off"), [("shift", 0.2), ("shift", -0.2), ("width", 0.85), ("width", 1.2)])
def test_what_is_off_is_seen(what, off):
    stored = normal_reference()
    for seed in range(5):
        p, _, visible = compared(chains(np.random.default_rng(seed), shape=(4, 1000), rho=0.3, **{what: off}), stored)
        assert p < ALPHA and visible < 0.2


def test_few_draws_are_known_to_be_few():
    rng = np.random.default_rng(0)
    assert compared(chains(rng, shape=(4, 25)), normal_reference())[2] > 0.5
    point = chains(rng, shape=(1, 1), markov=False)
    assert np.isinf(compared(point, normal_reference())[2]) and point.effective == np.inf


def test_effective_draws_of_chains_and_guides():
    rng = np.random.default_rng(2)
    assert chains(rng, markov=False).effective == 1600
    slow = chains(rng, shape=(4, 2000), rho=0.8)
    assert slow.effective == pytest.approx(8000 * (1 - 0.8) / (1 + 0.8), rel=0.15)
    apart = dataclasses.replace(slow, values=slow.values + np.arange(4)[:, None, None, None])
    assert apart.effective < 10 and compared(apart, normal_reference())[2] > 0.5


def test_coverage_of_normals():
    """2Φ(σ q) − 1."""
    stored, rng = normal_reference(num=60, draws=1000), np.random.default_rng(3)
    narrow = coverage(chains(rng, shape=(1, 4000), num=60, width=0.5, markov=False), stored)
    for level, (share, error) in narrow.items():
        assert share == pytest.approx(2 * norm.cdf(0.5 * norm.ppf((1 + level) / 2)) - 1, abs=3 * error)
