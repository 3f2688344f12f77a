"""HMC and NUTS: trajectories beside Pyro's own kernels, posteriors that are known, gradients that are not numbers."""

import math

import numpy as np
import pyro
import pytest
import torch
from conjugate import correlated
from monte_carlo import check, check_gaussian, check_same_parameters, fit, weights
from pyro.infer import mcmc
from pyro.infer.mcmc.adaptation import WarmupAdapter
from scipy.special import digamma, polygamma

import bnn_pyro as bp
from bnn_pyro.inference.adaptation import Warmup
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.trajectories import Dynamics, Point, gradient_of, nuts

SHAPES = torch.tensor([1.5, 4.0, 9.0], dtype=torch.float64)


class LogGamma:
    """z = log of Gamma(a, 1) variables: skewed, and of different widths. E z = ψ(a), Var z = ψ'(a)."""

    def __init__(self):
        self.initial, self.size, self.calls = SHAPES.log(), len(SHAPES), 0
        self.mean, self.variance = digamma(SHAPES.numpy()), polygamma(1, SHAPES.numpy())

    def __call__(self, z):
        self.calls += 1
        return (SHAPES * z - z.exp()).sum(-1), SHAPES - z.exp()


def own(kind, potential, seed, warmup=200):
    return kind(warmup=warmup).kernel(potential, potential.initial.numpy().copy(), seed)


def moments(z, potential):
    """Series whose means are all 0: first, second and third powers as their expectations have it."""
    unit = (z - potential.mean) / np.sqrt(potential.variance)
    skew = polygamma(2, SHAPES.numpy()) / potential.variance**1.5
    return np.concatenate([unit, unit**2 - 1, unit**3 - skew], -1)


def test_nuts_is_pyros_nuts():
    num, potential, step = 800, LogGamma(), 0.35

    def series(position, depth, steps, acceptance):
        share = [float(depth == d) for d in (1, 2, 3)]
        return [*moments(np.asarray(position), potential)[: 2 * len(SHAPES)], *share, steps, acceptance]

    theirs, ours = [], []
    with bp.isolated(0), pyro.validation_enabled(False):
        how = dict(step_size=step, adapt_step_size=False, adapt_mass_matrix=False)
        kernel = mcmc.NUTS(potential_fn=lambda z: -potential(z["all"])[0], **how)
        kernel.initial_params = z = {"all": potential.initial.clone()}
        kernel.setup(0)
        for t in range(num):
            calls, mean = potential.calls, kernel._mean_accept_prob
            z = kernel.sample(z)
            steps = potential.calls - calls
            acceptance = kernel._mean_accept_prob * (t + 1) - mean * t
            # A tree that was doubled d times took 2^d − 1 steps, and the one that it stopped in no more than 2^d.
            theirs.append(series(z["all"].numpy(), math.floor(math.log2(steps + 1)), steps, acceptance))
    rng, dynamics = np.random.default_rng(0), Dynamics(gradient_of(potential), np.ones(3))
    start = potential.initial.numpy()
    point = Point(start, *dynamics.gradient(start))
    for _ in range(4 * num):
        done = nuts(rng, point, dynamics, step, 10)
        point = done.point
        assert 2**done.depth - 1 <= done.steps < 2 ** (done.depth + 1)
        ours.append(series(point.z, math.floor(math.log2(done.steps + 1)), done.steps, done.acceptance))
    check_same_parameters(np.array(theirs)[None], np.array(ours).reshape(4, num, -1))


class SameNumbers:
    """A generator whose uniform numbers do not depend on how many are asked for at once."""

    def __init__(self, seed):
        self.rng, self.held = np.random.default_rng(seed), []

    def random(self, num=None):
        while len(self.held) < (num or 1):
            self.held.append(self.rng.random())
        return self.held.pop(0) if num is None else np.array(self.held[:num])


