"""Those who do tasks elsewhere: processes of this machine, or the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import joblib
import numpy as np

from bnn_pyro.errors import UserError
from bnn_pyro.executors.backends import Died, Lost, ProcessesBackend, outcomes
from bnn_pyro.executors.dask import missing_workers
from bnn_pyro.side_by_side.lines import Board, BoardLine, EventLine
from bnn_pyro.side_by_side.task import Ended, Stopped, named, work

__all__ = ["ClusterCrew", "ProcessesCrew", "in_rounds"]

#: Seconds between two looks at what the tasks have done.
LOOK = 0.1

#: Seconds between two counts of a cluster's workers, and that it may be without any before that is told.
EVERY, PATIENCE = 5, 30

#: Deaths of its process after which a task is tried alone, and after which it is given up if it was alone.
SUSPECT, GIVEN_UP = 2, 3

#: (number of a task, what it ended with)
Outcome = tuple[int, Ended | Stopped | Died | Lost]

Look = Callable[[], None]


class ProcessesCrew:
    """Processes of this machine. The function is in a file that each reads once."""

    #: Seconds that tasks have to end by themselves once they were asked to.
    grace = 5.0

    def __init__(self, stack: contextlib.ExitStack, function: Callable, tasks: Sequence, names: list[str], cores: int):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bnn-pyro-tasks-")))
        blob = cloudpickle.dumps(function)
        self.function, self.digest = folder / "function", hashlib.sha256(blob).hexdigest()
        self.function.write_bytes(blob)
        self.tasks, self.names, self.cores = tasks, names, cores
        self.path = folder / "board"
        self.board = Board(self.path, len(tasks))
        self.stopped = False

    def run(self, numbers: Sequence[int], look: Look) -> Iterator[Outcome]:
        """Some of the tasks, as they end."""
        begun = self.board.rows[:-1, 1].copy()
        dead = []
        for number, outcome in outcomes(ProcessesBackend(), self._calls(numbers), max(2, self.cores), look, LOOK):
            if isinstance(outcome, Died):  # a process takes the whole pool with it: who was at work?
                dead.append(number)
            else:
                yield number, outcome
        at_work = [number for number in dead if self.board.rows[number, 1] > begun[number]]
        for number in dead:
            yield number, Died(int(number in at_work or not at_work))

    def _calls(self, numbers: Sequence[int]) -> list[tuple]:
        of, send = len(self.tasks), joblib.delayed(work)
        lines = {number: BoardLine(self.path, number, of) for number in numbers}
        how = self.function, self.digest
        return [send(n, *how, cloudpickle.dumps(self.tasks[n]), self.names[n], lines[n]) for n in numbers]

    @property
    def shares(self) -> np.ndarray:
        """How much of each task is done."""
        return self.board.shares

    def stop(self) -> None:
        """Ask the tasks at work to end, and let no other begin."""
        self.stopped = True
        self.board.stop()


class ClusterCrew:
    """The workers of a Dask cluster, which the function reaches once each."""

    grace = 0.0

    def __init__(self, stack: contextlib.ExitStack, function: Callable, tasks: Sequence, names: list[str], client: Any):
        self.client, self.tasks, self.names = client, tasks, names
        self.blob = cloudpickle.dumps(function)
        self.digest, self.topic = hashlib.sha256(self.blob).hexdigest(), f"bnn-pyro-{uuid.uuid4().hex}"
        self.shares = np.zeros(len(tasks))
        self.stopped = False
        self.looks, self.without = 0, 0
        stack.callback(random.setstate, random.getstate())  # by which Dask measures a sample of what it sends
        client.subscribe_topic(self.topic, self._hear)
        stack.callback(self._hang_up)

    def _hear(self, event: tuple[float, tuple[int, float]]) -> None:
        number, share = event[1]
        self.shares[number] = share

    def _hang_up(self) -> None:
        with contextlib.suppress(Exception):  # the scheduler may be away
            self.client.unsubscribe_topic(self.topic)

    def run(self, numbers: Sequence[int], look: Look) -> Iterator[Outcome]:
        """Some of the tasks, as they end. Raises UserError where the scheduler is gone."""
        from bnn_pyro.executors.dask_backend import ClusterBackend  # imports distributed

        backend = ClusterBackend(self.client)
        send = joblib.delayed(work)
        function = backend.share(self.blob)
        calls = [
            send(n, function, self.digest, cloudpickle.dumps(self.tasks[n]), self.names[n], EventLine(self.topic, n))
            for n in numbers
        ]

        def look_at_cluster() -> None:
            self._count_workers()
            look()

        for number, outcome in outcomes(backend, calls, 2, look_at_cluster, LOOK):
            if isinstance(outcome, Died) and self.client.status != "running":
                raise UserError(
                    f"the Dask scheduler at {self.client.scheduler.address} is gone; what was finished is kept where "
                    "a folder was given"
                )
            yield number, outcome

    def _count_workers(self) -> None:
        """Tell once of a cluster that stays without: workers may be starting, or starting again."""
        self.looks += 1
        if self.looks % round(EVERY / LOOK) == 0 and self.without < PATIENCE:
            with contextlib.suppress(OSError):
                missing = missing_workers(self.client)
                self.without = self.without + EVERY if missing else 0
                if self.without >= PATIENCE:
                    warnings.warn(missing, stacklevel=8)

    def stop(self) -> None:
        """Nothing waits for a cluster's tasks."""
        self.stopped = True


