"""Where and how a run was made: the command, the machine, versions and the commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

__all__ = ["environment", "typed_command"]

PACKAGES = ("bnn-pyro", "pyro-ppl", "torch", "torchvision", "numpy", "pandas", "scikit-learn", "matplotlib")


def environment(device: str, seconds: float | None = None) -> dict[str, Any]:
    """The command, the machine, versions and time; JSON-able.   seconds: of the training."""
    return {
        "command": typed_command(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **({} if seconds is None else {"training_seconds": seconds}),
        "device": device if device == "cpu" else f"{device}: {torch.cuda.get_device_name(device)}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def typed_command() -> str:
    """The command line, as one would type it."""
    program = "python -m bnn_pyro.run" if Path(sys.argv[0]).name == "run.py" else Path(sys.argv[0]).name
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def _commit() -> str | None:
    """The commit of the package's own checkout, marked where files differ from it; None outside of one."""
    package = Path(__file__).parents[1]
    if not (package.parent / ".git").exists():
        return None
    try:
        ask = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        return subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
