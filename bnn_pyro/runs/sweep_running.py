"""The fits that are missing, made side by side; what is finished already is not touched."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from bnn_pyro.errors import UserError
from bnn_pyro.progress import progress_bar
from bnn_pyro.parallel.map import map_tasks
from bnn_pyro.runs.sweep_folder import BEGUN, CHANGED, FINISHED, Standing, SweepFolder
from bnn_pyro.runs.sweep_tasks import Making, make_fit
from bnn_pyro.runs.sweep_plan import Fit

__all__ = ["make_fits", "missing_fits"]


def missing_fits(fits: Sequence[Fit], place: SweepFolder, *, overwrite: bool = False) -> list[tuple[Fit, Standing]]:
    """The fits to be made, and where each stands.

    Raises UserError where a folder has a finished fit of other settings, and not ``overwrite``.
    """
    standings = [(fit, place.standing(fit)) for fit in fits]
    changed = [(fit, standing.why) for fit, standing in standings if standing.state == CHANGED]
    if changed and not overwrite:
        (fit, why), several = changed[0], f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(
            f"{place.run_of(fit).path}{several} {why}: give the recipe or the data another name, choose another --out, "
            "or add --overwrite to replace what was changed"
        )
    return [(fit, standing) for fit, standing in standings if standing.state != FINISHED]


def make_fits(
    missing: Sequence[tuple[Fit, Standing]],
    place: SweepFolder,
    *,
    cores: int = 0,
    command: str = "",
    show: bool = True,
) -> dict[str, str]:
    """Make them, each in a process of its own where there are several.

    Returns {name of a fit that failed: why}; the others are finished. Raises KeyboardInterrupt after Ctrl-C or SIGTERM.
    """
    tasks = [
        Making(fit.name, fit.recipe, place.run_of(fit).path.resolve(), standing.state == BEGUN, command)
        for fit, standing in missing
    ]
    failures: dict[str, str] = {}
    with _signals() as look, progress_bar("sweep", show, unit="fit") as report:

        def ended(index: int, error: str) -> None:
            if error:
                failures[tasks[index].name] = error

        def progress(done: float, of: int, figures: Mapping[str, float | str] | None = None) -> None:
            report(round(done, 1), of, {"failed": str(len(failures))} if failures else None)

        progress(0, len(tasks))
        errors = map_tasks(make_fit, tasks, cores=cores, report=progress, done=ended, failed=_why, watch=look)
    for (fit, _), error in zip(missing, errors, strict=True):
        if not error and place.standing(fit).state != FINISHED:
            failures[fit.name] = (
                f"it was made where {place.path.resolve()} is another folder: workers on other machines need --out on "
                "a file system that they share with this one"
            )
    return failures


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], None]]:
    """Yield what raises KeyboardInterrupt after Ctrl-C or SIGTERM, so that fits at work may save first; a second signal
    raises at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def look() -> None:
        if asked:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield look
        return
    former = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield look
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _why(task: Making, error: UserError) -> str:
    """What stands for a fit whose process died; its name is told beside it."""
    text = " ".join(str(error).split())
    return text.partition(f"({task.name}): ")[2] or text
