"""Networks by local reparametrization: the ELBO and the predictions of the same weights, and optima that are known.

Tolerances are Monte-Carlo errors: z = 5 of the measured standard errors, unless a comment says otherwise.
"""

import gc
import math
import weakref

import pytest
import torch
from conjugate import correlated, dataset
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from scipy.optimize import minimize_scalar
from torch import nn
from torch.distributions import kl_divergence
from torch.func import functional_call

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import elbo_of
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.gradients import kl_log_uniform
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.local_layer import HiddenLayer
from bnn_pyro.parts.nets import ConvNet
from bnn_pyro.parts.own_module import call_with_draws
from bnn_pyro.parts.priors import BayesianNet, widest_activation
from bnn_pyro.zoo import BayesianConvNet, HiddenLayerNet, VariationalDropout

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


# -- the same number as in weight space ------------------------------------------------------------------------------
@pytest.mark.parametrize(("scale", "task"), list(zip(SCALES, ["regression", "multiclass"] * 2, strict=True)))
def test_the_elbo_is_that_of_the_same_weights(scale, task, draws=300):
    problem = data(task)
    model, guide = perturbed(HiddenLayerNet(hidden=(6, 5), **SCALES[scale]), problem)
    batch = problem.x_train, problem.y_train
    with isolated(0), torch.no_grad():
        local = [elbo_of(model, guide, *batch) for _ in range(draws)]
        weights = [elbo_of(model.weight_space, guide.weight_space, *batch) for _ in range(draws)]
        pyros = -TraceMeanField_ELBO().loss(model, guide, *batch)
    (elbo, fit), (elbo_w, fit_w) = (torch.tensor(v).double().T for v in (local, weights))
    kl = (fit - elbo).mean()
    torch.testing.assert_close(fit - elbo, kl.expand(draws), rtol=1e-5, atol=1e-3)  # closed: the same in every draw
    # The KL of one matrix (fan-in + 1, out) is that of its weights and biases as sites of their own.
    torch.testing.assert_close((fit_w - elbo_w).mean(), kl, rtol=1e-4, atol=1e-2)
    error = math.sqrt((fit.var() + fit_w.var()) / draws)
    assert abs(fit.mean() - fit_w.mean()) < 5 * error
    assert error < 0.05 * abs(fit.mean())
    assert abs(pyros - (fit.mean() - kl)) < 6 * fit.std()  # Pyro's own ELBO, one draw


def test_the_networks_guide_knows_its_models_prior_and_notices_another():
    problem = data()
    model, guide = perturbed(HiddenLayerNet(hidden=(6, 5), prior="fan-in:1.5", init_scale=0.3), problem)
    with isolated(1):
        other = HiddenLayerNet(hidden=(6, 5), prior="normal:0.2").model(problem.schema)
    batch = problem.x_train, problem.y_train
    for net, known in ((model, True), (other, False)):
        with isolated(0), poutine.trace() as trace:
            guide(*batch)
        q = [site["fn"] for name, site in trace.trace.nodes.items() if name.startswith("layers")]
        priors = [prior() for prior in net.priors]
        pairs = list(zip((layer.weights for layer in q), priors, strict=True))
        assert [kl_divergence(*pair) is pair[0].known_kl for pair in pairs] == [known] * 3
        kl = sum(kl_divergence(*pair) for pair in pairs)
        with isolated(0):
            loss = TraceMeanField_ELBO().differentiable_loss(net, guide, *batch)
        with isolated(0):
            elbo, likelihood = elbo_of(net, guide, *batch)
        torch.testing.assert_close(likelihood - elbo, kl)
        torch.testing.assert_close(-loss, elbo)


def test_the_local_gradient_has_the_smaller_variance(num=80):
    """Kingma et al. 2015, section 2.1: noise of its own for every row, where sampled weights share theirs."""
    gradients = {True: [], False: []}
    g = torch.Generator().manual_seed(3)
    x, target = torch.randn(64, 8, generator=g), torch.randn(64, 1, generator=g)
    for shared, found in gradients.items():
        for seed in range(num):
            mean, scale = torch.zeros(8, 1, requires_grad=True), torch.full((8, 1), 0.5, requires_grad=True)
            with isolated(seed):
                h = HiddenLayer(x, mean, scale, None, include_hidden_bias=False, weight_space_sampling=shared).rsample()
            (h - target).square().sum().backward()
            found.append(torch.cat([mean.grad, scale.grad]).flatten())
    weights, local = torch.stack(gradients[True]), torch.stack(gradients[False])
    se = ((weights.var(0) + local.var(0)) / num).sqrt()
    assert ((weights.mean(0) - local.mean(0)).abs() < 5 * se).all()  # the same expectation
    assert local.var(0).mean() < 0.25 * weights.var(0).mean()


