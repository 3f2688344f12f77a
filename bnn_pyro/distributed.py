"""Fits in several processes, started by torchrun: the only module of the package that uses torch.distributed.

Every process (rank) runs the same program on its share of the rows and communicates through :class:`Ranks`; in a
program with one process the same calls do nothing. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from bnn_pyro.errors import UserError, check_known, refusing

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Value = TypeVar("Value")
#: Words in the errors of gloo and NCCL that say that another process is gone.
GONE = ("closed by peer", "reset by peer", "broken pipe", "gloo", "nccl", "connection refused", "timed out")


class SharedError(UserError):
    """An error that every rank raises, so that it is enough if rank 0 prints it."""


class LocalError(UserError):
    """An error of a single rank, which has to print it itself."""


class Ranks(NamedTuple):
    """One process of a fit.

    rank  its number; rank 0 writes files and prints    size  how many there are    local  its number on this machine
    """

    rank: int = 0
    size: int = 1
    local: int = 0

    #: Whether this is rank 0.
    is_rank0 = property(lambda self: self.rank == 0)
    _dist = property(lambda self: importlib.import_module("torch.distributed"))

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Run a block on every rank; if one of them raises UserError, all do, so that none waits forever."""
        if self.size == 1:
            yield
            return
        problem = None
        try:
            yield
        except UserError as error:
            problem = str(error)
        for message in self.gather(problem):
            if message is not None:
                raise SharedError(message)

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Raise UserError on every rank, with the names, unless all ranks have the same (JSON-able) values."""
        texts = self.gather({name: json.dumps(value, sort_keys=True, default=str) for name, value in values.items()})
        if (rank := next((r for r, other in enumerate(texts) if other != texts[0]), None)) is not None:
            names = ", ".join(name for name, text in texts[0].items() if text != texts[rank].get(name))
            raise SharedError(f"processes 0 and {rank} of a fit were given other things ({names}); give all the same")

    def on_rank0(self, function: Callable[[], Value]) -> Value:
        """Call ``function()`` on rank 0; return its value, or raise its UserError, on every rank."""
        if self.size == 1:
            return function()
        with self.sharing_errors():
            values = [function() if self.is_rank0 else None]
        self._dist.broadcast_object_list(values, src=0)
        return values[0]

    def total(self, x: Tensor, operation: str = "SUM") -> Tensor:
        """Return the sum over the ranks, or with ``operation="MAX"`` the maximum, elementwise, the same bits on all."""
        if self.size == 1:
            return x
        x = x.detach().clone()
        self._dist.all_reduce(x, getattr(self._dist.ReduceOp, operation))
        return x

    def part(self, rows: Tensor) -> Tensor:
        """Return this rank's share of the rows (B, …); the shares differ by at most one row and may be empty."""
        return rows if self.size == 1 else rows.tensor_split(self.size)[self.rank]

    def share_of_step(self, x: Tensor, y: Tensor, num: int) -> tuple[Tensor, Tensor, float]:
        """Return (x, y, factor of the log-likelihood) of this rank's rows of a step; without rows, one of factor 0."""
        mine = self.part(x), self.part(y)
        return (*mine, self.size * num / len(x)) if len(mine[0]) else (x[:1], y[:1], 0.0)

    def gather_rows(self, part: Tensor, num: int) -> Tensor:
        """Join the results (num, …) that each rank has computed for its share (see :meth:`part`), on every rank."""
        if self.size == 1:
            return part
        rows_of_all = part.new_empty((num, *part.shape[1:]))
        self.part(rows_of_all).copy_(part)
        for rank, rows in enumerate(rows_of_all.tensor_split(self.size)):
            if len(rows):
                self._dist.broadcast(rows, src=rank)
        return rows_of_all

    def averaged(self, module: nn.Module) -> nn.Module:
        """Return the module with rank 0's parameters; ``backward`` then averages the gradients over the ranks."""
        if self.size == 1:
            return module
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(module)

    def check_same_parameters(self, module: nn.Module, when: str) -> None:
        """Raise UserError on every rank unless the parameters are bit for bit the same on all."""
        if self.size == 1:
            return
        import torch

        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        if (apart := (self.total(flat, "MAX") + self.total(-flat, "MAX")).max().item()) != 0:
            raise SharedError(f"the processes have drifted apart ({when} parameters differ by up to {apart:.2g}): "
                              "do machines or PyTorch versions differ? The last checkpoint is from before")  # fmt: skip


def launched() -> tuple[int, int]:
    """Return (rank, number of processes) as torchrun or a similar launcher set them; (0, 1) without a launcher."""
    rank, size, *where = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if multiprocessing.parent_process() is not None or not (all(where) and rank.isdigit() and size.isdigit()):
        return 0, 1
    return int(rank), int(size)


def process_group() -> Ranks:
    """Return this process of the current process group, or a single process if there is no group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank(dist.get_rank()))


@contextlib.contextmanager
def joined_processes() -> Iterator[Ranks]:
    """Join the processes that torchrun started, if it did; a process group that exists already is used.

    gloo is the backend for CPU tensors, NCCL the one for GPU tensors. Raises UserError, which names this process, if
    the processes cannot be connected, the existing group has no backend for CPUs, or another process is gone.
    """
    import torch
    import torch.distributed as dist

    rank, size = launched()
    started = dist.is_available() and dist.is_initialized()
    if started and "gloo" not in dist.get_backend_config():
        raise UserError("this process group has no backend for CPU tensors; make it by "
                        'torch.distributed.init_process_group("cpu:gloo,cuda:nccl")')  # fmt: skip
    starts = not started and size > 1 and dist.is_available()
    if starts:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        lost = f"process {rank} of {size} could not connect to the others at {where}: {{error}}"
        with refusing(lost, RuntimeError, ValueError):
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    ranks = process_group()
    try:
        yield ranks
    except (SharedError, LocalError):
        raise
    except (UserError, RuntimeError) as error:
        is_user_error = isinstance(error, UserError)
        if ranks.size == 1 or not (is_user_error or any(word in str(error).lower() for word in GONE)):
            raise
        ended = ("another process of this fit has ended (see its own message; it may have been killed or out of "
                 "memory); the last checkpoint, if any, is whole: start all of them again, with --resume")  # fmt: skip
        raise LocalError(f"process {ranks.rank} of {ranks.size}: {error if is_user_error else ended}") from error
    if starts:
        dist.destroy_process_group()  # not after an error: it may wait for a process that is gone


def choose_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda"; every process gets its own GPU. Raises UserError without CUDA."""
    import torch

    check_known("device", ("auto", "cpu", "cuda"), name := str(name))
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for, but torch can use no GPU of this machine; take --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if (ranks := process_group()).local >= torch.cuda.device_count():
        raise UserError(f"this machine has {torch.cuda.device_count()} GPUs for {ranks.local + 1} processes or more; "
                        "start as many as it has GPUs (torchrun --nproc-per-node), or take --device cpu")  # fmt: skip
    if ranks.size == 1:
        return torch.device("cuda")
    torch.cuda.set_device(ranks.local)  # NCCL uses the current device
    return torch.device("cuda", ranks.local)
