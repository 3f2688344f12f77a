"""HMC and NUTS where the posterior is known: linear regression, one and two logistic weights, a learned noise."""

import math
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from linear_gaussian import correlated, dataset
from scipy.stats import norm
from test_posterior_1d import TAU, X, Y, log_joint

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.diagnostics import _arviz
from bnn_pyro.inference import mcmc, whitening
from bnn_pyro.inference.log_joint import LogJoint

UNITS = dict(noise=5.0, y_shift=40.0, y_scale=8.0)
SAMPLERS = {"nuts": bp.NUTS(chains=2, draws=300, warmup=100), "hmc": bp.HMC(chains=2, draws=400, warmup=100)}


def fit(entry, data, method, **settings):
    return bp.fit(entry, data, method, **{"progress": False, "device": "cpu", **settings})


def weights(posterior):
    """(C, D, P) float64, in the order of the model's sites."""
    return torch.cat(
        [
            posterior.chains[s].double().flatten(1).unflatten(1, (posterior.chains[s].shape[1], -1))
            for s in posterior.model.initial
        ],
        -1,
    )


def check(values, exact, alpha=1e-4):
    """Means of (C, D, M) series agree with ``exact`` (M,) within their own Monte-Carlo error, two-sided, Bonferroni."""
    _, ess = _arviz()
    size = np.array([ess(v) for v in np.moveaxis(values, 2, 0)])
    error = values.std((0, 1)) / np.sqrt(size)
    z = np.abs(values.mean((0, 1)) - exact) / error
    assert z.max() < norm.isf(alpha / (2 * len(z))), f"off the exact posterior by {z.max():.1f} standard errors"
    return error


def check_gaussian(problem, posterior):
    """Means, and every entry of the covariance, in posterior standard deviations."""
    covariance = torch.linalg.inv(problem.precision)
    scale = covariance.diagonal().sqrt()
    unit = (weights(posterior) - problem.mean) / scale
    products = torch.einsum("cdi,cdj->cdij", unit, unit)
    upper = torch.triu_indices(len(scale), len(scale))
    correlation = (covariance / torch.outer(scale, scale))[upper[0], upper[1]]
    values = torch.cat([unit, products[..., upper[0], upper[1]]], -1).numpy()
    error = check(values, torch.cat([torch.zeros_like(scale), correlation]).numpy())
    assert error.max() < 0.15, "too noisy to tell"


# -- the right posterior ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "space"), [("nuts", "hessian"), ("nuts", "kronecker"), ("nuts", "plain"), ("hmc", "hessian")]
)
def test_linear_regression(name, space, monkeypatch):
    """The whole covariance, in units of a target that is not standardised, in whatever coordinates."""
    if space == "plain":
        monkeypatch.setattr(mcmc, "coordinates", lambda *_: whitening.Plain())
    if space == "kronecker":
        monkeypatch.setattr(whitening, "DENSE", 0)
    problem = correlated(inputs=2, **UNITS)
    posterior = fit(problem.entry(), problem.data, SAMPLERS[name])
    check_gaussian(problem, posterior)
    assert posterior.stats["diverging"].sum() == 0


@pytest.mark.parametrize("classes", [0, 2, 3])
@pytest.mark.parametrize("dense", [0, 4096], ids=["kronecker", "hessian"])
def test_coordinates(dense, classes, monkeypatch):
    """There and back is the identity; by the Hessian the log joint is −½ zᵀz around its mode, to second order."""
    monkeypatch.setattr(whitening, "DENSE", dense)
    g = torch.Generator().manual_seed(0)
    x, temperature = torch.randn(60, 2, generator=g) + 1, 0.5
    kind = "classification" if classes else "regression"
    schema = bp.Schema(
        kind, (2,), classes=tuple("abc"[:classes]), y_shift=2.0 * (not classes), y_scale=1 + (not classes)
    )
    y = torch.randint(classes, (60,), generator=g) if classes else 3 + torch.randn(60, generator=g)
    with bp.isolated(0):
        model = bp.MeanField(hidden=(), prior="normal:2", noise=0.7).model(schema)
        target = LogJoint(model, x, y, temperature)
        space = whitening.coordinates(target, temperature)
        mode = whitening._mode(target, whitening.Plain())
    assert type(space) is (whitening.Rounded if dense else whitening.Whitened)
    there = space.inverse(mode)
    back = space.weights(there)
    assert all(torch.allclose(back[s], v.double(), atol=1e-5) for s, v in mode.items())
    curve = torch.autograd.functional.hessian(
        lambda z: -target(space.weights({whitening.ROUND: z})), there[whitening.ROUND]
    )
    curve = curve.reshape(there[whitening.ROUND].numel(), -1)
    if dense:
        assert (curve - torch.eye(len(curve))).abs().max() < 0.02
    else:  # an approximation, near enough to be of use: the weights' own has a ratio of scales above 5
        values = torch.linalg.eigvalsh(curve)
        assert values[0] > 0.2 and values[-1] < 5


