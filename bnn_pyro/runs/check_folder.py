"""The folder that a bench writes: check.json, check.html, figures/*.png; every file whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnn_pyro.files import is_occupied, write_whole
from bnn_pyro.errors import UserError
from bnn_pyro.reports.page import Picture

__all__ = ["CheckFolder"]

RESULTS, PAGE = "check.json", "check.html"


@dataclass(frozen=True)
class CheckFolder:
    """Where the results of one bench lie."""

    path: Path

    @classmethod
    def claim(cls, path: str | Path, *, resume: bool = False) -> CheckFolder:
        """A folder that may be written to; nothing is written yet.

        Raises UserError where something else is there, results without ``resume``, or ``resume`` without results.
        """
        folder = cls(Path(path))
        if folder.path.exists() and not folder.path.is_dir():
            raise UserError(f"--out {path} is a file; choose a folder that does not exist yet")
        if resume and not folder.has_results:
            raise UserError(f"nothing to resume: {path} has no {RESULTS}; leave out --resume to start")
        if folder.has_results and not resume:
            raise UserError(f"--out {path} has results already; add --resume to go on with them, or choose another")
        if not folder.has_results and is_occupied(folder.path):
            raise UserError(f"--out {path} exists and is not empty; choose another folder")
        return folder

    @classmethod
    def default(cls, name: str, *, resume: bool = False) -> CheckFolder:
        """runs/check-NAME, with ``-2``, ``-3``, … where that is taken, or the last of them to resume."""
        base = Path("runs") / f"check-{name}"
        names = [base, *(base.with_name(f"{base.name}-{k}") for k in range(2, 10_000))]
        free = next(k for k, path in enumerate(names) if not path.exists())
        return cls.claim(names[max(free - 1, 0)] if resume else names[free], resume=resume)

    @property
    def has_results(self) -> bool:
        """Whether a bench was begun here."""
        return (self.path / RESULTS).is_file()

    @property
    def page(self) -> Path:
        """The HTML page."""
        return self.path / PAGE

    def read(self) -> dict[str, Any]:
        """What was found so far; {} where nothing was. Raises UserError where the file is damaged."""
        if not self.has_results:
            return {}
        try:
            found = json.loads((self.path / RESULTS).read_text())
            if not isinstance(found, dict) or not isinstance(found.get("subjects"), list):
                raise ValueError
        except ValueError:
            raise UserError(f"{self.path / RESULTS} is damaged; remove it to start again") from None
        return found

    def write(self, results: Mapping[str, Any]) -> None:
        """Replace check.json."""
        self._write(RESULTS, (json.dumps(dict(results), indent=1, ensure_ascii=False) + "\n").encode())

    def write_page(self, html: str) -> None:
        """Replace check.html."""
        self._write(PAGE, html.encode())

    def add(self, picture: Picture) -> None:
        """Write a figure."""
        self._write(f"figures/{picture.name}.png", picture.png)

    def png(self, name: str) -> bytes:
        """A figure written before. Raises UserError where it is missing."""
        path = self.path / "figures" / f"{name}.png"
        if not path.is_file():
            raise UserError(f"the figure {path} is missing; remove {self.path} and check again")
        return path.read_bytes()

    def _write(self, name: str, content: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
