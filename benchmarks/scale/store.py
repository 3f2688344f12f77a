"""The results file: a measurement is in it as soon as it is there, beside the earlier runs of the same."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "add", "done", "read", "stamp"]

HERE = Path(__file__).parents[1]
RESULTS = HERE / "results" / "scaling.json"


def read(path: Path = RESULTS) -> dict[str, Any]:
    """{part: [measurement]}; each has a key, and runs with the figures, the load and the commit of each."""
    return json.loads(path.read_text()) if path.exists() else {}


def done(part: str, key: dict[str, Any], path: Path = RESULTS) -> int:
    """How often it was measured."""
    return next((len(one["runs"]) for one in read(path).get(part, ()) if one["key"] == key), 0)


def add(part: str, key: dict[str, Any], run: dict[str, Any], path: Path = RESULTS) -> None:
    """One more run of a measurement; the file is replaced as a whole."""
    found = read(path)
    lines = found.setdefault(part, [])
    line = next((one for one in lines if one["key"] == key), None)
    if line is None:
        lines.append(line := {"key": key, "runs": []})
    line["runs"].append(run)
    parts = (
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(one) for one in lines) + "\n]"
        for name, lines in found.items()
    )
    beside = path.with_suffix(".part")
    beside.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    os.replace(beside, path)


def _lines(values: list) -> str:
    return ",\n".join(json.dumps(value) for value in values)


def stamp(load: float) -> dict[str, Any]:
    """Where a figure comes from.   load: of the machine before the run, one-minute mean."""
    import torch

    with open("/proc/cpuinfo") as info:
        cpu = next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], text=True, cwd=HERE, capture_output=True)
    return {
        "load": round(load, 2),
        "command": "python " + " ".join([os.path.relpath(sys.argv[0], HERE.parent), *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {cpu}, {os.cpu_count()} cores, torch {torch.__version__}",
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
    }
