"""The layer that makes its KL along with its output: the numbers of the two made one by one, or those and no others."""

import pytest
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from test_local_net import data, perturbed
from torch.distributions import kl_divergence

import bnn_pyro as bp
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.local_layer import LinearLayer
from bnn_pyro.parts.local_linear import DropoutLinear, FreeLinear, LocalLinear
from bnn_pyro.parts.weights import CentredNormal, DropoutWeights, FreeWeights, KLNormal, LogUniform, NormalWeights
from bnn_pyro.zoo import HiddenLayerNet

every_bias = pytest.mark.parametrize("bias", [False, True])
every_scale = pytest.mark.parametrize("column", [False, True])


def arrays(bias, D=3, H=2, B=4, dtype=torch.float64, grad=True):
    """X, M, log V."""
    g = torch.Generator().manual_seed(0)
    X, M, L = (torch.randn(s, generator=g, dtype=dtype) for s in ((B, D), (D + bias, H), (D + bias, H)))
    return [t.requires_grad_(grad) for t in (X, M, L)]


def prior_scale(column, rows, dtype=torch.float64):
    return torch.linspace(0.5, 2.0, rows, dtype=dtype)[:, None] if column else torch.tensor(0.7, dtype=dtype)


def seeded(function):
    def call(*inputs):
        with isolated(1):  # the same noise in every call
            return function(*inputs)

    return call


@every_bias
@every_scale
@pytest.mark.parametrize("draws", [(), (2,)])
def test_gradients_of_output_and_kl_together(bias, column, draws):
    inputs, shape = arrays(bias), torch.Size(draws)
    s = prior_scale(column, 3 + bias)
    assert torch.autograd.gradcheck(seeded(lambda X, M, L: FreeLinear.apply(X, M, L, s, bias, shape)), inputs)
    assert torch.autograd.gradcheck(seeded(lambda X, M, L: FreeLinear.apply(X, M, L, None, bias, shape)[0]), inputs)
    V = inputs[2].detach().exp().requires_grad_()
    assert torch.autograd.gradcheck(seeded(lambda X, M, V: LocalLinear.apply(X, M, V, bias, shape)), (*inputs[:2], V))


@every_bias
@pytest.mark.parametrize("shape", [(), (1,), "column", "weight"])
def test_gradients_of_the_dropout_layer(bias, shape):
    X, M, _ = arrays(bias)
    shape = {"column": (3 + bias, 1), "weight": (3 + bias, 2)}.get(shape, shape)
    alpha = torch.linspace(0.2, 0.8, torch.Size(shape).numel(), dtype=torch.float64).view(shape).requires_grad_()
    draw = seeded(lambda X, M, a: DropoutLinear.apply(X, M, a, bias, torch.Size()))
    assert torch.autograd.gradcheck(draw, (X, M, alpha))


@every_bias
@every_scale
@pytest.mark.parametrize("batch", [(), (3,)])  # particles in front of the rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_loss_and_gradients_as_made_one_by_one(bias, column, batch, dtype):
    s = prior_scale(column, 3 + bias, dtype)
    found = []
    for told in (s, None):
        X, M, L = arrays(bias, dtype=dtype)
        q = LinearLayer(X, FreeWeights(M, L), torch.tanh, 0.3, bias, told).expand((*batch, 4))
        p = LinearLayer(X, CentredNormal(s, M.shape), torch.tanh, 0.3, bias)
        with isolated(3):
            output = q.rsample()
        assert (q._kl is not None) == (told is not None)
        loss = output.square().sum() + 2.5 * kl_divergence(q, p).sum()
        found.append((output, loss, *torch.autograd.grad(loss, (X, M, L))))
    for fused, apart in zip(*found, strict=True):
        torch.testing.assert_close(fused, apart, rtol=1e-5, atol=1e-5)


@every_bias
def test_another_prior_than_the_one_told_is_never_charged_in_its_place(bias):
    X, M, L = arrays(bias)
    told = prior_scale(True, 3 + bias)
    q = LinearLayer(X, FreeWeights(M, L), None, adjoin_one=bias, prior_scale=told)
    exact = KLNormal.apply(M, L.exp(), L, None, told)
    with isolated(0), torch.no_grad():
        q.rsample()
    assert not q._kl.requires_grad  # made without gradients ...
    torch.testing.assert_close(q.weights_kl(CentredNormal(told, M.shape)), exact)
    assert q.weights_kl(CentredNormal(told, M.shape)).requires_grad  # ... and so not taken for one that has them
    with isolated(0):
        q.rsample()
    assert q.weights_kl(CentredNormal(told, M.shape)) is q._kl
    torch.testing.assert_close(q._kl, exact)
    q._kl = torch.full_like(q._kl, 1e6).requires_grad_()  # planted: whoever takes it would be found out
    for other in (2 * told, told.clone(), torch.tensor(3.0).double()):
        right = KLNormal.apply(M, L.exp(), L, None, other)
        torch.testing.assert_close(q.weights_kl(CentredNormal(other, M.shape)), right)
    p = NormalWeights(torch.ones_like(M), told.expand(M.shape))
    torch.testing.assert_close(q.weights_kl(p), KLNormal.apply(M, L.exp(), L, p.loc, p.scale))
    torch.testing.assert_close(q.weights_kl(LogUniform(M.shape)), kl_divergence(q.weights, LogUniform(M.shape)))


def test_the_network_s_guide_knows_its_model_s_prior_and_notices_another():
    problem = data()
    entry = HiddenLayerNet(hidden=(6, 5), prior="fan-in:1.5", init_scale=0.3)
    model, guide = perturbed(entry, problem)
    with isolated(1):
        other = HiddenLayerNet(hidden=(6, 5), prior="normal:0.2").model(problem.schema)
    batch = problem.x_train, problem.y_train
    for p, known in ((model, True), (other, False)):
        with isolated(0), poutine.trace() as trace:
            guide(*batch)
        q = [site["fn"] for name, site in trace.trace.nodes.items() if name.startswith("layers")]
        priors = [prior() for prior in p.priors]
        assert [layer.weights_kl(prior) is layer._kl for layer, prior in zip(q, priors, strict=True)] == [known] * 3
        kl = sum(KLNormal.apply(w.loc, w.variance, w.log_variance, None, r.scale) for w, r in zip(
            [layer.weights for layer in q], priors, strict=True
        ))  # fmt: skip
        with isolated(0):
            loss = TraceMeanField_ELBO().differentiable_loss(p, guide, *batch)
        with isolated(0):
            elbo, likelihood = bp.inference.elbo.ELBO().parts(p, guide, *batch)
        torch.testing.assert_close(likelihood - elbo, kl)
        torch.testing.assert_close(-loss, elbo)


def test_black_images_have_finite_gradients():
    X, (_, M, L) = torch.zeros(2, 3), arrays(False, dtype=torch.float32)
    X.requires_grad_()
    with isolated(0):
        output, kl = FreeLinear.apply(X, M, L, torch.tensor(1.0), False, torch.Size())
    assert (output == 0).all()
    d_X, d_M, d_L = torch.autograd.grad(output.square().sum() + kl, (X, M, L))
    assert d_X.isfinite().all()
    torch.testing.assert_close(d_M, M.detach())
    torch.testing.assert_close(d_L, 0.5 * (L.detach().exp() - 1))
    weights = DropoutWeights(M.detach().requires_grad_(), torch.tensor(0.5, requires_grad=True))
    with isolated(0):
        output, none = weights.linear(X, False, torch.Size(), None)
    assert none is None
    assert all(t.isfinite().all() for t in torch.autograd.grad(output.sum(), (X, weights.loc, weights.alpha)))
