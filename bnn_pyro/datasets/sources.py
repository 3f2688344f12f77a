"""Where data files lie, and how an archive of arrays is opened."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from bnn_pyro.errors import UserError

__all__ = ["cache_root", "data_root", "existing", "read_archive", "resolve"]


def data_root() -> Path:
    """The folder that downloads go to and are read from: ``BNN_PYRO_DATA``, or ``data`` in the working directory."""
    return Path(os.environ.get("BNN_PYRO_DATA") or "data")


def cache_root() -> Path:
    """The folder for what can be made again: ``BNN_PYRO_CACHE``, or ``~/.cache/bnn_pyro``."""
    given = os.environ.get("BNN_PYRO_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "bnn_pyro"


def resolve(path: str | Path) -> Path:
    """A path as given, with ``~`` and ``$BNN_PYRO_DATA`` filled in; else the same path under the data root."""
    text = str(path).replace("${BNN_PYRO_DATA}", str(data_root())).replace("$BNN_PYRO_DATA", str(data_root()))
    found = Path(text)
    with contextlib.suppress(RuntimeError):  # there is no such user: a file may be called so
        found = found.expanduser()
    inside = data_root() / found
    return inside if not found.exists() and inside.exists() else found


def existing(path: str | Path) -> Path:
    """``path`` if there is such a file, else the error that says what is there instead."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give a file")
    if not path.is_file():
        other = "" if path.parent.is_dir() else f", and no folder {path.parent}"
        raise UserError(f"{path}: no such file{other}; check the path (it is taken from {Path.cwd()})")
    return path


def read_archive(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an NPZ file; nothing in it is executed."""
    path = existing(path)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy, zipfile and zlib have some twenty for a damaged file
        detail = "it holds Python objects" if "allow_pickle" in str(error) else "it is damaged or something else"
        raise UserError(f"{path}: not an NPZ file of plain arrays ({detail}); save it with numpy.savez") from None
