"""Exposure of counts, their randomised PIT and their rootogram: against models by hand and simulation."""

import json

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from scipy import stats

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.isolation import isolated
from bnn_pyro.run import main


def visits(num=120, seed=0):
    """Counts of mean hours · exp(1 + x), with another column that says nothing."""
    rng = np.random.default_rng(seed)
    x, hours = rng.normal(size=num), rng.uniform(0.2, 30, num)
    table = pd.DataFrame({"hours": hours, "x": x, "city": rng.choice(["Oslo", "Rome"], num)})
    return table.assign(count=rng.poisson(hours * np.exp(1 + 0.3 * x)))


# -- exposure ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", ["mean-field", "dropout-mlp"])
def test_the_log_joint_is_that_of_a_model_written_by_hand(variant):
    """The exposure multiplies the mean, and is no input of the network."""
    table = visits(60)
    data = bp.dataset(table, "count", task="counts", exposure="hours", seed=0)
    assert data.schema.features == ("x", "city=Oslo", "city=Rome", "hours")
    hours = torch.from_numpy(table["hours"].to_numpy()[data.index_train]).float()
    x, y, schema = data.x_train, data.y_train, data.schema
    with isolated(0):
        model = bp.ZOO[variant](hidden=(), prior="normal:2", likelihood="poisson").model(schema).eval()
    log_joint = LogJoint(model, x, y)
    u = 0.3 * torch.randn(3, log_joint.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def written(w):
        for site in ("layers.0.weight", "layers.0.bias"):
            pyro.sample(site, dist.Normal(0.0, 2.0).expand(w[site].shape).to_event(w[site].dim()), obs=w[site])
        f = (x[:, :3] @ w["layers.0.weight"].T + w["layers.0.bias"])[:, 0]
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Poisson(schema.y_shift * f.exp() * hours / hours.mean()), obs=y)

    values = [{k: v[s] for k, v in log_joint.sites(u).items()} for s in range(3)]
    expected = torch.stack([poutine.trace(written).get_trace(w).log_prob_sum() for w in values]).double()
    torch.testing.assert_close(log_joint.log_density(u), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("variant", ["mean-field", "hidden-layer"])
def test_twice_the_exposure_is_twice_the_mean(variant):
    table = visits()
    data = bp.dataset(table.drop(columns="hours"), "count", task="counts", exposure=table["hours"].tolist(), seed=0)
    method = bp.SVI(epochs=400, lr=0.02)
    posterior = bp.fit(bp.ZOO[variant](hidden=(4,)), data, method, progress=False, device="cpu")
    new = pd.DataFrame({"city": "Oslo", "x": [0.0, 0.0, 0.5], "exposure": [1.0, 2.0, 1.0]})
    mean = bp.predict(posterior, new).mean
    assert mean[1] / mean[0] == pytest.approx(2, rel=1e-5)
    assert mean[0] == pytest.approx(np.e, rel=0.15) and mean[2] / mean[0] == pytest.approx(np.exp(0.15), rel=0.1)


def test_nuts_of_an_intercept_is_the_gamma_of_the_rate():
    """With a wide prior the posterior of the rate is Gamma(Σy, Σ exposure), in closed form."""
    table = visits(40).assign(count=lambda t: np.random.default_rng(1).poisson(0.3 * t["hours"]), x=0.0)
    options = dict(task="counts", exposure="hours", split=0, validation=0)
    data = bp.dataset(table[["x", "hours", "count"]], "count", **options)
    entry = bp.MeanField(hidden=(), prior="normal:30", likelihood="poisson")
    posterior = bp.fit(entry, data, bp.NUTS(chains=2, warmup=200, draws=500), progress=False, device="cpu")
    rate = bp.predict(posterior, pd.DataFrame({"x": [0.0], "hours": [1.0]}), num_draws=1000).components.mean[:, 0]
    exact = stats.gamma(table["count"].sum(), scale=1 / table["hours"].sum())
    assert abs(rate.mean().item() - exact.mean()) < 5 * exact.std() / np.sqrt(200)
    assert rate.std().item() == pytest.approx(exact.std(), rel=0.2)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"exposure": "hour"}, "unknown column of X .exposure=. 'hour'; did you mean 'hours'"),
        ({}, {"exposure": "hours", "task": "regression"}, "exposure .--exposure. is for counts, and the task is regr"),
        ({"hours": 0.0}, {"exposure": "hours"}, "column 'hours', row 0: 0.0 is no exposure, which is positive"),
        (
            {"hours": np.r_[np.nan, np.ones(119)]},
            {"exposure": "hours", "missing": "indicator"},
            "column 'hours', row 0",
        ),
        ({}, {"exposure": [1.0, 2.0]}, "exposure has 2 values, and X 120 rows"),
        ({}, {"exposure": 3.0}, "exposure has 1 values, and X 120 rows"),
        ({}, {"task": "survival"}, "no likelihood here takes censored times"),
        ({"count": -1}, {"exposure": "hours"}, "row 0: -1.0 is no count"),
    ],
)
def test_exposures_that_are_refused(change, options, message):
    with pytest.raises(bp.UserError, match=message):
        bp.dataset(visits().assign(**change), "count", **{"task": "counts", **options})


