"""A variant of one's own around a module with buffers, batch statistics: kept with the posterior, and on resuming."""

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


@dataclass(frozen=True)
class Own:
    """A variant around any module."""

    normalised: bool = True

    summary: ClassVar[str] = "a network of one's own"
    paper: ClassVar[str] = "none"
    has: ClassVar[frozenset] = frozenset({"guide", "weights", "proper prior", "deterministic"})
    fits: ClassVar[dict] = {}

    def model(self, schema):
        likelihood = make_likelihood(schema)
        norm = nn.BatchNorm1d(5) if self.normalised else nn.Identity()
        net = nn.Sequential(nn.Linear(3, 5), norm, nn.Tanh(), nn.Linear(5, likelihood.outputs))
        return BayesianNet(net, likelihood, "normal:1")

    def guide(self, model):
        return MeanFieldNormal(model.initial, 0.05)


METHODS = {"svi": bp.SVI(epochs=5, batch_size=10), "sghmc": bp.SGHMC(epochs=6, batch_size=10, chains=2, lr=1e-3)}


def rows():
    g = torch.Generator().manual_seed(0)
    x = 2 + torch.randn(60, 3, generator=g)
    y, schema = (x[:, 0] > 2).long() + (x[:, 1] > 3).long(), bp.Schema("classification", (3,), tuple("abc"))
    return bp.Dataset("by-hand", schema, x[:40], y[:40], x[40:50], y[40:50], x[50:], y[50:])


def fit(entry, method, out=None, **settings):
    return bp.fit(entry, rows(), method, seed=1, out=out, progress=False, device="cpu", **settings)


@pytest.mark.parametrize("method", ["svi", "sghmc"])
def test_batch_statistics_are_kept_with_the_posterior(tmp_path, method):
    data = rows()
    posterior = fit(Own(), METHODS[method], tmp_path)
    mean = posterior.model.net[1].running_mean
    assert (method == "sghmc") == bool((mean == 0).all())  # samplers run out of training mode
    before, after = (bp.predict(p, data.x_test, num_draws=4) for p in (posterior, bp.load(tmp_path, Own())))
    assert torch.equal(before.components.logits, after.components.logits)


def test_an_archive_without_buffers_is_read_and_others_are_refused(tmp_path):
    fit(Own(), bp.SVI(epochs=2), tmp_path)
    tensors, _ = read_archive(tmp_path)
    torch.save({**tensors, "buffers": {"net.1.mean": torch.zeros(5)}}, tmp_path / "posterior.pt")
    reseal(tmp_path)
    with pytest.raises(bp.UserError, match="does not fit its own settings"):
        bp.load(tmp_path, Own())
    del tensors["buffers"]
    torch.save(tensors, tmp_path / "posterior.pt")
    reseal(tmp_path)
    assert (bp.load(tmp_path, Own()).model.net[1].running_mean == 0).all()
    fit(Own(normalised=False), bp.SVI(epochs=2), tmp_path / "plain")
    assert "buffers" not in read_archive(tmp_path / "plain")[0]
    with pytest.raises(bp.UserError, match="layer or group normalisation instead of batch"):
        fit(Own(), bp.Ensemble(members=2, epochs=3))


def test_an_interrupted_fit_goes_on_with_its_batch_statistics(tmp_path, monkeypatch):
    method = bp.MAP(epochs=8, batch_size=10, patience=3)
    whole = fit(Own(), method)
    with monkeypatch.context() as patch:
        steps = iter(range(100))

        def due(checkpoint):
            checkpoint.signalled = next(steps) == 9
            return checkpoint.stop

        patch.setattr(Checkpoint, "due", property(due))
        with pytest.raises(Interrupted):
            fit(Own(), method, tmp_path)
    resumed = fit(Own(), method, tmp_path, resume=True)
    here, there = resumed.model.net.state_dict(), whole.model.net.state_dict()
    assert all(torch.equal(here[name], there[name]) for name in here)
