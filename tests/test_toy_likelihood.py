"""A likelihood that the package does not have, written here: every command takes it, and no other file knows it."""

import json
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import bnn_pyro as bp
from bnn_pyro.parts.likelihoods import Likelihood
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.nets import MLP
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.predictive import Prediction
from bnn_pyro.run import main
from bnn_pyro.zoo import ZOO, MeanField


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
class Counts(MeanField):
    hidden: tuple[int, ...] = field(default=(4,))
    summary: ClassVar[str] = "Counts by a Poisson regression"

    def model(self, schema):
        return BayesianNet(MLP(schema.input_shape, self.hidden, 1, "tanh", True), Poisson(), self.prior)


@pytest.mark.filterwarnings("ignore:the gradient was not compiled")
def test_every_command_takes_a_likelihood_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setitem(ZOO, "counts", Counts)
    x = np.random.default_rng(0).uniform(-1, 1, 90)
    table = pd.DataFrame({"x": x, "count": np.random.default_rng(1).poisson(np.exp(1 + x))})
    table.to_csv(tmp_path / "counts.csv", index=False)
    file, run, predictions = (str(tmp_path / name) for name in ("counts.csv", "run", "p.csv"))
    data = ["--data", file, "--target", "count", "--task", "regression"]
    svi = ["--inference", "svi", "--epochs", "150", "--lr", "0.05"]
    train = ["train", "counts", *data, *svi, "--num-draws", "20", "--device", "cpu", "--no-baseline"]
    for command in (
        [*train, "--quiet", "--out", run],
        ["diagnose", run, "--quiet"],
        ["predict", run, "--input", file, "--output", predictions, "--quiet"],
        ["check", "counts", *data, "--inference", "nuts", "--only", "estimator", "--quiet", "--out", f"{run}-check"],
    ):
        assert main(command) == 0, command
    assert set(np.mod(pd.read_csv(predictions)["q97.5"], 1)) == {0.0}
    scores = json.loads((tmp_path / "run/metrics.json").read_text())
    assert set(bp.metrics.METRICS["regression"]) <= set(scores)
    assert 0.5 < scores["coverage_95"] <= 1 and "coverage 95" in (tmp_path / "run/report.html").read_text()


def test_a_mixture_of_poissons_has_its_closed_forms():
    """Against sums over the counts, of probabilities by SciPy."""
    rates, k = torch.tensor([[1.5, 40.0], [3.0, 55.0]]), np.arange(400)
    prediction = Prediction(dist.Poisson(rates), PoissonMixture)
    pmf = stats.poisson.pmf(k[:, None, None], rates.numpy()).mean(1)  # (counts, points)
    cdf, y = pmf.cumsum(0), np.array([2.0, 44.0])
    mean = (pmf * k[:, None]).sum(0)
    assert prediction.task == "regression" and not prediction.has_classes
    np.testing.assert_allclose(prediction.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(prediction.total, (pmf * (k[:, None] - mean) ** 2).sum(0), rtol=1e-5)
    np.testing.assert_allclose(prediction.log_prob(torch.from_numpy(y)).exp(), pmf[y.astype(int), [0, 1]], rtol=1e-4)
    for level, found in zip((0.025, 0.5, 0.9), prediction.quantile((0.025, 0.5, 0.9)), strict=True):
        np.testing.assert_array_equal(found, (cdf < level).sum(0))
    crps = ((cdf - (y <= k[:, None])) ** 2).sum(0).mean()
    assert bp.metrics.crps(prediction, y) == pytest.approx(crps, rel=1e-9)
    pit = [cdf[1, 0] + pmf[2, 0] / 2, cdf[43, 1] + pmf[44, 1] / 2]
    np.testing.assert_allclose(bp.metrics.pit(prediction, y), pit, rtol=1e-5)
