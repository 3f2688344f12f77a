"""A Bayesian last layer on its backbone: the same network, the same split, and every command."""

import importlib
import json
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from monte_carlo import stop_at
from refused import refuses
from run_folders import same

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.rows import row_digests
from bnn_pyro.features import on_features
from bnn_pyro.run import main
from bnn_pyro.zoo.auto import Setup

QUICK = bp.MAP(epochs=3, batch_size=20, lr=0.01)
SVI = bp.SVI(epochs=3, batch_size=20, lr=0.01)
CONV = bp.ConvNet(channels=(3,), hidden=(6,), dropout=0.5)


def fit(entry, data, method=QUICK, **settings):
    return bp.fit(entry, data, method, **{"seed": 2, "progress": False, "device": "cpu", **settings})


digits = partial(bp.load_data, "digits", limit=60)


def small_defaults(patch, variant, settings, method):
    """A backbone's defaults that are trained in a moment."""
    own = Setup(bp.ZOO[variant](**settings), bp.MAP(**method))
    for place in ("fitting", "runs.recipe"):
        make = importlib.import_module(f"bnn_pyro.{place}").make_setup

        def other(name, *how, make=make):
            return own if name == variant and not how else make(name, *how)

        patch.setattr(f"bnn_pyro.{place}.make_setup", other)


BACKBONES = {
    "convnet": (CONV, dict(name_or_path="digits", limit=60)),
    "two classes": (bp.MLP(hidden=(9, 4), activation="tanh"), dict(name_or_path="breast-cancer", limit=60)),
    "without a bias": (bp.MLP(hidden=(9,), bias=False), dict(name_or_path="digits", limit=60)),
    "regression": (bp.MLP(hidden=(9,), noise=40.0), dict(name_or_path="diabetes", limit=60)),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_predictions_at_the_start_are_the_networks_own(name):
    entry, source = BACKBONES[name]
    data = bp.load_data(**source)
    below = fit(entry, data)
    with bp.isolated(0):
        settings = {"noise": 40.0} if name == "regression" else {}
        model = bp.LastLayer(backbone=below, **settings).model(data.schema)
        on_features(model, data)
        pretrained = replace(bp.LastLayer(backbone=below).backbone, schema=None)  # which does not say its units
        initial = bp.LastLayer(backbone=pretrained).model(data.schema).initial
        assert not torch.equal(initial["layers.0.weight"], pretrained.head[0])
    assert model.backbone.scale != 1
    chains = {site: v.clone()[None, None] for site, v in model.initial.items()}
    found, own = (bp.predict(p, data.x_test) for p in (bp.Posterior(model, data.schema, chains=chains), below))
    torch.testing.assert_close(found.log_prob(data.y_test), own.log_prob(data.y_test), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.mean, own.mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("entry", "method", "what"), [
    (bp.MeanField(hidden=(4,)), SVI, "mean-field by svi"),
    (bp.MLP(hidden=(4,)), bp.Ensemble(members=2, epochs=1), "mlp by ensemble"),
    (bp.LastLayer(backbone="mlp"), QUICK, "last-layer by map"),
])  # fmt: skip
def test_what_is_no_point_estimate_of_a_network_with_features_is_refused(entry, method, what, monkeypatch):
    small_defaults(monkeypatch, "mlp", {"hidden": (7,)}, {"epochs": 2, "batch_size": 30})
    posterior = fit(entry, digits(), method)
    refuses(f"point estimate of convnet or mlp; this posterior is of {what}", bp.LastLayer, backbone=posterior)


def test_a_backbone_of_another_split_is_refused(tmp_path):
    below = fit(CONV, digits(seed=1), out=tmp_path)
    for backbone in (str(tmp_path), below):
        words = r"another split of digits .*'seed': 1.* here .*'seed': 0"
        refuses(words, fit, bp.LastLayer(backbone=backbone), digits())
    fit(bp.LastLayer(backbone=str(tmp_path)), digits(seed=1, limit=30))  # fewer rows of the same split
    fit(bp.LastLayer(backbone=below), replace(digits(), name="others"))


def test_rows_that_stopped_the_backbone_calibrate_no_last_layer():
    data = digits()
    for patience, stopped in ((0, False), (2, True)):
        below = fit(bp.MLP(hidden=(9,)), data, replace(QUICK, patience=patience))
        posterior = fit(bp.LastLayer(backbone=below), data, SVI)
        assert bool(torch.isin(row_digests(data.x_val, data.y_val), posterior.rows).all()) == stopped
        assert len(posterior.rows) == len(data.x_train) + stopped * len(data.x_val)


def test_the_backbone_gets_its_own_standardisation():
    """A limit changes the statistics of the training rows; the network must see what it was trained on."""
    whole, few = (bp.load_data("breast-cancer", limit=limit) for limit in (200, 30))
    assert whole.schema.x_shift != few.schema.x_shift
    below = fit(bp.MLP(hidden=(9,)), whole)
    with bp.isolated(0):
        backbone = bp.LastLayer(backbone=below).model(few.schema).backbone
    own = below.model.net
    own.load_state_dict({site: value[0, 0] for site, value in below.chains.items()})
    torch.testing.assert_close(backbone(few.x_test), own.features(whole.x_test), rtol=1e-4, atol=1e-4)


TRAIN = ["train", "last-layer", "--data", "digits", "--limit", "60", "--epochs", "2", "--batch-size", "30"]
SMALL = ["--num-draws", "4", "--device", "cpu", "--quiet"]


@pytest.fixture(scope="module", autouse=True)
def small_convnet(quick):
    with pytest.MonkeyPatch.context() as patch:
        method = {"epochs": 2, "batch_size": 30, "patience": 2}
        small_defaults(patch, "convnet", {"channels": (2,), "hidden": (5,)}, method)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    assert main([*TRAIN, *SMALL, "--out", str(folder)]) == 0
    return folder


def test_train_writes_the_backbone_as_the_baseline_and_a_config_that_reproduces_both(run, tmp_path, command):
    below, above = bp.load(run / "baseline"), bp.load(run)
    assert (below.provenance["entry"], above.provenance["entry"]) == ("convnet", "last-layer")
    assert below.trace["validation_nll"]
    net = above.model.backbone.net
    assert all(torch.equal(v, below.chains[site.removeprefix("net.")][0, 0]) for site, v in net.named_parameters())
    again = tmp_path / "again"
    command("train", "--config", run / "config.json", "--out", again)
    assert same(run, again) and same(run / "baseline", again / "baseline")
    for name in ("metrics.json", "config.json"):
        assert (run / name).read_bytes() == (again / name).read_bytes()
    assert "last-layer" in (run / "README.md").read_text() and "convnet" in (run / "report.html").read_text()


@pytest.mark.parametrize("stop", [2, 4])
def test_resume_goes_on_in_either_part(run, tmp_path, monkeypatch, command, stop):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "due", stop_at(stop, signal.SIGTERM))
        said = command(*TRAIN, *SMALL, "--out", out, code=130)
    assert f"train --resume --out {out}" in said and not (out / "posterior.pt").exists()
    command("train", "--resume", "--out", out)
    assert same(out, run) and same(out / "baseline", run / "baseline")


