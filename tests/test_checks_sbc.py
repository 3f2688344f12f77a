"""Simulation-based calibration: right posteriors pass, planted faults do not; the exact null distributions of ranks."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from conjugate import LinearGaussian, dataset
from pyro.distributions import MultivariateNormal
from scipy import stats
from scipy.stats import binom

import bnn_pyro as bp
from bnn_pyro.checks import Subject, sbc
from bnn_pyro.checks import sbc_ranks as r
from bnn_pyro.checks import simulation as sim
from bnn_pyro.checks.sbc import Calibration

NOISE, PRIOR = 0.7, 1.0


def data(rows=30, inputs=2, **units):
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(rows, inputs, generator=g), torch.randn(rows, generator=g)
    return dataset(x, y, bp.Schema("regression", (inputs,), **units), x[:5] + 0.3, y[:5])


LINEAR = bp.MeanField(hidden=(), noise=NOISE, prior=f"normal:{PRIOR}")


@dataclass(frozen=True)
class Exact:
    """Independent draws of the exact posterior of Bayesian linear regression, made wrong in a chosen way."""

    converges_to: str = "exact"
    width: float = 1.0
    shift: float = 0.0
    prior: bool = False
    repeat: int = 1
    draws: int = 159
    fails: float = 0.0

    def run(self, model, guide, data, **how):
        if np.random.default_rng(how["seed"]).random() < self.fails:
            raise bp.UserError("no luck")
        problem = LinearGaussian(data.x_train.double(), data.y_train.double(), NOISE, PRIOR)
        mean, covariance = problem.mean, torch.linalg.inv(problem.precision)
        if self.prior:
            mean, covariance = torch.zeros_like(mean), PRIOR**2 * torch.eye(len(mean)).double()
        w = MultivariateNormal(mean, self.width**2 * covariance).sample((self.draws,)).float()
        w = w.repeat_interleave(self.repeat, 0) + self.shift * covariance.diagonal().sqrt().float()
        chains = {"layers.0.weight": w[None, :, None, :-1], "layers.0.bias": w[None, :, -1:]}
        return bp.Posterior(model, data.schema, chains=chains)


def judged(method, number=150):
    inputs = sim.design(data(), 10, 4, 0)
    results = [sim.replicate(LINEAR, inputs, method, 0, 159, k) for k in range(number)]
    return sbc.judge_ranks(method.converges_to, results, 159, 0)


def of(outcome, kind):
    """The smallest corrected p-value of the quantities of a kind."""
    return outcome.evidence["p"][[k == kind for k in outcome.evidence["kinds"]]].min()


def test_an_exact_posterior_passes():
    exact = judged(Exact())
    assert exact.level == "good" and exact.figures["calibration_p"] > 1e-3
    assert exact.evidence["draws"] in (139, 159) and exact.evidence["ranks"].shape == (7, 150)
    for level in (50, 80, 95):
        assert exact.figures[f"coverage_{level}"] == pytest.approx(level / 100, abs=0.08)
    assert np.abs(exact.evidence["width"] - 1).max() < 0.25 and "could not be told" in exact.sentence
    assert all(finding.level == "good" for finding in exact.findings)


@pytest.mark.parametrize(("wrong", "level", "words"), [
    (Exact(width=0.7), "bad", "too narrow"),
    (Exact(width=1.5), "bad", "too wide"),
    (Exact(shift=0.7), "bad", "too often below the draws"),
    (Exact("best in family", width=0.6), "caution", "too narrow"),
    (Exact("best in family", width=0.6, shift=1.0), "bad", "lies to one side of the truth"),
    (Exact("best in family", prior=True), "bad", "no likelier than those of the prior"),
])  # fmt: skip
def test_wrong_posteriors_are_caught_and_the_spread_of_an_approximation_is_reported(wrong, level, words):
    outcome = judged(wrong, number=90)
    assert outcome.level == level and words in outcome.sentence
    if wrong.converges_to == "exact":
        assert of(outcome, "prediction") < 1e-3
        assert wrong.width == 1 or outcome.figures["calibration_width"] == pytest.approx(wrong.width, abs=0.2)


def test_a_posterior_that_ignores_its_data_is_seen_by_the_likelihood_alone():
    """Ranks of every weight and prediction are those of the prior among itself: uniform. Modrák et al. 2023."""
    outcome = judged(Exact(prior=True), number=60)
    assert outcome.level == "bad" and of(outcome, "likelihood") < 1e-9
    assert of(outcome, "prediction") > 1e-3 and of(outcome, "weight") > 1e-3


def test_a_sampler_passes_on_a_network():
    """20 data sets reveal draws of less than 45 % of the right width, or more than 272 %."""
    check = Calibration(**{**Calibration.quick, "rows": 10, "cores": 1, "replications": 20})
    outcome = check.run(Subject(bp.MeanField(hidden=(4,), activation="tanh"), bp.METHODS["chees"], data(inputs=1)))
    assert outcome.level == "good", outcome.sentence
    assert {"log_noise", "layers.1.bias[0]", "log-likelihood of the data"} <= set(outcome.evidence["labels"])


#: Task, shift and scale of the targets, and their law given the line x w + b.
LAWS = {
    "normal": ("regression", 10.0, 3.0, lambda line: stats.norm(10 + 3 * line, NOISE)),
    "log-normal": ("survival", 1.0, 0.8, lambda line: stats.lognorm(NOISE, scale=np.exp(1 + 0.8 * line))),
    "poisson": ("counts", 3.0, 1.0, lambda line: stats.poisson(3 * np.exp(line))),
}


@pytest.mark.parametrize("name", LAWS)
def test_simulated_data_are_the_model_s_counts_and_censored_times_too(name):
    """Weights are from the prior, targets from the law given these, in their own units; densities are scipy's."""
    task, shift, scale, law = LAWS[name]
    given = data(y_shift=shift, y_scale=scale)
    given = replace(given, schema=replace(given.schema, task=task), y_train=3 * given.y_train.exp())
    entry, draws = replace(LINEAR, likelihood=name), []
    inputs = sim.design(given, 10, 4, 0)
    for _ in range(2):
        with bp.isolated(0):
            made = sim.Simulator(entry, inputs)
            draws.append(made.draws(400))
    (w, y), (_, again) = draws
    assert torch.equal(y, again)
    flat = torch.cat([w["layers.0.weight"][:, 0], w["layers.0.bias"]], 1).double()
    assert stats.kstest(flat.ravel(), stats.norm(0, PRIOR).cdf).pvalue > 1e-3
    exact, y = law((flat @ torch.cat([inputs.x_train, torch.ones(10, 1)], 1).double().T).numpy()), y.double().numpy()
    event, below = y > (0 if task == "survival" else -np.inf), 1.0
    density = exact.logpmf(y) if task == "counts" else np.where(event, exact.logpdf(y), exact.logsf(-y))
    if task == "survival":
        ends = inputs.y_train.abs().numpy()
        below = exact.cdf(ends)
        assert (np.abs(y) == ends)[~event].all() and (y <= ends).all() and 0.2 < event.mean() < 0.8
        assert abs((event - below).mean()) < 4 * np.sqrt((below * (1 - below)).mean() / event.size)
    pit = exact.cdf(y) / below
    if task == "counts":
        pit = exact.cdf(y - 1) + np.random.default_rng(0).random(y.shape) * exact.pmf(y)
    assert stats.kstest(pit[event], "uniform").pvalue > 1e-3
    # Their quantities are the likelihood's and the network's, also of targets that are one for all weights.
    for of, likelihood in ((y, density.sum(1)), (y[0], density.sum(1)[:1])):
        asked, values = made.quantities(w, torch.from_numpy(of).float())
        answers = dict(zip([about for about, _ in asked], values.T, strict=True))
        found = answers["log-likelihood of the data"][: len(likelihood)]
        np.testing.assert_allclose(found, likelihood, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(answers["log prior density"], stats.norm(0, PRIOR).logpdf(flat).sum(1), rtol=1e-5)
    if name == "normal":
        np.testing.assert_allclose(answers["mean at input 2"], exact.mean()[:, 1], rtol=1e-5)


def test_refused():
    for entry, inference, given, words in (
        (LINEAR, "map", {}, "returns points"),
        (LINEAR, "nuts", {"temperature": 0.5}, "temperature other than 1"),
        (bp.HiddenLayerNet(prior="log-uniform"), "svi", {}, "proper prior"),
        (bp.LastLayer(backbone="mlp", noise=0.5), "laplace", {}, "trained first"),
    ):
        assert words in Calibration().refuses(Subject(entry, bp.METHODS[inference], data(), given))
    assert Calibration().refuses(Subject(LINEAR, bp.METHODS["svi"], data())) == ""


def test_fits_that_fail_and_too_few_effective_draws_are_told():
    some, every = judged(Exact(fails=0.1), number=30), judged(Exact(fails=1.0), number=20)
    assert some.level == "caution" and "fits failed" in some.sentence and "no luck" in some.sentence
    assert every.level == "bad" and "20 of 20 fits" in every.sentence
    few = judged(Exact(draws=8, repeat=20), number=40)
    assert few.level == "caution" and "Too few effective draws" in few.sentence


# -- ranks ----------------------------------------------------------------------------------------------------
def test_ranks_by_hand_ties_by_lot_and_the_width_of_the_draws():
    rng = np.random.default_rng(0)
    assert r.ranks(np.array([0.5, -1.0, 9.0]), np.array([[0.0, 1.0, 2.0]] * 3), rng).tolist() == [1, 0, 3]
    tied = r.ranks(np.zeros(3000), np.tile([-1.0, 0.0, 0.0, 1.0], (3000, 1)), rng)
    assert set(tied) == {1, 2, 3} and np.abs(np.bincount(tied)[1:] - 1000).max() < 4 * math.sqrt(3000 * 2 / 9)
    for width in (0.75, 1.0, 1.3):
        ranks = r.ranks(rng.standard_normal(4000), width * rng.standard_normal((4000, 159)), rng)
        assert r.width(ranks, 159) == pytest.approx(width, rel=0.08)


def test_bands_p_values_and_coverage_by_enumeration():
    """Two ranks on 0 … 2, nine pairs: every p-value is a ninth or more, worked out by listing all pairs."""
    pairs = [np.array([a, b]) for a in range(3) for b in range(3)]
    share = {1: 1 / 3, 2: 2 / 3}
    gamma = []
    for pair in pairs:
        counts = {i: (pair < i).sum() for i in (1, 2)}
        tails = [min(binom.cdf(counts[i], 2, share[i]), binom.sf(counts[i] - 1, 2, share[i])) for i in (1, 2)]
        gamma.append(2 * min(tails))
    for pair, own in zip(pairs, gamma, strict=True):
        assert r.p_uniform(pair, 2) == pytest.approx(np.mean([g <= own + 1e-12 for g in gamma]), abs=1e-12)
    # Three ranks on 0 … 3: 64 triples, each as likely.
    triples = np.stack(np.meshgrid(*[np.arange(4)] * 3), -1).reshape(-1, 3)
    for test, power in ((r.p_location, 1), (r.p_width, 2)):
        sums = (r.normal_scores(triples, 3) ** power).sum(1)
        for triple, own in zip(triples, sums, strict=True):
            two_sided = 2 * min((sums <= own + 1e-6).mean(), (sums >= own - 1e-6).mean())
            assert test(triple, 3) == pytest.approx(min(1.0, two_sided), abs=1e-9)
    # Of all ranks once, an interval holds its level, whether or not its ends fall between two ranks.
    for num in (1, 7, 39, 100):
        for level in r.LEVELS:
            assert r.covered(np.arange(num + 1), num, level).mean() == pytest.approx(level, abs=1e-12)
    ends = r.covered(np.array([0, 1, 38, 39]), 39, 0.95)  # 1 of 40 ranks is cut off at either end
    assert ends.tolist() == pytest.approx([0, 1, 1, 0])
