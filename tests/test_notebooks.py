"""Every notebook runs, with a test's small numbers; and what is committed is a whole full run, fit to be shown."""

import ast
import hashlib
import json
import re
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

import bnn_pyro as bp

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 2_000_000
#: Places on the machine where it ran, and where packages or papers were fetched from.
PRIVATE = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|var|usr|Users)/|pypi\.|\.internal|localhost|127\.0\.0\.1")

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


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
    assert path.stat().st_size < MOST_BYTES and not PRIVATE.search(json.dumps(notebook))
    assert f"notebooks/{path.name}" in (ROOT / "README.md").read_text()
