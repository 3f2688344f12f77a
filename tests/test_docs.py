"""README, docs and notebooks say what is true: code runs, commands parse, links lead somewhere, tables agree."""

import ast
import hashlib
import json
import re
import shlex
import sys
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.inference import methods_for
from bnn_pyro.run import main, parse
from bnn_pyro.runs.sweep_config import read_sweep_config

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import keep, provenance
from benchmarks.accuracy.tables import sweep_table
from benchmarks.checks.references import RECIPES
from benchmarks.checks.tables import TABLES
from benchmarks.speed.problem import Problem, Runner
from benchmarks.speed.steps import CONTESTANTS
from bnn_pyro.checks.reference import references

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("*/README.md")]
README = (ROOT / "README.md").read_text()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def same(posterior, x, draws: int, prediction) -> bool:
    return bp.predict(posterior, x, num_draws=draws).mean.equal(prediction.mean)


#: Page -> what is true once its code has run.
RESULTS = {
    "README.md": lambda n: same(n["again"], n["data"].x_test, 200, n["prediction"]),
    "docs/checks.md": lambda n: n["outcome"].level == "good",
    "docs/distributed.md": lambda n: len(n["chains"].chains["layers.0.weight"]) == 2,
    "docs/guarantees.md": lambda n: n["again"].predict(n["data"].x_test).interval(0.9).low.equal(n["low"]),
    "docs/hidden-layer.md": lambda n: sum(n["losses"][-20:]) < 0.7 * sum(n["losses"][:20]),
    "docs/last-layer.md": lambda n: n["predictions"][0].mean.shape == n["predictions"][1].mean.shape,
    "docs/methods.md": lambda n: n["mcmc"].get_samples()["layers.0.weight"].shape == (20, 5, 2),
    "docs/your-data.md": lambda n: n["stars"].schema.task == "ordinal" and n["rates"].schema.exposure,
    "docs/your-network.md": lambda n: same(n["again"], n["data"].x_test, 20, n["prediction"]),
}


