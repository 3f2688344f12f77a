"""Chains in processes of their own: one loky worker each, watched by a board that they share.

A worker that dies takes one chain with it, and a model class that was defined in a notebook travels by value. Signals
are the parent's to answer: it asks the chains to stop after the transition that they are in. A parent that was killed
leaves no worker behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import cloudpickle
from joblib.externals.loky import ProcessPoolExecutor

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.errors import UserError
from bnn_pyro.inference.board import COST, DONE, Board
from bnn_pyro.inference.budget import announce
from bnn_pyro.inference.one_chain import Plan, sample
from bnn_pyro.inference.record import Record

__all__ = ["LOOK", "Show", "end_of", "in_processes"]

#: Seconds between two looks at what the chains have done.
LOOK = 0.1

#: Seconds that a worker waits for another chain: one whose parent was killed meanwhile ends by itself.
IDLE = 60.0

#: Called with the board, how many transitions are done, and whether to show the other figures at once.
Show = Callable[[Board, int, bool], None]


def in_processes(
    plan: Plan,
    cores: int,
    todo: list[int],
    records: list[Record],
    children: list[Checkpoint | None],
    checkpoint: Checkpoint | None,
    show: Show,
) -> str:
    """As ``chains.in_sequence``, ``cores`` chains at a time."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bnn-pyro-chains-"))
        Path(folder, "plan").write_bytes(cloudpickle.dumps(plan))
        board = Board(len(records), Path(folder, "board"))
        board.rows[:-1, DONE] = [record.done for record in records]
        crew = _Crew(stack, folder, children)
        waiting, failure, told, interrupted = deque(todo), None, False, False
        for _ in range(min(cores, len(todo))):
            crew.hire()
        while waiting or crew.at_work:
            try:
                while waiting and crew.idle:
                    crew.give(waiting.popleft())
                for c, outcome in crew.returned():
                    if isinstance(outcome, Record):
                        records[c] = outcome
                    elif not isinstance(outcome, BrokenProcessPool):
                        failure = failure or outcome
                show(board, board.done, False)
            except KeyboardInterrupt:
                if checkpoint is not None or interrupted:  # the second one
                    raise
                interrupted = True
            if not told and (costs := board.rows[:-1, COST]).any():
                told = True
                announce(costs.max(), plan.gradients * len(todo) / len(records), min(cores, len(todo)))
            if interrupted or failure is not None or (checkpoint is not None and checkpoint.stop):
                board.stop()
                waiting.clear()
        show(board, board.done, True)
        if failure is not None:
            raise failure
        return end_of(crew.lost, records, checkpoint, interrupted)


def end_of(lost: list[int], records: list[Record], checkpoint: Checkpoint | None, interrupted: bool) -> str:
    """Why a run ended early. Raises UserError where a chain died, if there is a checkpoint, or no draw."""
    if interrupted:
        return "stopped by Ctrl-C"
    if not lost:
        return ""
    names = ", ".join(str(c + 1) for c in lost)
    what = f"chain {names} of {len(records)} died in its process (killed, or out of memory?)"
    if checkpoint is not None and not checkpoint.stop:
        raise UserError(f"{what}; the draws so far of every chain are kept: go on with --resume (resume=True)")
    if not any(record.kept for record in records):
        raise UserError(f"{what}; nothing was drawn: run the chains one after the other, with cores=1")
    return what


class _Crew:
    """Processes of one worker each, closed with ``stack``, and the chains that they are at."""

    def __init__(self, stack: contextlib.ExitStack, folder: str, children: list[Checkpoint | None]) -> None:
        self.stack, self.folder, self.children = stack, folder, children
        self.idle: list[ProcessPoolExecutor] = []
        self.at_work: dict[Future, tuple[int, ProcessPoolExecutor]] = {}
        self.lost: list[int] = []

    def hire(self) -> None:
        """One more. Ctrl-C is the parent's to answer, from before the worker has imported anything."""
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        deaf = dict(initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
        worker = ProcessPoolExecutor(1, timeout=IDLE, env=threads, **deaf)
        self.stack.callback(worker.shutdown, wait=True, kill_workers=True)
        self.idle.append(worker)

    def give(self, chain: int) -> None:
        """A chain to a worker that has none."""
        worker = self.idle.pop()
        self.at_work[worker.submit(_work, self.folder, chain, self.children[chain], os.getpid())] = chain, worker

    def returned(self) -> Iterator[tuple[int, Record | BaseException]]:
        """The chains that came back meanwhile, with what they drew or what stopped them."""
        ready, _ = wait(self.at_work, timeout=LOOK, return_when=FIRST_COMPLETED)
        for future in ready:
            chain, worker = self.at_work.pop(future)
            error = future.exception()
            if error is None:
                self.idle.append(worker)
                record, heard = future.result()
                for message in heard:
                    warnings.warn(message, stacklevel=5)
                yield chain, record
            else:
                if isinstance(error, BrokenProcessPool):
                    self.lost.append(chain)
                self.hire()
                yield chain, error


def _work(folder: str, chain: int, checkpoint: Checkpoint | None, parent: int) -> tuple[Record, list[str]]:
    """In a worker: (one chain's record, what it was warned of)."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ctrl-C: the parent's to answer
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        fresh = folder not in _PLANS
        plan = _PLANS[folder] if not fresh else _PLANS.setdefault(folder, _read(folder))
        board = Board(len(plan.starts), Path(folder, "board"))
        if fresh:
            plan.prepare(board, chain)
        record = plan.record()

        def watch() -> None:
            if os.getppid() != parent:  # it was killed, and a resumed run may be at this very chain
                os._exit(1)
            if board.stopped and checkpoint is not None:
                checkpoint.stop = True

        sample(plan, chain, record, checkpoint, board, watch)
    here = str(Path(__file__).parents[1])
    return record, [
        str(w.message) for w in heard if issubclass(w.category, UserWarning) and w.filename.startswith(here)
    ]


def _read(folder: str) -> Plan:
    """The plan of a run."""
    return cloudpickle.loads(Path(folder, "plan").read_bytes())


#: What this process has read and compiled, by the folder of the run.
_PLANS: dict[str, Plan] = {}
