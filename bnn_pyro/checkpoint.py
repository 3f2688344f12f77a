"""Training that can be stopped, or killed at any moment, and goes on to the same result."""

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

from bnn_pyro.distributed import here
from bnn_pyro.errors import UserError, refusing
from bnn_pyro.files import write_whole
from bnn_pyro.progress import Figures, Report, should_stop

#: Bytes of the checksum (SHA-256) that ends the file: torch reads tensors of changed bytes without a word.
CHECKSUM = 32
#: The way out where a fit cannot be resumed.
AGAIN = "start again without resume (on the command line: --overwrite)"
#: What the settings in a key say of a user's module beside its name, and of the inputs with long tails.
LAYERS, TAILS = "module_layers", "x_tails"
#: Seconds in which a signal is the same one: torchrun passes on the Ctrl-C that its processes had from the terminal.
SAME_SIGNAL = 2.0


def same_fit(saved: Any, key: Any, *unsaid: str) -> bool:
    """Whether two keys are of one fit; that of an earlier version says nothing of ``LAYERS`` and what is ``unsaid``."""
    said = [part if isinstance(part, dict) else {"": part} for part in key or ()]
    before = [{k: v for k, v in part.items() if k not in (LAYERS, *unsaid)} for part in said]
    return saved in (key, [part.get("", part) for part in before])


class Interrupted(KeyboardInterrupt):
    """Training stopped on a signal, after its checkpoint was written."""


def _first_does(method: Callable[..., Any]) -> Callable[..., Any]:  # see ``Ranks.first_does``
    return functools.wraps(method)(lambda *args: here().first_does(lambda: method(*args)))


class Checkpoint:
    """One file in ``folder`` that holds everything that a training loop needs to go on.

    As a context manager it takes SIGINT and SIGTERM (in the main thread): after the first :attr:`stop` is true,
    which :class:`Run` answers between two steps by saving and raising :class:`Interrupted`; a second one stops at once.
    Where a fit has several processes all call its methods: rank 0 has the file, and its result or error is everybody's.

    folder: made when first needed.   every: seconds between two saves.
    key: what must agree for a resume, such as the settings and the data's fingerprint; JSON-able.
    """

    def __init__(self, folder: Path, key: Any = None, every: float = 20.0) -> None:
        self.path, self.key, self.every = Path(folder) / "training.pt", key, every
        self.parent: Checkpoint | None = None
        self.signalled = False
        self._last = self._signal_time = time.monotonic()
        self._handlers: dict[int, Any] = {}

    def child(self, name: str) -> Self:
        """A file beside this one's, for a part of the run, which stops when this one does; it may be pickled."""
        child = copy.copy(self)
        child.path, child.parent = self.path.with_suffix(f".{name}.pt"), self
        return child

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "parent": None, "signalled": False, "_handlers": {}}

    #: Whether the loop is to save and end: after a signal, or where it is (part of) a task that is not wanted.
    stop = property(lambda self: self.signalled or should_stop() or (self.parent is not None and self.parent.stop))
    #: Whether the loop should save now.
    due = property(lambda self: self.stop or time.monotonic() - self._last >= self.every)

    @property
    @_first_does
    def exists(self) -> bool:
        """Whether there is something to resume from, be it of a child alone."""
        return self.path.is_file() or any(self._children())

    @_first_does
    def load(self) -> dict[str, Any] | None:
        """The last saved state, None without one; UserError where it is damaged or of other settings or data."""
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

    @_first_does
    def save(self, state: dict[str, Any]) -> None:
        """Write the state (tensors, numbers, strings, lists, dicts) as a whole."""
        buffer = io.BytesIO()
        torch.save({"key": self.key, "state": state}, buffer)
        write_whole(self.path, buffer.getvalue() + hashlib.sha256(buffer.getvalue()).digest())
        self._last = time.monotonic()

    @_first_does
    def discard(self) -> None:
        """Remove the file, and those of its children: the posterior is saved."""
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
        if self.signalled and not (here().size > 1 and now - self._signal_time < SAME_SIGNAL):
            raise KeyboardInterrupt
        self.signalled, self._signal_time = True, now


@dataclass(frozen=True)
class Run:
    """What a fit is given besides its model and data; see ``Method.run``.

    max_minutes  after which, counted from ``began`` (``time.time()``), it is to end with what it has come to
    least        share of its draws that a chain takes even then
    start        {site: (C, *shape)}, the weights at which optimisations of points start, where they are given
    """

    seed: int = 0
    checkpoint: Checkpoint | None = None
    report: Report | None = None
    max_minutes: float | None = None
    least: float = 0.0
    began: float = field(default_factory=lambda: time.time())
    start: Mapping[str, Tensor] | None = None

    #: Since it began.
    minutes = property(lambda self: (time.time() - self.began) / 60)
    #: Whether it is to end now, whatever it has come to.
    stop = property(lambda self: should_stop() if self.checkpoint is None else self.checkpoint.stop)

    def tell(self, done: float, of: int, figures: Figures) -> None:
        """Report progress to whoever wants to know of it."""
        if self.report is not None:
            self.report(done, of, figures)

    def take(self, job: Any) -> str:
        """Take the steps that a job lacks, after those that the checkpoint holds, and save it now and then.

        job: ``steps()`` yields what to show, or None; ``step`` of ``total`` done; ``state_dict``, ``load_state_dict``.
        Returns "" after the last step, or after the first one when its time is over, and says so. Raises Interrupted
        where it is to stop. In both cases its state is saved, if it has a checkpoint.
        Where a fit has several processes they save and stop after one step: by rank 0's clock, for any signal.
        """
        checkpoint, ranks = self.checkpoint, here()
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
                mine = torch.tensor([due and ranks.first, over and ranks.first, stop], dtype=torch.int64)
                due, over, stop = ranks.total(mine, "MAX").tolist()
            if (due or stop) and checkpoint is not None:
                checkpoint.save(job.state_dict())
            if stop:
                raise Interrupted(f"stopped after step {job.step:,} of {job.total:,}")
            if over and job.step < job.total:
                return f"stopped at the limit of {self.max_minutes:.3g} min, at step {job.step:,} of {job.total:,}"
        return ""
