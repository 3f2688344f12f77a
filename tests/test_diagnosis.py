"""A run is diagnosed: files, verdicts in words, rankings of several runs; posteriors as ArviZ has them."""

import errno
import json
import math
import shutil
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import xarray
from conjugate import dataset, model_of
from refused import refuses
from test_diagnostics_verdicts import DATA, arviz, exact, guided, sound
from zoo_problems import problem, quick

import bnn_pyro as bp
from bnn_pyro.diagnostics import conversion, diagnose, leave_one_out, save_netcdf, to_arviz
from bnn_pyro.diagnostics.importance import Loo
from bnn_pyro.reports import read_texts
from bnn_pyro.reports.ranking import ranked
from bnn_pyro.run import main
from bnn_pyro.runs import compare as comparison
from bnn_pyro.runs.diagnose import FIGURES
from bnn_pyro.runs.folder import RunFolder

FEATURES = ["--data", "breast-cancer", "--features", "mean radius,mean texture"]
KNOWN = {key for table in read_texts("statistics")["tables"] for key in table["statistics"]} | {"nested"}
SMALL = ["--hidden", "2", "--epochs", "2", "--num-draws", "8", "--device", "cpu", "--quiet"]


def chains(posterior, num=4, draws=500, shift=0.0):
    """Independent draws around one network, as if of a sampler; chain 0 sits ``shift`` away from the others."""
    generator, sites = torch.Generator().manual_seed(1), {}
    for site, value in posterior.model.initial.items():
        sites[site] = value + 0.1 * torch.randn(num, draws, *value.shape, generator=generator)
        sites[site][0] += shift
    energy = 30 + torch.randn(num, draws, generator=generator, dtype=torch.float64)
    stats = {"lp": -energy, "energy": energy, "diverging": 0 * energy, "acceptance_rate": 0.8 + 0 * energy}
    return replace(posterior, guide=None, chains=sites, stats=stats, trace={})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs: variational with its baseline, and that with chains in its place which agree, or do not."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bnn_pyro.runs.evaluate.draw_all", lambda scene, folder: [])
        assert main(["train", "mean-field", *FEATURES, *SMALL, "--out", str(folder / "svi")]) == 0
    posterior = bp.load(folder / "svi")
    for name, options in {"good": {}, "bad": {"shift": 2.0}, "few": {"draws": 3}}.items():
        shutil.copytree(folder / "svi", folder / name)
        chains(posterior, **options).save(folder / name)
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "runs")


