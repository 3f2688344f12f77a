"""Processes of this machine, by loky: workers that are kept for the next call, and the file by which tasks report."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import cloudpickle
from loky import FIRST_COMPLETED, BrokenProcessPool, ProcessPoolExecutor, wait

from bnn_pyro.parallel.executor import Executor
from bnn_pyro.parallel.task import Died, Figures, Lost, Outcome, run_task

__all__ = ["ProcessPool"]

#: Seconds that a worker waits for another task: those of a parent that was killed end by themselves.
IDLE = 60.0

#: Bytes of a task in the file by which tasks report, and the seconds between two reports.
ROW, EVERY = 400, 0.05

#: Workers without a task, each an executor of one process: the next call need not start them again.
_SPARE: list[ProcessPoolExecutor] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SPARE.clear)


class ProcessPool:
    """One loky executor a worker, so that a process that dies takes one task with it; see ``map.Pool``."""

    grace = math.inf

    def __init__(
        self, stack: contextlib.ExitStack, where: Executor, function: Callable, tasks: Sequence, names: Sequence[str]
    ) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bnn-pyro-tasks-")))
        blob = cloudpickle.dumps(function)
        self.function, self.digest = folder / "function", hashlib.sha256(blob).hexdigest()
        self.function.write_bytes(blob)
        self.file = folder / "progress"
        self.file.write_bytes(bytes(ROW * (len(tasks) + 1)))
        self.memory = _mapped(self.file)
        self.tasks, self.names, self.size = tasks, names, where.workers
        self.at_work: dict[Any, tuple[int, ProcessPoolExecutor]] = {}
        stack.callback(self._end)

    def start(self, number: int) -> None:
        """See ``Pool``."""
        task, channel = cloudpickle.dumps(self.tasks[number]), FileChannel(self.file, number)
        while True:
            worker = _SPARE.pop() if _SPARE else _new_worker()
            try:
                future = worker.submit(run_task, self.function, self.digest, task, self.names[number], channel)
            except BrokenProcessPool:  # it was killed while it had no task
                worker.shutdown(wait=False)
                continue
            self.at_work[future] = number, worker
            return

    def ended(self, timeout: float) -> Iterator[tuple[int, Outcome | Died | Lost]]:
        """See ``Pool``."""
        for future in wait(self.at_work, timeout, FIRST_COMPLETED).done:
            number, worker = self.at_work.pop(future)
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                worker.shutdown(wait=False)
                yield number, Died()
            else:
                _SPARE.append(worker)
                yield number, future.result() if error is None else Lost(error)

    def progress(self) -> Iterator[tuple[int, float, Figures]]:
        """See ``Pool``; of a task that is writing, nothing."""
        for number, _ in self.at_work.values():
            with contextlib.suppress(ValueError):
                share, figures = json.loads(self.memory[ROW * (number + 1) : ROW * (number + 2)])
                yield number, share, figures

    def stop(self) -> None:
        """See ``Pool``."""
        self.memory[0] = 1

    def _end(self) -> None:
        """Kill the processes whose results nobody waits for."""
        for _, worker in self.at_work.values():
            worker.shutdown(wait=True, kill_workers=True)


def _new_worker() -> ProcessPoolExecutor:
    """A process that computes on one thread and leaves Ctrl-C to its parent from before it has imported anything."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    ignore = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    return ProcessPoolExecutor(1, timeout=IDLE, env=threads, **ignore)


class FileChannel:
    """To the parent on the same machine, by a file that both have mapped; its first byte says whether to stop.

    A task whose parent was killed ends its process: a resumed run may be at this very task.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.start, self.parent, self.last = path, ROW * (number + 1), os.getpid(), 0.0

    @cached_property
    def memory(self) -> mmap.mmap:
        """The file, in the process of the task."""
        return _mapped(self.path)

    def begin(self) -> None:
        """See ``Channel``. Signals are the parent's to answer."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._write(0.0, {})

    def send(self, share: float, figures: Figures) -> None:
        """See ``Channel``."""
        if share >= 1 or time.monotonic() - self.last >= EVERY:
            self.last = time.monotonic()
            self._write(share, figures)
            self._end_with_parent()

    def _write(self, share: float, figures: Figures) -> None:
        row = json.dumps([share, dict(figures)], default=float).encode()
        if len(row) > ROW:
            row = json.dumps([share, {}]).encode()
        self.memory[self.start : self.start + ROW] = row.ljust(ROW)

    @property
    def stopping(self) -> bool:
        """See ``Channel``."""
        self._end_with_parent()
        return self.memory[0] == 1

    def _end_with_parent(self) -> None:
        if os.getppid() != self.parent:
            os._exit(1)


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)
