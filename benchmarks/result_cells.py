"""A cell of a table of results: mean and standard error over the seeds of one figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

__all__ = ["RESULTS", "Line", "Pick", "cell", "committed"]

RESULTS = Path(__file__).parent / "results"

#: One entry of a results file, and what picks a figure from its metrics.
Line = dict
Pick = Callable[[dict], float | None]


def committed(lines: list[Line]) -> list[Line]:
    """Those measured at a commit: what ran with uncommitted changes ("-dirty") cannot be run again."""
    return [line for line in lines if not line["commit"].endswith("-dirty")]


def cell(lines: list[Line], pick: Pick, form: str) -> str:
    """Mean over the seeds, and its standard error where there are several."""
    values = [pick(line["metrics"]) for line in lines]
    if any(value is None for value in values):
        return "–"
    text = form % statistics.mean(values)
    return text if len(values) == 1 else f"{text} ± {form % (statistics.stdev(values) / math.sqrt(len(values)))}"
