"""A Bayesian last layer on its backbone: the same network, the same split, and every command."""

import importlib
import json
import signal
from dataclasses import replace

import pytest
import torch
from run_folders import same, snapshot

import bnn_pyro as bp
from bnn_pyro.datasets.rows import row_digests
from bnn_pyro.features import on_features
from bnn_pyro.inference import optimise
from bnn_pyro.isolation import isolated
from bnn_pyro.run import main
from bnn_pyro.zoo.auto import Setup

QUICK = bp.MAP(epochs=3, batch_size=20, lr=0.01)
SVI = bp.SVI(epochs=3, batch_size=20, lr=0.01)
CONV = bp.ConvNet(channels=(3,), hidden=(6,), dropout=0.5)


def fit(entry, data, method=QUICK, **settings):
    return bp.fit(entry, data, method, **{"seed": 2, "progress": False, "device": "cpu", **settings})


def digits(**settings):
    return bp.load_data("digits", **{"limit": 60, **settings})


def at_the_start(posterior, data, **settings):
    """The posterior that has all its mass where inference would start."""
    with isolated(0):
        model = bp.LastLayer(backbone=posterior, **settings).model(data.schema)
        on_features(model, data)
    return bp.Posterior(model, data.schema, chains={site: v.clone()[None, None] for site, v in model.initial.items()})


# -- it starts as the network that is its backbone ------------------------------------------------------------------
BACKBONES = {
    "convnet": (CONV, dict(name_or_path="digits", limit=60)),
    "two classes": (bp.MLP(hidden=(9, 4), activation="tanh"), dict(name_or_path="breast-cancer", limit=60)),
    "without a bias": (bp.MLP(hidden=(9,), bias=False), dict(name_or_path="digits", limit=60)),
    "regression": (bp.MLP(hidden=(9,), noise=40.0), dict(name_or_path="diabetes", limit=60)),
    "without hidden layers": (bp.MLP(hidden=()), dict(name_or_path="digits", limit=60)),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_predictions_at_the_start_are_the_networks_own(name):
    entry, source = BACKBONES[name]
    data = bp.load_data(**source)
    below = fit(entry, data)
    with isolated(0):  # a head without the schema that says its units is no start
        pretrained = replace(bp.LastLayer(backbone=below).backbone, schema=None)
        head = bp.LastLayer(backbone=pretrained).model(data.schema).initial["layers.0.weight"]
    assert not torch.equal(head, pretrained.head[0])
    start = at_the_start(below, data, **({"noise": 40.0} if name == "regression" else {}))
    assert start.model.backbone.scale != 1
    found, own = (bp.predict(p, data.x_test) for p in (start, below))
    torch.testing.assert_close(found.log_prob(data.y_test), own.log_prob(data.y_test), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.mean, own.mean, rtol=1e-4, atol=1e-4)


def test_a_head_for_targets_in_other_units_is_no_start():
    data = bp.load_data("diabetes", limit=60)
    below = fit(bp.MLP(hidden=(5,), noise=40.0), data)
    for schema, used in ((data.schema, True), (replace(data.schema, y_scale=9.0), False)):
        with isolated(0):
            start = bp.LastLayer(backbone=below).model(schema).initial["layers.0.weight"]
        assert torch.equal(start, below.chains["layers.1.weight"][0, 0]) == used
    entry = bp.LastLayer(backbone=below, noise="heteroscedastic", bias=False)  # another width of the output
    posterior = fit(entry, data)
    assert {site: v.shape for site, v in posterior.model.initial.items()} == {"layers.0.weight": (2, 5)}
    assert torch.isfinite(bp.predict(posterior, data.x_test).mean).all()


# -- what it can stand on ----------------------------------------------------------------------------------------
def test_what_is_no_point_estimate_of_a_network_with_features_is_refused():
    data = digits()
    others = {
        "mean-field by svi": fit(bp.MeanField(hidden=(4,)), data, SVI),
        "mlp by ensemble": fit(bp.MLP(hidden=(4,)), data, bp.Ensemble(members=2, epochs=1)),
        "last-layer by map": fit(bp.LastLayer(backbone=fit(CONV, data)), data),
    }
    for what, posterior in others.items():
        with pytest.raises(bp.UserError, match=f"point estimate of convnet or mlp; this posterior is of {what}"):
            bp.LastLayer(backbone=posterior)


def small_defaults(monkeypatch, variant, settings, method):
    """A backbone's defaults that are trained in a moment."""
    own = Setup(bp.ZOO[variant](**settings), bp.MAP(**method))
    for place in ("fitting", "runs.recipe"):
        make = importlib.import_module(f"bnn_pyro.{place}").make_setup

        def other(name, *how, make=make):
            return own if name == variant and not how else make(name, *how)

        monkeypatch.setattr(f"bnn_pyro.{place}.make_setup", other)


@pytest.mark.parametrize("name", ["auto", "mlp"])
def test_by_name_it_is_trained_first_at_its_defaults(tmp_path, monkeypatch, name):
    small_defaults(monkeypatch, "mlp", {"hidden": (7,)}, {"epochs": 2, "batch_size": 30})
    data = bp.load_data("breast-cancer", limit=60)
    posterior = fit(bp.LastLayer(backbone=name), data, SVI, out=tmp_path)
    below = bp.load(tmp_path / "baseline")
    assert below.provenance["entry"] == "mlp" and below.chains["layers.0.weight"].shape[2:] == (7, 30)
    assert posterior.model.initial["layers.0.weight"].shape == (1, 7)
    for site, value in posterior.model.backbone.net.named_parameters():
        assert torch.equal(value, below.chains[site.removeprefix("net.")][0, 0])
    alone = fit(bp.LastLayer(backbone=below), data, SVI)
    assert torch.equal(*(bp.predict(p, data.x_test, num_draws=3).probs for p in (posterior, alone)))


# -- the rows that it may have seen ------------------------------------------------------------------------------
def test_a_backbone_of_another_split_is_refused(tmp_path):
    below = fit(CONV, digits(seed=1), out=tmp_path)
    for backbone in (str(tmp_path), below):
        with pytest.raises(bp.UserError, match=r"another split of digits .*'seed': 1.* here .*'seed': 0"):
            fit(bp.LastLayer(backbone=backbone), digits())
    with pytest.raises(bp.UserError, match="another split of digits"):
        fit(bp.LastLayer(backbone=below), digits(seed=1, fractions=(0.6, 0.2, 0.2)))
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
    with isolated(0):
        backbone = bp.LastLayer(backbone=below).model(few.schema).backbone
    own = below.model.net
    own.load_state_dict({site: value[0, 0] for site, value in below.chains.items()})
    torch.testing.assert_close(backbone(few.x_test), own.features(whole.x_test), rtol=1e-4, atol=1e-4)


# -- the command line --------------------------------------------------------------------------------------------
TRAIN = ["train", "last-layer", "--data", "digits", "--limit", "60", "--epochs", "2", "--batch-size", "30"]
SMALL = ["--num-draws", "4", "--device", "cpu", "--quiet"]


@pytest.fixture(autouse=True)
def small_convnet(monkeypatch):
    """A network that is trained in a moment, and no figures, which take longer than all the rest."""
    method = {"epochs": 2, "batch_size": 30, "patience": 2}
    small_defaults(monkeypatch, "convnet", {"channels": (2,), "hidden": (5,)}, method)
    monkeypatch.setattr("bnn_pyro.runs.evaluate.draw_all", lambda scene, folder: [])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def run(runs):
    """A run folder, made once."""
    if not (runs / "first").exists():
        assert main([*TRAIN, *SMALL, "--out", str(runs / "first")]) == 0
    return runs / "first"


def test_train_writes_the_backbone_as_the_baseline_and_a_config_that_reproduces_both(run, tmp_path):
    below, above = bp.load(run / "baseline"), bp.load(run)
    assert (below.provenance["entry"], above.provenance["entry"]) == ("convnet", "last-layer")
    assert below.trace["validation_nll"]
    net = above.model.backbone.net
    assert all(torch.equal(v, below.chains[site.removeprefix("net.")][0, 0]) for site, v in net.named_parameters())
    found = json.loads((run / "metrics.json").read_text())
    data = digits()
    assert found["nll"] == pytest.approx(bp.metrics.nll(bp.predict(above, data.x_test, num_draws=4), data.y_test))
    nll = bp.metrics.nll(bp.predict(below, data.x_test), data.y_test)
    assert found["nll_minus_baseline"] == pytest.approx(found["nll"] - nll, abs=1e-5)
    assert main(["train", "--config", str(run / "config.json"), "--out", str(tmp_path / "again"), "--quiet"]) == 0
    assert same(run, tmp_path / "again") and same(run / "baseline", tmp_path / "again" / "baseline")
    assert (run / "metrics.json").read_bytes() == (tmp_path / "again" / "metrics.json").read_bytes()
    assert "last-layer" in (run / "README.md").read_text() and "convnet" in (run / "report.html").read_text()


@pytest.mark.parametrize("stop", [2, 4])
def test_resume_goes_on_in_either_part(run, tmp_path, monkeypatch, capsys, stop):
    check, calls = optimise.check_finite, []

    def check_and_stop(*args):
        calls.append(1)
        if len(calls) == stop:
            signal.raise_signal(signal.SIGTERM)
        check(*args)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(optimise, "check_finite", check_and_stop)
        assert main([*TRAIN, *SMALL, "--out", str(out)]) == 130
    assert f"train --resume --out {out}" in capsys.readouterr().err and not (out / "posterior.pt").exists()
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0
    assert same(out, run) and same(out / "baseline", run / "baseline")


def test_the_folder_of_a_run_is_a_backbone(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run)
    out = tmp_path / "on"
    assert main([*TRAIN, *SMALL, "--set", "backbone=baseline", "--out", str(out)]) == 0
    assert same(out, run)  # the very network that it was trained on
    assert json.loads((out / "config.json").read_text())["variant_settings"]["backbone"] == str(run / "baseline")
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(out), "--quiet"]) == 0


