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
#: A task whose process died so many times is tried once more, alone, after all other tasks.
SUSPECT = 2
DIED = ("its process died each time, the last time with no other task beside it (killed, or out of memory?); run it in "
        "this process (cores=1, or the executor 'here') to see why, or where there is more memory")  # fmt: skip


class WorkerDied(UserError):
    """The process of a task died in every attempt, in the last one without another task beside it."""


def map_tasks(
    function: Callable[[Task], Result], tasks: Sequence[Task], *, cores: int = 0, names: Sequence[str] | None = None,
    all_threads: bool = False, grace: float = 5.0, report: Report | None = None,
    progress: Callable[[int, float, Figures], None] | None = None, done: Callable[[int, Result], None] | None = None,
    failed: Callable[[Task, UserError], Result] | None = None, watch: Callable[[], None] | None = None,
) -> list[Result]:  # fmt: skip
    """Return ``[function(task) for task in tasks]``, in the order of the tasks, several of which run at once.

    function: pickled, like tasks and results, and by value if it cannot be imported; sent once to each process. It must
        not depend on the caller's random generators: each task contains its seed.
    cores: number of processes. 1 runs one task after the other in this process; 0 takes one process per core. Inside
        ``executor(…)`` the executor decides instead.
    names: names of the tasks in errors.   all_threads: let a task in this process use all threads.
    report: called as report(number of tasks done, number of tasks, figures); the shares that tasks report are included.
    progress, done: called as progress(index, share, figures) when a task reports, as done(index, result) at its end.
    failed: called as failed(task, error); returns the result of a task that raised UserError or whose process died in
        every attempt, the last time alone (``WorkerDied``). Without it the error is raised.
    watch: called in this process several times a second; it may raise.
    Raises what a task raised, with the task's name in the message of a UserError, or in a note of any other error. Such
    an error, an error of a callback, and Ctrl-C stop the run: no further task is started, running ones can see it with
    ``should_stop``, and the error is raised when they have ended, or after ``grace`` seconds (on a cluster: at once). A
    second Ctrl-C ends the waiting. An error of a task after Ctrl-C (for example its last file cannot be written) is
    raised instead of KeyboardInterrupt.
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
    """One call of ``map_tasks``: its arguments, its results, and the error that stops it (``reason``)."""

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
        """Run the tasks in a pool's workers. A task whose process died runs again; see ``SUSPECT``."""
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
                    number = at_work.pop(future := ended.get(timeout=0.1))
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
        for number in given_up:  # the first one raises, unless the caller has given ``failed``
            self.finish(number, False, WorkerDied(f"{self.names[number]}: {DIED}"))

    def _take(self, pool: Any, number: int, future: Any) -> bool:
        """Take the result or error of a task; return False if its process died."""
        try:
            good, result, warned = pickle.loads(future.result())
        except pool.died:
            return False
        except Exception as error:
            good, result, warned = False, named(error, self.names[number]), ()
        for message in warned:
            warnings.warn(message, stacklevel=5)
        if self.reason is None or not isinstance(result, KeyboardInterrupt):  # which tasks that are stopped raise
            self.finish(number, good, result)
        return True
