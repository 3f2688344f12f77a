"""What a task knows of those that wait for it: it reports its progress, and asks whether its result is still wanted.

Tasks are run by :mod:`bnn_pyro.parallel.map`. Outside of a task these functions do nothing. Importing
this module does not import torch.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from bnn_pyro.errors import UserError
from bnn_pyro.parallel.executor import Executor, forced

__all__ = [
    "Channel", "Died", "Figures", "LocalChannel", "Lost", "Outcome", "Report", "forwarded", "named", "one_thread",
    "report_progress", "run_task", "should_stop", "using",
]  # fmt: skip

Figures = Mapping[str, float | str]

#: Called with (done, of how many, figures).
Report = Callable[[float, int, Figures], None]

PACKAGE = str(Path(__file__).parents[1])


def report_progress(done: float, of: float, figures: Figures | None = None) -> None:
    """How much of this task is done, for the progress bar of those that wait for it, and the figures beside it."""
    channel = _CHANNEL.get()
    if channel is not None:
        channel.send(_share(done, of), figures or {})


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
        channel.send(_share(done, of), figures or {})

    return both


def _share(done: float, of: float) -> float:
    return min(1.0, done / of) if of else 1.0


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch and for numpy's linear algebra: sums of several come out otherwise in the last digit."""
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


# -- channels ----------------------------------------------------------------------------------------------------------
class Channel(Protocol):
    """From a task to the process that waits for it."""

    def begin(self) -> None:
        """The task starts, in this process."""

    def send(self, share: float, figures: Figures) -> None:
        """So much of it is done."""

    @property
    def stopping(self) -> bool:
        """Whether it is to end."""


_CHANNEL: ContextVar[Channel | None] = ContextVar("channel", default=None)


@contextlib.contextmanager
def using(channel: Channel) -> Iterator[None]:
    """The functions above use this channel in the block."""
    token = _CHANNEL.set(channel)
    try:
        yield
    finally:
        _CHANNEL.reset(token)


class LocalChannel:
    """To the same process, which may itself be at a task."""

    def __init__(self, receive: Callable[[float, Figures], None], asked: Callable[[], bool]) -> None:
        self.send, self.asked, self.outer = receive, asked, _CHANNEL.get()

    def begin(self) -> None:
        """See ``Channel``."""

    @property
    def stopping(self) -> bool:
        """See ``Channel``."""
        return self.asked() or (self.outer is not None and self.outer.stopping)


# -- a task in another process -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """What came of a task in another process: its result or its error, pickled, and what the package warned of.

    stopped: it ended as it was asked to, without a result.
    """

    good: bool
    blob: bytes
    warned: tuple[str, ...] = ()
    stopped: bool = False


@dataclass(frozen=True)
class Died:
    """Of a task whose process ended; ``times``: how many did, 0 where it was another task's fault."""

    times: int = 1


@dataclass(frozen=True)
class Lost:
    """Of a task that did not reach its process, or whose result did not come back."""

    error: BaseException


#: Held by the task that this process is at: parameter store, random generators and threads are a process's own.
_ALONE = threading.Lock()

#: The function of this process's tasks, by its digest: large ones, with data in them, travel once a process.
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {}


def run_task(function: bytes | Path, digest: str, task: bytes, name: str, channel: Channel) -> Outcome:
    """In another process: what comes of a task there.

    function: pickled, or the file that it is in; ``digest`` tells whether this process has read it before.
    """
    here = forced(Executor("here"))
    with _ALONE, using(channel), here, one_thread(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        good = stopped = False
        try:
            channel.begin()
            if channel.stopping:
                raise KeyboardInterrupt
            if digest not in _FUNCTIONS:
                _FUNCTIONS.clear()
                _FUNCTIONS[digest] = pickle.loads(function if isinstance(function, bytes) else function.read_bytes())
            good, blob = True, cloudpickle.dumps(_FUNCTIONS[digest](pickle.loads(task)))
        except KeyboardInterrupt:
            stopped, blob = True, cloudpickle.dumps(named(RuntimeError("it was interrupted"), name))
        except (Exception, SystemExit) as error:
            blob = _portable(error, name)
        own = (w for w in caught if issubclass(w.category, UserWarning) and w.filename.startswith(PACKAGE))
        return Outcome(good, blob, tuple(dict.fromkeys(str(w.message) for w in own)), stopped)


def _portable(error: BaseException, name: str) -> bytes:
    """The error, pickled; as a RuntimeError where it cannot be."""
    where = "".join(traceback.format_exception(error))
    if not isinstance(error, Exception):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error = named(error, name)
    if not isinstance(error, UserError):
        error.add_note(f"in its process:\n{where}")
    try:
        blob = cloudpickle.dumps(error)
        pickle.loads(blob)
        return blob
    except Exception:
        other = RuntimeError(f"{type(error).__name__}: {error}")
        other.__notes__ = list(error.__notes__)
        return cloudpickle.dumps(other)


def named(error: Exception, name: str) -> Exception:
    """The error with the name of its task: in the message of a UserError, in a note of any other."""
    if isinstance(error, UserError):
        return type(error)(f"{name}: {error}")
    error.add_note(f"in {name}")
    return error