@pytest.mark.parametrize("page", [named(page) for page in PAGES if blocks(page, "python")])
@pytest.mark.usefixtures("quick_fits")
def test_python_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(ROOT / page, "python"):
        exec(block, names)
    assert RESULTS[page](names)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_are_understood_and_links_lead_somewhere(page):
    for line in "".join(blocks(page, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if "bnn_pyro.run" in words:
            parse(words[words.index("bnn_pyro.run") + 1 :])
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert link.startswith("https://") or target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_sweep_file_is_one(root):
    (root / "uci").mkdir()
    (root / "uci/energy.csv").write_text("x,y\n1,2\n3,4\n")
    np.savez(root / "uci/energy.splits.npz", **{f"test_{k}": np.arange(1) for k in range(3)})
    (root / "uci.toml").write_text(*blocks(ROOT / "docs/sweeps.md", "toml"))
    tasks = [t for t in read_sweep_config(root / "uci.toml").tasks if (t.seed, t.split, t.data) == (0, 0, "energy")]
    assert [task.recipe.variant for task in tasks] == ["mean-field", "mean-field", "mlp"]


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def figures(text: str) -> set[str]:
    """Numbers with decimals in the tables of a page."""
    return {n for line in text.splitlines() if line.startswith("|") for n in re.findall(r"\d+\.\d+", line)}


def test_tables_are_those_of_the_code_and_summaries_repeat_the_measured_figures():
    """The zoo's of the README, the modules' of the architecture, the metrics' of the glossary, the references'."""
    table = README.split("<!-- zoo:")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| (.*?) \| (.*?) \|$", table, re.MULTILINE)
    assert rows == [(name, kind.summary, ", ".join(methods_for(kind)), kind.paper) for name, kind in bp.ZOO.items()]
    section = (ROOT / "docs/architecture.md").read_text().split("## The modules")[1].split("## Rules")[0]
    table = " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    modules = [*(ROOT / "bnn_pyro").glob("*.py"), *(path.parent for path in ROOT.glob("bnn_pyro/*/__init__.py"))]
    names = {path.name for path in modules} - {"__init__.py"}
    assert {name.rstrip("/") for name in re.findall(r"`([\w/.]+)`", table)} == names
    assert sorted(RECIPES) == references() and TABLES["references"]().count("\n") == len(RECIPES) + 1
    rows = re.findall(r"^\| (`.*?) \| .+ \| .+ \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert set(re.findall("`(.*?)`", " ".join(rows))) == {name for kind in bp.metrics.METRICS.values() for name in kind}
    pages = {page.name: page.read_text() for page in ROOT.glob("docs/results/*.md")}
    summary = pages.pop("README.md")
    measured = "".join(pages.values())
    assert set(re.findall(r"^\| \[.*?\]\(([\w-]+\.md)\)", summary, re.MULTILINE)) == set(pages)
    assert figures(summary) and figures(summary) <= figures(measured)
    results = README.split("## Results")[1].split("\n## ")[0]
    assert figures(results) and figures(results) <= figures(summary)


# -- benchmarks: like is compared with like, and results of committed code alone are kept --------------------


@pytest.mark.filterwarnings("ignore")  # other packages' and Pyro's own
def test_contestants_take_steps_and_local_reparametrization_has_one_loss():
    """Of the same weights and noise, with and without Pyro, so that the ratio of their times is what Pyro costs."""
    problem, losses = Problem((6, 5, 4, 3), 60, 12, torch.device("cpu")), {}
    for name in (name for name, contestant in CONTESTANTS.items() if not contestant.absent):
        with bp.isolated(3):
            runner = Runner(CONTESTANTS[name], problem)
            with runner.active():
                losses[name] = float(runner.run(1))
    assert np.isfinite(list(losses.values())).all()
    assert losses["plain torch"] == pytest.approx(losses["HiddenLayer in Pyro"], rel=1e-4)


def test_a_sweep_of_committed_code_is_kept_and_tabulated(tmp_path, monkeypatch):
    recipes = "".join(f'[recipes.{n}]\nvariant = "mlp"\ninference_settings = {{ epochs = {n} }}\n' for n in (2, 4))
    (tmp_path / "small.toml").write_text("seeds = [0, 1]\n[data.toy-curve]\n" + recipes)
    out = ["--out", str(tmp_path / "sweep"), "--cores", "1", "--quiet"]
    assert main(["sweep", str(tmp_path / "small.toml"), *out]) == 0
    monkeypatch.setattr(keep, "RESULTS", tmp_path)
    path = tmp_path / "sweep" / "sweep.json"
    held = json.loads(path.read_text())
    for commit in ("8c96fb3-dirty", None):
        path.write_text(json.dumps(held | {"facts": held["facts"] | {"commit": commit}}))
        with pytest.raises(SystemExit, match="uncommitted code"):
            keep.main([str(tmp_path / "sweep")])
    path.write_text(json.dumps(held | {"facts": held["facts"] | {"commit": "8c96fb3"}}))
    keep.main([str(tmp_path / "sweep")])
    lines = sweep_table(tmp_path / "sweep_small.json").splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:4]] == [["| 2", "2"], ["| 4", "2"]] and "8c96fb3" in lines[-1]
    monkeypatch.setattr(provenance, "commit", lambda: "8c96fb3-dirty")
    with pytest.raises(SystemExit, match="commit what is changed"):
        provenance.check_tree(provenance.RESULTS / "speed.json")


# -- notebooks: every one runs with small numbers; what is committed is a whole full run ------------------------------
#: Places on the machine where it ran, and where packages or papers were fetched from.
PRIVATE = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|var|usr|Users)/|pypi\.|\.internal|localhost|127\.0\.0\.1")

notebooks = pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


@notebooks
@pytest.mark.usefixtures("quick_fits")
@pytest.mark.filterwarnings("ignore")
def test_runs_without_a_warning(path, tmp_path, monkeypatch, capfd):
    """In this process, with few steps and draws; every figure is drawn and every table made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BNN_PYRO_DATA", str(tmp_path))
    warnings.filterwarnings("error", module=r"bnn_pyro(\.|$)")
    warnings.filterwarnings("error", module="notebook")
    names = {"__name__": "notebook"}
    with bp.isolated(0), bp.executor("here"), plt.rc_context():
        for cell in code_cells(path):
            quick = cell["metadata"].get("quick", {})
            code = ast.parse(re.sub(r"(?m)^[%!].*$", "", source(cell)))
            last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
            exec(compile(code, path.name, "exec"), names)
            names |= quick
            shown = None if last is None else eval(compile(ast.Expression(last.value), path.name, "eval"), names)
            assert repr(shown)
            figures = {plt.figure(number) for number in plt.get_fignums()}
            if source(cell).rstrip().endswith(";"):  # a figure, axes, or several
                figures |= {getattr(part, "figure", None) for part in np.ravel(np.array(shown, dtype=object))} - {None}
                assert figures
            for figure in figures:
                figure.canvas.draw()
            plt.close("all")
    assert capfd.readouterr().err == ""


@notebooks
def test_is_committed_with_the_outputs_of_a_full_run_and_no_error_or_noise(path):
    cells, notebook = code_cells(path), json.loads(path.read_text())
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    drawing = [cell for cell in cells if source(cell).rstrip().endswith(";")]
    assert drawing and all(any("image/png" in output.get("data", {}) for output in c["outputs"]) for c in drawing)
    code = hashlib.sha256("\0".join(source(cell) for cell in cells).encode()).hexdigest()[:16]
    executed = notebook["metadata"].pop("executed")
    assert executed == {"mode": "full", "code": code}, "edited since: python notebooks/execute.py --full"
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            assert output["output_type"] != "error" and output.get("name") != "stderr"
            output.get("data", {}).pop("image/png", None)
    shown = json.dumps([cell.get("outputs") for cell in notebook["cells"]])
    assert not re.search(r"Warning|Traceback|\\u001b\[|<Axes|array\(\[<", shown)
    assert path.stat().st_size < 2_000_000 and not PRIVATE.search(json.dumps(notebook))
    assert f"notebooks/{path.name}" in README
