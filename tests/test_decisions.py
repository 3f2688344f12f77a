"""Intervals and sets of a predictive distribution, expected losses against closed forms, and the best action."""

import pytest
import torch
from pyro.distributions import Categorical, LogNormal, Poisson
from scipy import stats
from test_conformal import simulated

from bnn_pyro.calibration import Conformal
from bnn_pyro.errors import UserError
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.predictive import Prediction


def test_predictive_intervals_sets_and_decisions():
    prediction, _ = simulated("regression", 30)
    low, high, _, kind, note = prediction.interval(0.8)
    torch.testing.assert_close(torch.stack([low, high]).float(), prediction.quantile([0.1, 0.9]).float())
    assert kind == "predictive" and "if the model is right" in note
    with pytest.raises(UserError, match="classification"):
        prediction.set(0.8)
    probs = torch.tensor([[[0.5, 0.3, 0.2], [0.9, 0.06, 0.04]]])
    classes = Prediction(Categorical(logits=probs.log()))
    assert classes.set(0.7).members.tolist() == [[True, True, False], [True, False, False]]
    assert classes.set(0.99).members.all()
    assert classes.decide().tolist() == [0, 0]
    assert classes.decide(abstain_cost=0.3).tolist() == [-1, 0]  # expected costs 0.5 and 0.1
    # Missing class 2 costs 10: action 1 (treat) costs 1 always; 10 · 0.2 > 1 > 10 · 0.04.
    cost = [[0, 0, 10], [1, 1, 1]]
    assert classes.decide(cost).tolist() == [1, 0] and classes.decide(cost, abstain_cost=0.7).tolist() == [-1, 0]
    with pytest.raises(UserError, match=r"\(actions, 3\)"):
        classes.decide([[0, 1]])


def test_the_expected_loss_of_a_mixture_has_its_closed_form():
    """Of squared errors variance + bias², of a threshold 1 − F, of a stock the partial moments, of counts a sum."""
    prediction, _ = simulated("regression", 30)
    loc, scale = (v.double().numpy() for v in (prediction.locs, prediction.scales))
    squared = prediction.risk(lambda y: (y - 0.3).square()).expected
    expected = (scale**2 + (loc - 0.3) ** 2).mean(0)
    torch.testing.assert_close(squared, torch.tensor(expected), rtol=1e-3, atol=1e-4)
    wrong = (torch.tensor(loc.mean(0)) - 0.3).square()  # planted: the loss of the mean
    assert ((squared - wrong) / squared).mean() > 0.1
    over = prediction.risk(lambda y: (y > 0.1).double()).expected
    torch.testing.assert_close(over, 1 - prediction.cdf(torch.full((30,), 0.1).double()), rtol=0, atol=5e-3)
    # A piece left costs 1, one missing 3: E(a − Y)⁺ + 3 E(Y − a)⁺, least where a is the quantile of ¾.
    stock = torch.linspace(-3, 3, 241, dtype=torch.float64)
    loss = lambda y: (stock - y[..., None]).clamp_min(0) + 3 * (y[..., None] - stock).clamp_min(0)  # noqa: E731
    risk = prediction.risk(loss)
    z = (stock.numpy()[:, None, None] - loc) / scale
    left = scale * (z * stats.norm.cdf(z) + stats.norm.pdf(z))
    exact = (left + 3 * (left - (stock.numpy()[:, None, None] - loc))).mean(1).T
    torch.testing.assert_close(risk.expected, torch.tensor(exact), rtol=2e-3, atol=1e-3)
    assert risk.kind == "predictive" and "if the predictive distribution is" in risk.note
    torch.testing.assert_close(stock[prediction.decide(loss)], prediction.quantile(0.75)[0].double(), rtol=0, atol=0.03)
    rate = torch.tensor([[0.5, 30.0], [2.0, 40.0]])
    counts = Mixture(Poisson(rate)).risk(lambda y: y * (y - 1)).expected  # E Y(Y − 1) = rate²
    torch.testing.assert_close(counts, rate.double().square().mean(0), rtol=2e-3, atol=0)


def test_the_risk_of_a_log_scale_of_a_conformal_prediction_and_of_bad_losses():
    prediction, y = simulated("regression", 40)
    prediction.guarantee = Conformal.fit("cqr", prediction, y).at(40)
    assert "conformal method changes intervals" in prediction.risk(lambda y: y).note
    torch.testing.assert_close(prediction.risk(lambda y: y).expected, prediction.mean.double(), rtol=0, atol=1e-3)
    skewed = Mixture(LogNormal(torch.zeros(1, 3), torch.full((1, 3), 0.5)))
    torch.testing.assert_close(skewed.risk(lambda y: y).expected, torch.full((3,), 1.1331).double(), rtol=2e-3, atol=0)
    for call, message in (
        (lambda: prediction.risk(lambda y: y.sum(0)), "must be finite, of shape"),
        (lambda: prediction.risk(lambda y: y / 0), "must be finite"),
        (lambda: prediction.risk(torch.eye(2)), "a function of targets of numbers"),
        (lambda: simulated("classification", 4)[0].risk(lambda y: y), "a loss is a matrix"),
        (lambda: prediction.decide(), "classification"),
        (lambda: prediction.decide(lambda y: y), "among actions"),
    ):
        with pytest.raises(UserError, match=message):
            call()
