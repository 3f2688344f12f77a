"""A sweep from its file to its report: the fits that are missing are made, and everything that is finished is reported.

Its folder holds a run folder for each fit, sweep.json, results.csv, sweep.html and figures/*.png. What is finished is
known from the run folders alone.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pandas as pd

from bnn_pyro.datasets.sources import read_archive
from bnn_pyro.errors import UserError
from bnn_pyro.files import read_json
from bnn_pyro.parallel.executor import executor as running_on
from bnn_pyro.parallel.map import map_tasks
from bnn_pyro.progress import progress_bar
from bnn_pyro.reports.tables import plain_table
from bnn_pyro.runs.environment import environment
from bnn_pyro.runs.folder import REPLICATES, OutputFolder, RunFolder
from bnn_pyro.runs.sweep_config import SweepConfig, setting_text
from bnn_pyro.runs.sweep_figures import draw_sweep
from bnn_pyro.runs.sweep_report import error_sources, sweep_page
from bnn_pyro.runs.sweep_statistics import DatasetSummary, summarise
from bnn_pyro.runs.sweep_tasks import (
    BEGUN,
    CHANGED,
    FAILED,
    FINISHED,
    RunStatus,
    RunTask,
    check_tasks,
    make_run,
    plan_tasks,
    run_status,
)

__all__ = ["SweepFolder", "failure_text", "planned_text", "run_sweep"]

#: What is read of a posterior's JSON file.
ARCHIVE = {"schema": {"task": str}, "provenance": {"rows": {"*": int}, "split": {}, "fingerprint": str,
                                                   "seconds": int | float}}  # fmt: skip


class SweepFolder(OutputFolder):
    """Where the fits of a sweep lie; one may always go on with it."""

    kind, main, page, begun_again = "sweep", "sweep.json", "sweep.html", ""

    def run(self, task: RunTask) -> RunFolder:
        """The folder of a fit."""
        return RunFolder(self.path / task.name)

    def status(self, task: RunTask) -> RunStatus:
        """Where a fit stands."""
        return run_status(self.run(task), task.recipe)

    def outcome(self, task: RunTask, error: str = "") -> dict[str, Any]:
        """What sweep.json says of a fit: who it is, and its metrics, seconds and rows where it is finished."""
        run, recipe = self.run(task), task.recipe
        found = {
            "name": task.name,
            "recipe": task.recipe_name,
            "data": task.data,
            "seed": task.seed,
            "split": task.split,
            "own_seed": recipe.seed,
            "variant": recipe.variant,
            "inference": recipe.inference,
            "grid": dict(task.grid),
            "status": FAILED if error else self.status(task).state,
            "error": error,
        }
        if found["status"] != FINISHED:
            return found
        meta = read_json(run.path / "posterior.json", ARCHIVE)
        if meta is None:
            return found | {"status": FAILED, "error": f"{run.path}/posterior.json is damaged; remove {run.path}"}
        provenance, seconds = meta["provenance"], meta["provenance"]["seconds"]
        backbone = read_json(run.baseline.path / "posterior.json", ARCHIVE) if run.baseline.is_trained else None
        if backbone is not None and not recipe.baseline:
            seconds += backbone["provenance"]["seconds"]
        return found | {
            "task": meta["schema"]["task"],
            "seconds": round(seconds, 3),
            "rows": provenance["rows"],
            "split_kind": provenance["split"].get("kind", ""),
            "fingerprint": provenance["fingerprint"],
            "metrics": run.read("metrics.json"),
        }

    def replicates(self, tasks: Sequence[RunTask]) -> dict[str, dict[str, np.ndarray]]:
        """{name of a fit: {metric: (R,)}} on resampled test rows; without fits that an earlier version scored."""
        found = {}
        for task in tasks:
            with contextlib.suppress(UserError):
                found[task.name] = read_archive(self.run(task).path / REPLICATES)
        return found

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Replace sweep.json, and results.csv: a row a fit with its settings, and every number of its metrics.json."""
        self.write(self.main, results)
        rows = [
            {k: v for k, v in fit.items() if not isinstance(v, Mapping)}
            | {key: setting_text(value) for key, value in fit["grid"].items()}
            | {f"{part}_rows": count for part, count in fit.get("rows", {}).items()}
            | fit.get("metrics", {})
            for fit in results["fits"]
        ]
        self.write("results.csv", pd.DataFrame(rows, dtype=object).to_csv(index=False))


