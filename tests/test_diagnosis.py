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
from bnn_pyro.runs.diagnose import FIGURES, diagnosis_tables
from bnn_pyro.runs.folder import RunFolder

FEATURES = ["--data", "breast-cancer", "--features", "mean radius,mean texture"]
KNOWN = {key for table in read_texts("statistics")["tables"] for key in table["statistics"]} | {"nested"}
SMALL = ["--hidden", "2", "--epochs", "2", "--num-draws", "8", "--device", "cpu", "--quiet"]


def chains(posterior, num=4, draws=500, shift=0.0, spread=0.1):
    """Independent draws around one network, as if of a sampler; chain 0 sits ``shift`` away from the others."""
    generator = torch.Generator().manual_seed(1)
    sites = {}
    for site, value in posterior.model.initial.items():
        draw = value + spread * torch.randn(num, draws, *value.shape, generator=generator)
        draw[0] += shift
        sites[site] = draw
    energy = 30 + torch.randn(num, draws, generator=generator, dtype=torch.float64)
    stats = {"lp": -energy, "energy": energy, "diverging": torch.zeros(num, draws, dtype=torch.float64)}
    stats["acceptance_rate"] = torch.full((num, draws), 0.8, dtype=torch.float64)
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


# -- diagnose ----------------------------------------------------------------------------------------------------------
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
    data = RunFolder(folder).recipe.load()
    found = diagnostics.diagnose(bp.load(folder), data)
    assert found.level == "good" and text.split("draws\n\n")[1].startswith("Good")
    for verdict in found.verdicts:
        words = verdict.sentence.split()
        assert " ".join(words) in " ".join(text.split()), "the terminal has every verdict"
        assert words[0] in html and verdict.about in html
    assert html.index("verdict-good overall") < html.index("<table") < html.index("data:image/png")
    assert html.count("data:image/png;base64,iVBOR") == len(figures) and 'src="http' not in html
    kept = json.loads((folder / "diagnosis.json").read_text())
    assert kept["verdicts"] == [vars(verdict) for verdict in found.verdicts]
    assert {k: v for k, v in kept["statistics"].items() if v is not None} == pytest.approx(
        {k: v for k, v in found.statistics.items() if math.isfinite(v)}
    )
    assert f"{found.statistics['rhat_max']:.3f}" in text and f"{found.statistics['rhat_max']:.3f}" in html
    assert diagnostics.load_netcdf(folder / "posterior.nc").posterior.sizes["chain"] == 4
    (folder / "figures" / "mine.png").write_bytes(b"mine")
    monkeypatch.setattr("bnn_pyro.runs.diagnose.draw_diagnosis", lambda *args: [])
    assert main(["diagnose", str(folder), "--quiet", "--no-netcdf"]) == 0
    assert [p.name for p in (folder / "figures").iterdir()] == ["mine.png"], "figures that no longer apply are removed"


@pytest.mark.parametrize(
    ("name", "words"),
    [("few", "are too few to tell"), ("svi", "k-hat"), ("svi/baseline", "One network, a point estimate")],
)
def test_what_has_no_rhat_is_told_so_in_words_and_figures(name, words, runs, capsys):
    assert main(["diagnose", str(runs / name), "--quiet", "--no-netcdf"]) == 0
    assert words in " ".join(capsys.readouterr().out.split())
    assert not (runs / name / "posterior.nc").exists()
    names = {p.stem.removeprefix("diagnose-") for p in (runs / name / "figures").glob("diagnose-*.png")}
    assert "replicated" in names and not names & {"convergence", "outputs", "weights"}
    assert ("log-joint" in names) == (name == "few")


