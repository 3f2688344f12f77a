"""Run a sweep: make the missing fits, each in a run folder, and write sweep.json, results.csv and sweep.html."""

import functools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from bnn_pyro.checkpoint import LAYERS
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from bnn_pyro.files import is_occupied, lock_folder, read_archive
from bnn_pyro.parallel.executor import executor
from bnn_pyro.parallel.map import map_tasks
from bnn_pyro.posterior import read_archive as read_posterior
from bnn_pyro.progress import progress_bar, quiet, report_progress
from bnn_pyro.runs.evaluate import evaluate_run
from bnn_pyro.runs.folder import REPLICATES, OutputFolder, RunFolder
from bnn_pyro.runs.recipe import EARLIER, Recipe
from bnn_pyro.runs.sweep_config import BEGUN, CHANGED, FAILED, FINISHED, MISSING, RunTask, SweepConfig, setting_text
from bnn_pyro.runs.sweep_statistics import DatasetSummary, summarise
from bnn_pyro.runs.train import fit_run, prepare_run
from bnn_pyro.settings import plain


class SweepFolder(OutputFolder):
    """The folder of a sweep, which can always be continued."""

    kind, main, page, begun_again = "sweep", "sweep.json", "sweep.html", ""

    def run(self, task: RunTask) -> RunFolder:
        """Return the folder of a fit."""
        return RunFolder(self.path / task.name)

    def status(self, task: RunTask) -> tuple[str, str]:
        """Return (state of a fit by the files in its folder, the reason if the folder has other settings)."""
        if not (run := self.run(task)).is_begun:
            return (CHANGED, "is no run") if run.path.is_file() or is_occupied(run.path) else (MISSING, "")
        try:
            former = run.recipe
        except UserError as error:
            return CHANGED, str(error)
        settings = plain(task.recipe.method) | getattr(task.recipe.method, "former", {})
        other = ((k, settings[k], v) for k, v in run.former_settings.items() if settings[k] != v)
        changed = task.recipe.difference(former) or next(other, None)
        scales = "scale", former.data.get("scale"), task.recipe.data.get("scale")
        if changed is None and scales == EARLIER and _has_tails(json.dumps(task.recipe.data)):
            changed = "scale", "auto", "standard"
        if changed is not None:
            setting, now, then = changed
            # An interrupted fit with other settings has no result that could be lost: it is made again.
            state = CHANGED if run.is_trained else MISSING
            return state, f"was fitted with {setting} {setting_text(then)}, not {setting_text(now)}"
        scored = run.is_trained and all((run.path / name).is_file() for name in ("metrics.json", REPLICATES))
        names, num = ("baseline", "boosting"), task.recipe.num_draws
        same = former.num_draws == num and all(getattr(former, k) >= getattr(task.recipe, k) for k in names)
        if scored and same:  # `evaluate --num-draws` may have scored it with another number of draws
            facts = run.facts()
            same = facts.metrics.get("num_draws", num) == min(num, facts.provenance.get("stored_draws", num))
        return FINISHED if scored and same else BEGUN, ""

    def outcome(self, task: RunTask, error: str = "") -> dict[str, Any]:
        """Return the entry of a fit in sweep.json: its identity and, if it is finished, metrics, seconds and rows."""
        run, recipe = self.run(task), task.recipe
        outcome = {name: getattr(task, name) for name in ("name", "data", "seed", "split")}
        outcome |= {name: getattr(recipe, name) for name in ("variant", "inference")}
        outcome |= {"recipe": task.recipe_name, "own_seed": recipe.seed, "grid": dict(task.grid)}
        outcome |= {"status": FAILED if error else self.status(task)[0], "error": error}
        if outcome["status"] != FINISHED:
            return outcome
        try:
            facts = run.facts()
        except UserError as error:
            return outcome | {"status": FAILED, "error": f"{error}; or remove {run.path}"}
        provenance, seconds = facts.provenance, facts.provenance["seconds"]
        if facts.failed:
            return outcome | {"status": FAILED, "error": facts.failed, "fingerprint": provenance["fingerprint"]}
        if facts.baseline is not None and not recipe.baseline:  # the backbone of a last layer
            seconds += facts.baseline.provenance["seconds"]
        return outcome | {
            **dict(task=facts.task, problem=facts.problem.get("sentence", ""), seconds=round(seconds, 3)),
            **{key: provenance[key] for key in ("rows", "fingerprint")},
            "split_kind": provenance["split"].get("kind", ""),
            "metrics": {k: v for k, v in facts.metrics.items() if not isinstance(v, Mapping)},
        }

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write sweep.json, and results.csv: one row per fit with its settings and the numbers of its metrics.json."""
        self.write(self.main, results)
        rows = [
            {"failure" if k == "error" else k: v for k, v in fit.items() if not isinstance(v, Mapping)}
            | {key: setting_text(value) for key, value in fit["grid"].items()}
            | {f"{part}_rows": count for part, count in fit.get("rows", {}).items()}
            | fit.get("metrics", {})
            for fit in results["fits"]
        ]
        self.write("results.csv", pd.DataFrame(rows, dtype=object).to_csv(index=False))


def run_sweep(
    config: SweepConfig, folder: SweepFolder, facts: dict[str, Any], *, cores: int = 0, overwrite: bool = False
) -> tuple[dict[str, Any], list[DatasetSummary]]:
    """Make the missing fits; return (the content of sweep.json, the summaries of the data sets).

    facts: about the command and the machine, saved with the results; the fits run on their "executor".
    cores: see ``parallel.map.map_tasks``.
    overwrite: replace fits that have other settings or other data.
    Raises UserError for errors that can be found before a fit is made, and KeyboardInterrupt after a signal; finished
    fits are kept.
    """
    start, tasks = time.perf_counter(), config.tasks
    missing = _missing(config, folder, overwrite)
    results = {"name": config.path.stem, "spec": config.text, "facts": facts}
    failures: dict[str, str] = {}

    def write() -> None:
        results["fits"] = [folder.outcome(task, failures.get(task.name, "")) for task in tasks]
        folder.write_results(results)

    write()
    try:
        if missing:
            where = folder.path.resolve()
            with executor(facts["executor"] or None), progress_bar("sweep", unit="fit") as bar:
                map_tasks(
                    functools.partial(make_run, sweep=where, command=facts["command"], overwrite=overwrite),
                    missing,
                    cores=cores,
                    names=[task.name for task in missing],
                    report=lambda n, of, more: bar(n, of, {"failed": str(len(failures))} if failures else more),
                    done=lambda index, error: failures.update({missing[index].name: error} if error else {}),
                    failed=lambda task, error: " ".join(str(error).split()).removeprefix(f"{task.name}: "),
                )
            for task in missing:
                if folder.status(task)[0] != FINISHED:
                    error = f"it was made on a machine where {where} is another folder: workers need --out on a file "
                    failures.setdefault(task.name, error + "system that they share with this machine")
    finally:
        facts["seconds"] = f"{time.perf_counter() - start:,.0f}, for {len(missing):,} of {len(tasks):,} fits"
        facts["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        write()
    paths = {task.name: folder.run(task).path / REPLICATES for task in tasks}
    summaries = summarise(results["fits"], {name: read_archive(path) for name, path in paths.items() if path.is_file()})
    results["summary"] = [data.to_dict() for data in summaries]
    folder.write_results(results)
    return results, summaries


def _missing(config: SweepConfig, folder: SweepFolder, overwrite: bool) -> list[RunTask]:
    """Return the fits to make. Raises UserError if settings or rows have changed, unless ``overwrite``."""
    statuses = {task: folder.status(task) for task in config.tasks}
    others = [task for task, (state, _) in statuses.items() if state == FINISHED and _other_layers(folder, task)]
    statuses |= dict.fromkeys(others, (CHANGED, "was fitted with other layers than those of its module now"))
    changed = [(task, reason) for task, (state, reason) in statuses.items() if state == CHANGED]
    if changed and not overwrite:
        several = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(f"{folder.path / changed[0][0].name}{several} {changed[0][1]}: give the recipe or the data "
                        "another name, choose another --out, or add --overwrite to replace what changed")  # fmt: skip
    finished = [task for task, (state, _) in statuses.items() if state == FINISHED]
    fingerprints = check_tasks(config, finished)
    rows = {task: fingerprints.get((task.data, task.split)) for task in finished}
    stale = {t.data for t, now in rows.items() if now and folder.outcome(t).get("fingerprint", now) != now}
    if stale and not overwrite:
        raise UserError(f"the rows of data '{min(stale)}' are not those that fits in {folder.path} were trained on: "
                        "the file has changed; choose another --out, or add --overwrite")  # fmt: skip
    return [task for task, (state, _) in statuses.items() if state != FINISHED or task.data in stale]


@functools.cache
def _has_tails(options: str) -> bool:
    """Return whether data have columns with long tails; False if they cannot be loaded.   options: of data, as JSON."""
    with suppress(UserError):
        return bool(Recipe.from_dict({"data": json.loads(options)}).load().schema.x_tails)
    return False


def _other_layers(folder: SweepFolder, task: RunTask) -> bool:
    """Return whether the module of a finished fit has changed since; False if it cannot be imported any more."""
    if (known_by := getattr(task.recipe.entry, "known_by", None)) is None:
        return False
    with suppress(UserError):
        meta = read_posterior(folder.run(task).path)[1]
        now = known_by(Schema.from_dict(meta["schema"]))
        return meta["provenance"]["key"][1].get(LAYERS, now) != now
    return False


def check_tasks(config: SweepConfig, finished: Sequence[RunTask]) -> dict[tuple[str, int], str]:
    """Load one split of each data set, and build every recipe that is to be fitted on it; one of finished fits too.

    Returns {(data set, split): fingerprint of its training rows} for the splits that were loaded.
    Raises UserError if data with fits to make cannot be loaded, or a recipe does not suit them.
    """
    fingerprints = {}
    by_data: dict[tuple[bool, str], dict[str, RunTask]] = {}
    for task in config.tasks:
        by_data.setdefault((task in finished, task.data), {}).setdefault(task.recipe_name, task)
    for (done, name), first in sorted(by_data.items(), key=lambda item: item[0][0]):
        task, place = next(iter(first.values())), f"{config.path} [data.{name}]"
        try:
            data = task.recipe.load()
            if not len(data.x_train):
                raise UserError("it has no training rows")
            fingerprints[name, task.split] = data.fingerprint
            for label, task in first.items():
                place = f"{config.path} [recipes.{task.table}] ({label}) on data '{name}'"
                if not done:
                    prepare_run(task.recipe, data)
        except UserError as error:
            if not done:  # data of finished fits may have been removed
                raise UserError(f"{place}: {error}") from None
    return fingerprints


@quiet()
def make_run(task: RunTask, *, sweep: Path, command: str = "", overwrite: bool = False) -> str:
    """Make and score a fit in its folder; return "" or the error. An interrupted fit resumes unless ``overwrite``."""
    report_progress(0.0, 1.0)
    folder = RunFolder(sweep / task.name)
    try:
        with lock_folder(folder.path, wait=600.0):  # seconds: a worker of a stopped sweep may still write to it
            begun = SweepFolder(sweep).status(task)[0] == BEGUN
            (folder.path / "metrics.json").unlink(missing_ok=True)
            recipe, keep, data = task.recipe, begun and not overwrite, task.recipe.load()
            ready, beside = prepare_run(recipe, data)
            with folder.begun(recipe, keep=keep):
                posterior, baseline = fit_run(folder, ready, data, beside, resume=keep)
                folder.write("environment.json", folder.read("environment.json") | {"command": command})
                baseline = baseline if recipe.baseline or recipe.backbone_variant(data.schema) else None
                return evaluate_run(folder, recipe, data, posterior, baseline, outside={}, report=False).failed
    except Exception as error:
        return f"{type(error).__name__}: " * (not isinstance(error, UserError)) + " ".join(str(error).split())
