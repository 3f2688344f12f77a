"""A likelihood and a method of one's own, written here: every command takes them, and no other file knows them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from refused import refuses

import bnn_pyro as bp
from bnn_pyro.checks import CHECKS, Subject
from bnn_pyro.inference import methods_for
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.likelihoods import Likelihood, make_likelihood
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.nets import MLP
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.settings import Settings, setting


class PoissonMixture(Mixture):
    def component_cdf(self, y):
        y = y.unsqueeze(-2).double().floor()
        return torch.special.gammaincc(y.clamp_min(0) + 1, self.components.rate.double()).where(y >= 0, 0.0)


class Poisson(Likelihood):
    mixture = PoissonMixture

    def components(self, f):
        return dist.Poisson(f.squeeze(-1).exp())

    def information(self, f, own):
        return f.exp()[..., None]


@dataclass(frozen=True)
class Counts(bp.MeanField):
    hidden: tuple[int, ...] = field(default=(4,))
    summary: ClassVar[str] = "Counts by a Poisson regression"

    def model(self, schema):
        return BayesianNet(MLP(schema.input_shape, self.hidden, 1, "tanh", True), Poisson(), self.prior)


def test_a_likelihood_that_forgets_the_axis_of_outputs_is_refused():
    likelihood = Poisson()
    likelihood.components = lambda f: dist.Poisson(f.exp())
    refuses(r"batch shape \(5, 1\) of f \(5, 1\), where \(5,\) is right", likelihood, torch.zeros(5, 1), torch.zeros(5))
    refuses("noise=0.3 is not of a likelihood of your own", bp.Bayesian, likelihood=likelihood, noise=0.3)
    likelihood.components = torch.exp
    refuses("Poisson.components must return a torch distribution, and gave Tensor", likelihood, torch.zeros(5, 1))
    refuses("Likelihood defines no 'components': a method that", Likelihood(), torch.zeros(5, 1))


@pytest.mark.filterwarnings("ignore:the gradient was not compiled")
def test_every_command_takes_a_likelihood_of_the_users_own(tmp_path, monkeypatch, command):
    monkeypatch.setitem(bp.ZOO, "counts", Counts)
    x = np.random.default_rng(0).uniform(-1, 1, 90)
    table = pd.DataFrame({"x": x, "count": np.random.default_rng(1).poisson(np.exp(1 + x))})
    table.to_csv(tmp_path / "counts.csv", index=False)
    file, run, predictions = (tmp_path / name for name in ("counts.csv", "run", "p.csv"))
    data = ["--data", file, "--target", "count", "--task", "regression"]
    svi = ["--inference", "svi", "--epochs", 150, "--lr", 0.05, "--num-draws", 20]
    command("train", "counts", *data, *svi, "--no-baseline", "--out", run)
    command("diagnose", run)
    command("predict", run, "--input", file, "--output", predictions)
    command("check", "counts", *data, "--inference", "nuts", "--only", "estimator", "--out", tmp_path / "check")
    assert set(np.mod(pd.read_csv(predictions)["q97.5"], 1)) == {0.0}
    scores = json.loads((run / "metrics.json").read_text())
    assert set(bp.metrics.METRICS["regression"]) <= set(scores) and 0.5 < scores["coverage_95"] <= 1
    assert "coverage 95" in (run / "report.html").read_text()


@dataclass(frozen=True)
class Jitter(Settings):
    """Settings of a point estimate with Normal noise around it, which is right about nothing but its centre."""

    converges_to: ClassVar[str] = "point"
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    tiny: ClassVar[Mapping[str, Any]] = {"epochs": 50, "draws": 4}

    epochs: int = setting(20, low=1)
    draws: int = setting(8, low=1)

    def run(self, model, guide, data, *, seed=0, checkpoint=None, report=None):
        point = bp.MAP(epochs=self.epochs).run(model, guide, data, seed=seed, checkpoint=checkpoint, report=report)
        chains = {site: value.repeat(1, self.draws, *(1,) * (value.dim() - 2)) for site, value in point.chains.items()}
        noisy = {site: value + 0.01 * torch.randn_like(value) for site, value in chains.items()}
        return bp.Posterior(model, data.schema, chains=noisy, trace=point.trace)


def test_every_command_takes_a_method_of_the_users_own(tmp_path, command, monkeypatch):
    monkeypatch.setitem(bp.METHODS, "jitter", Jitter)
    run, other, out = (tmp_path / name for name in ("run", "other", "check"))
    assert "jitter" in methods_for(bp.MeanField) and "jitter" not in methods_for(bp.HiddenLayerNet)
    train = ["train", "mean-field", "--inference", "jitter", "--data", "toy-curve"]
    assert "draws must be at least 1" in command(*train, "--set", "draws=0", code=2)
    refused = command("train", "hidden-layer", *train[2:], "--out", other, code=2)
    assert "jitter needs a model p(y, w | x)" in refused
    command(*train, "--out", run)
    assert bp.load(run).draw(8)["layers.0.weight"].shape[0] == 8
    assert list((run / "figures").glob("*.png"))
    monkeypatch.setattr("bnn_pyro.runs.evaluate.draw_all", lambda scene, folder: [])  # drawn once is enough
    command(*train, "--no-baseline", "--seed", 1, "--out", other)
    for argv in (["evaluate", run], ["diagnose", run, "--no-netcdf"], ["compare", run, other]):
        command(*argv)
    checks = ["--only", "closed-form", "--only", "predictive", "--out", out]
    command("check", "mean-field", "--inference", "jitter", *checks, code=(0, 1))
    outcomes = json.loads((out / "check.json").read_text())["subjects"][0]["outcomes"]
    assert len(outcomes) == 2 and all("Error" not in json.dumps(outcome) for outcome in outcomes)


class LaplaceWeights(torch.nn.Module):
    def __init__(self, inputs, likelihood):
        super().__init__()
        self.likelihood = likelihood
        self.initial = {"w": torch.zeros(inputs, likelihood.outputs)} | likelihood.initial

    def forward(self, x, y=None):
        w = pyro.sample("w", dist.Laplace(torch.zeros_like(self.initial["w"]), 1.0).to_event(2))
        return self.likelihood(x @ w, y)


@dataclass(frozen=True)
class Linear:
    wrapped: Any = None
    guided: Any = None
    forgets: bool = False
    summary, paper, has = "Linear", "", frozenset({"guide", "weights", "proper prior"})

    def model(self, schema):
        model = LaplaceWeights(schema.input_shape[0], make_likelihood(schema, "learned"))
        if self.forgets:
            del model.initial["log_noise"]
        return self.wrapped(model) if self.wrapped else model

    def guide(self, model):
        return self.guided(model) if self.guided else MeanFieldNormal(model.initial, 0.01)


class ParamGuide(torch.nn.Module):
    def forward(self, x, y=None):
        pyro.sample("w", dist.Normal(pyro.param("loc", torch.zeros(3, 1)), 1.0).to_event(2))


def test_a_model_and_guide_in_pyro_are_a_variant_and_what_is_none_is_told(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    data = bp.dataset(x, x @ [1.0, 0, -1] + 0.1 * rng.normal(size=60), seed=0)
    how = dict(seed=0, progress=False)
    for method in (bp.SVI(epochs=30), bp.MAP(epochs=30), bp.NUTS(chains=2, warmup=100, draws=20, cores=1)):
        own = bp.fit(Linear(), data, method, out=tmp_path / type(method).__name__, **how)
        here = bp.predict(own, data.x_test, num_draws=8).mean
        there = bp.predict(bp.load(tmp_path / type(method).__name__, Linear()), data.x_test, num_draws=8).mean
        assert torch.equal(here, there)
    refuses(r"unknown variant in .*'Linear'.*; one of your own: load\(folder, ", bp.load, tmp_path / "SVI")
    plain = Linear(wrapped=lambda model: model.forward)
    refuses("the model of Linear is method; it must be a torch.nn.Module with `initial`", bp.fit, plain, data, **how)
    for method in (bp.SVI(epochs=1), bp.MAP(epochs=1), bp.NUTS(warmup=1, draws=1)):
        refuses("site 'log_noise'", bp.fit, Linear(forgets=True), data, method, **how)

    def weights(event=2):
        return pyro.sample("w", dist.Laplace(torch.zeros(3, 1), 1.0).to_event(event))

    for forward, words in (
        (lambda model, x, y: model.likelihood(x @ weights()), "LaplaceWeights has no observed site 'y'"),
        (lambda model, x, y: x @ weights(), "has no observed site 'y': end it with self.likelihood"),
        (lambda model, x, y: model.likelihood(x @ weights() * pyro.param("s", x.sum()), y), "'s' is a pyro.param"),
        (lambda model, x, y: model.likelihood(x @ weights(0), y), r"'w' of the model has event shape \(\), .*\(3, 1\)"),
    ):

        def wrapped(model, f=forward):
            return setattr(model, "forward", lambda x, y=None: f(model, x, y)) or model

        refuses(words, bp.fit, Linear(wrapped=wrapped), data, bp.SVI(epochs=1), **how)
    for guide, words in (
        (AutoNormal, "'AutoNormal.* is a pyro.param, .*AutoGuides are not taken"),
        (lambda model: ParamGuide(), "'loc' is a pyro.param, which no fit trains"),
        (lambda model: MeanFieldNormal({"w": torch.zeros(3)}, 0.1), r"'w' of the guide has event shape \(3,\)"),
    ):
        refuses(words, bp.fit, Linear(guided=guide), data, bp.SVI(epochs=1), **how)
    refuses("{'epochs': 3} is neither a name nor a dataclass .*method", bp.fit, "mlp", data, {"epochs": 3}, **how)
    assert torch.equal(bp.predict(own, data.x_test.double(), num_draws=8).mean, here)
    refuses("takes a BayesianNet, and this model is a LaplaceWeights", own.describe)
    data.x_test[2, 1] = float("nan")
    refuses(r"nan or infinite in row 2 \(from 0\)", bp.predict, own, data.x_test)


def test_checks_take_a_model_in_pyro_or_say_why_not():
    data = bp.load_data("diabetes", features=["bmi", "bp"])
    for method in (bp.NUTS, bp.SVI, bp.MAP):
        assert bp.checks.run(Linear(), data, method(), "estimator")["estimator"].level == "good"
    subject = Subject(Linear(), bp.NUTS, data)
    refuses("Linear has no settings 'prior' and 'hidden'", CHECKS["closed-form"]().run, subject)

    def wrapped(model):
        eye = torch.eye(2)  # float32, whatever the model is
        return setattr(model, "forward", lambda x, y=None: LaplaceWeights.forward(model, x @ eye, y)) or model

    words = "does not compute in float64: make its constants like x"
    refuses(words, bp.checks.run, Linear(wrapped), data, "nuts", "estimator")


class Scaled(LaplaceWeights):
    def forward(self, x, y=None):
        self.initial.setdefault("scale", torch.ones(1))
        scale = pyro.sample("scale", dist.HalfCauchy(x.new_ones(1)).to_event(1))
        w = pyro.sample("w", dist.Laplace(x.new_zeros(2, 1), scale[..., None]).to_event(2))
        return self.likelihood(x @ w, y)


def test_a_guide_or_a_point_of_a_scale_below_0_is_refused():
    data = bp.load_data("diabetes", features=["bmi", "bp"])

    def wrapped(model):
        model.__class__ = Scaled
        model.initial["scale"] = torch.ones(1)
        return model

    for method in (bp.SVI(epochs=1), bp.MAP(epochs=1)):
        words = "'scale' of the model does not take every number, .* such as its logarithm, or take a sampler"
        refuses(words, bp.fit, Linear(wrapped), data, method, progress=False)
    spiky = dist.Categorical(torch.ones(2, 1, 2)), dist.Normal(0.0, torch.tensor([0.1, 1.0]).expand(2, 1, 2))

    def mixed(model):
        def forward(x, y=None):
            return model.likelihood(x @ pyro.sample("w", dist.MixtureSameFamily(*spiky).to_event(2)), y)

        return setattr(model, "forward", forward) or model

    for method in (bp.SVI(epochs=2), bp.MAP(epochs=2), bp.NUTS(chains=1, warmup=5, draws=4)):
        assert bp.fit(Linear(mixed), data, method, seed=0, progress=False).num_weights == 3
    draws = bp.fit(Linear(wrapped), data, bp.NUTS(chains=2, warmup=20, draws=10, cores=1), seed=0, progress=False)
    assert (draws.chains["scale"] > 0).all()
