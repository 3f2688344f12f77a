"""Several targets a row, and classes in an order: against models written by hand, SciPy, scikit-learn and sums."""

import json
import math
import pickle

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from refused import refuses
from scipy import stats
from sklearn.metrics import average_precision_score
from test_parts import read
from zoo_problems import check_log_joint

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.observed import OrdinalMixture
from bnn_pyro.parts.several import SeveralMixture


def numbers(num=60, seed=0):
    """As many inputs as targets: (N, F) and (N, T) look alike."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 2))
    return x, np.stack([10 * x[:, 0] + rng.normal(size=num), 0.1 * np.sin(x[:, 1]) + 0.02 * rng.normal(size=num)], 1)


def labels(num=60, seed=0):
    x, _ = numbers(num, seed)
    noise = np.random.default_rng(seed + 1).normal(size=(num, 3))
    return x, (np.stack([x[:, 0], x[:, 1], x.sum(1) - 1], 1) + noise > 0).astype(float)


def ratings(num=240, seed=0):
    """Four classes by a logistic variable around 2 x, cut at −1.5, 0 and 2."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, num)
    return x[:, None], np.searchsorted([-1.5, 0.0, 2.0], 2 * x + rng.logistic(size=num))


NUMBERS, LABELS = bp.dataset(*numbers(), seed=0), bp.dataset(*labels(), seed=0)
FITTED = bp.fit("mlp", NUMBERS, bp.MAP(epochs=2), seed=0, progress=False)
X, Y = numbers()
LABEL = labels()[1][:, 0].astype(int)
FRAME = pd.DataFrame(np.concatenate([X, Y], 1), columns=["a", "b", "up", "down"])
SIZES = ("low", "middle", "high", "top")
SHIFT, SCALE = (torch.tensor(of) for of in (NUMBERS.schema.y_shift, NUMBERS.schema.y_scale))


def student_t(f, w):
    return dist.StudentT(2 + w["log_df"].exp(), SHIFT + SCALE * f, SCALE * w["log_noise"].exp())


def by_input(f):
    return SHIFT + SCALE * f[:, ::2], SCALE * (1e-3 + torch.nn.functional.softplus(f[:, 1::2]))


def student_t_by_input(f, w):
    return dist.StudentT(2 + w["log_df"].exp(), *by_input(f))


def ordered(f, w):
    return dist.OrderedLogistic(f[:, 0], torch.cat([w["cuts"][:1], w["cuts"][1:].exp()]).cumsum(0))


EVEN = torch.tensor([0.25, 0.5, 0.75]).logit()
CUTS = dist.Normal(torch.cat([EVEN[:1], EVEN.diff().log()]), torch.tensor([1.5, 1.0, 1.0]))
NOISE, DF = dist.Normal(-1.0, 1.0), dist.Normal(2.0, 1.0)


@pytest.mark.parametrize(("data", "law", "priors", "settings"), [
    (NUMBERS, lambda f, w: dist.Normal(SHIFT + SCALE * f, SCALE * w["log_noise"].exp()), {"log_noise": NOISE}, {}),
    (NUMBERS, student_t, {"log_noise": NOISE, "log_df": DF}, {"likelihood": "student-t"}),
    (NUMBERS, lambda f, w: dist.Normal(*by_input(f)), {}, {"noise": "heteroscedastic"}),
    (NUMBERS, student_t_by_input, {"log_df": DF}, {"noise": "heteroscedastic", "likelihood": "student-t"}),
    (LABELS, lambda f, w: dist.Bernoulli(logits=f), {}, {}),
    (bp.dataset(*ratings(60), seed=0), lambda f, w: dist.Categorical(logits=f), {}, {}),
    (bp.dataset(X, LABEL, seed=0), lambda f, w: dist.Categorical(torch.cat([-f, f], 1).sigmoid()), {}, {}),
    (bp.dataset(*ratings(60), task="ordinal", seed=0), ordered, {"cuts": CUTS}, {}),
])  # fmt: skip
def test_the_log_joint_is_that_of_a_model_written_by_hand(data, law, priors, settings):
    check_log_joint(data, law, priors, **settings)


