"""Every notebook runs, with a test's small numbers; and what is committed is a whole full run, fit to be shown."""

import ast
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 2_000_000
#: Definitions in a notebook: few, and none longer than a screen. Others belong in the library.
MOST_DEFINITIONS, MOST_LINES = 6, 25
#: Places on the machine where it ran, and where packages or papers were fetched from.
PRIVATE = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|var|usr|Users)/|pypi\.|\.internal|localhost|127\.0\.0\.1")

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


def outputs(cells):
    return [output for cell in cells for output in cell["outputs"]]


@notebooks
def test_runs_without_a_warning(path, tmp_path):
    command = [sys.executable, ROOT / "notebooks" / "execute.py", "--quick", "--out", tmp_path, path.stem]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ran = code_cells(tmp_path / path.name)
    assert [cell["execution_count"] for cell in ran] == [*range(1, len(ran) + 1)]
    assert [source(cell) for cell in ran] == [source(cell) for cell in code_cells(path)]


@notebooks
def test_is_committed_with_the_outputs_of_a_full_run(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    drawing = [cell for cell in cells if source(cell).rstrip().endswith(";")]
    assert drawing and all(any("image/png" in output.get("data", {}) for output in outputs([c])) for c in drawing)
    executed = json.loads(path.read_text())["metadata"]["executed"]
    code = hashlib.sha256("\0".join(source(cell) for cell in cells).encode()).hexdigest()[:16]
    assert executed == {"mode": "full", "code": code}, "edited since: python notebooks/execute.py --full"


@notebooks
def test_shows_no_error_and_no_noise(path):
    shown = outputs(code_cells(path))
    assert not [output for output in shown if output["output_type"] == "error" or output.get("name") == "stderr"]
    text = json.dumps([output for output in shown if "data" not in output]) + json.dumps(
        [kind for output in shown for name, kind in output.get("data", {}).items() if not name.startswith("image/")]
    )
    assert not re.search(r"Warning|Traceback|\\u001b\[|<Axes|array\(\[<", text)


@notebooks
def test_is_small_and_tells_nothing_of_the_machine(path):
    assert path.stat().st_size < MOST_BYTES
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) == {"kernelspec", "language_info", "executed"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("image/png", None)
    assert not PRIVATE.search(json.dumps(notebook))


@notebooks
def test_uses_the_library_instead_of_defining_one(path):
    kinds = (ast.FunctionDef, ast.ClassDef)
    cells = [re.sub(r"(?m)^[%!].*$", "", source(cell)) for cell in code_cells(path)]
    found = [node for cell in cells for node in ast.walk(ast.parse(cell)) if isinstance(node, kinds)]
    assert len(found) <= MOST_DEFINITIONS
    assert all(node.end_lineno - node.lineno < MOST_LINES for node in found)


@notebooks
def test_is_named_in_the_readme(path):
    assert f"notebooks/{path.name}" in (ROOT / "README.md").read_text()


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize(
    ("line", "said"), [("import sys; print('!', file=sys.stderr)", "wrote to standard error"), ("1 / 0", "Zero")]
)
def test_a_notebook_that_fails_or_complains_is_noticed(line, said, tmp_path):
    cells = [
        {"source": "FULL = False", "metadata": {"tags": ["parameters"], "quick": {"FULL": "quick"}}},
        {"source": f"assert FULL == 'quick'\n{line}", "metadata": {}},
    ]
    for number, cell in enumerate(cells):
        cell |= {"cell_type": "code", "execution_count": None, "outputs": [], "id": f"cell-{number}"}
    written = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "bad.ipynb").write_text(json.dumps(written))
    (tmp_path / "in" / "execute.py").write_bytes((ROOT / "notebooks" / "execute.py").read_bytes())
    command = [sys.executable, tmp_path / "in" / "execute.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr
