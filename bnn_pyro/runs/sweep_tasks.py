"""One fit of a sweep, made in whatever process it is given to: trained, or gone on with, and scored."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bnn_pyro.files import InUse, lock_folder
from bnn_pyro.errors import UserError
from bnn_pyro.runs.train import fit_run, prepared
from bnn_pyro.runs.recipe import Recipe
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.score import score_run
from bnn_pyro.parallel.task import report_progress

__all__ = ["Making", "make_fit"]

#: Seconds that a fit waits for a worker of a stopped sweep, which may still be at it.
PATIENCE = 600.0


@dataclass(frozen=True)
class Making:
    """What a process needs to know of a fit.

    folder   its run folder, absolute
    resume   go on with what is in the folder; else it is begun anew
    command  what the user typed
    """

    name: str
    recipe: Recipe
    folder: Path
    resume: bool
    command: str

    def __repr__(self) -> str:
        return self.name


def make_fit(making: Making) -> str:
    """Train and score into the fit's folder. Returns "", or what went wrong in one line; other fits go on then."""
    report_progress(0.0, 1.0)
    try:
        with _claimed(making.folder):
            _make(making)
    except UserError as error:
        return " ".join(str(error).split())
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _make(making: Making) -> None:
    folder, recipe = RunFolder(making.folder), making.recipe
    (folder.path / "metrics.json").unlink(missing_ok=True)  # scores of other draws, or none
    data = recipe.load()
    entry, below = prepared(recipe, data)
    with folder.begun(recipe, keep=making.resume):
        posterior, baseline = fit_run(folder, recipe, data, entry, below, resume=making.resume, show=False)
        folder.write("environment.json", folder.read("environment.json") | {"command": making.command})
        beside = baseline if recipe.baseline or recipe.stands_on(data.schema) else None
        score_run(folder, recipe, data, posterior, beside, show=False)


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Hold the folder, after waiting for whoever is at it."""
    limit = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_folder(folder))
                break
            except InUse:
                if time.monotonic() > limit:
                    raise
                time.sleep(1.0)
        yield
