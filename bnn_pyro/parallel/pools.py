"""The workers of one call of ``map_tasks``: processes of this machine, by loky, or those of a Dask cluster.

A task goes there as a future, and reports from there through a channel.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
from loky import BrokenProcessPool, ProcessPoolExecutor

from bnn_pyro.errors import UserError
from bnn_pyro.parallel.executor import Executor
from bnn_pyro.parallel.task import Channel, Figures, Outcome, failure, run_task

__all__ = ["DaskPool", "ProcessPool"]

#: Seconds that a worker waits for another task: those of a parent that was killed end by themselves.
IDLE = 60.0

#: The file that is there as long as the results of a call's tasks are waited for.
WANTED = "wanted"

#: Seconds between two reports of a task.
EVERY = 0.05

#: Workers without a task, each an executor of one process: the next call need not start them again.
_SPARE: list[ProcessPoolExecutor] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SPARE.clear)

#: Bytes of a function that travel with each task, rather than once to each worker.
SMALL = 2**15

#: Seconds between two counts of a cluster's workers, and that it may be without any before a warning says so.
COUNT, PATIENCE = 5.0, 30.0

#: Seconds between two events by which a task reports its progress.
EVENT = 1.0


# -- processes ---------------------------------------------------------------------------------------------------------
class ProcessPool:
    """One loky executor a worker, so that a process that dies takes one task with it.

    size: tasks that it takes at once.   waits: whether tasks have time to end by themselves once they were asked to.
    """

    waits = True

    def __init__(
        self, stack: ExitStack, where: Executor, function: Callable, tasks: Sequence, names: Sequence[str]
    ) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bnn-pyro-tasks-")))
        self.function = self.folder / "function"
        self.function.write_bytes(cloudpickle.dumps(function))
        (self.folder / WANTED).touch()
        self.tasks, self.names, self.size = tasks, names, where.workers
        self.workers: dict[Any, ProcessPoolExecutor] = {}
        stack.callback(self._end)

    def start(self, number: int) -> Any:
        """Give a task to a worker: its future."""
        task = cloudpickle.dumps(self.tasks[number])
        connect = partial(_file_channel, self.folder, number, os.getpid())
        what = self.folder.name, self.function, task, self.names[number], connect
        while True:
            worker = _SPARE.pop() if _SPARE else _new_worker()
            try:
                future = worker.submit(run_task, *what)
            except BrokenProcessPool:  # it was killed while it had no task
                worker.shutdown(wait=False)
                continue
            self.workers[future] = worker
            return future

    def outcome(self, future: Any, name: str) -> Outcome:
        """Of a future that is done."""
        worker, error = self.workers.pop(future), future.exception()
        if isinstance(error, BrokenProcessPool):
            worker.shutdown(wait=False)
            return Outcome(deaths=1)
        _SPARE.append(worker)
        return future.result() if error is None else failure(error, name)

    def progress(self, numbers: Iterable[int]) -> Iterator[tuple[int, float, Figures]]:
        """(number, share, figures) of these tasks, as they last reported; of a task that is writing, nothing."""
        for number in numbers:
            with suppress(ValueError, OSError):
                yield number, *json.loads((self.folder / str(number)).read_bytes())

    def stop(self) -> None:
        """Ask the tasks at work to end: by a file that goes, which a full disk does not prevent."""
        (self.folder / WANTED).unlink(missing_ok=True)

    def _end(self) -> None:
        """Kill the processes whose results nobody waits for."""
        for worker in self.workers.values():
            worker.shutdown(wait=True, kill_workers=True)


def _new_worker() -> ProcessPoolExecutor:
    """A process that computes on one thread and leaves Ctrl-C to its parent from before it has imported anything."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    ignore = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    return ProcessPoolExecutor(1, timeout=IDLE, env=threads, **ignore)


