"""What every test must leave as it found it: the parameter store, the random generators. Runs that tests share."""

import os
import random
from dataclasses import replace
from functools import partial

import matplotlib
import numpy as np
import pyro.infer
import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.reports.tables import RunFacts
from bnn_pyro.run import main

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # figures are a CPU's, also where there is a GPU; =0 takes it
matplotlib.use("Agg")
torch.set_num_threads(1)  # what is fitted here is so small that threads would only wait for one another


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Nothing is written to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BNN_PYRO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_residue():
    torch.manual_seed(0)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (Pyro seeds this one)
    yield
    assert not dict(pyro.get_param_store()), "the global parameter store was left with parameters in it"
    assert random.getstate() == states[0], "the test moved random's generator"
    now = np.random.get_state()  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(now, states[1], strict=True)), "numpy's generator moved"
    assert torch.equal(torch.get_rng_state(), states[2]), "torch's generator moved: use isolated(seed)"


@pytest.fixture
def seeded():
    """Modules draw their initial weights."""
    with bp.isolated(0):
        yield


#: Where the commands ask whether a fit failed.
JUDGES = ("runs.evaluate", "runs.compare", "runs.predict", "diagnostics.diagnosis")


@pytest.fixture(autouse=True, scope="session")
def unjudged():
    """Fits of a few epochs, which have failed in truth, count as good ones: but in test_failures.py."""
    with pytest.MonkeyPatch.context() as patch:
        for module in JUDGES:
            patch.setattr(f"bnn_pyro.{module}.failure", lambda *args, **how: None)
        judged = RunFacts.exit_code
        patch.setattr(RunFacts, "exit_code", 0)
        yield judged


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("BNN_PYRO_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def command(capsys):
    """Runs a command, which must end with this code, or one of these: what it said."""

    def run(*argv, code=0):
        capsys.readouterr()
        quiet = [] if argv[0] in ("inspect", "list") else ["--quiet"]
        ended, said = main([*map(str, argv), *quiet]), "".join(capsys.readouterr())
        assert ended in np.atleast_1d(code), said
        return said

    return run


@pytest.fixture
def clean_matplotlib():
    """Every figure drawn can be laid out (a layout that fails warns), has labels, and leaves no settings behind."""
    from matplotlib import pyplot

    settings = dict(matplotlib.rcParams)
    yield
    for page in map(pyplot.figure, pyplot.get_fignums()):
        page.draw_without_rendering()
        assert page.get_suptitle() or any(ax.get_xlabel() or ax.get_ylabel() or ax.get_title() for ax in page.axes)
    pyplot.close("all")
    assert dict(matplotlib.rcParams) == settings, "matplotlib's global settings were changed"


def undrawn(patch):
    """No figures are drawn: they take most of the time of a small run."""
    patch.setattr("bnn_pyro.runs.evaluate.draw_all", lambda figures, folder: [])
    patch.setattr("bnn_pyro.runs.diagnose.draw_diagnosis", lambda *args: [])
    patch.setattr("bnn_pyro.runs.compare.draw_scores", lambda *args: [])


@pytest.fixture
def no_figures(monkeypatch):
    undrawn(monkeypatch)


@pytest.fixture(scope="module")
def quick():
    """No figures in all of a module."""
    with pytest.MonkeyPatch.context() as patch:
        yield undrawn(patch)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Two small runs without figures, trained once: digits with its baseline, and a table of houses."""
    from run_folders import MEAN_FIELD, SMALL, small_table

    folder = tmp_path_factory.mktemp("runs")
    table = small_table(folder / "houses.csv")
    with pytest.MonkeyPatch.context() as patch:
        undrawn(patch)
        for name, options in ("digits", ["digits", "--limit", "150"]), ("houses", [str(table), "--target", "price"]):
            assert main([*MEAN_FIELD, "--data", *options, "--out", str(folder / name), *SMALL]) == 0
    return folder


#: Settings of a method, at most, where it is only to run.
FEW = {"epochs": 60, "draws": 12, "warmup": 30, "chains": 3, "max_tree_depth": 2}


@pytest.fixture
def quick_fits(monkeypatch):
    """``bp.fit`` takes few steps and compiles nothing, ``bp.predict`` takes few draws: as if pages said so."""
    fit, predict = bp.fit, bp.predict

    def quick_fit(entry, data, method=None, **settings):
        given = {name: getattr(method, name, None) for name in FEW}
        few = {name: min(FEW[name], value) for name, value in given.items() if value is not None}
        few |= {"compiled": "no"} if hasattr(method, "compiled") else {}
        settings = {"progress": False, "device": "cpu", **settings}
        return fit(entry, data, replace(method, **few) if few else method, **settings)

    def quick_predict(posterior, x, num_draws=20, **settings):
        if not isinstance(posterior, bp.Posterior):  # calibrated by its own draws
            return predict(posterior, x, **settings)
        return predict(posterior, x, num_draws=min(num_draws, 20), **settings)

    short = partial(pyro.infer.NUTS, max_tree_depth=FEW["max_tree_depth"])
    monkeypatch.setattr(pyro.infer, "NUTS", short)
    monkeypatch.setattr(bp, "fit", quick_fit, raising=False)
    monkeypatch.setattr(bp, "predict", quick_predict, raising=False)
