"""Gradient boosting beside a run: scikit-learn's own numbers, an honest noise, and its place in a run folder."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conjugate import dataset
from run_folders import MEAN_FIELD, SMALL, small_table
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import KFold, cross_val_predict

import bnn_pyro as bp
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.run import main
from bnn_pyro.runs.baselines import boosted


def rows(num, new=400, seed=0):
    """Inputs (num + new, 3), a smooth function of them, and standard Normal noise."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num + new, 3, generator=g)
    return x, x[:, 0] + x[:, 1].abs(), torch.randn(num + new, generator=g)


def table(x, y, num, **schema):
    return dataset(x[:num], y[:num], Schema(**{"task": "regression", "input_shape": (3,), **schema}), x[num:], y[num:])


def test_a_number_has_scikit_learns_prediction_and_its_cross_validated_error():
    x, f, noise = rows(150)
    prediction, about = boosted(table(x, 5 + f + 0.5 * noise, 150))
    model = HistGradientBoostingRegressor(min_samples_leaf=7, random_state=0)
    own, y = x[:150].double().numpy(), (5 + f + 0.5 * noise)[:150].double().numpy()
    assert np.allclose(prediction.mean, model.fit(own, y).predict(x[150:].double().numpy()), rtol=1e-5)
    left_out = cross_val_predict(model, own, y, cv=KFold(5, shuffle=True, random_state=0))
    assert prediction.scales[0, 0].item() == pytest.approx(np.sqrt(np.mean((y - left_out) ** 2)), rel=1e-5)
    assert "150 training rows, 100 iterations" in about["about"] and "error on training rows left out" in about["about"]


def test_its_intervals_hold_and_no_test_target_was_seen():
    x, f, noise = rows(2500, new=1000)
    data = table(x, f + noise, 2500)
    prediction, _ = boosted(data)
    covered = bp.metrics.coverage_90(prediction, data.y_test)
    assert abs(covered - 0.9) < 4 * (0.09 / 1000) ** 0.5 + 0.02  # 0.02: the function is fitted with an error too
    again, _ = boosted(replace(data, y_test=data.y_test.flip(0) + 100))
    assert torch.equal(again.mean, prediction.mean) and torch.equal(again.scales, prediction.scales)


def test_on_a_log_scale_it_is_the_logarithm_that_is_modelled():
    x, f, noise = rows(150)
    plain, _ = boosted(table(x, f + 0.5 * noise, 150))
    scaled, about = boosted(table(x, (f + 0.5 * noise).exp(), 150, target_scale="log"))
    assert torch.allclose(scaled.untransformed.mean, plain.mean, atol=1e-4) and "log y" in about["about"]
    counts, _ = boosted(
        table(x, torch.poisson(f.clamp(-1, 2).exp(), torch.Generator().manual_seed(1)), 150, task="counts")
    )
    assert counts.is_discrete and counts.mean.min() > 0


def test_classes_have_scikit_learns_probabilities_and_a_missing_one_is_not_impossible():
    x, f, noise = rows(300)
    y = torch.bucketize(f + noise, torch.tensor([0.0, 1.5]))
    data = table(x, y, 300, task="classification", classes=("a", "b", "c", "never"))
    prediction, _ = boosted(data)
    model = HistGradientBoostingClassifier(min_samples_leaf=15, random_state=0)
    own = model.fit(x[:300].double().numpy(), y[:300].numpy()).predict_proba(x[300:].double().numpy())
    assert np.allclose(prediction.mean[:, :3], own, atol=1e-5)
    assert (prediction.log_prob(torch.full((400,), 3)) > -20).all()


def test_what_has_no_trees():
    image = dataset(
        torch.zeros(30, 1, 2, 2), torch.arange(30) % 2, Schema("classification", (1, 2, 2), classes=("0", "1"))
    )
    x, f, _ = rows(30)
    assert boosted(image) is None and boosted(table(x, f, 19)) is None and boosted(table(x, 0 * f, 30)) is None


def test_a_run_says_how_it_compares_with_it(tmp_path, quick, capsys):
    file = small_table(tmp_path / "houses.csv", rows=90)
    train = [*MEAN_FIELD, "--data", str(file), "--target", "price", *SMALL]
    assert main([*train, "--baseline", "boosting", "--out", str(tmp_path / "a")]) == 0
    assert (
        "beside gradient boosting, paired differences: rmse" in capsys.readouterr().out
        and not (tmp_path / "a" / "baseline").exists()
    )
    found, own = (json.loads((tmp_path / "a" / name).read_text()) for name in ("boosting.json", "metrics.json"))
    assert found["differences"]["nll"] == pytest.approx(own["nll"] - found["metrics"]["nll"], abs=1e-5)
    assert "gradient boosting" in (tmp_path / "a" / "report.html").read_text()
    assert main([*train, "--no-baseline", "--out", str(tmp_path / "b")]) == 0
    assert not (tmp_path / "b" / "boosting.json").exists()
    old = json.loads((tmp_path / "a" / "config.json").read_text())
    del old["boosting"]  # a run of an earlier version, which had none
    (tmp_path / "a" / "config.json").write_text(json.dumps(old))
    assert main(["evaluate", str(tmp_path / "a")]) == 0 and not (tmp_path / "a" / "boosting.json").exists()
