"""What a check finds: quantities beside what they should be, a verdict in words, and arrays for figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bnn_pyro.checks.subject import Subject
from bnn_pyro.diagnostics.verdicts import LEVELS
from bnn_pyro.inference.method import Report

__all__ = ["ALPHA", "Check", "Finding", "Outcome", "worst"]

#: Chance of a false alarm of one check, over all of its quantities together.
ALPHA = 1e-3


@dataclass(frozen=True)
class Finding:
    """One quantity.

    about     what it is, in the field's words, with its unit
    found     its value
    expected  what it should be; None where there is nothing to compare with
    error     standard error of the difference; 0 where both are exact; None where it is not known
    p         two-sided p-value, corrected for the number of quantities of the check; None where no chance is involved
    level     a key of ``LEVELS``: good; caution, off in the way that the method is known for; bad
    """

    about: str
    found: float
    expected: float | None = None
    error: float | None = None
    p: float | None = None
    level: str = "good"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; a number that is not finite as None."""
        return {k: _plain(v) for k, v in vars(self).items()}


@dataclass(frozen=True)
class Outcome:
    """One check of one subject.

    check      a key of ``CHECKS``
    level      the verdict: a key of ``LEVELS``
    sentence   the verdict in words that need no statistician
    settings   what was run: of the method and of the check, JSON-able
    findings   what was compared
    evidence   arrays for the figures, by name
    figures    numbers for the table of variants and methods: {column: number}
    seconds    wall time
    """

    check: str
    level: str
    sentence: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    figures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Without the evidence; JSON-able."""
        held = {k: v for k, v in vars(self).items() if k != "evidence"}
        return held | {
            "settings": dict(self.settings),
            "findings": [finding.to_dict() for finding in self.findings],
            "figures": {k: _plain(v) for k, v in self.figures.items()},
        }


class Check(Protocol):
    """One way to tell whether a posterior is right: a frozen dataclass of settings with the verb ``run``.

    Class attributes: ``title`` (a headline), ``idea`` (what is compared with what, in a sentence), ``quick``, the
    settings of the quick budget; the defaults are those of the full one.
    """

    def refuses(self, subject: Subject) -> str:
        """Why this check cannot be made of the subject, in words; "" where it can."""
        ...

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """Make the check. Raises UserError for what the user can mend."""
        ...


def worst(levels: Iterable[str]) -> str:
    """The worst of several levels; "good" of none."""
    return max(levels, key=LEVELS.index, default="good")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    value = value.item() if isinstance(value, np.generic) else value
    return value if math.isfinite(value) else None