@pytest.mark.usefixtures("no_figures")
def test_a_netcdf_file_that_cannot_be_written_costs_nothing_else(runs, capsys):
    (runs / "good" / "posterior.nc").mkdir()
    assert main(["diagnose", str(runs / "good"), "--quiet"]) == 2
    told = capsys.readouterr()
    assert "ArviZ are missing, everything else was written: " in told.err and "Is a directory" in told.err
    assert "\nGood" in told.out and "R-hat" in told.out, "verdicts and tables reach the terminal"
    assert "R-hat" in (runs / "good" / "diagnosis.html").read_text()
    assert json.loads((runs / "good" / "diagnosis.json").read_text())["verdicts"][0]["level"] == "good"


@pytest.mark.usefixtures("no_figures")
def test_out_leaves_the_run_as_it_was(runs, tmp_path, capsys):
    before, out = written(runs), tmp_path / "elsewhere" / "diagnosis"
    command = ["diagnose", str(runs / "good"), "--out", str(out), "--quiet"]
    assert main(command) == 0 and written(runs) == before
    assert written(out) == {"diagnosis.json", "diagnosis.html", "posterior.nc"}
    assert main(command) == 2 and "exists; choose another name" in capsys.readouterr().err


# -- tables ------------------------------------------------------------------------------------------------------------
def test_tables_have_what_there_is_and_a_dash_for_what_is_no_number():
    numbers = {"rhat_max": 1.0234, "ess_bulk_min": 399.9, "divergences": 0.0, "khat": math.nan, "rhat_share": 0.5}
    found = diagnostics.Diagnosis(numbers, (), weights=[{"name": f"w[{i}]", "mean": -0.5} for i in range(50)])
    tables = diagnosis_tables(found)
    cells = {name: value for table in tables for name, value in table.table.iloc[:, 0].items()}
    assert cells["largest R-hat"] == "1.023" and cells["fewest effective draws, bulk"] == "399", "rounded down"
    assert cells["k-hat"] == "–" and cells["outputs with R-hat below 1.01"] == "50.0 %" and cells["w[0]"] == "−0.5"
    assert "PSIS-LOO" not in " ".join(t.title for t in tables)
    assert len(tables[-1].table) <= 20 and "of the 50" in tables[-1].sentence
    nested = diagnostics.Diagnosis(numbers | {"nested": 1.0}, ())
    assert "largest nested R-hat" in {name for table in diagnosis_tables(nested) for name in table.table.index}


# -- after training, and in the report ---------------------------------------------------------------------------------
def test_the_quick_verdict_is_that_of_the_diagnosis_and_every_number_is_in_a_table(runs):
    data = RunFolder(runs / "good").recipe.load()
    for name in ("good", "bad", "few"):
        posterior = bp.load(runs / name)
        quick, whole = diagnostics.diagnose_chains(posterior, data), diagnostics.diagnose(posterior, data)
        assert quick.level == whole.level and set(whole.statistics) <= KNOWN, name
        assert quick.verdicts[0].sentence.split(":")[0] == whole.verdicts[0].sentence.split(":")[0]
    for name in ("svi", "svi/baseline"):
        assert diagnostics.diagnose_chains(bp.load(runs / name), data) is None


@pytest.mark.usefixtures("no_figures")
def test_evaluate_says_whether_the_chains_have_converged(runs, capsys):
    for name in ("good", "bad", "svi"):
        capsys.readouterr()
        assert main(["evaluate", str(runs / name), "--quiet"]) == 0
        text, html = capsys.readouterr().out, (runs / name / "report.html").read_text()
        assert (runs / name / "convergence.json").exists() == (name != "svi")
        for page in (text, html, (runs / name / "README.md").read_text()):
            assert ("Not converged" in page) == (name == "bad")
        assert ("The chains agree" in html) == (name == "good")
    (runs / "svi" / "convergence.json").write_text("{}")
    assert main(["evaluate", str(runs / "svi"), "--quiet"]) == 0
    assert not (runs / "svi" / "convergence.json").exists()


# -- rankings ----------------------------------------------------------------------------------------------------------
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
    assert math.isnan(ranked({"a": np.array([-1.0])}).se["a"])