def _file_channel(folder: Path, number: int, parent: int) -> Channel:
    """To the parent on the same machine, by a file for each task; all of them are to end once ``WANTED`` is gone.

    A task whose parent was killed ends its process: a resumed run may be at this very task.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # signals are the parent's to answer
    file, wanted = folder / str(number), folder / WANTED

    def send(share: float, figures: Figures) -> None:
        if os.getppid() != parent:
            os._exit(1)
        with suppress(OSError):  # a disk that is full is no fault of the task's
            file.write_text(json.dumps([share, dict(figures)], default=float))

    def asked() -> bool:
        if os.getppid() != parent:
            os._exit(1)
        return not wanted.exists()

    send(0.0, {})
    return Channel(send, asked, EVERY)


# -- a Dask cluster ----------------------------------------------------------------------------------------------------
class DaskPool:
    """All tasks as futures, which Dask keeps in a queue until a worker is free; see ``ProcessPool``."""

    size, waits = math.inf, False

    def __init__(
        self, stack: ExitStack, where: Executor, function: Callable, tasks: Sequence, names: Sequence[str]
    ) -> None:
        import dask

        self.client, self.tasks, self.names = where.client, tasks, names
        # Dask takes tasks of one name to last as long as each other, and one that it knows to be short stays where
        # its data are, however long the queue there is.
        self.topic, self.submitted = f"task{uuid.uuid4().hex}", 0
        self.at_work: set[Any] = set()
        self.reports: dict[int, tuple[float, Figures]] = {}
        self.counted, self.without = time.monotonic(), 0.0
        stack.callback(random.setstate, random.getstate())  # by which Dask measures a sample of what it sends
        # Dask would warn of data in a task.
        stack.enter_context(dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 PiB"}))
        self.function: Any = cloudpickle.dumps(function)
        if len(self.function) > SMALL:  # once a worker: also on one that starts later, or again
            self.function = self.client.submit(bytes, self.function, key=f"data{self.topic}", pure=False)
            with suppress(ValueError):  # there is no worker, or none any more
                self.client.replicate(self.function)  # as no worker is then preferred to another for having them
        self.client.subscribe_topic(self.topic, self._receive)
        stack.callback(self._end)

    def start(self, number: int) -> Any:
        """See ``ProcessPool``."""
        self.submitted += 1
        if getattr(self.function, "status", "") == "error":  # the worker died that was to hold these bytes
            self.function.retry()
        task, connect = cloudpickle.dumps(self.tasks[number]), partial(_event_channel, self.topic, number)
        what = self.topic, self.function, task, self.names[number], connect
        future = self.client.submit(run_task, *what, key=f"{self.topic}-{self.submitted}", pure=False)
        self.at_work.add(future)
        return future

    def outcome(self, future: Any, name: str) -> Outcome:
        """See ``ProcessPool``. Raises UserError where the scheduler is gone."""
        from distributed import KilledWorker

        self.at_work.discard(future)
        try:
            return future.result()
        except KilledWorker as error:  # of another key: of the shared bytes
            died = Outcome(deaths=error.allowed_failures + 1 if error.task == future.key else 1)
        except (CancelledError, OSError):  # the scheduler went away, or the worker with the result in it
            died = Outcome(deaths=1)
        except Exception as error:
            return failure(error, name)
        if self.client.status != "running":
            raise UserError(
                f"the Dask scheduler at {self.client.scheduler.address} is gone; what was finished is kept where "
                "a folder was given"
            )
        return died

    def progress(self, numbers: Iterable[int]) -> Iterator[tuple[int, float, Figures]]:
        """See ``ProcessPool``. Warns once of a cluster that stays without workers, which may be starting again."""
        while self.reports:
            number, report = self.reports.popitem()
            if number in numbers:
                yield number, *report
        if time.monotonic() - self.counted < COUNT or self.without >= PATIENCE:
            return
        self.counted = time.monotonic()
        with suppress(OSError):
            self.without = 0.0 if self.client.nthreads() else self.without + COUNT
        if self.without >= PATIENCE:
            address = self.client.scheduler.address
            warnings.warn(
                f"the Dask scheduler at {address} has no workers, tasks are waiting for one: start it with "
                f"`dask worker {address} --nthreads 1`",
                stacklevel=6,
            )

    def _receive(self, event: tuple[float, tuple[int, float, Figures]]) -> None:
        number, share, figures = event[1]
        self.reports[number] = share, figures

    def stop(self) -> None:
        """See ``ProcessPool``: tasks that wait are taken back; those at work see it, if they ask."""
        with suppress(Exception):  # the scheduler may be away
            self.client.cancel(list(self.at_work), force=True)

    def _end(self) -> None:
        self.stop()
        with suppress(Exception):
            self.client.unsubscribe_topic(self.topic)


def _event_channel(topic: str, number: int) -> Channel:
    """To the client of a Dask cluster, by events of its scheduler; a task that is cancelled is to end."""
    from distributed import get_worker
    from distributed.worker import thread_state

    worker, key = get_worker(), thread_state.key

    def asked() -> bool:
        state = worker.state.tasks.get(key)
        return state is None or state.state == "cancelled"

    return Channel(lambda share, figures: worker.log_event(topic, [number, share, dict(figures)]), asked, EVENT)
