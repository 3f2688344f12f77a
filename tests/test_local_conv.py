"""Convolutions by local reparametrization: moments of sampled weights at every position, gradients, KL, the network."""

import math
from dataclasses import replace

import pyro
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import kl_divergence
from torch.func import functional_call

import bnn_pyro as bp
from bnn_pyro.checks.linear_regression import dataset
from bnn_pyro.parts.gradients import LocalConv2d
from bnn_pyro.parts.local_layer import Conv2dLayer, LinearLayer
from bnn_pyro.parts.nets import ConvNet
from bnn_pyro.parts.weights import NormalWeights
from bnn_pyro.zoo import BayesianConvNet

GEOMETRIES = [((3, 3), (1, 1), (1, 1)), ((2, 3), (2, 1), (0, 1)), ((5, 5), (1, 1), (0, 0)), ((1, 1), (2, 2), (0, 0))]
every_geometry = pytest.mark.parametrize(
    ("kernel", "stride", "padding", "bias"),
    [(*geometry, bias) for geometry, bias in zip(GEOMETRIES, [True, False] * 2, strict=True)],
)


def convolution(*arguments, **settings):
    return nn.Conv2d(*arguments, device="meta", **settings)


def layer(kernel=(3, 3), stride=(1, 1), padding=(0, 0), bias=True, B=2, C=2, out=3, size=5, seed=0, **settings):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(B, C, size, size, generator=g, dtype=torch.float64)
    like, rows = convolution(C, out, kernel, stride, padding, bias=bias), C * kernel[0] * kernel[1] + bias
    mean = torch.randn(rows, out, generator=g, dtype=torch.float64) / math.sqrt(rows)
    scale = 0.3 * torch.exp(0.3 * torch.rand(rows, out, generator=g, dtype=torch.float64))
    return Conv2dLayer(X, NormalWeights(mean, scale), like, **settings)


def sampled(one, draws, bias=True):
    """The weight-space layer: (draws, B, out, H, W), one W for all positions and rows of a draw."""
    shape, stride, padding = one.geometry
    A = one.weights.rsample((draws,))
    rows = A[:, : A.shape[1] - bias].mT.reshape(draws * shape[0], *shape[1:])
    out = F.conv2d(one.X, rows, A[:, -1].flatten() if bias else None, stride=stride, padding=padding)
    return out.unflatten(1, (draws, shape[0])).movedim(1, 0)


# -- the layer itself ----------------------------------------------------------------------------------------------
@every_geometry
def test_moments_of_every_position_are_those_of_sampled_weights(kernel, stride, padding, bias, draws=10_000):
    one = layer(kernel, stride, padding, bias)
    with bp.isolated(0):
        local, weights = one.rsample((draws,)), sampled(one, draws, bias)
    assert local.shape == weights.shape == (draws, *one.batch_shape, *one.event_shape)
    # Two-sided z of 5 for the difference of two means of `draws` draws, and of two variances (fourth moment measured).
    se = ((local.var(0) + weights.var(0)) / draws).sqrt()
    assert ((local.mean(0) - weights.mean(0)).abs() <= 5 * se + 1e-12).all()
    spread = [(v - v.mean(0)).square().var(0) for v in (local, weights)]
    assert ((local.var(0) - weights.var(0)).abs() <= 5 * ((spread[0] + spread[1]) / draws).sqrt() + 1e-12).all()


@pytest.mark.parametrize("size", [1, 3])
def test_one_position_is_the_linear_layer(size):
    """A kernel as large as the image: the same draws, the same KL, the same gradients."""
    one, prior = layer((size, size), size=size, B=4), layer((size, size), size=size, B=4, seed=5)
    flat = F.pad(one.X.flatten(1), (0, 1), value=1.0)
    found = []
    for make in (
        lambda w: Conv2dLayer(one.X, w, convolution(2, 3, size), torch.tanh),
        lambda w: LinearLayer(flat, w, torch.tanh),
    ):
        mean, scale = (t.clone().requires_grad_() for t in (one.weights.loc, one.weights.scale))
        q, p = make(NormalWeights(mean, scale)), make(prior.weights)
        with bp.isolated(0):
            value = q.rsample().flatten(1)
        kl = kl_divergence(q, p)
        found.append((value, kl, *torch.autograd.grad(value.square().sum() + kl.sum(), (mean, scale))))
    for conv, linear in zip(*found, strict=True):
        torch.testing.assert_close(conv, linear)


@every_geometry
def test_gradient_of_the_local_convolution(kernel, stride, padding, bias):
    one = layer(kernel, stride, padding, bias, B=1, out=2)
    inputs = [t.clone().requires_grad_() for t in (one.X, one.weights.loc, one.weights.variance)]
    for shape in (torch.Size(), torch.Size((2,))):

        def draw(X, mean, variance, shape=shape):
            with bp.isolated(1):  # the same noise in every call
                return LocalConv2d.apply(X, mean, variance, one.geometry, shape)

        assert torch.autograd.gradcheck(draw, inputs)


@pytest.mark.parametrize("bias", [True, False])
def test_an_all_black_image_has_a_finite_gradient(bias):
    one = layer(bias=bias)
    X = one.X.clone()
    X[0] = 0.0
    X.requires_grad_()
    mean, variance = (t.clone().requires_grad_() for t in (one.weights.loc, one.weights.variance))
    with bp.isolated(0):
        out = LocalConv2d.apply(X, mean, variance, one.geometry, torch.Size())
    grads = torch.autograd.grad(out.square().sum(), (X, mean, variance))
    assert all(g.isfinite().all() for g in grads)
    if not bias:
        assert (out[0] == 0).all() and (grads[0][0] == 0).all()
    zero = torch.zeros_like(variance).requires_grad_()  # no noise at all: the plain convolution
    with bp.isolated(0):
        out = LocalConv2d.apply(X, mean, zero, one.geometry, torch.Size())
    assert (torch.autograd.grad(out.square().sum(), zero)[0] == 0).all()


