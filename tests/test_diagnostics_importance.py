"""Importance weights against closed forms: the evidence, leave-one-out by refitting, Pareto tails of known shape."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conjugate import correlated, dataset
from test_diagnostics_verdicts import classifier, exact, guided
from torch.distributions import Normal

import bnn_pyro as bp
from bnn_pyro.diagnostics import draws as draws_module
from bnn_pyro.diagnostics import importance, leave_one_out
from bnn_pyro.diagnostics.importance import NoWeights, importance_weights, proper_prior, psis, uniformity
from bnn_pyro.pruning import prune

PROBLEM = correlated(num=40, y_shift=3.0, y_scale=2.0)


def tempered(problem, temperature):
    """(mean, precision) of p(y | w)^(1/T) p(w)."""
    prior = torch.eye(len(problem.mean)).double() / problem.prior_scale**2
    precision = (problem.precision - prior) / temperature + prior
    return torch.linalg.solve(precision, problem.precision @ problem.mean / temperature), precision


def predicted(problem, x, temperature=1.0):
    """What the exact posterior says of targets at x."""
    design, (mean, precision) = problem.design(x), tempered(problem, temperature)
    variance = problem.noise**2 + 4.0 * (design @ torch.linalg.inv(precision) * design).sum(1)
    return Normal(3.0 + 2.0 * design @ mean, variance.sqrt())


def refitted(problem, temperature=1.0):
    """(elpd_i, PIT_i) of every row by the exact posterior without it."""
    rows, elpd, pit = torch.arange(len(problem.x)), [], []
    for i in rows:
        rest = type(problem)(problem.x[rows != i], problem.y[rows != i], noise=problem.noise, y_shift=3.0, y_scale=2.0)
        left = predicted(rest, problem.x[i : i + 1], temperature)
        elpd.append(left.log_prob(problem.y[i]))
        pit.append(left.cdf(problem.y[i]))
    return torch.cat(elpd).numpy(), torch.cat(pit).numpy()


def in_sample(problem):
    return predicted(problem, problem.x).log_prob(problem.y).numpy()


def chains(temperature=1.0):
    about = {"method_settings": {"temperature": temperature}}
    return exact(draws=1000, problem=PROBLEM, moments=tempered(PROBLEM, temperature), **about)


def guide(problem=PROBLEM, narrower=1.0, temperature=1.0):
    about = {"method_settings": {"temperature": temperature}}
    return guided(narrower, problem, tempered(problem, temperature), **about)


# -- leave-one-out -------------------------------------------------------------------------------------------------
def test_leave_one_out_is_the_refit():
    loo = leave_one_out(chains(), PROBLEM.data)
    elpd, pit = refitted(PROBLEM)
    assert loo.rows.tolist() == list(range(40))
    assert np.abs(loo.elpd - elpd).max() < 0.05 and abs(loo.elpd.sum() - elpd.sum()) < 0.25
    assert np.abs(in_sample(PROBLEM) - elpd).max() > 0.2  # which the draws as they are would have given
    assert loo.p_loo == pytest.approx(in_sample(PROBLEM) - elpd, abs=0.05)
    assert np.abs(loo.pit - pit).max() < 0.02
    assert loo.pareto_k.max() < 0.7
    assert loo.standard_error == pytest.approx(math.sqrt(40 * loo.elpd.var(ddof=1)))


def test_leave_one_out_of_an_approximation_takes_its_weights():
    """Twice too wide, corrected by importance weights, it gives the exact answer; uncorrected it does not."""
    own, weights = importance_weights(guide(narrower=0.7), PROBLEM.data)
    elpd, _ = refitted(PROBLEM)
    corrected = leave_one_out(own, PROBLEM.data, weights)
    assert abs(corrected.elpd.sum() - elpd.sum()) < 0.5 and np.abs(corrected.elpd - elpd).max() < 0.12
    assert corrected.p_loo.sum() == pytest.approx((in_sample(PROBLEM) - elpd).sum(), abs=0.4)
    assert abs(leave_one_out(own, PROBLEM.data).elpd.sum() - elpd.sum()) > 1.0


def test_leave_one_out_at_another_temperature():
    """p(y_i | w)^(1/T) is what a row put into the posterior, and what is taken out."""
    posterior = chains(temperature=0.5)
    elpd, _ = refitted(PROBLEM, temperature=0.5)
    assert np.abs(leave_one_out(posterior, PROBLEM.data).elpd - elpd).max() < 0.05
    once = leave_one_out(replace(posterior, provenance={}), PROBLEM.data)  # takes p(y_i | w) out, half of it
    assert np.abs(once.elpd - elpd).max() > 0.1


@pytest.mark.parametrize("num_classes", [2, 3])
def test_labels(num_classes, monkeypatch):
    """elpd of labels from the true model is honest, its PITs are uniform, and each row's is its own."""
    g, outputs = torch.Generator().manual_seed(3), 1 if num_classes == 2 else 3
    x, w = torch.randn(300, 2, generator=g), torch.randn(outputs, 2, generator=g)
    logits = x @ w.T if outputs == 3 else torch.cat([torch.zeros(300, 1), x @ w.T], 1)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g)[:, 0]
    posterior, g = classifier("abc"[:num_classes], draws=50)  # draws of a standard Normal
    of = {"layers.0.weight": w, "layers.0.bias": 0.0}
    posterior = replace(posterior, chains={site: of[site] + 0.05 * v for site, v in posterior.chains.items()})
    data = dataset(x, y, posterior.schema)
    loo = leave_one_out(posterior, data)
    assert loo.elpd == pytest.approx(logits.log_softmax(-1).gather(1, y[:, None])[:, 0].numpy(), abs=0.1)
    assert uniformity(loo.pit) > 0.01 > uniformity(loo.pit**2)
    monkeypatch.setattr(draws_module, "BLOCK", 200 * num_classes * 7)  # 7 rows at a time
    again = leave_one_out(posterior, data)
    assert again.pit == pytest.approx(loo.pit, abs=1e-5)


