"""Run many independent tasks: in this process, in processes of this machine (loky), or on a Dask cluster."""

import contextlib
import pickle
import queue
import reprlib
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bnn_pyro.errors import UserError
from bnn_pyro.parallel.executor import current_executor, on_cluster, usable_cores
from bnn_pyro.parallel.pools import DaskPool, ProcessPool, named, one_thread
from bnn_pyro.progress import Channel, Figures, Report

Task = TypeVar("Task")
Result = TypeVar("Result")
#: Deaths of its process after which a task is tried once more, alone, after the others.
SUSPECT = 2
DIED = ("its process died each time, the last time with no other task beside it (killed, or out of memory?); run it in "
        "this process (cores=1, or the executor 'here') to see why, or where there is more memory")  # fmt: skip


class WorkerDied(UserError):
    """The process of a task ended each time, the last time with no other task beside it."""


def map_tasks(
    function: Callable[[Task], Result], tasks: Sequence[Task], *, cores: int = 0, names: Sequence[str] | None = None,
    all_threads: bool = False, grace: float = 5.0, report: Report | None = None,
    progress: Callable[[int, float, Figures], None] | None = None, done: Callable[[int, Result], None] | None = None,
    failed: Callable[[Task, UserError], Result] | None = None, watch: Callable[[], None] | None = None,
) -> list[Result]:  # fmt: skip
    """``[function(task) for task in tasks]``, several at once; results in the order of the tasks.

    function: travels to other processes, as tasks and results do, by value where it is not importable, once a process.
        It must not depend on the caller's random generators: a task brings a seed.
    cores: processes; 1: one task after the other in this one; 0: as many as cores. An executor in force decides.
    names: what errors call the tasks.   all_threads: a task in this process computes on as many threads as there are.
    report: called as report(tasks done, of how many, figures); of tasks that report their progress also the shares.
    progress, done: called as progress(index, share, figures) with what a task reports; done(index, result) at its end.
    failed: what stands for a task that raised UserError, or whose process died each time that it was run again, the
        last time alone (``WorkerDied``); without it that error is raised.
    watch: called in this process several times a second; it may raise.
    Raises what a task raised, with the task named in it: the message of a UserError, a note of any other. That, what
    ``watch`` and the other callbacks raise, and Ctrl-C stop the run: no task is begun, those at work can see it by
    ``should_stop``, and it is raised once they have ended, or after ``grace`` seconds (on a cluster: at once). A second
    Ctrl-C ends the waiting. Where a task fails after Ctrl-C, as its last file cannot be written, its error is raised.
    """
    if cores < 0:
        raise UserError(f"cores must be a number of processes, or 0 for all there are, got {cores}")
    tasks = list(tasks)
    if names is None:
        names = [f"task {number} of {len(tasks)} ({_SHORT.repr(task)})" for number, task in enumerate(tasks, 1)]
    nothing = lambda *_: None  # noqa: E731
    run = _Run(tasks, names, report or nothing, progress or nothing, done or nothing, failed, watch or nothing)
    where = current_executor()
    cores = min(usable_cores() if where is not None else cores or usable_cores(), len(tasks))
    if not tasks or (cores == 1 and not on_cluster()):
        run.in_this_process(function, all_threads)
    else:
        with contextlib.ExitStack() as stack:
            run.within(DaskPool(stack, where, function) if on_cluster() else ProcessPool(stack, cores, function), grace)
    return [run.results[number] for number in range(len(tasks))]


#: How an error message shows a task.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@dataclass
class _Run:
    """One call of ``map_tasks``: its results, what its caller hears, and why it is to stop (``reason``)."""

    tasks: Sequence
    names: Sequence[str]
    report: Report
    progress: Callable[[int, float, Figures], None]
    done: Callable[[int, Any], None]
    failed: Callable[[Any, UserError], Any] | None
    watch: Callable[[], None]
    results: dict[int, Any] = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)
    reason: BaseException | None = None

    def on_progress(self, number: int, share: float, figures: Figures) -> None:
        if number in self.results:
            return
        further, self.shares[number] = share != self.shares.get(number, 0.0), share
        self.progress(number, share, figures)
        if further:
            alone = len(self.shares) - len(self.results) == 1
            self.report(sum(self.shares.values()), len(self.tasks), figures if alone else {})

    def finish(self, number: int, good: bool, result: Any) -> None:
        if not good:
            if self.failed is None or not isinstance(result, UserError):
                raise result
            result = self.failed(self.tasks[number], result)
        self.results[number], self.shares[number] = result, 1.0
        self.done(number, result)
        self.report(sum(self.shares.values()), len(self.tasks), {})

    def look(self) -> None:
        try:
            if self.reason is None:
                self.watch()
        except BaseException as reason:
            self.reason = reason

    def in_this_process(self, function: Callable, all_threads: bool) -> None:
        for number, (task, name) in enumerate(zip(self.tasks, self.names, strict=True)):

            def send(share: float, figures: Figures, number: int = number) -> None:
                self.on_progress(number, share, figures)
                self.look()

            channel = Channel(send, lambda: self.reason is not None)
            with contextlib.nullcontext() if all_threads else one_thread(), channel.open():
                try:
                    end = True, function(task)
                except Exception as error:
                    end = False, named(error, name)
            self.finish(number, *end)
            self.look()
            if self.reason is not None:
                raise self.reason

    def within(self, pool: Any, grace: float) -> None:
        """In a pool's workers; a task whose process died runs again, after the second time alone, after the others."""
        waiting, deaths, at_work, given_up = deque(range(len(self.tasks))), Counter(), {}, []
        ended: queue.SimpleQueue = queue.SimpleQueue()
        deadline: float | None = None
        while at_work or (self.reason is None and waiting):
            try:
                while self.reason is None and waiting:
                    number = waiting[0]
                    if len(at_work) >= (pool.size if deaths[number] < SUSPECT else 1):
                        break
                    future = pool.start(number, self.tasks[number], self.names[number])
                    at_work[future] = waiting.popleft()
                    future.add_done_callback(ended.put)
                with contextlib.suppress(queue.Empty):
                    number = at_work.pop(future := ended.get(timeout=0.1))  # seconds between two looks
                    if not self._take(pool, number, future):
                        deaths[number] += 1
                        (waiting if deaths[number] <= SUSPECT else given_up).append(number)
                for report in pool.progress(at_work.values()):
                    self.on_progress(*report)
                self.look()
            except KeyboardInterrupt as reason:
                if self.reason is not None:  # the second one
                    raise
                self.reason = reason
            except Exception as error:
                if self.reason is None or isinstance(self.reason, KeyboardInterrupt):
                    self.reason = error
            if self.reason is not None:
                if deadline is None:
                    deadline = time.monotonic() + (grace if pool.waits else 0.0)
                    pool.stop()
                if time.monotonic() > deadline:
                    break
        if self.reason is not None:
            raise self.reason
        for number in given_up:  # the caller may end with the first of them
            self.finish(number, False, WorkerDied(f"{self.names[number]}: {DIED}"))

    def _take(self, pool: Any, number: int, future: Any) -> bool:
        """What came of a task; False where its process died."""
        try:
            good, result, warned = pickle.loads(future.result())
        except pool.died:
            return False
        except Exception as error:
            good, result, warned = False, named(error, self.names[number]), ()
        for message in warned:
            warnings.warn(message, stacklevel=5)
        if self.reason is None or not isinstance(result, KeyboardInterrupt):  # by which tasks end that were asked to
            self.finish(number, good, result)
        return True
