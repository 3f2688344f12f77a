"""Columns of a table and the features that they become."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bnn_pyro.cells import DECIMAL_COMMA, MAX_CATEGORIES, numbers, parsed, positions
from bnn_pyro.datasets.dataset import Column
from bnn_pyro.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

#: The category of a missing text.
MISSING_CATEGORY = "(missing)"


def takes_no_gaps(column: Column) -> bool:
    """Whether a missing value of it is an error."""
    return column.fill is None and MISSING_CATEGORY not in (column.categories or ())


def describe(where: str | Path, cells: pd.Series, gaps: pd.Series) -> Column:
    """Numeric if every cell is a number; categorical if most are text; mostly numbers with some text is an error."""
    name, present = str(cells.name), cells[~gaps]
    if present.empty:
        raise UserError(f"{where}: column '{name}' has no value in any row; leave it out")
    if present.dtype != "category":
        share = 1 - np.isnan(parsed(present)).mean()
        if share == 1:
            return Column(name, fill=math.nan if gaps.any() else None)
        if share >= 0.5 or all(DECIMAL_COMMA.fullmatch(cell) for cell in present):
            numbers(where, present)
    categories = tuple(sorted(set(present)))
    if len(categories) > max(MAX_CATEGORIES, len(present) // 5):
        raise UserError(f"{where}: column '{name}' holds {len(categories)} different texts in {len(present)} rows "
                        f"(row {present.index[0]}: '{present.iloc[0]}'); leave it out: --exclude {name!r}, or "
                        "exclude=")  # fmt: skip
    return Column(name, (*categories, MISSING_CATEGORY) if gaps.any() else categories)


def encode(
    where: str | Path, frame: pd.DataFrame, gaps: pd.DataFrame, columns: Sequence[Column], unseen: str = "refuse"
) -> np.ndarray:
    """The features of columns, (N, F) float64."""
    x, end = np.empty((sum(column.width for column in columns), len(frame))).T, 0  # columns are faster written so
    for column in columns:
        block = x[:, end : (end := end + column.width)]
        cells, missing = frame[column.name], gaps[column.name].to_numpy()
        if column.categories is not None:
            texts = cells.astype(object).where(~missing, MISSING_CATEGORY) if missing.any() else cells
            places = positions(where, cells, texts, column.categories, "category", refuse=unseen == "refuse")
            block[:] = places[:, None] == np.arange(len(column.categories))
        elif column.fill is None:
            block[:, 0] = numbers(where, cells)
            if column.exposure and (bad := np.flatnonzero(block[:, 0] <= 0)).size:
                place = f"{where}: column '{column.name}', row {cells.index[bad[0]]}"
                raise UserError(f"{place}: {cells.iloc[bad[0]]} is no exposure, which is positive; correct it, or "
                                "leave such rows out")  # fmt: skip
        else:
            block[:, 0], block[:, 1] = column.fill, missing
            block[~missing, 0] = numbers(where, cells[~missing])
    return np.ascontiguousarray(x)
