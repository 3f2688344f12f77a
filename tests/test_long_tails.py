"""Columns with long tails: which they are, what networks make of them, and posteriors of before."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.datasets.rows import long_tails
from bnn_pyro.errors import UserError
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.parts.nets import MLP
from bnn_pyro.posterior import Posterior
from bnn_pyro.run import main
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.sweep import CHANGED, FINISHED, SweepFolder, make_run
from bnn_pyro.runs.sweep_config import read_sweep_config

RNG = np.random.default_rng(0)
NUM = 400
#: Standard Normal, log-normal, mostly zeros, 0 and 1 (few of them), log-normal.
X = np.stack(
    [
        RNG.normal(size=NUM),
        np.exp(2 * RNG.normal(size=NUM)),
        np.where(RNG.random(NUM) < 0.8, 0.0, np.exp(2 * RNG.normal(size=NUM))),
        (np.arange(NUM) % 100 == 7).astype(float),
        np.exp(2 * RNG.normal(size=NUM)),
    ],
    1,
)
Y = np.log(X[:, 1]) + 0.1 * RNG.normal(size=NUM)
HELD_OUT = np.arange(NUM) % 4 == 0


def data(scale="auto", x=X, y=Y, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bp.dataset(x, y, split=HELD_OUT, scale=scale, seed=0, **how)


def entered(x, schema):
    """Inputs as a network takes them."""
    with bp.isolated(0):
        return MLP(schema.input_shape, (2,), 1, tails=schema.x_tails).enter(x)


def by_hand(column):
    """Its asinh in units of the training rows' spread around their median, standardised; all rows."""
    train = column[data().index_train.numpy()]
    low, middle, high = np.quantile(train, (0.25, 0.5, 0.75))
    away = np.abs(train - middle)
    width = (high - low) / 1.3489795 if high > low else np.median(away[away > 0])
    value, known = (np.arcsinh((v - middle) / width) for v in (column, train))
    return (value - known.mean()) / known.std()


def test_columns_with_long_tails_and_no_others_get_their_asinh():
    made = data()
    assert [tail[0] for tail in made.schema.x_tails] == [1, 2, 4]
    for part in ("train", "val", "test"):
        x = getattr(made, f"x_{part}")
        more = [by_hand(X[:, k])[getattr(made, f"index_{part}").numpy()] for k in (1, 2, 4)]
        expected = torch.cat([x, torch.from_numpy(np.stack(more, 1)).float()], 1)
        torch.testing.assert_close(entered(x, made.schema), expected, rtol=1e-4, atol=1e-4)
    for scale in ("standard", "robust"):
        assert data(scale).schema.x_tails == ()
    torch.testing.assert_close(data("standard").x_train, made.x_train, rtol=0, atol=0)  # the rows stay as they were
    assert data().fingerprint == data("standard").fingerprint
    hours = bp.dataset(X[:, :2], np.arange(NUM) % 5, task="counts", exposure=X[:, 4], split=HELD_OUT)
    assert [tail[0] for tail in hours.schema.x_tails] == [1]  # an exposure multiplies the mean
    assert long_tails(torch.zeros(0, 2), [0, 1]) == ()


@pytest.mark.parametrize("entry", [bp.MLP(hidden=(5,)), bp.MeanField(hidden=(5, 4)), bp.DropoutMLP(hidden=(5,))])
def test_a_network_is_that_of_the_inputs_as_they_are_given_by_hand(entry):
    made = data()
    with bp.isolated(0):
        model, linear = entry.model(made.schema), type(entry)(hidden=()).model(made.schema)
    plain = nn.Module.__new__(type(model.net))
    plain.__dict__ = {**model.net.__dict__, "tails": ()}
    x = entered(made.x_test, made.schema)
    torch.testing.assert_close(model.net(made.x_test), plain(x), rtol=0, atol=0)
    assert linear.net.tails == ()  # a linear model is one of the inputs themselves


@pytest.mark.parametrize("name", ["hidden-layer", "variational-dropout"])
def test_layers_that_sample_activations_take_the_same(name):
    made, entry = data(), bp.ZOO[name](hidden=(4,), init_scale=1e-4)
    with bp.isolated(0):
        model = entry.model(made.schema)
        guide = entry.guide(model)
    posterior = Posterior(model, made.schema, guide=guide)
    seen = bp.predict(posterior, made.x_test, num_draws=4, seed=0).mean
    with torch.no_grad():
        point = model.net(made.x_test)[:, 0] * made.schema.y_scale + made.schema.y_shift
    assert (seen - point).abs().max() < 0.15 * point.std()


def test_compiled_code_has_them():
    made = data()
    how = dict(warmup=30, thin=2, draws=5, chains=2, epochs=3, cores=1)
    ways = (bp.MILE(**how, compiled=word) for word in ("yes", "no"))
    fits = [bp.fit(bp.MeanField(hidden=(4,)), made, method, seed=0, progress=False) for method in ways]
    joint = LogJoint(fits[0].model, made.x_train, made.y_train)
    for fit in fits:
        u = joint.flat({site: w.flatten(0, 1) for site, w in fit.chains.items()})
        expected = joint.log_density(u).detach().view(2, 5).numpy()
        np.testing.assert_allclose(np.asarray(fit.stats["lp"]), expected, rtol=1e-4)


