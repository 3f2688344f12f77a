"""Pyro work that leaves nothing behind: the only file that touches the parameter store and global generators.

In Pyro's global store a fresh guide of the same name starts at the last run's optimum. ``pyro.set_rng_seed`` seeds
``random`` and numpy too, and ``torch.random.fork_rng`` does not restore those. All that samples or trains is isolated.
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
    """Run a block with module-local parameters in an empty store and float32 by default; all are put back on exit.

    seed: if given, torch (CPU and every CUDA device), numpy and ``random`` are seeded with it, and their former
        states return on exit. Without a seed the generators are the caller's and advance as usual.
    Raises UserError where the seed is no whole number between 0 and 2³² - 1.
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
    """The state of torch's generators, CPU first, then each CUDA device: what a checkpoint must hold.

    A process that reads mini-batches is a fork, which cannot use CUDA: there it is the CPU's alone.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and get_worker_info() is None else []
    return [torch.get_rng_state(), *cuda]


def set_generator_state(states: list[torch.Tensor]) -> None:
    """Put back what :func:`generator_state` returned: of as many CUDA devices as there are here."""
    torch.set_rng_state(states[0])
    if torch.cuda.is_available() and len(states) > 1:
        torch.cuda.set_rng_state_all(states[1 : 1 + torch.cuda.device_count()])


def set_stream(*numbers: int) -> None:
    """Seed torch's generators by several whole numbers: streams of other numbers have nothing to do with each other."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))


def chain_seed(seed: int, chain: int, stream: int = 0) -> int:
    """A seed of its own for every chain of a run, and for every use that the chain has for one."""
    return int(np.random.SeedSequence([seed, chain, stream]).generate_state(1)[0])


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch and for numpy's linear algebra: sums of several come out otherwise in the last digit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)
