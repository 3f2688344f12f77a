"""SVI and point estimates where the answer is known: linear regression, its ELBO by Pyro's; noise of every row."""

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pyro
import pytest
import torch
from conjugate import correlated, dataset
from own_networks import NETS, made
from pyro.distributions import Normal, TransformedDistribution
from pyro.infer import TraceMeanField_ELBO
from scipy.stats import t
from test_own_network import rows as own_rows
from torch import nn
from torch.distributions import AffineTransform
from zoo_problems import problem

import bnn_pyro as bp
from bnn_pyro.checkpoint import Run
from bnn_pyro.inference import log_joint
from bnn_pyro.inference.log_joint import Objective, Rescale, elbo_of
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.row_noise import ROWS, RowNoise, sampling_of
from bnn_pyro.parts.weights import NormalWeights, cut

#: A strong prior, so that it matters, and a target in its own units.
PROBLEM = correlated(num=24, noise=5.0, y_shift=40.0, y_scale=8.0, prior_scale=0.3)
LONG = dict(patience=0, epochs=300, lr=0.1, final_lr=0.0)
fit = partial(bp.fit, PROBLEM.entry(), PROBLEM.data, progress=False, device="cpu")


def flat(posterior):
    assert all(value.shape[:2] == (1, 1) for value in posterior.chains.values())
    return torch.cat([posterior.chains[site].flatten() for site in posterior.model.initial]).double()


def test_map_is_the_posterior_mean_of_the_linear_model_and_mle_least_squares():
    """The posterior is Gaussian: its mode is its mean, Λ⁻¹ scale Aᵀ(y − shift) / σ²."""
    posterior = fit(bp.MAP(**LONG))
    torch.testing.assert_close(flat(posterior), PROBLEM.mean, rtol=1e-3, atol=1e-3)
    a = PROBLEM.design(PROBLEM.x)
    log_prior = Normal(0.0, 0.3).log_prob(PROBLEM.mean).sum()
    log_likelihood = Normal(40 + 8 * a @ PROBLEM.mean, 5.0).log_prob(PROBLEM.y).sum()
    trace = {name: line[-1] for name, line in posterior.trace.items()}
    assert trace["log_prior"] == pytest.approx(log_prior.item(), rel=1e-4)
    assert trace["log_likelihood"] == pytest.approx(log_likelihood.item(), rel=1e-4)
    assert trace["log_joint"] == pytest.approx((log_prior + log_likelihood).item(), rel=1e-4)
    least_squares = np.linalg.lstsq(a.numpy(), (PROBLEM.y.numpy() - 40) / 8, rcond=None)[0]
    found = flat(fit(bp.MLE(**LONG))).numpy()
    np.testing.assert_allclose(found, least_squares, rtol=1e-3, atol=1e-3)
    assert np.abs(found - PROBLEM.mean.numpy()).max() > 0.05  # the prior would have shown


@pytest.mark.parametrize(("warmup", "clip"), [(0, 0.0), (3, 0.5)])
def test_steps_are_those_by_hand(warmup, clip):
    """The log joint of the linear model is −½ wᵀΛw + wᵀΛm: its gradient is Λ (m − w)."""
    epochs, lr, final, norms, clipped = 6, 0.2, 0.1, [], 0
    start = flat(fit(bp.MAP(epochs=1, lr=1e-12, patience=0)))
    w = start.clone().requires_grad_()
    adam = torch.optim.Adam([w], lr)
    for step in range(epochs):
        w.grad = PROBLEM.precision @ (w.detach() - PROBLEM.mean)
        norm = w.grad.norm().item()
        if clip and norms and norm > (most := clip * np.mean(norms)):
            w.grad, norm, clipped = w.grad * most / norm, most, clipped + 1
        norms.append(norm)
        rate = lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * step / epochs)))
        adam.param_groups[0]["lr"] = rate * min(1, (step + 1) / warmup) if warmup else rate
        adam.step()
    assert 0 < clipped < epochs or not clip
    settings = dict(lr=lr, final_lr=final, lr_warmup=warmup, clip=clip, patience=0)
    found = flat(fit(bp.MAP(epochs=epochs, **settings)))
    torch.testing.assert_close(found, w.detach(), rtol=1e-4, atol=1e-5)
    assert (w - start).abs().max() > 0.1


@pytest.mark.usefixtures("seeded")
def test_scales_have_a_learning_rate_of_their_own():
    """The first step of Adam moves every parameter by its rate; of the highest ELBO 0.03, else a share of ``lr``."""
    start, found = (fit(bp.SVI(epochs=1, lr=lr, scale_lr=50 * lr)).guide for lr in (1e-12, 1e-3))
    for name, rate in (("loc", 1e-3), ("rho", 0.05)):
        moved = (getattr(found, name) - getattr(start, name)).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-3, atol=1e-6)
    with pytest.raises(bp.UserError, match="leave it out"):
        bp.fit(bp.VariationalDropout(noise=1.0), PROBLEM.data, bp.SVI(epochs=1, scale_lr=0.1), progress=False)
    wide, narrow = (bp.Bayesian(nn.Sequential(nn.Linear(4, h), nn.Linear(h, 1))) for h in (5000, 5))
    for entry, method, rate in (
        (wide, bp.SVI(patience=0), 0.03), (wide, bp.SVI(lr=0.01), None), (wide, bp.SVI(patience=0, lr=1e-3), None),
        (narrow, bp.SVI(patience=0), 0.03), (narrow, bp.SVI(lr=0.01), 0.003), (narrow, bp.SVI(scale_lr=0.5), 0.5),
        *((bp.Bayesian(nn.Linear(4, 1), prior=prior), bp.SVI(lr=0.01), None) for prior in ("normal:1", "fan-in:3")),
        (bp.Bayesian(nn.Linear(4, 1), prior={"bias": "fan-in:2", "*": "fan-in"}), bp.SVI(lr=0.01), 0.003),
        *((bp.MeanField(hidden=(5000,)), method, None) for method in (bp.SVI(patience=0), bp.SVI())),
    ):  # fmt: skip
        apart = method.held_out(model := entry.model(PROBLEM.data.schema), PROBLEM.data, 0)[0]
        assert method.resolved(model, apart).scale_lr == rate
    # Where none can be held out, there is no q to be chosen on the way.
    assert bp.SVI(lr=0.01).resolved(narrow.model(PROBLEM.data.schema), PROBLEM.data).scale_lr is None


def test_mini_batches_take_every_row_once_an_epoch(monkeypatch):
    batches = []

    def noted(model, guide, x, y, **how):
        batches.append({tuple(row) for row in x.tolist()})
        return elbo_of(model, guide, x, y, **how)

    monkeypatch.setattr(log_joint, "elbo_of", noted)
    fit(bp.SVI(epochs=3, batch_size=8))
    epochs = [batches[start : start + 3] for start in (0, 3, 6)]
    assert all(len(set.union(*epoch)) == 24 and [len(b) for b in epoch] == [8, 8, 8] for epoch in epochs)
    assert all(batch not in epochs[0] for batch in epochs[1] + epochs[2])