def test_the_folder_of_a_run_is_a_backbone(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run)
    out = tmp_path / "on"
    assert main([*TRAIN, *SMALL, "--set", "backbone=baseline", "--out", str(out)]) == 0
    assert same(out, run)  # the very network that it was trained on
    assert json.loads((out / "config.json").read_text())["variant_settings"]["backbone"] == str(run / "baseline")
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(out), "--quiet"]) == 0


def test_the_noise_is_the_error_on_the_rows_that_stopped_the_backbone(tmp_path):
    """Features of 40 columns leave 60 rows no error, and a noise learned of them would be next to nothing."""
    with bp.isolated(0):
        x = torch.randn(1060, 40)
        y = x[:, 0] + torch.randn(1060)
    data = bp.dataset(x[:60], y[:60], x_test=x[60:], y_test=y[60:])
    below = fit("mlp", data, bp.MAP())
    spread = below.draw(1, seed=0)["log_noise"].exp().item() * data.schema.y_scale
    held_out, learned = fit(bp.LastLayer(backbone=below), data, bp.Laplace()), bp.LastLayer(backbone=below)
    del learned.backbone.description["held_out_error"]  # as of an earlier version
    for posterior in (held_out, fit(learned, data, bp.Laplace())):
        posterior.save(tmp_path)
        likelihood, again = posterior.model.head.likelihood, bp.load(tmp_path)
        assert torch.equal(bp.predict(again, data.x_test).mean, bp.predict(posterior, data.x_test).mean)
        share = bp.metrics.evaluate(bp.predict(posterior, data.x_test), data.y_test).flat()["coverage_90"]
        assert (likelihood.noise == pytest.approx(spread, rel=1e-6) and share > 0.8) == (posterior is held_out)
    assert likelihood.initial and share < 0.7
