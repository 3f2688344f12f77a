"""The network at the mean weights: the mean of q, one draw, and metrics of its own that overwrite nothing."""

import json
import shutil

import pytest
import torch
from conjugate import correlated
from pyro.infer.autoguide import AutoNormal
from run_folders import SMALL, small_table

import bnn_pyro as bp
from bnn_pyro.inference import methods_for
from bnn_pyro.isolation import isolated
from bnn_pyro.run import main
from bnn_pyro.runs.baselines import against_mean_weights
from bnn_pyro.runs.folder import RunFolder

PROBLEM = correlated(num=30)


def fit(entry, method, **settings):
    return bp.fit(entry, PROBLEM.data, method, progress=False, device="cpu", **settings)


@pytest.mark.parametrize("name", ["mean-field", "dropout-mlp"])
def test_it_is_the_mean_of_the_draws(name, tmp_path):
    entry, method = bp.ZOO[name](hidden=(4,)), bp.METHODS[methods_for(bp.ZOO[name])[0]](epochs=5)
    posterior = fit(entry, method)
    mean, draws = posterior.at_mean_weights(), posterior.draw(20_000, seed=0)
    assert mean.chains.keys() == draws.keys()
    for site, value in draws.items():
        assert mean.chains[site].shape == (1, 1, *value.shape[1:])
        bound = 5 * value.std(0) / 20_000**0.5 + 1e-6
        assert ((value.mean(0) - mean.chains[site][0, 0]).abs() < bound).all()
    prediction = bp.predict(mean, PROBLEM.data.x_train, num_draws=50)
    assert prediction.num_draws == 1 and (prediction.epistemic == 0).all()
    mean.save(tmp_path)
    assert torch.equal(bp.predict(bp.load(tmp_path), PROBLEM.data.x_train).locs, prediction.locs)
    with pytest.raises(bp.UserError, match="other settings"):  # it is not what fit would have returned
        fit(entry, method, out=tmp_path, resume=True)


def test_what_has_no_mean_weights():
    with isolated(0):
        model = bp.MeanField(hidden=(4,)).model(PROBLEM.schema)
        guide = AutoNormal(model)  # draws "w_unconstrained", and w is a point at its value
        guide(PROBLEM.data.x_train)
        with pytest.raises(bp.UserError, match="AutoNormal has no mean of every weight"):
            bp.Posterior(model, PROBLEM.schema, guide=guide).at_mean_weights()


def test_command(runs, tmp_path, capsys, no_figures):
    run = tmp_path / "run"
    shutil.copytree(runs / "digits", run)
    before = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    assert main(["evaluate", str(run), "--mean-weights", "--quiet"]) == 0
    assert "metrics-mean-weights.json" in capsys.readouterr().out
    found = json.loads((run / "metrics-mean-weights.json").read_text())
    digits = bp.load_data("digits", limit=150)
    exact = bp.metrics.nll(bp.predict(bp.load(run).at_mean_weights(), digits.x_test), digits.y_test)
    assert found["nll"] == pytest.approx(exact, abs=1e-6) != json.loads(before["metrics.json"])["nll"]
    # Other rows get a file of their own as well.
    assert main(["evaluate", str(run), "--mean-weights", "--data", "digits", "--quiet"]) == 0
    assert (run / "metrics-digits-mean-weights.json").is_file() and not (run / "metrics-digits.json").exists()
    assert {name: (run / name).read_bytes() for name in before} == before
    # A run that replaces this one leaves nothing of it.
    again = ["train", "mlp", "--data", "digits", "--limit", "150", "--no-baseline", "--out", str(run), "--overwrite"]
    assert main([*again, *SMALL]) == 0 and not (run / "metrics-mean-weights.json").exists()
    assert main(["evaluate", str(run), "--mean-weights", "--quiet"]) == 2
    assert "stored draws have no mean weights" in capsys.readouterr().err


def test_a_report_says_where_the_mean_weights_predict_better_than_the_draws(tmp_path):
    table, run = small_table(tmp_path / "houses.csv"), tmp_path / "run"
    words = ["train", "mean-field", "--data", str(table), "--target", "price", "--out", str(run), *SMALL]
    assert main([*words, "--epochs", "200", "--lr", "0.02", "--no-baseline"]) == 0
    posterior, data = bp.load(run), bp.load_data(str(table), target="price")
    scores = against_mean_weights(posterior, bp.predict(posterior, data.x_test), data)
    assert scores["nll_over_mean_weights_low"] < 0.01 and "mean weights" not in (run / "report.html").read_text()
    with torch.no_grad():  # a q as wide as the prior, at the same means
        for name, value in posterior.guide.named_parameters():
            value.copy_(torch.full_like(value, 0.5) if "rho" in name or "scale" in name else value)
    wide = against_mean_weights(posterior, bp.predict(posterior, data.x_test), data)
    assert wide["nll_over_mean_weights_low"] > 0.01 and 0 < wide["signal_to_noise"] < scores["signal_to_noise"]
    assert 0 < wide["kl_share"] < 1 and not against_mean_weights(posterior.at_mean_weights(), None, data)
    metrics = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps({**metrics, **wide}))
    (worry,) = RunFolder(run).facts().worries
    assert worry["level"] == "caution" and "q is too wide" in worry["sentence"]