def test_as_many_targets_as_inputs_are_no_rows_of_each_draw():
    x, y = NUMBERS.x_train[:3], NUMBERS.y_train[:3]
    with bp.isolated(0):
        log_joint = LogJoint(bp.Bayesian(torch.nn.Linear(2, 2)).model(NUMBERS.schema), x, y)
        u = log_joint.initial + 0.1 * torch.randn(3, log_joint.size, dtype=torch.float64)
    torch.testing.assert_close(log_joint.log_density(u), torch.cat([log_joint.log_density(one[None]) for one in u]))


def test_the_mixture_against_scipy():
    rng = np.random.default_rng(0)
    loc, scale, y = rng.normal(size=(5, 4, 2)), rng.uniform(0.5, 2, (5, 4, 2)), rng.normal(size=(4, 2))
    prediction = SeveralMixture(dist.Normal(*map(torch.from_numpy, (loc, scale))))
    density = stats.norm(loc, scale).pdf(y).prod(-1).mean(0)  # joint: dependent over the draws
    np.testing.assert_allclose(prediction.log_prob(torch.from_numpy(y)).numpy(), np.log(density), rtol=1e-6)
    np.testing.assert_allclose(prediction.mean.numpy(), loc.mean(0), rtol=1e-6)
    np.testing.assert_allclose(prediction.total.numpy(), (scale**2).mean(0) + loc.var(0), rtol=1e-6)
    for level, q in zip((0.1, 0.8), prediction.quantile([0.1, 0.8]).double().numpy(), strict=True):
        np.testing.assert_allclose(stats.norm(loc, scale).cdf(q).mean(0), level, atol=1e-5)
    assert torch.equal(prediction.interval(0.8).low, prediction.quantile(0.1)[0].double())
    assert len(prediction[:3]) == 3 and prediction.of_draws([0, 1]).num_draws == 2
    squares = ((loc.mean(0) - y) / y.std(0)) ** 2  # in standard deviations
    assert bp.metrics.METRICS["targets"]["nrmse"](prediction, y) == pytest.approx(math.sqrt(squares.mean()))


def test_labels_against_scipy_and_scikit_learn():
    rng = np.random.default_rng(0)
    f, y = rng.normal(size=(5, 200, 2)).round(1), rng.integers(0, 2, (200, 2))  # rounded: ties
    prediction = SeveralMixture(dist.Bernoulli(logits=torch.from_numpy(f)))
    p = 1 / (1 + np.exp(-f))
    mean, density = p.mean(0), stats.bernoulli(p).pmf(y).prod(-1).mean(0)
    found = bp.metrics.evaluate(prediction, y, bootstrap=20)
    for name, expected in (
        ("nll", -np.log(density).mean()),
        ("label_brier", 2 * ((mean - y) ** 2).mean()),
        ("label_error", ((mean > 0.5) != y).mean()),
        ("average_precision", np.mean([average_precision_score(y[:, k], mean[:, k]) for k in range(2)])),
    ):
        assert found[name].value == pytest.approx(expected), name
    entropy = stats.bernoulli(mean).entropy() - stats.bernoulli(p).entropy().mean(0)
    np.testing.assert_allclose(prediction.epistemic.numpy(), entropy, atol=1e-6)
    assert "has none" in bp.metrics.evaluate(prediction, 0 * y, bootstrap=2).notes["average_precision"]
    refuses("labels are 0 or 1", bp.metrics.nll, prediction, 2 * y)


FITS = {
    "hidden-layer": ("hidden-layer", bp.SVI(epochs=40)),
    "heteroscedastic": (bp.MeanField(noise="heteroscedastic"), bp.SVI(epochs=3)),
    "sghmc": ("mean-field", bp.SGHMC(epochs=2, start="jitter")),
    "mile": ("mean-field", bp.MILE(warmup=5, draws=4, chains=2, epochs=4, thin=2)),
    "mc-dropout": ("dropout-mlp", bp.MCDropout(epochs=3)),
}


@pytest.mark.parametrize("name", FITS)
def test_methods_take_them(name, tmp_path):
    entry, method = FITS[name]
    for data in (NUMBERS, LABELS):
        posterior = bp.fit(entry, data, method, seed=0, progress=False)
        prediction = bp.predict(posterior, data.x_test, num_draws=4)
        assert prediction.mean.shape == data.y_test.shape and bp.metrics.nll(prediction, data.y_test) < 1e4
    posterior.save(tmp_path)
    again = bp.load(tmp_path, None if isinstance(entry, str) else entry)
    assert torch.equal(bp.predict(again, data.x_test, num_draws=4).mean, prediction.mean)
    assert again.schema == data.schema


