"""What variants are made of: priors, nets, likelihoods and guides, against densities written out or libraries'."""

import math

import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import kstest, norm
from torch.distributions import Independent, Normal, kl_divergence
from torch.func import functional_call

import bnn_pyro as bp
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.nets import ACTIVATIONS, MLP
from bnn_pyro.parts.observed import ReadLikelihood
from bnn_pyro.parts.priors import PRIORS, BayesianNet, ScaleMixture, parse_prior, widest_activation
from bnn_pyro.parts.weights import CentredNormal


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- priors ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("normla:1", "unknown prior 'normla'; did you mean 'normal'"),
        ("", "unknown prior ''"),
        ("normal:0", "form normal:SCALE .*SCALE > 0"),
        ("normal:nan", "form normal:SCALE"),
        ("fan-in:1,", "form fan-in:SCALE"),
        ("gamma:0,1", "form gamma:SHAPE,RATE"),
        ("scale-mixture:1,2,3,4", "form scale-mixture:WIDE,NARROW,WEIGHT"),
        ("scale-mixture:1,0.1,1.5", "weight of the wide component must lie between 0 and 1, got 1.5"),
    ],
)
def test_priors_that_are_refused(text, message):
    with pytest.raises(bp.UserError, match=message):
        parse_prior(text)


@pytest.mark.parametrize("name", PRIORS)
def test_every_prior_has_defaults_and_the_parameters_shape(name):
    for shape in ((5, 3), (5,), (4, 2, 3, 3)):
        prior = parse_prior(name)(torch.zeros(shape))
        assert prior.event_shape == shape and prior.batch_shape == ()
        assert prior.log_prob(torch.ones(7, *shape)).shape == (7,)
        assert prior.expand(torch.Size((6,))).log_prob(torch.ones(6, *shape)).shape == (6,)
        if name != "log-uniform":  # improper: tests/test_weights.py
            with isolated(0):
                assert prior.sample((7,)).shape == (7, *shape) and prior.expand((6,)).sample().shape == (6, *shape)


