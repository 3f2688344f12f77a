"""The way to ArviZ: every posterior of the zoo, dimensions with their names, and files that read back equal."""

import errno
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from importlib.metadata import version
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import xarray
from test_diagnostics_verdicts import DATA, exact, guided, sound
from zoo_problems import problem, quick

import bnn_pyro as bp
from bnn_pyro.diagnostics import conversion, diagnose, leave_one_out, load_netcdf, save_netcdf, to_arviz
from bnn_pyro.zoo import ZOO

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
    ("hidden-layer", "svi", "binary"),
    ("variational-dropout", "svi", "fixed noise"),
    ("sparse-dropout", "svi", "multiclass"),
    ("bayesian-convnet", "svi", "multiclass"),
    ("last-layer", "laplace", "learned noise"),
    ("mlp", "ensemble", "heteroscedastic"),
    ("mlp", "mle", "learned noise"),
    ("convnet", "map", "binary"),
    ("dropout-mlp", "mc-dropout", "multiclass"),
    ("my-network", "svi", "binary"),
]


def test_every_variant_is_among_the_cases():
    assert {name for name, _, _ in CASES} == set(ZOO)


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
    sampled = any(tuple(v.shape) == shape for v in posterior.stats.values()) and posterior.chains is not None
    assert ("sample_stats" in found) == sampled
    attrs = found["posterior"].attrs
    assert attrs == found["log_likelihood"].attrs == dict(tree.attrs)
    assert (attrs["method"], attrs["entry"], attrs["temperature"]) == (method, name, 1)
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
    shown = found["predictions"]["probability" if classes else "mean"]
    assert shown.shape == (*shape, 7, *((len(classes),) if classes else ()))
    assert not classes or shown.coords["class"].values.tolist() == list(classes)
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
    x, y = torch.randn(6, 2, generator=g), torch.arange(6) % 3
    data = bp.Dataset("by-hand", schema, x, y, x[:0], y[:0], x[:0], y[:0])
    found = groups(to_arviz(bp.Posterior(model, schema, chains=chains), data))
    weight = found["posterior"]["layers.0.weight"]
    assert weight.dims == ("chain", "draw", "layers.0.out", "layers.0.in")
    assert weight.coords["layers.0.in"].values.tolist() == ["length", "links"]
    assert found["posterior"]["layers.1.bias"].coords["layers.1.out"].values.tolist() == ["ham", "spam", "other"]
    assert found["posterior"]["layers.1.weight"].coords["layers.1.in"].values.tolist() == [0, 1, 2, 3]
    assert found["constant_data"]["x"].coords["feature"].values.tolist() == ["length", "links"]
    assert "predictions" not in found  # no test rows
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
    noisy = replace(exact(), stats={"log_joint": torch.ones(4, 500)})
    assert (groups(to_arviz(noisy, DATA))["sample_stats"]["lp"] == 1).all()


def test_arviz_takes_it():
    """Its own leave-one-out is ours; its summary lists every weight by name."""
    tree = to_arviz(exact(), DATA)
    theirs, ours = arviz.loo(tree, reff=1.0, pointwise=True), leave_one_out(exact(), DATA)
    total = theirs.elpd_loo if OLD else theirs.elpd
    assert float(total) == pytest.approx(ours.elpd.sum(), abs=0.02)
    assert np.asarray(theirs.pareto_k) == pytest.approx(ours.pareto_k, abs=0.1)
    table = arviz.summary(tree, kind="stats")
    assert len(table) == 5 and any("layers.0.weight" in name for name in table.index)


def test_draws_and_chains():
    whole = groups(to_arviz(exact(), DATA))["posterior"]
    assert dict(whole.sizes)["chain"] == 4 and dict(whole.sizes)["draw"] == 500
    tree = to_arviz(exact(), DATA, num_draws=400)
    thin = groups(tree)["posterior"]
    assert thin.coords["draw"].values.tolist() == list(range(0, 500, 5))
    assert np.array_equal(thin["layers.0.bias"], whole["layers.0.bias"][:, ::5])
    assert "400 of each chain's 500 draws" in thin.attrs["left_out"]
    assert groups(tree)["sample_stats"].sizes["draw"] == 100
    for most, draws in {1: 1, 24: 6, 1999: 250}.items():
        assert groups(to_arviz(exact(), DATA, num_draws=most))["posterior"].sizes["draw"] == draws
    drawn = groups(to_arviz(guided(1.0), DATA, num_draws=30))["posterior"]
    assert dict(drawn.sizes)["chain"] == 1 and dict(drawn.sizes)["draw"] == 30 and "independent" in drawn.attrs["draws"]
    assert groups(to_arviz(guided(1.0), DATA))["posterior"].sizes["draw"] == 1000
    with pytest.raises(bp.UserError, match="at least 1"):
        to_arviz(exact(), DATA, num_draws=0)


