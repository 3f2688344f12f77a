"""Joint Normal guides where the answer is known: closed forms against torch's, fits against the exact posterior."""

import copy
import math
from dataclasses import asdict, dataclass

import pyro
import pyro.poutine as poutine
import pytest
import torch
from conjugate import correlated
from monte_carlo import covariance
from pyro.infer import Predictive, Trace_ELBO, TraceMeanField_ELBO
from scipy.stats import t
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal, kl_divergence

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import Rescale, elbo_of
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.correlated_normal import ALL_WEIGHTS, FullCovariance, LowRankNormal, Part, parse_family

JOINT_FAMILIES = ["full", "low-rank:2"]
SITES = {"layers.0.weight": (1, 4), "layers.0.bias": (1,)}


@dataclass(frozen=True)
class Joint(bp.MeanField):
    """A fully connected network with a guide of any family."""

    family: str = "full"
    has = frozenset({"guide"})

    def guide(self, model):
        return parse_family(self.family)(model.initial, self.init_scale)


def variant(problem, family, **settings):
    return Joint(**asdict(problem.entry(**settings)), family=family)


def small_model(**settings):
    problem = correlated(num=5)
    with isolated(0):
        return problem.entry(**settings).model(problem.schema)


def shaken(family, initial=None, seed=4):
    """A guide with every parameter away from where it starts; A stays strictly triangular."""
    g = torch.Generator().manual_seed(seed)
    with isolated(seed):
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


