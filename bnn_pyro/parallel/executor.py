"""Where tasks run: in this process, in processes of this machine, or on a Dask cluster; said once, for a whole block.

    with executor("dask://10.0.0.1:8786"):
        fit("mean-field", data, NUTS(chains=64))

Importing this module imports neither torch, loky nor Dask.
"""

import contextlib
import logging
import multiprocessing
import random
import re
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from bnn_pyro.errors import UserError

EXECUTORS = "here, processes, processes:4, dask, dask:4 (a cluster of this machine) or dask://HOST:PORT (a scheduler)"

#: Seconds in which a scheduler must answer.
ANSWER = 10.0

#: What must be the same on workers, for results to be the same bit for bit.
PACKAGES = ("bnn-pyro", "torch", "pyro-ppl", "numpy")

#: Settings of a cluster of our own. A task that kills its worker is ours to try again, Dask would let it kill four. A
#: worker that is starting again 15 seconds after its death, as one that died twice may be, would be given up for good.
#: Workers start with these variables and not with Dask's MALLOC_TRIM_THRESHOLD_, by which every step of a fit gives
#: its memory back and asks for it again: a fit of 784-400-400-10 takes twice as long.
OURS = {
    "distributed.scheduler.allowed-failures": 0,
    "distributed.deploy.lost-worker-timeout": "1 hour",
    "distributed.nanny.pre-spawn-environ": {f"{name}_NUM_THREADS": 1 for name in ("OMP", "MKL", "OPENBLAS")},
}

#: What a worker of our own does first: Ctrl-C at a terminal is the parent's to answer.
IGNORE_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"


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
            chosen = Executor("dask", client=connect(chosen.client, chosen.workers or usable_cores(), stack))
        stack.callback(_CURRENT.reset, _CURRENT.set(chosen))
        yield


def usable_cores() -> int:
    """Cores that this process may use: 1 in a task, and in a process that is itself one of several."""
    current = current_executor()
    if (current is not None and current.kind == "here") or multiprocessing.parent_process() is not None:
        return 1
    if current is not None and current.kind == "processes" and current.workers:
        return current.workers
    import loky

    return loky.cpu_count()


# -- Dask clusters -----------------------------------------------------------------------------------------------------
def connect(client: Any, workers: int, stack: contextlib.ExitStack) -> Any:
    """A ``distributed.Client``; what was opened for it is closed with ``stack``.

    client: None for a cluster of this machine with so many workers, the address of a scheduler, a Client, or a cluster.

    Raises UserError where ``distributed`` is missing, the scheduler does not answer, or a worker has no bnn_pyro.
    """
    try:
        import dask
        import distributed
    except ImportError:
        raise UserError('this executor needs the package distributed: pip install "bnn-pyro[cluster]"') from None
    if client is None:
        stack.enter_context(dask.config.set(OURS))
        client = stack.enter_context(
            distributed.LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",  # a port that is free, where None means 8787
                silence_logs=logging.CRITICAL,
                preload=IGNORE_SIGINT,
            )
        )
    if isinstance(client, str) or hasattr(client, "scheduler_address"):
        logger, state = logging.getLogger("distributed.client"), random.getstate()
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)  # what it logs of a scheduler that is away, we raise
        try:
            client = stack.enter_context(distributed.Client(client, timeout=ANSWER, set_as_default=False))
        except (OSError, TimeoutError, ValueError) as error:
            place = client.replace("tcp:", "dask:") if isinstance(client, str) else client
            raise UserError(
                f"no Dask scheduler answers at {place} ({type(error).__name__}); start one with `dask scheduler`, and "
                "workers with `dask worker HOST:PORT --nthreads 1`"
            ) from None
        finally:
            random.setstate(state)  # by which it waits before it tries again
    if not isinstance(client, distributed.Client):
        raise UserError(f"an executor is a text, a distributed.Client or a Dask cluster, got {client!r}")
    if client.asynchronous:
        raise UserError("an asynchronous distributed.Client cannot be waited for; make one with asynchronous=False")
    check_workers(client)
    return client


def versions() -> dict[str, str]:
    """Of Python and of the packages that results depend on, in this process."""
    installed = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def check_workers(client: Any) -> None:
    """Raises UserError where a worker cannot import this package; warns of no worker, other versions, many threads."""
    local, doubts = versions(), []
    for worker, there in client.run(versions, on_error="return").items():
        if isinstance(there, Exception):
            raise UserError(f"the Dask worker {worker} cannot import bnn_pyro ({there}): install it there too")
        other = [f"{k} {there.get(k, 'none')} (here {local[k]})" for k in local if there.get(k) != local[k]]
        if other:
            doubts.append(f"the Dask worker {worker} has {', '.join(other)}: results may differ from those of this "
                          "machine")  # fmt: skip
    threads, address = max(client.nthreads().values(), default=0), client.scheduler.address
    if not threads:
        doubts.append(f"the Dask scheduler at {address} has no workers yet, tasks wait for one: start it with "
                      f"`dask worker {address} --nthreads 1`")  # fmt: skip
    if threads > 1:
        doubts.append(f"a Dask worker with {threads} threads runs one task at a time all the same, as Pyro's state is "
                      "a process's own; start workers with --nthreads 1 --nworkers N to use its cores")  # fmt: skip
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=6)
