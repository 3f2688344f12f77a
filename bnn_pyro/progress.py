"""Progress bars with the time left, on standard error, one a task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from tqdm import tqdm

__all__ = ["progress_bar", "quiet"]

#: As tqdm's own, with fractions of a step.
FORMAT = "{l_bar}{bar}| {n:.9g}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextlib.contextmanager
def quiet(yes: bool = True) -> Iterator[None]:
    """A block without progress bars, or with them as they were."""
    token = _QUIET.set(yes or _QUIET.get())
    try:
        yield
    finally:
        _QUIET.reset(token)


@contextlib.contextmanager
def progress_bar(
    description: str, show: bool = True, unit: str = "step"
) -> Iterator[Callable[[float, int, Mapping[str, float | str]], None]]:
    """Yield ``report(done, of, figures)``, which moves a bar that shows rate, time left and the figures.

    A figure is a number, or text as it is to be shown. ``done`` may be a fraction.
    """
    if not show or _QUIET.get():
        yield lambda done, of, figures=None: None
        return
    with tqdm(desc=description, unit=unit, dynamic_ncols=True, mininterval=0.2, bar_format=FORMAT) as bar:
        shown: Mapping[str, float | str] | None = None

        def report(done: float, of: int, figures: Mapping[str, float | str] | None = None) -> None:
            nonlocal shown
            bar.total = of
            if figures and figures is not shown:  # the same object again has nothing new to say
                shown = figures
                text = {k: v if isinstance(v, str) else f"{v:.4g}" for k, v in figures.items()}
                bar.set_postfix(text, refresh=False)
            bar.update(round(done, 1) - bar.n)

        yield report
