"""Which of several posteriors predicts best: log predictive densities of the same rows, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from bnn_pyro.reports.tables import NOT_CLEAR, plain_table

__all__ = ["CLEAR", "SOURCES", "Ranking", "Standing", "ranked"]

#: A difference is clear from so many of its standard errors on.
CLEAR = 2.0
#: What is said of differences wherever they are shown.
SOURCES = (
    "A difference has two sources of error: the seeds and splits of the fits (another start, other training rows), and "
    "the finite number of test rows."
)


class Standing(NamedTuple):
    """One of those compared, nats of all rows together.

    density, se             Σ log p(y | x, D) over the rows, and its standard error over other such rows
    difference, its_error   that minus the best one's on the same rows, and the standard error of the difference
    note                    what to know of the number
    """

    label: str
    density: float
    se: float
    difference: float
    its_error: float
    note: str = ""


@dataclass(frozen=True)
class Ranking:
    """Standings from the best on, and who has none, with the reason; ``columns`` are the heads after the label."""

    title: str
    sentence: str
    standings: Sequence[Standing]
    left_out: Sequence[tuple[str, str]] = ()
    columns: ClassVar = ("log density, nats", "se", "difference to the best", "se of the difference", "")

    @property
    def rows(self) -> list[list[str]]:
        """Label and cells, as they are shown."""
        rows = []
        for k, (label, density, se, difference, its_error, note) in enumerate(self.standings):
            beside = [f"{difference:+,.1f}", _error(its_error)] if k else ["best", ""]
            rows.append([label, f"{density:,.1f}", _error(se), *beside, note])
        return rows

    @property
    def text(self) -> str:
        """For a terminal."""
        table = [plain_table(["", *self.columns], self.rows)] if self.standings else []
        return "\n".join([self.title, *table, *(f"{label}: {reason}" for label, reason in self.left_out)])


def ranked(densities: Mapping[str, np.ndarray], notes: Mapping[str, str] | None = None) -> list[Standing]:
    """From the best on: {label: log predictive density (N,) in nats of the same N rows}.

    The standard error of a sum over N rows is √(N · var), of a difference with the variance of the row-wise
    differences, which is smaller where two predict alike (Vehtari, Gelman & Gabry 2017, arXiv:1507.04544, section 5.2).
    """
    values = {label: np.asarray(points, dtype=np.float64) for label, points in densities.items()}
    standings = []
    for label, points in sorted(values.items(), key=lambda item: -item[1].sum()):
        best = values[standings[0].label] if standings else points
        one = Standing(label, points.sum(), _se(points), (points - best).sum(), _se(points - best))
        verdict = "worse" if one.difference < -CLEAR * one.its_error else NOT_CLEAR
        words = [verdict if standings else "", (notes or {}).get(label)]
        standings.append(one._replace(note="; ".join(filter(None, words))))
    return standings


def _se(points: np.ndarray) -> float:
    return math.sqrt(len(points) * points.var(ddof=1)) if len(points) > 1 else math.nan


def _error(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.1f}"
