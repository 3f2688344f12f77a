"""The columns of a table: which are numbers and which are categories, and how each becomes numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bnn_pyro.datasets.dataset import TASKS, Column
from bnn_pyro.errors import UserError, unknown

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["describe", "encode", "infer_task", "known_labels", "label_text", "numbers", "read_target"]

#: A text column with more categories than this, and fewer than five rows for each, is a name or a comment.
MAX_CATEGORIES = 20
#: A target with more different whole numbers than this is a quantity.
MAX_CLASSES = 20


def describe(path: Path, cells: pd.Series) -> Column:
    """Numeric if every cell is a number; categorical if most are text; mostly numbers with some text is an error."""
    if _is_numeric(cells):
        return Column(str(cells.name))
    share = float(np.mean(~np.isnan(_parsed(cells))))
    if share >= 0.5 or all(re.fullmatch(r"[-+]?\d+,\d+", cell) for cell in cells):
        numbers(path, cells)
    categories = tuple(sorted(set(cells)))
    if len(categories) > max(MAX_CATEGORIES, len(cells) // 5):
        raise UserError(f"{path}: column '{cells.name}' holds {len(categories)} different texts in {len(cells)} rows "
                        f"(row {cells.index[0]}: '{cells.iloc[0]}'); leave it out with features=")  # fmt: skip
    return Column(str(cells.name), categories)


def numbers(path: Path, cells: pd.Series) -> np.ndarray:
    """A column of text as (N,) float64; the first cell that is no finite number is an error."""
    values = _parsed(cells)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        row, cell = cells.index[bad[0]], cells.iloc[bad[0]]
        why = "is not finite" if np.isinf(values[bad[0]]) else "is not a number, and the column is numeric"
        point = "; write decimals with a point" if re.fullmatch(r"[-+]?\d+,\d+", cell) else ""
        raise UserError(f"{path}: column '{cells.name}', row {row}: '{cell}' {why}{point or '; correct or remove it'}")
    too_large = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
    if len(too_large):
        row, cell = cells.index[too_large[0]], cells.iloc[too_large[0]]
        raise UserError(f"{path}: column '{cells.name}', row {row}: {cell} is too large for 32-bit numbers; rescale it")
    return values


def encode(path: Path, frame: pd.DataFrame, columns: tuple[Column, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Columns -> features: x (N, F) float64 and the name of each; a category becomes the feature "column=category"."""
    blocks, names = [], []
    for column in columns:
        cells = frame[column.name]
        if column.categories is None:
            blocks.append(numbers(path, cells)[:, None])
            names.append(column.name)
            continue
        known = np.array(column.categories, dtype=object)
        hot = cells.to_numpy(dtype=object)[:, None] == known
        strange = np.flatnonzero(~hot.any(axis=1))
        if len(strange):
            row, cell = cells.index[strange[0]], cells.iloc[strange[0]]
            raise UserError(f"{path}: column '{column.name}', row {row}: "
                            f"{unknown('category', cell, column.categories)}")  # fmt: skip
        blocks.append(hot.astype(np.float64))
        names += [f"{column.name}={category}" for category in column.categories]
    return np.concatenate(blocks, axis=1), tuple(names)


def infer_task(cells: pd.Series) -> str:
    """Classification for text, for two different whole numbers, and for up to 20 that come five times or more each.

    Everything else is regression: a rating of 1 to 5 stars counts as classes, so say ``task="regression"`` where the
    order matters.
    """
    values = _parsed(cells)
    if np.isnan(values).mean() > 0.5:
        return "classification"
    if np.isnan(values).any() or (values != np.round(values)).any():
        return "regression"
    distinct = len(np.unique(values))
    few = distinct <= MAX_CLASSES and len(values) >= 5 * distinct
    return "classification" if distinct <= 2 or few else "regression"


def read_target(path: Path, cells: pd.Series, task: str | None) -> tuple[str, np.ndarray, tuple[str, ...]]:
    """The task, the targets (float64, or int64 labels), and the class names (() for regression)."""
    if task is not None and task not in TASKS:
        raise unknown("task", task, TASKS)
    task = infer_task(cells) if task is None else task
    where = f"{path}: target '{cells.name}'"
    if task == "regression":
        values = numbers(path, cells)
        if len(values) > 1 and values.min() == values.max():
            raise UserError(f"{where} is {cells.iloc[0]} in every row; there is nothing to learn")
        return task, values, ()
    labels = list(cells)
    if _is_numeric(cells):
        numbers(path, cells)
        labels = [label_text(cell) for cell in cells]
    classes = tuple(sorted(set(labels), key=_order))
    if len(classes) < 2:
        raise UserError(f"{where} has one class only, '{classes[0]}'; classification needs two")
    if len(classes) > max(2, len(labels) // 2):
        raise UserError(f"{where} has {len(classes)} classes in {len(labels)} rows; is it a quantity? Then give "
                        "task='regression'")  # fmt: skip
    index = {name: k for k, name in enumerate(classes)}
    return task, np.array([index[label] for label in labels], dtype=np.int64), classes


def known_labels(path: Path, cells: pd.Series, classes: tuple[str, ...]) -> np.ndarray:
    """Labels (N,) int64 of a column whose classes are known already."""
    index = {name: k for k, name in enumerate(classes)}
    labels = np.array([index.get(cell, index.get(label_text(cell), -1)) for cell in cells], dtype=np.int64)
    if (labels < 0).any():
        first = int(np.argmin(labels))
        raise UserError(f"{path}: column '{cells.name}', row {cells.index[first]}: "
                        f"{unknown('class', cells.iloc[first], classes)}")  # fmt: skip
    return labels


def label_text(cell: object) -> str:
    """The name of a class in a column of numbers, where 1, 1.0 and 1e0 are one class; text as it is."""
    try:
        value = float(str(cell))
    except ValueError:
        return str(cell)
    return str(int(value)) if value.is_integer() else str(value)


def _order(label: str) -> tuple[bool, float, str]:
    """Numbers by size, before texts in alphabetical order."""
    try:
        return False, float(label), label
    except ValueError:
        return True, 0.0, label


def _parsed(cells: pd.Series) -> np.ndarray:
    import pandas as pd

    return pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64, copy=True)


def _is_numeric(cells: pd.Series) -> bool:
    return not np.isnan(_parsed(cells)).any()