def test_frames_names_and_arrays_are_one(tmp_path):
    FRAME.to_csv(tmp_path / "t.csv", index=False)
    one = bp.dataset(FRAME, ["up", "down"], seed=0)
    assert (one.schema.targets, one.schema.target, one.schema.task) == (("up", "down"), "up, down", "targets")
    for other in (
        bp.dataset(FRAME[["a", "b"]], FRAME[["up", "down"]], seed=0),
        bp.dataset(X, Y, seed=0),
        bp.load_data(tmp_path / "t.csv", target=["up", "down"]),
        bp.load_data(tmp_path / "t.csv", target="up,down"),
    ):
        assert torch.allclose(other.y_train, one.y_train) and other.schema.y_scale == pytest.approx(one.schema.y_scale)
    assert LABELS.schema.task == "labels" and LABELS.schema.y_shift == 0.0 and LABELS.y_train.dtype == torch.float32
    assert bp.dataset(X[:40], Y[:40], x_test=X[40:], y_test=Y[40:]).y_test.shape == (20, 2)
    assert bp.Schema.from_dict(json.loads(json.dumps(one.schema.to_dict()))) == one.schema
    assert "targets" not in bp.load_data("diabetes").schema.to_dict()


def test_refused():
    broken, made = Y.copy(), bp.predict(pickle.loads(pickle.dumps(FITTED)), NUMBERS.x_test)
    broken[3, 1] = math.nan
    again = pickle.loads(pickle.dumps(made))
    for call, message in [
        (lambda: bp.dataset(X, broken), "column 'y2', row 3: missing value"),
        (lambda: bp.dataset(X, Y, task="counts"), "several targets, of which counts takes one"),
        (lambda: bp.dataset(X, Y, task="labels"), "target 'y1', row 0: .* is no label, 0 or 1"),
        (lambda: bp.dataset(X, Y[:, 0], task="targets"), "is one, and task='targets' is for several"),
        (lambda: bp.dataset(X, Y * [1, 0] + 7), "'y2' is the same in every training row"),
        (lambda: bp.dataset(X[:40], Y[:40], x_test=X[40:], y_test=Y[40:, 0]), "give the same targets"),
        (lambda: bp.MLP(likelihood="poisson").model(NUMBERS.schema), "is for counts, and the task is targets"),
        (lambda: bp.calibrate(FITTED, NUMBERS.x_val, NUMBERS.y_val, "cqr"), "method for targets 'cqr'. Valid: joint"),
        (lambda: bp.diagnostics.diagnose(FITTED, NUMBERS), r"there are 2 \(y1, y2\); .*function_space"),
        (lambda: bp.diagnostics.to_arviz(FITTED, NUMBERS), "to_arviz takes one target"),
        (lambda: bp.metrics.nll(made, NUMBERS.y_test[:, 0]), "pass 2 values each"),
        (lambda: again.cdf(0.0), r"take prediction.target\(k\)"),
        (lambda: bp.metrics.crps(made, NUMBERS.y_test), "'crps' belongs to regression"),
        (lambda: bp.metrics.pit(made, NUMBERS.y_test), "'pit' belongs to regression"),
        (lambda: made.target("y3"), "unknown target 'y3'. Valid: 0 to 1, y1"),
        (lambda: made.target(2), "unknown target '2'; .* Valid: 0 to 1, y1, y2"),
    ]:
        refuses(message, call)


