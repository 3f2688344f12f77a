"""Files that are whole or absent, and training that can be stopped at any moment and goes on to the same result."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from bnn_pyro.errors import UserError

__all__ = ["Checkpoint", "Interrupted", "write_whole"]


class Interrupted(KeyboardInterrupt):
    """Training stopped on a signal, after its checkpoint was written."""


def write_whole(path: Path, blob: bytes) -> None:
    """Write beside, flush to disk, rename: a process killed at any moment leaves the old file or the new one."""
    beside = path.with_name(path.name + ".part")
    with open(beside, "wb") as file:
        file.write(blob)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


class Checkpoint:
    """One file in ``folder`` that holds everything that a training loop needs to go on.

    As a context manager it takes SIGINT and SIGTERM (in the main thread): the first sets :attr:`stop`, which the loop
    answers between two steps by saving and raising :class:`Interrupted`; a second one stops at once.

    folder: made when first needed.   every: seconds between two saves.
    key: what must agree for a resume, such as the settings and the data's fingerprint; JSON-able.
    """

    def __init__(self, folder: Path, key: Any = None, every: float = 20.0) -> None:
        self.path, self.key, self.every = Path(folder) / "training.pt", key, every
        self.stop = False
        self._last = time.monotonic()
        self._handlers: dict[int, Any] = {}

    def child(self, name: str) -> Checkpoint:
        """A file of its own beside this one's, for a part of the run; it stops when this one does.

        A child that was pickled to another process is on its own there: set its ``stop``.
        """
        return _Child(self, name)

    @property
    def exists(self) -> bool:
        """Whether there is something to resume from."""
        return self.path.is_file()

    def load(self) -> dict[str, Any] | None:
        """The last saved state, or None where there is none.

        Raises UserError where the file is damaged or belongs to other settings or data.
        """
        if not self.exists:
            return None
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save({"key": self.key, "state": state}, buffer)
        write_whole(self.path, buffer.getvalue())
        self._last = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the loop should save now."""
        return self.stop or time.monotonic() - self._last >= self.every

    def discard(self) -> None:
        """Remove the file, and those of its children: the posterior is saved."""
        self.path.unlink(missing_ok=True)
        for child in self.path.parent.glob(f"{self.path.stem}.*.pt"):
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
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True


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
