"""Choose where the tasks of a block run: in this process, in processes of this machine, or on a Dask cluster.

    with executor("dask://10.0.0.1:8786"):
        fit("mean-field", data, NUTS(chains=64))

Importing this module imports neither torch, loky nor Dask.
"""

import contextlib
import logging
import multiprocessing
import re
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from bnn_pyro.errors import UserError, refusing

#: Seconds in which a scheduler must answer.
ANSWER = 10.0
#: Packages whose versions must agree on all workers for results that are bit for bit the same.
PACKAGES = ("bnn-pyro", "torch", "pyro-ppl", "numpy")

#: A number of processes (1: this process, 0: as many as there are cores), or a ``distributed.Client``.
_CURRENT: ContextVar[Any] = ContextVar("executor", default=None)


def current_executor() -> Any:
    """Return the executor of the innermost ``with executor(…)``: a number of processes or a Dask client, else None."""
    return _CURRENT.get()


def on_cluster() -> bool:
    """Return whether tasks run on a Dask cluster, where files of this machine may not exist."""
    return not isinstance(current_executor(), int | None)


def parse_executor(text: str) -> int | str:
    """Parse an executor to a number of processes or the address of a scheduler. Raises UserError for other texts."""
    if text == "here":
        return 1
    if re.fullmatch(r"processes(:[1-9]\d*)?", text):
        return int(text.partition(":")[2] or 0)
    if re.fullmatch(r"dask://\S+:\d+/?", text):
        return text.replace("dask", "tcp", 1).rstrip("/")
    valid = "here, processes, processes:4 or dask://HOST:PORT (a scheduler)"
    raise UserError(f"unknown executor '{text}'; valid: {valid}")


@contextlib.contextmanager
def executor(where: Any) -> Iterator[None]:
    """Run chains, members, replications and fits of a block on an executor; results are the same on every executor.

    where: ``"here"``: one after the other in this process. ``"processes"`` or ``"processes:4"``: on this machine, with
        loky. ``"dask://host:port"``: on the workers (``dask worker host:port --nthreads 1``) of a running Dask
        scheduler. A ``distributed.Client``, or a cluster such as ``LocalCluster`` or dask-jobqueue's. None: no change.
    Raises UserError for other values, if ``distributed`` is missing, no scheduler answers or a worker lacks bnn_pyro.
    """
    with contextlib.ExitStack() as stack:
        if where is not None:
            chosen = parse_executor(where) if isinstance(where, str) else where
            if chosen is where or isinstance(chosen, str):  # an object of Dask, or an address
                chosen = connect(chosen, stack)
            stack.callback(_CURRENT.reset, _CURRENT.set(chosen))
        yield


def usable_cores() -> int:
    """Return the number of cores that this process may use: 1 in a task, and in any child process."""
    if multiprocessing.parent_process() is not None:
        return 1
    if not on_cluster() and current_executor():
        return current_executor()
    import loky

    return loky.cpu_count()


def connect(client: Any, stack: contextlib.ExitStack) -> Any:
    """Connect to an address or a cluster. Raises UserError if nothing answers or bnn_pyro is missing there."""
    with refusing('this executor needs the package distributed: pip install "bnn-pyro[cluster]"', ImportError):
        import distributed
    if isinstance(client, str) or hasattr(client, "scheduler_address"):
        logger = logging.getLogger("distributed.client")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)  # an absent scheduler is reported by the error below
        try:
            client = stack.enter_context(distributed.Client(client, timeout=ANSWER, set_as_default=False))
        except (OSError, TimeoutError, ValueError) as error:
            place = client.replace("tcp:", "dask:") if isinstance(client, str) else client
            raise UserError(f"no Dask scheduler answers at {place} ({type(error).__name__}); start one with `dask "
                            "scheduler`, and workers with `dask worker HOST:PORT --nthreads 1`") from None  # fmt: skip
    if not isinstance(client, distributed.Client) or client.asynchronous:
        raise UserError(f"an executor is a text, a synchronous distributed.Client or a Dask cluster, got {client!r}")
    check_workers(client)
    return client


def check_workers(client: Any) -> None:
    """Raise UserError if a worker cannot import this package; warn if versions differ or there are no workers."""
    client.get_versions(check=True, packages=PACKAGES)
    for worker, answer in client.run(usable_cores, on_error="return").items():
        if isinstance(answer, Exception):
            raise UserError(f"the Dask worker {worker} cannot import bnn_pyro ({answer}): install it there too")
    if not client.nthreads():
        address = client.scheduler.address
        warnings.warn(f"the Dask scheduler at {address} has no workers yet, tasks wait for one: start it with `dask "
                      f"worker {address} --nthreads 1`", stacklevel=6)  # fmt: skip