BAD = {
    "unknown text": (["--set", "backbone=convnt"], "is none of: auto, convnet, mlp"),
    "missing file": (["--set", "backbone=DIR/none.pt"], "no backbone file"),
    "no run": (["--set", "backbone=DIR/empty"], "no posterior.json"),
    "no point estimate": (["--set", "backbone=RUN"], "point estimate of convnet or mlp"),
    "another split": (["--set", "backbone=RUN/baseline", "--data-seed", "1"], "another split of digits"),
    "another shape": (["--set", "backbone=RUN/baseline", "--data", "breast-cancer"], "inputs of shape (2, 30)"),
    "images wanted": (["--set", "backbone=convnet", "--data", "breast-cancer"], "images"),
    "init_scale": (["--set", "init_scale=0"], "init_scale must be above 0"),
}


def test_bad_backbones_are_told_before_anything_is_written(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    before = snapshot(tmp_path), snapshot(run)
    for extra, words in BAD.values():
        argv = [a.replace("DIR", str(tmp_path)).replace("RUN", str(run)) for a in (*TRAIN, *SMALL, *extra)]
        assert main([*argv, "--out", str(tmp_path / "new")]) == 2
        told = capsys.readouterr()
        assert len(told.err.strip().splitlines()) == 1 and words in told.err and "Traceback" not in told.err
        assert (snapshot(tmp_path), snapshot(run)) == before and not (tmp_path / "new").exists()
