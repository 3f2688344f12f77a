"""The estimators: scikit-learn's own checks, pickles, frames; the same as ``predict``. Its gradient boosting."""

import json
import math
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from conjugate import dataset
from refused import refuses
from run_folders import MEAN_FIELD, SMALL, small_table
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import KFold, cross_val_predict, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

import bnn_pyro as bp
from bnn_pyro.runs.baselines import boosted
from bnn_pyro.sklearn import BayesianClassifier, BayesianRegressor

QUICK = dict(hidden=(8,), epochs=50, lr=0.05, batch_size=0, num_draws=2, device="cpu")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2))
Y = 3 * X[:, 0] + 10 + 0.1 * RNG.normal(size=60)
LABELS = np.where(X[:, 0] + 0.3 * RNG.normal(size=60) > 0, "yes", "no")
FRAME = pd.DataFrame({"size": X[:, 0], "city": RNG.choice(["Oslo", "Rome"], 60), "flat": X[:, 1] > 0})


@parametrize_with_checks([BayesianRegressor("mlp", **QUICK), BayesianClassifier("mlp", **QUICK)])
def test_scikit_learns_own_checks(estimator, check):
    state = np.random.get_state()  # noqa: NPY002 (some checks move it)
    check(estimator)
    np.random.set_state(state)  # noqa: NPY002


def test_rows_without_a_label_are_dropped_where_that_is_said_and_dates_are_taken():
    labels, frame = LABELS.astype(object), FRAME.assign(sold=pd.date_range("2024-01-01", periods=60))
    labels[7] = None
    how = dict(**QUICK, missing="drop", dates="elapsed")
    parts = (np.arange(60) != 7, np.arange(60) >= 0)
    known, same = (BayesianClassifier("mlp", **how).fit(frame[rows], labels[rows]) for rows in parts)
    assert list(same.classes_) == ["no", "yes"] and "sold in days since 2024-01-01" in same.posterior_.schema.features
    np.testing.assert_array_equal(same.predict_proba(frame), known.predict_proba(frame))
    with pytest.raises(ValueError, match="NaN"):
        BayesianClassifier("mlp", **QUICK).fit(X, np.where(np.arange(60) == 7, np.nan, LABELS == "yes"))
    three, gaps = np.repeat(["a", "b", "c"], 20), X.astype(float)
    gaps[three == "b", 0] = np.nan  # which leaves no row of b
    two = BayesianClassifier("mlp", **how).fit(gaps, three)
    assert [*two.classes_] == ["a", "c"] == [*two.posterior_.schema.classes] and {*two.predict(X)} <= {"a", "c"}


@pytest.fixture(scope="module")
def regressor():
    return BayesianRegressor("mean-field", **{**QUICK, "num_draws": 50}, random_state=3).fit(X, Y)


@pytest.fixture(scope="module")
def classifier():
    return BayesianClassifier("mean-field", **{**QUICK, "num_draws": 50}).fit(FRAME, LABELS)


def test_a_regressor_says_what_predict_says_and_so_does_its_pickle(regressor):
    prediction = bp.predict(regressor.posterior_, X, num_draws=50)
    mean, std = regressor.predict(X, return_std=True)
    np.testing.assert_array_equal(mean, prediction.mean)
    np.testing.assert_array_equal(std, prediction.total.sqrt())
    np.testing.assert_array_equal(regressor.predict_interval(X, 0.8), prediction.quantile([0.1, 0.9]).mT)
    np.testing.assert_allclose(regressor.log_prob(X, Y), prediction.log_prob(torch.tensor(Y)), rtol=1e-6)
    assert regressor.score(X, Y) > 0.8
    svi = bp.SVI(epochs=50, lr=0.05, batch_size=0)
    direct = bp.fit(bp.MeanField(hidden=(8,)), (X, Y), svi, seed=3, progress=False)
    assert torch.equal(bp.predict(direct, X, num_draws=50).mean, prediction.mean), "the names of the command line"
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_array_equal(again.predict(X), mean)
    assert again.get_params() == regressor.get_params() and not hasattr(clone(regressor), "posterior_")


def test_a_classifier_takes_frames_with_text_and_keeps_labels(classifier):
    assert classifier.posterior_.schema.features[1:3] == ("city=Oslo", "city=Rome")
    assert classifier.classes_.tolist() == ["no", "yes"]
    proba = classifier.predict_proba(FRAME)
    np.testing.assert_allclose(proba.sum(1), 1, rtol=1e-12)
    assert classifier.predict(FRAME).tolist() == [("no", "yes")[k] for k in proba.argmax(1)]
    assert classifier.score(FRAME, LABELS) > 0.8
    log_prob = np.log(proba[np.arange(60), (LABELS == "yes").astype(int)])
    np.testing.assert_allclose(classifier.log_prob(FRAME, LABELS), log_prob, rtol=1e-4, atol=5e-7)  # of float32
    refuses("unknown category 'Paris'", classifier.predict, FRAME.assign(city="Paris"))
    refuses("unknown class 'maybe'", classifier.log_prob, FRAME, ["maybe"] * 60)


@pytest.mark.parametrize("variant", [bp.MLP(), torch.nn.Linear(2, 1)], ids=["settings", "module"])
def test_pickles_of_variants_of_ones_own_have_their_settings(variant, tmp_path):
    changes = {"hidden": (3,)} if isinstance(variant, bp.MLP) else {"noise": 0.5}
    model = BayesianRegressor(variant, **changes, epochs=2).fit(X[:, :2], Y)
    model.posterior_.save(tmp_path)
    files = {name: (tmp_path / name).read_bytes() for name in ("posterior.pt", "posterior.json")}
    entry = bp.MLP(**changes) if isinstance(variant, bp.MLP) else bp.Bayesian(variant, **changes)
    earlier = BayesianRegressor.__new__(BayesianRegressor)  # which had the archive in its pickle
    earlier.__setstate__({**model.__getstate__(), "posterior_": files, "_entry": entry})
    for again in (pickle.loads(pickle.dumps(model)), earlier):
        np.testing.assert_array_equal(*(m.predict(X[:, :2], return_std=True)[1] for m in (model, again)))


def test_what_is_wrong_with_parameters_is_said():
    for estimator, message in (
        (BayesianRegressor("hidden-layer", "nuts"), "nuts needs"),
        (BayesianRegressor(settings={"epoch": 3}), "hidden-layer or svi 'epoch'; did you mean 'epochs'"),
        (BayesianRegressor(task="survival"), r"is for bp.fit\(.*task='survival'\)\), of times with event="),
    ):
        refuses(message, estimator.fit, X, Y)
    frame, labels = pd.DataFrame(X), pd.Series(Y)[::-1]
    refuses("y has the row labels of X in another order", BayesianRegressor("mlp").fit, frame, labels)


# -- gradient boosting, which runs are compared with -------------------------------------------------------------------
G = torch.Generator().manual_seed(0)
INPUTS, NOISE = torch.randn(550, 3, generator=G), torch.randn(550, generator=G)
SMOOTH, PLAIN = INPUTS[:, 0] + INPUTS[:, 1].abs(), INPUTS.double().numpy()


def boosted_by(y, **schema):
    schema = bp.Schema(**{"task": "regression", "input_shape": (3,), **schema})
    return boosted(dataset(INPUTS[:150], y[:150], schema, INPUTS[150:], y[150:]))


FOLDS = KFold(5, shuffle=True, random_state=0)


def best_of_folds(model, y, about, scoring):
    """scikit-learn's model at the iterations that were taken, fitted; by its own folds others are no better."""
    taken = int(about["about"].split(" iteration")[0].rpartition(" ")[2])
    scores = {n: cross_val_score(clone(model).set_params(max_iter=n), PLAIN[:150], y, cv=FOLDS, scoring=scoring).mean()
              for n in (taken - 1, taken, taken + 1, 100)}  # fmt: skip
    assert max(scores, key=scores.get) == taken < 100
    return model.set_params(max_iter=taken).fit(PLAIN[:150], y)


