"""A method of one's own, defined here and put into METHODS, works in every command with no other file touched."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.inference import methods_for
from bnn_pyro.run import main
from bnn_pyro.settings import Settings, setting


@dataclass(frozen=True)
class Jitter(Settings):
    """Settings of a point estimate with Normal noise around it, which is right about nothing but its centre."""

    converges_to: ClassVar[str] = "point"
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    tiny: ClassVar[Mapping[str, Any]] = {"epochs": 50, "draws": 4}

    epochs: int = setting(20, low=1)
    draws: int = setting(8, low=1)

    def run(self, model, guide, data, *, seed=0, checkpoint=None, report=None):
        """See ``Method.run``."""
        point = bp.MAP(epochs=self.epochs).run(model, guide, data, seed=seed, checkpoint=checkpoint, report=report)
        chains = {site: value.repeat(1, self.draws, *(1,) * (value.dim() - 2)) for site, value in point.chains.items()}
        noisy = {site: value + 0.01 * torch.randn_like(value) for site, value in chains.items()}
        return bp.Posterior(model, data.schema, chains=noisy, trace=point.trace)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(bp.METHODS, "jitter", Jitter)


def test_every_command(tmp_path, capsys, monkeypatch):
    run, other, out = (str(tmp_path / name) for name in ("run", "other", "check"))
    assert "jitter" in methods_for(bp.MeanField) and "jitter" not in methods_for(bp.HiddenLayerNet)
    train = ["train", "mean-field", "--inference", "jitter", "--data", "toy-curve", "--quiet"]
    assert main([*train, "--set", "draws=0"]) == 2 and "draws must be at least 1" in capsys.readouterr().err
    assert main([*train, "--out", run]) == 0
    assert json.loads((tmp_path / "run/config.json").read_text())["inference"] == "jitter"
    assert bp.load(run).draw(8)["layers.0.weight"].shape[0] == 8
    assert list((tmp_path / "run/figures").glob("*.png")) and "jitter" in (tmp_path / "run/report.html").read_text()
    monkeypatch.setattr("bnn_pyro.runs.evaluate.draw_all", lambda scene, folder: [])  # drawn once is enough
    assert main([*train, "--no-baseline", "--seed", "1", "--out", other]) == 0
    for command in (["evaluate", run], ["diagnose", run, "--no-netcdf"], ["compare", run, other]):
        assert main([*command, "--quiet"]) == 0, command
    checks = ["--only", "closed-form", "--only", "predictive", "--out", out]
    assert main(["check", "mean-field", "--inference", "jitter", "--quiet", *checks]) in (0, 1)
    outcomes = json.loads((tmp_path / "check/check.json").read_text())["subjects"][0]["outcomes"]
    assert len(outcomes) == 2 and all("Error" not in json.dumps(outcome) for outcome in outcomes)


def test_what_it_needs_is_said(tmp_path, capsys):
    out = str(tmp_path / "x")
    assert main(["train", "hidden-layer", "--inference", "jitter", "--data", "toy-curve", "--out", out]) == 2
    assert "jitter needs a model p(y, w | x)" in capsys.readouterr().err
