"""A network that knows nothing of this package, as a variant of one's own: fit, save, load, metrics, diagnosis."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from run_folders import reseal
from torch import nn

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.posterior import read_archive


def plain(outputs):
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))


def normalised(outputs):
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, outputs))


class Branching(nn.Module):
    """Looks at values, which vmap cannot."""

    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Linear(3, outputs)

    def forward(self, x):
        f = self.layer(x)
        return f if f.sum() > 0 else 2 * f


NETS = {"plain": plain, "normalised": normalised, "branching": Branching}


@dataclass(frozen=True)
class Own:
    """A variant around any module."""

    net: str = "plain"

    summary: ClassVar[str] = "a network of one's own"
    paper: ClassVar[str] = "none"
    has: ClassVar[frozenset] = frozenset({"guide", "weights", "proper prior", "deterministic"})
    fits: ClassVar[dict] = {}

    def model(self, schema):
        likelihood = make_likelihood(schema)
        return BayesianNet(NETS[self.net](likelihood.outputs), likelihood, "normal:1")

    def guide(self, model):
        return MeanFieldNormal(model.initial, 0.05)


METHODS = {
    "svi": bp.SVI(epochs=5, batch_size=10),
    "map": bp.MAP(epochs=5),
    "ensemble": bp.Ensemble(members=2, epochs=3),
    "sghmc": bp.SGHMC(epochs=6, batch_size=10, chains=2, lr=1e-3),
    "nuts": bp.NUTS(draws=4, warmup=4, chains=2),
    "chees": bp.ChEES(draws=4, warmup=4, chains=4, superchains=2),
}


def rows(task="classification"):
    g = torch.Generator().manual_seed(0)
    x = 2 + torch.randn(60, 3, generator=g)
    labels = task == "classification"
    y = (x[:, 0] > 2).long() + (x[:, 1] > 3).long() if labels else x.sum(1)
    schema = bp.Schema(task, (3,), tuple("abc") if labels else ())
    return bp.Dataset("by-hand", schema, x[:40], y[:40], x[40:50], y[40:50], x[50:], y[50:])


def fit(entry, method, out=None, data=None, **settings):
    return bp.fit(entry, data or rows(), method, seed=1, out=out, progress=False, device="cpu", **settings)


@pytest.mark.filterwarnings("ignore:the gradient was not compiled")
@pytest.mark.parametrize(("method", "task"), list(zip(METHODS, ["classification", "regression"] * 3, strict=True)))
def test_it_goes_all_the_way(tmp_path, method, task):
    data = rows(task)
    posterior = fit(Own(), METHODS[method], tmp_path, data)
    before, after = (bp.predict(p, data.x_test, num_draws=4) for p in (posterior, bp.load(tmp_path, Own())))
    assert torch.equal(before.log_prob(data.y_test), after.log_prob(data.y_test))
    assert torch.isfinite(before.log_prob(data.y_test)).all()
    scores = bp.metrics.evaluate(before, data.y_test, bootstrap=20).flat()
    assert math.isfinite(scores["nll"])
    assert bp.diagnostics.diagnose(posterior, data).verdicts


@pytest.mark.filterwarnings("ignore:Branching runs one draw after the other")
def test_draws_are_mapped_as_one_network_after_the_other():
    data = rows()
    for name in NETS:
        posterior = fit(Own(name), bp.SVI(epochs=2))
        draws, model = posterior.draw(6, seed=3), posterior.model.eval()
        found = bp.predict(posterior, data.x_test, num_draws=6, seed=3).components.logits
        for s in range(6):
            one = torch.func.functional_call(model.net, {k: v[s] for k, v in draws.items()}, (data.x_test,))
            torch.testing.assert_close(found[s], one.log_softmax(-1).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["svi", "sghmc"])
def test_batch_statistics_are_kept_with_the_posterior(tmp_path, method):
    data = rows()
    posterior = fit(Own("normalised"), METHODS[method], tmp_path)
    mean = posterior.model.net[1].running_mean
    assert (method == "sghmc") == bool((mean == 0).all())  # samplers run out of training mode
    before, after = (bp.predict(p, data.x_test, num_draws=4) for p in (posterior, bp.load(tmp_path, Own("normalised"))))
    assert torch.equal(before.components.logits, after.components.logits)


def test_an_archive_without_buffers_is_read_and_others_are_refused(tmp_path):
    fit(Own("normalised"), bp.SVI(epochs=2), tmp_path)
    tensors, _ = read_archive(tmp_path)
    torch.save({**tensors, "buffers": {"net.1.mean": torch.zeros(5)}}, tmp_path / "posterior.pt")
    reseal(tmp_path)
    with pytest.raises(bp.UserError, match="does not fit its own settings"):
        bp.load(tmp_path, Own("normalised"))
    del tensors["buffers"]
    torch.save(tensors, tmp_path / "posterior.pt")
    reseal(tmp_path)
    assert (bp.load(tmp_path, Own("normalised")).model.net[1].running_mean == 0).all()
    fit(Own(), bp.SVI(epochs=2), tmp_path / "plain")
    assert "buffers" not in read_archive(tmp_path / "plain")[0]
    with pytest.raises(bp.UserError, match="layer or group normalisation instead of batch"):
        fit(Own("normalised"), METHODS["ensemble"])


def test_an_interrupted_fit_goes_on_with_its_batch_statistics(tmp_path, monkeypatch):
    method = bp.MAP(epochs=8, batch_size=10, patience=3)
    whole = fit(Own("normalised"), method)
    with monkeypatch.context() as patch:
        steps = iter(range(100))

        def due(checkpoint):
            checkpoint.signalled = next(steps) == 9
            return checkpoint.stop

        patch.setattr(Checkpoint, "due", property(due))
        with pytest.raises(Interrupted):
            fit(Own("normalised"), method, tmp_path)
    resumed = fit(Own("normalised"), method, tmp_path, resume=True)
    here, there = resumed.model.net.state_dict(), whole.model.net.state_dict()
    assert all(torch.equal(here[name], there[name]) for name in here)