def test_a_number_has_scikit_learns_prediction_and_its_cross_validated_error():
    """On a log scale it is the logarithm that is modelled."""
    y = SMOOTH + 0.5 * NOISE
    (prediction, about), own = boosted_by(y), y[:150].double().numpy()
    model = HistGradientBoostingRegressor(min_samples_leaf=7, random_state=0)
    model = best_of_folds(model, own, about, "neg_mean_squared_error")
    np.testing.assert_allclose(prediction.mean, model.predict(PLAIN[150:]), rtol=1e-5, atol=1e-6)
    left_out = cross_val_predict(model, PLAIN[:150], own, cv=FOLDS)
    assert prediction.scales[0, 0].item() == pytest.approx(np.sqrt(np.mean((own - left_out) ** 2)), rel=1e-5)
    assert "150 training rows" in about["about"] and "error on training rows left out" in about["about"]
    scaled, about = boosted_by(y.exp(), target_scale="log")
    torch.testing.assert_close(scaled.untransformed.mean, prediction.mean, atol=1e-4, rtol=0)
    assert "log y" in about["about"]


def test_classes_have_scikit_learns_probabilities_and_a_missing_one_is_not_impossible():
    """With iterations that the folds choose: on noisy classes all 100 are worse than their frequencies."""
    y = torch.bucketize(SMOOTH + 3 * NOISE, torch.tensor([0.0, 1.5]))
    prediction, about = boosted_by(y, task="classification", classes=("a", "b", "c", "never"))
    model = HistGradientBoostingClassifier(min_samples_leaf=7, random_state=0)
    all_of_them = clone(model).fit(PLAIN[:150], y[:150].numpy()).predict_proba(PLAIN[150:])
    own = best_of_folds(model, y[:150].numpy(), about, "neg_log_loss").predict_proba(PLAIN[150:])
    np.testing.assert_allclose(prediction.mean[:, :3], own, atol=1e-5)
    assert (prediction.log_prob(torch.full((400,), 3)) > -20).all()
    nll = [-np.log(p[np.arange(400), y[150:].numpy()]).mean() for p in (own, all_of_them)]
    assert nll[0] < math.log(3) < nll[1]


@pytest.mark.parametrize("most", [10_000, 100], ids=["folds choose", "its own early stopping"])
def test_a_class_of_two_rows_is_predicted_where_folds_lack_it(most, monkeypatch):
    """Also where one fold has no other class than the other one."""
    monkeypatch.setattr("bnn_pyro.runs.baselines.MAX_STAGED", most)
    y, (_, out), *_ = torch.zeros(550, dtype=torch.long), *FOLDS.split(PLAIN[:150])
    y[out[:2]] = 1
    prediction, about = boosted_by(y, task="classification", classes=("a", "b"))
    assert "150 training rows" in about["about"] and (prediction.mean[:, 0] > 0.5).all()


def test_a_run_says_how_it_compares_with_it(tmp_path, command, no_figures):
    file, run = small_table(tmp_path / "houses.csv", rows=90), tmp_path / "a"
    train = [*MEAN_FIELD, "--data", file, "--target", "price", *SMALL, "--baseline", "boosting", "--out", run]
    assert "beside gradient boosting, paired differences: rmse" in command(*train)
    found, own = (json.loads((run / name).read_text()) for name in ("boosting.json", "metrics.json"))
    assert found["differences"]["nll"] == pytest.approx(own["nll"] - found["metrics"]["nll"], abs=1e-5)
    assert "gradient boosting" in (run / "report.html").read_text() and not (run / "baseline").exists()
    old = json.loads((run / "config.json").read_text())
    del old["boosting"]  # a run of an earlier version, which had none
    (run / "config.json").write_text(json.dumps(old))
    command("evaluate", run)
    assert not (run / "boosting.json").exists()


def test_minutes_are_a_setting_of_auto():
    settings = {"minutes": 0.2, "hidden": "2", "epochs": 2, "draws": 2, "warmup": 9}
    model = BayesianRegressor("auto", settings=settings, random_state=0).fit(X, Y)
    assert model.posterior_.provenance["auto"]["minutes"] == 0.2
