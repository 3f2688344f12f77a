"""One task, wherever it runs: on one thread, alone in its process, and with its name in what it raises."""

from __future__ import annotations

import contextlib
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from threadpoolctl import threadpool_limits

from bnn_pyro.errors import UserError
from bnn_pyro.executors.where import Here, forced
from bnn_pyro.side_by_side.lines import Line, held

__all__ = ["Ended", "Stopped", "named", "one_thread", "short", "work"]

#: Characters of a task that an error message shows.
SHOWN = 80

PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Ended:
    """What came of a task in another process: its result or its error, pickled, and what the package warned of."""

    good: bool
    blob: bytes
    heard: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stopped:
    """Of a task that ended as it was asked to, without a result."""


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


#: Held by the task that this process is at: parameter store, random generators and threads are a process's own.
_ALONE = threading.Lock()


def work(number: int, function: bytes | Path, digest: str, task: bytes, name: str, line: Line) -> Ended | Stopped:
    """In another process: what comes of a task there. ``number`` is for joblib's callbacks, see ``backends``.

    function: pickled, or the file that it is in; ``digest`` tells whether this process has read it before.
    """
    with _ALONE, held(line), forced(Here()), one_thread(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        try:
            line.begin()
            if line.stopping:
                return Stopped()
            result = cloudpickle.dumps(_known(function, digest)(pickle.loads(task)))
        except KeyboardInterrupt:
            return Stopped()
        except (Exception, SystemExit) as error:
            return Ended(False, _portable(error, name), _said(heard))
        return Ended(True, result, _said(heard))


def _said(heard: list[warnings.WarningMessage]) -> tuple[str, ...]:
    """What this package warned of, to be said where somebody listens."""
    own = (w for w in heard if issubclass(w.category, UserWarning) and w.filename.startswith(PACKAGE))
    return tuple(str(w.message) for w in own)


def _known(function: bytes | Path, digest: str) -> Callable[[Any], Any]:
    if digest not in _FUNCTIONS:
        _FUNCTIONS.clear()
        _FUNCTIONS[digest] = pickle.loads(function if isinstance(function, bytes) else function.read_bytes())
    return _FUNCTIONS[digest]


#: The function of this process's tasks, by its digest: large ones, with data in them, travel once a process.
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {}


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
        return UserError(f"{name}: {error}")
    error.add_note(f"in {name}")
    return error


def short(task: Any) -> str:
    """The task in few characters."""
    text = " ".join(repr(task).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
