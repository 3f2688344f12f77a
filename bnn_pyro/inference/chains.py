"""Runs the chains of a sampler, one after the other, several at once or on a cluster, to the very same draws.

Each keeps a checkpoint of its own beside the run's.
"""

from __future__ import annotations

import time
from typing import Any

from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.executors.where import Cluster, in_force
from bnn_pyro.inference.board import COST, DONE, Board
from bnn_pyro.inference.budget import announce
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.on_cluster import on_cluster
from bnn_pyro.inference.one_chain import Plan, sample
from bnn_pyro.inference.processes import LOOK, Show, in_processes
from bnn_pyro.inference.record import Record

__all__ = ["run_chains"]


def run_chains(
    plan: Plan, cores: int, checkpoint: Checkpoint | None, report: Report | None
) -> tuple[list[Record], str]:
    """(what each chain has drawn, why they were stopped: "" where they were not).

    Where there is no checkpoint, Ctrl-C stops the chains and returns what they have, and a chain whose process died
    is returned without draws. Where there is one, it holds everything that was drawn when one of these is raised:

    Raises ``Interrupted`` after a signal, and UserError for a chain that died or cannot go on, with its number.
    """
    records = [plan.record() for _ in plan.starts]
    children = [None if checkpoint is None else checkpoint.child(f"chain-{c}") for c in range(len(records))]
    for record, child in zip(records, children, strict=True):
        if child is not None and (state := child.load()) is not None:
            record.restore(state["record"])
    todo = [c for c, record in enumerate(records) if not record.finished]
    total = len(records) * plan.sampler.transitions
    show = _shown(report, total, plan.sampler.transitions)
    if todo and isinstance(in_force(), Cluster):
        stopped = on_cluster(plan, todo, records, children, checkpoint, show)
    elif cores > 1 and len(todo) > 1:
        stopped = in_processes(plan, cores, todo, records, children, checkpoint, show)
    else:
        stopped = in_sequence(plan, todo, records, children, checkpoint, show)
    if checkpoint is not None and checkpoint.stop:
        raise Interrupted(f"stopped after step {sum(r.done for r in records):,} of {total:,}")
    return records, stopped


def _shown(report: Report | None, total: int, transitions: int) -> Show:
    """Tells the progress bar how many transitions are done; its other figures now and then."""
    figures: dict[str, Any] = {}
    last = 0.0

    def show(board: Board, done: int, now: bool = False) -> None:
        nonlocal figures, last
        if report is None:
            return
        if now or time.perf_counter() - last > LOOK:
            figures, last = board.figures(transitions), time.perf_counter()
        report(done, total, figures)

    return show


def in_sequence(
    plan: Plan,
    todo: list[int],
    records: list[Record],
    children: list[Checkpoint | None],
    checkpoint: Checkpoint | None,
    show: Show,
) -> str:
    """The chains ``todo``, one after the other in this process; why they were stopped."""
    board = Board(len(records))
    done = [record.done for record in records]
    board.rows[:-1, DONE] = done
    try:
        for c in todo:
            if c == todo[0]:
                plan.prepare(board, c)
                announce(board.rows[c, COST], plan.gradients * len(todo) / len(records), 1)
            before = sum(record.done for record in records) - records[c].done
            record = records[c]
            sample(plan, c, record, children[c], board, lambda: show(board, before + record.done, record.finished))  # noqa: B023
            if checkpoint is not None and checkpoint.stop:
                break
    except KeyboardInterrupt:
        if checkpoint is not None:  # the second Ctrl-C, or one that took no notice of the first
            raise
        return "stopped by Ctrl-C"
    return ""
