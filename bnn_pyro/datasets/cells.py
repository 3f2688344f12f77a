"""Columns of cells, numbers or texts: as float64, as places among known texts, and as the targets of a task."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bnn_pyro.errors import UserError, unknown

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DECIMAL_COMMA", "label", "numbers", "parsed", "positions", "read_target"]

#: A target with more different whole numbers than this is a quantity.
MAX_CLASSES = 20
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")


def numbers(path: str | Path, cells: pd.Series) -> np.ndarray:
    """A column as (N,) float64; the first cell that is no finite number is an error."""
    values = parsed(cells)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        cell = cells.iloc[bad[0]]
        why = "is not finite" if np.isinf(values[bad[0]]) else "is not a number, and the column is numeric"
        way = "write decimals with a point" if DECIMAL_COMMA.fullmatch(str(cell)) else "correct or remove it"
        raise UserError(f"{path}: column '{cells.name}', row {cells.index[bad[0]]}: '{cell}' {why}; {way}")
    large = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
    if len(large):
        raise UserError(f"{path}: column '{cells.name}', row {cells.index[large[0]]}: {cells.iloc[large[0]]} is too "
                        "large for 32-bit numbers; rescale it")  # fmt: skip
    return values


def positions(
    path: str | Path, cells: pd.Series, texts: Sequence[str], known: Sequence[str], what: str, refuse: bool = True
) -> np.ndarray:
    """(N,) int64, where each text stands among the known ones; another text is −1, or where refused an error."""
    import pandas as pd

    places = pd.Index(known).get_indexer(texts).astype(np.int64)
    if refuse and (places < 0).any():
        first = int(np.argmin(places))
        raise UserError(f"{path}: column '{cells.name}', row {cells.index[first]}: "
                        f"{unknown(what, cells.iloc[first], known)}")  # fmt: skip
    return places


# -- the target -------------------------------------------------------------------------------------------------------
def _infer_task(cells: pd.Series) -> str:
    """Classification for text, for two different whole numbers, and for up to 20 that come five times or more each.

    Everything else is regression: a rating of 1 to 5 stars counts as classes, so say ``task="regression"`` where the
    order matters.
    """
    if cells.dtype == "category":
        return "classification"
    values = parsed(cells)
    if np.isnan(values).mean() > 0.5:
        return "classification"
    if np.isnan(values).any() or (values != np.round(values)).any():
        return "regression"
    distinct = len(np.unique(values))
    few = distinct <= MAX_CLASSES and len(values) >= 5 * distinct
    return "classification" if distinct <= 2 or few else "regression"


def read_target(path: str | Path, cells: pd.Series, task: str | None) -> tuple[str, np.ndarray, tuple[str, ...]]:
    """The task, the targets (float64, or int64 labels), and the class names (() of numbers)."""
    task = _infer_task(cells) if task is None else task
    where = f"{path}: target '{cells.name}'"
    if task != "classification":
        values = numbers(path, cells)
        wrong = np.flatnonzero((values < 0) | (values != np.round(values))) if task == "counts" else ()
        if len(wrong):
            raise UserError(f"{where}, row {cells.index[wrong[0]]}: {cells.iloc[wrong[0]]} is no count (0, 1, 2, …); "
                            "correct it, or give task='regression'")  # fmt: skip
        if len(values) > 1 and values.min() == values.max():
            raise UserError(f"{where} is {cells.iloc[0]} in every row; there is nothing to learn")
        return task, values, ()
    labels = list(cells)
    if cells.dtype != "category" and not np.isnan(parsed(cells)).any():
        numbers(path, cells)
        labels = [label(cell) for cell in cells]
    names = sorted(set(labels))
    classes = tuple(names[i] for i in parsed(names).argsort(kind="stable"))  # numbers by size, before texts
    if len(classes) < 2:
        raise UserError(f"{where} has one class only, '{classes[0]}'; classification needs two")
    if len(classes) > max(2, len(labels) // 2):
        raise UserError(f"{where} has {len(classes)} classes in {len(labels)} rows; is it a quantity? Then give "
                        "task='regression'")  # fmt: skip
    return task, positions(path, cells, labels, classes, "class"), classes


def label(cell: str | float) -> str:
    """The name of a class in a column of numbers, where 1, 1.0 and 1e0 are one class; text as it is."""
    try:
        value = float(cell)
    except ValueError:
        return cell
    return str(int(value)) if value.is_integer() else str(value)


def parsed(cells: Sequence[str]) -> np.ndarray:
    """(N,) float64, nan for a text that is no number."""
    import pandas as pd

    if isinstance(cells, pd.Series) and cells.dtype == "category":
        cells = cells.astype(str)
    return pd.to_numeric(pd.Series(cells), errors="coerce").to_numpy(dtype=np.float64, copy=True)
