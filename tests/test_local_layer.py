"""Layers by local reparametrization: moments of sampled weights, gradients, one KL of the right sign."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import TraceMeanField_ELBO
from torch import nn
from torch.distributions import Normal, kl_divergence

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import elbo_of
from bnn_pyro.parts.gradients import FreeLinear, local_conv2d, local_linear
from bnn_pyro.parts.local_layer import Conv2dLayer, HiddenLayer
from bnn_pyro.parts.weights import CentredNormal, DropoutWeights, FreeWeights, NormalWeights

ONE, NO_DRAWS = torch.tensor(1.0), torch.Size()
every_bias = pytest.mark.parametrize("bias", [False, True])
#: Kernel, stride, padding, bias.
GEOMETRIES = [
    ((3, 3), (1, 1), (1, 1), True),
    ((2, 3), (2, 1), (0, 1), False),
    ((5, 5), (1, 1), (0, 0), True),
    ((1, 1), (2, 2), (0, 0), False),
]


def layer(B=2, D=3, H=4, seed=0, **settings):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, D, generator=g, dtype=torch.float64)
    mean = torch.rand(D, H, generator=g, dtype=torch.float64)
    scale = 0.3 * torch.exp(0.3 * torch.rand(D, H, generator=g, dtype=torch.float64))
    return HiddenLayer(x, mean, scale, **settings)


def conv_layer(kernel=(3, 3), stride=(1, 1), padding=(0, 0), bias=True, B=2, C=2, out=3, size=5, seed=0, **settings):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(B, C, size, size, generator=g, dtype=torch.float64)
    like = nn.Conv2d(C, out, kernel, stride, padding, bias=bias, device="meta")
    rows = C * kernel[0] * kernel[1] + bias
    mean = torch.randn(rows, out, generator=g, dtype=torch.float64) / math.sqrt(rows)
    scale = 0.3 * torch.exp(0.3 * torch.rand(rows, out, generator=g, dtype=torch.float64))
    return Conv2dLayer(X, NormalWeights(mean, scale), like, **settings)


def sampled(one, draws, bias):
    """The convolution in weight space: (draws, B, out, H, W), one W for all positions and rows of a draw."""
    shape, stride, padding = one.geometry
    A = one.weights.rsample((draws,))
    rows = A[:, : A.shape[1] - bias].mT.reshape(draws * shape[0], *shape[1:])
    out = F.conv2d(one.X, rows, A[:, -1].flatten() if bias else None, stride=stride, padding=padding)
    return out.unflatten(1, (draws, shape[0])).movedim(1, 0)


def arrays(bias, D=3, H=2, B=4, dtype=torch.float64):
    """X, M, log V."""
    g = torch.Generator().manual_seed(0)
    X, M, L = (torch.randn(s, generator=g, dtype=dtype) for s in ((B, D), (D + bias, H), (D + bias, H)))
    return [t.requires_grad_() for t in (X, M, L)]


def prior_scale(column, rows):
    return torch.linspace(0.5, 2.0, rows).double()[:, None] if column else torch.tensor(0.7).double()


def check_gradient(function, inputs):
    def call(*inputs):
        with bp.isolated(1):  # the same noise in every call
            return function(*inputs)

    assert torch.autograd.gradcheck(call, inputs)


def same_moments(local, weights):
    """Two-sided z of 5 for the difference of two means of draws, and of two variances (fourth moment measured)."""
    draws = len(local)
    assert local.shape == weights.shape
    se = ((local.var(0) + weights.var(0)) / draws).sqrt()
    assert ((local.mean(0) - weights.mean(0)).abs() <= 5 * se + 1e-12).all()
    spread = [((v - v.mean(0)).square()).var(0) for v in (local, weights)]
    assert ((local.var(0) - weights.var(0)).abs() <= 5 * ((spread[0] + spread[1]) / draws).sqrt() + 1e-12).all()


@pytest.mark.parametrize(("non_linearity", "bias"), [(None, True), (F.relu, False), (torch.tanh, True)])
def test_moments_are_those_of_sampled_weights(non_linearity, bias, draws=50_000):
    kwargs = dict(non_linearity=non_linearity, include_hidden_bias=bias)
    with bp.isolated(0):
        local = layer(**kwargs).rsample((draws,))
        same_moments(local, layer(**kwargs, weight_space_sampling=True).rsample((draws,)))
    assert local.shape == (draws, 2, 4 + bias)
    if non_linearity is None:  # outputs are independent, also of different rows (Kingma et al. 2015, section 2.1)
        correlation = torch.corrcoef(local[..., :4].flatten(1).T) - torch.eye(8)
        assert (correlation.abs() <= 5 / math.sqrt(draws)).all()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_moments_of_every_position_are_those_of_sampled_weights(geometry, draws=10_000):
    one = conv_layer(*geometry)
    with bp.isolated(0):
        same_moments(one.rsample((draws,)), sampled(one, draws, geometry[-1]))


@every_bias
@pytest.mark.parametrize("draws", [(), (2,)])
def test_gradients_of_dense_layers(bias, draws):
    (X, M, L), shape = arrays(bias), torch.Size(draws)
    for s in (prior_scale(False, 3 + bias), prior_scale(True, 3 + bias)):  # of the output and the KL together
        check_gradient(lambda X, M, L, s=s: FreeLinear.apply(X, M, L, s, bias, shape), (X, M, L))
    V = L.detach().exp().requires_grad_()
    check_gradient(lambda X, M, V: local_linear(X, M, V, bias, shape), (X, M, V))
    for size in ((), (3 + bias, 1), (3 + bias, 2)):
        alpha = torch.linspace(0.2, 0.8, math.prod(size), dtype=torch.float64).view(size).requires_grad_()
        check_gradient(lambda X, M, a: DropoutWeights(M, a).linear(X, bias, shape), (X, M, alpha))


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradients_of_a_convolution(geometry):
    one = conv_layer(*geometry, B=1, out=2)
    inputs = [t.clone().requires_grad_() for t in (one.X, one.weights.loc, one.weights.variance)]
    for shape in (NO_DRAWS, torch.Size((2,))):
        check_gradient(lambda X, M, V, shape=shape: local_conv2d(X, M, V, one.geometry, shape), inputs)


def test_black_images_have_finite_gradients_and_add_nothing():
    X, (_, M, L) = torch.zeros(2, 3), arrays(False, dtype=torch.float32)
    conv, alpha, V = conv_layer(bias=False), torch.tensor(0.5), L.detach().exp()
    for draw, X, *parameters in (
        (lambda X, M, L: FreeLinear.apply(X, M, L, ONE, False, NO_DRAWS)[0], X, M, L),
        (lambda X, M, V: local_linear(X, M, V, False, NO_DRAWS), X, M, V),
        (lambda X, M, a: DropoutWeights(M, a).linear(X, False, NO_DRAWS), X, M, alpha),
        (lambda X, M, V: local_conv2d(X, M, V, conv.geometry, NO_DRAWS), 0 * conv.X, conv.weights.loc,
         conv.weights.variance),
    ):  # fmt: skip
        inputs = [t.detach().clone().requires_grad_() for t in (X, *parameters)]
        with bp.isolated(0):
            output = draw(*inputs)
        d_X, *others = torch.autograd.grad(output.square().sum() + output.sum(), inputs)
        assert (output == 0).all() and d_X.isfinite().all() and all((d == 0).all() for d in others)


def test_the_kl_is_that_of_the_weights_divided_among_the_rows():
    q, p = layer(A_prior_scale=0.7), layer(seed=5)
    own, laws = Normal(q.A_mean, q.A_scale), (Normal(0.0, 0.7), Normal(p.A_mean, p.A_scale))
    exact = [kl_divergence(own, law).sum() for law in laws]
    torch.testing.assert_close(q.KL, exact[0])
    torch.testing.assert_close(kl_divergence(q, p), (exact[1] / 2).expand(2))
    torch.testing.assert_close(kl_divergence(layer(KL_factor=0.25), p).sum(), exact[1] / 4)


def test_bad_shapes_and_values_without_a_density():
    for scale, message in (((3, 2), r"X must be .* 3\)"), ((3, 1), "A_scale must be")):
        with pytest.raises(ValueError, match=message):
            HiddenLayer(torch.ones(2, 4 if scale[1] == 2 else 3), torch.ones(3, 2), torch.ones(scale))
    with pytest.raises(NotImplementedError, match="is intractable"):
        layer().log_prob(torch.zeros(2, 5))


@pytest.mark.parametrize("elbo", [TraceMeanField_ELBO().differentiable_loss, elbo_of], ids=["pyro", "own"])
def test_a_layer_in_the_guide_alone_is_refused(elbo):
    def model():
        with pyro.plate("data", 4):
            pyro.sample("h", dist.Normal(torch.zeros(4, 3), 1.0).to_event(1))

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("h", layer(B=4, H=3, non_linearity=None, include_hidden_bias=False))

    with bp.isolated(0), pytest.raises(ValueError, match="make the model's site a HiddenLayer as well"):
        elbo(model, guide)


@every_bias
def test_another_prior_than_the_one_told_is_never_charged_in_its_place(bias):
    X, M, L = arrays(bias)
    known, q = prior_scale(True, 3 + bias), FreeWeights(M, L)
    q.prior_scale = known
    own, prior = Normal(M, (L / 2).exp()), CentredNormal(known, M.shape)
    with bp.isolated(0), torch.no_grad():
        q.linear(X, bias, NO_DRAWS)
    assert not q.known_kl.requires_grad and kl_divergence(q, prior).requires_grad  # one without gradients is not taken
    with bp.isolated(0):
        q.linear(X, bias, NO_DRAWS)
    assert kl_divergence(q, prior) is q.known_kl
    torch.testing.assert_close(q.known_kl, kl_divergence(own, Normal(0.0, known)).sum())
    q.known_kl = torch.full_like(q.known_kl, 1e6).requires_grad_()  # whoever takes it is noticed
    for other in (2 * known, known.clone(), torch.tensor(3.0).double()):
        right = kl_divergence(own, Normal(0.0, other)).sum()
        torch.testing.assert_close(kl_divergence(q, CentredNormal(other, M.shape)), right)
    p = NormalWeights(torch.ones_like(M), known.expand(M.shape))
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(own, Normal(p.loc, p.scale)).sum())
