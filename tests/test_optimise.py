"""Point estimates against closed forms and an independent optimiser; steps by hand."""

import math
from contextlib import nullcontext

import numpy as np
import pyro
import pytest
import torch
from conjugate import correlated
from pyro.distributions import Normal, TransformedDistribution
from torch.distributions import AffineTransform

import bnn_pyro as bp
from bnn_pyro.inference import log_joint
from bnn_pyro.inference.log_joint import elbo_of

PROBLEM = correlated(num=24, noise=2.0, y_shift=1.0, y_scale=3.0, prior_scale=0.5)
LONG = dict(patience=0, epochs=300, lr=0.1, final_lr=0.0)


def fit(method, entry=None, data=None):
    return bp.fit(entry or PROBLEM.entry(), data or PROBLEM.data, method, progress=False, device="cpu")


def flat(posterior):
    """All sites of the one draw, in the order of the model's."""
    assert all(value.shape[:2] == (1, 1) for value in posterior.chains.values())
    return torch.cat([posterior.chains[site].flatten() for site in posterior.model.initial]).double()


# A strong prior, so that it matters, and a target in its own units.
UNITS = correlated(num=40, noise=5.0, y_shift=40.0, y_scale=8.0, prior_scale=0.3)


def test_map_is_the_posterior_mean_of_the_linear_model():
    """The posterior is Gaussian: its mode is its mean, Λ⁻¹ scale Aᵀ(y − shift) / σ²."""
    posterior = fit(bp.MAP(**LONG), UNITS.entry(), UNITS.data)
    torch.testing.assert_close(flat(posterior), UNITS.mean, rtol=1e-3, atol=1e-3)
    a = UNITS.design(UNITS.x)
    log_prior = torch.distributions.Normal(0.0, 0.3).log_prob(UNITS.mean).sum()
    log_likelihood = torch.distributions.Normal(40 + 8 * a @ UNITS.mean, 5.0).log_prob(UNITS.y).sum()
    trace = {name: line[-1] for name, line in posterior.trace.items()}
    assert trace["log_prior"] == pytest.approx(log_prior.item(), rel=1e-4)
    assert trace["log_likelihood"] == pytest.approx(log_likelihood.item(), rel=1e-4)
    assert trace["log_joint"] == pytest.approx((log_prior + log_likelihood).item(), rel=1e-4)


def test_mle_is_least_squares():
    a = UNITS.design(UNITS.x).numpy()
    least_squares = np.linalg.lstsq(a, (UNITS.y.numpy() - 40) / 8, rcond=None)[0]
    found = flat(fit(bp.MLE(**LONG), UNITS.entry(), UNITS.data)).numpy()
    np.testing.assert_allclose(found, least_squares, rtol=1e-3, atol=1e-3)
    assert np.abs(found - UNITS.mean.numpy()).max() > 0.05  # the prior would have shown


def test_steps_are_those_by_hand():
    """The log joint of the linear model is −½ wᵀΛw + wᵀΛm: its gradient is Λ (m − w)."""
    epochs, lr, final = 4, 0.2, 0.1
    start = flat(fit(bp.MAP(epochs=1, lr=1e-12)))
    w = start.clone().requires_grad_()
    adam = torch.optim.Adam([w], lr)
    for step in range(epochs):
        w.grad = PROBLEM.precision @ (w.detach() - PROBLEM.mean)
        adam.param_groups[0]["lr"] = lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * step / epochs)))
        adam.step()
    found = flat(fit(bp.MAP(epochs=epochs, lr=lr, final_lr=final)))
    torch.testing.assert_close(found, w.detach(), rtol=1e-4, atol=1e-5)
    assert (w - start).abs().max() > 0.1


def test_mini_batches_take_every_row_once_an_epoch(monkeypatch):
    """Batches are made up afresh in each epoch."""
    batches = []

    def noted(model, guide, x, y, **how):
        batches.append({tuple(row) for row in x.tolist()})
        return elbo_of(model, guide, x, y, **how)

    monkeypatch.setattr(log_joint, "elbo_of", noted)
    fit(bp.SVI(epochs=3, batch_size=8))
    epochs = [batches[start : start + 3] for start in (0, 3, 6)]
    assert all(len(set.union(*epoch)) == 24 and [len(b) for b in epoch] == [8, 8, 8] for epoch in epochs)
    assert all(batch not in epochs[0] for batch in epochs[1] + epochs[2])


@pytest.mark.parametrize("auxiliary", [True, False])
def test_the_entropy_of_an_auxiliary_site_without_closed_form_is_added(auxiliary):
    """−log q of the draw, as of a flow in a guide of one's own; of a misspelt site it would be added without end."""
    drawn, flow = [], TransformedDistribution(Normal(0.0, 1.0), [AffineTransform(0.0, 2.0)])

    def model(x, y=None):
        pyro.sample("y", Normal(0.0, 1.0).expand([len(y)]).to_event(1), obs=y)

    def guide(x, y=None):
        drawn.append(pyro.sample("layer.0.weight", flow, infer={"is_auxiliary": auxiliary}))

    refused = pytest.raises(ValueError, match=r"'layer\.0\.weight' is none of the model's")
    with bp.isolated(0), nullcontext() if auxiliary else refused:
        elbo, log_likelihood = elbo_of(model, guide, PROBLEM.data.x_train[:1], PROBLEM.data.y_train[:1])
        torch.testing.assert_close(elbo - log_likelihood, -flow.log_prob(drawn[0]))
