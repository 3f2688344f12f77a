"""Where tasks run: in this process, in processes of this machine, or on a Dask cluster; said once, for a whole block.

    with executor("dask://10.0.0.1:8786"):
        fit("mean-field", data, NUTS(chains=64))

Importing this file imports neither torch nor Dask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from bnn_pyro.executors.where import Cluster, Here, Processes, forced, in_force, parse

__all__ = ["executor", "in_force", "parse"]


@contextlib.contextmanager
def executor(where: Any) -> Iterator[None]:
    """Chains, members, replications and fits of the block run there; their results are the same everywhere.

    where: ``"here"``: one after the other in this process. ``"processes"`` or ``"processes:4"``: on this machine, by
        joblib's loky. ``"dask"`` or ``"dask:4"``: a Dask cluster on this machine, closed at the end (call it under
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
        chosen = parse(where) if isinstance(where, str) else where
        if not isinstance(chosen, Here | Processes):
            from bnn_pyro.executors.dask import connect

            chosen = Cluster(connect(chosen, stack))
        with forced(chosen):
            yield
