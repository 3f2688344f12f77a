"""The workers of a Dask cluster: tasks as futures of a ``distributed.Client``."""

from __future__ import annotations

import contextlib
import hashlib
import math
import queue
import random
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import cloudpickle

from bnn_pyro.errors import UserError
from bnn_pyro.parallel.executor import Executor
from bnn_pyro.parallel.task import Died, Figures, Lost, Outcome, run_task

__all__ = ["DaskPool"]

#: Bytes that travel with each task, rather than once to each worker.
SMALL = 2**15

#: Seconds between two counts of a cluster's workers, and that it may be without any before that is told.
COUNT, PATIENCE = 5.0, 30.0

#: Seconds between two events by which a task reports its progress.
EVENT = 1.0


class DaskPool:
    """All tasks as futures, which Dask keeps in a queue until a worker is free; see ``map.Pool``."""

    size, grace = math.inf, 0.0  # nothing waits for a cluster's tasks

    def __init__(
        self, stack: contextlib.ExitStack, where: Executor, function: Callable, tasks: Sequence, names: Sequence[str]
    ) -> None:
        import dask

        self.client, self.tasks, self.names = where.client, tasks, names
        # Dask takes tasks of one name to last as long as each other, and one that it knows to be short stays where
        # its data are, however long the queue there is.
        self.topic, self.submitted = f"task{uuid.uuid4().hex}", 0
        self.numbers: dict[Any, int] = {}
        self.done: queue.SimpleQueue = queue.SimpleQueue()
        self.heard: dict[int, tuple[float, Figures]] = {}
        self.counted, self.without = time.monotonic(), 0.0
        stack.callback(random.setstate, random.getstate())  # by which Dask measures a sample of what it sends
        # Dask would warn of data in a task.
        stack.enter_context(dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 PiB"}))
        blob = cloudpickle.dumps(function)
        self.function, self.digest = self._shared(blob), hashlib.sha256(blob).hexdigest()
        self.client.subscribe_topic(self.topic, self._hear)
        stack.callback(self._end)

    def _shared(self, blob: bytes) -> Any:
        """The bytes on the cluster, once a worker: also on one that starts later, or again. Few go with each task."""
        if len(blob) <= SMALL:
            return blob
        future = self.client.submit(bytes, blob, key=f"data{self.topic}", pure=False)
        if self.client.nthreads():
            self.client.replicate(future)  # as no worker is then preferred to another for having them
        return future

    def start(self, number: int) -> None:
        """See ``Pool``."""
        self.submitted += 1
        task, channel = cloudpickle.dumps(self.tasks[number]), EventChannel(self.topic, number)
        what = self.function, self.digest, task, self.names[number], channel
        future = self.client.submit(run_task, *what, key=f"{self.topic}-{self.submitted}", pure=False)
        self.numbers[future] = number
        future.add_done_callback(self.done.put)

    def ended(self, timeout: float) -> Iterator[tuple[int, Outcome | Died | Lost]]:
        """See ``Pool``. Raises UserError where the scheduler is gone."""
        try:
            future = self.done.get(timeout=timeout)
        except queue.Empty:
            self._count_workers()
            return
        number, outcome = self.numbers.pop(future), _outcome(future)
        if isinstance(outcome, Died) and self.client.status != "running":
            raise UserError(
                f"the Dask scheduler at {self.client.scheduler.address} is gone; what was finished is kept where "
                "a folder was given"
            )
        yield number, outcome

    def _count_workers(self) -> None:
        """Tell once of a cluster that stays without: workers may be starting, or starting again."""
        if time.monotonic() - self.counted < COUNT or self.without >= PATIENCE:
            return
        self.counted = time.monotonic()
        with contextlib.suppress(OSError):
            self.without = 0.0 if self.client.nthreads() else self.without + COUNT
        if self.without >= PATIENCE:
            address = self.client.scheduler.address
            warnings.warn(
                f"the Dask scheduler at {address} has no workers, tasks are waiting for one: start it with "
                f"`dask worker {address} --nthreads 1`",
                stacklevel=6,
            )

    def _hear(self, event: tuple[float, tuple[int, float, Figures]]) -> None:
        number, share, figures = event[1]
        self.heard[number] = share, figures

    def progress(self) -> Iterator[tuple[int, float, Figures]]:
        """See ``Pool``."""
        at_work = set(self.numbers.values())
        while self.heard:
            number, (share, figures) = self.heard.popitem()
            if number in at_work:
                yield number, share, figures

    def stop(self) -> None:
        """See ``Pool``: tasks that wait are taken back; those at work see it, if they ask."""
        with contextlib.suppress(Exception):  # the scheduler may be away
            self.client.cancel(list(self.numbers), force=True)

    def _end(self) -> None:
        self.stop()
        with contextlib.suppress(Exception):
            self.client.unsubscribe_topic(self.topic)


def _outcome(future: Any) -> Outcome | Died | Lost:
    from distributed import KilledWorker

    try:
        return future.result()
    except KilledWorker as error:  # it may have been computing the shared bytes again, for another task
        return Died(error.allowed_failures + 1 if error.task == future.key else 0)
    except (CancelledError, OSError):  # the scheduler went away, or the worker with the result in it
        return Died()
    except Exception as error:
        return Lost(error)


class EventChannel:
    """To the client of a Dask cluster, by events of its scheduler: one a second at most."""

    def __init__(self, topic: str, number: int) -> None:
        self.topic, self.number, self.last = topic, number, 0.0

    def begin(self) -> None:
        """See ``Channel``."""
        from distributed import get_worker
        from distributed.worker import thread_state

        self.worker, self.key = get_worker(), thread_state.key

    def send(self, share: float, figures: Figures) -> None:
        """See ``Channel``."""
        if time.monotonic() - self.last >= EVENT:
            self.last = time.monotonic()
            self.worker.log_event(self.topic, [self.number, share, dict(figures)])

    @property
    def stopping(self) -> bool:
        """Whether the task was cancelled, or its client is gone."""
        state = self.worker.state.tasks.get(self.key)
        return state is None or state.state == "cancelled"
