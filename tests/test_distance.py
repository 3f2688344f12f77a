"""Distances between predictions, by numbers that can be worked out by hand."""

import math

import pytest
import torch
from pyro.distributions import Categorical, Normal

import bnn_pyro as bp
from bnn_pyro.metrics import agreement, distance_floor, distances, total_variation, wasserstein
from bnn_pyro.predictive import Prediction


def classes(*draws):
    """A prediction from probabilities (S, B, K)."""
    return Prediction(Categorical(logits=torch.tensor(draws).double().log()))


def normals(locs, scales):
    locs = torch.tensor(locs).double()
    return Prediction(Normal(locs, torch.as_tensor(scales).double().expand(locs.shape), validate_args=False))


A = classes([[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]], [[0.7, 0.1, 0.2], [0.1, 0.85, 0.05]])
# means (0.6, 0.2, 0.2) and (0.5, 0.45, 0.05)
B = classes([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])


def test_classification_by_hand():
    """Total variation: ½(0.4 + 0.3 + 0.1) = 0.4 and ½(0.1 + 0.15 + 0.05) = 0.15; the labels agree at one of two."""
    assert agreement(A, B).value == 0.5
    assert total_variation(A, B).value == pytest.approx(0.275)
    assert agreement(A, A).value == 1.0 and total_variation(A, A) == (0.0, 0.0, 0.0)
    assert total_variation(B, A) == total_variation(A, B)


def test_wasserstein_by_hand():
    """Shifted Normals: the shift. Normals of one mean: |σ − σ'| √(2/π). Mixtures: by their quantile functions."""
    a = normals([[0.0, 1.0, -2.0]], 0.5)
    assert wasserstein(a, normals([[0.25, 0.25, 1.0]], 0.5)).value == pytest.approx((0.25 + 0.75 + 3.0) / 3, rel=1e-3)
    assert wasserstein(normals([[3.0]], 1.0), normals([[3.0]], 2.5)).value == pytest.approx(
        1.5 * math.sqrt(2 / math.pi), rel=1e-3
    )
    # ½δ₀ + ½δ₂ against δ₁, blurred by too little to matter: every half moves by 1.
    assert wasserstein(normals([[0.0], [2.0]], 0.01), normals([[1.0]], 0.01)).value == pytest.approx(1.0, abs=0.02)
    levels = (torch.arange(2000) + 0.5) / 2000
    p, q = normals([[0.0], [2.0], [2.5]], [[0.3], [0.1], [1.0]]), normals([[0.5], [1.0]], [[0.4], [2.0]])
    exact = (p.quantile(levels.tolist()) - q.quantile(levels.tolist())).abs().mean().item()
    assert wasserstein(p, q).value == pytest.approx(exact, rel=5e-3)


def test_the_floor_of_independent_draws():
    """One point, p = ½ ± δ at random: the halves of S draws differ by |Normal(0, 2δ/√S)| in total variation."""
    draws, delta = 1000, 0.2
    g = torch.Generator().manual_seed(0)
    up = torch.rand(draws, 100, 1, generator=g) < 0.5
    p = 0.5 + delta * (2.0 * up - 1.0)
    a = Prediction(Categorical(logits=torch.cat([p, 1 - p], -1).log()))
    floor = distance_floor(a)
    expected = 2 * delta / math.sqrt(draws) * math.sqrt(2 / math.pi)
    assert floor["total_variation"].value == pytest.approx(expected, rel=0.1)
    low, high = floor["total_variation"][1:]
    assert low < floor["total_variation"].value < high < 1.5 * expected
    assert floor["agreement"].value < 0.6  # the label of p = ½ is a coin
    assert distance_floor(a) == floor != distance_floor(a, seed=1)


def test_the_floor_of_chains_needs_blocks():
    """Two chains that stay apart: halves of single draws hide it, halves of chains show it."""
    p = torch.tensor([0.3] * 100 + [0.7] * 100)[:, None, None]
    a = Prediction(Categorical(logits=torch.cat([p, 1 - p], -1).log()))
    assert distance_floor(a, block=100)["total_variation"].value == pytest.approx(0.4)
    assert distance_floor(a)["total_variation"].value < 0.1
    stuck = normals([[0.0]] * 100 + [[1.0]] * 100, 1.0)
    assert distance_floor(stuck, block=100)["wasserstein"].value == pytest.approx(1.0, rel=1e-3)


def test_refused():
    regression = normals([[0.0, 1.0]], 1.0)
    for call, message in [
        (lambda: agreement(regression, regression), "'probs' belongs to classification"),
        (lambda: wasserstein(A, B), "belongs to regression"),
        (lambda: distances(A, regression), "cannot compare a classification with a regression"),
        (lambda: total_variation(A, B[:1]), "2 and 1 points"),
        (lambda: total_variation(A, classes([[0.5, 0.5], [0.5, 0.5]])), "3 and 2 classes"),
        (lambda: agreement(A[:0], B[:0]), "nothing to compare"),
        (lambda: distance_floor(B), "two blocks of draws"),
        (lambda: distance_floor(A, block=2), "two blocks of draws"),
        (lambda: wasserstein(normals([[math.nan]], 1.0), normals([[0.0]], 1.0)), "not finite at row 0"),
    ]:
        with pytest.raises(bp.UserError, match=message):
            call()
