"""Progress bars on standard error, and the progress that tasks report to the process that waits for them."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
#: Names and values shown beside a progress bar; numbers are formatted, texts are shown as they are.
Figures = Mapping[str, float | str]
#: Called with (steps done, total, figures); the steps done may be a fraction.
Report = Callable[[float, int, Figures], None]
#: The default format of tqdm, but with fractions of a step.
FORMAT = "{l_bar}{bar}| {n:.9g}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
#: The format of a line in a log file, and the number of lines in all.
LINE, LINES = "{desc}: {percentage:3.0f}% [{elapsed}<{remaining}, {rate_fmt}{postfix}]", 10

_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextlib.contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable during a block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def quiet(yes: bool = True) -> contextlib.AbstractContextManager[None]:
    """Hide progress bars during a block; with ``yes=False`` nothing changes."""
    return within(_QUIET, yes or _QUIET.get())


@contextlib.contextmanager
def progress_bar(description: str, show: bool = True, unit: str = "step") -> Iterator[Report]:
    """Yield ``report(done, of, figures)``, which updates a bar with the rate, the time left and the figures.

    If standard error is neither a terminal nor a notebook, a line is printed every 10 % instead.
    """
    if not show or _QUIET.get():
        yield lambda done, of, figures=None: None
        return
    log = not sys.stderr.isatty() and "ipykernel" not in sys.modules
    options = {"bar_format": LINE, "delay": math.inf} if log else {"bar_format": FORMAT}
    from tqdm import tqdm  # slow to import, compared with a quick command

    with tqdm(desc=description, unit=unit, dynamic_ncols=True, mininterval=0.2, **options) as bar:
        latest: Figures | None = None
        logged = 0

        def report(done: float, of: int, figures: Figures | None = None) -> None:
            nonlocal latest, logged
            bar.total = of
            if figures and figures is not latest:  # the same object means the same figures
                latest = figures
                bar.set_postfix({k: v if isinstance(v, str) else f"{v:.4g}" for k, v in figures.items()}, refresh=False)
            bar.update(round(done, 1) - bar.n)
            if log and (lines := math.floor(LINES * done / (of or 1))) > logged:
                logged = lines
                print(bar, file=sys.stderr, flush=True)

        yield report


def duration(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 2 * 3600 else f"{seconds / 3600:,.0f} hours"


def announce(text: str, show: bool = True) -> None:
    """Print a line on standard error, unless progress bars are hidden."""
    if show and not _QUIET.get():
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)


class Channel:
    """The connection of a task to the process that waits for it.

    send: called with (share done, figures) at most once in ``every`` seconds, and at the end.
    stop: whether the task should end.
    """

    def __init__(self, send: Callable[[float, Figures], None], stop: Callable[[], bool], every: float = 0.0) -> None:
        self._send, self._asked, self.every, self.last, self.outer = send, stop, every, 0.0, _CHANNEL.get()

    def open(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which the current task uses this channel."""
        return within(_CHANNEL, self)

    def report(self, done: float, of: float, figures: Figures | None = None) -> None:
        """Report the progress of the task."""
        share = min(1.0, done / of) if of else 1.0
        if share >= 1 or time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            self._send(share, figures or {})

    #: Whether the task's result is no longer wanted.
    stopping = property(lambda self: self._asked() or (self.outer is not None and self.outer.stopping))


_CHANNEL: ContextVar[Channel | None] = ContextVar("channel", default=None)


def report_progress(done: float, of: float, figures: Figures | None = None) -> None:
    """Report how much of this task is done, and figures, to the progress bar of the process that waits for it."""
    if (channel := _CHANNEL.get()) is not None:
        channel.report(done, of, figures)


def should_stop() -> bool:
    """Return whether this task's result is no longer wanted, so that it should save its state and end."""
    channel = _CHANNEL.get()
    return channel is not None and channel.stopping


def forwarded(report: Report) -> Report:
    """Return ``report``, extended to report the progress of the current task too."""
    channel = _CHANNEL.get()  # of the current task: ``report`` may be called within an inner task
    if channel is None:
        return report

    def both(done: float, of: int, figures: Figures | None = None) -> None:
        report(done, of, figures)
        channel.report(done, of, figures)

    return both
