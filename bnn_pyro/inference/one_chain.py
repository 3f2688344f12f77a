"""One chain of a sampler, wherever it runs: from its start or from its checkpoint, to its end or until it is stopped.

A chain depends on its start and on a seed of its own, and where there are several each computes on one thread: in
which process, and beside how many others, changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.errors import UserError
from bnn_pyro.inference.board import COST, Board, Row
from bnn_pyro.inference.budget import seconds_per_gradient
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.record import Record
from bnn_pyro.inference.starts import chain_seed
from bnn_pyro.isolation import isolated
from bnn_pyro.side_by_side import one_thread

__all__ = ["Plan", "one_thread_each", "sample"]


@dataclass(frozen=True)
class Plan:
    """All that the chains of a run need: sent to every process once.

    sampler    settings, with the verb ``kernel(potential, blocks, start, seed)``
    blocks     {block of the mass matrix: its length}
    starts     (C, P)          gradients  how many are expected of all chains
    compiled   whether each process compiles the potential's gradient first
    """

    sampler: Any
    potential: Potential
    blocks: dict[str, int]
    starts: np.ndarray
    seed: int
    compiled: bool
    gradients: float

    def record(self) -> Record:
        """An empty one of a chain."""
        return Record(self.sampler.draws, self.sampler.warmup, self.sampler.thin, self.starts.shape[1:])

    def prepare(self, board: Board, chain: int) -> None:
        """Compile, and measure what a gradient costs."""
        with one_thread_each(len(self.starts)):
            if self.compiled:
                self.potential.compile(1)
            board.rows[chain, COST] = seconds_per_gradient(self.potential, self.starts[chain])


def one_thread_each(chains: int) -> contextlib.AbstractContextManager[None]:
    """One thread where there are several chains; a single one has all of them, and nothing to be compared with."""
    return contextlib.nullcontext() if chains == 1 else one_thread()


def sample(
    plan: Plan, chain: int, record: Record, checkpoint: Checkpoint | None, board: Board, watch: Callable[[], None]
) -> None:
    """One chain, from its start or from its checkpoint, to its end or until it is asked to stop.

    watch: called after every transition, once ``record`` and the board have it.
    """
    sampler, row = plan.sampler, Row(board, chain)
    quiet = pyro.validation_enabled(False), np.errstate(all="ignore")  # trajectories may meet infinities
    with isolated(chain_seed(plan.seed, chain, stream=1)), one_thread_each(len(plan.starts)), quiet[0], quiet[1]:
        try:
            seed = chain_seed(plan.seed, chain, stream=2)
            kernel = sampler.kernel(plan.potential, plan.blocks, plan.starts[chain], seed)
            if checkpoint is not None and (state := checkpoint.load()) is not None:
                record.restore(state["record"])
                kernel.restore(state["kernel"])
            while not record.finished:
                figures = kernel.step()
                record.add(kernel.point.z, figures)
                row.write(record.done, figures, kernel._mean_accept_prob, record.divergent, record.finished)
                watch()
                if checkpoint is not None and (checkpoint.due or record.finished):
                    checkpoint.save({"record": record.state(), "kernel": kernel.state()})
                if board.stopped or (checkpoint is not None and checkpoint.stop):
                    return
        except UserError as error:
            raise UserError(f"chain {chain + 1} of {len(plan.starts)}: {error}") from None
