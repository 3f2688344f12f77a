"""SGHMC and SGLD where the answer is known: linear regression, its posterior and the bias of a finite step.

Tolerances are Monte-Carlo errors. A couple of hundred independent chains run at once, so that the standard error of any
average is known from its spread over them; the bounds hold all of a test's statistics with probability 1 − 10⁻⁴.
"""

import math
from dataclasses import replace

import numpy as np
import pyro
import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from scipy.stats import t

import bnn_pyro as bp
from bnn_pyro.checks.linear_regression import correlated
from bnn_pyro.inference import sg_chains, sghmc
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.sg_chains import Batches, Target
from bnn_pyro.inference.sg_schedule import Plan, parse_schedule
from bnn_pyro.parts.gamma_prior import GammaNormal

CHAINS, FRICTION = 200, 0.1
PROBLEM = correlated(num=60, inputs=3)
SMALL = bp.SGHMC(epochs=2400, lr=0.004, chains=CHAINS, friction=FRICTION, burn_in=400, max_draws=200)
MINI = replace(SMALL, batch_size=15, epochs=600, burn_in=100)
LARGE = replace(SMALL, epochs=1200, burn_in=200, lr=0.15)


def sample(problem, method, **settings):
    return bp.fit(problem.entry(**settings), problem.data, method, progress=False, device="cpu")


def weights(posterior):
    """(C, D, P) float64."""
    return torch.cat([posterior.chains[s].double().flatten(2) for s in posterior.model.initial], -1)


def check(values, exact, alpha=1e-4):
    """Means over chains of (C, M) agree with ``exact`` (M,) within their standard error; returns the errors."""
    error = values.std(0) / math.sqrt(len(values))
    z = ((values.mean(0) - exact) / error).abs()
    bound = t.isf(alpha / (2 * len(z)), len(values) - 1)
    assert z.max() < bound, f"off the exact answer by {z.max():.1f} standard errors (bound {bound:.1f})"
    return error


def check_gaussian(draws, mean, covariance):
    """Means and the whole covariance, in standard deviations."""
    scale = covariance.diagonal().sqrt()
    unit = (draws - mean) / scale
    upper = torch.triu_indices(len(scale), len(scale))
    products = torch.einsum("cdi,cdj->cij", unit, unit)[:, upper[0], upper[1]] / unit.shape[1]
    correlation = (covariance / torch.outer(scale, scale))[upper[0], upper[1]]
    error = check(torch.cat([unit.mean(1), products], 1), torch.cat([torch.zeros_like(scale), correlation]))
    assert error.max() < 0.025, f"too noisy to tell: {error.max():.3f}"


def check_posterior(problem, posterior):
    check_gaussian(weights(posterior), problem.mean, torch.linalg.inv(problem.precision))


def stationary(problem, eta, friction, explicit=False, extra=0.0):
    """Covariance of the weights under the discretised recursion, from its discrete Lyapunov equation.

    extra: covariance of what the gradient's noise adds to the momentum, less what is subtracted for it.
    """
    precision, one = problem.precision.numpy(), np.eye(len(problem.mean))
    kick = np.hstack([-eta * precision, (1 - friction) * one])
    move = np.hstack([one, one]) if explicit else np.hstack([one, 0 * one]) + kick
    noise = np.vstack([0 * one if explicit else one, one])
    injected = noise @ (2 * friction * eta * one + np.asarray(extra)) @ noise.T
    covariance = solve_discrete_lyapunov(np.vstack([move, kick]), injected)
    return torch.from_numpy(covariance[: len(one), : len(one)])


def explicit(w, v, gradient, eta, friction, noise):
    return w + v, sg_chains_step(w, v, gradient, eta, friction, noise)[1]


def doubled_noise(w, v, gradient, eta, friction, noise):
    return sg_chains_step(w, v, gradient, eta, friction, noise * math.sqrt(2))


def unscaled(model, w, x, y, likelihood=1.0, precision=None):
    return log_joints(model, w, x, y, 1.0, precision)


sg_chains_step, log_joints = sg_chains.step, sg_chains.log_joints
FAULTS = {
    "explicit": (sghmc, "step", explicit),
    "noise": (sghmc, "step", doubled_noise),
    "no N/B": (sg_chains, "log_joints", unscaled),
}


# -- the right posterior ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [SMALL, MINI], ids=["full batch", "mini-batches"])
def test_linear_regression(method):
    check_posterior(PROBLEM, sample(PROBLEM, method))


