"""The Laplace approximation where the answer is known: exact for regression, elsewhere the model's own curvature."""

import math
from dataclasses import replace

import pyro.poutine as poutine
import pytest
import torch
from conjugate import correlated, dataset, model_of
from monte_carlo import covariance
from refused import refuses
from test_counts_and_logarithms import visits
from zoo_problems import traced_log_joint

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.inference import laplace, linear
from bnn_pyro.inference.linear import Curvature, factored, summed
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.parts.observed import ReadLikelihood
from bnn_pyro.parts.weights import cut


def check_exact(problem, temperature=1.0):
    """q is the conjugate posterior of the noise σ√T: to float64 inside, and to float32, in which it is kept."""
    target = replace(problem, noise=problem.noise * math.sqrt(temperature))
    exact = torch.linalg.inv(target.precision)
    sd = exact.diagonal().sqrt()
    doubled = replace(problem.data, x_train=problem.data.x_train.double())  # the guide is of the inputs' type
    for data, room, rounding in ((doubled, 1e-8, 0.0), (problem.data, 3e-6, 2**-23)):
        method = bp.Laplace(temperature=temperature)
        posterior = method.run(model_of(problem.entry(), data.schema), None, data)
        found = covariance(posterior.guide).detach().double()
        off = ((found - exact) / sd[:, None] / sd).abs().max()
        assert off < room, f"the covariance is off by {off:.1e}"
        off = (posterior.guide.loc.double() - target.mean).abs()
        assert (off <= room * sd + rounding * target.mean.abs()).all(), f"the mean is off: {off}"
        # p(y | w)^(1/T) is N(y; f, σ²T) but for its normaliser.
        volume = 2 * math.pi * problem.noise**2
        lost = 0.5 * len(problem.y) * (math.log(volume * temperature) - math.log(volume) / temperature)
        assert posterior.stats["log_evidence"].shape == (1, 1)
        evidence = posterior.stats["log_evidence"].item()
        assert evidence == pytest.approx(target.log_evidence + lost, rel=1e-10), "the evidence is off"
        joint, likelihood, prior = (posterior.trace[f"log_{part}"][-1] for part in ("joint", "likelihood", "prior"))
        assert joint == pytest.approx(likelihood / temperature + prior)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("settings", [{}, dict(noise=5.0, y_shift=40.0, y_scale=8.0), {"bias": False}])
def test_regression_is_the_conjugate_posterior(settings, temperature, monkeypatch):
    check_exact(correlated(**settings), temperature)
    # Where the log joint is quadratic one Newton step leads to the mode, from wherever L-BFGS came to.
    monkeypatch.setattr(laplace, "MAX_DISTANCE", 1e9)
    monkeypatch.setattr(laplace, "MAX_ROUND", 1)
    check_exact(correlated(**settings), temperature)


def classes(num_classes, num=60, inputs=3):
    g = torch.Generator().manual_seed(num_classes)
    x = torch.randn(num, inputs, generator=g)
    logits = x @ torch.randn(inputs, num_classes, generator=g)
    y = (logits - torch.rand(num, num_classes, generator=g).log().neg().log()).argmax(1)
    schema = bp.Schema("classification", (inputs,), classes=tuple("abcd"[:num_classes]))
    return dataset(x, y, schema)


def log_joint(model, data, temperature=1.0):
    """The Pyro model's own log joint in float64, as a function of the flat vector of its sites."""
    model, x, y = model.double(), data.x_train.double(), data.y_train
    y = y.double() if y.is_floating_point() else y
    return lambda w: traced_log_joint(model, sites(model, w), x, y, temperature)


def sites(model, w):
    return cut(w, {site: value.shape for site, value in model.initial.items()})


TARGETS = correlated(60, 3, noise=1.8, y_shift=2.0, y_scale=3.0).data
CASES = {
    "binary": (lambda: classes(2), {}),
    "softmax": (lambda: classes(4), {"prior": "fan-in:2"}),
    "far off": (lambda: classes(4), {}),
    "cold": (lambda: classes(3), {"temperature": 0.5}),
    "learned noise": (lambda: TARGETS, {}),
    "heteroscedastic": (lambda: TARGETS, {"noise": "heteroscedastic"}),
    "exposure": (lambda: bp.dataset(visits(90), "count", task="counts", exposure="hours"), {"likelihood": "poisson"}),
}


