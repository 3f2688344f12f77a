"""Run many independent tasks: in this process, in processes of this machine (loky), or on a Dask cluster.

A task computes on one thread wherever it runs, so that results are the same everywhere, bit for bit. Importing this
module imports neither torch, loky nor Dask.
"""

from __future__ import annotations

import contextlib
import queue
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from bnn_pyro.errors import UserError
from bnn_pyro.parallel.executor import Executor, current_executor, usable_cores
from bnn_pyro.parallel.task import Channel, Figures, Report, named, one_thread, using

__all__ = ["WorkerDied", "map_tasks"]

Task = TypeVar("Task")
Result = TypeVar("Result")

#: Seconds between two looks at what the tasks have done.
LOOK = 0.1

#: Deaths of its process after which a task is tried alone, and after which it is given up if it was alone.
SUSPECT, GIVEN_UP = 2, 3

#: Characters of a task that an error message shows.
MAX_SHOWN = 80


class WorkerDied(UserError):
    """The process of a task ended each time, the last time with no other task beside it."""


def map_tasks(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    cores: int = 0,
    names: Sequence[str] | None = None,
    all_threads: bool = False,
    grace: float = 5.0,
    report: Report | None = None,
    progress: Callable[[int, float, Figures], None] | None = None,
    done: Callable[[int, Result], None] | None = None,
    failed: Callable[[Task, UserError], Result] | None = None,
    watch: Callable[[], None] | None = None,
) -> list[Result]:
    """``[function(task) for task in tasks]``, several at once; results in the order of the tasks.

    function: travels to other processes, as tasks and results do, by value where it is not importable, once a process.
        It must not depend on the caller's random generators: a task brings a seed.
    cores: processes; 1: one task after the other in this process; 0: as many as there are cores to be used. Where an
        executor is in force, that decides.
    names: what errors call the tasks.   all_threads: a task in this process computes on as many threads as there are.
    report: called as report(tasks done, of how many, figures); of tasks that report their progress also the shares.
    progress, done: called as progress(index, share, figures) with what a task reports, and done(index, result) at once
        when it has ended.
    failed: what stands for a task that raised UserError, or whose process died time and again (``WorkerDied``);
        without it that error is raised.
    watch: called in this process several times a second. What it raises, as Ctrl-C does, stops the run: no task is
        begun, those at work can see it by ``should_stop``, and it is raised once they have ended, or after ``grace``
        seconds (on a cluster: at once). A second Ctrl-C ends the waiting.

    A task whose process dies runs again. One that ends its process each time, the last time alone, has failed.

    Raises what a task raised, with the task named in it: the message of a UserError, a note of any other.
    """
    if cores < 0:
        raise UserError(f"cores must be a number of processes, or 0 for all there are, got {cores}")
    tasks = list(tasks)
    if names is None:
        names = [f"task {number} of {len(tasks)} ({_short(task)})" for number, task in enumerate(tasks, 1)]
    run = _Run(tasks, names, report, progress, done, failed, watch)
    where = _where(cores, len(tasks))
    if where.kind == "here":
        run.here(function, all_threads)
    else:
        with contextlib.ExitStack() as stack:
            from bnn_pyro.parallel.pools import DaskPool, ProcessPool

            kind = DaskPool if where.kind == "dask" else ProcessPool
            run.within(kind(stack, where, function, tasks, names), grace)
    return [run.results[number] for number in range(len(tasks))]


def _where(cores: int, tasks: int) -> Executor:
    """An executor in force, or processes; this process where there would be but one."""
    current = current_executor()
    if current is not None and current.kind == "dask":
        return current if tasks else Executor("here")
    processes = min(usable_cores() if current is not None else cores or usable_cores(), tasks)
    return Executor("processes", processes) if processes > 1 else Executor("here")


def _short(task: Any) -> str:
    text = " ".join(repr(task).split())
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