def written(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_diagnose_writes_what_the_library_finds(runs, command, monkeypatch):
    folder = runs / "good"
    before = written(folder)
    text = command("diagnose", folder)
    new = written(folder) - before
    figures = {name for name in new if name.startswith("figures/diagnose-")}
    assert new - figures == {"diagnosis.json", "diagnosis.html", "posterior.nc"}
    wanted = ("convergence", "outputs", "log-joint", "pareto-k", "loo-pit", "replicated", "weights")
    assert {f"figures/diagnose-{name}.png" for name in wanted} <= figures
    html = (folder / "diagnosis.html").read_text()
    found = bp.diagnostics.diagnose(bp.load(folder), RunFolder(folder).recipe.load())
    assert found.level == "good" and text.split("draws\n\n")[1].startswith("Good")
    for verdict in found.verdicts:
        assert " ".join(verdict.sentence.split()) in " ".join(text.split()), "the terminal has every verdict"
        assert verdict.sentence.split()[0] in html and verdict.about in html
    assert html.count("data:image/png;base64,iVBOR") == len(figures) and 'src="http' not in html
    kept, plain = json.loads((folder / "diagnosis.json").read_text()), found.to_dict()
    assert kept["verdicts"] == plain["verdicts"] and kept["statistics"] == pytest.approx(plain["statistics"])
    assert f"{found.statistics['rhat_max']:.3f}" in text and f"{found.statistics['rhat_max']:.3f}" in html
    (folder / "figures" / "mine.png").write_bytes(b"mine")
    monkeypatch.setattr("bnn_pyro.runs.diagnose.draw_diagnosis", lambda *args: [])
    command("diagnose", folder, "--no-netcdf")
    assert [p.name for p in (folder / "figures").iterdir()] == ["mine.png"], "figures that no longer apply are removed"


@pytest.mark.usefixtures("no_figures")
def test_out_leaves_the_run_as_it_was_and_a_missing_netcdf_file_costs_nothing_else(runs, tmp_path, command):
    before, out = written(runs), tmp_path / "elsewhere" / "diagnosis"
    command("diagnose", runs / "good", "--out", out)
    assert written(runs) == before
    assert written(out) == {"diagnosis.json", "diagnosis.html", "posterior.nc"}
    (runs / "good" / "posterior.nc").mkdir()
    assert "everything else was written: " in command("diagnose", runs / "good", code=2)
    assert "R-hat" in (runs / "good" / "diagnosis.html").read_text()


@pytest.mark.usefixtures("no_figures")
def test_evaluate_says_whether_the_chains_have_converged(runs, command):
    (runs / "svi" / "convergence.json").write_text("{}")
    for name in ("good", "bad", "svi"):
        text, html = command("evaluate", runs / name), (runs / name / "report.html").read_text()
        assert (runs / name / "convergence.json").exists() == (name != "svi")
        for page in (text, html, (runs / name / "README.md").read_text()):
            assert ("Not converged" in page) == (name == "bad")
        assert ("The chains agree" in html) == (name == "good")


def test_a_ranking_is_paired_with_the_best():
    a, b, c = np.array([-1.0, -2.0, -3.0, -4.0]), np.array([-1.5, -2.5, -3.5, -4.5]), np.array([-1.0, -2.0, -2.0, -5.5])
    best, second, third = ranked({"b": b, "a": a, "c": c}, {"c": "a note"}).itertuples()
    assert (best.Index, second.Index, third.Index) == ("a", "c", "b")
    assert (best.density, best.difference, best.its_error, best.note) == (-10, 0, 0, "")
    assert best.se == pytest.approx(math.sqrt(4 * 5 / 3))
    # c − a = (0, 0, 1, −1.5): sum −0.5, variance (1 + 2.25 − 4 · 0.125²) / 3
    assert second.difference == -0.5 and second.its_error == pytest.approx(math.sqrt(4 * (3.25 - 0.0625) / 3))
    assert second.note == "no clear difference; a note"
    assert (third.difference, third.its_error, third.note) == (-2, 0, "worse"), "by half a nat on every row"
    clear = ranked({"a": a, "d": a - np.arange(4.0)}).loc["d"]  # by more than two standard errors
    assert clear.note == "worse" and -2.4 < clear.difference / clear.its_error < -2.3


def test_loo_is_compared_on_the_rows_that_all_have():
    def loo(rows, elpd, k):
        return Loo(*map(np.array, (rows, elpd, np.zeros(len(rows)), k, np.zeros(len(rows)))))

    a, b = loo([0, 1, 2], [-1.0, -1.0, -9.0], [0.1, 0.1, 0.9]), loo([0, 1, 3], [-2.0, -3.0, 0.0], [0.1, 0.8, 0.1])
    ranking = comparison._loo_ranking({"a": a, "b": b, "c": "why"}, 10)
    assert ranking.title.endswith("2 of 10 training rows") and ranking.notes == ["c: why"]
    assert ranking.table["log density, nats"].to_dict() == {"a": "-2.0", "b": "-5.0"}
    assert ranking.table[""]["a"] == "" and ranking.table[""]["b"].endswith("1 row with k above 0.7")
    # Where all draws rule a label out its PIT is not a number: there is no figure, and the rest stands.
    assert FIGURES["loo-pit"]({"loo_pit": np.array([0.2, math.nan])}) is None
    assert FIGURES["loo-pit"]({"loo_pit": np.linspace(0, 1, 20)}) is not None


def test_an_approximation_is_left_out_where_its_weights_fail_and_other_rows_always(runs):
    posterior, data = bp.load(runs / "svi"), RunFolder(runs / "svi").recipe.load()
    whole = bp.diagnostics.diagnose(posterior, data)
    assert {"khat"} <= set(whole.statistics) <= KNOWN
    other = bp.load_data("breast-cancer", limit=50, features=["mean radius"])
    several = bp.dataset(np.eye(40)[:, :2], np.eye(40)[:, 1:3] + np.arange(40.0)[:, None])
    for own, truth, words in (
        (data, data, f"its k-hat is {whole.statistics['khat']:.2f}, above 0.7"),
        (data, other, "other rows"),
        (several, several, "several targets"),
    ):
        assert words in comparison._left_out(posterior, own, truth)
    assert "no chains" in comparison._left_out(bp.load(runs / "svi" / "baseline"), data, data)


# -- the way to ArviZ: every posterior of the zoo, dimensions with their names, files that read back equal ------------
GROUPS = {"posterior", "log_likelihood", "posterior_predictive", "observed_data", "constant_data", "predictions"}


def groups(tree):
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
    assert set(found) - {"sample_stats"} == GROUPS | (set() if improper else {"prior", "prior_predictive"})
    attrs = dict(tree.attrs)
    assert attrs == found["posterior"].attrs and (attrs["method"], attrs["entry"]) == (method, name)
    assert attrs["approximate"] == ("no" if method in ("nuts", "hmc", "sghmc") else "yes")
    assert ("prior" in attrs["left_out"]) == improper
    # The draws of the weights are those of the predictions, in target units, row by row.
    weights = {site: torch.from_numpy(v.values) for site, v in found["posterior"].data_vars.items()}
    assert {s: tuple(w.shape) for s, w in weights.items()} == {s: (*shape, *v.shape) for s, v in initial.items()}
    same = replace(posterior, guide=None, chains={s: w.flatten(0, 1)[None] for s, w in weights.items()}, stats={})
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
    again = groups(getattr(arviz, "from_netcdf", xarray.open_datatree)(tmp_path / "posterior.nc"))
    assert again.keys() == found.keys() and all(again[group].identical(found[group]) for group in found)
    sound(diagnose(posterior, data))


def test_two_outputs_for_two_classes_are_diagnosed_as_the_one_of_their_difference_is():
    schema, generator = bp.Schema("classification", (2,), ("a", "b")), torch.Generator().manual_seed(0)
    data = dataset(torch.randn(6, 2, generator=generator), torch.arange(6) % 2, schema)
    pooled = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    with bp.isolated(seed=0):
        conv = torch.nn.ConvTranspose2d(1, 2, 1)  # its weight is (in, out, height, width)
        nets = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 1, 2)), conv, pooled), torch.nn.Linear(2, 1)
    sizes = {"1.weight": (1, 2, 1, 1), "1.bias": (2,)}
    draws = {site: torch.randn(2, 50, *size, generator=generator) for site, size in sizes.items()}
    mean = draws["1.weight"][..., 0, 0].diff(dim=-1) / 2
    less = {"weight": mean.expand(2, 50, 1, 2), "bias": draws["1.bias"].diff(dim=-1)}
    pairs = zip(nets, (draws, less), strict=True)
    both = [bp.Posterior(model_of(bp.Bayesian(net), schema), schema, chains=chains) for net, chains in pairs]
    two, one = (diagnose(posterior, data).series for posterior in both)
    for key in ("outputs", "rhat", "ess_bulk"):
        np.testing.assert_allclose(two[key], one[key], rtol=1e-4, atol=1e-5)
    found = groups(to_arviz(both[0], data))["posterior"]
    assert found["1.bias"].shape == (2, 50, 2) and found["1.weight"].shape == (2, 50, 1, 2, 1, 1)


