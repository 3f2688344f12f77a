"""The fits that a sweep consists of: resolved to recipes, checked before training, each made in whatever process it is
given to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bnn_pyro.errors import UserError
from bnn_pyro.files import InUse, is_occupied, lock_folder
from bnn_pyro.parallel.task import report_progress
from bnn_pyro.progress import progress_bar
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.recipe import Recipe, resolve_config
from bnn_pyro.runs.score import score_run
from bnn_pyro.runs.sweep_config import DatasetSpec, RecipeSpec, SweepConfig, folder_name, setting_text
from bnn_pyro.runs.train import fit_run, prepared

__all__ = ["BEGUN", "CHANGED", "FAILED", "FINISHED", "MISSING", "SEED_STEP", "RunStatus", "RunTask", "check_tasks",
           "make_run", "plan_tasks", "run_status"]  # fmt: skip

#: A fit's own seed is that of the sweep + SEED_STEP · split. Fits of one seed would begin with the same weights on
#: every split, and what these do to the result (on a small set as much as the split) would be in no error over splits.
SEED_STEP = 1000
#: Seconds that a fit waits for a worker of a stopped sweep, which may still be at it.
MAX_WAIT = 600.0
#: A fit has its scores; was cut off; was never begun; is one of other settings; ended in an error.
FINISHED, BEGUN, MISSING, CHANGED, FAILED = "finished", "begun", "missing", "changed", "failed"


class RunStatus(NamedTuple):
    """What is in a fit's folder, and the reason where that is a fit of other settings."""

    state: str
    reason: str = ""


@dataclass(frozen=True)
class RunTask:
    """One fit of a sweep.

    recipe_name, data  names in the sweep's file
    seed               the sweep's; the recipe's own, of initial weights, order of rows and noise, follows from it
    split              the number of a given split, or the seed of a random one
    grid               the settings that the grid gives its recipe
    """

    recipe_name: str
    data: str
    seed: int
    split: int
    recipe: Recipe
    grid: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{folder_name(self.recipe_name)}-{folder_name(self.data)}-seed{self.seed}-split{self.split}"

    def __repr__(self) -> str:
        return self.name


def plan_tasks(config: SweepConfig) -> list[RunTask]:
    """Every combination, such that a sweep that is stopped early has all recipes on the first splits.

    Tuned settings go before those of the variant, those of the file before tuned ones, as for `train`.

    Raises UserError for settings that variant or method refuse, and where two fits would share a folder.
    """
    tasks = [
        _task(config, spec, data, seed, data.splits[k])
        for seed in config.seeds
        for k in range(max(len(data.splits) for data in config.data))
        for data in config.data
        if k < len(data.splits)
        for spec in config.recipes
    ]
    first: dict[str, RunTask] = {}
    for task in tasks:
        other = first.setdefault(task.name.lower(), task)
        if other is not task:
            raise UserError(
                f"{config.path}: '{other.recipe_name}' on '{other.data}' and '{task.recipe_name}' on '{task.data}' "
                f"would share the folder {task.name}; rename one of them"
            )
    return tasks


def _task(config: SweepConfig, spec: RecipeSpec, data: DatasetSpec, seed: int, split: int) -> RunTask:
    own = {"data": {**data.config, data.key: split}, "seed": (seed + SEED_STEP * split) % 2**32}
    try:
        return RunTask(spec.name, data.name, seed, split, resolve_config({**spec.config, **own}), spec.grid)
    except UserError as error:
        raise UserError(f"{config.path} [recipes.{spec.table}] ({spec.name}): {error}") from None


def check_tasks(config: SweepConfig, tasks: Sequence[RunTask], *, show: bool = True) -> dict[tuple[str, int], str]:
    """Load each data set once, and build on it every recipe that is to be fitted there.

    Returns {(data set, split): fingerprint of its training rows} of the splits that were loaded, one a data set.

    Raises UserError where data cannot be loaded, or a recipe does not suit them.
    """
    fingerprints = {}
    tables = {spec.name: spec.table for spec in config.recipes}
    names = list(dict.fromkeys(task.data for task in tasks))
    with progress_bar("check data and recipes", show, unit="data set") as report:
        for done, name in enumerate(names, 1):
            first = {task.recipe_name: task for task in reversed(tasks) if task.data == name}
            task = next(task for task in tasks if task.data == name)
            try:
                data = task.recipe.load()
                if not len(data.x_train):
                    raise UserError("it has no training rows")
            except UserError as error:
                raise UserError(f"{config.path} [data.{name}]: {error}") from None
            fingerprints[name, task.split] = data.fingerprint
            for label, other in first.items():
                try:
                    prepared(other.recipe, data)
                except UserError as error:
                    place = f"{config.path} [recipes.{tables[label]}] ({label}) on data '{name}'"
                    raise UserError(f"{place}: {error}") from None
            report(done, len(names))
    return fingerprints


def run_status(folder: RunFolder, recipe: Recipe) -> RunStatus:
    """Where the fit of a recipe stands, by what is in its folder."""
    if not folder.is_begun:
        other = folder.path.is_file() or is_occupied(folder.path)
        return RunStatus(CHANGED, "is no run") if other else RunStatus(MISSING)
    try:
        former = folder.recipe
    except UserError as error:
        return RunStatus(CHANGED, str(error))
    changed = recipe.difference(former)
    if changed is not None:
        what, now, then = changed
        # One that was cut off has no result that could be lost, or taken for that of these settings.
        state = CHANGED if folder.is_trained else MISSING
        return RunStatus(state, f"was fitted with {what} {setting_text(then)}, not {setting_text(now)}")
    scored = folder.is_trained and (folder.path / "metrics.json").is_file()
    same = former.num_draws == recipe.num_draws and former.baseline >= recipe.baseline
    return RunStatus(FINISHED if scored and same else BEGUN)


def make_run(task: RunTask, *, sweep: Path, resume: frozenset[str] = frozenset(), command: str = "") -> str:
    """Train and score into the fit's folder in ``sweep``. Returns "", or what went wrong in one line.

    resume: names of the fits that go on with what is in their folders; others are begun anew.
    command: what the user typed.
    """
    report_progress(0.0, 1.0)
    folder, recipe = RunFolder(sweep / task.name), task.recipe
    try:
        with _locked(folder.path):
            (folder.path / "metrics.json").unlink(missing_ok=True)  # scores of other draws, or none
            data, keep = recipe.load(), task.name in resume
            entry, below = prepared(recipe, data)
            with folder.begun(recipe, keep=keep):
                posterior, baseline = fit_run(folder, recipe, data, entry, below, resume=keep, show=False)
                folder.write("environment.json", folder.read("environment.json") | {"command": command})
                compared = recipe.baseline or recipe.stands_on(data.schema)
                score_run(folder, recipe, data, posterior, baseline if compared else None, show=False)
    except UserError as error:
        return " ".join(str(error).split())
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the folder, after waiting for whoever is at it."""
    limit = time.monotonic() + MAX_WAIT
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_folder(path))
                break
            except InUse:
                if time.monotonic() > limit:
                    raise
                time.sleep(1.0)
        yield
