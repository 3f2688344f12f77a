"""Simulation-based calibration: right posteriors pass, planted faults do not, approximations are told by amounts."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pyro
import pytest
import torch
from conjugate import LinearGaussian, dataset
from pyro.distributions import MultivariateNormal

import bnn_pyro as bp
from bnn_pyro.checks import Subject, sbc
from bnn_pyro.checks import simulation as sim
from bnn_pyro.checks.sbc import Calibration
from bnn_pyro.errors import UserError
from bnn_pyro.inference.log_joint import LogJoint, log_joints
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.posterior import Posterior

NOISE, PRIOR = 0.7, 1.0


def data(rows=30, inputs=2, task="regression", classes=(), **units):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(rows, inputs, generator=g)
    y = torch.randn(rows, generator=g) if task == "regression" else torch.arange(rows) % max(2, len(classes))
    y = y.float() if task == "counts" else y
    return dataset(x, y, bp.Schema(task, (inputs,), classes=classes, **units), x[:5] + 0.3, y[:5])


LINEAR = bp.MeanField(hidden=(), noise=NOISE, prior=f"normal:{PRIOR}")


@dataclass(frozen=True)
class Exact:
    """Independent draws of the exact posterior of Bayesian linear regression, made wrong in a chosen way."""

    converges_to: ClassVar[str] = "exact"
    width: float = 1.0
    shift: float = 0.0
    prior: bool = False
    independent: bool = False
    repeat: int = 1
    draws: int = 159

    def run(self, model, guide, data, *, seed=0, checkpoint=None, report=None):
        problem = LinearGaussian(data.x_train.double(), data.y_train.double(), NOISE, PRIOR)
        mean, covariance = problem.mean, torch.linalg.inv(problem.precision)
        if self.independent:
            covariance = problem.mean_field_scale.square().diag()
        if self.prior:
            mean, covariance = torch.zeros_like(mean), PRIOR**2 * torch.eye(len(mean)).double()
        w = MultivariateNormal(mean, self.width**2 * covariance).sample((self.draws,)).float()
        w = w.repeat_interleave(self.repeat, 0) + self.shift * covariance.diagonal().sqrt().float()
        return Posterior(
            model, data.schema, chains={"layers.0.weight": w[None, :, None, :-1], "layers.0.bias": w[None, :, -1:]}
        )


@dataclass(frozen=True)
class Approximate(Exact):
    converges_to: ClassVar[str] = "best in family"


def judged(method, entry=LINEAR, number=150, rows=10, data=data(), seed=0):
    inputs = sim.design(data, rows, 4, 0)
    results = [sim.replicate(entry, inputs, method, seed, 159, k) for k in range(number)]
    return sbc.judge_ranks(method.converges_to, results, 159, seed)


def of(outcome, kind):
    """The smallest corrected p-value of the quantities of a kind."""
    return outcome.evidence["p"][[k == kind for k in outcome.evidence["kinds"]]].min()


# -- exact posteriors, and what can be wrong with them -----------------------------------------------------------------
def test_an_exact_posterior_passes():
    exact = judged(Exact())
    assert exact.level == "good" and exact.figures["calibration_p"] > 1e-3
    assert exact.evidence["draws"] in (139, 159) and exact.evidence["ranks"].shape == (7, 150)
    for level in (50, 80, 95):
        assert exact.figures[f"coverage_{level}"] == pytest.approx(level / 100, abs=0.08)
    assert np.abs(exact.evidence["width"] - 1).max() < 0.25 and "could not be told" in exact.sentence
    assert all(finding.level == "good" for finding in exact.findings)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"width": 0.7}, "too narrow"), ({"width": 1.5}, "too wide"), ({"shift": 0.7}, "too often below the draws")],
)
def test_wrong_posteriors_are_caught(wrong, words):
    outcome = judged(Exact(**wrong), number=90)
    assert outcome.level == "bad" and words in outcome.sentence and of(outcome, "prediction") < 1e-3
    if "width" in wrong:
        assert outcome.figures["calibration_width"] == pytest.approx(wrong["width"], abs=0.2)


def test_a_posterior_that_ignores_its_data_is_seen_by_the_likelihood_alone():
    """Ranks of every weight and prediction are those of the prior among itself: uniform. Modrák et al. 2023."""
    outcome = judged(Exact(prior=True), number=60)
    assert outcome.level == "bad" and of(outcome, "likelihood") < 1e-9
    assert of(outcome, "prediction") > 1e-3 and of(outcome, "weight") > 1e-3


def test_too_few_effective_draws_are_no_verdict():
    outcome = judged(Exact(draws=8, repeat=20), number=40)
    assert outcome.level == "caution" and "Too few effective draws" in outcome.sentence


# -- counts, and heavy tails -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Weighted:
    """Draws of the exact posterior: of 4,000 draws of the prior, by their likelihood; or by another one, or noise."""

    converges_to: ClassVar[str] = "exact"
    other: tuple = ()

    def run(self, model, guide, data, *, seed=0, checkpoint=None, report=None):
        (w,) = LogJoint(model, data.x_train, data.y_train).sample_prior(4000)
        right, model.likelihood = (
            model.likelihood,
            make_likelihood(data.schema, *self.other) if self.other else model.likelihood,
        )
        with torch.no_grad(), pyro.validation_enabled(False):
            _, likelihood = log_joints(model, w, data.x_train, data.y_train)
        model.likelihood = right
        chosen = torch.multinomial(likelihood.softmax(0), 159, replacement=True)
        return Posterior(model, data.schema, chains={site: value[chosen][None] for site, value in w.items()})


@pytest.mark.parametrize(
    ("likelihood", "other"),
    [
        ("poisson", ()),
        ("negative-binomial", ()),
        ("student-t", ()),
        ("negative-binomial", ("learned", "poisson")),
        ("student-t", (0.2, "student-t")),
    ],
)
def test_counts_and_heavy_tails_pass_and_another_dispersion_does_not(likelihood, other):
    counts = likelihood != "student-t"
    there = data(inputs=1, task="counts", y_shift=4.0) if counts else data(inputs=1)
    entry = bp.MeanField(hidden=(), prior="normal:0.7", likelihood=likelihood, **({} if counts else {"noise": 0.5}))
    outcome = judged(Weighted(other), entry, number=60 if other else 30, data=there)
    assert outcome.level == ("bad" if other else "good"), outcome.sentence
    assert not other or "too narrow" in outcome.sentence


# -- approximations ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wrong", "level", "words"),
    [
        ({"width": 0.6}, "caution", "too narrow"),
        ({"width": 0.6, "shift": 1.0}, "bad", "lies to one side of the truth"),
        ({"prior": True}, "bad", "no likelier than those of the prior"),
    ],
)
def test_an_approximation_s_spread_is_reported_and_its_other_faults_are_caught(wrong, level, words):
    outcome = judged(Approximate(**wrong), number=80)
    assert outcome.level == level and words in outcome.sentence and ("error" in outcome.sentence) == (level == "bad")


def run(entry, inference, given=None, data=data(), **settings):
    settings = {**Calibration.quick, "rows": 10, "cores": 1, **settings}
    return Calibration(**settings).run(Subject("mean-field", entry, inference, data, given or {}))


def test_mean_field_is_too_narrow_where_weights_are_correlated():
    """Rows far from 0 tie slope and bias to each other: q's spread of the bias is √((Λ⁻¹)ᵢᵢ Λᵢᵢ) times too small."""
    far = data(inputs=1)
    far = replace(far, x_train=far.x_train + 0.5, x_test=far.x_test + 0.5)
    outcome = judged(Approximate(independent=True), data=far)
    given = sim.design(far, 10, 4, 0)
    precision = LinearGaussian(given.x.double(), torch.zeros(10).double(), NOISE, PRIOR).precision
    share = (torch.linalg.inv(precision)[1, 1] * precision[1, 1]).rsqrt().item()
    found = dict(zip(outcome.evidence["kinds"], outcome.evidence["width"], strict=True))["weight"]
    assert 0.6 < share < 0.8 and found == pytest.approx(share, rel=0.15)
    assert outcome.level == "caution" and "layers.0.bias[0]" in outcome.sentence


