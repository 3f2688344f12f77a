"""Folders that commands write; a folder or file that no command has written is never changed.

The files of a run are listed in docs/command-line.md, those of a sweep in ``runs.sweep``. A check has check.json,
check.html and figures. Every file is written atomically.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import process_group
from bnn_pyro.errors import UserError, refusing
from bnn_pyro.files import has_shape, is_occupied, lock_folder, write_whole
from bnn_pyro.inference import METHODS
from bnn_pyro.posterior import Posterior, read_archive
from bnn_pyro.reports.tables import RunFacts
from bnn_pyro.runs.recipe import Recipe, read_config

if TYPE_CHECKING:
    from bnn_pyro.reports.page import Picture

REPLICATES, GUARANTEES, CONVERGENCE = "test-replicates.npz", "guarantees.json", "convergence.json"
ROWS, SITES, BOOSTING = "rows.json", "sites.json", "boosting.json"
FILES = ("metrics.json", REPLICATES, "pruning.json", "convergence.json", "diagnosis.json",
         "diagnosis.html", "posterior.nc", "history.csv", "environment.json", "report.html", "comparison.html",
         "README.md", "calibration.json", ROWS, SITES, GUARANTEES, BOOSTING)  # fmt: skip
ARCHIVE = ("posterior.json", "posterior.pt")
NUMBER, VERDICT = int | float | None, {"level": str, "about": str, "sentence": str}
COVERAGE = {"level": NUMBER, "method": str, "data": str, "calibration_rows": int, "note": str,
            "table": [{"rows": str, "prediction": str, "covered": NUMBER, "covered_low": NUMBER,
                       "covered_high": NUMBER, "size": NUMBER, "nll": NUMBER}]}  # fmt: skip
#: {file that is read: (its shape, see ``files.has_shape``; the command that writes it again, or "")}.
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "metrics.json": ({"*": NUMBER, "failed": str, "worse": str, "targets": {"*": {"*": NUMBER}},
                      "class_rows": {"*": int}, "class_predictions": {"*": int}, "errors_by": {"*": NUMBER},
                      "signal_to_noise_of_sites": {"*": NUMBER}, "if_calibrated": COVERAGE}, "evaluate"),
    "convergence.json": ({"statistics": {"*": NUMBER}, "verdicts": [VERDICT]}, "evaluate"),
    GUARANTEES: (COVERAGE, "calibrate"),
    BOOSTING: ({"about": str, "seconds": NUMBER, "metrics": {"*": NUMBER}, "differences": {"*": NUMBER}}, "evaluate"),
    ROWS: ({"note": str, "worst": [{"*": str}], "uncertain": [{"*": str}]}, "evaluate"),
    SITES: ({"sites": [{"*": str}]}, "evaluate"),
    "pruning.json": ({"measure": str, "share_removed": NUMBER, "curve": [{"*": NUMBER}]}, "evaluate --prune"),
    "environment.json": ({"command": str, "finished": str, "training_seconds": NUMBER, "device": str, "machine": str,
                          "threads": int, "python": str, "versions": {"*": str | None}, "commit": str | None}, ""),
    "check.json": ({"key": {}, "subjects": [{}]}, "check --out"),
}  # fmt: skip


@dataclass(frozen=True)
class OutputFolder:
    """A folder that a command writes.

    kind  its name in messages            main  the file that identifies such a folder
    page  the name of its HTML page       begun_again  advice if there is such a folder already
    """

    path: Path
    kind: ClassVar[str]
    main: ClassVar[str]
    page: ClassVar[str]
    begun_again: ClassVar[str] = "add --resume to go on with it, or choose another"

    @classmethod
    def claim(cls, path: str | Path, *, resume: bool = False, overwrite: bool = False) -> Self:
        """Return a folder that may be written to, without writing or removing anything.

        Raises UserError if the path is something else, or such a folder without ``resume`` or ``overwrite``.
        """
        folder = cls(Path(path))
        if resume and overwrite:
            raise UserError("--resume goes on with a run and --overwrite replaces it; give one of them")
        if resume and not folder.is_begun:
            raise UserError(f"nothing to resume: {path} is not a {cls.kind}; leave out --resume to start one")
        if folder.path.exists() and not folder.path.is_dir():
            raise UserError(f"--out {path} is a file; choose a folder that does not exist yet")
        if not folder.is_begun and is_occupied(folder.path):
            raise UserError(f"--out {path} exists and is not a {cls.kind}; choose another folder")
        if folder.is_begun and cls.begun_again and not (resume or overwrite):
            raise UserError(f"--out {path} is a {cls.kind} already; {cls.begun_again}")
        return folder

    @staticmethod
    def default_path(name: str, *, resume: bool) -> Path:
        """Return runs/NAME, or if it exists runs/NAME-2, -3, …; with ``resume`` the last one that exists."""
        last, free, number = Path("runs") / name, Path("runs") / name, 2
        while free.exists():
            last, free, number = free, Path("runs") / f"{name}-{number}", number + 1
        return last if resume else free

    #: Whether there is such a folder, finished or not.
    is_begun = property(lambda self: (self.path / self.main).is_file())

    def read(self, name: str) -> dict[str, Any]:
        """Read a JSON file; {} if it does not exist. Raises UserError if it is damaged."""
        if not (path := self.path / name).is_file():
            return {}
        with suppress(ValueError, RecursionError):
            content = json.loads(path.read_text(encoding="utf-8"))
            if has_shape(content, SHAPES[name][0]):
                return content
        raise self.damaged(name)

    def damaged(self, name: str) -> UserError:
        """Return the error for a JSON file with wrong content; it names the command that writes the file again."""
        command = SHAPES[name][1]
        again = f"write it again: {command} {self.path}" if command else "the report does without it"
        return UserError(f"{self.path / name} is damaged; remove it, and {again}")

    def write(self, name: str, content: str | bytes | Mapping[str, Any]) -> Path:
        """Write one file atomically: text, bytes, or a mapping as JSON."""
        path = self.path / name
        if isinstance(content, Mapping):
            content = json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n"
        write_whole(path, content.encode() if isinstance(content, str) else content)
        return path

    def write_figures(self, pictures: Iterable["Picture"], former: Iterable[str] = ()) -> None:
        """Write figures/NAME.png for each picture, and remove other figures that match a pattern in ``former``."""
        names = {f"{picture.name}.png": picture.png for picture in pictures}
        for old in (path for name in former for path in (self.path / "figures").glob(f"{name}.png")):
            if old.name not in names:
                old.unlink(missing_ok=True)
        for name, png in names.items():
            self.write(f"figures/{name}", png)


class CheckFolder(OutputFolder):
    """The results of a check."""

    kind, main, page = "check", "check.json", "check.html"


@dataclass(frozen=True)
class RunFolder(OutputFolder):
    """A folder that is, or becomes, a run."""

    kind, main, page = "run", "config.json", "report.html"
    begun_again = "add --resume to go on with it, or --overwrite"

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Return the folder of a finished run. Raises UserError if there is none."""
        folder = cls(Path(path))
        if not folder.path.is_dir():
            raise UserError(f"no run folder {path}" + (": it is a file" if folder.path.is_file() else ""))
        if not folder.is_begun:
            of = "; what posterior.save() wrote is for bp.load(…), and `train` makes runs"
            raise UserError(f"{path} is not a run: it has no config.json of one"
                            f"{of if (folder.path / 'posterior.json').exists() else ''}")  # fmt: skip
        if not folder.is_trained:
            raise UserError(f"the run {path} is not finished; go on with: train --resume --out {path}")
        return folder

    @property
    def is_begun(self) -> bool:
        """Whether a run was begun here."""
        with suppress(UserError):
            return "variant" in read_config(self.path / "config.json")
        return False

    #: Whether the posterior is there.
    is_trained = property(lambda self: all((self.path / name).is_file() for name in ARCHIVE))

    #: The folder of the deterministic network that the run is compared with.
    baseline = property(lambda self: RunFolder(self.path / "baseline"))

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run. Raises UserError if the file is damaged."""
        path = self.path / "config.json"
        config = read_config(path)
        with refusing(f"{path} is damaged ({{error}}); restore it, or train again", UserError):
            if "name" not in config.get("data", {}) or "inference" not in config:
                raise UserError("it names no data, or no inference method")
            if self.is_trained:  # former settings do not matter after the fit
                former, settings = self.former_settings, config.get("inference_settings", {})
                config["inference_settings"] = {k: v for k, v in settings.items() if k not in former}
            return Recipe.from_dict(config)

    @property
    def former_settings(self) -> dict[str, Any]:
        """Settings of the run's method that only earlier versions had, or with values that only they accepted."""
        config = read_config(self.path / "config.json")
        method = METHODS.get(config.get("inference"))
        names, values = getattr(method, "former", {}), getattr(method, "former_values", {})
        settings = config.get("inference_settings", {}).items()
        return {name: value for name, value in settings if name in names or value in values.get(name, ())}

    @contextmanager
    def begun(self, recipe: Recipe, *, keep: bool = False, new: bool = False) -> Iterator[None]:
        """Write the recipe into the folder, and lock the folder on rank 0 during the block, which all ranks run.

        Without ``keep`` the files of a former run are removed first. Raises UserError if another process writes to the
        folder, or if, with ``new``, another run was begun here since the folder was claimed.
        """
        with ExitStack() as stack:
            with process_group().sharing_errors():
                if process_group().is_rank0:
                    stack.enter_context(lock_folder(self.path))
                    if new and self.is_begun:
                        raise UserError(f"another run was begun in {self.path} meanwhile; choose another --out")
                    if not keep:
                        self._clear()
                    former = None
                    with suppress(UserError):
                        former = self.recipe
                    if not keep or former != recipe:
                        self.write("config.json", recipe.to_dict())
            yield

    def _clear(self) -> None:
        """Remove the files that a run writes, by their names; other files in the folder stay."""
        files = (self.path / name for name in (*ARCHIVE, *FILES, "checkpoint/training.pt"))
        for file in (*files, *(self.path / "figures").glob("*.png"), *self.path.glob("metrics-*.json")):
            file.unlink(missing_ok=True)
        if self.baseline.is_begun:
            self.baseline._clear()
            (self.baseline.path / "config.json").unlink()
        for inside in ("figures", "checkpoint", "baseline"):
            if (self.path / inside).is_dir() and not any((self.path / inside).iterdir()):
                (self.path / inside).rmdir()

    def facts(self, name: str | None = None) -> RunFacts:
        """Read the facts of a finished run from its files.   name: the heading of its column in tables."""
        recipe, meta = self.recipe.to_dict(), read_archive(self.path)[1]
        recipe["inference_settings"] = meta["provenance"].get("method_settings", recipe["inference_settings"])
        label, baseline = name or f"{recipe['variant']} ({recipe['inference']})", self.baseline
        names = ["metrics", "environment", "convergence", "rows", "sites", "boosting"]
        names += ["guarantees"] * (self.path / "calibration.json").is_file()  # they belong to that calibration
        return RunFacts(
            label, str(self.path), meta["schema"]["task"], recipe, provenance=meta["provenance"],
            baseline=baseline.facts() if baseline.is_trained else None,
            **{name: self.read(f"{name}.json") for name in names},
        )  # fmt: skip

    def check_data(self, posterior: Posterior, data: Dataset) -> None:
        """Raise UserError unless the posterior was fitted to these training rows."""
        if (trained := posterior.provenance.get("fingerprint")) != data.fingerprint:
            raise UserError(f"the training rows of {data.name} (fingerprint {data.fingerprint}) are not those that "
                            f"{self.path} was trained on ({trained}): the data have changed; train again")  # fmt: skip
