"""One copy of a large data set on every machine, whatever the number of processes there that fit together.

One process reads and standardises it and lays its rows into a file, which all of them map into memory: copy-on-write,
so that none can change another's. The file has no name, so that nothing is left on the disk however they end; the
others open it as ``/proc/PID/fd/N`` of the one that made it.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.datasets.dataset import PARTS, Dataset
from bnn_pyro.datasets.sources import cache_root
from bnn_pyro.distributed import Ranks

__all__ = ["load_together"]

#: Bytes from which on a data set is shared; a smaller one is loaded by each.
LARGE = 2**28
#: Every array starts at a multiple of so many bytes.
ALIGNED = 64


class _Laid(NamedTuple):
    """Where the rows of a data set are: a file, what it begins with, and the data set without its rows."""

    path: str
    token: bytes
    outline: Dataset


def load_together(ranks: Ranks, load: Callable[[], Dataset]) -> Dataset:
    """``load()`` for all processes of a fit, with one copy of the rows on a machine where they are many.

    One process of every machine loads first, so that the others find what it downloaded. Where the machine offers no
    way to share rows each process has a copy of its own, with a warning.

    Raises on all the UserError of any.
    """
    if ranks.size == 1:
        return load()
    early = ranks.all_do(lambda: load() if ranks.local == 0 else None)
    # torchrun numbers those of a machine in a row.
    others = 1 in ranks.gather(ranks.local)[ranks.rank + 1 : ranks.rank + 2]
    with ExitStack() as held:
        laid, problem = None, None
        if early is not None and others and sum(part.nbytes for part in _rows(early)) >= LARGE:
            try:
                cache_root().mkdir(parents=True, exist_ok=True)
                laid = _lay(early, held.enter_context(tempfile.TemporaryFile(dir=cache_root())))
            except OSError as error:
                problem = str(error)
        mine = ranks.gather(laid)[ranks.rank - ranks.local]
        mapped = None
        if mine is not None:
            try:
                mapped = _map(mine)
            except (OSError, ValueError) as error:
                problem = str(error)
        problems = [told for told in ranks.gather(problem) if told is not None]  # here all have mapped it
    if problems and ranks.first:
        warnings.warn(f"processes hold a copy of the data each, not one in common ({problems[0]})", stacklevel=2)
    return ranks.all_do(lambda: mapped or early or load())


def _lay(data: Dataset, file: BinaryIO) -> _Laid:
    """Write the rows one after the other, behind a token that tells this file from any other."""
    token = secrets.token_bytes(ALIGNED)
    file.write(token)
    for part in _rows(data):
        file.write(part.contiguous().numpy().reshape(-1).view(np.uint8))
        file.seek(_next(file.tell()))
    file.flush()
    return _Laid(f"/proc/{os.getpid()}/fd/{file.fileno()}", token, data.to("meta"))


def _map(laid: _Laid) -> Dataset:
    """The data set whose rows are in that file, mapped into memory."""
    with open(laid.path, "rb") as file:
        if file.read(len(laid.token)) != laid.token:  # of another machine or container, with processes of these numbers
            raise OSError(f"{laid.path} is another file")
    start, parts = len(laid.token), []
    for part in _rows(laid.outline):
        if part.nbytes:
            held = np.asarray(np.memmap(laid.path, np.uint8, mode="c", offset=start, shape=part.nbytes))
            parts.append(torch.from_numpy(held).view(part.dtype).view(part.shape))
        else:
            parts.append(torch.empty(part.shape, dtype=part.dtype))
        start = _next(start + part.nbytes)
    return replace(laid.outline, **dict(zip(PARTS, parts, strict=True)))


def _rows(data: Dataset) -> list[Tensor]:
    return [getattr(data, name) for name in PARTS]


def _next(place: int) -> int:
    return -(-place // ALIGNED) * ALIGNED
