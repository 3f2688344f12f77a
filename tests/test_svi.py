"""SVI where the answer is known: Bayesian linear regression, through the public API, and its ELBO term by term.

Tolerances are Monte-Carlo errors. A fit ends a little off the optimum, by the gradient noise that Adam's falling
learning rate has not averaged away; how much is measured by fitting with several seeds. The mean over the seeds must
then agree with the exact answer within its own standard error, and that error must be small enough to tell.
"""

import math

import pytest
import torch
from conjugate import correlated, dataset
from pyro.infer import TraceMeanField_ELBO
from scipy.stats import t

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import Rescale, elbo_of
from bnn_pyro.isolation import isolated

STEPS = 500


def fits(problem, seeds=3):
    """Posteriors from several seeds."""
    svi, entry = bp.SVI(epochs=STEPS, batch_size=0, lr=0.03, final_lr=0.0), problem.entry(init_scale=0.05)
    return [bp.fit(entry, problem.data, svi, seed=s, progress=False, device="cpu") for s in range(seeds)]


def exact_elbo(problem, posterior):
    return problem.elbo(posterior.guide.loc.detach().double(), posterior.guide.scale.detach().double())


def check_optimum(problem, posteriors, alpha=1e-4):
    """Means and scales of q agree with the exact mean-field optimum of ``problem`` within Monte-Carlo error.

    Errors are taken in posterior standard deviations (means) and in log (scales). Their spread over the seeds, pooled
    over the weights, gives the standard error of their mean; the bound is Student's t for the probability ``alpha``
    that any of the statistics exceeds it by chance. Nor may a single fit fall short of the best ELBO by 0.3 nats.
    Faults such as a KL counted four times move a log scale by 0.7, so the bound itself has to stay under 0.45.
    """
    exact, width = problem.mean, problem.mean_field_scale
    lacking = [problem.log_evidence - problem.gap - exact_elbo(problem, p) for p in posteriors]
    assert max(lacking) < 0.3, f"off the exact optimum by {max(lacking):.1f} nats"
    q = [p.guide for p in posteriors]
    errors = [torch.stack([(g.loc.double() - exact) / width, (g.scale.double() / width).log()]) for g in q]
    errors = torch.stack(errors).detach()  # (seeds, 2, P)
    seeds, _, weights = errors.shape
    spread = errors.var(0).mean(-1).sqrt()
    bound = t.isf(alpha / (2 * 2 * weights), (seeds - 1) * weights) * spread / math.sqrt(seeds)
    worst = errors.mean(0).abs().amax(-1)
    assert (worst <= bound).all(), f"off the exact optimum: means {worst[0]:.3f}, log scales {worst[1]:.3f} > {bound}"
    assert (bound < 0.45).all(), f"too noisy to tell: {bound}"


@pytest.fixture(scope="module")
def full_batch():
    """Shift and scale of the target are not 0 and 1: the likelihood has to carry them."""
    problem = correlated(noise=5.0, y_shift=40.0, y_scale=8.0)
    return problem, fits(problem)


# -- the optimum -------------------------------------------------------------------------------------------------
def test_full_batch_reaches_the_mean_field_optimum(full_batch):
    check_optimum(*full_batch)


# -- the ELBO ----------------------------------------------------------------------------------------------------


def test_elbo_against_the_evidence(full_batch):
    """ELBO = evidence − KL(q ‖ posterior), and the KL to the prior is exact."""
    problem, posteriors = full_batch
    x, y = problem.data.x_train, problem.data.y_train
    for posterior in posteriors:
        with isolated(0), torch.no_grad():
            elbos = torch.stack([elbo_of(posterior.model, posterior.guide, x, y)[0] for _ in range(300)]).double()
        assert elbos.mean().item() == pytest.approx(
            exact_elbo(problem, posterior), abs=4 * elbos.std().item() / 300**0.5
        )
        assert exact_elbo(problem, posterior) <= problem.log_evidence - problem.gap
        trace = {k: torch.tensor(v).double() for k, v in posterior.trace.items()}
        assert len(trace["elbo"]) == STEPS and trace["epoch"][-1] == STEPS
        torch.testing.assert_close(trace["elbo"], trace["log_likelihood"] - trace["kl"])
        # The last recorded KL is that of the step before the last.
        _, kl = problem.parts(posterior.guide.loc.detach().double(), posterior.guide.scale.detach().double())
        assert trace["kl"][-1].item() == pytest.approx(kl, rel=1e-4)


