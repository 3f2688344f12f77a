"""A run is diagnosed: files, verdicts in words, what cannot be written or has no R-hat, rankings of several runs."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch

import bnn_pyro as bp
from bnn_pyro import diagnostics
from bnn_pyro.diagnostics.importance import Loo
from bnn_pyro.reports.page import read_texts
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
    return dataclasses.replace(posterior, guide=None, chains=sites, stats=stats, trace={})


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


def test_diagnose_writes_what_the_library_finds(runs, capsys, monkeypatch):
    folder = runs / "good"
    before = written(folder)
    assert main(["diagnose", str(folder), "--quiet"]) == 0
    new = written(folder) - before
    figures = {name for name in new if name.startswith("figures/diagnose-")}
    assert new - figures == {"diagnosis.json", "diagnosis.html", "posterior.nc"}
    wanted = ("convergence", "outputs", "log-joint", "pareto-k", "loo-pit", "replicated", "weights")
    assert {f"figures/diagnose-{name}.png" for name in wanted} <= figures
    text, html = capsys.readouterr().out, (folder / "diagnosis.html").read_text()
    found = diagnostics.diagnose(bp.load(folder), RunFolder(folder).recipe.load())
    assert found.level == "good" and text.split("draws\n\n")[1].startswith("Good")
    for verdict in found.verdicts:
        assert " ".join(verdict.sentence.split()) in " ".join(text.split()), "the terminal has every verdict"
        assert verdict.sentence.split()[0] in html and verdict.about in html
    assert html.count("data:image/png;base64,iVBOR") == len(figures) and 'src="http' not in html
    kept = json.loads((folder / "diagnosis.json").read_text())
    assert kept["verdicts"] == [vars(verdict) for verdict in found.verdicts]
    finite = {k: v for k, v in found.statistics.items() if math.isfinite(v)}
    assert {k: v for k, v in kept["statistics"].items() if v is not None} == pytest.approx(finite)
    assert f"{found.statistics['rhat_max']:.3f}" in text and f"{found.statistics['rhat_max']:.3f}" in html
    (folder / "figures" / "mine.png").write_bytes(b"mine")
    monkeypatch.setattr("bnn_pyro.runs.diagnose.draw_diagnosis", lambda *args: [])
    assert main(["diagnose", str(folder), "--quiet", "--no-netcdf"]) == 0
    assert [p.name for p in (folder / "figures").iterdir()] == ["mine.png"], "figures that no longer apply are removed"


@pytest.mark.usefixtures("no_figures")
def test_out_leaves_the_run_as_it_was_and_a_missing_netcdf_file_costs_nothing_else(runs, tmp_path, capsys):
    before, out = written(runs), tmp_path / "elsewhere" / "diagnosis"
    command = ["diagnose", str(runs / "good"), "--quiet"]
    assert main([*command, "--out", str(out)]) == 0 and written(runs) == before
    assert written(out) == {"diagnosis.json", "diagnosis.html", "posterior.nc"}
    assert main([*command, "--out", str(out)]) == 2 and "exists; choose another name" in capsys.readouterr().err
    (runs / "good" / "posterior.nc").mkdir()
    assert main(command) == 2 and "everything else was written: " in capsys.readouterr().err
    assert "R-hat" in (runs / "good" / "diagnosis.html").read_text()


@pytest.mark.usefixtures("no_figures")
def test_evaluate_says_whether_the_chains_have_converged(runs, capsys):
    (runs / "svi" / "convergence.json").write_text("{}")
    for name in ("good", "bad", "svi"):
        capsys.readouterr()
        assert main(["evaluate", str(runs / name), "--quiet"]) == 0
        text, html = capsys.readouterr().out, (runs / name / "report.html").read_text()
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
    whole = diagnostics.diagnose(posterior, data)
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
