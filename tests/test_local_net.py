"""Networks by local reparametrization: the ELBO and the predictions of the same weights, and a known optimum.

Tolerances are Monte-Carlo errors: z = 5 of the measured standard errors, unless a comment says otherwise.
"""

import gc
import math
import weakref

import pytest
import torch
from conjugate import correlated, dataset
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from torch import nn

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import elbo_of
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.nets import ConvNet
from bnn_pyro.parts.priors import BayesianNet, widest_activation
from bnn_pyro.zoo import BayesianConvNet, HiddenLayerNet

SCALES = {
    "free": dict(scale="free", init_scale=0.3, prior="fan-in:1.5"),
    "layer": dict(scale="layer", init_scale=0.4, prior="log-uniform"),
    "unit": dict(scale="unit", init_scale=0.4, prior="log-uniform"),
    "weight": dict(scale="weight", init_scale=0.4, prior="normal:2"),
}


def data(task="multiclass", num=20, features=3):
    g = torch.Generator().manual_seed(2)
    x = torch.randn(num, features, generator=g)
    if task == "regression":
        return dataset(x, 5 + 2 * x.sum(-1), bp.Schema("regression", (features,), y_shift=5.0, y_scale=2.0))
    return dataset(x, torch.arange(num) % 3, bp.Schema("classification", (features,), classes=tuple("abc")))


def perturbed(entry, problem, spread=0.3):
    """Model and guide with parameters that are no starting values."""
    with isolated(1):
        model = entry.model(problem.schema)
        guide = entry.guide(model)
        for p in guide.parameters():
            p.data += spread * torch.randn_like(p)
    return model, guide


@pytest.mark.parametrize(("scale", "task"), list(zip(SCALES, ["regression", "multiclass"] * 2, strict=True)))
def test_the_elbo_is_that_of_the_same_weights(scale, task, draws=300):
    problem = data(task)
    model, guide = perturbed(HiddenLayerNet(hidden=(6, 5), **SCALES[scale]), problem)
    batch = problem.x_train, problem.y_train
    with isolated(0), torch.no_grad():
        local = [elbo_of(model, guide, *batch) for _ in range(draws)]
        weights = [elbo_of(model.weight_space, guide.weight_space, *batch) for _ in range(draws)]
        vectorised = TraceMeanField_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1)
        pyros = [-one.loss(model, guide, *batch) for one in (TraceMeanField_ELBO(), Trace_ELBO(), vectorised)]
    (elbo, fit), (elbo_w, fit_w) = (torch.tensor(v).double().T for v in (local, weights))
    kl = (fit - elbo).mean()
    torch.testing.assert_close(fit - elbo, kl.expand(draws), rtol=1e-5, atol=1e-3)  # closed: the same in every draw
    # The KL of one matrix (fan-in + 1, out) is that of its weights and biases as sites of their own.
    torch.testing.assert_close((fit_w - elbo_w).mean(), kl, rtol=1e-4, atol=1e-2)
    error = math.sqrt((fit.var() + fit_w.var()) / draws)
    assert abs(fit.mean() - fit_w.mean()) < 5 * error
    assert error < 0.05 * abs(fit.mean())
    assert all(abs(one - (fit.mean() - kl)) < 6 * fit.std() for one in pyros)  # of one draw, and of three


def test_the_conjugate_optimum_through_fit(batch_size=50):
    problem = correlated()
    entry = HiddenLayerNet(hidden=(), noise=problem.noise, prior=f"normal:{problem.prior_scale}", init_scale=0.05)
    svi = bp.SVI(epochs=250, batch_size=batch_size, lr=0.03, final_lr=0.0)
    q = bp.fit(entry, problem.data, svi, progress=False, device="cpu").guide.layers[0]().expand(())
    elbo = problem.elbo(q.loc.detach().double().flatten(), q.scale.detach().double().flatten())
    assert -1e-4 < problem.log_evidence - problem.gap - elbo < 0.3  # nats; a KL per row costs tens


def test_it_is_the_network_that_one_would_write():
    with isolated(0):
        net = ConvNet((1, 12, 12), (3, 4), (5,), 2, "tanh", kernel=3, padding=0)
        x = torch.randn(6, 1, 12, 12)
    conv, linear = net.convolutions, net.layers
    plain = nn.Sequential(
        *(part for layer in conv for part in (layer, nn.Tanh(), nn.MaxPool2d(2))), nn.Flatten(), linear[0], nn.Tanh()
    )
    assert net(x).std(0).min() > 0.01  # units that are dead would agree whatever came before
    torch.testing.assert_close(net(x), linear[1](plain(x)))
    model = BayesianNet(net, make_likelihood(bp.Schema("regression", (1, 12, 12)), "heteroscedastic"))
    assert widest_activation(model, x) == 3 * 10 * 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HiddenLayerNet(scale="layers"), r"unknown scale 'layers'.*layer"),
        (lambda: HiddenLayerNet(scale="unit", init_scale=1.0), r"first α .* below 1, got 1"),
        (lambda: HiddenLayerNet(prior="scale-mixture").model(data().schema), "normal, fan-in or log-uniform"),
        (lambda: HiddenLayerNet(prior="log-uniform:1").model(data().schema), "must have the form log-uniform"),
        (lambda: BayesianConvNet().model(data().schema), r"takes images .* shape \(3,\); take .* hidden-layer"),
        (
            lambda: BayesianConvNet().model(bp.Schema("classification", (1, 3, 28), classes=("a", "b"))),
            "images of 3 × 28 pixels are too small for 2 convolutions",
        ),
        (lambda: BayesianConvNet(channels=()), "one or more numbers"),
        (lambda: BayesianConvNet(kernel=0), "at least 1"),
        (lambda: BayesianConvNet(padding=3), "padding must lie between 0 and"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with isolated(0), pytest.raises(bp.UserError, match=message):
        make()


@pytest.mark.parametrize("scale", ["free", "layer"])
def test_a_step_leaves_nothing_for_the_garbage_collector(scale):
    """Activations of one step in a cycle would stay until some later collection: several steps' memory at once."""
    problem = data()
    model, guide = perturbed(HiddenLayerNet(hidden=(6, 5), **SCALES[scale]), problem)
    made = []

    class Remember(Messenger):
        def _pyro_post_sample(self, msg):
            made.extend(weakref.ref(thing) for thing in (msg["fn"], msg["value"]) if thing is not problem.y_train)

    with isolated(0):
        elbo_of(model, guide, problem.x_train, problem.y_train)[0].backward()  # the first may collect
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                with Remember():
                    elbo, _ = elbo_of(model, guide, problem.x_train, problem.y_train)
                elbo.backward()
                del elbo
        finally:
            gc.enable()
    assert len(made) > 20
    assert [ref() for ref in made if ref() is not None] == []
