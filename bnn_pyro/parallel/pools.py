"""The worker processes of ``map_tasks``: on this machine, with loky, or on a Dask cluster."""

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
#: Seconds after which a worker without a task ends, so that no worker outlives a killed parent for long.
IDLE = 60.0
#: Name of the file that exists while the results of a call's tasks are wanted.
WANTED = "wanted"
#: Seconds between two reports of a task, in its file and as a Dask event.
EVERY, EVENT = 0.05, 1.0
#: (time when it became idle, worker) of idle workers, each an executor with one process, which the next call reuses.
_SPARE: list[tuple[float, ProcessPoolExecutor]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SPARE.clear)


class ProcessPool:
    """Workers that are loky executors with one process each, so that the death of a process affects one task only.

    size: number of tasks at once.   waits: whether stopped tasks get time to end by themselves.
    died: the error (or errors) of a future whose process died.
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
        """Give a task to a worker and return its future."""
        connect = partial(_file_channel, self.folder, number, os.getpid())
        args = self.folder.name, self.function, cloudpickle.dumps(task), name, connect
        while True:
            worker = _worker()
            with suppress(BrokenProcessPool):  # it was killed while it had no task
                future = worker.submit(run_task, *args)
                self.workers[future] = worker
                future.add_done_callback(self._free)
                return future

    def _free(self, future: Any) -> None:
        worker = self.workers.pop(future)
        if future.exception() is None:
            _SPARE.append((time.monotonic(), worker))

    def progress(self, numbers: Iterable[int]) -> Iterator[tuple[int, float, Figures]]:
        """Yield the last reports (number, share, figures) of these tasks; a task that is just writing is left out."""
        for number in numbers:
            with suppress(ValueError, OSError):
                yield number, *json.loads((self.folder / str(number)).read_bytes())

    def stop(self) -> None:
        """Ask running tasks to end, by removing a file, which works on a full disk too."""
        (self.folder / WANTED).unlink(missing_ok=True)

    def _end(self) -> None:
        """Kill the processes that still run."""
        for worker in list(self.workers.values()):
            worker.shutdown(wait=True, kill_workers=True)


def _worker() -> ProcessPoolExecutor:
    """Return a worker that computes on one thread and ignores Ctrl-C from its start: the parent handles it."""
    while _SPARE:  # reuse only a worker whose process still runs: loky may not notice the death of a restarted one
        since, worker = _SPARE.pop()
        if time.monotonic() - since < IDLE / 2:
            return worker
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    ignore = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    return ProcessPoolExecutor(1, timeout=IDLE, env=threads, **ignore)


@cache
def _end_with(parent: int) -> None:
    """End this process when its parent is killed, even within a step: a resumed run may repeat its task."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(EVERY)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _file_channel(folder: Path, number: int, parent: int) -> Channel:
    """Connect a task to the parent on the same machine by a file; the task should end if ``WANTED`` is removed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent handles signals
    _end_with(parent)
    file, wanted = folder / str(number), folder / WANTED

    def send(share: float, figures: Figures) -> None:
        with suppress(OSError):  # a full disk is not an error of the task
            file.write_text(json.dumps([share, dict(figures)], default=float))

    send(0.0, {})
    return Channel(send, lambda: not wanted.exists(), EVERY)


class DaskPool:
    """Workers of a Dask cluster; all tasks are submitted at once and wait in Dask's queue. See ``ProcessPool``."""

    size, waits = math.inf, False

    def __init__(self, stack: ExitStack, client: Any, function: Callable) -> None:
        import dask
        from distributed import KilledWorker

        self.died = KilledWorker, CancelledError, OSError  # the last two: the worker that had the result is gone
        self.client, self.at_work, self.reports = client, set(), deque()
        # Every task has its own name: Dask expects tasks of one name to take equally long, and may not move short ones.
        self.topic, self.keys = f"task{uuid.uuid4().hex}", itertools.count()
        stack.callback(random.setstate, random.getstate())  # Dask draws random numbers to estimate sizes of data
        stack.enter_context(dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 PiB"}))
        # The function is sent once to each worker, also to workers that start later.
        self.function = self.client.submit(bytes, cloudpickle.dumps(function), key=f"data{self.topic}", pure=False)
        with suppress(ValueError):  # there are no workers
            self.client.replicate(self.function)  # so that no worker is preferred because it has the function
        self.client.subscribe_topic(self.topic, lambda event: self.reports.append(event[1]))
        stack.callback(self._end)

    def start(self, number: int, task: Any, name: str) -> Any:
        """See ``ProcessPool``."""
        if self.function.status == "error":  # the worker that held the function died
            self.function.retry()
        args = self.topic, self.function, cloudpickle.dumps(task), name, partial(_event_channel, self.topic, number)
        future = self.client.submit(run_task, *args, key=f"{self.topic}-{next(self.keys)}", pure=False)
        self.at_work.add(future)
        future.add_done_callback(self.at_work.discard)
        return future

    def progress(self, numbers: Iterable[int]) -> Iterator[tuple[int, float, Figures]]:
        """See ``ProcessPool``. Raises UserError if the scheduler is gone."""
        if self.client.status != "running":
            place = self.client.scheduler.address
            raise UserError(f"the Dask scheduler at {place} is gone; finished results are kept if a folder was given")
        while self.reports:
            yield self.reports.popleft()

    def stop(self) -> None:
        """See ``ProcessPool``; waiting tasks are cancelled, running ones can see it with ``should_stop``."""
        with suppress(Exception):  # the scheduler may be gone
            self.client.cancel(list(self.at_work), force=True)

    def _end(self) -> None:
        self.stop()
        with suppress(Exception):
            self.client.unsubscribe_topic(self.topic)


def _event_channel(topic: str, number: int) -> Channel:
    """Connect a task to the client of a Dask cluster by events of the scheduler; it should end if it is cancelled."""
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def unwanted() -> bool:
        state = worker.state.tasks.get(key)
        return state is None or state.state == "cancelled"

    return Channel(lambda share, figures: worker.log_event(topic, [number, share, dict(figures)]), unwanted, EVENT)


#: One task at a time runs in a process, because all share its parameter store, random generators and threads.
_ALONE = threading.Lock()
#: {call: the function of its tasks} of the last call, so that a function with much data is unpickled once per process.
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {}


def one_thread() -> AbstractContextManager[None]:
    """Return ``isolation.one_thread()``, or nothing in a worker without torch, which starts with one thread."""
    if "torch" not in sys.modules and os.environ.get("OMP_NUM_THREADS") == "1":
        return nullcontext()
    from bnn_pyro import isolation

    return isolation.one_thread()


def run_task(call: str, function: bytes | Path, task: bytes, name: str, connect: Callable[[], Channel]) -> bytes:
    """Run a task in a worker; return pickled (whether it succeeded, its result or error, warnings of the package).

    call: a name for the call of ``map_tasks``.   function: pickled, or the file that has the pickled function.
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
                users = (w for w in caught if issubclass(w.category, UserWarning) and w.filename.startswith(PACKAGE))
                return cloudpickle.dumps((True, result, [str(w.message) for w in users]))
        except BaseException as error:
            return _failure(error, name)


def _failure(error: BaseException, name: str) -> bytes:
    """Pickle the error of a task, with the task's name; an error that cannot be pickled becomes a RuntimeError."""
    where = "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):  # it would end the caller without a message
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
    """Add the name of a task to its error: to the message of a UserError, as a note to any other."""
    if isinstance(error, UserError):
        return type(error)(f"{name}: {error}")
    error.add_note(f"in {name}")
    return error