# -- known optima -----------------------------------------------------------------------------------------------------
def test_the_conjugate_optimum_through_fit(batch_size=50):
    problem = correlated()
    entry = HiddenLayerNet(hidden=(), noise=problem.noise, prior=f"normal:{problem.prior_scale}", init_scale=0.05)
    svi = bp.SVI(epochs=250, batch_size=batch_size, lr=0.03, final_lr=0.0)
    q = bp.fit(entry, problem.data, svi, progress=False, device="cpu").guide.layers[0]().expand(())
    lacking = (
        problem.log_evidence
        - problem.gap
        - problem.elbo(q.loc.detach().double().flatten(), q.scale.detach().double().flatten())
    )
    assert -1e-4 < lacking < 0.3  # nats: what the gradient noise of an Adam leaves; a KL per row costs tens


def line(noise, num=40, slope=1.0):
    """y = slope·x + noise, standardised by nothing, no bias: one weight, whose best (μ, α) can be computed."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(num, 1, generator=g)
    y = slope * x[:, 0] + noise * torch.randn(num, generator=g)
    return dataset(x, y, bp.Schema("regression", (1,)))


def best_alpha(problem, noise):
    """argmax over α ≤ 1 of the exact ELBO, whose best μ for a given α is a shrunk least-squares slope."""
    x, y = problem.x_train[:, 0].double(), problem.y_train.double()
    sxx, sxy = x.square().sum().item(), (x * y).sum().item()

    def lost(log_a):
        mu = sxy / (sxx * (1 + math.exp(log_a)))
        fit = -0.5 * (-2 * mu * sxy + mu**2 * sxx * (1 + math.exp(log_a))) / noise**2
        return kl_log_uniform(torch.tensor(log_a)).item() - fit

    return math.exp(minimize_scalar(lost, bounds=(-14, 0), method="bounded", options={"xatol": 1e-8}).x)


def test_the_dropout_factor_moves_the_right_way():
    """Little noise in the targets: little dropout. Much: much. And each to the optimum that can be computed."""
    found = {}
    for noise in (0.2, 2.0):
        problem = line(noise)
        entry = VariationalDropout(hidden=(), noise=noise, bias=False, init_scale=0.1)
        posterior = bp.fit(entry, problem, bp.SVI(epochs=800, lr=0.1, final_lr=0.0), progress=False, device="cpu")
        found[noise] = posterior.guide.layers[0].alpha.item(), best_alpha(problem, noise)
    (little, _), (much, _) = found.values()
    assert 30 * little < much < 1
    for a, e in found.values():
        assert math.log(a / e) == pytest.approx(0, abs=0.35), found  # the optimum in log α is flat: curvature ½


# -- the network ---------------------------------------------------------------------------------------------------
def test_many_draws_are_one_draw_at_a_time():
    with isolated(0):
        net = ConvNet((2, 8, 6), (3, 4), (5,), 7, "leaky_relu").double()
        x = torch.randn(6, 2, 8, 6).double()
        w = {name: torch.randn(5, *p.shape).double() for name, p in net.named_parameters()}
    together = call_with_draws(net, w, x, rows_of_each=False)
    one = [functional_call(net, {name: value[s] for name, value in w.items()}, (x,)) for s in range(5)]
    torch.testing.assert_close(together, torch.stack(one))
    vectorised = {name: value.unsqueeze(1) for name, value in w.items()}  # as Pyro's plates have them
    torch.testing.assert_close(call_with_draws(net, vectorised, x, rows_of_each=False), together.unsqueeze(1))
    many = torch.stack([x, 2 * x])  # inputs of their own for each draw
    mixed = call_with_draws(net, {name: value[:2] for name, value in w.items()}, many, rows_of_each=True)
    torch.testing.assert_close(mixed[0], one[0])
    torch.testing.assert_close(net(many)[1], net(2 * x))


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
    h = net.enter(x)
    for _, layer, after in net.stages():
        h = layer(h) if after is None else after(layer(h))
    torch.testing.assert_close(h, net(x))


# -- errors -----------------------------------------------------------------------------------------------------------
def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(bp.UserError, match=r"unknown scale 'layers'.*layer"):
        HiddenLayerNet(scale="layers")
    with pytest.raises(bp.UserError, match=r"first α .* below 1, got 1"):
        HiddenLayerNet(scale="unit", init_scale=1.0)
    with pytest.raises(bp.UserError, match="closed form: normal, fan-in or log-uniform"), isolated(0):
        HiddenLayerNet(prior="scale-mixture").model(data().schema)
    with pytest.raises(bp.UserError, match="must have the form log-uniform"), isolated(0):
        HiddenLayerNet(prior="log-uniform:1").model(data().schema)


def test_inputs_and_shapes_that_do_not_fit_are_refused():
    table = bp.Schema("classification", (13,), classes=("a", "b"))
    with pytest.raises(bp.UserError, match=r"takes images .* shape \(13,\); take .* hidden-layer"):
        BayesianConvNet().model(table)
    with pytest.raises(bp.UserError, match=r"images of 3 × 28 pixels are too small for 2 convolutions"):
        BayesianConvNet().model(bp.Schema("classification", (1, 3, 28), classes=("a", "b")))
    for wrong in ({"channels": ()}, {"channels": (0,)}, {"kernel": 0}, {"padding": 3}):
        with pytest.raises(bp.UserError, match=r"at least 1|one or more numbers|padding must lie between 0 and"):
            BayesianConvNet(**wrong)


# -- what a step leaves behind -----------------------------------------------------------------------------------------
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
