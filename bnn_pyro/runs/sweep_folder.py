"""The folder of a sweep: a run folder for each fit, sweep.json, results.csv, sweep.html, figures/*.png.

What is finished is known from the run folders alone; every file is whole or not there.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bnn_pyro.files import is_occupied, read_json, write_whole
from bnn_pyro.datasets.sources import read_archive
from bnn_pyro.errors import UserError
from bnn_pyro.reports.page import Picture
from bnn_pyro.runs.folder import REPLICATES, RunFolder
from bnn_pyro.runs.sweep_plan import Fit
from bnn_pyro.runs.sweep_spec import spoken

__all__ = ["BEGUN", "CHANGED", "FAILED", "FINISHED", "MISSING", "Standing", "SweepFolder"]

RESULTS, TABLE, PAGE = "sweep.json", "results.csv", "sweep.html"
#: Where a fit stands: has its scores; was cut off; was never begun; is one of other settings; ended in an error.
FINISHED, BEGUN, MISSING, CHANGED, FAILED = "finished", "begun", "missing", "changed", "failed"
#: What is read of a posterior's JSON file.
ARCHIVE = {"schema": {"task": str}, "provenance": {"rows": {"*": int}, "split": {}, "fingerprint": str,
                                                   "seconds": int | float}}  # fmt: skip


class Standing(NamedTuple):
    """Where a fit stands, and what was changed where it is one of other settings."""

    state: str
    why: str = ""


@dataclass(frozen=True)
class SweepFolder:
    """Where the fits of a sweep lie."""

    path: Path

    @classmethod
    def claim(cls, path: str | Path) -> SweepFolder:
        """A folder that is a sweep, or may become one; nothing is written yet. UserError where something else is."""
        folder = cls(Path(path))
        if folder.path.exists() and not folder.path.is_dir():
            raise UserError(f"--out {path} is a file; choose a folder that does not exist yet")
        if not (folder.path / RESULTS).is_file() and is_occupied(folder.path):
            raise UserError(f"--out {path} exists and is not a sweep; choose another folder")
        return folder

    @property
    def page(self) -> Path:
        """The report."""
        return self.path / PAGE

    def run_of(self, fit: Fit) -> RunFolder:
        """The folder of a fit."""
        return RunFolder(self.path / fit.name)

    def standing(self, fit: Fit) -> Standing:
        """Where a fit stands, by what is in its folder."""
        run = self.run_of(fit)
        if not run.is_run:
            other = run.path.is_file() or is_occupied(run.path)
            return Standing(CHANGED, "is no run") if other else Standing(MISSING)
        try:
            there = run.recipe
        except UserError as error:
            return Standing(CHANGED, str(error))
        changed = fit.recipe.difference(there)
        if changed is not None:
            what, now, then = changed
            # One that was cut off has no result that could be lost, or taken for that of these settings.
            state = CHANGED if run.is_trained else MISSING
            return Standing(state, f"was fitted with {what} {_told(then)}, not {_told(now)}")
        scored = run.is_trained and (run.path / "metrics.json").is_file()
        same = there.num_draws == fit.recipe.num_draws and there.baseline >= fit.recipe.baseline
        return Standing(FINISHED if scored and same else BEGUN)

    def outcome(self, fit: Fit, error: str = "") -> dict[str, Any]:
        """What sweep.json says of a fit: who it is, and its metrics, seconds and rows where it is finished."""
        run, recipe = self.run_of(fit), fit.recipe
        found = {
            "name": fit.name,
            "recipe": fit.candidate,
            "data": fit.data,
            "seed": fit.seed,
            "split": fit.split,
            "own_seed": recipe.seed,
            "variant": recipe.variant,
            "inference": recipe.inference,
            "grid": dict(fit.grid),
            "status": FAILED if error else self.standing(fit).state,
            "error": error,
        }
        if found["status"] != FINISHED:
            return found
        meta = read_json(run.path / "posterior.json", ARCHIVE)
        if meta is None:
            return found | {"status": FAILED, "error": f"{run.path}/posterior.json is damaged; remove {run.path}"}
        provenance, seconds = meta["provenance"], meta["provenance"]["seconds"]
        below = read_json(run.baseline.path / "posterior.json", ARCHIVE) if run.baseline.is_trained else None
        if below is not None and not recipe.baseline:  # the network that it stands on
            seconds += below["provenance"]["seconds"]
        return found | {
            "task": meta["schema"]["task"],
            "seconds": round(seconds, 3),
            "rows": provenance["rows"],
            "split_kind": provenance["split"].get("kind", ""),
            "fingerprint": provenance["fingerprint"],
            "metrics": run.read("metrics.json"),
        }

    def replicates(self, fits: Sequence[Fit]) -> dict[str, dict[str, np.ndarray]]:
        """{name of a fit: {metric: (R,)}} on resampled test rows; without fits that an earlier version scored."""
        found = {}
        for fit in fits:
            with contextlib.suppress(UserError):
                found[fit.name] = read_archive(self.run_of(fit).path / REPLICATES)
        return found

    def write(self, results: Mapping[str, Any]) -> None:
        """Replace sweep.json, and results.csv, one row a fit."""
        self._write(RESULTS, (json.dumps(dict(results), indent=1, ensure_ascii=False) + "\n").encode())
        self._write(TABLE, _csv(results["fits"]).encode())

    def write_page(self, html: str, pictures: Sequence[Picture]) -> None:
        """Replace sweep.html and the figures."""
        for picture in pictures:
            self._write(f"figures/{picture.name}.png", picture.png)
        self._write(PAGE, html.encode())

    def _write(self, name: str, content: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)


def _csv(fits: Sequence[Mapping[str, Any]]) -> str:
    """One line a fit: who it is, what its grid sets, what it took, every number of its metrics.json."""
    rows = [
        {k: v for k, v in fit.items() if not isinstance(v, Mapping)}
        | {key: spoken(value) for key, value in fit["grid"].items()}
        | {f"{part}_rows": count for part, count in fit.get("rows", {}).items()}
        | dict(fit.get("metrics", {}))
        for fit in fits
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _told(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
