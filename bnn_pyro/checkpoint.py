"""Checkpoints: training that is stopped or killed at any moment can be resumed, and has the same result."""

import copy
import functools
import hashlib
import io
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from bnn_pyro.distributed import process_group
from bnn_pyro.errors import UserError, refusing
from bnn_pyro.files import write_whole
from bnn_pyro.progress import Figures, Report, should_stop

#: Size in bytes of the SHA-256 checksum at the end of a file: torch loads damaged tensors without an error.
CHECKSUM = 32
#: Advice in error messages where a fit cannot be resumed.
AGAIN = "start again without resume (on the command line: --overwrite)"
#: Entries of a key: the layers of a user's module, and the inputs with long tails.
LAYERS, TAILS = "module_layers", "x_tails"
#: A second signal within so many seconds is a copy of the first: torchrun forwards a Ctrl-C from the terminal.
SAME_SIGNAL = 2.0


def same_fit(saved: Any, key: Any, *optional: str) -> bool:
    """Return whether two keys belong to one fit; keys of earlier versions lack ``LAYERS`` and the ``optional`` ones."""
    lacking = {LAYERS, *optional}
    earlier = [{k: v for k, v in p.items() if k not in lacking} if isinstance(p, dict) else p for p in key or ()]
    return saved in (key, earlier)


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal, after its checkpoint was written."""


def _on_rank_0(method: Callable[..., Any]) -> Callable[..., Any]:  # see ``Ranks.on_rank0``
    return functools.wraps(method)(lambda *args: process_group().on_rank0(lambda: method(*args)))


class Checkpoint:
    """One file in ``folder`` that holds everything that a training loop needs to resume.

    As a context manager it handles SIGINT and SIGTERM (in the main thread): the first signal sets :attr:`stop`, so
    that :class:`Run` saves after the current step and raises :class:`Interrupted`; a second signal stops at once.
    If a fit has several processes, all of them call each method: rank 0 reads and writes the file, and its result or
    error is returned or raised in all of them.

    folder: created when first needed.   every: seconds between two saves.
    key: what must be equal for a resume, such as the settings and the data's fingerprint; JSON-able.
    """

    def __init__(self, folder: Path, key: Any = None, every: float = 20.0) -> None:
        self.path, self.key, self.every = Path(folder) / "training.pt", key, every
        self.parent: Checkpoint | None = None
        self.signalled = False
        self._last = self._signal_time = time.monotonic()
        self._handlers: dict[int, Any] = {}

    def child(self, name: str) -> Self:
        """Return a checkpoint for a part of the run, in its own file; it stops when this one does. Can be pickled."""
        child = copy.copy(self)
        child.path, child.parent = self.path.with_suffix(f".{name}.pt"), self
        return child

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "parent": None, "signalled": False, "_handlers": {}}

    #: Whether the loop should save and end: after a signal, or if it belongs to a cancelled task.
    stop = property(lambda self: self.signalled or should_stop() or (self.parent is not None and self.parent.stop))
    #: Whether the loop should save now.
    due = property(lambda self: self.stop or time.monotonic() - self._last >= self.every)

    @property
    @_on_rank_0
    def exists(self) -> bool:
        """Whether there is a file to resume from, of this checkpoint or of a child."""
        return self.path.is_file() or any(self._children())

    @_on_rank_0
    def load(self) -> dict[str, Any] | None:
        """Return the last saved state, or None. Raises UserError if it is damaged or of other settings or data."""
        if not self.path.is_file():
            return None
        with refusing(f"the checkpoint {self.path} is damaged; {AGAIN}"):
            blob = self.path.read_bytes()
            if hashlib.sha256(blob[:-CHECKSUM]).digest() != blob[-CHECKSUM:]:
                raise ValueError
            saved = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
            key, state = saved["key"], saved["state"]
        if not same_fit(key, self.key):
            raise UserError(f"the checkpoint {self.path} was made with other settings, seed or data, or another "
                            f"module; resume with the same ones, or {AGAIN}")  # fmt: skip
        return state

    @_on_rank_0
    def save(self, state: dict[str, Any]) -> None:
        """Write the state (tensors, numbers, strings, lists, dicts) atomically."""
        buffer = io.BytesIO()
        torch.save({"key": self.key, "state": state}, buffer)
        write_whole(self.path, buffer.getvalue() + hashlib.sha256(buffer.getvalue()).digest())
        self._last = time.monotonic()

    @_on_rank_0
    def discard(self) -> None:
        """Remove the file and its children's files, once the posterior is saved."""
        for path in (self.path, *self._children()):
            path.unlink(missing_ok=True)
        if self.path.parent.is_dir() and not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()

    def _children(self) -> Iterator[Path]:
        return self.path.parent.glob(f"{self.path.stem}.*.pt")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        now = time.monotonic()
        if self.signalled and not (process_group().size > 1 and now - self._signal_time < SAME_SIGNAL):
            raise KeyboardInterrupt
        self.signalled, self._signal_time = True, now


@dataclass(frozen=True)
class Run:
    """The arguments of a fit besides its model and data; see ``Method.run``.

    max_minutes  the fit ends with its current result after so many minutes since ``began`` (a ``time.time()``)
    least        the share of its draws that a chain takes even if the time is over
    start        {site: (C, *shape)}, weights at which point estimates start to be optimised; None: the method's own
    """

    seed: int = 0
    checkpoint: Checkpoint | None = None
    report: Report | None = None
    max_minutes: float | None = None
    least: float = 0.0
    began: float = field(default_factory=lambda: time.time())
    start: Mapping[str, Tensor] | None = None

    #: Minutes since the fit began.
    minutes = property(lambda self: (time.time() - self.began) / 60)
    #: Whether the fit should end now, finished or not.
    stop = property(lambda self: should_stop() if self.checkpoint is None else self.checkpoint.stop)

    def tell(self, done: float, of: int, figures: Figures) -> None:
        """Call ``report``, if there is one."""
        if self.report is not None:
            self.report(done, of, figures)

    def take(self, job: Any) -> str:
        """Resume a job from the checkpoint, take its remaining steps, and save its state at intervals.

        job: an object with ``steps()``, which takes one step at a time and yields figures to report, or None; with
            ``step`` and ``total``, the number of steps done and in all; with ``state_dict`` and ``load_state_dict``.
        Returns "" after the last step. If the time is over before, the state is saved and a sentence that says so is
        returned; after a signal it is saved and Interrupted is raised.
        Several processes of one fit save and stop after the same step: by rank 0's clock, or after any one's signal.
        """
        checkpoint, ranks = self.checkpoint, process_group()
        if checkpoint is not None and (state := checkpoint.load()) is not None:
            job.load_state_dict(state)
        for figures in job.steps():
            if figures is not None:
                self.tell(job.step, job.total, figures)
            over = self.max_minutes is not None and self.minutes >= self.max_minutes
            over = over and getattr(job, "share_drawn", 1.0) >= self.least
            due = over or (self.stop if checkpoint is None else checkpoint.due)
            stop = due and self.stop
            if ranks.size > 1:
                mine = torch.tensor([due and ranks.is_rank0, over and ranks.is_rank0, stop], dtype=torch.int64)
                due, over, stop = ranks.total(mine, "MAX").tolist()
            if (due or stop) and checkpoint is not None:
                checkpoint.save(job.state_dict())
            if stop:
                raise Interrupted(f"stopped after step {job.step:,} of {job.total:,}")
            if over and job.step < job.total:
                return f"stopped at the limit of {self.max_minutes:.3g} min, at step {job.step:,} of {job.total:,}"
        return ""