def test_memory_is_bounded(monkeypatch):
    """Draws, rows and large sites are left out, and said to be."""
    monkeypatch.setattr(conversion, "NUMBERS", 2000 * 6)
    found = groups(to_arviz(exact(), DATA))
    assert found["posterior"].sizes["draw"] == 30
    assert found["posterior"].attrs["left_out"] == "470 of each chain's 500 draws (evenly thinned)"
    found = groups(to_arviz(exact(), DATA, num_draws=2000))
    assert all(v.size <= 12_000 for dataset in found.values() for v in dataset.values())
    assert found["posterior"].attrs["left_out"] == "54 of 60 training rows (evenly chosen)"
    rows = found["observed_data"].coords["observation"].values
    assert rows.tolist() == np.linspace(0, 59, 6).round().tolist()
    assert np.array_equal(found["observed_data"]["y"], DATA.y_train.numpy()[rows])
    monkeypatch.setattr(conversion, "NUMBERS", 2000 * 4)
    small = groups(to_arviz(exact(), DATA, num_draws=2000))["posterior"]
    assert list(small) == ["layers.0.bias"] and "layers.0.weight (8,000 numbers)" in small.attrs["left_out"]


def test_a_broken_draw_is_said():
    found = groups(to_arviz(exact(lambda unit: unit.index_fill(1, torch.tensor([10]), torch.nan)), DATA))
    assert "posterior_predictive" not in found and "not finite" in found["posterior"].attrs["left_out"]


# -- files ---------------------------------------------------------------------------------------------------------
def test_files_that_cannot_be_written(tmp_path, monkeypatch):
    tree, path = to_arviz(exact(), DATA, num_draws=40), tmp_path / "posterior.nc"
    save_netcdf(tree, str(path))
    before = path.read_bytes()
    with pytest.raises(bp.UserError, match=r"could not be written \(Is a directory\)"):
        save_netcdf(tree, tmp_path)
    with pytest.raises(bp.UserError, match=r"nowhere.*could not be written \(No such file or directory\)"):
        save_netcdf(tree, tmp_path / "nowhere" / "posterior.nc")
    if os.path.isdir("/proc/self"):
        with pytest.raises(bp.UserError, match=r"could not be written"):
            save_netcdf(tree, "/proc/self/posterior.nc")

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    words = r"posterior\.nc could not be written \(No space left on device\).*make room"
    for fault, seen, match in ((full, bp.UserError, words), (KeyboardInterrupt(), KeyboardInterrupt, None)):
        monkeypatch.setattr(os, "fsync", Mock(side_effect=fault))
        with pytest.raises(seen, match=match):
            save_netcdf(tree, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "posterior.nc"
    with pytest.raises(bp.UserError, match=r"posterior\.nc: no such file"):
        load_netcdf(path)
    save_netcdf(to_arviz(exact(), DATA, num_draws=40), path)
    for content in (b"something else", path.read_bytes()[:-5000]):
        path.write_bytes(content)
        with pytest.raises(bp.UserError, match=r"is not a whole netCDF file"):
            load_netcdf(path)


def test_importing_arviz_raises_no_warning(tmp_path):
    """0.23 announces 1.0 once a day, for each user's cache: with a fresh one, and warnings as errors."""
    code = (
        "from bnn_pyro.diagnostics.importance import psis; import numpy as np\n"
        "from bnn_pyro.diagnostics.conversion import _as_arviz\n"
        "psis(np.random.default_rng(0).standard_normal((1, 100)))\n"
        "_as_arviz({'posterior': {'w': (('chain', 'draw'), np.zeros((1, 2)))}}, {}, {})"
    )
    settings = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    strict = [sys.executable, "-W", "error", "-W", "ignore:.*torch.jit.*", "-c", code]
    done = subprocess.run(strict, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
