"""Run many independent tasks: in this process, in processes of this machine (loky), or on a Dask cluster.

A task computes on one thread wherever it runs, so that results are the same everywhere, bit for bit. Importing this
module imports neither torch, loky nor Dask.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from bnn_pyro.errors import UserError
from bnn_pyro.parallel.executor import Executor, current_executor, usable_cores
from bnn_pyro.parallel.task import Died, Figures, LocalChannel, Lost, Outcome, Report, named, one_thread, using

__all__ = ["Pool", "WorkerDied", "map_tasks"]

Task = TypeVar("Task")
Result = TypeVar("Result")

#: Seconds between two looks at what the tasks have done.
LOOK = 0.1

#: Deaths of its process after which a task is tried alone, and after which it is given up if it was alone.
SUSPECT, GIVEN_UP = 2, 3

#: Characters of a task that an error message shows.
SHOWN = 80


class WorkerDied(UserError):
    """The process of a task ended each time, the last time with no other task beside it."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name}: its process died each time, the last time with no other task beside it (killed, or out of "
            "memory?); run it in this process (cores=1, or the executor 'here') to see why, or where there is more "
            "memory"
        )


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

    function: travels to other processes, as tasks and results do, by value where it is not importable; what it holds
        travels once a process, and is not to be changed by a task. It must not depend on the caller's random
        generators: a task brings a seed.
    cores: processes; 1: one task after the other in this process; 0: as many as there are cores to be used. Where an
        executor is in force, that decides.
    names: what errors call the tasks.
    all_threads: a task in this process computes on as many threads as there are.
    report: called as report(tasks done, of how many, figures); of tasks that report their progress also the shares.
    progress: called as progress(index, share, figures) with what each task reports.
    done: called as done(index, result) in this process as each task ends, so that nothing finished is lost later.
    failed: what stands for a task that raised UserError, or whose process died time and again (``WorkerDied``);
        without it that error is raised.
    watch: called in this process several times a second. What it raises, as Ctrl-C does, stops the run: no task is
        begun, those at work can see it by ``should_stop``, and it is raised once they have ended.
    grace: seconds that they have for that in processes; a cluster's tasks have none. A second Ctrl-C ends the waiting.

    A task whose process dies runs again: it is a function of itself. One that ends its process each time, the last
    time alone, has failed.

    Raises what a task raised, with the task named in it: the message of a UserError, a note of any other.
    """
    if cores < 0:
        raise UserError(f"cores must be a number of processes, or 0 for all there are, got {cores}")
    tasks = list(tasks)
    if names is None:
        names = [f"task {number} of {len(tasks)} ({_short(task)})" for number, task in enumerate(tasks, 1)]
    monitor = _Monitor(len(tasks), report, progress, watch)
    results: dict[int, Result] = {}

    def finish(number: int, good: bool, result: Any) -> None:
        if not good:
            if failed is None or not isinstance(result, UserError):
                raise result
            result = failed(tasks[number], result)
        results[number] = result
        if done is not None:
            done(number, result)
        monitor.ended(number)

    where = _where(cores, len(tasks))
    if where.kind == "here":
        _run_here(function, tasks, names, monitor, finish, all_threads)
    else:
        with contextlib.ExitStack() as stack:
            if where.kind == "dask":
                from bnn_pyro.parallel.dask import DaskPool as kind
            else:
                from bnn_pyro.parallel.processes import ProcessPool as kind
            _run_in(kind(stack, where, function, tasks, names), names, monitor, finish, grace)
    return [results[number] for number in range(len(tasks))]


def _where(cores: int, tasks: int) -> Executor:
    """An executor in force, or processes; this process where there would be but one."""
    current = current_executor()
    if current is not None and current.kind == "dask":
        return current if tasks else Executor("here")
    processes = min(usable_cores() if current is not None else cores or usable_cores(), tasks)
    return Executor("processes", processes) if processes > 1 else Executor("here")


def _short(task: Any) -> str:
    text = " ".join(repr(task).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


class _Monitor:
    """What the caller of ``map_tasks`` hears, and why the tasks are to stop (``reason``)."""

    def __init__(self, of: int, report: Any, progress: Any, watch: Any) -> None:
        self.of, self.report, self.progress, self.watch = of, report, progress, watch
        self.done, self.shares, self.last = 0, {}, 0.0
        self.reason: BaseException | None = None

    def heard(self, number: int, share: float, figures: Figures) -> None:
        """A task has told how far it is."""
        self.shares[number] = share
        if self.progress is not None:
            self.progress(number, share, figures)
        if self.done + sum(self.shares.values()) != self.last:
            self._report(figures if len(self.shares) == 1 else {})

    def ended(self, number: int) -> None:
        """A task is done."""
        self.shares.pop(number, None)
        self.done += 1
        self._report({})

    def _report(self, figures: Figures) -> None:
        self.last = self.done + sum(self.shares.values())
        if self.report is not None:
            self.report(self.last, self.of, figures)

    def look(self) -> None:
        """Ask the caller whether to go on."""
        if self.reason is None and self.watch is not None:
            try:
                self.watch()
            except BaseException as reason:
                self.reason = reason


class Pool(Protocol):
    """The workers of one call of ``map_tasks``: processes of this machine, or a Dask cluster.

    size: tasks that it takes at once.   grace: seconds that tasks have to end by themselves once they were asked to.
    """

    size: float
    grace: float

    def start(self, number: int) -> None:
        """Give a task to a worker."""

    def ended(self, timeout: float) -> Iterator[tuple[int, Outcome | Died | Lost]]:
        """(number, outcome) of the tasks that have ended, after so many seconds at most."""

    def progress(self) -> Iterator[tuple[int, float, Figures]]:
        """(number, share, figures) of tasks at work."""

    def stop(self) -> None:
        """Ask the tasks at work to end."""


#: Called with (number, whether there is a result, the result or else the error).
Finish = Callable[[int, bool, Any], None]


def _run_here(
    function: Callable, tasks: Sequence, names: Sequence[str], monitor: _Monitor, finish: Finish, all_threads: bool
) -> None:
    """One task after the other."""
    for number, (task, name) in enumerate(zip(tasks, names, strict=True)):

        def receive(share: float, figures: Figures, number: int = number) -> None:
            monitor.heard(number, share, figures)
            monitor.look()

        channel = LocalChannel(receive, lambda: monitor.reason is not None)
        with contextlib.nullcontext() if all_threads else one_thread(), using(channel):
            try:
                end = True, function(task)
            except Exception as error:
                end = False, named(error, name)
        finish(number, *end)
        monitor.look()
        if monitor.reason is not None:
            raise monitor.reason


def _run_in(pool: Pool, names: Sequence[str], monitor: _Monitor, finish: Finish, grace: float) -> None:
    """As many tasks at once as the pool has workers.

    A task whose process died runs again; after the second time alone, after the others: the one that ends its process
    by itself is found and given up, and one that needs the memory of two gets it.
    """
    waiting, suspects, given_up = deque(range(len(names))), deque(), []
    deaths, alone, at_work, said = [0] * len(names), -1, set(), set()
    deadline: float | None = None
    while at_work or (monitor.reason is None and (waiting or suspects)):
        try:
            if monitor.reason is None:
                if suspects and not waiting and not at_work:
                    alone = suspects.popleft()
                    waiting.append(alone)
                while waiting and len(at_work) < pool.size:
                    at_work.add(waiting[0])
                    pool.start(waiting.popleft())
            for number, outcome in pool.ended(LOOK):
                at_work.remove(number)
                if isinstance(outcome, Died):
                    deaths[number] += max(outcome.times, number == alone)
                    if number == alone and deaths[number] >= GIVEN_UP:
                        given_up.append(number)
                    else:
                        (suspects if deaths[number] >= SUSPECT else waiting).append(number)
                elif not (isinstance(outcome, Outcome) and outcome.stopped and monitor.reason is not None):
                    good, result, heard = _read(outcome, names[number])
                    for message in dict.fromkeys(heard):
                        if message not in said:
                            said.add(message)
                            warnings.warn(message, stacklevel=4)
                    finish(number, good, result)
            for number, share, figures in pool.progress():
                monitor.heard(number, share, figures)
            monitor.look()
        except KeyboardInterrupt as reason:
            if monitor.reason is not None:  # the second one
                raise
            monitor.reason = reason
        if monitor.reason is not None:
            if deadline is None:
                deadline = time.monotonic() + min(grace, pool.grace)
                pool.stop()
            if time.monotonic() > deadline:
                break
    if monitor.reason is not None:
        raise monitor.reason
    for number in given_up:  # after the others: the caller may end with the first of them
        finish(number, False, WorkerDied(names[number]))


def _read(outcome: Outcome | Lost, name: str) -> tuple[bool, Any, tuple[str, ...]]:
    """(whether there is a result, the result or else the error, what was warned of)."""
    if isinstance(outcome, Outcome):
        try:
            return outcome.good, pickle.loads(outcome.blob), outcome.warned
        except Exception as error:
            outcome = Lost(RuntimeError(f"what came back cannot be read here: {type(error).__name__}: {error}"))
    error = outcome.error
    if not isinstance(error, Exception):
        error = RuntimeError(f"it was ended by {type(error).__name__}")
    return False, named(error, name), ()