@pytest.mark.parametrize(("step", "depth"), [(0.02, 0), (0.02, 3), (-0.02, 6), (0.15, 7), (4.0, 5)])
def test_compiled_subtrees(step, depth):
    problem = correlated(num=40)
    with bp.isolated(0):
        model, data = problem.entry().model(problem.schema), problem.data
        slow, fast = (Potential(model, data.x_train, data.y_train) for _ in "ab")
        start = slow.prior_draws(1).numpy()[0]
    assert fast.compile(1)
    gradient, scale, g = gradient_of(slow), np.linspace(0.5, 1.5, slow.size), np.random.default_rng(1)
    plain, quick = Dynamics(gradient, scale), Dynamics(gradient, scale, fast.compiled)
    stopped = 0
    for seed in range(20):
        z = start + 0.1 * g.standard_normal(slow.size)
        u, (density, slope) = g.standard_normal(slow.size), gradient(z)
        energy = 0.5 * u.dot(u) - density
        expected = plain.subtree(SameNumbers(seed), depth, (z, u, slope), step, energy)
        found = quick.subtree(SameNumbers(seed), depth, (z.copy(), u.copy(), slope.copy()), step, energy)
        assert (found.steps, found.turning, found.diverging) == (expected.steps, expected.turning, expected.diverging)
        stopped += expected.turning or expected.diverging
        if expected.diverging:
            continue  # there, rounding grows to anything
        assert found.weight == pytest.approx(expected.weight, abs=2e-3)
        assert found.acceptance == pytest.approx(expected.acceptance, rel=2e-3)
        for a, b in ((found.end, expected.end), (found.proposal, expected.proposal)):
            np.testing.assert_allclose(a[0], b[0], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(found.momentum, expected.momentum, rtol=1e-3, atol=0.05)
    assert stopped == (20 if depth == 7 or step > 1 else 0) or depth == 6


@pytest.mark.parametrize("num", [15, 100, 400])
def test_adaptation_is_pyros(num):
    rng, ours, found = np.random.default_rng(0), Warmup(num, 0.7, 3), 0.5
    theirs = WarmupAdapter(adapt_step_size=True, adapt_mass_matrix=True, target_accept_prob=0.7)
    theirs.configure(num, found, {("z",): (3,)}, lambda z: found, {"dtype": torch.float64})
    ours.restart(found)
    theirs.reset_step_size_adaptation(None)
    for t in range(1, num + 1):  # as its kernels count
        acceptance, z = rng.random(), rng.normal(size=3) * [1, 2, 0.1]
        found = rng.uniform(0.1, 1)
        if ours.learn(acceptance, z):
            ours.restart(found)
        theirs.step(t, {"z": torch.from_numpy(z)}, torch.tensor(acceptance, dtype=torch.float64))
        assert ours.step == pytest.approx(theirs.step_size, rel=1e-9)
        torch.testing.assert_close(ours.inverse_mass, theirs.mass_matrix_adapter.inverse_mass_matrix[("z",)])


@pytest.mark.parametrize("kind", [bp.NUTS, bp.HMC])
def test_a_skewed_target(kind):
    """Moments to the third of log-gamma variables; a sign or a direction that is wrong would show in the odd ones."""
    potential, draws = LogGamma(), []
    for seed in (0, 1):
        with bp.isolated(seed), np.errstate(all="ignore"):
            kernel = own(kind, potential, seed)
            line = []
            for t in range(1700):
                kernel.step()
                if t >= 200:
                    line.append(kernel.point.z)
            draws.append(line)
    values = moments(np.array(draws), potential)
    assert check(values, np.zeros(values.shape[-1])).max() < 0.3


class Broken(LogGamma):
    """As ``LogGamma`` up to a wall; beyond it is ``beyond``: a density and a gradient."""

    def __init__(self, density, gradient):
        super().__init__()
        self.beyond = density, gradient

    def __call__(self, z):
        density, gradient = super().__call__(z)
        over = z[:, 0] > 1.0
        if self.beyond[0] is not None:
            density = torch.where(over, self.beyond[0], density)
        return density, torch.where(over[:, None], self.beyond[1], gradient)


@pytest.mark.parametrize("density", [math.nan, None, -math.inf, math.inf], ids=str)
def test_what_is_not_a_number_is_a_divergence(density):
    """It is counted, it is never where the chain goes, and what is drawn is right up to the wall."""
    kind = bp.HMC if density is math.nan else bp.NUTS
    beyond = density, 0.0 if density in (-math.inf, math.inf) else math.nan
    with bp.isolated(0), np.errstate(all="ignore"):
        kernel = own(kind, Broken(*beyond), 0, warmup=60)
        steps = [(kernel.step(), kernel.point.z[0]) for _ in range(250)]
    assert sum(figures["diverging"] for figures, _ in steps) > 5
    assert all(z <= 1.0 and math.isfinite(figures["lp"]) for figures, z in steps)
    assert all(0 <= figures["acceptance_rate"] <= 1 for figures, _ in steps)
    assert len({z for _, z in steps[60:]}) > 20


def test_many_rows_do_not_cost_acceptance():
    """The sum over 50,000 rows is exact enough: energies a float32 sum could not tell apart are."""
    problem = correlated(num=50_000, inputs=2)
    posterior = fit(problem.entry(), problem.data, bp.NUTS(chains=1, draws=60, warmup=60))
    assert posterior.stats["acceptance_rate"].mean() > 0.7 and posterior.stats["n_steps"].max() <= 31
    scale = torch.linalg.inv(problem.precision).diagonal().sqrt()
    assert ((weights(posterior).mean((0, 1)) - problem.mean) / scale).abs().max() < 0.8


@pytest.mark.parametrize(("kind", "draws", "own"), [(bp.NUTS, 500, "tree_depth"), (bp.HMC, 600, "trajectory_length")])
def test_linear_regression_and_what_is_recorded_of_it(kind, draws, own):
    """The whole covariance, in units of a target that is not standardised."""
    problem = correlated(inputs=2, noise=5.0, y_shift=40.0, y_scale=8.0)
    method = kind(chains=2, draws=draws, warmup=150, compiled="yes")
    posterior = fit(problem.entry(), problem.data, method)
    check_gaussian(problem, posterior)
    stats = posterior.stats
    assert set(stats) == {"acceptance_rate", "diverging", "energy", "lp", "n_steps", "step_size", "cut", own}
    assert all(v.shape == (2, method.draws) and v.dtype == torch.float64 for v in stats.values())
    assert stats["diverging"].sum() == 0
    # lp is the log joint of the stored draw: quadratic around the mean, from its value there.
    w = weights(posterior) - problem.mean
    drop = 0.5 * torch.einsum("cdi,ij,cdj->cd", w, problem.precision, w)
    top = stats["lp"] + drop
    assert (top - top.mean()).abs().max() < 1e-3
    # The energy where a trajectory starts: that of the draw before, and a kinetic energy of ½ χ²(P).
    kinetic = stats["energy"][:, 1:] + stats["lp"][:, :-1]
    check(2 * kinetic.numpy()[..., None], np.array([w.shape[-1]]))
    assert stats["step_size"].unique().numel() == 2
    if kind is bp.NUTS:
        depth, steps = stats["tree_depth"], stats["n_steps"]
        assert (steps < 2 ** (depth + 1)).all() and (steps >= 2**depth - 1).all()
    else:
        assert torch.allclose(stats["trajectory_length"], stats["n_steps"] * stats["step_size"])


def test_a_step_size_that_underflows():
    class Elsewhere(LogGamma):
        """Finite where the chain starts, and nowhere else."""

        def __call__(self, z):
            density, gradient = super().__call__(z)
            return density, torch.where((z == self.initial).all(-1, keepdim=True), gradient, math.nan)

    with bp.isolated(0), pytest.raises(bp.UserError, match=r"step size fell to .*start=map"):
        own(bp.NUTS, Elsewhere(), 0)