def head(there):
    """A last layer on a network that was trained once."""
    trained = bp.fit(bp.MLP(hidden=(4,)), there, bp.MAP(epochs=30), progress=False, device="cpu")
    return bp.LastLayer(backbone=trained, **({"noise": NOISE} if there.schema.task == "regression" else {}))


# -- the package's methods ---------------------------------------------------------------------------------------------
def test_the_exact_last_layer_passes():
    """Laplace of linear regression with a known noise is exact."""
    outcome = run(head(data()), "laplace", replications=60)
    assert outcome.level == "good" and outcome.figures["calibration_width"] == pytest.approx(1, abs=0.2)


def test_a_sampler_passes_on_a_network():
    """20 data sets reveal draws of less than 45 % of the right width, or more than 272 %."""
    outcome = run(bp.MeanField(hidden=(4,), activation="tanh"), "chees", data=data(inputs=1), replications=20)
    assert outcome.level == "good", outcome.sentence
    assert {"log_noise", "layers.1.bias[0]", "log-likelihood of the data"} <= set(outcome.evidence["labels"])


def test_classes():
    for classes, label in (("ab", "log odds at row 1"), ("abc", "log odds of class 1 at row 2")):
        there = data(task="classification", classes=tuple(classes))
        outcome = run(head(there), "laplace", data=there, replications=20)
        assert outcome.level != "bad" and label in outcome.evidence["labels"]