def test_loo_is_compared_on_the_rows_that_all_have():
    def loo(rows, elpd, k):
        return Loo(np.array(rows), np.array(elpd), np.zeros(len(rows)), np.array(k), np.zeros(len(rows)))

    found = {
        "a": loo([0, 1, 2], [-1.0, -1.0, -9.0], [0.1, 0.1, 0.9]),
        "b": loo([0, 1, 3], [-2.0, -3.0, 0.0], [0.1, 0.8, 0.1]),
        "c": "why",
    }
    ranking = comparison._loo_ranking(found, 10)
    assert ranking.title.endswith("2 of 10 training rows") and ranking.notes == ["c: why"]
    assert ranking.table["log density, nats"].to_dict() == {"a": "-2.0", "b": "-5.0"}
    assert ranking.table[""]["a"] == "" and ranking.table[""]["b"].endswith("1 row with k above 0.7")
    assert "c: why" in ranking.text() and comparison._loo_ranking({"c": "why"}, 10).table.empty


@pytest.mark.usefixtures("no_figures")
def test_compare_ranks_by_held_out_density_and_by_leaving_out(runs, tmp_path, capsys):
    names = [str(runs / name) for name in ("svi", "good", "bad", "svi/baseline", "few")]
    assert main(["compare", *names, "--quiet", "--out", str(tmp_path / "c.html")]) == 0
    text, html = capsys.readouterr().out, (tmp_path / "c.html").read_text()
    data = RunFolder(runs / "good").recipe.load()
    posteriors = {name: bp.load(name) for name in names}
    density = {n: bp.predict(p, data.x_test, num_draws=8).log_prob(data.y_test) for n, p in posteriors.items()}
    best = max(density, key=lambda name: density[name].sum())
    held_out = text.split("Ranking by held-out log density")[1].split("Ranking by PSIS-LOO")[0].splitlines()[2:7]
    assert held_out[0].startswith(best) and "best" in held_out[0]
    for line in held_out[1:]:
        name, total, _, difference, error = line.split()[:5]
        paired = (density[name] - density[best]).double()
        assert float(total) == pytest.approx(density[name].sum().item(), abs=0.06)
        assert float(difference) == pytest.approx(paired.sum().item(), abs=0.06)
        assert float(error) == pytest.approx(math.sqrt(len(paired) * paired.var().item()), abs=0.06)
    left_out = text.split("Ranking by PSIS-LOO")[1]
    assert left_out.index(names[1]) < left_out.index(names[2]) and f"{names[3]}: no chains" in left_out
    assert f"{names[4]}: its chains have 12 draws" in left_out and names[0] in left_out
    assert "Ranking by held-out log density" in html and "Ranking by PSIS-LOO" in html


def test_an_approximation_is_left_out_where_its_weights_fail_and_other_rows_always(runs):
    posterior, data = bp.load(runs / "svi"), RunFolder(runs / "svi").recipe.load()
    found = comparison._left_out(posterior, data, data)
    whole = diagnostics.diagnose(posterior, data)
    assert {"khat"} <= set(whole.statistics) <= KNOWN
    if isinstance(found, str):
        assert f"its k-hat is {whole.statistics['khat']:.2f}, above 0.7" in found
    else:
        assert found.elpd.sum() == pytest.approx(whole.statistics["elpd_loo"])

    other = bp.load_data("breast-cancer", limit=50, features=["mean radius"])
    assert "other rows" in comparison._left_out(posterior, data, other)


def test_a_row_without_a_leave_one_out_estimate_leaves_the_figure_out():
    """Where all draws rule a label out its PIT is not a number; the rest of the diagnosis stands."""
    assert FIGURES["loo-pit"]({"loo_pit": np.array([0.2, math.nan])}) is None
    assert FIGURES["loo-pit"]({"loo_pit": np.linspace(0, 1, 20)}) is not None
