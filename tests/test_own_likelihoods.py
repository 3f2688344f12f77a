"""Likelihoods of one's own: of several targets, of mixtures, and what is refused before a fit."""

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from refused import refuses

import bnn_pyro as bp
from bnn_pyro.parts.observed import Likelihood

pytestmark = pytest.mark.usefixtures("seeded")


class Own(Likelihood):
    event_dim = 1

    def __init__(self, outputs, law):
        super().__init__()
        self.outputs, self.components = outputs, law


def bimodal(f):
    shares, loc = f.unflatten(-1, (-1, 4)).split(2, -1)
    return dist.MixtureSameFamily(dist.Categorical(logits=shares), dist.Normal(loc, 0.1))


@pytest.mark.parametrize("method", [bp.SVI(epochs=60), bp.SVI(epochs=60, patience=0), bp.MAP(epochs=60)])
def test_a_likelihood_of_ones_own_of_several_targets(method):
    """The same as the package's; and bimodal ones, each of which is one of the mixtures that SciPy agrees with."""
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    data, how = bp.dataset(x, (x > 0).int()), dict(seed=0, progress=False)
    with bp.isolated(0):
        net, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 12)
    own = bp.Bayesian(net, likelihood=Own(3, lambda f: dist.Bernoulli(logits=f).to_event(1)), prior="normal:1")
    found, expected = (bp.predict(bp.fit(e, data, method, **how), x) for e in (own, bp.Bayesian(net, prior="normal:1")))
    assert torch.equal(found.mean, expected.mean) and found.task == expected.task == "labels"
    assert bp.metrics.evaluate(found, data.y_train.new_ones(60, 3)).keys() >= {"nll", "label_error"}
    own.likelihood.event_dim = 0
    refuses("components makes events of 1 dimensions, and its event_dim is 0", bp.fit, own, data, method, **how)
    bimodal_one = Own(12, lambda f: bimodal(f).to_event(1))
    posterior = bp.fit(bp.Bayesian(other, likelihood=bimodal_one), bp.dataset(x, x.abs()), method, **how)
    prediction = bp.predict(posterior, x, num_draws=4)
    f = x @ (w := posterior.draw(4, seed=0))["weight"].mT + w["bias"][:, None]
    expected = bimodal(f).log_prob(x.abs()).sum(-1).logsumexp(0) - np.log(len(f))
    torch.testing.assert_close(prediction.log_prob(x.abs()), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(prediction.target(2).locs, bimodal(f).mean[..., 2])
    assert prediction.quantile((0.1, 0.9)).diff(dim=0).gt(0).all()


UNFIT = {
    "MultivariateNormal": lambda f: dist.MultivariateNormal(f, torch.eye(3)),
    "TransformedDistribution": lambda f: dist.TransformedDistribution(dist.Normal(f, 1.0), []).to_event(1),
    "ZeroInflatedPoisson": lambda f: dist.ZeroInflatedPoisson(f.exp(), gate_logits=f).to_event(1),
}


@pytest.mark.parametrize("law", UNFIT)
@pytest.mark.parametrize("method", [bp.SVI, bp.NUTS])
def test_a_likelihood_without_a_prediction_is_refused_before_the_fit(law, method, monkeypatch):
    monkeypatch.setattr(method, "run", None)
    entry, x = bp.Bayesian(torch.nn.Linear(3, 3), likelihood=Own(3, UNFIT[law])), np.eye(3).repeat(9, 0)
    refuses(f"a likelihood of type {law} has no Prediction; use", bp.fit, entry, (x, x + 1), method(), progress=False)


class Rates(Likelihood):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def components(self, f):
        return dist.Gamma(2.0, 2.0 / (self.scale * f.squeeze(-1).exp()))


def test_a_likelihood_of_ones_own_trains_in_processes_and_its_numbers_are_compared(tmp_path):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    entry, how = bp.Bayesian(torch.nn.Linear(3, 1), likelihood=Rates(2.0)), dict(seed=0, progress=False)
    few, many = (bp.fit(entry, (x, x[:, 0].exp()), bp.Ensemble(members=2, cores=n), **how) for n in (1, 2))
    assert torch.equal(*(bp.predict(p, x).mean for p in (few, many)))
    few.save(tmp_path)
    bp.load(tmp_path, entry)
    with pytest.warns(UserWarning, match="'likelihood.scale' of the module, which no archive holds"):
        bp.load(tmp_path, bp.Bayesian(torch.nn.Linear(3, 1), likelihood=Rates(1.0)))
