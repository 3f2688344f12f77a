"""Times of which some are censored: against SciPy's densities and censored fits, sums and simulation."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from refused import refuses
from scipy import stats
from test_parts import read

import bnn_pyro as bp
from bnn_pyro.inspection import inspect_table
from bnn_pyro.metrics.metric import concordant
from bnn_pyro.parts.components import LogNormalTimes, WeibullTimes, without_inputs
from bnn_pyro.parts.likelihoods import LIKELIHOODS, make_likelihood
from bnn_pyro.parts.observed import LogNormalMixture, TimeMixture
from bnn_pyro.runs.evaluate import _finite

SCHEMA = bp.Schema("survival", (1,), y_shift=1.0, y_scale=0.5, event=("event",))
NAMES = ("weibull", "log-normal")


def lifetimes(num=400, seed=0):
    """(x, time, event): a Weibull of shape 1.5 whose scale is e^{1 + x}, about half of it censored."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (num, 1))
    time, end = np.exp(1 + x[:, 0]) * rng.weibull(1.5, num), rng.exponential(4, num)
    return x, np.minimum(time, end), time <= end


def law(name, loc, scale):
    return stats.weibull_min(1 / scale, 0, np.exp(loc)) if name == "weibull" else stats.lognorm(scale, 0, np.exp(loc))


def mixture(name="weibull", num=3000, seed=0):
    """Three draws, times from the same mixture, negative where censored, and what they were before."""
    rng = np.random.default_rng(seed)
    loc, scale = rng.normal(1, 0.5, (3, num)), 0.6
    time = law(name, loc[rng.integers(3, size=num), np.arange(num)], scale).rvs(random_state=rng)
    end, kind = rng.exponential(4, num), WeibullTimes if name == "weibull" else LogNormalTimes
    prediction = TimeMixture(kind(torch.from_numpy(loc), torch.full((3, num), scale).double()))
    return prediction, np.where(time <= end, time, -end), loc


@pytest.mark.parametrize("name", NAMES)
def test_densities_and_tails_are_scipys(name):
    f, t = torch.tensor([[-1.0], [0.0], [2.0]]), torch.tensor([0.3, 4.0, 9.0])
    likelihood = make_likelihood(SCHEMA, "learned", name)
    assert type(likelihood) is LIKELIHOODS[name][0] and type(make_likelihood(SCHEMA)) is LIKELIHOODS["weibull"][0]
    d = read(likelihood, f, log_noise=torch.tensor(-0.5))
    reference = law(name, 1 + 0.5 * f[:, 0].double().numpy(), 0.5 * np.exp(-0.5))
    np.testing.assert_allclose(d.log_prob(t), reference.logpdf(t.numpy()), rtol=2e-5)
    np.testing.assert_allclose(d.log_prob(-t), reference.logsf(t.numpy()), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(d.mean, reference.mean(), rtol=1e-5)
    np.testing.assert_allclose(d.variance, reference.var(), rtol=1e-4)
    one = TimeMixture(type(d)(d.loc[None], d.scale[None]))
    np.testing.assert_allclose(one.quantile([0.1, 0.9]), reference.ppf([[0.1], [0.9]]), rtol=1e-5)
    np.testing.assert_allclose(one.cdf(t), reference.cdf(t.numpy()), atol=1e-6)
    np.testing.assert_allclose(one.cdf(4.0), reference.cdf(4.0), atol=1e-6)
    with bp.isolated(0):
        draws = d.sample((2000,))[:, 1].double().numpy()
    assert stats.kstest(draws, lambda t: reference.cdf(t[:, None])[:, 1]).pvalue > 0.001
    far = (90 * f).requires_grad_()
    slope = torch.autograd.grad(read(likelihood, far, log_noise=torch.tensor(-4.0)).log_prob(-t).sum(), far)[0]
    assert slope.isfinite().all() and slope[0] > 0  # also where the time is impossible


@pytest.mark.parametrize("kind", [TimeMixture, LogNormalMixture])
def test_a_mean_beyond_all_numbers_is_no_reason_to_drop_the_scores(kind):
    loc = torch.zeros(100, 2).index_fill(0, torch.tensor([7]), 200.0)
    loc[:, 1] = 200.0  # here quantiles too
    prediction = kind(LogNormalTimes(loc, torch.ones_like(loc)))
    assert prediction.mean.isinf().all()
    whole, broken = _finite(prediction, SimpleNamespace(index_test=None, name="lung"), "test")
    assert whole.tolist() == [True, False] and "1 test rows, such as row 1 of lung" in broken["failed"]


@pytest.mark.parametrize("name", NAMES)
def test_without_inputs_a_fit_is_scipys_of_censored_data(name):
    _, time, event = lifetimes()
    y = np.where(event, time, -time)
    kind = stats.weibull_min if name == "weibull" else stats.lognorm
    shape, _, scale = kind.fit(stats.CensoredData.right_censored(time, ~event), floc=0)
    wrong, _, short = kind.fit(time, floc=0)
    data = bp.dataset(np.zeros((len(y), 1)), time, event=event, split=0, validation=0)
    method = bp.MLE(epochs=600, batch_size=0, lr=0.05, patience=0)
    posterior = bp.fit(bp.MLP(hidden=(), likelihood=name), data, method, progress=False, device="cpu")
    found = bp.predict(posterior, data.x_train[:1]).quantile([0.2, 0.5, 0.8])[:, 0]
    np.testing.assert_allclose(found, kind(shape, 0, scale).ppf([0.2, 0.5, 0.8]), rtol=5e-3)
    assert kind(wrong, 0, short).median() < 0.75 * found[1]  # where censored times count as events
    if name == "weibull":
        own = without_inputs(torch.from_numpy(y))
        np.testing.assert_allclose([1 / own.scale, own.loc.exp()], [shape, scale], rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_pit_is_uniform_where_the_model_is_right_and_censoring_is_told(name):
    prediction, y, loc = mixture(name)
    assert stats.kstest(bp.metrics.pit(prediction, y, seed=0), "uniform").pvalue > 0.01
    assert stats.kstest(bp.metrics.pit(prediction, np.abs(y), seed=0), "uniform").pvalue < 1e-9
    scores = bp.metrics.evaluate(prediction, y)
    assert set(scores) == set(bp.metrics.METRICS["survival"])
    assert abs(scores["coverage_90"].value - 0.9) < 4 * np.sqrt(0.09 / len(y))
    reference = law(name, loc, 0.6)
    density = np.where(y > 0, reference.pdf(np.abs(y)), reference.sf(np.abs(y))).mean(0)
    assert scores["nll"].value == pytest.approx(-np.log(density).mean(), rel=1e-5)
    t = np.linspace(0, 60, 60_001)[:, None]  # CRPS by sums
    cdf = law(name, loc[:, None, :5], 0.6).cdf(t).mean(0)
    crps = ((cdf - (np.abs(y[:5]) <= t)) ** 2).sum(0) * 1e-3
    np.testing.assert_allclose(prediction[:5].crps(torch.from_numpy(np.abs(y[:5]))), crps, rtol=5e-3)
    refuses("the CRPS is of times that happened", bp.metrics.crps, prediction, y)
    refuses("the RMSE needs observed times", bp.metrics.rmse, prediction, y)


def test_concordance_counts_the_comparable_pairs():
    rng = np.random.default_rng(0)
    time, event, score = rng.integers(1, 12, 40), rng.random(40) < 0.6, rng.integers(0, 9, 40)
    counts = rng.multinomial(40, np.full(40, 1 / 40), size=3).astype(float)
    rank = 2 * np.unique(time, return_inverse=True)[1] + ~event
    before = event[:, None] & ((time[:, None] < time) | ((time[:, None] == time) & ~event))
    right = before * ((score[:, None] < score) + 0.5 * (score[:, None] == score))
    found = concordant(np.stack([rank, event, score], 1).astype(float), counts)
    for values, pairs in zip(found, (right, before), strict=True):
        np.testing.assert_allclose(values, [c @ pairs @ c for c in counts])
    prediction, y, _ = mixture(num=50)
    assert bp.metrics.concordance(prediction, y) > 0.55
    with pytest.raises(bp.metrics.Undefined, match="needs an event"):
        bp.metrics.concordance(prediction, -np.abs(y))


def test_events_may_stand_in_columns_arrays_and_files(tmp_path):
    x, time, event = lifetimes(60)
    y, coded = np.stack([time, event], 1), np.where(event, 2, np.arange(60) % 2)  # of three values 2 is the event
    frame = pd.DataFrame({"x": x[:, 0], "time": time, "died": event, "status": coded})
    frame.to_csv(tmp_path / "t.csv", index=False)
    np.savez(tmp_path / "t.npz", x=x, y=y)
    path, columns = tmp_path / "t.csv", {"target": "time", "features": ["x"]}
    for data in (
        bp.dataset(x, time, event=event),
        bp.dataset(x, y, task="survival"),
        bp.dataset(frame.drop(columns="status"), "time", event="died"),
        bp.dataset(frame.drop(columns="died"), "time", event="status=2"),
        bp.load_data(path, **columns, event="died"),
        bp.load_data(path, **columns, event="status=2", task="survival"),
        bp.load_data(tmp_path / "t.npz", task="survival"),
        bp.dataset(x[:40], y[:40], task="survival", x_test=x[40:], y_test=y[40:]),
    ):
        assert data.schema.task == "survival" and data.schema.input_shape == (1,)
        rows = np.abs(data.schema.unstandardise(data.x_test).numpy() - x.T).argmin(1)
        np.testing.assert_allclose(data.y_test, np.where(event, time, -time)[rows], rtol=1e-6)
        assert data.schema.y_shift == pytest.approx(data.y_train.abs().log().mean().item(), abs=1e-5)
        assert bp.Schema.from_dict(json.loads(json.dumps(data.schema.to_dict()))) == data.schema


def test_commands_take_times(tmp_path, command):
    x, time, event = lifetimes(300)
    table = pd.DataFrame({"x": x[:, 0], "z": x[::-1, 0], "time": time, "status": np.where(event, 2, 1)})
    table.to_csv(tmp_path / "t.csv", index=False)
    file, run = tmp_path / "t.csv", tmp_path / "run"
    train = ["train", "hidden-layer", "--data", file, "--target", "time", "--epochs=120", "--out", run]
    assert "holds 1, 2" in command(*train, "--event", "status", code=2)
    said = " ".join(command(*train, "--event", "status=2", "--num-draws", 20).split())
    assert "beside the training times alone" in said and "of the test rows are censored" in said
    command("diagnose", run, "--no-netcdf")
    command("evaluate", run, "--data", file)
    command("compare", run, run / "baseline", "--out", tmp_path / "compare")
    command("predict", run, "--input", file, "--output", tmp_path / "p.csv", "--levels", 0.8)
    found = pd.read_csv(tmp_path / "p.csv")
    assert (found["lower_80"] < found["q50"]).all() and found.filter(like="log_").notna().all(axis=None)
    assert np.corrcoef(found["q50"].apply(np.log), table["x"])[0, 1] > 0.9
    scores, rows = (json.loads((run / name).read_text()) for name in ("metrics.json", "rows.json"))
    assert scores["concordance"] > 0.6 and scores["nll_minus_nothing"] < 0 and scores["censored_rows"] > 0
    assert {"calibration", "permutation-importance"} <= {path.stem for path in (run / "figures").glob("*.png")}
    assert any(row["observed time"].startswith("> ") for row in rows["uncertain"] + rows["worst"])
    assert "takes no censored times" in command("calibrate", run, code=2)
    assert bp.load(run).schema.event == ("status", "2")


def test_what_is_given_is_no_input_and_comes_again_in_the_command(tmp_path, command):
    k, path = np.arange(40), tmp_path / "t.csv"
    pd.DataFrame({"a": k % 7, "died": 1, "y": k + 0.5}).to_csv(path, index=False)
    report = inspect_table(path, "y", {"event": "died=1"})
    assert not report.findings and report.task == "survival" and report.command.endswith("y --event died=1")
    refuses("'y' is the target, and no event", inspect_table, path, "y", {"event": "y"})
    refuses("unknown task 'count'; did you mean 'counts'", inspect_table, path, "y", {"task": "count"})
    said = command("inspect", path, "--target", "y", "--exposure", "died")
    assert "target of counts" in said and "--task counts --exposure died" in said
