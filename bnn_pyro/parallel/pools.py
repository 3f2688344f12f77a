"""The workers of one call of ``map_tasks``: processes of this machine, by loky, or those of a Dask cluster.

A task goes there as a future, and reports from there through a channel.
"""

import itertools
import json
import math
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import cloudpickle
from loky import BrokenProcessPool, ProcessPoolExecutor

from bnn_pyro.errors import UserError
from bnn_pyro.parallel.executor import executor
from bnn_pyro.progress import Channel, Figures, should_stop

PACKAGE = str(Path(__file__).parents[1])
#: Seconds that a worker waits for another task: those of a parent that was killed end by themselves.
IDLE = 60.0
#: The file that is there as long as the results of a call's tasks are waited for.
WANTED = "wanted"
#: Seconds between two reports of a task, by its file and by an event.
EVERY, EVENT = 0.05, 1.0
#: Workers without a task, each an executor of one process, and since when: the next call need not start them again.
_SPARE: list[tuple[float, ProcessPoolExecutor]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SPARE.clear)


class ProcessPool:
    """One loky executor a worker, so that a process that dies takes one task with it.

    size: tasks at once.   waits: whether tasks have time to end by themselves once they were asked to.
    died: what the future of a task raises whose process ended.
    """

    waits, died = True, BrokenProcessPool

    def __init__(self, stack: ExitStack, size: int, function: Callable) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bnn-pyro-tasks-")))
        self.function = self.folder / "function"
        self.function.write_bytes(cloudpickle.dumps(function))
        (self.folder / WANTED).touch()
        self.size, self.workers = size, {}
        stack.callback(self._end)

    def start(self, number: int, task: Any, name: str) -> Future:
        """Give a task to a worker: its future."""
        connect = partial(_file_channel, self.folder, number, os.getpid())
        what = self.folder.name, self.function, cloudpickle.dumps(task), name, connect
        while True:
            worker = _worker()
            with suppress(BrokenProcessPool):  # it was killed while it had no task
                future = worker.submit(run_task, *what)
                self.workers[future] = worker
                future.add_done_callback(self._free)
                return future

    def _free(self, future: Any) -> None:
        worker = self.workers.pop(future)
        if future.exception() is None:
            _SPARE.append((time.monotonic(), worker))

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
        for worker in list(self.workers.values()):
            worker.shutdown(wait=True, kill_workers=True)


def _worker() -> ProcessPoolExecutor:
    """A process that computes on one thread and leaves Ctrl-C to its parent from before it has imported anything."""
    while _SPARE:  # one whose process is still there: loky may not notice the death of one that it has to start again
        since, worker = _SPARE.pop()
        if time.monotonic() - since < IDLE / 2:
            return worker
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    ignore = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    return ProcessPoolExecutor(1, timeout=IDLE, env=threads, **ignore)


@cache
def _end_with(parent: int) -> None:
    """End this process once its parent was killed, be it in the midst of a step: a resumed run may be at its task."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(EVERY)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _file_channel(folder: Path, number: int, parent: int) -> Channel:
    """To the parent on the same machine, by a file for each task; all of them are to end once ``WANTED`` is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # signals are the parent's to answer
    _end_with(parent)
    file, wanted = folder / str(number), folder / WANTED

    def send(share: float, figures: Figures) -> None:
        with suppress(OSError):  # a disk that is full is no fault of the task's
            file.write_text(json.dumps([share, dict(figures)], default=float))

    send(0.0, {})
    return Channel(send, lambda: not wanted.exists(), EVERY)


