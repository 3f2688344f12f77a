"""The places where tasks can run, what they are called, and which one is in force."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from bnn_pyro.errors import UserError

__all__ = ["TEXTS", "Cluster", "Here", "LocalCluster", "Processes", "Where", "forced", "in_force", "parse"]


@dataclass(frozen=True)
class Here:
    """In this process, one after the other."""


@dataclass(frozen=True)
class Processes:
    """In processes of this machine; 0: as many as there are cores."""

    cores: int = 0


@dataclass(frozen=True)
class LocalCluster:
    """In the workers of a Dask cluster on this machine, made for the block; 0: as many as there are cores."""

    workers: int = 0


@dataclass(frozen=True)
class Cluster:
    """In the workers of a Dask cluster: the address of its scheduler, or a connected ``distributed.Client``."""

    client: Any


#: What a task can be given to.
Where = Here | Processes | Cluster

_IN_FORCE: ContextVar[Where | None] = ContextVar("executor", default=None)

TEXTS = "here, processes, processes:4, dask, dask:4 (a cluster of this machine) or dask://HOST:PORT (a scheduler)"


def in_force() -> Where | None:
    """What the innermost ``with executor(…)`` said; None outside."""
    return _IN_FORCE.get()


@contextlib.contextmanager
def forced(where: Where) -> Iterator[None]:
    """As ``executor``, with what is there already."""
    token = _IN_FORCE.set(where)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def parse(text: str) -> Here | Processes | LocalCluster | Cluster:
    """What an executor's text asks for; nothing is started. Raises UserError for a text that is none of them."""
    name, _, rest = text.partition(":")
    if text == "here":
        return Here()
    if name in ("processes", "dask") and re.fullmatch(r"(:[1-9]\d*)?", text.removeprefix(name)):
        return (Processes if name == "processes" else LocalCluster)(int(rest or 0))
    if re.fullmatch(r"dask://\S+:\d+/?", text):
        return Cluster("tcp:" + rest.rstrip("/"))
    raise UserError(f"unknown executor '{text}'; valid: {TEXTS}")
