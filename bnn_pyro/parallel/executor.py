"""Where tasks run: in this process, in processes of this machine, or on a Dask cluster; said once, for a whole block.

    with executor("dask://10.0.0.1:8786"):
        fit("mean-field", data, NUTS(chains=64))

Importing this module imports neither torch, loky nor Dask.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from bnn_pyro.errors import UserError

__all__ = [
    "EXECUTORS", "Executor", "current_executor", "executor", "forced", "on_cluster", "parse_executor", "usable_cores",
]  # fmt: skip

EXECUTORS = "here, processes, processes:4, dask, dask:4 (a cluster of this machine) or dask://HOST:PORT (a scheduler)"


@dataclass(frozen=True)
class Executor:
    """Where tasks run.

    kind     here, processes or dask
    workers  how many; 0: as many as there are cores
    client   of dask: None for a cluster of this machine, the address of a scheduler, or a ``distributed.Client``
    """

    kind: str
    workers: int = 0
    client: Any = None


_CURRENT: ContextVar[Executor | None] = ContextVar("executor", default=None)


def current_executor() -> Executor | None:
    """That of the innermost ``with executor(…)``; None outside."""
    return _CURRENT.get()


def on_cluster() -> bool:
    """Whether tasks go to a Dask cluster, where files of this machine may be out of reach."""
    current = current_executor()
    return current is not None and current.kind == "dask"


def parse_executor(text: str) -> Executor:
    """What an executor's text asks for; nothing is started. Raises UserError for a text that is none of them."""
    name, _, rest = text.partition(":")
    if text == "here":
        return Executor("here")
    if name in ("processes", "dask") and re.fullmatch(r"(:[1-9]\d*)?", text.removeprefix(name)):
        return Executor(name, int(rest or 0))
    if re.fullmatch(r"dask://\S+:\d+/?", text):
        return Executor("dask", client="tcp:" + rest.rstrip("/"))
    raise UserError(f"unknown executor '{text}'; valid: {EXECUTORS}")


@contextlib.contextmanager
def executor(where: Any) -> Iterator[None]:
    """Chains, members, replications and fits of the block run there; their results are the same everywhere.

    where: ``"here"``: one after the other in this process. ``"processes"`` or ``"processes:4"``: on this machine, by
        loky. ``"dask"`` or ``"dask:4"``: a Dask cluster on this machine, closed at the end (call it under
        ``if __name__ == "__main__"`` in a script). ``"dask://host:port"``: a Dask scheduler that is running, with its
        workers (``dask worker host:port --nthreads 1``). A ``distributed.Client``, or a cluster object such as
        ``distributed.LocalCluster`` or one of dask-jobqueue. None: as it was.

    Raises UserError for anything else, where the package ``distributed`` is missing, and where the scheduler does not
    answer or a worker has no bnn_pyro.
    """
    if where is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        chosen = parse_executor(where) if isinstance(where, str) else Executor("dask", client=where)
        if chosen.kind == "dask":
            from bnn_pyro.parallel.cluster import connect

            chosen = Executor("dask", client=connect(chosen.client, chosen.workers or usable_cores(), stack))
        stack.enter_context(forced(chosen))
        yield


@contextlib.contextmanager
def forced(chosen: Executor) -> Iterator[None]:
    """As ``executor``, with one that is there already."""
    token = _CURRENT.set(chosen)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def usable_cores() -> int:
    """Cores that this process may use: 1 in a task, and in a process that is itself one of several."""
    current = current_executor()
    if (current is not None and current.kind == "here") or multiprocessing.parent_process() is not None:
        return 1
    if current is not None and current.kind == "processes" and current.workers:
        return current.workers
    import loky

    return loky.cpu_count()
