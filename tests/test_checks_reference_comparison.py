"""Predictions beside a reference: a test that has its level and sees what is off, distances of Normals, coverage."""

import dataclasses

import numpy as np
import pytest
from scipy.stats import norm

from bnn_pyro.checks import ALPHA
from bnn_pyro.checks.reference_comparison import Outputs, compared, coverage, distances_to, shift_and_ratio
from bnn_pyro.checks.reference_posterior import ReferencePosterior, bounded, load_reference


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
    return Outputs(values, values.mean((0, 1)), np.full(shape[0] * shape[1], 0.5), markov)


def test_the_test_has_its_level_for_dependent_draws():
    """p below 5 % in some 5 % of 200 posteriors that are right (with Bonferroni, in fewer), and never below 0.1 %."""
    rng, stored = np.random.default_rng(1), normal_reference()
    for rho in (0.0, 0.7):
        p = np.array([compared(chains(rng, rho=rho), stored).p for _ in range(100)])
        assert (p < 0.05).sum() <= 12 and p.min() > ALPHA


@pytest.mark.parametrize(("what", "off"), [("shift", 0.2), ("shift", -0.2), ("width", 0.85), ("width", 1.2)])
def test_what_is_off_is_seen(what, off):
    stored = normal_reference()
    for seed in range(5):
        test = compared(chains(np.random.default_rng(seed), shape=(4, 1000), rho=0.3, **{what: off}), stored)
        assert test.p < ALPHA
        assert test.visible < 0.2


def test_few_draws_are_known_to_be_few():
    rng = np.random.default_rng(0)
    assert compared(chains(rng, shape=(4, 25)), normal_reference()).visible > 0.5
    point = chains(rng, shape=(1, 1), markov=False)
    assert np.isnan(compared(point, normal_reference()).p) and point.effective == np.inf


def test_effective_draws_of_chains_and_guides():
    rng = np.random.default_rng(2)
    assert chains(rng, markov=False).effective == 1600 and np.isnan(chains(rng, markov=False).rhat())
    slow = chains(rng, shape=(4, 2000), rho=0.8)
    assert slow.effective == pytest.approx(8000 * (1 - 0.8) / (1 + 0.8), rel=0.15)
    assert slow.rhat() < 1.05
    apart = dataclasses.replace(slow, values=slow.values + np.arange(4)[:, None, None, None])
    assert apart.rhat() > 1.5


def test_distances_and_coverage_of_normals():
    """W₂ of two Normals: (μ² + (σ − 1)²)^½, coverage 2Φ(σ q) − 1; draws of the same posterior show the floor."""
    stored, rng = normal_reference(num=60, draws=1000), np.random.default_rng(3)
    same = distances_to(chains(rng, num=60, markov=False), stored)
    for value, floor in same.values():
        assert value == pytest.approx(floor, rel=0.25)
    assert same["wasserstein2"][1] == pytest.approx(2.4 / np.sqrt(2) * np.sqrt(1 / 1600 + 1 / 1000), rel=0.15)
    off = chains(rng, shape=(1, 4000), num=60, shift=0.5, width=0.4, markov=False)
    assert distances_to(off, stored)["wasserstein2"][0] == pytest.approx(np.hypot(0.5, 0.6), rel=0.02)
    assert shift_and_ratio(off, stored) == pytest.approx((0.5, 0.4), rel=0.03)
    narrow = coverage(chains(rng, shape=(1, 4000), num=60, width=0.5, markov=False), stored)
    for level, (share, error) in narrow.items():
        assert share == pytest.approx(2 * norm.cdf(0.5 * norm.ppf((1 + level) / 2)) - 1, abs=3 * error)


def test_distances_of_classes():
    """Two classes: total variation is |p − q|, and its floor that of means over so many draws."""
    stored = load_reference("breast-cancer")
    flat = stored.outputs()
    same = Outputs(flat[None], stored.mean, np.zeros(0), False)
    whole = dataclasses.replace(stored, points=np.arange(len(stored.points)), **{
        k: getattr(stored, k)[stored.points] for k in ("x", "mean", "mean_sd", "centre", "spread")},
        **{k: getattr(stored, k)[:, stored.points] for k in ("expected", "error")})  # fmt: skip
    found = dataclasses.replace(same, mean=whole.mean)
    apart = distances_to(found, whole)
    assert apart["agreement"][0] == 1.0 and apart["total_variation"][0] == 0.0 and apart["wasserstein2"][0] == 0.0
    assert apart["total_variation"][1] == pytest.approx(
        whole.mean_sd[:, 0].mean() * np.sqrt(2 / np.pi) * np.sqrt(1 / 1000 + 1 / 10_000), rel=1e-3
    )
    moved = np.clip(whole.mean + np.array([-0.1, 0.1]), 0, 1)
    there = distances_to(dataclasses.replace(found, mean=moved), whole)
    assert there["total_variation"][0] == pytest.approx(np.abs(moved - whole.mean).sum(1).mean() / 2)
    assert there["agreement"][0] == (moved.argmax(1) == whole.mean.argmax(1)).mean() < 1