def test_names_of_dimensions_and_of_statistics():
    schema = bp.Schema("classification", (2,), ("ham", "spam", "other"), ("length", "links"))
    model = model_of(bp.MeanField(hidden=(4,)), schema)
    g = torch.Generator().manual_seed(0)
    chains = {site: torch.randn(2, 5, *value.shape, generator=g) for site, value in model.initial.items()}
    data = dataset(torch.randn(6, 2, generator=g), torch.arange(6) % 3, schema)
    found = groups(to_arviz(bp.Posterior(model, schema, chains=chains), data))
    weight, out = (found["posterior"][site] for site in ("layers.0.weight", "layers.1.bias"))
    assert weight.dims == ("chain", "draw", "layers.0.out", "layers.0.in") and "predictions" not in found
    assert out.coords["layers.1.out"].values.tolist() == ["ham", "spam", "other"]
    assert np.array_equal(weight.sel({"layers.0.in": "links"}), chains["layers.0.weight"][..., 1].numpy())
    # Statistics of the sampler have ArviZ's names.
    steps, depth = torch.full((4, 500), 7.0, dtype=torch.float64), torch.full((4, 500), 3.0)
    diverging = torch.zeros(4, 500).index_fill(1, torch.tensor([3]), 1.0)
    stats = dict(diverging=diverging, n_steps=steps, tree_depth=depth, log_evidence=torch.zeros(1, 1))
    found = groups(to_arviz(exact(stats=stats, method_settings={"max_tree_depth": 3}), DATA))["sample_stats"]
    assert found["diverging"].dtype == bool and found["diverging"].sum() == 4
    assert found["n_steps"].dtype == np.int64 and found["reached_max_treedepth"].all()
    assert set(found) == {"diverging", "n_steps", "tree_depth", "reached_max_treedepth", "lp", "energy"}


def test_arviz_takes_it_draws_are_thinned_and_what_is_left_out_is_said(monkeypatch):
    def found(posterior=None, **options):
        return groups(to_arviz(posterior or exact(), DATA, **options))

    theirs, ours = arviz.loo(to_arviz(exact(), DATA), reff=1.0, pointwise=True), leave_one_out(exact(), DATA)
    elpd = theirs.elpd_loo if hasattr(theirs, "elpd_loo") else theirs.elpd
    assert float(elpd) == pytest.approx(ours.elpd.sum(), abs=0.02)
    assert np.asarray(theirs.pareto_k) == pytest.approx(ours.pareto_k, abs=0.1)
    whole, thin = found()["posterior"], found(num_draws=400)
    assert thin["posterior"].coords["draw"].values.tolist() == list(range(0, 500, 5))
    assert np.array_equal(thin["posterior"]["layers.0.bias"], whole["layers.0.bias"][:, ::5])
    assert "400 of each chain's 500 draws" in thin["posterior"].attrs["left_out"]
    assert thin["sample_stats"].sizes["draw"] == 100
    drawn = found(guided(1.0), num_draws=30)["posterior"]
    assert drawn.sizes["chain"] == 1 and drawn.sizes["draw"] == 30 and "independent" in drawn.attrs["draws"]
    refuses("at least 1", to_arviz, exact(), DATA, num_draws=0)
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


def test_files_that_cannot_be_written(tmp_path, monkeypatch):
    tree, path = to_arviz(exact(), DATA, num_draws=40), tmp_path / "posterior.nc"
    save_netcdf(tree, str(path))
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    refuses(r"could not be written \(No space left on device\).*make room", save_netcdf, tree, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
