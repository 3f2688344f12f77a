"""joblib's way to other processes, made to tell of a process that died as of any other end.

joblib gives up a whole call where a process dies, and what it had not handed over yet with it. Here a task ends with
its result, with :class:`Died` or with :class:`Lost`, and the call goes on.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol

import joblib
from joblib._parallel_backends import LokyBackend

__all__ = ["Backend", "Died", "Lost", "ProcessesBackend", "outcomes"]

#: Seconds that a worker waits for another task: those of a parent that was killed end by themselves.
IDLE = 60.0


@dataclass(frozen=True)
class Died:
    """Of a task whose process ended; ``times``: how many did, 0 where it was another's fault."""

    times: int = 1


@dataclass(frozen=True)
class Lost:
    """Of a task that did not reach its process, or whose result did not come back."""

    error: BaseException


class Backend(Protocol):
    """What ``outcomes`` needs besides what joblib does; the first argument of a call is the number of its task."""

    ended: threading.Semaphore  #: released at the end of each call
    numbers: dict[Any, int]  #: {future: number of its task}, of those that have not ended


class ProcessesBackend(LokyBackend):
    """loky, with workers that compute on one thread and leave Ctrl-C to their parent."""

    def __init__(self) -> None:
        deaf = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
        super().__init__(inner_max_num_threads=1, idle_worker_timeout=IDLE, **deaf)
        self.ended = threading.Semaphore(0)
        self.numbers: dict[Any, int] = {}

    def submit(self, func: Callable, callback: Callable | None = None) -> Any:
        """A future, also where a task before has already ended all processes."""
        try:
            future = self._workers.submit(func)
        except BrokenProcessPool as error:
            future = Future()
            future.set_exception(error)
        self.numbers[future] = func.items[0][1][0]
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Any) -> list[tuple[int, Any]]:
        """[(number of the task, its end)]."""
        number = self.numbers.pop(out, -1)
        try:
            return [(number, out.result()[0])]
        except BrokenProcessPool:
            return [(number, Died())]
        except Exception as error:
            return [(number, Lost(error))]
        finally:
            self.ended.release()


def outcomes(
    backend: Backend, calls: Sequence[tuple], cores: int, look: Callable[[], None], every: float
) -> Iterator[Any]:
    """What ``joblib.delayed`` calls end with, as they end; ``look`` is called every so many seconds meanwhile.

    However this generator ends, so do the calls that are not done.
    """
    outputs = joblib.Parallel(
        n_jobs=cores, backend=backend, return_as="generator_unordered", batch_size=1, pre_dispatch="all"
    )(calls)
    try:
        for _ in calls:
            while not backend.ended.acquire(timeout=every):
                look()
            yield next(outputs)
        next(outputs, None)
    except BaseException:
        with contextlib.suppress(KeyboardInterrupt):  # closed without a word, unlike by close()
            outputs.throw(KeyboardInterrupt)
        raise