def run_sweep(
    config: SweepConfig,
    folder: SweepFolder,
    *,
    executor: Any = None,
    cores: int = 0,
    overwrite: bool = False,
    show: bool = True,
) -> tuple[dict[str, Any], list[DatasetSummary]]:
    """Make the fits that are missing, then the report of all that there are; (what sweep.json holds, its summaries).

    executor, cores: see ``parallel.executor.executor`` and ``parallel.map.map_tasks``.
    overwrite: fits of other settings, or other data, in the way of those of the sweep are replaced.

    Raises UserError for what can be known before a fit is made, and KeyboardInterrupt after Ctrl-C or SIGTERM: what was
    finished is then kept.
    """
    start, tasks = time.perf_counter(), plan_tasks(config)
    statuses = {task.name: folder.status(task) for task in tasks}
    changed = [task for task in tasks if statuses[task.name].state == CHANGED]
    if changed and not overwrite:
        several = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(
            f"{folder.run(changed[0]).path}{several} {statuses[changed[0].name].reason}: give the recipe or the data "
            "another name, choose another --out, or add --overwrite to replace what was changed"
        )
    missing = [task for task in tasks if statuses[task.name].state != FINISHED]
    if missing:
        fingerprints = check_tasks(config, missing, show=show)
        names = {task.name for task in [*missing, *_of_changed_rows(folder, tasks, missing, fingerprints, overwrite)]}
        missing = [task for task in tasks if task.name in names]
    facts = environment("cpu") | {"executor": str(executor or "")}
    results = {"name": config.path.stem, "spec": config.text, "facts": facts}
    failures: dict[str, str] = {}

    def write() -> None:
        results["fits"] = [folder.outcome(task, failures.get(task.name, "")) for task in tasks]
        folder.write_results(results)

    write()
    if missing:
        resume = frozenset(name for name, status in statuses.items() if status.state == BEGUN)
        make = functools.partial(make_run, sweep=folder.path.resolve(), resume=resume, command=facts["command"])
        try:
            with running_on(executor):
                failures |= _make_runs(make, missing, folder, cores, show)
        except KeyboardInterrupt:
            write()
            raise
    facts["seconds"] = f"{time.perf_counter() - start:,.0f}, for {len(missing):,} of {len(tasks):,} fits"
    write()
    summaries = summarise(results["fits"], folder.replicates(tasks))
    results["summary"] = [data.to_dict() | {"error_over": error_sources(data)} for data in summaries]
    folder.write_results(results)
    pictures = list(draw_sweep(summaries, config.recipes))
    folder.write_figures(pictures)
    folder.write(folder.page, sweep_page(results, summaries, pictures))
    return results, summaries


def planned_text(config: SweepConfig, folder: SweepFolder, *, show: bool = True) -> str:
    """What `--dry-run` prints: every fit and where it stands, after the checks that come before training.

    Raises UserError as :func:`run_sweep`, but for fits of other settings, which are listed.
    """
    planned = [(task, folder.status(task)) for task in plan_tasks(config)]
    missing = [task for task, status in planned if status.state != FINISHED]
    if missing:
        check_tasks(config, missing, show=show)
    table = plain_table(["fit", ""], [[task.name, " ".join(status).strip()] for task, status in planned])
    counts = Counter(status.state for _, status in planned)
    return f"{table}\n\n{len(planned):,} fits in {folder.path}: " + ", ".join(f"{n:,} {s}" for s, n in counts.items())


def _of_changed_rows(
    folder: SweepFolder,
    tasks: Sequence[RunTask],
    missing: Sequence[RunTask],
    fingerprints: Mapping[tuple[str, int], str],
    overwrite: bool,
) -> list[RunTask]:
    """The finished fits of data sets whose rows have changed since."""
    names = {task.name for task in missing}
    finished = [task for task in tasks if task.name not in names]
    stale = {
        task.data
        for task in finished
        if folder.outcome(task).get("fingerprint") != fingerprints.get((task.data, task.split))
        and (task.data, task.split) in fingerprints
    }
    if stale and not overwrite:
        raise UserError(
            f"the rows of data '{min(stale)}' are not those that finished fits in {folder.path} were trained on: the "
            "file has changed; choose another --out, or add --overwrite to make them anew"
        )
    return [task for task in finished if task.data in stale]


def _make_runs(
    make: Callable[[RunTask], str], tasks: Sequence[RunTask], folder: SweepFolder, cores: int, show: bool
) -> dict[str, str]:
    """{name of a fit that failed: why}; the others are finished. KeyboardInterrupt after Ctrl-C or SIGTERM."""
    failures: dict[str, str] = {}
    with _signals() as check_signals, progress_bar("sweep", show, unit="fit") as report:

        def ended(index: int, error: str) -> None:
            if error:
                failures[tasks[index].name] = error

        def progress(done: float, of: int, figures: Mapping[str, float | str] | None = None) -> None:
            report(round(done, 1), of, {"failed": str(len(failures))} if failures else None)

        progress(0, len(tasks))
        map_tasks(make, tasks, cores=cores, report=progress, done=ended, failed=failure_text, watch=check_signals)
    for task in tasks:
        if task.name not in failures and folder.status(task).state != FINISHED:
            failures[task.name] = (
                f"it was made where {folder.path.resolve()} is another folder: workers on other machines need --out on "
                "a file system that they share with this one"
            )
    return failures


def failure_text(task: RunTask, error: UserError) -> str:
    """What stands for a fit whose process died; its name is beside it."""
    text = " ".join(str(error).split())
    return text.partition(f"({task.name}): ")[2] or text


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], None]]:
    """Yield what raises KeyboardInterrupt after Ctrl-C or SIGTERM, so that fits at work may save first; a second signal
    raises at once."""
    signalled = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal signalled
        if signalled:
            raise KeyboardInterrupt
        signalled = True

    def check() -> None:
        if signalled:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
