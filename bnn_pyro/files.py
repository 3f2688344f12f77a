"""Paths of data and caches, atomic writing of files, and folders that one process at a time may write to."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from bnn_pyro.errors import UserError

#: The file that a process holds locked while it writes to a folder.
LOCK = "in-use.lock"
#: Suffix of a file that is being written.
PART = ".part"
#: Suffixes of files of arrays, of tables, and of both.
ARRAYS = (".npz", ".npy")
TABLES = (".csv", ".tsv", ".parquet")
SUFFIXES = (*TABLES, *ARRAYS)


def data_root() -> Path:
    """Return the folder of downloaded data: ``BNN_PYRO_DATA``, or ``data`` in the working directory."""
    return Path(os.environ.get("BNN_PYRO_DATA") or "data")


def cache_root() -> Path:
    """Return the folder of cached files: ``BNN_PYRO_CACHE``, or ``~/.cache/bnn_pyro``."""
    return Path(os.environ.get("BNN_PYRO_CACHE") or Path.home() / ".cache" / "bnn_pyro")


def resolve(path: str | Path) -> Path:
    """Expand ``~`` and ``$BNN_PYRO_DATA`` in a path; if nothing is there, try the same path under the data root."""
    text = str(path).replace("${BNN_PYRO_DATA}", str(data_root())).replace("$BNN_PYRO_DATA", str(data_root()))
    resolved = Path(os.path.expanduser(text))  # unchanged for an unknown user: ~name may be the name of a file
    inside = data_root() / resolved
    return inside if not resolved.exists() and inside.exists() else resolved


def existing(path: str | Path) -> Path:
    """Return ``path`` if it is a file. Raises UserError if it is a folder or absent."""
    if (path := Path(path)).is_dir():
        raise UserError(f"{path}: is a folder; give a file")
    if not path.is_file():
        other = "" if path.parent.is_dir() else f", and no folder {path.parent}"
        raise UserError(f"{path}: no such file{other}; check the path (it is taken from {Path.cwd()})")
    return path


def read_archive(path: str | Path) -> dict[str, Any]:
    """Read the arrays of an NPZ file, without executing code from it (no pickles)."""
    import numpy as np

    path = existing(path)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy, zipfile and zlib raise about twenty types for damaged files
        detail = "it holds Python objects" if "allow_pickle" in str(error) else "it is damaged or something else"
        raise UserError(f"{path}: not an NPZ file of plain arrays ({detail}); save it with numpy.savez") from None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing; it is flushed to disk and renamed to ``path`` at the end of the block."""
    beside = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_whole(path: Path, blob: bytes) -> None:
    """Write a file atomically and create its folder. Raises UserError if that fails; an old file is then unchanged."""
    with telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(blob)


@contextlib.contextmanager
def telling(path: Path) -> Iterator[None]:
    """Convert the OSErrors of a block that writes to a UserError."""
    try:
        yield
    except OSError as error:
        way = "choose a place that can be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            way = "make room and give the command again (train: with --resume)"
        reason = f"{path} could not be written ({error.strerror}); files that were complete still are"
        raise UserError(f"{reason}; {way}") from None


def has_shape(value: Any, shape: Any) -> bool:
    """Return whether a value read from JSON has a shape: a type, [shape of every item], or {key: shape of its value}.

    The key "*" stands for all keys that are not listed; with it, listed keys may be absent.
    """
    if isinstance(shape, list):
        return isinstance(value, list) and all(has_shape(item, shape[0]) for item in value)
    if isinstance(shape, Mapping):
        kinds = shape
        if "*" in shape and isinstance(value, dict):
            kinds = {key: shape.get(key, shape["*"]) for key in value}
        return isinstance(value, dict) and all(k in value and has_shape(value[k], kind) for k, kind in kinds.items())
    return isinstance(value, shape) and not isinstance(value, bool)


@contextlib.contextmanager
def lock_folder(folder: str | Path, wait: float = 0) -> Iterator[None]:
    """Lock a folder for writing during a block; the folder is created, and removed again if it is empty at the end.

    The lock ends when the process ends, in whatever way. The same thread may lock again. On a file system that does
    not support locks, nothing is locked.
    wait: seconds to wait for another process or thread that holds the lock; then UserError is raised, as it is if the
        folder cannot be created.
    """
    from filelock import FileLock, Timeout

    folder = Path(folder).resolve()
    lock, made = FileLock(folder / LOCK, is_singleton=True, fallback_to_soft=False), not folder.exists()
    me = f"process {os.getpid()} on {socket.gethostname()}"
    with telling(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=wait)
        except Timeout:
            holder = ""
            with contextlib.suppress(OSError):  # the other process has just ended
                holder = (folder / LOCK).read_text(errors="replace")[:200].strip()
            holder = "another thread of this process" if holder == me else holder or "another process"
            raise UserError(f"{folder} is being written to by {holder}; wait until that has ended, stop it (its lock "
                            "ends with it, however it ends), or choose another folder") from None  # fmt: skip
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
    first = lock.lock_counter <= 1
    try:
        if first:
            with contextlib.suppress(OSError):  # a full disk
                (folder / LOCK).write_text(me)
            for half in filter(_is_half_written, (*folder.glob("*"), *folder.glob("*/*"))):  # of a process now dead
                half.unlink(missing_ok=True)
        yield
    finally:
        if first:
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()
                if made:
                    folder.rmdir()  # fails if it is not empty
        lock.release()


def is_occupied(folder: Path) -> bool:
    """Return whether a folder has files other than the lock and incomplete files that a killed process left."""
    return folder.is_dir() and any(path.name != LOCK and not _is_half_written(path) for path in folder.iterdir())


def _is_half_written(path: Path) -> bool:
    return path.suffix == PART and path.with_suffix("").suffix[1:].isdigit()
