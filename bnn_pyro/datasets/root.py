"""Where data files lie."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["data_root", "resolve"]


def data_root() -> Path:
    """The folder that downloads go to and are read from: ``BNN_PYRO_DATA``, or ``data`` in the working directory."""
    return Path(os.environ.get("BNN_PYRO_DATA") or "data")


def resolve(path: str | Path) -> Path:
    """A path as given, with ``~`` and ``$BNN_PYRO_DATA`` filled in; else the same path under the data root."""
    text = str(path).replace("${BNN_PYRO_DATA}", str(data_root())).replace("$BNN_PYRO_DATA", str(data_root()))
    found = Path(text).expanduser()
    inside = data_root() / found
    return inside if not found.exists() and inside.exists() else found