SCHEMAS = {
    "learned": bp.Schema("regression", (3,), y_shift=2.0, y_scale=3.0),
    "heteroscedastic": bp.Schema("regression", (3,), y_shift=2.0, y_scale=3.0),
    "binary": bp.Schema("classification", (3,), classes=("a", "b")),
    "multiclass": bp.Schema("classification", (3,), classes=("a", "b", "c")),
}


def small_net(kind, num=24, **settings):
    """(model, guide, x, y) of a network with a hidden layer and a q of appreciable width."""
    schema, g = SCHEMAS[kind], torch.Generator().manual_seed(3)
    x = torch.randn(num, 3, generator=g)
    k = len(schema.classes)
    y = torch.randint(k, (num,), generator=g) if k else 2 + 3 * torch.randn(num, generator=g)
    noise = kind if schema.task == "regression" else "learned"
    entry = bp.MeanField(hidden=(4,), noise=noise, init_scale=0.3, **settings)
    with isolated(5):
        model = entry.model(schema)
        return model, entry.guide(model), x, y


def with_noise(seed, scaled_model, guide, x, y):
    with isolated(seed), torch.no_grad():
        return [part.item() for part in elbo_of(scaled_model, guide, x, y)]


@pytest.mark.parametrize("prior", ["fan-in:1", "scale-mixture:1,0.1,0.5"])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_mini_batch_elbo_averages_to_the_full_one(kind, prior):
    """Over the batches of any partition, weighted by their rows: with the same draw of w, equal."""
    model, guide, x, y = small_net(kind, prior=prior)
    full, full_likelihood = with_noise(7, model, guide, x, y)
    assert full != pytest.approx(full_likelihood)
    for batches in (x.new_tensor(range(24)).long().split(8), torch.arange(24).flip(0).split([1, 16, 7])):
        elbo = likelihood = 0.0
        for rows in batches:
            part = with_noise(7, Rescale(24 / len(rows))(model), guide, x[rows], y[rows])
            elbo, likelihood = elbo + part[0] * len(rows) / 24, likelihood + part[1] * len(rows) / 24
        assert (elbo, likelihood) == pytest.approx((full, full_likelihood), rel=2e-5)


@pytest.mark.parametrize("prior", ["normal:0.8", "scale-mixture:1,0.1,0.5"])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_elbo_is_pyros(kind, prior):
    """The leaner evaluation is the same number as ``TraceMeanField_ELBO``, and has the same gradient."""
    model, guide, x, y = small_net(kind, prior=prior)
    gradients = []
    pyros = TraceMeanField_ELBO(num_particles=2).differentiable_loss
    for loss_of in (pyros, lambda *args: -elbo_of(*args, particles=2)[0]):
        with isolated(11):
            loss = loss_of(model, guide, x, y)
        gradients.append([*torch.autograd.grad(loss, list(guide.parameters())), loss.detach()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def test_temperature_scales_the_kl_only():
    for prior in ("normal:0.8", "scale-mixture:1,0.1,0.5"):
        model, guide, x, y = small_net("learned", prior=prior)
        warm, likelihood = with_noise(1, model, guide, x, y)
        cold = Rescale(latent=0.3)
        elbo, same = with_noise(1, cold(model), Rescale(latent=0.3)(guide), x, y)
        assert same == likelihood
        assert likelihood - elbo == pytest.approx(0.3 * (likelihood - warm), rel=1e-4)


def test_no_rows_to_train_on():
    with pytest.raises(bp.UserError, match="no training rows"):
        bp.fit(bp.MeanField(), dataset(torch.zeros(0, 3), torch.zeros(0), SCHEMAS["learned"]), progress=False)
