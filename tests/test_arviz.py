"""The way to ArviZ: every posterior of the zoo, dimensions with their names, and files that read back equal."""

import errno
import os
import warnings
from dataclasses import replace
from importlib.metadata import version
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import xarray
from conjugate import dataset
from test_diagnostics_verdicts import DATA, exact, guided, sound
from zoo_problems import problem, quick

import bnn_pyro as bp
from bnn_pyro.diagnostics import conversion, diagnose, leave_one_out, load_netcdf, save_netcdf, to_arviz

with warnings.catch_warnings(action="ignore"):  # 0.23 announces 1.0 once a day
    import arviz

OLD = version("arviz").startswith("0.")
GROUPS = {"posterior", "log_likelihood", "posterior_predictive", "observed_data", "constant_data", "predictions"}
PRIOR = {"prior", "prior_predictive"}


def groups(tree):
    """{name: xarray.Dataset}."""
    if isinstance(tree, xarray.DataTree):
        return {name: node.to_dataset() for name, node in tree.children.items()}
    return {name: tree[name] for name in tree.groups()}


# A variant × method each, with every kind of posterior and every task among them.
CASES = [
    ("mean-field", "svi", "learned noise"),
    ("mean-field", "nuts", "binary"),
    ("mean-field", "sghmc", "multiclass"),
    ("sparse-dropout", "svi", "multiclass"),
    ("bayesian-convnet", "svi", "multiclass"),
    ("last-layer", "laplace", "learned noise"),
    ("mlp", "ensemble", "heteroscedastic"),
    ("mlp", "mle", "learned noise"),
    ("dropout-mlp", "mc-dropout", "multiclass"),
    ("my-network", "svi", "binary"),
]


@pytest.mark.parametrize(("name", "method", "task"), CASES)
def test_every_posterior_of_the_zoo(name, method, task, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "PRIOR_DRAWS", 5)
    entry, data = problem(name, task)
    posterior = bp.fit(entry, data, quick(method), seed=3, progress=False, device="cpu")
    tree = to_arviz(posterior, data, num_draws=50)
    found, classes, initial = groups(tree), data.schema.classes, posterior.model.initial
    shape = (1, 50) if posterior.chains is None else tuple(next(iter(posterior.chains.values())).shape[:2])
    improper = method == "mle" or "-dropout" in name
    assert set(found) - {"sample_stats"} == GROUPS | (set() if improper else PRIOR)
    attrs = dict(tree.attrs)
    assert attrs == found["posterior"].attrs and (attrs["method"], attrs["entry"]) == (method, name)
    assert attrs["approximate"] == ("no" if method in ("nuts", "hmc", "sghmc") else "yes")
    assert ("prior" in attrs["left_out"]) == improper
    # The draws of the weights are those of the predictions, in target units, row by row.
    weights = {site: torch.from_numpy(v.values) for site, v in found["posterior"].data_vars.items()}
    assert {s: tuple(w.shape) for s, w in weights.items()} == {s: (*shape, *v.shape) for s, v in initial.items()}
    one = {site: w.flatten(0, 1)[None] for site, w in weights.items()}
    same = replace(posterior, guide=None, chains=one, stats={})
    prediction = bp.predict(same, data.x_train, num_draws=shape[0] * shape[1])
    y = data.y_train.float() if not classes or task == "binary" else data.y_train
    expected = prediction.components.log_prob(y).reshape(*shape, len(y)).numpy()
    assert found["log_likelihood"]["y"].dims == ("chain", "draw", "observation")
    assert np.allclose(found["log_likelihood"]["y"], expected, rtol=1e-4, atol=1e-4)
    new = found["posterior_predictive"]["y"]
    assert new.shape == expected.shape and (np.isin(new, range(3)).all() or not classes)
    assert np.array_equal(found["observed_data"]["y"], data.y_train) and len(found["constant_data"]["x"]) == 12
    assert found["predictions"]["probability" if classes else "mean"].shape[:3] == (*shape, 7)
    save_netcdf(tree, tmp_path / "posterior.nc")
    again = groups(load_netcdf(tmp_path / "posterior.nc"))
    assert again.keys() == found.keys() and all(again[group].identical(found[group]) for group in found)
    sound(diagnose(posterior, data))