def test_temperature():
    """p(y | x, w)^(1/T) p(w) is the posterior at noise σ√T; the one at T = 1 is told from it."""
    problem = correlated(num=40, prior_scale=0.3)
    cold = fit(problem.entry(), problem.data, replace(SAMPLERS["nuts"], temperature=0.25))
    check_gaussian(replace(problem, noise=problem.noise / 2), cold)
    with pytest.raises(AssertionError, match="off the exact posterior"):
        check_gaussian(problem, cold)


@pytest.mark.parametrize(("name", "dims"), [("nuts", 1), ("nuts", 2), ("hmc", 2)])
def test_a_skewed_posterior(name, dims):
    """Logistic regression against quadrature: moments to the third, and the cdf."""
    data = dataset(X, Y, bp.Schema("classification", (1,), classes=("a", "b")))
    posterior = fit(bp.MeanField(hidden=(), prior=f"normal:{TAU}", bias=dims == 2), data, SAMPLERS[name])
    draws = weights(posterior).numpy()
    line = np.linspace(-14, 14, 1401)
    grid = np.meshgrid(*[line] * dims, indexing="ij")
    mass = np.exp(log_joint(*grid))
    mass /= mass.sum()
    tests = [g for v in range(dims) for g in (lambda w, v=v: w[v], lambda w, v=v: w[v] ** 2, lambda w, v=v: w[v] ** 3)]
    tests += [lambda w, v=v, q=q: 1.0 * (w[v] < q) for v in range(dims) for q in (0.5, 1.5, 3.0)]
    exact = np.array([(mass * f(grid)).sum() for f in tests])
    check(np.stack([f(np.moveaxis(draws, 2, 0)) for f in tests], -1), exact)


