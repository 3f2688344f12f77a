"""Where files lie, files that are whole or absent, and folders that one process at a time writes to."""

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
#: What ends the name of a file that is being written.
PART = ".part"
#: Suffixes of a user's files: of those that hold arrays, of tables, of both.
ARRAYS = (".npz", ".npy")
TABLES = (".csv", ".tsv", ".parquet")
SUFFIXES = (*TABLES, *ARRAYS)


def data_root() -> Path:
    """The folder that downloads go to and are read from: ``BNN_PYRO_DATA``, or ``data`` in the working directory."""
    return Path(os.environ.get("BNN_PYRO_DATA") or "data")


def cache_root() -> Path:
    """The folder for what can be made again: ``BNN_PYRO_CACHE``, or ``~/.cache/bnn_pyro``."""
    return Path(os.environ.get("BNN_PYRO_CACHE") or Path.home() / ".cache" / "bnn_pyro")


def resolve(path: str | Path) -> Path:
    """A path as given, with ``~`` and ``$BNN_PYRO_DATA`` filled in; else the same path under the data root."""
    text = str(path).replace("${BNN_PYRO_DATA}", str(data_root())).replace("$BNN_PYRO_DATA", str(data_root()))
    resolved = Path(os.path.expanduser(text))  # as it is, where there is no such user: a file may be called so
    inside = data_root() / resolved
    return inside if not resolved.exists() and inside.exists() else resolved


def existing(path: str | Path) -> Path:
    """``path`` if there is such a file, else the error that says what is there instead."""
    if (path := Path(path)).is_dir():
        raise UserError(f"{path}: is a folder; give a file")
    if not path.is_file():
        other = "" if path.parent.is_dir() else f", and no folder {path.parent}"
        raise UserError(f"{path}: no such file{other}; check the path (it is taken from {Path.cwd()})")
    return path


def read_archive(path: str | Path) -> dict[str, Any]:
    """The arrays of an NPZ file; nothing in it is executed."""
    import numpy as np

    path = existing(path)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy, zipfile and zlib have some twenty for a damaged file
        detail = "it holds Python objects" if "allow_pickle" in str(error) else "it is damaged or something else"
        raise UserError(f"{path}: not an NPZ file of plain arrays ({detail}); save it with numpy.savez") from None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, beside; flushed to disk and renamed at the block's end: whole or absent at any moment."""
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
    """Write a :func:`whole_file`; its folder is made. Raises UserError where that fails; the old file is as it was."""
    with telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(blob)


@contextlib.contextmanager
def telling(path: Path) -> Iterator[None]:
    """A block that writes; raises UserError for what the system does not let it write."""
    try:
        yield
    except OSError as error:
        way = "choose a place that can be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            way = "make room and give the command again (train: with --resume)"
        reason = f"{path} could not be written ({error.strerror}); what was whole before still is"
        raise UserError(f"{reason}; {way}") from None


def has_shape(value: Any, shape: Any) -> bool:
    """Whether what a JSON file holds is of this kind: a type, a list of a kind, or a table.

    Of a table: the kind of every value by its key, "*" for any other key (keys may be missing).
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
    """The sole right to write to a folder while the block lasts; the folder is made, and removed again if left empty.

    Freed when the process ends in whatever way. Its thread may lock it again. A file system without locks has none.
    wait: seconds for another process, or thread, to free it.
    Raises UserError where one has locked it for longer, or the folder cannot be made.
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
            with contextlib.suppress(OSError):  # it has just ended
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
            for left in filter(_is_half_written, (*folder.glob("*"), *folder.glob("*/*"))):  # of a process now dead
                left.unlink(missing_ok=True)
        yield
    finally:
        if first:
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()
                if made:
                    folder.rmdir()  # which fails where it is not empty, as it should be
        lock.release()


def is_occupied(folder: Path) -> bool:
    """Whether there is more in the folder than a process of ours that was killed before its first whole file leaves."""
    return folder.is_dir() and any(path.name != LOCK and not _is_half_written(path) for path in folder.iterdir())


def _is_half_written(path: Path) -> bool:
    return path.suffix == PART and path.with_suffix("").suffix[1:].isdigit()
