"""The processes of one fit, which torchrun starts: all of the package that talks to torch.distributed.

Every process (a rank) runs the same program on its share of the rows. What they must agree on goes through
:class:`Ranks`; in a program that runs alone the same calls do nothing. Importing this file does not import torch.
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
#: What the errors of gloo and NCCL say when the other end of a connection has gone.
GONE = ("closed by peer", "reset by peer", "broken pipe", "gloo", "nccl", "connection refused", "timed out")


class Agreed(UserError):
    """An error that every rank raises alike, so that one of them may tell it for all."""


class Alone(UserError):
    """An error of one rank, which has to tell it by itself."""


class Ranks(NamedTuple):
    """This process among those of a fit.

    rank  its number; 0 writes files and speaks to the user     size  how many     local  its number on this machine
    """

    rank: int = 0
    size: int = 1
    local: int = 0

    #: Whether this is the one that writes and speaks.
    first = property(lambda self: self.rank == 0)
    _dist = property(lambda self: importlib.import_module("torch.distributed"))

    def gather(self, value: Value) -> list[Value]:
        """The values of all ranks, in their order, on all."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """A block of each; where one raises UserError in it all do, so that none waits for another in vain."""
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
                raise Agreed(message)

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Raises UserError on all, with their names, unless these JSON-able values are everybody's."""
        texts = self.gather({name: json.dumps(value, sort_keys=True, default=str) for name, value in values.items()})
        if (rank := next((r for r, other in enumerate(texts) if other != texts[0]), None)) is not None:
            what = ", ".join(name for name, text in texts[0].items() if text != texts[rank].get(name))
            raise Agreed(f"processes 0 and {rank} of this fit were given other things ({what}); give all the same")

    def first_does(self, function: Callable[[], Value]) -> Value:
        """``function()`` of rank 0: its value or its UserError on all."""
        if self.size == 1:
            return function()
        with self.agreed():
            values = [function() if self.first else None]
        self._dist.broadcast_object_list(values, src=0)
        return values[0]

    def total(self, x: Tensor, how: str = "SUM") -> Tensor:
        """The sum over the ranks, elementwise, or the largest with ``how="MAX"``; the same bits on all."""
        if self.size == 1:
            return x
        x = x.detach().clone()
        self._dist.all_reduce(x, getattr(self._dist.ReduceOp, how))
        return x

    def part(self, rows: Tensor) -> Tensor:
        """This rank's share of (B, …): lengths differ by one at most, and may be 0."""
        return rows if self.size == 1 else rows.tensor_split(self.size)[self.rank]

    def share_of_step(self, x: Tensor, y: Tensor, num: int) -> tuple[Tensor, Tensor, float]:
        """(x, y, factor of their log-likelihood) of this rank's rows of a step; one row of factor 0 if it has none."""
        mine = self.part(x), self.part(y)
        return (*mine, self.size * num / len(x)) if len(mine[0]) else (x[:1], y[:1], 0.0)

    def joined_rows(self, part: Tensor, num: int) -> Tensor:
        """(num, …) on all, of the shares (see :meth:`part`) that each has computed."""
        if self.size == 1:
            return part
        whole = part.new_empty((num, *part.shape[1:]))
        self.part(whole).copy_(part)
        for rank, rows in enumerate(whole.tensor_split(self.size)):
            if len(rows):
                self._dist.broadcast(rows, src=rank)
        return whole

    def averaged(self, module: nn.Module) -> nn.Module:
        """The module, with rank 0's parameters, whose gradients come out of ``backward`` as means over the ranks."""
        if self.size == 1:
            return module
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(module)

    def check_alike(self, module: nn.Module, when: str) -> None:
        """Raises UserError on all where a parameter is not the same, bit for bit, on every rank."""
        if self.size == 1:
            return
        import torch

        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        if (apart := (self.total(flat, "MAX") + self.total(-flat, "MAX")).max().item()) != 0:
            raise Agreed(f"the {self.size} processes of this fit have drifted apart ({when} their parameters differ by "
                         f"up to {apart:.2g}): are their machines and versions of PyTorch alike? The last checkpoint "
                         "is from before")  # fmt: skip


def launched() -> tuple[int, int]:
    """(rank, how many) of the processes that torchrun, or a launcher like it, started; (0, 1) where none did."""
    rank, size, *where = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if multiprocessing.parent_process() is not None or not (all(where) and rank.isdigit() and size.isdigit()):
        return 0, 1
    return int(rank), int(size)


def here() -> Ranks:
    """This process, in the process group that there is; alone where there is none."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank(dist.get_rank()))


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Be one of the processes that torchrun started, if it did; a process group that is there already will do.

    gloo carries what is on CPUs, NCCL what is on GPUs. Raises UserError where the processes cannot be brought together,
    the process group that is there has nothing for CPUs, or another process is gone; it names this one.
    """
    import torch
    import torch.distributed as dist

    rank, size = launched()
    started = dist.is_available() and dist.is_initialized()
    if started and "gloo" not in dist.get_backend_config():
        raise UserError("this process group has no backend for what is on CPUs; make it by "
                        'torch.distributed.init_process_group("cpu:gloo,cuda:nccl")')  # fmt: skip
    starts = not started and size > 1 and dist.is_available()
    if starts:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        lost = f"process {rank} of {size} found no connection to the others by {where}: {{error}}"
        with refusing(lost, RuntimeError, ValueError):
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    ranks = here()
    try:
        yield ranks
    except (Agreed, Alone):
        raise
    except (UserError, RuntimeError) as error:
        known = isinstance(error, UserError)
        if ranks.size == 1 or not (known or any(word in str(error).lower() for word in GONE)):
            raise
        ended = ("another process of this fit has ended (killed, or out of memory? where it could, it said why); the "
                 "last checkpoint, if any, is whole: start all of them again, with --resume")  # fmt: skip
        raise Alone(f"process {ranks.rank} of {ranks.size}: {error if known else ended}") from error
    if starts:
        dist.destroy_process_group()  # not after an error: it may wait for, or trip over, a process that has gone


def choose_device(name: str) -> torch.device:
    """A device by "auto", "cpu" or "cuda", of each process its own GPU. Raises UserError where CUDA is absent."""
    import torch

    check_known("device", ("auto", "cpu", "cuda"), name := str(name))
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for, but this machine has none that torch can use; take --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if (ranks := here()).local >= torch.cuda.device_count():
        raise UserError(f"this machine has {torch.cuda.device_count()} GPUs for {ranks.local + 1} processes or more; "
                        "start as many as it has GPUs (torchrun --nproc-per-node), or take --device cpu")  # fmt: skip
    if ranks.size == 1:
        return torch.device("cuda")
    torch.cuda.set_device(ranks.local)  # where NCCL works
    return torch.device("cuda", ranks.local)