def test_a_learned_noise():
    """One weight and log σ against a grid: the site beside the weights, under a linear and a whitened kernel alike."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(15, 1, generator=g)
    y = (1.2 * x[:, 0] + 0.8 * torch.randn(15, generator=g)) * 2 + 5
    data = dataset(x, y, bp.Schema("regression", (1,), y_shift=5.0, y_scale=2.0))
    posterior = fit(bp.MeanField(hidden=(), bias=False, prior="normal:1"), data, SAMPLERS["nuts"])
    w, s = np.meshgrid(np.linspace(-2, 4, 801), np.linspace(-3, 2, 801), indexing="ij")
    z = (y.numpy() - 5) / 2 - np.multiply.outer(w, x[:, 0].numpy())
    log_p = norm.logpdf(z / np.exp(s)[..., None]).sum(-1) - 15 * s + norm.logpdf(w) + norm.logpdf(s, -1, 1)
    mass = np.exp(log_p - log_p.max())
    mass /= mass.sum()
    draws = weights(posterior).numpy()
    assert draws.shape[-1] == 2
    tests = [lambda w, s: w, lambda w, s: s, lambda w, s: w * w, lambda w, s: s * s, lambda w, s: w * s]
    check(
        np.stack([f(*np.moveaxis(draws, 2, 0)) for f in tests], -1), np.array([(mass * f(w, s)).sum() for f in tests])
    )


def test_many_rows_do_not_cost_acceptance():
    """The sum over 50,000 rows is exact enough: energies a float32 sum could not tell apart are."""
    problem = correlated(num=50_000, inputs=2)
    posterior = fit(problem.entry(), problem.data, bp.NUTS(chains=1, draws=60, warmup=60))
    assert posterior.stats["acceptance_rate"].mean() > 0.7 and posterior.stats["n_steps"].max() <= 31
    scale = torch.linalg.inv(problem.precision).diagonal().sqrt()
    assert ((weights(posterior).mean((0, 1)) - problem.mean) / scale).abs().max() < 0.8


def test_what_is_recorded():
    problem = correlated(num=40)
    posterior = fit(problem.entry(), problem.data, SAMPLERS["hmc"])
    stats = posterior.stats
    assert set(stats) == {"acceptance_rate", "diverging", "energy", "lp", "n_steps", "step_size"}
    assert all(v.shape == (2, 400) for v in stats.values())
    assert ((stats["acceptance_rate"] > -1e-9) & (stats["acceptance_rate"] <= 1 + 1e-9)).all()
    # lp is the log joint of the stored draw: quadratic around the mean, from its value there.
    w = weights(posterior) - problem.mean
    drop = 0.5 * torch.einsum("cdi,ij,cdj->cd", w, problem.precision, w)
    top = stats["lp"] + drop
    assert (top - top.mean()).abs().max() < 1e-3
    assert (stats["energy"] > -stats["lp"].max()).all()
    assert stats["step_size"].unique().numel() == 2


# -- runs ------------------------------------------------------------------------------------------------------------
SMALL = {
    "nuts": bp.NUTS(chains=2, draws=8, warmup=30, max_tree_depth=3),
    "hmc": bp.HMC(chains=2, draws=8, warmup=30, max_steps=6),
}
PROBLEM = correlated(num=30, noise=0.5)
NET = bp.MeanField(hidden=(3,))


def same(a, b):
    return all(torch.equal(a.chains[s], v) for s, v in b.chains.items()) and all(
        torch.equal(a.stats[s], v) for s, v in b.stats.items()
    )


@pytest.mark.parametrize("entry", [NET, PROBLEM.entry()], ids=["network", "linear"])
def test_same_seed_same_draws_saved_and_loaded(entry, tmp_path):
    first = fit(entry, PROBLEM.data, SMALL["nuts"], seed=5, out=tmp_path)
    assert same(first, fit(entry, PROBLEM.data, SMALL["nuts"], seed=5)) and same(first, bp.load(tmp_path))
    assert not same(first, fit(entry, PROBLEM.data, SMALL["nuts"], seed=6))
    site = "layers.0.weight"
    assert not torch.equal(first.chains[site][0], first.chains[site][1])


@pytest.mark.parametrize("name", SMALL)
def test_a_stopped_run_goes_on_to_the_same_draws(name, tmp_path, monkeypatch):
    """In warm-up windows, among the draws, at the end of a chain, and after the last step; twice in one run."""
    whole = fit(NET, PROBLEM.data, SMALL[name])
    real = Checkpoint.due
    for stops in ((1,), (10, 17), (33,), (38,), (50, 26)):
        out, done = tmp_path / "-".join(map(str, stops)), 0
        for stop in stops:
            steps = iter(range(1, 10_000))

            def due(self, steps=steps, stop=stop):
                if next(steps) == stop:
                    signal.raise_signal(signal.SIGINT)
                return self.stop

            monkeypatch.setattr(Checkpoint, "due", property(due))
            done += stop
            with pytest.raises(Interrupted, match=f"step {done} of 76"):
                fit(NET, PROBLEM.data, SMALL[name], out=out, resume=True)
        monkeypatch.setattr(Checkpoint, "due", real)
        assert same(fit(NET, PROBLEM.data, SMALL[name], out=out, resume=True), whole), stops


def test_progress():
    lines = []
    data, method = PROBLEM.data, bp.NUTS(chains=2, draws=3, warmup=4)
    with bp.isolated(0):
        model = NET.model(data.schema)
        method.run(model, None, data, report=lambda *line: lines.append(line))
    assert [line[0] for line in lines] == list(range(1, 15)) and {line[1] for line in lines} == {14}
    assert {"accept", "step size", "divergent", "ms/gradient"} <= set(lines[-1][2])


def test_chains_start_apart():
    """By the prior's standard deviation, around the model's initial values."""
    problem = correlated(num=10, prior_scale=0.5)
    with bp.isolated(0):
        model = problem.entry().model(problem.schema)
        target = LogJoint(model, problem.data.x_train, problem.data.y_train)
        starts = []
        for _ in range(300):
            kernel = bp.NUTS()._kernel(target, whitening.Plain())
            monkey = mcmc._Chain.__new__(mcmc._Chain)
            kernel.setup = lambda warmup: None
            monkey.__init__(kernel, target, whitening.Plain(), 1, 2.0)
            starts.append(torch.cat([v.flatten() for v in kernel.initial_params.values()]))
    starts = torch.stack(starts) - torch.cat([v.flatten() for v in model.initial.values()])
    assert starts.std() == pytest.approx(1.0, rel=0.1) and starts.mean().abs() < 4 / math.sqrt(starts.numel())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(draws=0), "draws must be at least 1"),
        (dict(chains=0), "chains must be at least 1"),
        (dict(target_accept=1.0), "target_accept must lie between"),
        (dict(temperature=0.0), "temperature must be positive"),
        (dict(jitter=-1.0), "jitter must be"),
    ],
)
def test_impossible_settings(settings, message):
    for method in (bp.NUTS, bp.HMC):
        with pytest.raises(bp.UserError, match=message):
            method(**settings)
    with pytest.raises(bp.UserError, match="max_tree_depth"):
        bp.NUTS(max_tree_depth=0)
    with pytest.raises(bp.UserError, match="length"):
        bp.HMC(length=0.0)


def test_an_improper_prior_is_refused():
    for hidden in ((), (3,)):
        with pytest.raises(bp.UserError, match="proper prior"):
            fit(bp.MeanField(hidden=hidden, prior="log-uniform"), PROBLEM.data, SMALL["nuts"])