# -- closed forms ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", JOINT_FAMILIES)
def test_the_distribution_is_the_multivariate_normal(family):
    guide = shaken(family)
    joint, exact = guide.distribution, torchs(guide)
    w = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(joint.log_prob(w).double(), exact.log_prob(w.double()), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(joint.entropy().double(), exact.entropy())
    torch.testing.assert_close(joint.variance.double(), exact.variance, check_dtype=False)
    assert joint.expand((3, 2)).log_prob(w).shape == joint.expand((3, 2)).entropy().shape == (3, 2)
    with isolated(0), torch.no_grad():
        draws = joint.expand((40_000,))().double()
        torch.testing.assert_close(joint.variance, torchs(guide).variance.float())  # after a draw too
    # Standard errors of second moments of Normals: √((Σᵢᵢ Σⱼⱼ + Σᵢⱼ²) / S).
    error = ((exact.variance[:, None] * exact.variance + exact.covariance_matrix**2) / 40_000).sqrt()
    assert ((draws.T.cov() - exact.covariance_matrix).abs() < 4.5 * error).all()
    assert ((draws.mean(0) - exact.mean).abs() < 4.5 * (exact.variance / 40_000).sqrt()).all()


@pytest.mark.parametrize("prior", ["normal:0.8", "fan-in:1"])
@pytest.mark.parametrize("family", JOINT_FAMILIES)
def test_the_kl_is_torchs(family, prior):
    """Cross-entropies of the parts less the entropy of the whole, noise included: one KL, and its gradient."""
    model = small_model(prior=prior, noise="learned")
    guide, data = shaken(family, model.initial), correlated(num=5).data
    with isolated(0):
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


@pytest.mark.parametrize(("family", "prior"), [("full", "normal:0.8"), ("low-rank:2", "scale-mixture:1,0.1,0.5")])
def test_pyros_elbos_have_the_same_expectation(family, prior):
    problem = correlated(num=5)
    model = small_model(prior=prior, noise="learned")
    guide = shaken(family, model.initial)
    batch, num = (problem.data.x_train, problem.data.y_train), 200

    def mean(one):
        with isolated(1), torch.no_grad(), pyro.validation_enabled(True):
            value = torch.tensor([float(one()) for _ in range(num)]).double()
        return value.mean().item(), value.std().item() / math.sqrt(num)

    scaled = Rescale(3.0, latent=0.5)(model), Rescale(3.0, latent=0.5)(guide)
    ours, error = mean(lambda: -elbo_of(*scaled, *batch)[0])
    for pyros in (TraceMeanField_ELBO(), Trace_ELBO()):
        theirs, other = mean(lambda e=pyros: e.loss(*scaled, *batch))
        assert theirs == pytest.approx(ours, abs=4 * math.hypot(error, other))


# -- fits and gradients ------------------------------------------------------------------------------------------
def fit(problem, family, steps, lr=0.1):
    svi = bp.SVI(epochs=steps, lr=lr, final_lr=0.0)
    return bp.fit(variant(problem, family, init_scale=0.05), problem.data, svi, progress=False, device="cpu")


def kl_to_posterior(problem, guide):
    """What the ELBO of a fit lacks to the evidence, exactly: KL(q ‖ Normal(m, Λ⁻¹))."""
    exact = MultivariateNormal(problem.mean, precision_matrix=problem.precision)
    return kl_divergence(torchs(guide), exact).item()


@pytest.fixture(scope="module")
def problem():
    return correlated()


def test_the_full_guide_reaches_the_exact_posterior(problem):
    """Mean, covariance and evidence: the gap is the error of the optimiser alone, far below that of mean field."""
    posterior = fit(problem, "full", steps=800)
    assert kl_to_posterior(problem, posterior.guide) < 0.1 * problem.gap
    trace = torch.tensor(posterior.trace["elbo"][-250:]).double()
    bound = 4 * trace.std().item() / math.sqrt(len(trace)) + 0.05
    assert trace.mean().item() == pytest.approx(problem.log_evidence, abs=bound)
    assert bound < 0.5 * problem.gap


def gap(problem, guide):
    """KL(q ‖ posterior) by the guide's own entropy and covariance, differentiable."""
    q, off = guide.distribution, guide.loc - problem.mean
    trace = (problem.precision * covariance(guide)).sum() + off @ problem.precision @ off
    return 0.5 * (trace - torch.logdet(problem.precision) + len(off) * math.log(2 * math.pi)) - q.entropy()


def low_rank(problem, rank, seed=0):
    """A guide as it is before a fit, float64."""
    with isolated(seed):
        return LowRankNormal(problem.entry().model(problem.schema).initial, 0.05, rank).double()


@pytest.fixture(scope="module")
def any_covariance(problem):
    """A guide of rank 4 of 5, which is any covariance, where its gap is least: without Monte Carlo."""
    guide = low_rank(problem, 4)
    how = dict(max_iter=300, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe")
    optimiser = torch.optim.LBFGS(guide.parameters(), **how)

    def closure():
        optimiser.zero_grad()
        value = gap(problem, guide)
        value.backward()
        return value

    optimiser.step(closure)
    return guide


def test_low_rank_can_be_the_exact_posterior(problem, any_covariance):
    """From where fits start, down to no gap at all: nothing in the parametrisation is in the way."""
    assert gap(problem, low_rank(problem, 4)) > 10
    assert abs(gap(problem, any_covariance).item()) < 1e-8
    assert abs(kl_to_posterior(problem, any_covariance)) < 1e-8


def test_variances_have_their_gradient_after_a_draw_too():
    """The full guide takes Σⱼ Aᵢⱼ² from the draw, in a backward pass of its own."""
    with isolated(0):
        scale, root = torch.rand(4), torch.randn(4, 4).tril(-1).requires_grad_()
        q = FullCovariance(torch.zeros(4), scale, root)
        q.rsample()
    (found,) = torch.autograd.grad(q.variance.sum(), root)
    torch.testing.assert_close(found, 2 * scale.square()[:, None] * root.detach())


def check_gradients(problem, guide, draws=300, alpha=1e-4):
    """The ELBO's gradient is that of the exact KL, within Student's t for any of its elements being off by chance."""
    exact = torch.autograd.grad(gap(problem, guide), list(guide.parameters()))
    guide = copy.deepcopy(guide).float()  # the same numbers, rounded
    parameters = list(guide.parameters())
    with isolated(0):
        model = problem.entry().model(problem.schema)
        batch = problem.data.x_train, problem.data.y_train
        each = [
            torch.cat([v.flatten() for v in torch.autograd.grad(-elbo_of(model, guide, *batch)[0], parameters)])
            for _ in range(draws)
        ]
    each = torch.stack(each).double()
    exact = torch.cat([(v.tril(-1) if v.shape == (5, 5) else v).flatten() for v in exact])
    error, width = each.mean(0) - exact, each.std(0) / math.sqrt(draws)
    bound = t.isf(alpha / (2 * len(exact)), draws - 1) * width + 1e-4 * (1 + exact.abs())  # and float32
    assert (error.abs() <= bound).all(), f"the gradient is off by {(error.abs() / bound).max():.1f} bounds"


@pytest.mark.parametrize("where", [*JOINT_FAMILIES, "the exact posterior"])
def test_gradients_of_the_elbo_are_those_of_the_exact_gap(problem, any_covariance, where):
    check_gradients(problem, shaken(where).double() if where in JOINT_FAMILIES else any_covariance)


def test_a_planted_fault_is_caught(problem, any_covariance, monkeypatch):
    def without_directions(q, sample_shape=torch.Size()):
        return q.loc + q._unbroadcasted_cov_diag.sqrt() * torch.randn(q.loc.shape)

    monkeypatch.setattr(LowRankMultivariateNormal, "rsample", without_directions)
    with pytest.raises(AssertionError, match="the gradient is off"):
        check_gradients(problem, any_covariance)


# -- as a guide among others --------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", JOINT_FAMILIES)
def test_draws_archive_and_mean_weights(problem, family, tmp_path):
    entry = variant(problem, family, noise="learned")
    posterior = bp.fit(entry, problem.data, bp.SVI(epochs=3), progress=False, out=tmp_path, device="cpu")
    draws = posterior.draw(5, seed=0)
    assert {s: v.shape for s, v in draws.items()} == {
        "layers.0.weight": (5, 1, 4), "layers.0.bias": (5, 1), "log_noise": (5,)
    }  # fmt: skip
    loaded = bp.load(tmp_path, entry)
    assert all(torch.equal(v, loaded.draw(5, seed=0)[s]) for s, v in draws.items())
    mean = posterior.at_mean_weights().chains
    assert torch.equal(torch.cat([v.flatten() for v in mean.values()]), posterior.guide.loc)
    assert bp.predict(posterior, problem.data.x_train, num_draws=3).locs.shape == (3, 200)


@pytest.mark.parametrize("family", JOINT_FAMILIES)
def test_parallel_particles(problem, family):
    model = small_model(noise="learned")
    guide = shaken(family, model.initial)
    with isolated(0), pyro.validation_enabled(True):
        for kind in (Trace_ELBO, TraceMeanField_ELBO):
            elbo = kind(num_particles=3, vectorize_particles=True, max_plate_nesting=1)
            loss = elbo.differentiable_loss(model, guide, problem.data.x_train, problem.data.y_train)
            assert torch.isfinite(loss)
            loss.backward()
            assert all(torch.isfinite(p.grad).all() for p in guide.parameters())
        assert guide.lower.grad.triu().abs().max() == 0 if family == "full" else True
        drawn = Predictive(model, guide=guide, num_samples=4, parallel=True)(problem.data.x_train)
        assert drawn["y"].shape[-1] == 200
        trace = poutine.trace(guide).get_trace()
        assert isinstance(trace.nodes["layers.0.bias"]["fn"], Part) and ALL_WEIGHTS in trace.nodes


def test_families_that_are_refused():
    wrong = dict.fromkeys(["low-rank:0", "low-rank:x", "low-rank:1.5", "full:3", "low-rank:"], "must have the form")
    for family, message in {"ful": "did you mean 'full'", **wrong}.items():
        with pytest.raises(bp.UserError, match=message):
            parse_family(family)
