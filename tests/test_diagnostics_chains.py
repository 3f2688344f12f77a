"""R-hat, effective draws and the sampler, by ArviZ and by hand; importance weights, by refits and closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conjugate import correlated, dataset
from test_diagnostics_verdicts import arviz, classifier, exact, guided
from torch.distributions import Normal

import bnn_pyro as bp
from bnn_pyro.diagnostics import bfmi, chain_statistics, importance, leave_one_out, nested_rhat
from bnn_pyro.diagnostics import draws as draws_module
from bnn_pyro.diagnostics.convergence import ess_mean
from bnn_pyro.diagnostics.draws import sampler_statistics, stuck_chains
from bnn_pyro.diagnostics.importance import NoWeights, importance_weights, proper_prior, psis, uniformity
from bnn_pyro.diagnostics.verdicts import Findings, verdicts
from bnn_pyro.pruning import prune


def series(num, chains, draws, phi, seed=0):
    """Series as of ``stationary``, (M, C, D); some with ties, heavy tails, or a chain apart."""
    values = stationary(num, chains, draws, phi, seed)
    values[1] = np.round(values[1])
    values[2] = np.exp(values[2])
    values[3, 0] += 2.0
    values[4] = -np.abs(values[4])
    return values


def number(name, values, **settings):
    return float(np.asarray(getattr(arviz, name)(values, **settings)).item())


@pytest.mark.parametrize(
    ("chains", "draws", "phi"),
    [(4, 100, 0.5), (3, 101, -0.5), (15, 11, 0.0), (16, 50, 0.9), (2, 10, 0.9), (4, 400, 0.99), (1, 50, 0.3)],
)
def test_the_numbers_are_arviz_s(chains, draws, phi):
    values = series(8, chains, draws, phi)
    found = chain_statistics(values)
    for i, one in enumerate(values):
        if chains > 1:
            assert found.rhat[i] == pytest.approx(number("rhat", one, method="rank"), rel=1e-12)
        assert found.ess_bulk[i] == pytest.approx(number("ess", one, method="bulk"), rel=1e-9)
        assert found.ess_tail[i] == pytest.approx(number("ess", one, method="tail", prob=(0.05, 0.95)), rel=1e-9)
        assert ess_mean(values)[i] == pytest.approx(number("ess", one, method="mean"), rel=1e-9)
        assert found.mcse[i] == pytest.approx(number("mcse", one, method="mean") / one.std(ddof=1), rel=1e-9)
    assert np.isnan(found.rhat).all() == (chains == 1)


@pytest.mark.parametrize("draws", [1, 2, 4, 9, 20])
@pytest.mark.parametrize("phi", [0.0, 0.5, 0.99])
def test_effective_draws_of_short_chains(draws, phi):
    """Of a stationary process: C·D / (1 + 2 Σ (1 − k/D) φᵏ); the autocorrelations of so few draws count too many."""
    values, k = stationary(20, 256, draws, phi), np.arange(1, draws)
    exact, found = 256 * draws / (1 + 2 * ((1 - k / draws) * phi**k).sum()), chain_statistics(values)
    assert found.ess_bulk.mean() == pytest.approx(exact, rel=0.1)
    assert (found.mcse**-2).mean() == pytest.approx(exact, rel=0.1)
    if phi == 0 and draws > 4:  # the tails of independent draws are as well known as their centre, and less by the min
        assert found.ess_tail.mean() == pytest.approx(exact, rel=0.2)


def test_nested_rhat_and_bfmi_by_hand_and_what_has_no_number():
    """Chain means 2, 4 | 6, 8, variance 2 in each: W = 2 + 2, superchain means 3 and 7: B = 8."""
    values = np.array([[[1.0, 3], [3, 5], [5, 7], [7, 9]]])
    groups = np.array([5, 5, 2, 2])
    assert nested_rhat(values, groups)[0] == pytest.approx(math.sqrt(1 + 8 / 4))
    assert nested_rhat(values[:, [2, 0, 1, 3]], groups[[2, 0, 1, 3]])[0] == pytest.approx(math.sqrt(3))
    # Chains of their own: W is within them alone.
    assert nested_rhat(values, np.arange(4))[0] == pytest.approx(math.sqrt(1 + (20 / 3) / 2))
    # Superchains of different sizes weigh the same: means 2 and 6, W = (2 + 0)/2 + (2 + 4)/2.
    assert nested_rhat(values, np.array([0, 1, 1, 1]))[0] == pytest.approx(math.sqrt(1 + 8 / 4))
    energy = np.array([[1.0, 2, 4, 1], [1, 1, 1, 1]])
    # Differences 1, 2, −3: mean square 14/3; variance of (1, 2, 4, 1) is 6/3.
    assert bfmi(energy)[0] == pytest.approx((14 / 3) / 2) and np.isnan(bfmi(energy)[1])
    broken, short = series(6, 4, 100, 0.0)[5:], series(6, 4, 3, 0.0)[5:]
    broken[0, 1, 3] = np.nan
    for values in (np.ones((1, 4, 100)), broken, short):
        assert all(np.isnan(v).all() for v in vars(chain_statistics(values)).values())


@pytest.mark.parametrize(
    ("row", "by", "stuck"), [(2, 0, []), (2, -4, [2]), (2, -1, []), (2, 4, []), (0, -np.inf, [0])],
    ids=["none", "a poor mode", "a slow chain: R-hat says so", "a better mode: no other is alone", "not finite"],
)  # fmt: skip
def test_stuck_chains(row, by, stuck):
    """By the log joint: −½ χ² of 20 degrees of freedom, as of a Gaussian posterior of 20 weights."""
    lp = -0.5 * np.random.default_rng(0).chisquare(20, (4, 300))
    moving = np.random.default_rng(1).standard_normal((5, 4, 300))
    lp[row] += by * lp.std() if by else 0.0
    assert np.flatnonzero(stuck_chains(lp, moving)).tolist() == stuck
    assert not stuck_chains(lp[:, :3], moving[..., :3]).any() or by == -np.inf, "too short to tell"
    moving[:, 1] = moving[:, 1, :1]
    assert stuck_chains(lp, moving)[1] and not stuck_chains(None, moving)[0], "a chain that does not move"


def test_sampler_statistics():
    diverging = np.zeros((3, 4))
    diverging[1, :2] = diverging[2, 0] = 1
    steps = np.array([[7.0, 7, 3, 1]] * 3)
    stats = dict(diverging=diverging, cut=steps > 6, acceptance_rate=np.full((3, 4), 0.75), energy=steps)
    assert sampler_statistics(stats, {"max_tree_depth": 3}) == pytest.approx({
        "divergences": 3, "divergent_chains": 2, "acceptance_mean": 0.75, "max_tree_share": 0.5,
        "bfmi_min": (20 / 3) / 6.75,  # differences 0, −4, −2; variance of 7, 7, 3, 1
    })  # fmt: skip
    before = {"tree_depth": np.log2(steps + 1)}  # of an earlier version: the deepest of thinned ones
    assert sampler_statistics(before, {"max_tree_depth": 3}) == {"max_tree_share": 0.5}
    thinned = sampler_statistics(before, {"max_tree_depth": 3, "thin": 3})["max_tree_share"]
    assert thinned == pytest.approx(1 - 0.5 ** (1 / 3))
    short = np.random.default_rng(0).standard_normal((256, 10))
    assert sampler_statistics({"energy": short}, {})["bfmi_min"] == pytest.approx(2, rel=0.1)  # pooled


SHARED = np.repeat(np.arange(16), 4)


def stationary(num, chains, draws, phi, seed=0):
    """Stationary autoregressive series of variance 1, (M, C, D)."""
    values = np.random.default_rng(seed).standard_normal((num, chains, draws))
    for t in range(1, draws):
        values[..., t] = phi * values[..., t - 1] + (1 - phi**2) ** 0.5 * values[..., t]
    return values


@pytest.mark.parametrize(
    ("chains", "draws", "phi", "groups"),
    [(4, 400, 0.5, None), (4, 250, 0.0, None), (2, 400, -0.3, None), (64, 30, 0.8, SHARED), (64, 2, 0.8, SHARED)],
)
def test_p_values_of_chains_that_agree_are_uniform(chains, draws, phi, groups):
    p = chain_statistics(stationary(1000, chains, draws, phi), groups).rhat_p
    for level in (0.05, 0.3):  # doubled, as of two R-hats the larger counts, it is a little too large in the middle
        assert 0.6 * level < (p < level).mean() < 1.8 * level
    assert (p < 0.001).mean() < 0.008


@pytest.mark.parametrize("phi", [0.0, 0.9])
def test_chains_apart_are_no_chance(phi):
    """Apart by one standard deviation in place, or by a half in spread: not excused by slow chains."""
    values = stationary(2, 4, 2000, phi)
    values[0, 0] += 1.0
    values[1, 0] *= 1.5 if phi < 0.9 else 2.0
    assert (chain_statistics(values).rhat_p < 1e-4).all()
    short = stationary(1, 64, 10, phi) + 1.5 * np.random.default_rng(1).standard_normal(16)[SHARED][:, None]
    assert chain_statistics(short, SHARED).rhat_p[0] < 1e-4, "superchains that have not forgotten their starts"


@pytest.mark.parametrize(("rhat", "p", "effective", "level", "words"), [
    (1.009, None, 800.0, "good", "(it should be below 1.01), with"),
    (1.013, 0.3, 600.0, "good", "chance alone"),
    (1.013, 0.009, 600.0, "caution", "Nearly converged"),
    (1.02, 0.3, 399.0, "caution", "Nearly converged"),
    (1.06, 1e-9, 600.0, "bad", "the chains disagree"),
    (1.06, 0.4, 200.0, "bad", "too few effective draws"),
    (1.005, None, 99.0, "bad", "too few effective draws"),
])  # fmt: skip
def test_what_is_said(rhat, p, effective, level, words):
    numbers = dict(chains=4.0, draws=250.0, points=100.0, divergences=0.0, stuck_chains=0.0, rhat_max=rhat)
    numbers |= {"ess_bulk_min": effective, "ess_tail_min": 700.0} | ({} if p is None else {"rhat_p": p})
    verdict = verdicts(Findings("chains", numbers, tested=True, temperature=1.0, stochastic=False, rows=100))[0]
    assert verdict.level == level and words in verdict.sentence
    assert ("disagree" in verdict.sentence) == (words == "the chains disagree")


# -- importance weights ------------------------------------------------------------------------------------------
LINEAR = correlated(num=40, y_shift=3.0, y_scale=2.0)


def tempered(temperature, problem=LINEAR):
    """The problem of which p(y | w)^(1/T) p(w) is the posterior."""
    return replace(problem, noise=problem.noise * math.sqrt(temperature))


def predicted(problem, x, temperature=1.0):
    """What the exact posterior says of targets at x."""
    design, law = problem.design(x), tempered(temperature, problem)
    variance = problem.noise**2 + 4.0 * (design @ torch.linalg.inv(law.precision) * design).sum(1)
    return Normal(3.0 + 2.0 * design @ law.mean, variance.sqrt())


def refitted(problem, temperature=1.0):
    """(elpd_i, PIT_i) of every row by the exact posterior without it."""
    rows, elpd, pit = torch.arange(len(problem.x)), [], []
    for i in rows:
        rest = replace(problem, x=problem.x[rows != i], y=problem.y[rows != i])
        left = predicted(rest, problem.x[i : i + 1], temperature)
        elpd.append(left.log_prob(problem.y[i]))
        pit.append(left.cdf(problem.y[i]))
    return torch.cat(elpd).numpy(), torch.cat(pit).numpy()


def of_chains(temperature=1.0):
    settings = {"temperature": temperature}
    return exact(draws=1000, problem=LINEAR, law=tempered(temperature), method_settings=settings)


def guide(narrower=1.0, temperature=1.0):
    return guided(narrower, LINEAR, tempered(temperature), method_settings={"temperature": temperature})


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_leave_one_out_is_the_refit(temperature):
    """p(y_i | w)^(1/T) is what a row put into the posterior, and what is taken out."""
    loo, (elpd, pit) = leave_one_out(of_chains(temperature), LINEAR.data), refitted(LINEAR, temperature)
    assert np.abs(loo.elpd - elpd).max() < 0.05 and np.abs(loo.pit - pit).max() < 0.02
    assert loo.rows.tolist() == list(range(40)) and loo.pareto_k.max() < 0.7
    assert loo.standard_error == pytest.approx(math.sqrt(40 * loo.elpd.var(ddof=1)))
    inside = predicted(LINEAR, LINEAR.x, temperature).log_prob(LINEAR.y).numpy()
    assert np.abs(inside - elpd).max() > 0.2  # which the draws as they are would have given
    assert loo.p_loo == pytest.approx(inside - elpd, abs=0.05)


def test_leave_one_out_of_an_approximation_takes_its_weights():
    """Twice too wide, corrected by importance weights, it gives the exact answer; uncorrected it does not."""
    (own, weights), (elpd, _) = importance_weights(guide(narrower=0.7), LINEAR.data), refitted(LINEAR)
    corrected = leave_one_out(own, LINEAR.data, weights)
    assert abs(corrected.elpd.sum() - elpd.sum()) < 0.5 and np.abs(corrected.elpd - elpd).max() < 0.12
    assert abs(leave_one_out(own, LINEAR.data).elpd.sum() - elpd.sum()) > 1.0


@pytest.mark.parametrize("num_classes", [2, 3])
def test_labels(num_classes, monkeypatch):
    """elpd of labels from the true model is honest, its PITs are uniform, and each row's is its own."""
    posterior, g = classifier("abc"[:num_classes], draws=50)  # draws of a standard Normal
    outputs = 1 if num_classes == 2 else 3
    x, w = torch.randn(300, 2, generator=g), torch.randn(outputs, 2, generator=g)
    logits = x @ w.T if outputs == 3 else torch.cat([torch.zeros(300, 1), x @ w.T], 1)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g)[:, 0]
    place = {"layers.0.weight": w, "layers.0.bias": 0.0}
    posterior = replace(posterior, chains={site: place[site] + 0.05 * v for site, v in posterior.chains.items()})
    data = dataset(x, y, posterior.schema)
    loo = leave_one_out(posterior, data)
    assert loo.elpd == pytest.approx(logits.log_softmax(-1).gather(1, y[:, None])[:, 0].numpy(), abs=0.1)
    assert uniformity(loo.pit) > 0.01 > uniformity(loo.pit**2)
    monkeypatch.setattr(draws_module, "BLOCK", 200 * num_classes * 7)  # 7 rows at a time
    assert leave_one_out(posterior, data).pit == pytest.approx(loo.pit, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_exact_posterior_has_equal_weights(temperature):
    """log p(y, w) − log q(w) is the log evidence for every w, and k̂ is that of weights without a tail."""
    _, weights = importance_weights(guide(temperature=temperature), LINEAR.data)
    assert np.ptp(weights) < 0.02
    if temperature == 1.0:
        assert weights.mean() == pytest.approx(LINEAR.log_evidence, abs=0.01)
    assert psis(weights[None])[1][0] < 0.5


def test_psis_itself():
    """Pareto tails of a known shape; weights that do not vary, too few of them, or one that is not a number."""
    g = np.random.default_rng(0)
    for shape in (0.3, 0.9):
        assert psis(shape * g.exponential(size=(3, 20_000)))[1] == pytest.approx(np.full(3, shape), abs=0.12)
    smooth, k = psis(np.stack([np.zeros(100), np.r_[np.nan, np.zeros(99)], g.standard_normal(100)]))
    assert k[0] == 0 and smooth[0] == pytest.approx(-math.log(100)) and np.isnan(k[1]) and np.isfinite(k[2])
    few, none = psis(g.standard_normal((2, 20)))
    assert np.isnan(none).all() and np.exp(few).sum(1) == pytest.approx(np.ones(2))


def test_why_there_are_no_weights(monkeypatch):
    def fitted(entry, method):
        return bp.fit(entry, LINEAR.data, method(epochs=1), progress=False, device="cpu")

    svi = fitted(LINEAR.entry(), bp.SVI)
    assert "without their prior" in proper_prior(fitted(bp.MLP(hidden=(4,)), bp.MLE), LINEAR.data)
    for posterior, why in (
        (of_chains(), "not from an approximation"),
        (fitted(bp.DropoutMLP(hidden=(4,)), bp.MCDropout), "have no density"),
        (fitted(bp.VariationalDropout(hidden=(4,)), bp.SVI), "the prior is improper"),
        (prune(svi, 0.5), "have no density"),
    ):
        with pytest.raises(NoWeights, match=why):
            importance_weights(posterior, LINEAR.data)
    monkeypatch.setattr(importance, "WORK", 1.0)
    with pytest.raises(NoWeights, match="would take too long"):
        importance_weights(svi, LINEAR.data)