class DaskPool:
    """All tasks as futures, which Dask keeps in a queue until a worker is free; see ``ProcessPool``."""

    size, waits = math.inf, False

    def __init__(self, stack: ExitStack, client: Any, function: Callable) -> None:
        import dask
        from distributed import KilledWorker

        self.died = KilledWorker, CancelledError, OSError  # the last two: the worker with the result in it went away
        self.client, self.at_work, self.reports = client, set(), deque()
        # Dask takes tasks of one name to last alike, and leaves short ones in the queue where their data are.
        self.topic, self.keys = f"task{uuid.uuid4().hex}", itertools.count()
        stack.callback(random.setstate, random.getstate())  # by which Dask measures a sample of what it sends
        # Dask would warn of data in a task.
        stack.enter_context(dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 PiB"}))
        # Once a worker: also on one that starts later, or again.
        self.function = self.client.submit(bytes, cloudpickle.dumps(function), key=f"data{self.topic}", pure=False)
        with suppress(ValueError):  # there is no worker, or none any more
            self.client.replicate(self.function)  # as no worker is then preferred to another for having them
        self.client.subscribe_topic(self.topic, lambda event: self.reports.append(event[1]))
        stack.callback(self._end)

    def start(self, number: int, task: Any, name: str) -> Any:
        """See ``ProcessPool``."""
        if self.function.status == "error":  # the worker died that was to hold these bytes
            self.function.retry()
        what = self.topic, self.function, cloudpickle.dumps(task), name, partial(_event_channel, self.topic, number)
        future = self.client.submit(run_task, *what, key=f"{self.topic}-{next(self.keys)}", pure=False)
        self.at_work.add(future)
        future.add_done_callback(self.at_work.discard)
        return future

    def progress(self, numbers: Iterable[int]) -> Iterator[tuple[int, float, Figures]]:
        """See ``ProcessPool``. Raises UserError where the scheduler is gone."""
        if self.client.status != "running":
            raise UserError(f"the Dask scheduler at {self.client.scheduler.address} is gone; what was finished is kept "
                            "where a folder was given")  # fmt: skip
        while self.reports:
            yield self.reports.popleft()

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

    worker = get_worker()
    key = worker.get_current_task()

    def unwanted() -> bool:
        state = worker.state.tasks.get(key)
        return state is None or state.state == "cancelled"

    return Channel(lambda share, figures: worker.log_event(topic, [number, share, dict(figures)]), unwanted, EVENT)


#: Held by the task that this process is at: parameter store, random generators and threads are a process's own.
_ALONE = threading.Lock()
#: {call: the function of its tasks}, of one call: large ones, with data in them, travel once a process.
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {}


def one_thread() -> AbstractContextManager[None]:
    """``isolation.one_thread``, but that torch is not loaded for it in a worker: those of our own start with one."""
    if "torch" not in sys.modules and os.environ.get("OMP_NUM_THREADS") == "1":
        return nullcontext()
    from bnn_pyro import isolation

    return isolation.one_thread()


def run_task(call: str, function: bytes | Path, task: bytes, name: str, connect: Callable[[], Channel]) -> bytes:
    """In another process: (whether there is a result, it or else the error, what the package warned of), pickled.

    call: of ``map_tasks``, one name for all its tasks.   function: pickled, or the file that it is in.
    """
    with _ALONE, executor("here"), one_thread(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            with connect().open():
                if should_stop():
                    raise KeyboardInterrupt
                if call not in _FUNCTIONS:
                    _FUNCTIONS.clear()
                    _FUNCTIONS[call] = pickle.loads(function if isinstance(function, bytes) else function.read_bytes())
                result = _FUNCTIONS[call](pickle.loads(task))
                own = (w for w in caught if issubclass(w.category, UserWarning) and w.filename.startswith(PACKAGE))
                return cloudpickle.dumps((True, result, [str(w.message) for w in own]))
        except BaseException as error:
            return _failure(error, name)


def _failure(error: BaseException, name: str) -> bytes:
    """What a task raised, named; where that cannot travel, a RuntimeError."""
    where = "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):  # which would end the caller without a word
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error = named(error, name)
    if not isinstance(error, UserError):
        error.add_note(f"in its process:\n{where}")
    with suppress(Exception):
        blob = cloudpickle.dumps((False, error, []))
        pickle.loads(blob)
        return blob
    other = RuntimeError(f"{type(error).__name__}: {error}")
    other.__notes__ = getattr(error, "__notes__", [])
    return cloudpickle.dumps((False, other, []))


def named(error: BaseException, name: str) -> BaseException:
    """The error with the name of its task: in the message of a UserError, in a note of any other."""
    if isinstance(error, UserError):
        return type(error)(f"{name}: {error}")
    error.add_note(f"in {name}")
    return error
