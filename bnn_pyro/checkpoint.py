"""Files that are whole or absent, and training that can be stopped.

A training that was stopped, or killed at any moment, goes on to the same result.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from bnn_pyro.distributed import here
from bnn_pyro.errors import UserError

__all__ = ["PART", "Checkpoint", "Interrupted", "read_json", "unwritable", "write_whole"]

#: What ends the name of a file that is being written.
PART = ".part"
#: Bytes of a checkpoint's checksum.
SEAL = 32
#: Seconds in which a signal is an echo: torchrun passes on the Ctrl-C that its processes had from the terminal.
ECHO = 2.0


class Interrupted(KeyboardInterrupt):
    """Training stopped on a signal, after its checkpoint was written."""


def _seal(blob: bytes) -> bytes:
    """What ends a checkpoint, so that a change in it is noticed."""
    return hashlib.sha256(blob).digest()


def write_whole(path: Path, blob: bytes) -> None:
    """Write beside, flush to disk, rename: a process killed at any moment leaves the old file or the new one.

    Raises UserError where the disk is full or the folder cannot be written to; the old file is then as it was.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    try:
        with open(beside, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise unwritable(path, error) from None
        raise


def read_json(path: Path, shape: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table in a JSON file; None where the file is damaged, or does not hold what ``shape`` says.

    shape: the kind of every value by its key, "*" for any key; in turn a table, or a list of one kind for all items.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    return held if isinstance(held, dict) and _fits(held, shape) else None


def _fits(held: Any, shape: Any) -> bool:
    if isinstance(shape, list):
        return isinstance(held, list) and all(_fits(item, shape[0]) for item in held)
    if isinstance(shape, Mapping):
        if not isinstance(held, dict) or ("*" in shape and not all(_fits(v, shape["*"]) for v in held.values())):
            return False
        return all(key == "*" or (key in held and _fits(held[key], kind)) for key, kind in shape.items())
    return isinstance(held, shape) and not isinstance(held, bool)


def unwritable(path: Path, error: OSError) -> UserError:
    """The error for a file or folder that could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    way = (
        "make room and give the command again (train: with --resume)" if full else "choose a place that can be written"
    )
    return UserError(f"{path} could not be written ({error.strerror}); what was whole before still is; {way}")


class Checkpoint:
    """One file in ``folder`` that holds everything that a training loop needs to go on.

    As a context manager it takes SIGINT and SIGTERM (in the main thread): the first sets :attr:`stop`, which the loop
    answers between two steps by saving and raising :class:`Interrupted`; a second one stops at once.

    Where a fit has several processes all of them call :meth:`load`, :meth:`save` and :meth:`discard`: rank 0 has the
    file, and what it reads, or its error, is everybody's.

    folder: made when first needed.   every: seconds between two saves.
    key: what must agree for a resume, such as the settings and the data's fingerprint; JSON-able.
    """

    def __init__(self, folder: Path, key: Any = None, every: float = 20.0) -> None:
        self.path, self.key, self.every = Path(folder) / "training.pt", key, every
        self.stop = False
        self._last = self._asked = time.monotonic()
        self._handlers: dict[int, Any] = {}

    def child(self, name: str) -> Checkpoint:
        """A file of its own beside this one's, for a part of the run; it stops when this one does.

        A child that was pickled to another process is on its own there: set its ``stop``.
        """
        return _Child(self, name)

    @property
    def exists(self) -> bool:
        """Whether there is something to resume from, be it of a child alone."""
        return here().first_does(lambda: self.path.is_file() or any(self._children()))

    def load(self) -> dict[str, Any] | None:
        """The last saved state, or None where there is none.

        Raises UserError where the file is damaged or belongs to other settings or data.
        """
        return here().first_does(self._read)

    def _read(self) -> dict[str, Any] | None:
        if not self.path.is_file():
            return None
        try:
            blob = self.path.read_bytes()
            if _seal(blob[:-SEAL]) != blob[-SEAL:]:
                raise ValueError  # torch reads tensors of changed bytes without a word
            saved = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
            key, state = saved["key"], saved["state"]
        except Exception:
            raise UserError(f"the checkpoint {self.path} is damaged; start again with --overwrite") from None
        if key != self.key:
            raise UserError(
                f"the checkpoint {self.path} was made with other settings, seed or data; "
                "resume with the same ones, or start again with --overwrite"
            )
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Write the state (tensors, numbers, strings, lists, dicts) as a whole."""
        here().first_does(lambda: self._write(state))

    def _write(self, state: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save({"key": self.key, "state": state}, buffer)
        write_whole(self.path, buffer.getvalue() + _seal(buffer.getvalue()))
        self._last = time.monotonic()

    def _children(self) -> Iterator[Path]:
        return self.path.parent.glob(f"{self.path.stem}.*.pt")

    @property
    def due(self) -> bool:
        """Whether the loop should save now."""
        return self.stop or time.monotonic() - self._last >= self.every

    def discard(self) -> None:
        """Remove the file, and those of its children: the posterior is saved."""
        here().first_does(self._remove)

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        for child in self._children():
            child.unlink()
        if self.path.parent.is_dir() and not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()

    def __enter__(self) -> Checkpoint:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {s: signal.signal(s, self._request) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.stop and not (here().size > 1 and now - self._asked < ECHO):
            raise KeyboardInterrupt
        self.stop, self._asked = True, now


class _Child(Checkpoint):
    """A checkpoint of a part of a run; ``stop`` is its parent's."""

    def __init__(self, parent: Checkpoint, name: str) -> None:
        self.parent: Checkpoint | None = None
        super().__init__(parent.path.parent, parent.key, parent.every)
        self.path = parent.path.with_suffix(f".{name}.pt")
        self.parent = parent

    @property
    def stop(self) -> bool:
        """Whether the run is asked to stop."""
        return self._stop if self.parent is None else self.parent.stop

    @stop.setter
    def stop(self, value: bool) -> None:
        self._stop = value

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "parent": None, "_stop": False, "_handlers": {}}