@pytest.mark.parametrize(
    ("name", "method"), [("explicit", SMALL), ("noise", SMALL), ("no N/B", MINI), ("explicit", MINI)]
)
def test_a_planted_fault_is_caught(name, method, monkeypatch):
    monkeypatch.setattr(*FAULTS[name])
    with pytest.raises(AssertionError, match="off the exact answer"):
        check_posterior(PROBLEM, sample(PROBLEM, method))


def test_sgld():
    method = bp.SGLD(epochs=3000, lr=0.05, chains=CHAINS, burn_in=500, max_draws=200)
    posterior = sample(PROBLEM, method)
    check_gaussian(weights(posterior), PROBLEM.mean, stationary(PROBLEM, 0.5 * 0.05 / 60, 1.0))


def test_units_temperature_and_a_decaying_step():
    """p(y | x, w)^(1/T) p(w) is the posterior at noise σ√T."""
    warm = correlated(num=60, inputs=3, noise=5.0, y_shift=40.0, y_scale=8.0, prior_scale=0.3)
    method = replace(SMALL, schedule="decaying:0.5,0.55", temperature=0.5, lr=0.003)
    posterior = sample(warm, method)
    check_posterior(replace(warm, noise=warm.noise * math.sqrt(0.5)), posterior)
    with pytest.raises(AssertionError, match="off the exact answer"):
        check_posterior(warm, posterior)


def test_momentum_may_be_resampled():
    check_posterior(PROBLEM, sample(PROBLEM, replace(SMALL, resample_momentum=50, friction=0.08)))


# -- the bias of a finite step ---------------------------------------------------------------------------------------
def test_the_bias_is_the_one_that_theory_tells():
    """Stationary covariance of the recursion, and the kinetic temperature: the same factor in every direction."""
    eta = LARGE.lr / 60
    values, vectors = torch.linalg.eigh(PROBLEM.precision)
    factor = 1 / (1 - eta * values / (4 - 2 * FRICTION))
    exact = stationary(PROBLEM, eta, FRICTION)
    torch.testing.assert_close(exact, vectors @ torch.diag(factor / values) @ vectors.T)
    assert factor.max() > 1.15
    posterior = sample(PROBLEM, LARGE)
    check_gaussian(weights(posterior), PROBLEM.mean, exact)
    with pytest.raises(AssertionError, match="off the exact answer"):
        check_posterior(PROBLEM, posterior)
    temperature = torch.tensor(posterior.trace["kinetic_temperature"][200:]).mean().item()
    assert temperature == pytest.approx(factor.mean().item(), rel=0.01) and temperature > 1.05
    cool = sample(PROBLEM, replace(SMALL, epochs=1000)).trace["kinetic_temperature"][400:]
    assert sum(cool) / len(cool) == pytest.approx(1.0, abs=0.02)


def test_the_explicit_form_inflates(monkeypatch):
    """As its own Lyapunov equation says: by several percent where the semi-implicit form is right within half a one."""
    eta = 0.01 / 60
    implicit, wide = (stationary(PROBLEM, eta, FRICTION, e).diagonal().sqrt() for e in (False, True))
    exact = torch.linalg.inv(PROBLEM.precision).diagonal().sqrt()
    assert (implicit / exact).max() < 1.005 and (wide / exact).min() > 1.03
    monkeypatch.setattr(*FAULTS["explicit"])
    posterior = sample(PROBLEM, replace(SMALL, lr=0.01, epochs=1600))
    check_gaussian(weights(posterior), PROBLEM.mean, stationary(PROBLEM, eta, FRICTION, True))


