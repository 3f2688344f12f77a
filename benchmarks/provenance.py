"""Where a figure comes from: command, commit, machine and date; the files that hold figures with these; tables of them.

``benchmarks/results`` holds figures of committed code alone, so that each can be made again: what would write there
from a tree with uncommitted changes is refused before it starts. Other files (``--out``) take such figures too, with a
commit that ends in "-dirty".
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "ROOT", "Measurements", "add_out", "check_kept", "check_tree", "commit", "provenance", "source",
           "table", "write_json", "write_tables"]  # fmt: skip

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: What decides a figure; figures themselves and documents do not.
CODE = ("bnn_pyro", "benchmarks", "pyproject.toml", ":!benchmarks/results", ":!benchmarks/figures", ":!*.md")
MARKERS = re.compile(r"<!-- begin (?P<name>.*?) -->\n.*?<!-- end (?P=name) -->", re.DOTALL)
PACKAGES = ("bnn-pyro", "torch", "pyro-ppl", "numpy")


def commit(checkout: Path = ROOT) -> str:
    """Short hash of a checkout's commit, "-dirty" at its end where code differs from it; "unknown" outside of one."""
    git = ["git", "-C", str(checkout)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", *CODE], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


def provenance(packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """Command, commit, machine, threads of torch, versions and date; JSON-able."""
    import torch

    return {
        "command": _command(),
        "commit": commit(),
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
    }


def check_tree(path: Path) -> None:
    """Raises SystemExit where ``path`` is in ``benchmarks/results`` and the code is not committed."""
    if path.resolve().is_relative_to(RESULTS) and commit().endswith("-dirty"):
        raise SystemExit(f"{path} takes figures of committed code alone: commit what is changed, or give --out FILE")


def check_kept(facts: Mapping[str, Any]) -> None:
    """Raises SystemExit where the facts of a run name no commit, or one that its code differs from."""
    if not facts.get("commit") or facts["commit"].endswith("-dirty"):
        raise SystemExit(f"made by uncommitted code (commit {facts.get('commit')}): commit, and run it again")


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """The option --out, ``benchmarks/results/name`` by default."""
    parser.add_argument("--out", type=Path, default=RESULTS / name, help=f"results file (benchmarks/results/{name})")


def write_json(path: Path, content: Any) -> None:
    """Replace a file by ``content``, as a whole."""
    _replace(path, json.dumps(content, indent=1, ensure_ascii=False))


class Measurements:
    """A part of a results file, written run by run: {part: [{"key": what, "runs": [figures and provenance]}]}."""

    def __init__(self, path: Path, part: str) -> None:
        self.path, self.part = path, part

    def lines(self) -> list[dict[str, Any]]:
        """All measurements of the part."""
        return self._content().get(self.part, [])

    def runs(self, key: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The runs of a measurement; [] where there is none."""
        return next((line["runs"] for line in self.lines() if line["key"] == key), [])

    def add(self, key: Mapping[str, Any], run: Mapping[str, Any], load: float) -> None:
        """Store one more run.   load: one-minute load average of the machine before it."""
        content = self._content()
        lines = content.setdefault(self.part, [])
        line = next((one for one in lines if one["key"] == key), None)
        if line is None:
            lines.append(line := {"key": dict(key), "runs": []})
        line["runs"].append({**run, "load": round(load, 2), **provenance()})
        parts = (
            f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, part)) + "\n]" for name, part in content.items()
        )
        _replace(self.path, "{\n" + ",\n".join(parts) + "\n}")

    def _content(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}


def source(lines: list[dict[str, Any]]) -> str:
    """The sentence under a table: commands, commits, machine and date of its runs."""
    runs = [run for line in lines for run in line["runs"]]
    if not runs:
        return "Not measured yet."
    commands, commits, dates = (
        ", ".join(dict.fromkeys(run[name][:end] for run in runs))
        for name, end in (("command", None), ("commit", None), ("date", 10))
    )
    loads = [run["load"] for run in runs if "load" in run]
    return f"`{commands}`; commit {commits}; {runs[-1]['machine']}; {dates}; load {min(loads):.1f} to {max(loads):.1f}."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells; rows that are short end in "–"."""
    lines = [head, ["---"] * len(head), *([*row, *["–"] * (len(head) - len(row))] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_tables(tables: Mapping[str, Callable[[], str]]) -> set[str]:
    """Put each between <!-- begin NAME --> and <!-- end NAME --> in the documents; the names that are there."""
    placed: set[str] = set()

    def written(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in tables:
            return found[0]
        placed.add(name)
        return f"<!-- begin {name} -->\n\n{tables[name]()}\n\n<!-- end {name} -->"

    for page in sorted((ROOT / "docs").rglob("*.md")):
        page.write_text(MARKERS.sub(written, page.read_text()))
    return placed


def _replace(path: Path, text: str) -> None:
    beside = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(text + "\n")
    os.replace(beside, path)


def _command() -> str:
    spec = sys.modules["__main__"].__spec__
    program = f"-m {spec.name.removesuffix('.__main__')}" if spec is not None else os.path.relpath(sys.argv[0], ROOT)
    return " ".join(["python", program, shlex.join(sys.argv[1:])]).strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"