def test_a_step_in_parts_has_the_gradient_of_the_whole(monkeypatch):
    """At one draw of w for all parts; a fit of a point is the same in any case."""

    def drawn_anew(*args, **how):
        torch.manual_seed(1)
        return elbo_of(*args, **how)

    monkeypatch.setattr(log_joint, "elbo_of", drawn_anew)
    for method in (bp.SVI(epochs=2, batch_size=12, temperature=0.5), bp.MAP(epochs=2, batch_size=12, patience=0)):
        whole, parts = (fit(replace(method, accumulate=num)) for num in (None, 5))
        for name, line in whole.trace.items():
            np.testing.assert_allclose(parts.trace[name], line, rtol=1e-4)
        start = fit(replace(method, epochs=1, lr=1e-12))
        for ours, theirs, first in zip(*(p.draw(2, seed=0).values() for p in (parts, whole, start)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            assert (theirs - first).abs().max() > 1e-3


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
        elbo, log_likelihood = elbo_of(model, guide, torch.zeros(1, 4), torch.zeros(1))
        torch.testing.assert_close(elbo - log_likelihood, -flow.log_prob(drawn[0]))


@pytest.mark.parametrize("rate", [None, 0.15])
def test_full_batch_reaches_the_mean_field_optimum(rate, alpha=1e-4):
    """Errors are in posterior standard deviations (means) and in log (scales): their spread over seeds bounds them.

    A KL counted four times moves a log scale by 0.7, so the bound itself has to stay under 0.45.
    """
    problem = correlated(noise=5.0, y_shift=40.0, y_scale=8.0)
    svi, entry = bp.SVI(epochs=500, batch_size=0, lr=0.03, final_lr=0.0, scale_lr=rate), problem.entry(init_scale=0.05)
    fits = [bp.fit(entry, problem.data, svi, seed=s, progress=False, device="cpu") for s in range(3)]
    q = [(p.guide.loc.detach().double(), p.guide.scale.detach().double()) for p in fits]
    lacking = [problem.log_evidence - problem.gap - problem.elbo(*one) for one in q]
    assert min(lacking) >= 0 and max(lacking) < 0.3, f"off the exact optimum by {max(lacking):.1f} nats"
    exact, width = problem.mean, problem.precision.diagonal().rsqrt()
    errors = torch.stack([torch.stack([(loc - exact) / width, (scale / width).log()]) for loc, scale in q])
    seeds, _, weights = errors.shape
    spread = errors.var(0).mean(-1).sqrt()
    bound = t.isf(alpha / (2 * 2 * weights), (seeds - 1) * weights) * spread / math.sqrt(seeds)
    worst = errors.mean(0).abs().amax(-1)
    assert (worst <= bound).all(), f"off the exact optimum: means {worst[0]:.3f}, log scales {worst[1]:.3f} > {bound}"
    assert (bound < 0.45).all(), f"too noisy to tell: {bound}"
    trace = {name: torch.tensor(line).double() for name, line in fits[0].trace.items()}
    torch.testing.assert_close(trace["elbo"], trace["log_likelihood"] - trace["kl"])
    # The last recorded KL is that of the step before the last; it is exact, without Monte-Carlo error.
    assert trace["kl"][-1].item() == pytest.approx(problem.kl(*q[0]), rel=1e-4)


@pytest.mark.parametrize("prior", ["normal:0.8", "scale-mixture:1,0.1,0.5"])
@pytest.mark.parametrize("kind", ["learned noise", "heteroscedastic", "binary", "multiclass"])
def test_elbo_is_pyros(kind, prior):
    """Of a q of appreciable width; also where likelihood and latent sites are scaled, as by N/B and a temperature."""
    entry, data = problem("mean-field", kind)
    entry = replace(entry, init_scale=0.3, prior=prior)
    with bp.isolated(5):
        model = entry.model(data.schema)
        guide = entry.guide(model)
    scaled = Rescale(3.0, latent=0.5)(model), Rescale(latent=0.5)(guide)
    gradients = []
    pyros = TraceMeanField_ELBO(num_particles=2).differentiable_loss
    for loss_of in (pyros, lambda *args: -elbo_of(*args, particles=2)[0]):
        with bp.isolated(11):
            loss = loss_of(*scaled, data.x_train, data.y_train)
        gradients.append([*torch.autograd.grad(loss, list(guide.parameters())), loss.detach()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


class Positions(nn.Module):
    """Inputs (B, 4, 6): a convolution, a layer of tokens, and one of rows; their mean is what matters."""

    def __init__(self):
        super().__init__()
        self.conv, self.token, self.head = nn.Conv1d(4, 3, 2), nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.token(self.conv(x).tanh()).tanh().mean(1))


G = torch.Generator().manual_seed(1)
DATA = dataset(torch.randn(16, 4, 6, generator=G), torch.randn(16, generator=G), bp.Schema("regression", (4, 6)))


def objective(sampling, repeats, seed):
    """ELBOs (R, 1), their gradients (R, means and scales of q), and of these {site: those of its means}."""
    with bp.isolated(0):
        entry = bp.Bayesian(Positions(), noise=0.7, sampling=sampling, init_scale=0.3)
        model = entry.model(DATA.schema)
        guide = entry.guide(model)
        of, (x, y) = Objective(model.train(), guide, 1), (DATA.x_train, DATA.y_train)
        elbos, gradients = [], []
        torch.manual_seed(seed)
        for _ in range(repeats):
            elbo, _ = of(x, y, 1.0, 1.0)
            gradients.append(torch.cat(torch.autograd.grad(elbo, [guide.loc, guide.rho])))
            elbos.append(elbo.detach())
    gradients = torch.stack(gradients)
    return torch.stack(elbos)[:, None], gradients, cut(gradients[:, : len(guide.loc)], guide.shapes)


ZEROS = [torch.zeros(rows, 4, 6) for rows in ROWS]


def test_sites_that_reach_one_layer_once_are_sampled_by_row():
    with bp.isolated(0):
        found = sampling_of(Positions(), *ZEROS)
    kinds = {"conv": "flipout", "token": "flipout", "head": "rows"}
    assert found == {f"{layer}.{kind}": how for layer, how in kinds.items() for kind in ("weight", "bias")}
    by_net = {name: set(sampling_of(made(name), *ZEROS)) for name in NETS}
    assert by_net["embedding, tied"] == set()
    assert by_net["lstm"] == {"head.weight", "head.bias"}
    assert not any(site.startswith("inner") for site in by_net["used twice"])
    schema = bp.Schema("classification", (4, 6), tuple("abc"))
    norms, batch_norm = (bp.Bayesian(made(name)).model(schema) for name in ("norms", "batch norm"))
    assert norms.sampling and not batch_norm.sampling


def test_the_elbo_and_its_gradient_are_the_same_on_average_and_scatter_less():
    (*drawn, means), (*by_row, others) = (objective(how, 300, seed=s) for how, s in (("weights", 1), (None, 2)))
    for one, other in zip(drawn, by_row, strict=True):
        error = (one.var(0) / len(one) + other.var(0) / len(other)).sqrt()
        assert ((one.mean(0) - other.mean(0)).abs() < 5 * error).all()
    assert all(others[site].var(0).sum() < 0.8 * value.var(0).sum() for site, value in means.items())


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_outputs_have_the_moments_of_drawn_weights(kind):
    """Of one row: means and the covariance of all its outputs; groups, stride and padding as the layer has them."""
    with bp.isolated(0):
        layer, x = kind(4, 4, 2, stride=2, padding=1, groups=2), torch.randn(1, 4, 3, 3)
        q = {n: NormalWeights(p.detach(), 0.5 + p.detach().abs()) for n, p in layer.named_parameters()}
        draws = {True: [], False: []}
        for by_row in draws:
            for _ in range(800):
                w = {name: own.rsample() for name, own in q.items()}
                for name, value in w.items():
                    value.drawn_from = q[name]
                with RowNoise(w, 1, dict.fromkeys(w, "flipout") if by_row else {}) as mode:
                    draws[by_row].append(torch.func.functional_call(layer, w, (x,)).flatten())
            assert len(mode.q) == len(w) * by_row
    a, b = (torch.stack(draws[by_row]) for by_row in draws)
    sd = b.std(0)
    assert ((a.mean(0) - b.mean(0)).abs() < 6 * sd * (2 / 800) ** 0.5 + 1e-6).all()
    noise = 8 * sd[:, None] * sd * (2 / 800) ** 0.5 + 1e-6
    assert ((b.T.cov() - b.var(0).diag()).abs() > noise).any()  # noise of every activation by itself would be seen
    assert ((a.T.cov() - b.T.cov()).abs() < noise).all()


@pytest.mark.parametrize("name", ["linear", "conv2d", "transformer", "lstm"])
def test_bfloat16_is_for_the_passes_of_the_network_in_training_alone(name):
    """KL, densities and gradients are float32: the first as before, the others but for the passes' rounding."""
    data, seen, found, model = own_rows(), set(), {}, None
    net = made(name)
    last = [part for part in net.modules() if isinstance(part, nn.Linear)][-1]
    last.register_forward_hook(lambda layer, _, f: seen.add((model is not None and model.training, f.dtype)))
    entry = bp.Bayesian(net, sampling="weights" if name == "lstm" else None)
    # Noise of rows is made of other numbers in bfloat16, by 2 % of the likelihood: the mean over seeds is compared.
    for precision, seed in itertools.product(("float32", "bfloat16"), range(12)):
        if not seed:
            seen.clear()
        with bp.isolated(seed):
            model = entry.model(data.schema)
            model.likelihood.register_forward_pre_hook(lambda _, given: seen.add(given[0].dtype))
            guide = MeanFieldNormal(model.initial, 0.05)
            method = bp.SVI(epochs=1, batch_size=0, patience=0, precision=precision)
            try:
                trace = method.minimise(model, guide, data, Run())[0].trace
            except bp.UserError as error:
                assert precision == "bfloat16" and name == "lstm" and "processor cannot run" in str(error)
                pytest.skip("no LSTM in bfloat16 on this processor")
            model.eval()(data.x_test)
        figures = trace["kl"][0], trace["log_likelihood"][0], guide.loc.grad, guide.rho.grad
        found[precision] = [a + b for a, b in zip(found.get(precision, [0] * 4), figures, strict=True)]
    assert seen == {(True, torch.bfloat16), (False, torch.float32), torch.float32}
    (kl, likelihood, *exact), (kl_there, likelihood_there, *near) = found.values()
    assert kl == pytest.approx(kl_there, rel=1e-6)
    assert likelihood != likelihood_there == pytest.approx(likelihood, rel=0.02)
    for one, other in zip(exact, near, strict=True):
        assert (one - other).norm() < 0.1 * one.norm() and other.dtype == torch.float32