# -- gradient noise --------------------------------------------------------------------------------------------------
def test_the_estimate_of_the_gradient_noise():
    """Against the variance over all ways to draw a batch, known in closed form; odd batches too."""
    data, n = PROBLEM.data, len(PROBLEM.x)
    with bp.isolated(0), pyro.validation_enabled(False):
        target = Target(PROBLEM.entry().model(PROBLEM.schema), n, torch.device("cpu"), 1.0)
        w = target.start(400, 0.0, data.x_train, data.y_train)
        for size in (15, 20):
            batches = Batches(data.x_train, data.y_train, size, 400, 1, independent=True)
            steps = list(batches.steps(0, 24))
            found = torch.stack([target.gradient_noise(w, x, y) for x, y in steps]).mean(0).double()
            noisy = torch.stack([target(w, x, y, {})[1] for x, y in steps]).double()
            a = PROBLEM.design(PROBLEM.x)
            rows = a * (PROBLEM.y - a @ w[0].double())[:, None] / PROBLEM.noise**2
            exact = n**2 / size * (1 - size / n) * rows.var(0)
            torch.testing.assert_close(found, exact, rtol=0.06, atol=0)
            torch.testing.assert_close(noisy.flatten(0, 1).var(0), exact, rtol=0.08, atol=0)
            # White: successive batches are uncorrelated, and so are chains.
            centred = noisy - noisy.mean((0, 1))
            for pairs in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
                assert (pairs.mean((0, 1)).abs() < 0.06 * exact).all()
        total = target(w, data.x_train, data.y_train, {})[1]
        shuffled = list(Batches(data.x_train, data.y_train, 15, 400, 1, independent=False).steps(0, 4))
        mean = torch.stack([target(w, x, y, {})[1] for x, y in shuffled]).mean(0)
        torch.testing.assert_close(mean, total, rtol=1e-3, atol=1e-2)  # an epoch's noise sums to zero


def noise_covariance(problem, size):
    """V (P, P) of independent mini-batches, mean over the posterior."""
    n, a = len(problem.x), problem.design(problem.x)
    w = torch.distributions.MultivariateNormal(problem.mean, precision_matrix=problem.precision)
    with bp.isolated(0):
        draws = w.sample((4000,))
    rows = a * (problem.y - draws @ a.T)[..., None] / problem.noise**2
    rows = rows - rows.mean(1, keepdim=True)
    return n**2 / size * (1 - size / n) * torch.einsum("sni,snj->ij", rows, rows) / (len(draws) * (n - 1))


def test_subtracting_it():
    """Ignored, the noise inflates as its covariance V tells; subtracted, V less its diagonal is what is left."""
    method = replace(MINI, epochs=800, burn_in=200)
    eta, v = method.lr / 60, noise_covariance(PROBLEM, 15)
    ignored, subtracted = (
        stationary(PROBLEM, eta, FRICTION, extra=eta**2 * left) for left in (v, v - torch.diag(v.diagonal()))
    )
    exact = torch.linalg.inv(PROBLEM.precision).diagonal()
    assert (ignored.diagonal() / exact).max() > 1.1
    for name, right, wrong in (("ignored", ignored, subtracted), ("subtracted", subtracted, ignored)):
        draws = weights(sample(PROBLEM, replace(method, gradient_noise=name)))
        check_gaussian(draws, PROBLEM.mean, right)
        with pytest.raises(AssertionError, match="off the exact answer"):
            check_gaussian(draws, PROBLEM.mean, wrong)


# -- the Gamma prior -------------------------------------------------------------------------------------------------
def student_posterior(problem, shape, rate):
    """Mean and covariance under the prior gamma:SHAPE,RATE, by quadrature over log τ."""
    log_tau = np.linspace(-7, 7, 1401)
    mass, means, seconds = [], [], []
    for tau in np.exp(log_tau):
        given = replace(problem, prior_scale=tau**-0.5)
        mass.append(given.log_evidence + shape * math.log(tau) - rate * tau)
        mean = given.mean
        means.append(mean)
        seconds.append(torch.linalg.inv(given.precision) + torch.outer(mean, mean))
    share = torch.tensor(mass).softmax(0)
    mean = (share[:, None] * torch.stack(means)).sum(0)
    return mean, (share[:, None, None] * torch.stack(seconds)).sum(0) - torch.outer(mean, mean)


@pytest.mark.parametrize("resample", [0, 5], ids=["integrated out", "Gibbs"])
def test_the_precision_of_the_prior(resample, monkeypatch):
    """Both ways have the posterior of the same model; a precision that is never drawn again has another."""
    problem = correlated(num=12, inputs=2, bias=False, noise=2.0)
    exact = student_posterior(problem, 2.0, 1.0)
    method = replace(SMALL, lr=0.05, resample_prior=resample, epochs=3000)
    check_gaussian(weights(sample(problem, method, prior="gamma:2,1")), *exact)
    if resample:
        right = GammaNormal.precision_given

        def wrong(self, value):
            return torch.distributions.Gamma(self.shape_, right(self, value).rate)  # without the P/2

        monkeypatch.setattr(GammaNormal, "precision_given", wrong)
        with pytest.raises(AssertionError, match="off the exact answer"):
            check_gaussian(weights(sample(problem, method, prior="gamma:2,1")), *exact)


