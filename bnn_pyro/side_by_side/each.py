"""Many independent tasks on all cores: the one door to joblib.

A task computes on one thread wherever it runs, so that the results are the same in this process and in many, bit for
bit. Signals are the parent's to answer: Ctrl-C ends the workers too, quietly.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import joblib
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError
from threadpoolctl import threadpool_limits

from bnn_pyro.errors import UserError

__all__ = ["each", "one_thread", "usable_cores"]

Task = TypeVar("Task")
Result = TypeVar("Result")

#: Seconds that a worker waits for another task: those of a parent that was killed end by themselves.
IDLE = 60.0

#: Characters of a task that an error message shows.
SHOWN = 80


def usable_cores() -> int:
    """Cores that this process may use; 1 in a process that is itself one of several."""
    return 1 if multiprocessing.parent_process() is not None else joblib.cpu_count()


def each(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    cores: int = 0,
    report: Callable[[int, int, Mapping[str, float | str]], None] | None = None,
) -> list[Result]:
    """``[function(task) for task in tasks]``, several at once; results in the order of the tasks.

    function: travels to other processes, as tasks and results do, by value where it is not importable. It must not
        depend on the caller's random generators: a task brings a seed.
    cores: processes; 1: one task after the other in this process; 0: as many as there are cores to be used.
    report: called as report(tasks done, of how many, {}).

    Raises what a task raised, with the task named in it: the message of a UserError, a note of any other. Raises
    UserError where a process died.
    """
    if cores < 0:
        raise UserError(f"cores must be a number of processes, or 0 for all there are, got {cores}")
    tasks = list(tasks)
    processes = min(cores or usable_cores(), len(tasks))
    numbered = [(number, task) for number, task in enumerate(tasks, 1)]
    done = _here(function, numbered) if processes <= 1 else _in_processes(function, numbered, processes)
    results: list[Result] = []
    with contextlib.closing(done):
        for result in done:
            results.append(result)
            if report is not None:
                report(len(results), len(tasks), {})
    return results


def _here(function: Callable[[Task], Result], tasks: list[tuple[int, Task]]) -> Iterator[Result]:
    for number, task in tasks:
        with one_thread():
            result = _one(function, number, task, len(tasks))
        yield result


def _in_processes(function: Callable[[Task], Result], tasks: list[tuple[int, Task]], cores: int) -> Iterator[Result]:
    """OpenMP and BLAS are told of one thread before a worker starts, torch in ``_worker``."""
    deaf = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    quiet = {"inner_max_num_threads": 1, "idle_worker_timeout": IDLE, **deaf}
    with joblib.parallel_config(backend="loky", n_jobs=cores, **quiet):
        parallel = joblib.Parallel(return_as="generator")
    calls = (joblib.delayed(_worker)(function, number, task, len(tasks)) for number, task in tasks)
    try:
        yield from parallel(calls)
    except TerminatedWorkerError:
        raise UserError(
            "a process of its own died (killed, or out of memory?); run the tasks one after the other, with cores=1"
        ) from None


def _worker(function: Callable[[Task], Result], number: int, task: Task, of: int) -> Result:
    with one_thread():
        return _one(function, number, task, of)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch and for numpy's linear algebra: sums of several come out otherwise in the last digit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def _one(function: Callable[[Task], Result], number: int, task: Task, of: int) -> Result:
    try:
        return function(task)
    except Exception as error:
        raise _named(error, f"task {number} of {of} ({_short(task)})") from error.__cause__


def _named(error: Exception, name: str) -> Exception:
    if isinstance(error, UserError):
        return UserError(f"{name}: {error}")
    error.add_note(f"in {name}")
    return error


def _short(task: Any) -> str:
    text = " ".join(repr(task).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
