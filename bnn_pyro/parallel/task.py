"""What a task knows of those that wait for it: it reports its progress, and asks whether its result is still wanted.

Tasks are run by :mod:`bnn_pyro.parallel.map`, here or in another process. Outside of a task ``report_progress`` and
``should_stop`` do nothing. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from bnn_pyro.errors import UserError
from bnn_pyro.parallel.executor import executor

__all__ = [
    "Channel", "Figures", "Outcome", "Report", "failure", "forwarded", "named", "one_thread", "report_progress",
    "run_task", "should_stop", "using",
]  # fmt: skip

Figures = Mapping[str, float | str]
#: Called with (done, of how many, figures).
Report = Callable[[float, int, Figures], None]

PACKAGE = str(Path(__file__).parents[1])


class Channel:
    """From a task to those that wait for it; a task in a task has both.

    send: called as send(share, figures), every so many seconds at most.   asked: whether the task is to end.
    """

    def __init__(self, send: Callable[[float, Figures], None], asked: Callable[[], bool], every: float = 0.0) -> None:
        self._send, self._asked, self.every, self.last, self.outer = send, asked, every, 0.0, _CHANNEL.get()

    def send(self, share: float, figures: Figures) -> None:
        """So much of the task is done."""
        if share >= 1 or time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            self._send(share, figures)

    @property
    def stopping(self) -> bool:
        """Whether nobody waits for the task any more."""
        return self._asked() or (self.outer is not None and self.outer.stopping)


_CHANNEL: ContextVar[Channel | None] = ContextVar("channel", default=None)


@contextlib.contextmanager
def using(channel: Channel) -> Iterator[None]:
    """The block is a task that has this channel."""
    token = _CHANNEL.set(channel)
    try:
        yield
    finally:
        _CHANNEL.reset(token)


def report_progress(done: float, of: float, figures: Figures | None = None) -> None:
    """How much of this task is done, for the progress bar of those that wait for it, and the figures beside it."""
    channel = _CHANNEL.get()
    if channel is not None:
        channel.send(min(1.0, done / of) if of else 1.0, figures or {})


def should_stop() -> bool:
    """Whether nobody waits for this task any more: it may save what it has, and end."""
    channel = _CHANNEL.get()
    return channel is not None and channel.stopping


def forwarded(report: Report) -> Report:
    """``report``, which in a task reports the task's progress too: of something that may be the whole of a task."""
    channel = _CHANNEL.get()  # that of now: what calls the report may be at a task of its own
    if channel is None:
        return report

    def both(done: float, of: int, figures: Figures | None = None) -> None:
        report(done, of, figures)
        with using(channel):
            report_progress(done, of, figures)

    return both


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch and for numpy's linear algebra: sums of several come out otherwise in the last digit."""
    if "torch" not in sys.modules and os.environ.get("OMP_NUM_THREADS") == "1":  # as in a worker: they start with one
        yield
        return
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def named(error: BaseException, name: str) -> BaseException:
    """The error with the name of its task: in the message of a UserError, in a note of any other."""
    if isinstance(error, UserError):
        return type(error)(f"{name}: {error}")
    error.add_note(f"in {name}")
    return error


# -- a task in another process -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """What came of a task in another process.

    good     whether there is a result        blob     the result or else the error, pickled
    warned   what the package warned of
    """

    good: bool
    blob: bytes
    warned: tuple[str, ...]

    def read(self, name: str) -> tuple[bool, Any]:
        """(whether there is a result, the result or else the error)."""
        try:
            return self.good, pickle.loads(self.blob)
        except Exception as error:
            text = f"what came back cannot be read here: {type(error).__name__}: {error}"
            return False, named(RuntimeError(text), name)


#: Held by the task that this process is at: parameter store, random generators and threads are a process's own.
_ALONE = threading.Lock()

#: {call: the function of its tasks}, of one call: large ones, with data in them, travel once a process.
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {}


def run_task(call: str, function: bytes | Path, task: bytes, name: str, connect: Callable[[], Channel]) -> Outcome:
    """In another process: what comes of a task there.

    call: of ``map_tasks``, one name for all its tasks.   function: pickled, or the file that it is in.
    """
    with _ALONE, executor("here"), one_thread(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            with using(connect()):
                if should_stop():
                    raise KeyboardInterrupt
                if call not in _FUNCTIONS:
                    _FUNCTIONS.clear()
                    _FUNCTIONS[call] = pickle.loads(function if isinstance(function, bytes) else function.read_bytes())
                good, blob = True, cloudpickle.dumps(_FUNCTIONS[call](pickle.loads(task)))
        except BaseException as error:
            good, blob = False, failure(error, name)
    own = (w for w in caught if issubclass(w.category, UserWarning) and w.filename.startswith(PACKAGE))
    return Outcome(good, blob, tuple(dict.fromkeys(str(w.message) for w in own)))


def failure(error: BaseException, name: str) -> bytes:
    """What a task raised, pickled; where that cannot travel, a RuntimeError does."""
    where = "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error = named(error, name)
    if not isinstance(error, UserError):
        error.add_note(f"in its process:\n{where}")
    try:
        blob = cloudpickle.dumps(error)
        pickle.loads(blob)
    except Exception:
        other = RuntimeError(f"{type(error).__name__}: {error}")
        other.__notes__ = getattr(error, "__notes__", [])
        blob = cloudpickle.dumps(other)
    return blob
