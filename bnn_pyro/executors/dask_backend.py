"""joblib's Dask backend, made to tell of a worker that died as of any other end.

joblib's own collects results in a loop that takes no notice of a task that ended in an error of the cluster's, such as
KilledWorker, and waits for it for ever. It runs all tasks in the calling process where the cluster has a single thread,
and cancels nothing. This one goes by the callbacks of Dask's futures, which come for every end.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import dask
from distributed import KilledWorker
from joblib._dask import DaskDistributedBackend

from bnn_pyro.executors.backends import Died, Lost

__all__ = ["ClusterBackend"]


#: Bytes that travel with each task, rather than once to each worker.
FEW = 2**15


class ClusterBackend(DaskDistributedBackend):
    """Tasks as futures of a ``distributed.Client``; see ``backends.Backend``."""

    def __init__(self, client: Any) -> None:
        super().__init__(client=client)
        # Dask takes tasks of one name to last as long as each other, and one that it knows to be short stays where
        # its data are, however long the queue there is.
        self.name = f"task{uuid.uuid4().hex}"
        self.ended = threading.Semaphore(0)
        self.numbers: dict[Any, int] = {}

    def start_call(self) -> None:
        """Nothing to start: no collector."""

    def stop_call(self) -> None:
        """Nothing to stop."""

    def effective_n_jobs(self, n_jobs: int) -> int:
        """More than one, whatever workers there are: joblib would run the tasks here, not on a single worker."""
        return 2

    def share(self, blob: bytes) -> Any:
        """The bytes on the cluster, once a worker: also on one that starts later, or again. Few go with each task."""
        if len(blob) <= FEW:
            return blob
        with _of_any_size():
            future = self.client.submit(bytes, blob, key=f"data{self.name}", pure=False)
        if self.client.nthreads():
            self.client.replicate(future)  # as no worker is then preferred to another for having them
        return future

    def submit(self, func: Any, callback: Callable | None = None) -> Any:
        """The future of a task, which Dask itself keeps in a queue until a worker is free."""
        ((function, args, kwargs),) = func.items
        with _of_any_size():
            future = self.client.submit(function, *args, key=f"{self.name}-{args[0]}", pure=False, **kwargs)
        self.numbers[future] = args[0]
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Any) -> list[tuple[int, Any]]:
        """[(number of the task, its end)]."""
        number = self.numbers.pop(out, -1)
        try:
            return [(number, out.result())]
        except KilledWorker as error:  # it may have been computing the shared bytes again, for another task
            return [(number, Died(error.allowed_failures + 1 if error.task == out.key else 0))]
        except (CancelledError, OSError):  # the scheduler went away, or the worker with the result in it
            return [(number, Died())]
        except Exception as error:
            return [(number, Lost(error))]
        finally:
            self.ended.release()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Tasks that wait are taken back; those at work are told, if they ask."""
        with contextlib.suppress(Exception):  # the scheduler may be away
            self.client.cancel(list(self.numbers), force=True)
        self.numbers.clear()


@contextlib.contextmanager
def _of_any_size() -> Iterator[None]:
    """Dask would warn of data in a task."""
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 PiB"}):
        yield