def test_event_shapes_and_plates():
    def flat(x):
        return F.max_pool2d(x.flatten(0, -4), 2).unflatten(0, x.shape[:-3]).flatten(-3)

    assert layer().event_shape == (3, 3, 3) and layer(size=6, non_linearity=flat).event_shape == (12,)
    with bp.isolated(0), pyro.validation_enabled():
        with pyro.plate("rows", 2):
            assert pyro.sample("h", layer(size=6, non_linearity=flat)).shape == (2, 12)
        with pyro.plate("particles", 4, dim=-2), pyro.plate("rows", 2, dim=-1):
            h = pyro.sample("g", layer())
            assert h.shape == (4, 2, 3, 3, 3) and not torch.equal(h[0], h[1])
            ones = torch.ones(3, 7).double()
            next_layer = Conv2dLayer(h, NormalWeights(ones, ones), convolution(3, 7, 1, bias=False))
            assert pyro.sample("f", next_layer).shape == (4, 2, 7, 3, 3)


# -- the network ---------------------------------------------------------------------------------------------------
def test_many_draws_are_one_draw_at_a_time():
    with bp.isolated(0):
        net = ConvNet((2, 8, 6), (3, 4), (5,), 7, "leaky_relu").double()
        x = torch.randn(6, 2, 8, 6).double()
        w = {name: torch.randn(5, *p.shape).double() for name, p in net.named_parameters()}
    together = functional_call(net, w, (x,))
    one = [functional_call(net, {name: value[s] for name, value in w.items()}, (x,)) for s in range(5)]
    torch.testing.assert_close(together, torch.stack(one))
    vectorised = {name: value.unsqueeze(1) for name, value in w.items()}  # as Pyro's plates have them
    torch.testing.assert_close(functional_call(net, vectorised, (x,)), together.unsqueeze(1))
    many = torch.stack([x, 2 * x])  # inputs of their own for each draw
    mixed = functional_call(net, {name: value[:2] for name, value in w.items()}, (many,))
    torch.testing.assert_close(mixed[0], one[0])
    torch.testing.assert_close(net(many)[1], net(2 * x))


def test_it_is_the_network_that_one_would_write():
    with bp.isolated(0):
        net = ConvNet((1, 12, 12), (3, 4), (5,), 2, "tanh", kernel=3, padding=0)
        x = torch.randn(6, 1, 12, 12)
    conv, linear = net.convolutions, net.layers
    plain = nn.Sequential(
        *(part for layer in conv for part in (layer, nn.Tanh(), nn.MaxPool2d(2))), nn.Flatten(), linear[0], nn.Tanh()
    )
    assert net(x).std(0).min() > 0.01  # units that are dead would agree whatever came before
    torch.testing.assert_close(net(x), linear[1](plain(x)))
    assert net.width == 3 * 10 * 10
    h = net.enter(x)
    for _, layer, after in net.stages():
        h = layer(h) if after is None else after(layer(h))
    torch.testing.assert_close(h, net(x))


# -- inside the zoo ------------------------------------------------------------------------------------------------
SMALL = BayesianConvNet(hidden=(4,), channels=(2, 3), init_scale=0.1, prior="normal:1")


def images(num=12, size=6, classes=("a", "b", "c")):
    g = torch.Generator().manual_seed(8)
    x, y = torch.randn(num, 1, size, size, generator=g), torch.arange(num) % len(classes)
    x += (y[:, None, None, None] - 1) * 0.8
    return dataset(x, y, bp.Schema("classification", (1, size, size), classes=classes), x[:7], y[:7])


def test_it_learns_is_saved_and_predicts(tmp_path):
    data = images(num=60)
    entry = replace(SMALL, scale="unit", prior="log-uniform", init_scale=0.3)
    posterior = bp.fit(entry, data, bp.SVI(epochs=80, batch_size=30, lr=0.05), out=tmp_path, progress=False)
    prediction = bp.predict(posterior, data.x_train, num_draws=20)
    assert (prediction.mean.argmax(-1) == data.y_train).float().mean() > 0.9
    again = bp.predict(bp.load(tmp_path, entry), data.x_train, num_draws=20)
    assert torch.equal(prediction.components.logits, again.components.logits)
    in_parts = bp.predict(posterior, data.x_train, num_draws=20, max_memory=100_000)
    torch.testing.assert_close(in_parts.components.logits, prediction.components.logits)


def test_what_it_does_not_take():
    table = bp.Schema("classification", (13,), classes=("a", "b"))
    with pytest.raises(bp.UserError, match=r"takes images .* shape \(13,\); take .* hidden-layer"):
        SMALL.model(table)
    with pytest.raises(bp.UserError, match=r"images of 3 × 28 pixels are too small for 2 convolutions"):
        SMALL.model(bp.Schema("classification", (1, 3, 28), classes=("a", "b")))
    for wrong in ({"channels": ()}, {"channels": (0,)}, {"kernel": 0}, {"padding": 3}):
        with pytest.raises(bp.UserError, match=r"at least 1|one or more numbers|padding must lie between 0 and"):
            BayesianConvNet(**wrong)
