"""Isolation from global state: the only file that accesses Pyro's parameter store and the global random generators.

In Pyro's global parameter store, a new guide starts at the optimum of an earlier guide of the same name.
``pyro.set_rng_seed`` also seeds ``random`` and numpy, which ``torch.random.fork_rng`` does not restore. Everything in
this package that samples or trains therefore runs inside ``isolated``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyro
import pyro.util
import torch
from threadpoolctl import threadpool_limits
from torch.utils.data import get_worker_info

from bnn_pyro.errors import UserError


@contextmanager
def isolated(seed: int | None = None) -> Iterator[None]:
    """Run a block with an empty parameter store, module-local parameters and float32; all are restored on exit.

    seed: if given, torch (CPU and every CUDA device), numpy and ``random`` are seeded with it, and their previous
        states are restored on exit. Without a seed the block uses the caller's generators, which advance as usual.
    Raises UserError unless the seed is an integer between 0 and 2³² - 1.
    """
    if seed is not None and not (isinstance(seed, int | np.integer) and 0 <= seed < 2**32):
        raise UserError(f"a seed must be a whole number that lies between 0 and 2³² - 1, got {seed!r:.40}")
    dtype = torch.get_default_dtype()
    states = (pyro.util.get_rng_state(), generator_state()) if seed is not None else None
    try:
        torch.set_default_dtype(torch.float32)
        with pyro.get_param_store().scope(), pyro.settings.context(module_local_params=True):
            if seed is not None:
                pyro.set_rng_seed(int(seed))
            yield
    finally:
        torch.set_default_dtype(dtype)
        if states is not None:
            pyro.util.set_rng_state(states[0])
            set_generator_state(states[1])  # of CUDA devices too


def generator_state() -> list[torch.Tensor]:
    """The states of torch's generators, CPU first, then each CUDA device; a checkpoint contains them.

    In a data loader's worker process, a fork that cannot use CUDA, only the state of the CPU is returned.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and get_worker_info() is None else []
    return [torch.get_rng_state(), *cuda]


def set_generator_state(states: list[torch.Tensor]) -> None:
    """Restore the states that :func:`generator_state` returned, for the CUDA devices that exist on this machine."""
    torch.set_rng_state(states[0])
    if torch.cuda.is_available() and len(states) > 1:
        torch.cuda.set_rng_state_all(states[1 : 1 + torch.cuda.device_count()])


def set_stream(*numbers: int) -> None:
    """Seed torch's generators by several integers; different integers give independent streams."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))


def chain_seed(seed: int, chain: int, stream: int = 0) -> int:
    """A separate seed for each chain of a run, and for each ``stream``: a purpose within a chain."""
    return int(np.random.SeedSequence([seed, chain, stream]).generate_state(1)[0])


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread for torch and numpy's linear algebra, because the number of threads changes sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)