def test_names_of_dimensions():
    schema = bp.Schema("classification", (2,), ("ham", "spam", "other"), ("length", "links"))
    with bp.isolated(0):
        model = bp.MeanField(hidden=(4,)).model(schema)
    g = torch.Generator().manual_seed(0)
    chains = {site: torch.randn(2, 5, *value.shape, generator=g) for site, value in model.initial.items()}
    data = dataset(torch.randn(6, 2, generator=g), torch.arange(6) % 3, schema)
    found = groups(to_arviz(bp.Posterior(model, schema, chains=chains), data))
    weight, out = (found["posterior"][site] for site in ("layers.0.weight", "layers.1.bias"))
    assert weight.dims == ("chain", "draw", "layers.0.out", "layers.0.in") and "predictions" not in found
    assert out.coords["layers.1.out"].values.tolist() == ["ham", "spam", "other"]
    assert np.array_equal(weight.sel({"layers.0.in": "links"}), chains["layers.0.weight"][..., 1].numpy())


def test_statistics_of_the_sampler_have_arviz_s_names():
    steps, depth = torch.full((4, 500), 7.0, dtype=torch.float64), torch.full((4, 500), 3.0)
    diverging = torch.zeros(4, 500).index_fill(1, torch.tensor([3]), 1.0)
    stats = dict(diverging=diverging, n_steps=steps, tree_depth=depth, log_evidence=torch.zeros(1, 1))
    tree = to_arviz(exact(stats=stats, method_settings={"max_tree_depth": 3}), DATA)
    found = groups(tree)["sample_stats"]
    assert found["diverging"].dtype == bool and found["diverging"].sum() == 4
    assert found["n_steps"].dtype == np.int64 and found["reached_max_treedepth"].all()
    assert set(found) == {"diverging", "n_steps", "tree_depth", "reached_max_treedepth", "lp", "energy"}


def test_arviz_takes_it():
    """Its own leave-one-out is ours."""
    theirs, ours = arviz.loo(to_arviz(exact(), DATA), reff=1.0, pointwise=True), leave_one_out(exact(), DATA)
    assert float(theirs.elpd_loo if OLD else theirs.elpd) == pytest.approx(ours.elpd.sum(), abs=0.02)
    assert np.asarray(theirs.pareto_k) == pytest.approx(ours.pareto_k, abs=0.1)


def test_draws_are_thinned_and_what_is_left_out_is_said(monkeypatch):
    """Evenly, as many as are asked for, and draws, rows and large sites by the memory that they may take."""

    def found(posterior=None, **options):
        return groups(to_arviz(posterior or exact(), DATA, **options))

    whole, thin = found()["posterior"], found(num_draws=400)
    assert thin["posterior"].coords["draw"].values.tolist() == list(range(0, 500, 5))
    assert np.array_equal(thin["posterior"]["layers.0.bias"], whole["layers.0.bias"][:, ::5])
    assert "400 of each chain's 500 draws" in thin["posterior"].attrs["left_out"]
    assert thin["sample_stats"].sizes["draw"] == 100
    drawn = found(guided(1.0), num_draws=30)["posterior"]
    assert drawn.sizes["chain"] == 1 and drawn.sizes["draw"] == 30 and "independent" in drawn.attrs["draws"]
    with pytest.raises(bp.UserError, match="at least 1"):
        to_arviz(exact(), DATA, num_draws=0)
    broken = found(exact(lambda unit: unit.index_fill(1, torch.tensor([10]), torch.nan)))
    assert "posterior_predictive" not in broken and "not finite" in broken["posterior"].attrs["left_out"]
    monkeypatch.setattr(conversion, "NUMBERS", 2000 * 6)
    assert found()["posterior"].attrs["left_out"] == "470 of each chain's 500 draws (evenly thinned)"
    bounded = found(num_draws=2000)
    assert all(v.size <= 12_000 for dataset in bounded.values() for v in dataset.values())
    assert bounded["posterior"].attrs["left_out"] == "54 of 60 training rows (evenly chosen)"
    rows = bounded["observed_data"].coords["observation"].values
    assert np.array_equal(bounded["observed_data"]["y"], DATA.y_train.numpy()[rows])
    monkeypatch.setattr(conversion, "NUMBERS", 2000 * 4)
    small = found(num_draws=2000)["posterior"]
    assert list(small) == ["layers.0.bias"] and "layers.0.weight (8,000 numbers)" in small.attrs["left_out"]


def test_files_that_cannot_be_written_or_read(tmp_path, monkeypatch):
    tree, path = to_arviz(exact(), DATA, num_draws=40), tmp_path / "posterior.nc"
    with pytest.raises(bp.UserError, match=r"posterior\.nc: no such file"):
        load_netcdf(path)
    save_netcdf(tree, str(path))
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(bp.UserError, match=r"could not be written \(No space left on device\).*make room"):
        save_netcdf(tree, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    path.write_bytes(before[:-5000])
    with pytest.raises(bp.UserError, match=r"is not a whole netCDF file"):
        load_netcdf(path)