def test_scales():
    """normal: the same everywhere; fan-in: 1/√fan-in for weights, dense or convolutional, and 1 for biases."""
    for text, shape, scale in [
        ("normal:2.5", (4, 9), 2.5),
        ("normal:2.5", (4,), 2.5),
        ("fan-in:3", (4, 9), 1.0),
        ("fan-in:3", (4,), 3.0),
        ("fan-in:6", (8, 4, 3, 3), 1.0),
    ]:
        value = randn(2, *shape)
        expected = norm.logpdf(value.double().numpy(), scale=scale).reshape(2, -1).sum(1)
        torch.testing.assert_close(
            parse_prior(text)(torch.zeros(shape)).log_prob(value).double(), torch.tensor(expected), rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize("shape", [(), (4,), (3, 2)])
def test_isotropic_normal_is_torchs(shape):
    mine, theirs = CentredNormal(torch.tensor(0.7), torch.Size(shape)), Normal(torch.zeros(shape), 0.7)
    theirs = Independent(theirs, len(shape))
    value, loc, scale = randn(6, *shape), randn(*shape, seed=1), randn(*shape, seed=2).exp()
    torch.testing.assert_close(mine.log_prob(value), theirs.log_prob(value))
    if shape:
        batch = Independent(Normal(value + loc, scale.expand(6, *shape)), len(shape))
        torch.testing.assert_close(kl_divergence(batch, mine), kl_divergence(batch, theirs))
    with isolated(0):
        many = mine.sample((20000,))
    assert many.std().item() == pytest.approx(0.7, rel=5 / math.sqrt(2 * many.numel()))


MIXTURE = ScaleMixture(torch.tensor(1.3), torch.tensor(0.04), 0.3, torch.Size())


def test_scale_mixture_density():
    w = torch.cat([torch.linspace(-4, 4, 41), torch.linspace(-0.1, 0.1, 21), torch.tensor([30.0, -200.0])])
    parts = [math.log(p) + Normal(0.0, scale).log_prob(w.double()) for p, scale in ((0.3, 1.3), (0.7, 0.04))]
    by_hand = torch.logsumexp(torch.stack(parts), 0)
    torch.testing.assert_close(MIXTURE.log_prob(w).double(), by_hand, rtol=1e-4, atol=1e-4)


def test_scale_mixture_samples_have_its_density():
    with isolated(3):
        draws = MIXTURE.sample((5000,)).numpy()
    assert kstest(draws, lambda w: 0.3 * norm.cdf(w, scale=1.3) + 0.7 * norm.cdf(w, scale=0.04)).pvalue > 1e-3
    assert kstest(draws, norm(scale=draws.std()).cdf).pvalue < 1e-6  # the test can tell it from one Normal


# -- nets --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("activation", "bias"), [("tanh", True), ("relu", False)])
def test_many_draws_in_one_call_equal_a_loop(activation, bias):
    with isolated(0):
        net = MLP((2, 3), (5, 4), 2, activation, bias)
        model = BayesianNet(net, make_likelihood(bp.Schema("regression", (2, 3))))
        assert widest_activation(model, torch.zeros(4, 2, 3)) == 5
    x = randn(7, 2, 3)
    draws = {name: randn(6, *p.shape, seed=i) for i, (name, p) in enumerate(net.named_parameters())}
    together = functional_call(net, draws, (x,))
    assert together.shape == (6, 7, 2)
    for s in range(6):
        one = functional_call(net, {name: value[s] for name, value in draws.items()}, (x,))
        torch.testing.assert_close(together[s], one)
    w = {name: p.detach() for name, p in net.named_parameters()}
    h = x.flatten(1)
    for i in range(3):
        h = h @ w[f"layers.{i}.weight"].T + w.get(f"layers.{i}.bias", 0.0)
        h = ACTIVATIONS[activation](h) if i < 2 else h
    torch.testing.assert_close(net(x).detach(), h)


# -- likelihoods -------------------------------------------------------------------------------------------------
def read(likelihood, f, **latent):
    with ReadLikelihood() as kept, poutine.condition(data=latent):
        likelihood(f)
    return kept.likelihood


SCHEMA = bp.Schema("regression", (1,), y_shift=100.0, y_scale=20.0)


def test_fixed_noise_is_in_target_units():
    d = read(make_likelihood(SCHEMA, 3.0), torch.tensor([[0.0], [1.0], [-2.0]]))
    assert d.mean.tolist() == [100.0, 120.0, 60.0] and d.stddev.tolist() == [3.0, 3.0, 3.0]


def test_learned_noise_has_a_prior_in_standardised_units():
    likelihood, f = make_likelihood(SCHEMA), torch.zeros(4, 1)
    d = read(likelihood, f, log_noise=torch.tensor(-1.0))
    assert d.stddev.tolist() == pytest.approx([20 / math.e] * 4)
    with isolated(0):
        trace = poutine.trace(likelihood).get_trace(f)
    prior = trace.nodes["log_noise"]["fn"]
    assert (prior.mean.item(), prior.stddev.item()) == (-1.0, 1.0)
    assert not trace.nodes["log_noise"]["cond_indep_stack"]


def test_heteroscedastic_noise():
    likelihood = make_likelihood(SCHEMA, "heteroscedastic")
    d = read(likelihood, torch.tensor([[0.5, 0.0], [0.0, -50.0], [0.0, 30.0]]))
    assert likelihood.outputs == 2 and d.mean.tolist() == [110.0, 100.0, 100.0]
    assert d.stddev.tolist() == pytest.approx([20 * (0.001 + math.log(2)), 0.02, 20 * 30.001])


def test_classification_likelihoods():
    f, y = randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    three = make_likelihood(bp.Schema("classification", (1,), classes=tuple("abc")))
    torch.testing.assert_close(read(three, f).log_prob(y), f.log_softmax(-1)[torch.arange(6), y])
    two = make_likelihood(bp.Schema("classification", (1,), classes=tuple("ab")))
    assert (three.outputs, two.outputs) == (3, 1)
    with isolated(0):
        observed = poutine.trace(two).get_trace(f[:, :1], (y > 0).long())  # integer labels
        observed.compute_log_prob()
    torch.testing.assert_close(observed.nodes["y"]["log_prob"], F.logsigmoid(f[:, 0] * (2.0 * (y > 0) - 1)))


# -- models and guides -------------------------------------------------------------------------------------------


def test_mean_field_normal_starts_where_it_is_told():
    initial = {"a": randn(2, 3), "b": torch.tensor(0.5)}
    guide = MeanFieldNormal(initial, init_scale=0.02)
    with isolated(0):
        nodes = poutine.trace(guide).get_trace(None).nodes
    for name, value in initial.items():
        d = nodes[name]["fn"]
        assert d.event_shape == value.shape and d.batch_shape == ()
        torch.testing.assert_close(d.mean, value)
        torch.testing.assert_close(d.stddev, torch.full_like(value, 0.02))
    initial["a"].zero_()
    assert not torch.equal(guide.sites()["a"], initial["a"])  # a copy of its own


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": (5, -1)}, "hidden"),
        ({"init_scale": 0.0}, "init"),
        ({"activation": "rleu"}, "unknown activation 'rleu'; did you mean 'relu'"),
        *[({"noise": noise}, "'learned', 'heteroscedastic', .* positive") for noise in ("leanred", "0", -2.0, "nan")],
    ],
)
def test_variant_settings_that_are_refused(settings, message):
    with pytest.raises(bp.UserError, match=message), isolated(0):
        bp.MeanField(**settings).model(SCHEMA)