def in_rounds(crew: ProcessesCrew | ClusterCrew, look: Look) -> Iterator[tuple[int, bool, Any, tuple[str, ...]]]:
    """(number, whether it has a result, the result or else the error, what it warned of) of each task, as they end.

    Where a process dies, the tasks that have not ended run again. Those that were at work twice when one died run one
    at a time, after the others: the one that ends its process by itself is found and given up, and one that needs the
    memory of two gets it.
    """
    left, deaths, given_up = dict.fromkeys(range(len(crew.tasks))), [0] * len(crew.tasks), []
    while left and not crew.stopped:
        some = [number for number in left if deaths[number] < SUSPECT] or list(left)[:1]
        before = len(left), sum(deaths)
        with contextlib.closing(crew.run(some, look)) as ends:
            for number, outcome in ends:
                if isinstance(outcome, Stopped) and crew.stopped:
                    continue
                if isinstance(outcome, Died):
                    deaths[number] += outcome.times
                    if len(some) == 1 and deaths[number] >= GIVEN_UP:
                        given_up.append(number)
                        del left[number]
                    continue
                del left[number]
                yield number, *_read(outcome, crew.names[number])
        if before == (len(left), sum(deaths)):  # nothing ended, and nobody knows why
            for number in some:
                deaths[number] += 1
    for number in given_up:  # after the others: the caller may end with the first of them
        yield number, *_read(Lost(UserError(DEAD)), crew.names[number])


DEAD = (
    "its process died each time, the last time with no other task beside it (killed, or out of memory?); run it in "
    "this process (cores=1, or the executor 'here') to see why, or where there is more memory"
)


def _read(outcome: Ended | Stopped | Lost, name: str) -> tuple[bool, Any, tuple[str, ...]]:
    """(whether there is a result, the result or else the error, what was warned of)."""
    if isinstance(outcome, Ended):
        try:
            return outcome.good, pickle.loads(outcome.blob), outcome.heard
        except Exception as error:
            outcome = Lost(RuntimeError(f"what came back cannot be read here: {type(error).__name__}: {error}"))
    error = outcome.error if isinstance(outcome, Lost) else KeyboardInterrupt()
    if not isinstance(error, Exception):
        error = RuntimeError(f"it was ended by {type(error).__name__}")
    return False, named(error, name), ()
