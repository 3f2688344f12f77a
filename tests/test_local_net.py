"""Networks by local reparametrization: the ELBO and the predictions of the same weights, and optima that are known.

Tolerances are Monte-Carlo errors: z = 5 of the measured standard errors, unless a comment says otherwise.
"""

import gc
import math
import weakref

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from scipy.optimize import minimize_scalar

import bnn_pyro as bp
from bnn_pyro.checks.linear_regression import correlated, dataset
from bnn_pyro.inference.log_joint import ELBO
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.gradients import kl_log_uniform
from bnn_pyro.parts.weights import log_alpha
from bnn_pyro.zoo import HiddenLayerNet, SparseDropout, VariationalDropout

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
        local = [ELBO().parts(model, guide, *batch) for _ in range(draws)]
        weights = [ELBO().parts(model.weight_space, guide.weight_space, *batch) for _ in range(draws)]
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


@pytest.mark.parametrize("scale", ["free", "unit"])
def test_predictions_by_weights_are_those_by_activations(scale, draws=20_000):
    problem = data()
    entry = HiddenLayerNet(hidden=(6,), **SCALES[scale])
    model, guide = perturbed(entry, problem)
    x = problem.x_train[:4]
    with isolated(0), torch.no_grad():
        with poutine.trace() as trace, pyro.plate("draws", draws, dim=-2):
            guide(x)
        local = trace.trace.nodes["layers.1"]["value"].log_softmax(-1)
    weights = bp.predict(bp.Posterior(model, problem.schema, guide=guide), x, num_draws=draws).components.logits
    assert local.shape == weights.shape == (draws, 4, 3)
    for f in (lambda v: v, torch.exp, lambda v: v.square()):
        a, b = f(local), f(weights)
        assert ((a.mean(0) - b.mean(0)).abs() < 5 * ((a.var(0) + b.var(0)) / draws).sqrt()).all()
    # What the rows of one draw share: weights in weight space, nothing among activations.
    together = [torch.corrcoef(v[:, :2, 0].T)[0, 1].item() for v in (local, weights)]
    assert abs(together[0]) < 5 / math.sqrt(draws) < abs(together[1])


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


def test_sparse_dropout_removes_what_the_data_do_not_need():
    g = torch.Generator().manual_seed(6)
    x = torch.randn(200, 10, generator=g)
    eps = torch.randn(200, generator=g)
    eps -= x @ torch.linalg.lstsq(x, eps[:, None]).solution[:, 0]  # no input explains the noise by chance
    y = 2 * x[:, 0] - x[:, 1] + 0.3 * eps
    problem = dataset(x, y, bp.Schema("regression", (10,)))
    entry = SparseDropout(hidden=(), noise=0.3, bias=False)
    posterior = bp.fit(entry, problem, bp.SVI(epochs=800, lr=0.03, final_lr=0.0), progress=False, device="cpu")
    alpha = log_alpha(posterior.guide.layers[0]())[:, 0]
    assert (alpha[:2] < -4).all() and (alpha[2:] > 1).all(), alpha
    assert alpha[2:].min() > alpha[:2].max() + 5


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
        ELBO().parts(model, guide, problem.x_train, problem.y_train)[0].backward()  # the first may collect
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                with Remember():
                    elbo, _ = ELBO().parts(model, guide, problem.x_train, problem.y_train)
                elbo.backward()
                del elbo
        finally:
            gc.enable()
    assert len(made) > 20
    assert [ref() for ref in made if ref() is not None] == []