# -- what is evaluated -----------------------------------------------------------------------------------------------
TASKS = {
    "learned": (dict(), "fan-in:1", ()),
    "heteroscedastic": (dict(noise="heteroscedastic"), "normal:2", ()),
    "two classes": (dict(), "gamma:2,1", ("a", "b")),
    "three classes": (dict(), "scale-mixture:1,0.1,0.5", ("a", "b", "c")),
}


@pytest.mark.parametrize("hidden", [(), (3,)], ids=["linear", "network"])
@pytest.mark.parametrize("task", TASKS)
def test_log_joint_and_gradient_of_many_chains(task, hidden):
    """Chain by chain the number that the samplers of whole data sets use, and its gradient; both ways."""
    settings, prior, classes = TASKS[task]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 2, generator=g)
    y = torch.arange(9) % len(classes) if classes else 3 * torch.randn(9, generator=g) + 5
    kind = dict(classes=classes) if classes else dict(y_shift=5.0, y_scale=3.0)
    schema = bp.Schema("classification" if classes else "regression", (2,), **kind)
    with bp.isolated(0):
        model = bp.MeanField(hidden=hidden, prior=prior, **settings).model(schema)
        target = Target(model, 18, torch.device("cpu"), 1.0)
        w = target.start(3, 1.0, x, y)
        assert bool(target.linear) == (not hidden and task != "three classes")
        given = target.draw_precisions(w)
        assert set(given) == (set(dict(model.net.named_parameters())) if prior.startswith("gamma") else set())
        log_joint, gradient = target(w, x, y, {})
        conditional = target(w, x, y, given)
        own_rows = target(w, x.expand(3, *x.shape), y.expand(3, -1), {})
        target.linear = ()
        for fast, slow in (
            ((log_joint, gradient), target(w, x, y, {})),
            (conditional, target(w, x, y, given)),
            (own_rows, (log_joint, gradient)),
        ):
            torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(conditional[0], log_joint, rtol=1e-4, atol=1e-4)
        whole = Potential(model, x, y, temperature=0.5)  # 18 rows of which 9 are seen
        values, slopes = whole(w.double())
        torch.testing.assert_close(values, log_joint.double(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(slopes.float(), gradient, rtol=1e-3, atol=1e-3)


# -- schedules ---------------------------------------------------------------------------------------------------------
def mixture_of_cycles(problem, method):
    """Second moments about the exact mean of all stored draws together, from the recursion's own covariances.

    Step by step, with the step size of each and noise where the step samples: no stationarity is assumed.
    """
    plan = Plan.make(parse_schedule(method.schedule), method.epochs, method.burn_in, method.thin, method.max_draws)
    precision, one = problem.precision, torch.eye(len(problem.mean)).double()
    zero, alpha = torch.zeros_like(one), method.friction
    covariance = torch.block_diag(one, zero)  # wherever it starts: the burn-in forgets it
    kept = []
    for k in range(method.epochs):
        if plan.due(k):
            kept.append(covariance[: len(one), : len(one)])
        eta = method.lr / len(problem.x) * float(plan.share[k])
        kick = torch.cat([-eta * precision, (1 - alpha) * one], 1)
        move = torch.cat([torch.cat([one, zero], 1) + kick, kick])
        covariance = move @ covariance @ move.mT
        if plan.samples[k]:
            covariance = covariance + 2 * alpha * eta * torch.cat([torch.cat([one, one], 1)] * 2)
    return torch.stack(kept).mean(0)


def test_cycles_sample_what_their_recursion_tells():
    """Cycles that sample for long have nearly the posterior; short ones start at the mode anew and are too narrow."""
    exact = torch.linalg.inv(PROBLEM.precision)
    for cycles, epochs, low, high in ((2, 4000, 0.95, 1.05), (16, 1600, 0.0, 0.9)):
        method = replace(SMALL, epochs=epochs, burn_in=epochs // cycles, lr=0.01, schedule=f"cyclical:{cycles},0.2")
        covariance = mixture_of_cycles(PROBLEM, method)
        ratio = covariance.diagonal() / exact.diagonal()
        assert low < ratio.min() and ratio.max() < high, ratio
        draws = weights(sample(PROBLEM, method))
        check_gaussian(draws, PROBLEM.mean, covariance)
    with pytest.raises(AssertionError, match="off the exact answer"):
        check_gaussian(draws, PROBLEM.mean, exact)
