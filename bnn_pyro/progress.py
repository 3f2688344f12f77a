"""Progress: bars with the time left on standard error, and what a task reports to those that wait for it.

Tasks are run by :mod:`bnn_pyro.parallel.map`, here or in another process. Outside of a task both functions do nothing.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
#: What is shown beside a bar: numbers, or texts as they are to be shown.
Figures = Mapping[str, float | str]
#: Called with (done, of how many, figures); ``done`` may be a fraction.
Report = Callable[[float, int, Figures], None]
#: As tqdm's own, with fractions of a step.
FORMAT = "{l_bar}{bar}| {n:.9g}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
#: And as a line of a log, which has so many of them.
LINE, LINES = "{desc}: {percentage:3.0f}% [{elapsed}<{remaining}, {rate_fmt}{postfix}]", 10

_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextlib.contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A block in which a context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def quiet(yes: bool = True) -> contextlib.AbstractContextManager[None]:
    """A block without progress bars, or with them as they were."""
    return within(_QUIET, yes or _QUIET.get())


@contextlib.contextmanager
def progress_bar(description: str, show: bool = True, unit: str = "step") -> Iterator[Report]:
    """Yield ``report(done, of, figures)``, which moves a bar that shows rate, time left and the figures.

    Where standard error is neither a terminal nor a notebook's, these are lines of a log, one for every 10 %.
    """
    if not show or _QUIET.get():
        yield lambda done, of, figures=None: None
        return
    log = not sys.stderr.isatty() and "ipykernel" not in sys.modules
    how = {"bar_format": LINE, "delay": math.inf} if log else {"bar_format": FORMAT}
    from tqdm import tqdm  # which imports more than all of a quick command

    with tqdm(desc=description, unit=unit, dynamic_ncols=True, mininterval=0.2, **how) as bar:
        latest: Figures | None = None
        logged = 0

        def report(done: float, of: int, figures: Figures | None = None) -> None:
            nonlocal latest, logged
            bar.total = of
            if figures and figures is not latest:  # the same object again has nothing new to say
                latest = figures
                bar.set_postfix({k: v if isinstance(v, str) else f"{v:.4g}" for k, v in figures.items()}, refresh=False)
            bar.update(round(done, 1) - bar.n)
            if log and (lines := math.floor(LINES * done / (of or 1))) > logged:
                logged = lines
                print(bar, file=sys.stderr, flush=True)

        yield report


def duration(seconds: float) -> str:
    """In words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 2 * 3600 else f"{seconds / 3600:,.0f} hours"


def announce(text: str, show: bool = True) -> None:
    """A line on standard error, where progress bars are shown."""
    if show and not _QUIET.get():
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)


class Channel:
    """From a task to those that wait for it: ``send(share, figures)`` now and then; ``asked``: whether it is to end."""

    def __init__(self, send: Callable[[float, Figures], None], asked: Callable[[], bool], every: float = 0.0) -> None:
        self._send, self._asked, self.every, self.last, self.outer = send, asked, every, 0.0, _CHANNEL.get()

    def open(self) -> contextlib.AbstractContextManager[None]:
        """The block is a task that has this channel."""
        return within(_CHANNEL, self)

    def report(self, done: float, of: float, figures: Figures | None = None) -> None:
        """So much of the task is done."""
        share = min(1.0, done / of) if of else 1.0
        if share >= 1 or time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            self._send(share, figures or {})

    #: Whether nobody waits for the task any more.
    stopping = property(lambda self: self._asked() or (self.outer is not None and self.outer.stopping))


_CHANNEL: ContextVar[Channel | None] = ContextVar("channel", default=None)


def report_progress(done: float, of: float, figures: Figures | None = None) -> None:
    """How much of this task is done, for the progress bar of those that wait for it, and the figures beside it."""
    if (channel := _CHANNEL.get()) is not None:
        channel.report(done, of, figures)


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
        channel.report(done, of, figures)

    return both