class _Run:
    """One call of ``map_tasks``: its results, what its caller hears, and why it is to stop (``reason``)."""

    def __init__(
        self, tasks: Sequence, names: Sequence[str], report: Any, progress: Any, done: Any, failed: Any, watch: Any
    ) -> None:
        self.tasks, self.names = tasks, names
        self.report, self.progress, self.done, self.failed, self.watch = report, progress, done, failed, watch
        self.results: dict[int, Any] = {}
        self.shares, self.reported = {}, 0.0
        self.reason: BaseException | None = None

    # -- what the caller hears -----------------------------------------------------------------------------------------
    def heard(self, number: int, share: float, figures: Figures) -> None:
        """A task has reported its progress."""
        self.shares[number] = share
        if self.progress is not None:
            self.progress(number, share, figures)
        if len(self.results) + sum(self.shares.values()) != self.reported:
            self._report(figures if len(self.shares) == 1 else {})

    def finish(self, number: int, good: bool, result: Any) -> None:
        """A task has ended with a result, or else with an error."""
        if not good:
            if self.failed is None or not isinstance(result, UserError):
                raise result
            result = self.failed(self.tasks[number], result)
        self.results[number] = result
        if self.done is not None:
            self.done(number, result)
        self.shares.pop(number, None)
        self._report({})

    def _report(self, figures: Figures) -> None:
        self.reported = len(self.results) + sum(self.shares.values())
        if self.report is not None:
            self.report(self.reported, len(self.tasks), figures)

    def look(self) -> None:
        """Ask the caller whether to go on."""
        if self.reason is None and self.watch is not None:
            try:
                self.watch()
            except BaseException as reason:
                self.reason = reason

    # -- the tasks -----------------------------------------------------------------------------------------------------
    def here(self, function: Callable, all_threads: bool) -> None:
        """One task after the other in this process."""
        for number, (task, name) in enumerate(zip(self.tasks, self.names, strict=True)):

            def receive(share: float, figures: Figures, number: int = number) -> None:
                self.heard(number, share, figures)
                self.look()

            channel = Channel(receive, lambda: self.reason is not None)
            with contextlib.nullcontext() if all_threads else one_thread(), using(channel):
                try:
                    end = True, function(task)
                except Exception as error:
                    end = False, named(error, name)
            self.finish(number, *end)
            self.look()
            if self.reason is not None:
                raise self.reason

    def within(self, pool: Any, grace: float) -> None:
        """As many tasks at once as the pool (``ProcessPool``, ``DaskPool``) has workers.

        A task whose process died runs again; after the second time alone, after the others: the one that ends its
        process by itself is found and given up, and one that needs the memory of two gets it.
        """
        waiting, suspects, given_up = deque(range(len(self.tasks))), deque(), []
        deaths, alone, said = [0] * len(self.tasks), -1, set()
        at_work: dict[Any, int] = {}
        ended: queue.SimpleQueue = queue.SimpleQueue()
        deadline: float | None = None
        while at_work or (self.reason is None and (waiting or suspects)):
            try:
                if self.reason is None and suspects and not waiting and not at_work:
                    alone = suspects.popleft()
                    waiting.append(alone)
                while self.reason is None and waiting and len(at_work) < pool.size:
                    future = pool.start(waiting[0])
                    at_work[future] = waiting.popleft()
                    future.add_done_callback(ended.put)
                for future in _next(ended):
                    number = at_work.pop(future)
                    outcome = pool.outcome(future, self.names[number])
                    if outcome.deaths is not None:
                        deaths[number] += max(outcome.deaths, number == alone)
                        lost = number == alone and deaths[number] >= GIVEN_UP
                        (given_up if lost else suspects if deaths[number] >= SUSPECT else waiting).append(number)
                    elif outcome.good or self.reason is None:
                        for message in outcome.warned:
                            if message not in said:
                                said.add(message)
                                warnings.warn(message, stacklevel=4)
                        self.finish(number, *outcome.read(self.names[number]))
                for report in pool.progress(at_work.values()):
                    self.heard(*report)
                self.look()
            except KeyboardInterrupt as reason:
                if self.reason is not None:  # the second one
                    raise
                self.reason = reason
            if self.reason is not None:
                if deadline is None:
                    deadline = time.monotonic() + (grace if pool.waits else 0.0)
                    pool.stop()
                if time.monotonic() > deadline:
                    break
        if self.reason is not None:
            raise self.reason
        for number in given_up:  # after the others: the caller may end with the first of them
            self.finish(number, False, WorkerDied(
                f"{self.names[number]}: its process died each time, the last time with no other task beside it "
                "(killed, or out of memory?); run it in this process (cores=1, or the executor 'here') to see why, or "
                "where there is more memory"
            ))  # fmt: skip


def _next(ended: queue.SimpleQueue) -> Iterator[Any]:
    """The futures that are done, after waiting for the first of them for a moment."""
    with contextlib.suppress(queue.Empty):
        yield ended.get(timeout=LOOK)
        while True:
            yield ended.get_nowait()
