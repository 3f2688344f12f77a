"""README, RESULTS.md and docs say what is true: code runs, commands parse, links lead somewhere, tables agree."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import bnn_pyro as bp
from bnn_pyro.inference import methods_for
from bnn_pyro.run import parse
from bnn_pyro.runs.sweep_config import read_sweep_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "RESULTS.md", *sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("*/README.md")]
README = (ROOT / "README.md").read_text()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


#: Page -> what is true once its code has run.
RESULTS = {
    "README.md": lambda n: (
        n["prediction"].epistemic.max() > 0
        and bp.predict(n["again"], n["data"].x_test, num_draws=200).mean.equal(n["prediction"].mean)
    ),
    "docs/checks.md": lambda n: n["outcome"].level == "good",
    "docs/distributed.md": lambda n: len(n["together"].chains["layers.0.weight"]) == 4,
    "docs/guarantees.md": lambda n: (
        n["kind"] == "conformal: normalised"
        and n["again"].predict(n["data"].x_test).interval(0.9).low.equal(n["low"])
        and n["before"].kind == "predictive"
    ),
    "docs/hidden-layer.md": lambda n: sum(n["losses"][-20:]) < 0.7 * sum(n["losses"][:20]),
    "docs/last-layer.md": lambda n: n["predictions"][0].mean.shape == n["predictions"][1].mean.shape,
    "docs/methods.md": lambda n: (
        n["mcmc"].get_samples()["layers.0.weight"].shape == (20, 5, 2) and len(n["own"].trace["elbo"]) > 1
    ),
    "docs/your-data.md": lambda n: (
        set(n["prediction"].quantile([0.05, 0.95]).shape) == {2}
        and n["model"].predict_interval(n["new"]).shape == (2, 2)
        and n["rates"].schema.exposure
        and n["stars"].schema.task == "ordinal"
        and n["posterior"].draw(2, seed=0)["log_shape"].shape == (2,)
        and n["flats"].predict_proba(n["new"][["area", "city"]]).shape == (2, 2)
    ),
    "docs/your-network.md": lambda n: (
        bp.predict(n["again"], n["data"].x_test, num_draws=20).mean.equal(n["prediction"].mean)
        and len(n["partly"].draw(2, seed=0)["3.bias"].unique()) > 2
        and set(n["around"].draw(2, seed=0)) == {"3.weight", "3.bias"}
        and n["expected"].mean.shape == (3,)
    ),
}


def test_pages_with_code_are_all_run():
    assert set(RESULTS) == {named(page) for page in PAGES if blocks(page, "python")}


@pytest.mark.parametrize("page", RESULTS)
@pytest.mark.usefixtures("quick_fits")
def test_python_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(ROOT / page, "python"):
        exec(block, names)
    assert RESULTS[page](names)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_are_understood(page):
    for line in "".join(blocks(page, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if "bnn_pyro.run" in words:
            parse(words[words.index("bnn_pyro.run") + 1 :])


def test_sweep_file_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("BNN_PYRO_DATA", str(tmp_path))
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci/energy.csv").write_text("x,y\n1,2\n3,4\n")
    np.savez(tmp_path / "uci/energy.splits.npz", **{f"test_{k}": np.arange(1) for k in range(3)})
    (tmp_path / "uci.toml").write_text(*blocks(ROOT / "docs/sweeps.md", "toml"))
    config = read_sweep_config(tmp_path / "uci.toml")
    assert [task.recipe.variant for task in config.tasks if (task.seed, task.split, task.data) == (0, 0, "energy")] == [
        "mean-field",
        "mean-field",
        "mlp",
    ]


def test_zoo_table_is_the_zoo():
    table = README.split("<!-- zoo:")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| (.*?) \| (.*?) \|$", table, re.MULTILINE)
    assert {name: tuple(rest) for name, *rest in rows} == {
        name: (kind.summary, ", ".join(methods_for(kind)), kind.paper) for name, kind in bp.ZOO.items()
    }


def test_ci_calls_the_readme_test_command():
    command = re.search(r"Run the tests:\n\n```bash\n(.*?)\n```", README).group(1)
    install, test = (ROOT / ".ci" / "run").read_text(), command.split(" && ")
    assert all(part.replace("pip install -e", "") in install.replace("pip install -q -e", "") for part in test)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert link.startswith("https://") or target.exists(), link
        assert not anchor or anchor in anchors(target), link


def figures(text: str) -> set[str]:
    """Numbers with decimals in the tables of a page."""
    return {n for line in text.splitlines() if line.startswith("|") for n in re.findall(r"\d+\.\d+", line)}


def test_summaries_repeat_the_measured_figures():
    measured = "".join(page.read_text() for page in ROOT.glob("docs/results/*.md"))
    summary = (ROOT / "RESULTS.md").read_text()
    assert figures(summary) and figures(summary) <= figures(measured)
    results = README.split("## Results")[1].split("\n## ")[0]
    assert figures(results) and figures(results) <= figures(summary)


def test_architecture_names_every_module():
    section = (ROOT / "docs/architecture.md").read_text().split("## The modules")[1].split("## Rules")[0]
    table = {
        name.rstrip("/")
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`([\w/.]+)`", row)
    }
    package = {
        path.name for path in (ROOT / "bnn_pyro").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert table == package - {"__init__.py"}


def test_the_glossary_has_every_metric_with_its_unit():
    rows = re.findall(r"^\| (`.*?) \| .+ \| .+ \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert set(re.findall("`(.*?)`", " ".join(rows))) == {
        name for table in bp.metrics.METRICS.values() for name in table
    }
