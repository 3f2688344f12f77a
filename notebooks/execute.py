"""Run notebooks from top to bottom and keep what they show.

    python notebooks/execute.py [NAME …]           as they stand, results to look at in runs/notebooks
    python notebooks/execute.py --full [NAME …]    with FULL = True, results into the notebooks themselves

The cell tagged "parameters" has a line ``FULL = False``, and in its metadata, under "quick", what tests take instead of
its values: {"EPOCHS": 5}. Sources stay as they are. The full run is what is committed, with a digest of the code that
made it, so that a cell edited later is noticed.

A notebook that raises, or writes to standard error (a warning, say), fails. Progress bars are for readers who run it:
they are switched off here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from traitlets.config import Config

HERE = Path(__file__).resolve().parent
#: What a code host shows without complaint.
MOST_BYTES = 2_000_000
#: Seconds that a cell may take.
PATIENCE = 3600

#: What the kernel runs first: warnings raised in the package, or in the notebook's own lines, are errors. (That of
#: Pyro's import of tqdm, where ipywidgets are not installed, is neither.)
STRICT = (
    "import warnings; "
    "warnings.filterwarnings('error', module=r'bnn_pyro(\\.|$)'); warnings.filterwarnings('error', module='__main__'); "
    "warnings.filterwarnings('ignore', 'IProgress not found')"
)


def digest(notebook: NotebookNode) -> str:
    """Of the code cells, in order."""
    cells = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(cells.encode()).hexdigest()[:16]


def parameters(notebook: NotebookNode) -> NotebookNode:
    """The cell tagged "parameters"."""
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    if len(tagged) != 1 or "FULL = False" not in tagged[0].source.splitlines():
        raise SystemExit("a notebook has one cell tagged 'parameters', with a line 'FULL = False'")
    return tagged[0]


def noise(notebook: NotebookNode) -> list[str]:
    """What was written to standard error."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.text for output in outputs if output.get("name") == "stderr"]


def execute(path: Path, mode: str) -> tuple[NotebookNode, float]:
    """The notebook with its outputs, and the seconds that it took. mode: "short" or "full"."""
    notebook = nbformat.read(path, as_version=4)
    cell = parameters(notebook)
    source = cell.source
    if mode == "full":
        cell.source = "\n".join("FULL = True" if line == "FULL = False" else line for line in source.splitlines())
    start = time.perf_counter()
    with _quiet_place() as (folder, work):
        NotebookClient(
            notebook,
            config=Config(KernelManager={"transport": "ipc", "ip": str(folder / "kernel")}),
            kernel_name="python3",
            timeout=PATIENCE,
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": str(work)}},
            extra_arguments=[f"--IPKernelApp.exec_lines={STRICT}"],
        ).execute()
    seconds = time.perf_counter() - start
    cell.source = source
    _tidy(notebook, mode)
    return notebook, seconds


@contextmanager
def _quiet_place() -> Iterator[tuple[Path, Path]]:
    """A folder for sockets, an empty one to work in; the kernel finds this package, and no one's settings."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "work")
        work.mkdir()
        search = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
        os.environ |= {"PYTHONPATH": search, "TQDM_DISABLE": "1"}
        os.environ |= {name: str(Path(folder, "jupyter")) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
        os.environ["BNN_PYRO_DATA"] = str(Path(os.environ.get("BNN_PYRO_DATA") or HERE.parent / "data").resolve())
        os.environ.pop("MPLBACKEND", None)  # the kernel sets its own
        yield Path(folder), work


def _tidy(notebook: NotebookNode, mode: str) -> None:
    """Leave nothing of this machine and session."""
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
        executed={"mode": mode, "code": digest(notebook)},
    )
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output.metadata = NotebookNode()


def main() -> int:
    """Execute, check, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="01, 01-why-bayesian, …; all where none is given")
    parser.add_argument("--full", action="store_true", help="with FULL = True; writes the notebooks themselves")
    parser.add_argument("--out", type=Path, help="folder for the results, instead")
    args = parser.parse_args()
    mode = "full" if args.full else "short"
    folder = args.out or (HERE if args.full else HERE.parent / "runs" / "notebooks")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [path for path in sorted(HERE.glob("*.ipynb")) if not args.names or path.stem.startswith(tuple(args.names))]
    if not paths:
        parser.error(f"no notebook of that name in {HERE}")
    failed = 0
    for path in paths:
        try:
            notebook, seconds = execute(path, mode)
        except CellExecutionError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            failed += 1
            continue
        target = folder / path.name
        nbformat.write(notebook, target)
        size, heard = target.stat().st_size, noise(notebook)
        print(f"{path.name}: {mode} run of {seconds:.0f} s, {size / 1e6:.2f} MB", flush=True)
        for text in heard:
            print(f"{path.name}: wrote to standard error: {text}", file=sys.stderr)
        if size > MOST_BYTES:
            print(f"{path.name}: {size:,} bytes, above {MOST_BYTES:,}", file=sys.stderr)
        failed += bool(heard) or size > MOST_BYTES
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