def test_other_variants_and_rows_refuse_an_exposure():
    data = bp.dataset(visits(), "count", task="counts", exposure="hours")
    with isolated(0):
        module = torch.nn.Linear(4, 1)
    for entry, name in ((bp.LastLayer(), "last-layer"), (module, "my-network")):
        with pytest.raises(bp.UserError, match=f"{name} takes no exposure"):
            bp.fit(entry, data, progress=False)
    with pytest.raises(bp.UserError, match="no column 'hours', which this model needs"):
        bp.load_inputs(visits().drop(columns="hours"), data.schema)
    assert bp.Schema.from_dict(json.loads(json.dumps(data.schema.to_dict()))) == data.schema


# -- are predicted counts right? ---------------------------------------------------------------------------------------
def mixture(num=4000, wrong=False):
    """Five draws of negative binomials, and y from the same mixture; or predicted by Poissons of the same means."""
    rng = np.random.default_rng(0)
    means, r = rng.uniform(0.5, 6, (5, num)), 1.5
    rows = np.arange(num)
    y = rng.negative_binomial(r, r / (r + means[rng.integers(5, size=num), rows]))
    if wrong:
        return bp.Prediction(dist.Poisson(torch.from_numpy(means))), y
    logits = torch.from_numpy(np.log(means / r))
    return bp.Prediction(dist.NegativeBinomial(torch.full_like(logits, r), logits=logits)), y


def test_the_randomised_pit_is_uniform_where_the_model_is_right_and_only_there():
    prediction, y = mixture()
    pit = bp.metrics.pit(prediction, y, seed=0)  # also where the data were simulated from that seed
    assert stats.kstest(pit, "uniform").pvalue > 0.01
    assert stats.chisquare(np.histogram(pit, 20, (0, 1))[0]).pvalue > 0.001
    assert stats.kstest(bp.metrics.pit(prediction, y), "uniform").pvalue < 1e-6  # without it there are steps
    wrong, y = mixture(wrong=True)
    assert stats.kstest(bp.metrics.pit(wrong, y, seed=1), "uniform").pvalue < 1e-6


def test_the_rootogram_hangs_from_what_is_expected():
    prediction, y = mixture()
    ax = bp.plots.rootogram(prediction, y)
    k = np.arange(int(y.max()) + 1)
    pmf = torch.stack([prediction.log_prob(torch.full((len(y),), float(value))).exp().sum() for value in k]).numpy()
    observed = np.bincount(y, minlength=len(k))
    bars = np.array([(bar.get_y(), bar.get_height()) for bar in ax.patches])
    np.testing.assert_allclose(bars[:, 1], np.sqrt(observed), rtol=1e-6)
    np.testing.assert_allclose(bars.sum(1), np.sqrt(pmf), rtol=1e-4)
    outside = [int(bp.plots.rootogram(*mixture(wrong=wrong)).get_title().split()[0]) for wrong in (False, True)]
    assert outside[0] <= 4 and outside[1] >= 10  # of 30 to 40 bars, 5 % by chance
    wide = bp.plots.rootogram(prediction, 10 * y)
    assert len(wide.patches) <= 51
    with pytest.raises(bp.UserError, match="a rootogram is for counts"):
        bp.plots.rootogram(bp.Prediction(dist.Normal(torch.zeros(1, 3), 1.0)), [1, 2, 3])


def test_commands_take_an_exposure(tmp_path, capsys):
    table = visits()
    table.to_csv(tmp_path / "visits.csv", index=False)
    file, run, predictions = (str(tmp_path / name) for name in ("visits.csv", "run", "p.csv"))
    data = ["--data", file, "--target", "count", "--task", "counts", "--exposure", "hours"]
    train = ["train", "hidden-layer", *data, "--epochs", "200", "--num-draws", "20", "--device", "cpu", "--quiet"]
    assert main([*train, "--out", run]) == 0
    assert (tmp_path / "run/figures/rootogram.png").is_file()
    table.assign(hours=2 * table["hours"]).to_csv(tmp_path / "twice.csv", index=False)
    means = []
    for name in ("visits.csv", "twice.csv"):
        command = ["predict", run, "--input", str(tmp_path / name), "--output", predictions, "--quiet", "--overwrite"]
        assert main(command) == 0
        means.append(pd.read_csv(predictions)["mean"])
    np.testing.assert_allclose(means[1], 2 * means[0], rtol=1e-4)
    bad = table.assign(hours=table["hours"].where(table.index != 3, -1.0))
    bad.to_csv(tmp_path / "bad.csv", index=False)
    command[3] = str(tmp_path / "bad.csv")
    assert main(command) == 2 and "row 5: -1.0 is no exposure" in capsys.readouterr().err
    assert main([*command, "--on-bad-row", "skip"]) == 0 and len(pd.read_csv(predictions)) == len(table) - 1