def test_a_logarithm_is_learned_from_few_rows_where_it_was_not():
    nll = {}
    for scale in ("standard", "auto"):
        made = data(scale, X[:, 1:2])
        fit = bp.fit(bp.MLP(hidden=(20,)), made, bp.MAP(epochs=100, patience=0), seed=0, progress=False)
        nll[scale] = float(bp.metrics.nll(bp.predict(fit, made.x_test), made.y_test))
    assert nll["auto"] < nll["standard"] - 0.15


def test_schemas_and_posteriors_of_before_have_none(tmp_path):
    made = data()
    schema = made.schema.from_dict(json.loads(json.dumps(made.schema.to_dict())))
    assert schema == made.schema and "x_tails" not in data("standard").schema.to_dict()
    before = bp.fit(bp.MLP(hidden=(4,)), data("standard"), bp.MAP(epochs=2, patience=0), progress=False, out=tmp_path)
    loaded = bp.load(tmp_path)
    assert loaded.schema.x_tails == () and loaded.model.net.tails == ()
    expected = bp.predict(before, made.x_test).mean
    torch.testing.assert_close(bp.predict(loaded, made.x_test).mean, expected, rtol=0, atol=0)
    # What was finished is loaded again, whatever a fit would do now.
    again = bp.fit(bp.MLP(hidden=(4,)), made, bp.MAP(epochs=2, patience=0), progress=False, out=tmp_path, resume=True)
    torch.testing.assert_close(bp.predict(again, made.x_test).mean, expected, rtol=0, atol=0)
    new = bp.fit(bp.MLP(hidden=(4,)), made, bp.MAP(epochs=2, patience=0), progress=False, out=tmp_path / "new")
    assert bp.load(tmp_path / "new").model.net.tails == made.schema.x_tails == new.schema.x_tails
    assert new.provenance["asinh_beside"] == "x2, x3, x5" and "beside them: x2, x3, x5\n" in repr(made)
    assert "asinh_beside" not in before.provenance


def test_a_fit_begun_without_them_does_not_go_on_with_them(tmp_path, monkeypatch):
    how = dict(progress=False, out=tmp_path)
    monkeypatch.setattr(Checkpoint, "stop", property(lambda self: True))
    with pytest.raises(Interrupted):
        bp.fit(bp.MLP(hidden=(4,)), data("standard"), bp.MAP(epochs=50), **how)
    monkeypatch.undo()
    with pytest.raises(UserError, match="other settings"):
        bp.fit(bp.MLP(hidden=(4,)), data(), bp.MAP(epochs=50), **how, resume=True)
    assert bp.fit(bp.MLP(hidden=(4,)), data("standard"), bp.MAP(epochs=50), **how, resume=True).trace


def test_runs_of_before_go_on_as_they_were_begun_and_new_ones_say_their_scale(tmp_path):
    table, out = tmp_path / "t.csv", tmp_path / "run"
    pd.DataFrame(X[:, :2], columns=["a", "b"]).assign(y=Y).to_csv(table, index=False)
    options = ["--epochs", "90", "--set", "patience=0", "--no-baseline", "--quiet"]
    train = ["train", "mlp", "--data", str(table), "--target", "y", *options]
    assert not main([*train, "--scale", "standard", "--out", str(out)])
    config = json.loads((out / "config.json").read_text())
    assert config["data"].pop("scale") == "standard"
    (out / "config.json").write_text(json.dumps(config))  # as it was written before
    (out / "posterior.json").unlink()  # cut off
    assert not main(["train", "--resume", "--out", str(out)]) and bp.load(out).schema.x_tails == ()
    assert not main(["evaluate", str(out), "--data", str(table)])
    assert not main([*train, "--out", str(tmp_path / "new")])
    assert RunFolder(tmp_path / "new").recipe.data["scale"] == "auto"
    assert [tail[0] for tail in bp.load(tmp_path / "new").schema.x_tails] == [1]
    sweep = f"data = {{ t = {{ name = '{table}', target = 'y' }} }}\n[recipes.mlp]\nvariant = 'mlp'\n"
    (tmp_path / "s.toml").write_text(sweep + "inference_settings = { epochs = 90, patience = 0 }\n")
    (task,) = read_sweep_config(tmp_path / "s.toml").tasks
    folder = SweepFolder(tmp_path / "sweep")
    assert not make_run(task, sweep=folder.path) and folder.status(task)[0] == FINISHED
    path = folder.run(task).path / "config.json"
    path.write_text(path.read_text().replace('"scale": "auto"', '"scale": null'))
    assert folder.status(task) == (CHANGED, "was fitted with scale standard, not auto")


def test_a_start_has_the_network_of_the_posterior_that_it_comes_from():
    before = bp.fit(bp.MLP(hidden=(4,)), data("standard"), bp.MAP(epochs=5, patience=0), progress=False)
    after = bp.fit(bp.MLP(hidden=(4,)), data(), bp.MAP(epochs=1, patience=0, lr=1e-9), start=before, progress=False)
    assert after.schema.x_tails == ()
    torch.testing.assert_close(*(bp.predict(one, data().x_test).mean for one in (before, after)), rtol=1e-4, atol=1e-4)
