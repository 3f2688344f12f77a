"""A task's line to whoever waits for it: how far it is, and whether its result is still wanted."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Board", "BoardLine", "EventLine", "HereLine", "Line", "held", "stopping", "tell", "telling"]

Figures = Mapping[str, float | str]


def tell(done: float, of: float, figures: Figures | None = None) -> None:
    """How much of this task is done, for the progress bar of those that wait for it; nothing outside of a task.

    figures: shown beside the bar where the task runs in the process that has it.
    """
    line = _HELD.get()
    if line is not None:
        line.tell(min(1.0, done / of) if of else 1.0, figures or {})


def stopping() -> bool:
    """Whether nobody waits for this task any more: it may save what it has, and end."""
    line = _HELD.get()
    return line is not None and line.stopping


def telling(report: Callable[..., None]) -> Callable[..., None]:
    """The report of something that may be a task's work, which this task then tells as its own; else as it is."""
    line = _HELD.get()
    if line is None:
        return report

    def both(done: float, of: float, figures: Figures | None = None) -> None:
        report(done, of, figures)
        line.tell(min(1.0, done / of) if of else 1.0, figures or {})

    return both


class Line:
    """Leads nowhere."""

    def begin(self) -> None:
        """The task starts."""

    def tell(self, share: float, figures: Figures) -> None:
        """So much of it is done."""

    @property
    def stopping(self) -> bool:
        """Whether it is to end."""
        return False


_HELD: ContextVar[Line | None] = ContextVar("line", default=None)


@contextlib.contextmanager
def held(line: Line) -> Iterator[None]:
    """``tell`` and ``stopping`` of this block go by it."""
    token = _HELD.set(line)
    try:
        yield
    finally:
        _HELD.reset(token)


@dataclass
class HereLine(Line):
    """To the same process, which may itself be at a task."""

    hear: Callable[[float, Figures], None]
    outer: Line | None = field(default_factory=lambda: _HELD.get())

    def tell(self, share: float, figures: Figures) -> None:
        """See ``Line``."""
        self.hear(share, figures)

    @property
    def stopping(self) -> bool:
        """See ``Line``."""
        return self.outer is not None and self.outer.stopping


class Board:
    """rows (tasks + 1, 2) that processes share: share done, times begun. The last one says whether to stop."""

    def __init__(self, path: Path, tasks: int) -> None:
        self.rows = np.memmap(path, np.float64, "r+" if path.exists() else "w+", shape=(tasks + 1, 2))

    def stop(self) -> None:
        """Ask every task to end."""
        self.rows[-1, 0] = 1.0

    @property
    def shares(self) -> np.ndarray:
        """Of every task, (tasks,)."""
        return np.array(self.rows[:-1, 0])


class BoardLine(Line):
    """To the parent on the same machine, over a board."""

    def __init__(self, path: Path, number: int, tasks: int) -> None:
        self.path, self.number, self.tasks, self.parent = path, number, tasks, os.getpid()
        self.board: Board | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "board": None}

    def begin(self) -> None:
        """See ``Line``."""
        self.board = Board(self.path, self.tasks)
        self.board.rows[self.number] = 0.0, self.board.rows[self.number, 1] + 1

    def tell(self, share: float, figures: Figures) -> None:
        """See ``Line``."""
        assert self.board is not None
        self.board.rows[self.number, 0] = share
        self._end_with_parent()

    @property
    def stopping(self) -> bool:
        """See ``Line``."""
        self._end_with_parent()
        return self.board is not None and bool(self.board.rows[-1, 0])

    def _end_with_parent(self) -> None:
        if os.getppid() != self.parent:  # it was killed, and a resumed run may be at this very task
            os._exit(1)


@dataclass
class EventLine(Line):
    """To the client of a Dask cluster, by events of its scheduler: one in ``EVERY`` seconds at most."""

    topic: str
    number: int
    every: float = 1.0
    last: float = field(default=0.0, compare=False)

    def begin(self) -> None:
        """See ``Line``."""
        from distributed import get_worker
        from distributed.worker import thread_state

        self.worker, self.key = get_worker(), thread_state.key

    def tell(self, share: float, figures: Figures) -> None:
        """See ``Line``."""
        if time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            self.worker.log_event(self.topic, [self.number, share])

    @property
    def stopping(self) -> bool:
        """Whether the task was cancelled, or its client is gone."""
        state = self.worker.state.tasks.get(self.key)
        return state is None or state.state == "cancelled"