@pytest.mark.parametrize("case", CASES)
def test_mode_and_precision_are_those_of_the_model(case, monkeypatch):
    """At the mode the gradient of the model's log joint is 0 and, for canonical likelihoods, its Hessian is −Λ.

    Of a learned or heteroscedastic noise, Λ is the expectation of the Hessian over targets that the model draws.
    Once the way there is from far off, in many short rounds, by the curvature of few rows.
    """
    data, settings = CASES[case][0](), dict(CASES[case][1])
    temperature = settings.pop("temperature", 1.0)
    monkeypatch.setattr(linear, "ROWS", 17)  # so that the sum is over chunks, and of unequal ones
    entry = bp.MeanField(hidden=(), **settings)
    model = model_of(entry, data.schema)
    if case == "far off":
        monkeypatch.setattr(laplace, "MAX_SINGLE_ROWS", 5)  # all other rows as their mean
        monkeypatch.setattr(laplace, "MAX_ROUND", 3)
        model.net.layers[0].weight.data.mul_(20)
    posterior = bp.Laplace(temperature=temperature).run(model, None, data)
    of, mode = log_joint(model_of(entry, data.schema), data, temperature), posterior.guide.loc.detach().double()
    lower = torch.linalg.cholesky(covariance(posterior.guide).detach().double())
    precision = torch.cholesky_inverse(lower)
    gradient = torch.autograd.functional.jacobian(of, mode)
    # In posterior standard deviations: the mode is kept in float32.
    assert (lower.mT @ gradient).abs().max() < 1e-3
    assert posterior.trace["log_joint"][-1] == pytest.approx(of(mode).item(), abs=1e-4)
    scale = precision.diagonal().rsqrt()
    hessian = -torch.func.hessian(of)(mode)
    if case in ("learned noise", "heteroscedastic"):
        hessian = expected_hessian(model_of(entry, data.schema), data, mode)
    error = ((precision - hessian) * scale[:, None] * scale).abs().max()
    assert error < (1e-3 if case in ("far off", "exposure") else 2e-5), error


def expected_hessian(model, data, w):
    """−E[∂² log joint] over targets that the model draws at w: for noises, the Hessian is quadratic in each target.

    Two values of the right mean and variance then have the right expectation.
    """
    with bp.isolated(0), ReadLikelihood() as read:
        poutine.condition(model.double(), data=sites(model, w))(data.x_train.double())
    fn = read.likelihood
    each = [replace(data, y_train=y.detach()) for y in (fn.mean + fn.stddev, fn.mean - fn.stddev)]
    return sum(-torch.func.hessian(log_joint(model, one))(w) for one in each) / 2


def test_kron_is_full_where_the_information_is_the_same_everywhere():
    """With prior weights that depend on the input alone, and at f = 0, where every I_n is diag(p) − ppᵀ of one p."""
    data = classes(3)
    model = model_of(bp.MeanField(hidden=(), prior="fan-in:1"), data.schema).double()
    problem = Curvature(LogJoint(model, data.x_train.double(), data.y_train))
    for w, same in ((torch.zeros(12), True), (torch.linspace(-2, 2, 12), False)):
        full, kron = (problem.precision(w.double(), structure) for structure in (summed, factored))
        assert torch.allclose(kron, full) if same else (full - kron).abs().max() > 0.5


def test_refusals_tell_the_way_out(monkeypatch):
    data = classes(3)
    for settings, iterations, message in (
        (dict(hidden=(4,)), 100, "linear models"),
        (dict(prior="scale-mixture:1,0.1,0.5"), 100, "needs a Normal prior"),
        (dict(prior="gamma:1,1"), 100, "needs a Normal prior"),
        (dict(prior="normal:100"), 1, "not found in 1 iterations"),
        (dict(bias=False), 100, "8 weights at most, and this model has 9"),
    ):
        monkeypatch.setattr(laplace, "MAX_WEIGHTS", 8 if "bias" in settings else 12)
        model = model_of(bp.MeanField(**{"hidden": (), **settings}), data.schema)
        refuses(message, bp.Laplace(max_iterations=iterations).run, model, None, data)


def test_it_stops_on_a_signal(tmp_path):
    data, checkpoint = classes(3), Checkpoint(tmp_path)
    checkpoint.signalled = True
    with pytest.raises(Interrupted):
        bp.Laplace().run(model_of(bp.MeanField(hidden=()), data.schema), None, data, checkpoint=checkpoint)
    assert not checkpoint.exists
