"""Dask clusters: found, made for a while, and looked over before tasks are sent there."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import warnings
from importlib import metadata
from typing import Any

from bnn_pyro.errors import UserError

__all__ = ["check_workers", "connect", "versions"]

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
        client = _client(client, stack)
    if not isinstance(client, distributed.Client):
        raise UserError(f"an executor is a text, a distributed.Client or a Dask cluster, got {client!r}")
    if client.asynchronous:
        raise UserError("an asynchronous distributed.Client cannot be waited for; make one with asynchronous=False")
    check_workers(client)
    return client


def _client(address: Any, stack: contextlib.ExitStack) -> Any:
    """Connected for as long as ``stack`` is open, and quiet: what it logs of a scheduler that is away, we raise."""
    import distributed

    logger = logging.getLogger("distributed.client")
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.CRITICAL)
    state = random.getstate()  # by which it waits before it tries again
    try:
        return stack.enter_context(distributed.Client(address, timeout=ANSWER, set_as_default=False))
    except (OSError, TimeoutError, ValueError) as error:
        shown = address.replace("tcp:", "dask:") if isinstance(address, str) else address
        raise UserError(
            f"no Dask scheduler answers at {shown} ({type(error).__name__}); start one with `dask scheduler`, and "
            "workers with `dask worker HOST:PORT --nthreads 1`"
        ) from None
    finally:
        random.setstate(state)


def versions() -> dict[str, str]:
    """Of Python and of the packages that results depend on, in this process."""
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def check_workers(client: Any) -> None:
    """Raises UserError where a worker cannot import this package; warns of other versions, and of many threads."""
    here = versions()
    for worker, there in client.run(versions, on_error="return").items():
        if isinstance(there, Exception):
            raise UserError(f"the Dask worker {worker} cannot import bnn_pyro ({there}): install it there too")
        other = [
            f"{name} {there.get(name, 'none')} (here {here[name]})" for name in here if there.get(name) != here[name]
        ]
        if other:
            warnings.warn(
                f"the Dask worker {worker} has {', '.join(other)}: results may differ from those of this machine",
                stacklevel=6,
            )
    threads = max(client.nthreads().values(), default=1)
    if threads > 1:
        warnings.warn(
            f"a Dask worker with {threads} threads runs one task at a time all the same, as Pyro's state is a "
            "process's own; start workers with --nthreads 1 --nworkers N to use its cores",
            stacklevel=6,
        )