@pytest.mark.parametrize("task", ["targets", "labels"])
def test_from_a_file_to_predictions(task, tmp_path, command):
    x, y = (numbers if task == "targets" else labels)(150)
    names = [f"t{k}" for k in range(y.shape[1])]
    file, run, out = (tmp_path / name for name in ("t.csv", "run", "p.csv"))
    pd.DataFrame(np.concatenate([x, y], 1), columns=["a", "b", *names]).to_csv(file, index=False)
    train = ["train", "mean-field", "--data", file, "--target", ",".join(names), "--out", run, "--no-baseline"]
    said = command(*train, "--epochs", 20, "--num-draws", 5, code=(0, 3))
    scores = json.loads((run / "metrics.json").read_text())
    posterior, data = bp.load(run), bp.load_data(file, target=names)
    both = bp.predict(posterior, data.x_test, num_draws=5)
    single = bp.metrics.evaluate(both.target("t1"), data.y_test[:, 1])
    if task == "targets":
        assert single["crps"].value == pytest.approx(both.crps(data.y_test.double())[:, 1].mean().item())
    assert list(scores["targets"]) == names and scores["targets"]["t1"]["nll"] == pytest.approx(single["nll"].value)
    assert "Each target by itself" in (run / "report.html").read_text() and "t1" in said
    known, new, num = data.y_train.numpy(), data.y_test.numpy(), len(data.y_train)
    law = stats.norm(known.mean(0), known.std(0)).logpdf
    law = law if task == "targets" else stats.bernoulli((known.sum(0) + 1) / (num + 2)).logpmf
    assert scores["nll"] - scores["nll_minus_nothing"] == pytest.approx(-law(new).sum(1).mean(), rel=1e-4)
    command("predict", run, "--input", file, "--output", out)
    table, prediction = pd.read_csv(out), bp.predict(posterior, bp.load_inputs(file, posterior.schema), num_draws=5)
    column = table["t1_mean" if task == "targets" else "p(t1)"].to_numpy()
    np.testing.assert_allclose(column, prediction.mean[:, 1].numpy(), rtol=1e-5, atol=1e-6)
    if task == "targets":
        command("calibrate", run)
        command("predict", run, "--input", file, "--output", out, "--overwrite")
        (low, high, *_), y = bp.predict(bp.load(run), data.x_test).interval(0.9), data.y_test
        done = json.loads((run / "guarantees.json").read_text())["table"][1]
        assert done["covered"] == pytest.approx(((low <= y) & (y <= high)).all(1).double().mean().item())
        assert done["size"] == pytest.approx((high - low).prod(1).sqrt().mean().item())
        assert (table.t1_mean < pd.read_csv(out).t1_high).all()


# -- classes in an order -----------------------------------------------------------------------------------------------
def test_far_from_every_cut_no_digits_are_lost():
    """log P(y = k) to 1e-5 where probabilities are 1e-30 and where two cuts are 1e-6 apart."""
    own = torch.tensor([0.0, np.log(1e-6), 1.0])
    likelihood = make_likelihood(bp.Schema("ordinal", (1,), classes=SIZES))
    found = read(likelihood, torch.tensor([[70.0], [-70.0]]), cuts=own).logits.double().numpy()
    gap = stats.logistic.logpdf(70.0) + np.log(1e-6)  # density times width
    np.testing.assert_allclose(found[0, :2], [-70.0, gap], rtol=1e-5)
    np.testing.assert_allclose(found[1, [1, 3]], [gap, -70.0 - np.e], rtol=1e-5)


def test_the_ranked_probability_score_is_the_crps_of_the_classes():
    rng = np.random.default_rng(0)
    logits, y = rng.normal(size=(5, 30, 4)), rng.integers(0, 4, 30)
    prediction = OrdinalMixture(dist.Categorical(logits=torch.from_numpy(logits)))
    p = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).mean(0)
    k = np.arange(4)
    distance = (p * np.abs(k - y[:, None])).sum(1)  # E|Y − y| − ½ E|Y − Y'|
    pairs = np.einsum("bi,bj,ij->b", p, p, np.abs(k[:, None] - k))
    assert bp.metrics.rps(prediction, y) == pytest.approx((distance - pairs / 2).mean(), rel=1e-6)
    assert len(prediction[:3].set(0.9).members) == 3  # as of other classes


def test_the_order_is_that_of_numbers_of_categories_or_of_what_is_given():
    x, y = ratings()
    frame = pd.DataFrame({"x": x[:, 0], "size": np.array(SIZES)[y], "stars": y + 9})
    ordered = frame.assign(size=pd.Categorical(frame["size"], [*SIZES, "unused"], ordered=True))
    assert bp.dataset(frame, "stars", task="ordinal").schema.classes == ("9", "10", "11", "12")
    for data in (
        bp.dataset(ordered.drop(columns="stars"), "size", task="ordinal"),
        bp.dataset(frame.drop(columns="stars"), "size", task="ordinal", classes=SIZES),
        bp.dataset(x, frame["size"], task="ordinal", classes=SIZES),
        bp.dataset(x, y, task="ordinal", classes=SIZES),
    ):
        assert data.schema.task == "ordinal" and data.schema.classes == SIZES and data.schema.has_classes
        np.testing.assert_array_equal(data.y_test, y[data.index_test])
    assert bp.dataset(ordered, "size").schema.classes == tuple(sorted(SIZES))  # as before, where no order is asked for