# -- distance from the posterior -----------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_exact_posterior_has_equal_weights(temperature):
    """log p(y, w) − log q(w) is the log evidence for every w, and k̂ is that of weights without a tail."""
    _, weights = importance_weights(guide(temperature=temperature), PROBLEM.data)
    assert np.ptp(weights) < 0.02
    if temperature == 1.0:
        assert weights.mean() == pytest.approx(PROBLEM.log_evidence, abs=0.01)
    assert psis(weights[None])[1][0] < 0.5


@pytest.mark.parametrize("narrower", [10.0, 1.3])
def test_k_hat_of_a_q_that_is_too_narrow(narrower):
    """The weights of q = Normal(m, s²) for a posterior Normal(m, σ²) have a Pareto tail of shape 1 − s²/σ²."""
    line = correlated(num=40, inputs=1, bias=False)
    k = psis(importance_weights(guide(line, narrower), line.data)[1][None])[1][0]
    assert k == pytest.approx(1 - narrower**-2, abs=0.25) and (k > 0.7) == (narrower == 10)


def test_psis_itself():
    """Pareto tails of a known shape; weights that do not vary, too few of them, or one that is not a number."""
    g = np.random.default_rng(0)
    for shape in (0.3, 0.9):
        log_weights = shape * g.exponential(size=(3, 20_000))
        assert psis(log_weights)[1] == pytest.approx(np.full(3, shape), abs=0.12)
    smooth, k = psis(np.stack([np.zeros(100), np.r_[np.nan, np.zeros(99)], g.standard_normal(100)]))
    assert k[0] == 0 and smooth[0] == pytest.approx(-math.log(100)) and np.isnan(k[1]) and np.isfinite(k[2])
    assert np.exp(smooth[2]).sum() == pytest.approx(1)
    few, none = psis(g.standard_normal((2, 20)))
    assert np.isnan(none).all() and np.exp(few).sum(1) == pytest.approx(np.ones(2))


def test_why_there_are_no_weights():
    data = PROBLEM.data

    def refused(posterior, why, data=data):
        with pytest.raises(NoWeights, match=why):
            importance_weights(posterior, data)

    def fitted(entry, method):
        return bp.fit(entry, data, method, progress=False, device="cpu")

    refused(chains(), "no approximation's")
    refused(fitted(bp.DropoutMLP(hidden=(4,)), bp.MCDropout(epochs=1)), "have no density")
    refused(fitted(bp.VariationalDropout(hidden=(4,)), bp.SVI(epochs=1)), "the prior is improper")
    svi = fitted(PROBLEM.entry(), bp.SVI(epochs=1))
    refused(prune(svi, 0.5), "have no density")
    big = dataset(torch.zeros(1, 4).expand(10**9, 4), torch.zeros(1).expand(10**9), PROBLEM.schema)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importance, "WORK", 1e3)
        refused(svi, "would take too long")
    del big
    assert (
        proper_prior(fitted(bp.MLP(hidden=(4,)), bp.MLE(epochs=1)), data)
        == "the weights were fitted without their prior"
    )
    assert proper_prior(svi, data) == ""
