"""Joint Normal guides where the answer is known: closed forms against torch's, fits against the exact posterior."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from conjugate import correlated, model_of
from monte_carlo import covariance
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import Rescale, elbo_of
from bnn_pyro.parts.correlated_normal import FullNormal, parse_family

JOINT_FAMILIES = ["full", "low-rank:2"]
SITES = {"layers.0.weight": (1, 4), "layers.0.bias": (1,)}


def variant(problem, family, **settings):
    own = dict(prior=f"normal:{problem.prior_scale}", noise=problem.noise)
    return bp.Bayesian(lambda schema: nn.Linear(4, 1), family=family, **own | settings)


def small_model(**settings):
    problem = correlated(num=5)
    return model_of(problem.entry(**settings), problem.schema)


def shaken(family, initial=None, seed=4):
    """A guide with every parameter away from where it starts; A stays strictly triangular."""
    g = torch.Generator().manual_seed(seed)
    with bp.isolated(seed):
        guide = parse_family(family)(initial or {s: torch.zeros(shape) for s, shape in SITES.items()}, 0.5)
    with torch.no_grad():
        for name, p in guide.named_parameters():
            p.add_(0.4 * torch.randn(p.shape, generator=g))
            if name == "lower":
                p.tril_(-1)
    return guide


def torchs(guide):
    """The same q by torch's own class, float64."""
    joint = guide.distribution
    return MultivariateNormal(joint.mean.detach().double(), covariance(guide).detach().double())


