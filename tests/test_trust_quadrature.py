"""Posteriors of two weights by numerical integration: the integrals themselves, and methods against them."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from bnn_pyro import plots
from bnn_pyro.checks import Subject
from bnn_pyro.checks.grid import Grid, best_normal, climb, curvature, normal_grid
from bnn_pyro.checks.linear_regression import correlated
from bnn_pyro.checks.logistic import Logistic
from bnn_pyro.checks.problems import PROBLEMS
from bnn_pyro.checks.quadrature import Quadrature
from bnn_pyro.checks.reduction import reduced
from bnn_pyro.zoo import ZOO

SMALL = Quadrature(fits=4, effort=0.6)


def subject(variant, method, **given):
    return Subject(variant, ZOO[variant](), method, correlated(20).data, given)


def test_a_correlated_normal_is_integrated_exactly():
    root = torch.tensor([[0.5, 0.0], [0.4, 0.3]], dtype=torch.float64)
    target = MultivariateNormal(torch.tensor([1.0, -0.5], dtype=torch.float64), scale_tril=root)
    grid = Grid.of(lambda w: target.log_prob(w) - 3.0, 8.0)
    assert grid.log_evidence == pytest.approx(-3.0, abs=1e-9)
    torch.testing.assert_close(grid.expect(grid.points), target.mean)
    off = grid.points - target.mean
    torch.testing.assert_close(off.T @ (grid.mass[:, None] * off), target.covariance_matrix, rtol=1e-9, atol=1e-12)
    area = (grid.axes[0][1] - grid.axes[0][0]) * (grid.axes[1][1] - grid.axes[1][0])
    assert (grid.density.sum() * area).item() == pytest.approx(1.0)
    torch.testing.assert_close(climb(target.log_prob, grid.mode), target.mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(curvature(target.log_prob, target.mean), target.precision_matrix)
    # The best independent Normals: the same mean, and the conditional standard deviations; of any covariance: itself.
    mean, scale, elbo = best_normal(lambda w: target.log_prob(w) - 3.0, grid.mode)
    torch.testing.assert_close(mean, target.mean, atol=1e-5, rtol=0)
    torch.testing.assert_close(scale.diagonal(), target.precision_matrix.diagonal().rsqrt(), atol=1e-5, rtol=0)
    gap = 0.5 * (target.precision_matrix.diagonal().log().sum() - torch.logdet(target.precision_matrix))
    assert elbo == pytest.approx(-3.0 - gap.item(), abs=1e-8)
    _, scale, elbo = best_normal(lambda w: target.log_prob(w) - 3.0, grid.mode, correlated=True)
    torch.testing.assert_close(scale, root, atol=1e-4, rtol=0)
    assert elbo == pytest.approx(-3.0, abs=1e-8)
    q = normal_grid(mean, root)
    torch.testing.assert_close(q.expect(q.points), mean)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_integral_has_converged(name):
    made = PROBLEMS[name]
    fine, coarse = (Grid.of(made.log_joint, 8 * made.prior_scale, nodes) for nodes in (401, 301))
    assert fine.log_evidence == pytest.approx(coarse.log_evidence, abs=1e-5)
    torch.testing.assert_close(
        fine.expect(fine.points.square()), coarse.expect(coarse.points.square()), rtol=1e-4, atol=0
    )
    # At weights of 0 every probability is ½, or every mean 0.
    zero = made.log_likelihood(torch.zeros(1, 2, dtype=torch.float64)).item()
    sigma = made.noise
    by_hand = (
        -12 * math.log(2)
        if sigma is None
        else sum(-0.5 * (y / sigma) ** 2 - math.log(sigma * math.sqrt(2 * math.pi)) for y in made.y.tolist())
    )
    assert zero == pytest.approx(by_hand)


def test_the_unit_has_two_modes_of_equal_mass():
    made = PROBLEMS["sign"]
    grid = Grid.of(made.log_joint, 8 * made.prior_scale)
    assert grid.expect((grid.points[:, 1:] > 0).double()).item() == pytest.approx(0.5, abs=0.01)
    mode = climb(made.log_joint, grid.mode)
    between = made.log_joint(torch.zeros(1, 2, dtype=torch.float64)) - made.log_joint(mode[None])
    assert between.item() < -2  # a sampler crosses, and notices
    torch.testing.assert_close(made.log_joint(mode[None]), made.log_joint(-mode[None]))
    # One mode is better for a Normal than both together.
    assert best_normal(made.log_joint, mode)[2] > best_normal(made.log_joint, torch.zeros(2, dtype=torch.float64))[2]


@pytest.mark.parametrize(
    ("variant", "method", "levels"),
    [
        ("mean-field", "nuts", {"good", "caution"}),
        ("mean-field", "svi", {"caution"}),
        ("last-layer", "laplace", {"caution"}),
        ("mlp", "map", {"caution"}),
    ],
)
def test_methods_are_what_they_claim(variant, method, levels):
    outcome = SMALL.run(subject(variant, method))
    assert outcome.level in levels, outcome.sentence
    assert ("sees one" in outcome.sentence) == (method in ("svi", "map"))
    problems = outcome.evidence["problems"]
    assert problems == (["logistic"] if variant == "last-layer" else ["logistic", "sign"])
    for name in problems:
        shape = len(outcome.evidence[f"{name}_axis_1"]), len(outcome.evidence[f"{name}_axis_2"])
        assert outcome.evidence[f"{name}_density"].shape == shape
        assert outcome.evidence[f"{name}_draws"].shape[1] == 2
        shown = ("axis_1", "axis_2", "density", "draws", "names")
        ax = plots.two_weights(*(outcome.evidence[f"{name}_{what}"] for what in shown))
        assert len(ax.get_legend().get_texts()) == 4


def test_a_wrong_prior_is_bad():
    """The variant's own log joint is compared with the formula too."""
    made = PROBLEMS["logistic"]
    wider = {**PROBLEMS, "logistic": type(made)(**{**vars(made), "prior_scale": 2.5})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bnn_pyro.checks.quadrature.PROBLEMS", wider)
        outcome = SMALL.run(subject("last-layer", "nuts"))
    bad = [f.about for f in outcome.findings if f.level == "bad"]
    assert any("log joint" in about for about in bad) and any("mean of w" in about for about in bad)


# -- six weights, against NUTS -----------------------------------------------------------------------------------
def test_samplers_agree_with_nuts_and_approximations_tell_by_how_much_they_do_not():
    check = Logistic(rows=60, draws=1000, effort=0.5)
    good, narrow = (check.run(subject("mean-field", method)) for method in ("hmc", "svi"))
    assert good.level == "good", good.sentence
    assert narrow.level == "caution" and 0.4 < narrow.figures["logistic_sd"] < 0.85
    assert "temperature 1" in check.refuses(subject("mean-field", "hmc", temperature=0.5))


def test_another_prior_is_seen_by_nuts(monkeypatch):
    narrow = {"prior": "normal:1"}
    monkeypatch.setattr("bnn_pyro.checks.logistic.reduced", lambda entry, **own: reduced(entry, **{**own, **narrow}))
    outcome = Logistic(rows=60, draws=1000, effort=0.5).run(subject("mean-field", "hmc"))
    assert outcome.level == "bad" and "not the posterior" in outcome.sentence
