"""Folders that one process at a time writes to."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from bnn_pyro.checkpoint import PART, unwritable
from bnn_pyro.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: two runs aimed at one folder are the user's to avoid
    fcntl = None

__all__ = ["CLAIM", "Claim", "InUse", "is_occupied"]

#: The file that a process holds locked while it writes to a folder.
CLAIM = "in-use.lock"


class InUse(UserError):
    """Another process, or thread, is writing to the folder."""


class Claim:
    """The sole right to write to a folder, until :meth:`release`, the end of a ``with`` block or of this object.

    The operating system takes it back from a process that ends in whatever way, so that nothing remains of one that
    was killed. The thread that holds a folder may claim it again. Where a file system knows no locks, there is none.

    Raises InUse where another process (or thread) is at it, UserError where the folder cannot be made.
    """

    _held: ClassVar[dict[Path, int]] = {}

    def __init__(self, folder: str | Path) -> None:
        self.folder, self._file = Path(folder).resolve(), -1
        holder = self._held.get(self.folder)
        if holder is not None:
            if holder != threading.get_ident():
                raise self._taken("another thread of this process")
            return
        self._made = not self.folder.exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self._lock(self.folder / CLAIM)
        except OSError as error:
            raise unwritable(self.folder, error) from None
        self._held[self.folder] = threading.get_ident()
        for left in (*self.folder.glob(f"*{PART}"), *self.folder.glob(f"*/*{PART}")):  # of a process that was killed
            if _half_written(left):
                left.unlink(missing_ok=True)

    def _lock(self, path: Path) -> int:
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                told = os.read(file, 200).decode(errors="replace").strip()
                os.close(file)
                raise self._taken(told or "another process") from None
            except OSError:  # a file system without locks
                pass
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(file).st_ino:
                    break
            os.close(file)  # its holder removed it while we opened it
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        return file

    def _taken(self, who: str) -> InUse:
        return InUse(
            f"{self.folder} is being written to by {who}; wait until that has ended, stop it (its claim ends with it, "
            "however it ends), or choose another folder"
        )

    def release(self) -> None:
        """Give it back; the folder too where it was made for nothing."""
        if self._file < 0:
            return
        file, self._file = self._file, -1
        self._held.pop(self.folder, None)
        with contextlib.suppress(OSError):
            (self.folder / CLAIM).unlink()
        os.close(file)
        if self._made:
            with contextlib.suppress(OSError):  # it is not empty, as it should be
                self.folder.rmdir()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def is_occupied(folder: Path) -> bool:
    """Whether there is more in the folder than a process of ours that was killed before its first whole file leaves."""
    return folder.is_dir() and any(path.name != CLAIM and not _half_written(path) for path in folder.iterdir())


def _half_written(path: Path) -> bool:
    """Whether ``write_whole`` was writing it."""
    return path.suffix == PART and path.with_suffix("").suffix[1:].isdigit()
