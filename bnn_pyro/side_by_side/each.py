"""The one ``map`` of this package."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import joblib

from bnn_pyro.errors import UserError
from bnn_pyro.executors.where import Cluster, Here, Processes, Where, in_force
from bnn_pyro.side_by_side.crews import ClusterCrew, ProcessesCrew, in_rounds
from bnn_pyro.side_by_side.lines import HereLine, held
from bnn_pyro.side_by_side.task import named, one_thread, short

__all__ = ["each", "usable_cores"]

Task = TypeVar("Task")
Result = TypeVar("Result")

Report = Callable[[float, int, Mapping[str, float | str]], None]


def usable_cores() -> int:
    """Cores that this process may use: 1 in a task, and in a process that is itself one of several."""
    where = in_force()
    if isinstance(where, Here) or multiprocessing.parent_process() is not None:
        return 1
    return where.cores if isinstance(where, Processes) and where.cores else joblib.cpu_count()


def each(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    cores: int = 0,
    report: Report | None = None,
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
    report: called as report(tasks done, of how many, {}); of tasks that ``tell`` also the shares that are done.
    done: called as done(index, result) in this process as each task ends, so that nothing finished is lost later.
    failed: what stands for a task that raised UserError, or whose process died time and again; without it that error
        is raised.
    watch: called in this process several times a second. What it raises is raised once the tasks at work, which can
        see that by ``stopping``, have ended, or after some seconds.

    A task whose process dies runs again: it is a function of itself. One that ends its process each time, the last
    time alone, has failed.

    Raises what a task raised, with the task named in it: the message of a UserError, a note of any other.
    """
    if cores < 0:
        raise UserError(f"cores must be a number of processes, or 0 for all there are, got {cores}")
    tasks = list(tasks)
    names = [f"task {number} of {len(tasks)} ({short(task)})" for number, task in enumerate(tasks, 1)]
    show = _Shown(report, len(tasks))
    where = _where(cores, len(tasks))
    results: dict[int, Result] = {}
    with contextlib.ExitStack() as stack:
        if isinstance(where, Here):
            ends = _here(function, tasks, names, show, watch)
        elif isinstance(where, Processes):
            ends = _away(ProcessesCrew(stack, function, tasks, names, where.cores), show, watch)
        else:
            ends = _away(ClusterCrew(stack, function, tasks, names, where.client), show, watch)
        for number, good, result in stack.enter_context(contextlib.closing(ends)):
            if not good:
                if failed is None or not isinstance(result, UserError):
                    raise result
                result = failed(tasks[number], result)
            results[number] = result
            if done is not None:
                done(number, result)
            show.ended(number)
    return [results[number] for number in range(len(tasks))]


def _where(cores: int, tasks: int) -> Where:
    """An executor in force, or processes; this process where there would be but one."""
    where = in_force()
    if isinstance(where, Cluster):
        return where if tasks else Here()
    processes = min(usable_cores() if isinstance(where, Here | Processes) else cores or usable_cores(), tasks)
    return Processes(processes) if processes > 1 else Here()


class _Shown:
    """Tells ``report`` how many tasks are done, and how much of the others."""

    def __init__(self, report: Report | None, of: int) -> None:
        self.report, self.of, self.done = report, of, set()
        self.last = 0.0

    def ended(self, number: int) -> None:
        """One more."""
        self.done.add(number)
        self._tell(len(self.done), {})

    def going(self, shares: Mapping[int, float] | Sequence[float], figures: Mapping[str, float | str]) -> None:
        """So much of each task."""
        pairs = shares.items() if isinstance(shares, Mapping) else enumerate(shares)
        part = sum(float(share) for number, share in pairs if number not in self.done)
        if part and len(self.done) + part != self.last:
            self._tell(len(self.done) + part, figures)

    def _tell(self, done: float, figures: Mapping[str, float | str]) -> None:
        self.last = done
        if self.report is not None:
            self.report(done, self.of, figures)


def _here(
    function: Callable[[Task], Result],
    tasks: list[Task],
    names: list[str],
    show: _Shown,
    watch: Callable[[], None] | None,
) -> Iterator[tuple[int, bool, Any]]:
    """(number, whether there is a result, it or else the error), one task after the other."""
    for number, (task, name) in enumerate(zip(tasks, names, strict=True)):

        def hear(share: float, figures: Mapping[str, float | str], number: int = number) -> None:
            show.going({number: share}, figures)
            if watch is not None:
                watch()

        with one_thread(), held(HereLine(hear)):
            try:
                end = True, function(task)
            except Exception as error:
                end = False, named(error, name)
        yield number, *end


def _away(
    crew: ProcessesCrew | ClusterCrew, show: _Shown, watch: Callable[[], None] | None
) -> Iterator[tuple[int, bool, Any]]:
    """As ``_here``, in the order in which they end elsewhere."""
    asked: BaseException | None = None
    deadline = 0.0

    def look() -> None:
        nonlocal asked, deadline
        show.going(crew.shares, {})
        if asked is not None and time.monotonic() > deadline:
            raise asked
        if asked is None and watch is not None:
            try:
                watch()
            except BaseException as reason:
                asked, deadline = reason, time.monotonic() + crew.grace
                crew.stop()

    said = set()
    for number, good, result, heard in in_rounds(crew, look):
        for message in heard:
            if message not in said:
                said.add(message)
                warnings.warn(message, stacklevel=3)
        yield number, good, result
    if asked is not None:
        raise asked
