"""The run folder: what is in it, how it is opened, and that nothing which is not a run is ever touched.

    config.json       the recipe: everything to run it again       posterior.pt, .json   the posterior's archive
    metrics.json      test metrics, flat, with intervals           figures/*.png         the report's pictures
    test-replicates.npz  the metrics on 1,000 resamples of the test rows, the same ones for all runs on these rows
    history.csv       the training curve                           report.html           all of it, to read
    environment.json  versions, machine, command, times            README.md             the model card
    convergence.json  of chains: have they converged               diagnosis.json, .html what `diagnose` found
    checkpoint/       while training                               posterior.nc          the draws, for ArviZ
    baseline/         the same, of the baseline

Every file is written whole or not at all.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bnn_pyro.files import is_occupied, lock_folder, read_json, unwritable, write_whole
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior, read_archive
from bnn_pyro.runs.recipe import Recipe, read_config
from bnn_pyro.reports.tables import RunFacts
from bnn_pyro.fitting import tuned

__all__ = ["REPLICATES", "RunFolder", "default_folder", "environment"]

REPLICATES = "test-replicates.npz"
FILES = ("metrics.json", REPLICATES, "metrics-mean-weights.json", "pruning.json", "convergence.json", "diagnosis.json",
         "diagnosis.html", "posterior.nc", "history.csv", "environment.json", "report.html", "comparison.html",
         "README.md")  # fmt: skip
ARCHIVE = ("posterior.json", "posterior.pt")
NUMBER, VERDICT = int | float | None, {"level": str, "about": str, "sentence": str}
#: What is read of these files: the kind of every value by its key, "*" for all keys.
SHAPES: dict[str, Any] = {
    "metrics.json": {"*": NUMBER},
    "convergence.json": {"statistics": {"*": NUMBER}, "verdicts": [VERDICT]},
    "diagnosis.json": {"statistics": {"*": NUMBER}, "verdicts": [VERDICT], "weights": [{"*": NUMBER | str}]},
    "pruning.json": {"measure": str, "share_removed": NUMBER, "share_removed_by_site": {"*": NUMBER},
                     "curve": [{"*": NUMBER}]},
    "environment.json": {"command": str, "finished": str, "training_seconds": NUMBER, "device": str, "machine": str,
                         "threads": int, "python": str, "versions": {"*": str | None}, "commit": str | None},
}  # fmt: skip
#: The command that writes a file anew; no other does.
ANEW = {"metrics.json": "evaluate", "convergence.json": "evaluate", "diagnosis.json": "diagnose",
        "pruning.json": "evaluate --prune"}  # fmt: skip
PACKAGES = ("bnn-pyro", "pyro-ppl", "torch", "torchvision", "numpy", "pandas", "scikit-learn", "matplotlib")


@dataclass(frozen=True)
class RunFolder:
    """A folder that is, or becomes, a run.

    seen   config.json as it was when the folder was claimed for a run; () where it was not
    """

    path: Path
    seen: tuple[bytes | None, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """A finished run. Raises UserError where there is none."""
        folder = cls(Path(path))
        if not folder.path.is_dir():
            raise UserError(f"no run folder {path}")
        if not folder.is_run:
            raise UserError(f"{path} is not a run: it has no config.json of one")
        if not folder.is_trained:
            raise UserError(f"the run {path} is not finished; go on with: train --resume --out {path}")
        return folder

    @classmethod
    def claim(cls, path: str | Path, *, resume: bool = False, overwrite: bool = False) -> RunFolder:
        """A folder that a run may be written to; nothing is written or removed yet.

        Raises UserError where something else is there, or a run and neither ``resume`` nor ``overwrite``.
        """
        folder = cls(Path(path), (_bytes(Path(path) / "config.json"),))
        if resume and overwrite:
            raise UserError("--resume goes on with a run and --overwrite replaces it; give one of them")
        if resume and not folder.is_run:
            raise UserError(f"nothing to resume: {path} is no run; leave out --resume to start one")
        if folder.path.exists() and not folder.path.is_dir():
            raise UserError(f"--out {path} is a file; choose a folder that does not exist yet")
        if not folder.is_run and is_occupied(folder.path):
            raise UserError(f"--out {path} exists and is not a run; choose another folder")
        if folder.is_run and not (resume or overwrite):
            raise UserError(f"--out {path} is a run already; add --resume to go on with it, or --overwrite")
        return folder

    @property
    def is_run(self) -> bool:
        """Whether a run was begun here."""
        try:
            return "variant" in read_config(self.path / "config.json")
        except UserError:
            return False

    @property
    def is_trained(self) -> bool:
        """Whether the posterior is there."""
        return all((self.path / name).is_file() for name in ARCHIVE)

    @property
    def baseline(self) -> RunFolder:
        """The run of the deterministic network beside it."""
        return RunFolder(self.path / "baseline")

    @property
    def recipe(self) -> Recipe:
        """What was run. Raises UserError where the file is damaged."""
        path = self.path / "config.json"
        recipe = Recipe(**read_config(path))
        try:
            if "name" not in recipe.data or recipe.inference is None:
                raise UserError("it names no data, or no inference method")
            tuned(recipe.variant, recipe.data_name, recipe.inference)
            recipe.entry(), recipe.method()
            if recipe.num_draws < 1 or not 0 <= recipe.seed < 2**32:
                raise UserError(f"num_draws {recipe.num_draws} or seed {recipe.seed} is out of range")
            if recipe.device not in ("auto", "cpu", "cuda"):  # whether it is here is asked when it is used
                raise UserError(f"unknown device '{recipe.device:.20}'")
        except UserError as error:
            raise UserError(f"{path} is damaged ({error}); restore it, or train again") from None
        return recipe

    @contextmanager
    def begun(self, recipe: Recipe, *, keep: bool = False) -> Iterator[None]:
        """The folder with its recipe in it, this process's alone to write to while the block lasts.

        Without ``keep`` a former run's own files are removed first. Raises UserError where another process is at it, or
        has begun a run here since it was claimed.
        """
        with lock_folder(self.path):
            if self.seen and self.seen != (_bytes(self.path / "config.json"),):
                raise UserError(f"another run was begun in {self.path} meanwhile; choose another --out")
            if not keep:
                self._clear()
            if not keep or not self._is_of(recipe):
                self.write("config.json", dataclasses.asdict(recipe))
            yield

    def _clear(self) -> None:
        """Remove the files that a run writes, by their names; whatever else lies in the folder stays."""
        figures = (self.path / "figures").glob("*.png") if (self.path / "figures").is_dir() else ()
        for file in (
            *(self.path / name for name in (*ARCHIVE, *FILES)),
            *figures,
            self.path / "checkpoint/training.pt",
        ):
            file.unlink(missing_ok=True)
        if self.baseline.is_run:
            self.baseline._clear()
            (self.baseline.path / "config.json").unlink()
        for inside in ("figures", "checkpoint", "baseline"):
            if (self.path / inside).is_dir() and not any((self.path / inside).iterdir()):
                (self.path / inside).rmdir()

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run; {} where it is not there yet. Raises UserError where it is damaged."""
        path = self.path / name
        if not path.is_file():
            return {}
        held = read_json(path, SHAPES.get(name, {}))
        if held is None:
            again = f"write it again: {ANEW[name]} {self.path}" if name in ANEW else "the report does without it"
            raise UserError(f"{path} is damaged; remove it, and {again}")
        return held

    def write(self, name: str, content: str | bytes | Mapping[str, Any]) -> Path:
        """Write one file of the run as a whole: text, bytes, or JSON."""
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(path.parent, error) from None
        if isinstance(content, Mapping):
            content = json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n"
        write_whole(path, content.encode() if isinstance(content, str) else content)
        return path

    def facts(self, name: str | None = None) -> RunFacts:
        """What the files of a finished run say; ``name`` is what its column is headed with."""
        recipe, meta = dataclasses.asdict(self.recipe), read_archive(self.path)[1]
        return RunFacts(
            label=name or f"{recipe['variant']} ({recipe['inference']})",
            folder=str(self.path),
            task=meta["schema"]["task"],
            recipe=recipe,
            metrics=self.read("metrics.json"),
            environment=self.read("environment.json"),
            provenance=meta["provenance"],
            baseline=self.baseline.facts() if self.baseline.is_trained else None,
            convergence=self.read("convergence.json"),
        )

    def _is_of(self, recipe: Recipe) -> bool:
        try:
            return self.recipe == recipe
        except UserError:
            return False

    def check_files(self) -> None:
        """Raises UserError where a file that no evaluation writes anew is damaged."""
        if self.is_trained:
            self.recipe, self.read("environment.json")

    def check_data(self, posterior: Posterior, data: Dataset) -> None:
        """Raises UserError unless the training rows are those that the posterior was fitted to."""
        trained = posterior.provenance.get("fingerprint")
        if trained != data.fingerprint:
            raise UserError(
                f"the training rows of {data.name} are not those that {self.path} was trained on (fingerprint "
                f"{data.fingerprint}, then {trained}): the file or the loader has changed; train again"
            )

    def write_history(self, trace: Mapping[str, list[float]]) -> None:
        """history.csv: one line per recorded epoch, in nats of the whole training set."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(trace)
        writer.writerows(zip(*trace.values(), strict=True))
        self.write("history.csv", text.getvalue())

    def write_environment(self, device: str, seconds: float) -> None:
        """environment.json: what it ran on."""
        self.write("environment.json", environment(device, seconds))


def environment(device: str, seconds: float | None = None) -> dict[str, Any]:
    """The command, the machine, versions and time; JSON-able.   seconds: of the training."""
    return {
        "command": _command(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **({} if seconds is None else {"training_seconds": seconds}),
        "device": device if device == "cpu" else f"{device}: {torch.cuda.get_device_name(device)}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def default_folder(recipe: Recipe, *, resume: bool) -> Path:
    """runs/VARIANT-DATA-SEED; with ``-2``, ``-3``, … where that is taken, or the last of them to resume."""
    base = Path("runs") / f"{recipe.variant}-{recipe.data_name}-{recipe.seed}"
    names = [base, *(base.with_name(f"{base.name}-{k}") for k in range(2, 10_000))]
    free = next(k for k, path in enumerate(names) if not path.exists())
    return names[max(free - 1, 0)] if resume else names[free]


def _command() -> str:
    """The command line, as one would type it."""
    program = "python -m bnn_pyro.run" if Path(sys.argv[0]).name == "run.py" else Path(sys.argv[0]).name
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the package's own checkout, marked where files differ from it; None outside of one."""
    here = Path(__file__).parents[1]
    if not (here.parent / ".git").exists():
        return None
    try:
        ask = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        return subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
