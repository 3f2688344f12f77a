"""Metrics of numbers against those worked out by hand, and numerical integration."""

import math

import numpy as np
import pytest
import torch
from predictions import MIXTURE, TARGETS, gaussians

from bnn_pyro import metrics
from bnn_pyro.parts import mixtures


def test_hand_numbers_regression():
    one = gaussians([[0.0, 1.0], [2.0, 1.0]], [[1.0, 2.0], [1.0, 2.0]])
    assert metrics.rmse(one, [2.0, 4.0]) == pytest.approx(math.sqrt((1 + 9) / 2))

    def density(y, loc, scale):
        return math.exp(-(((y - loc) / scale) ** 2) / 2) / scale / math.sqrt(2 * math.pi)

    expected = -(math.log((density(2, 0, 1) + density(2, 2, 1)) / 2) + math.log(density(4, 1, 2))) / 2
    assert metrics.nll(one, [2.0, 4.0]) == pytest.approx(expected, rel=1e-6)
    # A Gaussian's CRPS at its mean: σ (√2 − 1)/√π
    assert metrics.crps(one[1:], [1.0]) == pytest.approx(2 * (math.sqrt(2) - 1) / math.sqrt(math.pi), rel=1e-6)
    assert metrics.width_95(one[1:], [1.0]) == pytest.approx(2 * 2 * 1.959964, rel=1e-5)
    np.testing.assert_allclose(metrics.pit(one, [1.0, 3.0]), [0.5, 0.8413447], rtol=1e-6)
    # Φ(.67) = .7486 lies inside the central half, Φ(.68) = .7517 outside.
    assert metrics.coverage_50(gaussians([[0.0] * 4], [[1.0] * 4]), [0.67, 0.68, -0.67, -0.68]) == 0.5
    # 95 % of binomial counts of 100 at 0.9 lie in 84 … 95.
    words = [metrics.interval_verdict(0.9, held / 100, 100) for held in (83, 84, 95, 96)]
    assert words == ["too narrow", "about right", "about right", "too wide"]
    assert metrics.coverage_90(gaussians([[0.0] * 4], [[1.0] * 4]), [1.64, 1.65, -1.64, 0.0]) == 0.75
    assert metrics.coverage_95(gaussians([[0.0] * 4], [[1.0] * 4]), [1.95, 1.97, -1.97, -3.0]) == 0.25


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_crps_is_the_integrated_squared_error_of_the_cdf_also_in_chunks(draws, monkeypatch):
    prediction = gaussians(MIXTURE.locs[:draws], MIXTURE.scales[:draws])
    expected = []
    for i, y in enumerate(TARGETS):  # split at y, where the integrand jumps
        for low, high, step in ((-40.0, y, 0.0), (y, 40.0, 1.0)):
            t = torch.linspace(low, high, 40_001, dtype=torch.float64)
            expected.append(torch.trapezoid((prediction[i : i + 1].cdf(t[:, None])[:, 0] - step) ** 2, t).item())
    whole = metrics.crps(prediction, TARGETS)
    assert whole == pytest.approx(sum(expected) / 3, rel=1e-5)
    monkeypatch.setattr(mixtures, "BLOCK", 2 * draws)
    assert metrics.crps(prediction, TARGETS) == pytest.approx(whole, rel=1e-12)
