"""Chains on a Dask cluster: a task each, with the very same draws; those that are finished are saved here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.errors import UserError
from bnn_pyro.inference.board import DONE, Board
from bnn_pyro.inference.one_chain import Plan, sample
from bnn_pyro.inference.processes import Show, end_of
from bnn_pyro.inference.record import Record
from bnn_pyro.side_by_side import each, stopping, tell

__all__ = ["on_cluster"]


def on_cluster(
    plan: Plan,
    todo: list[int],
    records: list[Record],
    children: list[Checkpoint | None],
    checkpoint: Checkpoint | None,
    show: Show,
) -> str:
    """As ``chains.in_sequence``, where the executor in force says. A chain that was begun here goes on there."""
    board, lost = Board(len(records)), []
    board.rows[:-1, DONE] = [record.done for record in records]
    before, left = board.done, sum(plan.sampler.transitions - records[c].done for c in todo)

    def keep(index: int, drawn: Record | UserError | None) -> None:
        c = todo[index]
        if isinstance(drawn, UserError):
            raise drawn
        if drawn is None:
            lost.append(c)
            return
        records[c] = drawn
        if (child := children[c]) is not None:
            child.save({"record": drawn.state(), "kernel": {}})

    def shown(done: float, of: int, figures: Mapping[str, Any]) -> None:
        show(board, before + round(left * done / of), done == of)

    def watch() -> None:
        if checkpoint is not None and checkpoint.stop:
            raise Interrupted

    tasks = [_Task(c, None if (child := children[c]) is None else child.load()) for c in todo]
    try:
        each(_Chains(plan), tasks, report=shown, done=keep, failed=lambda task, error: None, watch=watch)
    except Interrupted:
        return ""
    except KeyboardInterrupt:
        if checkpoint is not None:
            raise
        return end_of([], records, checkpoint, interrupted=True)
    return end_of(lost, records, checkpoint, interrupted=False)


@dataclass
class _Task:
    """A chain, and the state that it goes on from."""

    chain: int
    state: dict[str, Any] | None = field(repr=False)


@dataclass
class _Chains:
    """On a worker: what a chain draws, or why it cannot."""

    plan: Plan
    ready: bool = False

    def __call__(self, task: _Task) -> Record | UserError:
        plan = self.plan
        board, record = Board(len(plan.starts)), plan.record()
        if not self.ready:
            self.ready = True
            plan.prepare(board, task.chain)

        def watch() -> None:
            tell(record.done, plan.sampler.transitions)
            if stopping():
                raise KeyboardInterrupt

        begun = None if task.state is None else _Begun(task.state)
        try:
            sample(plan, task.chain, record, begun, board, watch)
        except UserError as error:
            return error
        return record


@dataclass
class _Begun:
    """A checkpoint out of reach: it has what it held when the chain was sent, and keeps nothing."""

    state: dict[str, Any]
    due: bool = False
    stop: bool = False

    def load(self) -> dict[str, Any]:
        return self.state

    def save(self, state: dict[str, Any]) -> None:
        pass