@pytest.mark.parametrize("family", JOINT_FAMILIES)
def test_the_distribution_is_the_multivariate_normal(family):
    guide = shaken(family)
    joint, exact = guide.distribution, torchs(guide)
    w = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(joint.log_prob(w).double(), exact.log_prob(w.double()), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(joint.entropy().double(), exact.entropy())
    torch.testing.assert_close(joint.variance.double(), exact.variance, check_dtype=False)
    assert joint.expand((3, 2)).log_prob(w).shape == joint.expand((3, 2)).entropy().shape == (3, 2)
    with bp.isolated(0), torch.no_grad():
        draws = joint.expand((40_000,))().double()
        torch.testing.assert_close(joint.variance, torchs(guide).variance.float())  # after a draw too
    # Standard errors of second moments of Normals: √((Σᵢᵢ Σⱼⱼ + Σᵢⱼ²) / S).
    error = ((exact.variance[:, None] * exact.variance + exact.covariance_matrix**2) / 40_000).sqrt()
    assert ((draws.T.cov() - exact.covariance_matrix).abs() < 4.5 * error).all()
    assert ((draws.mean(0) - exact.mean).abs() < 4.5 * (exact.variance / 40_000).sqrt()).all()


@pytest.mark.parametrize("prior", ["normal:0.8", "fan-in:1"])
@pytest.mark.parametrize("family", JOINT_FAMILIES)
def test_the_kl_is_torchs(family, prior):
    """Cross-entropies of the parts less the entropy of the whole, noise included: one KL, and its gradient.

    The full guide takes Σⱼ Aᵢⱼ² from the draw, in a backward pass of its own.
    """
    model = small_model(prior=prior, noise="learned")
    guide, data = shaken(family, model.initial), correlated(num=5).data
    with bp.isolated(0):
        kl = -elbo_of(Rescale(0.0)(model), guide, data.x_train, data.y_train)[0]
    scales = torch.full((6,), 0.8) if prior == "normal:0.8" else torch.tensor([0.5] * 4 + [1.0, 1.0])
    scales[5] = 1.0
    loc = torch.tensor([0.0] * 5 + [-1.0])
    p = MultivariateNormal(loc.double(), torch.diag(scales.double() ** 2))
    exact = kl_divergence(MultivariateNormal(guide.distribution.mean.double(), covariance(guide).double()), p)
    assert kl.item() == pytest.approx(exact.item(), rel=1e-5)
    names, parameters = zip(*guide.named_parameters(), strict=True)
    ours, theirs = (torch.autograd.grad(value, parameters) for value in (kl, exact))
    for name, a, b in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(a, b.tril(-1) if name == "lower" else b, rtol=1e-3, atol=1e-4)


class Hierarchy(nn.Module):
    """log τ ~ Normal(0, 1), w ~ Normal(0, τ), y ~ Normal(w, 3)."""

    def forward(self, y):
        log_tau = pyro.sample("log_tau", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        w = pyro.sample("w", dist.Normal(torch.zeros(1), log_tau.exp()).to_event(1))
        pyro.sample("y", dist.Normal(w[..., 0], 3.0), obs=y)


@pytest.mark.parametrize("gradient", [True, False])
def test_a_prior_that_depends_on_another_site_has_the_right_elbo(gradient):
    """By E[w² τ⁻²] = exp(2s² − 2m)·(σ² + (μ − 2c)²) of a Normal of (log τ, w), means m and μ, covariance c."""
    (m, mu), covariance = (1.0, 3.0), torch.tensor([[0.25, 0.8], [0.8, 4.0]])
    initial = {"log_tau": torch.tensor([m]), "w": torch.tensor([mu])}
    guide, model, y = FullNormal.of(initial, torch.linalg.cholesky(covariance)), Hierarchy(), torch.tensor(6.0)
    of_w = math.exp(0.5 - 2 * m) * (4.0 + (mu - 1.6) ** 2)
    exact = math.log(2 * math.pi) * -1.5 - 0.5 * (1.25 + 2 * m + of_w) - math.log(3) - 13 / 18
    exact += 0.5 * torch.logdet(2 * math.pi * math.e * covariance).item()
    with bp.isolated(0), torch.set_grad_enabled(gradient):
        ours = torch.stack([elbo_of(model, guide, y)[0].detach() for _ in range(1500)])
        pyros = torch.tensor([-TraceMeanField_ELBO().loss(model, guide, y) for _ in range(300)])
    for values in (ours, pyros):
        assert abs(values.mean() - exact) < 4 * values.std() / math.sqrt(len(values))


@pytest.mark.parametrize(("family", "prior"), [("full", "normal:0.8"), ("low-rank:2", "scale-mixture:1,0.1,0.5")])
def test_pyros_elbos_have_the_same_expectation_and_take_particles(family, prior, num=200):
    data, model = correlated(num=5).data, small_model(prior=prior, noise="learned")
    guide, batch = shaken(family, model.initial), (data.x_train, data.y_train)

    def mean(one):
        with bp.isolated(1), torch.no_grad(), pyro.validation_enabled(True):
            value = torch.tensor([float(one()) for _ in range(num)]).double()
        return value.mean().item(), value.std().item() / math.sqrt(num)

    scaled = Rescale(3.0, latent=0.5)(model), Rescale(3.0, latent=0.5)(guide)
    ours, error = mean(lambda: -elbo_of(*scaled, *batch)[0])
    for kind in (TraceMeanField_ELBO, Trace_ELBO):
        theirs, other = mean(lambda kind=kind: kind().loss(*scaled, *batch))
        assert theirs == pytest.approx(ours, abs=4 * math.hypot(error, other))
        with bp.isolated(0), pyro.validation_enabled(True):
            elbo = kind(num_particles=200, vectorize_particles=True, max_plate_nesting=1)
            loss = elbo.differentiable_loss(*scaled, *batch)
            loss.backward()
        assert loss.item() == pytest.approx(ours, abs=4 * math.hypot(error, other))
        assert family == "low-rank:2" or guide.lower.grad.triu().abs().max() == 0


def test_the_full_guide_reaches_the_exact_posterior():
    """Mean, covariance and evidence: the gap is the error of the optimiser alone, far below that of mean field."""
    problem, svi = correlated(), bp.SVI(epochs=800, lr=0.1, final_lr=0.0, patience=0)
    posterior = bp.fit(variant(problem, "full", init_scale=0.05), problem.data, svi, progress=False, device="cpu")
    exact = MultivariateNormal(problem.mean, precision_matrix=problem.precision)
    assert kl_divergence(torchs(posterior.guide), exact) < 0.1 * problem.gap
    trace = torch.tensor(posterior.trace["elbo"][-250:]).double()
    bound = 4 * trace.std().item() / math.sqrt(len(trace)) + 0.05
    assert trace.mean().item() == pytest.approx(problem.log_evidence, abs=bound)
    assert bound < 0.5 * problem.gap


@pytest.mark.parametrize("family", JOINT_FAMILIES)
def test_draws_come_back_from_an_archive_and_the_mean_weights_are_the_mean(family, tmp_path):
    problem = correlated()
    entry = variant(problem, family, noise="learned")
    posterior = bp.fit(entry, problem.data, bp.SVI(epochs=3), progress=False, out=tmp_path, device="cpu")
    draws, again = posterior.draw(5, seed=0), bp.load(tmp_path, entry).draw(5, seed=0)
    assert {s: v.shape for s, v in draws.items()} == {s: (5, *v.shape) for s, v in posterior.model.initial.items()}
    assert all(torch.equal(v, again[s]) for s, v in draws.items())
    mean = posterior.at_mean_weights().chains
    assert torch.equal(torch.cat([v.flatten() for v in mean.values()]), posterior.guide.loc)