# -- simulation --------------------------------------------------------------------------------------------------------
UNITS = sim.design(data(y_shift=10.0, y_scale=3.0), 10, 4, 0)


def simulated(num, seed=0):
    """A simulator in units of the target, draws of it (num, 3), (num, 10), and the design matrix."""
    with isolated(seed):
        made = sim.Simulator(LINEAR, UNITS)
        w, y = made.draws(num)
    flat = torch.cat([w["layers.0.weight"][:, 0], w["layers.0.bias"]], 1)
    return made, w, flat, y, torch.cat([UNITS.x, torch.ones(10, 1)], 1)


def test_simulated_data_are_the_model_s():
    """Targets of linear regression: Normal around A w*, in the target's own units; weights from the prior."""
    _, _, w, y, a = simulated(400)
    residual = (y - 10 - 3 * w @ a.T) / NOISE
    assert abs(residual.std().item() - 1) < 4 / np.sqrt(2 * residual.numel()) and abs(residual.mean()) < 0.05
    assert (w.std(0) - PRIOR).abs().max() < 4 * PRIOR / np.sqrt(800)
    assert torch.equal(y, simulated(400)[3])


def test_answers_are_the_likelihood_s_and_the_network_s():
    made, w, flat, y, a = simulated(5)
    asked, values = made.quantities(w, y)
    answers, flat = dict(zip([q.about for q in asked], values[1], strict=True)), flat[1].double()
    law = torch.distributions.Normal(10 + 3 * a.double() @ flat, NOISE)
    assert answers["log-likelihood of the data"] == pytest.approx(law.log_prob(y[1].double()).sum().item(), rel=1e-5)
    assert answers["mean at row 2"] == pytest.approx(law.mean[1].item(), rel=1e-5)
    prior = torch.distributions.Normal(0, PRIOR).log_prob(flat).sum().item()
    assert answers["log prior density"] == pytest.approx(prior, rel=1e-5)
    assert answers["layers.0.bias[0]"] == pytest.approx(flat[-1].item())
    same = made.quantities(w, y[1])[1]  # the same targets for all
    np.testing.assert_allclose(same[1], values[1], rtol=1e-5)


# -- what is refused, and what goes wrong ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("entry", "inference", "given", "words"),
    [
        (LINEAR, "map", {}, "gives points"),
        (LINEAR, "nuts", {"temperature": 0.5}, "temperature other than 1"),
        (bp.HiddenLayerNet(prior="log-uniform"), "svi", {}, "proper prior"),
        (bp.LastLayer(backbone="mlp", noise=0.5), "laplace", {}, "trained first"),
    ],
)
def test_refused(entry, inference, given, words):
    subject = Subject("any", entry, inference, data(), given)
    assert words in Calibration().refuses(subject)
    assert Calibration().refuses(Subject("any", LINEAR, "svi", data())) == ""
    with pytest.raises(UserError, match="replications must be at least 20"):
        Calibration(replications=5)


@dataclass(frozen=True)
class Failing(Exact):
    often: float = 0.1

    def run(self, model, guide, data, **rest):
        if np.random.default_rng(rest["seed"]).random() < self.often:
            raise UserError("no luck")
        return super().run(model, guide, data, **rest)


def test_fits_that_fail_are_counted():
    some, all_ = judged(Failing(), number=30), judged(Failing(often=1.0), number=20)
    assert some.level == "caution" and "fits failed" in some.sentence and "no luck" in some.sentence
    assert all_.level == "bad" and "20 of 20 fits" in all_.sentence
