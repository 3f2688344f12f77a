"""Convert frames, arrays, tensors and lists to tables of cells or to arrays, and encode the columns of a table."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnn_pyro.cells import DECIMAL_COMMA, as_known, max_categories, numbers, parsed, positions, read_targets, read_times
from bnn_pyro.datasets.dataset import Column
from bnn_pyro.errors import UserError, check_known, refusing

#: Kinds of numpy types that may hold text.
TEXT = ("O", "U", "S")
#: The category of missing values in a column of categories.
MISSING_CATEGORY = "(missing)"
#: Types of dates, and of other times, as ``pandas.api.types.infer_dtype`` names them.
DATES, TIMES = ("datetime64", "datetime", "date", "period"), ("timedelta64", "timedelta", "time")


def as_table(arg: str, x: Any, names: Sequence[str] | None = None) -> pd.DataFrame | None:
    """Convert a frame of any library, or an array or list with text, to a pandas frame; return None for numbers.

    A single row may be a dict of values, or a Series indexed by the names.
    names: column names of an array that has as many columns.
    """
    if isinstance(x, Mapping):
        x = pd.DataFrame(dict(x) if not x or any(map(pd.api.types.is_list_like, x.values())) else [dict(x)])
    if isinstance(x, pd.Series):
        x = x.to_frame().T.infer_objects() if names and {*names} <= {*x.index} else x.to_frame()
    if not isinstance(x, pd.DataFrame):
        if hasattr(x, "__dataframe__") or hasattr(x, "to_pandas"):
            try:
                x = x.to_pandas()
            except (AttributeError, ImportError):  # polars needs pyarrow for it
                names = x.columns if hasattr(x, "columns") else x.__dataframe__().column_names()
                x = pd.DataFrame({name: x[name].to_list() for name in names})
        elif isinstance(x, list | tuple) or getattr(getattr(x, "dtype", None), "kind", "") in TEXT:
            if (array := as_array(arg, x, text=True)).dtype.kind not in TEXT or array.ndim != 2:
                return None
            x = named(array, names if names and len(names) == array.shape[1] else None).infer_objects()
        else:
            for way in ("toarray", "collect"):  # sparse matrices, and lazy frames
                if hasattr(x, way):
                    raise UserError(f"{arg} is a {type(x).__name__}, not rows in memory; give {arg}.{way}()")
            return None
    frame = x.reset_index(drop=True)
    names = [" ".join(str(name).split()) for name in frame.columns]
    if same := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{arg} has {names.count(same[0])} columns called '{same[0]}'; rename or remove all but one")
    return frame.set_axis(names, axis=1)


def named(x: Any, names: Sequence[str] | None = None) -> pd.DataFrame:
    """Convert an array (N, F) to a frame; without names its columns are x1, x2, …"""
    frame = pd.DataFrame(x)
    return frame.set_axis(names or [f"x{k + 1}" for k in range(frame.shape[1])], axis=1)


def names_in(table: pd.DataFrame | None, arg: str, value: str | Sequence[str]) -> list[str]:
    """Return the columns that an argument names. Raises UserError for unknown columns, or if X is not a frame."""
    names = [value] if isinstance(value, str) else list(value)
    if names and table is None:
        raise UserError(f"{arg}='{names[0]}' names a column, and X is no frame: give pandas.DataFrame(X)")
    if names:
        check_known(f"column of X ({arg}=)", table.columns, *names)
    return names


def check_order(arg: str, value: Any, x: Any) -> None:
    """Raise UserError if both have the same pandas row labels in a different order: rows are matched by position."""
    mine, theirs = getattr(value, "index", None), getattr(x, "index", None)
    apart = isinstance(mine, pd.Index) and isinstance(theirs, pd.Index) and not mine.equals(theirs)
    if apart and len(mine) == len(theirs) and mine.is_unique and theirs.is_unique and mine.isin(theirs).all():
        raise UserError(f"{arg} has the row labels of X in another order, and rows are matched by their place; give "
                        f"{arg}.loc[X.index], or {arg}.to_numpy() where their places are right")  # fmt: skip


def as_array(arg: str, x: Any, text: bool = False, way: str = "give all rows the same number of values") -> np.ndarray:
    """Convert to an array of numbers (N, …), or with ``text`` of any values; masked values become missing ones."""
    if np.ma.is_masked(x):
        x = np.where(np.ma.getmaskarray(x), math.nan if x.dtype.kind in "biuf" else None, x.data)
    with refusing(f"{arg}: rows of unequal length; {way}", TypeError, ValueError):
        array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if array.dtype.kind == "U" and not array.ndim:
        raise UserError(f"{arg} is the text '{array}'; of a file, give bp.load_inputs(path, posterior.schema)")
    if array.ndim < 2 and not text:
        way = f"; one column is {arg}.reshape(-1, 1), one row {arg}.reshape(1, -1)" if array.ndim else ""
        raise UserError(f"{arg} has shape {array.shape}; give (N, features){way}")
    return array if array.flags.writeable else array.copy()  # torch warns of read-only arrays


def as_cells(frame: pd.DataFrame, where: str = "X (rows from 0)", dates: bool = False) -> pd.DataFrame:
    """Convert columns to float64 (missing: NaN), text (missing: ""), or categories of text; dates become text."""
    return pd.DataFrame({name: _column(where, frame[name], dates) for name in frame.columns})


def _column(where: str, cells: pd.Series, dates: bool = False) -> pd.Series:
    """Convert one column. Raises UserError for dates, unless ``dates`` allows them, and for values of mixed types."""
    kind, gaps = pd.api.types.infer_dtype(cells, skipna=True), cells.isna()
    if kind in ("integer", "floating", "mixed-integer-float", "decimal"):
        return pd.Series(pd.to_numeric(cells).to_numpy(np.float64, na_value=math.nan), cells.index, name=cells.name)
    if kind in ("string", "boolean", "categorical"):
        text = cells.astype(object).where(~gaps, "").map(lambda cell: " ".join(str(cell).split()))
        if not getattr(cells.dtype, "ordered", False):
            return text if kind == "string" else text.astype("category")
        order = dict.fromkeys(" ".join(str(name).split()) for name in cells.cat.categories)
        return text.astype(pd.CategoricalDtype(list(order), ordered=True))
    if kind == "empty":
        return pd.Series(math.nan, cells.index, name=cells.name)
    if kind in DATES and dates:
        return cells.astype(str).where(~gaps, "")
    place = f"{where}: column '{cells.name}'"
    if kind in DATES + TIMES:
        way = "--dates parts or elapsed (dates=) converts columns of dates to numbers"
        way = way if kind in DATES else "make numbers of them, as by .dt.total_seconds()"
        raise UserError(f"{place} holds dates or times; {way}, or leave the column out")
    types = cells[~gaps].map(lambda cell: type(cell).__name__)
    first, others = types.iloc[0], types.index[types.ne(types.iloc[0])]
    mixed = f"{kind} values (row {types.index[0]}: {first}, row {others[0]}: {types[others[0]]})" if len(others) else ""
    raise UserError(f"{place} holds {mixed or f'values of type {first}'}; make them all numbers or all text")


def as_target(arg: str, y: Any) -> pd.DataFrame:
    """Convert targets to columns of cells; without names they are called "y", or "y1", "y2", … if there are several."""
    if hasattr(y, "to_list") and not hasattr(y, "columns"):  # a series of pandas or polars
        y = y if isinstance(y, pd.Series) else pd.Series(y.to_list(), name=getattr(y, "name", None))
        frame = y.to_frame("y" if y.name is None else str(y.name))
    elif hasattr(y, "__dataframe__") or hasattr(y, "to_pandas"):
        frame = as_table(arg, y)
    elif isinstance(y, list | tuple) and not (len(y) and isinstance(y[0], list | tuple | np.ndarray)):
        frame = pd.Series(y, name="y").to_frame()
    else:
        if (y := as_array(arg, y, text=True)).ndim not in (1, 2) or 0 in y.shape[1:]:
            raise UserError(f"{arg} has shape {y.shape}; give one target for each row, (N,), or several, (N, T)")
        frame = named(y, [f"y{k + 1}" for k in range(y.shape[1])] if y.ndim == 2 and y.shape[1] > 1 else ["y"])
    return as_cells(frame.reset_index(drop=True), f"{arg} (rows from 0)")


def target_fields(
    where: str | Path, cells: pd.DataFrame, task: str | None, order: Sequence[str] | None = None,
    event: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of ``Raw`` that describe the targets; see ``cells.read_targets``.

    event: see ``Schema``; its column is the second of two. For task "survival" () means that 1 is the event's value.
    """
    if event and task not in (None, "survival"):
        raise UserError(f"{where}: event= (--event) is for task='survival', and the task is {task}; leave one out")
    if event or task == "survival":
        y = torch.from_numpy(read_times(where, cells, event[1] if event[1:] else None))
        return dict(task="survival", y=y, target=cells.columns[0], event=(cells.columns[1], *event[1:]))
    about = dict(inferred=task is None, targets=tuple(cells.columns) if cells.shape[1] > 1 else ())
    task, y, classes = read_targets(where, cells, task, order)
    return dict(task=task, y=torch.from_numpy(y), classes=classes, target=", ".join(cells.columns), **about)


def event_column(arg: str, event: str, names: Sequence[str]) -> tuple[str, ...]:
    """Split a text to (column,), or for COLUMN=VALUE to (column, value). Raises UserError for an unknown column."""
    name, _, value = (event, "", "") if event in names else event.partition("=")
    check_known(f"column of {arg} (event, or --event)", names, name)
    return (name, value) if value else (name,)


def refuse_gaps(where: str | Path, frame: pd.DataFrame, gaps: pd.DataFrame, way: str = "") -> None:
    """Raise UserError with the place of the first missing value."""
    if not gaps.to_numpy().any():
        return
    row, column = np.argwhere(gaps.to_numpy())[0]
    cell, more = frame.iat[row, column], int(gaps.any(axis=1).sum()) - 1
    raise UserError(f"{where}: column '{frame.columns[column]}', row {frame.index[row]}: missing value ('{cell}')"
                    f"{f', and {more} more rows have one' if more else ''}; fill it in{way}")  # fmt: skip


def takes_no_gaps(column: Column) -> bool:
    """Return whether a missing value in this column is an error."""
    return column.fill is None and MISSING_CATEGORY not in (column.categories or ())


def describe(where: str | Path, cells: pd.Series, gaps: pd.Series) -> Column:
    """Return a numeric column if every cell is a number, a categorical one if most are text; a mixture is an error."""
    name, present = str(cells.name), cells[~gaps]
    if present.empty:
        raise UserError(f"{where}: column '{name}' has no value in any row; leave it out")
    if present.dtype != "category":
        if (share := 1 - np.isnan(parsed(present)).mean()) == 1:
            return Column(name, fill=math.nan if gaps.any() else None)
        if share >= 0.5 or all(DECIMAL_COMMA.fullmatch(cell) for cell in present):
            numbers(where, present)
    categories = tuple(sorted({*present} - {MISSING_CATEGORY} if gaps.any() else {*present}))
    is_code, may_be = present.dtype == "category", 2 * len(categories) <= len(present)
    if len(categories) > max_categories(len(present)) and not (is_code and may_be):
        from bnn_pyro.doubts import as_meant  # rarely needed

        doubt, way = None if is_code else as_meant(present), may_be * "; or keep it: --categorical (categorical=)"
        raise UserError(f"{where}: column '{name}' holds {len(categories)} different texts in {len(present)} rows "
                        f"(row {present.index[0]}: '{present.iloc[0]}'); {f'it {doubt.sentence}; or ' if doubt else ''}"
                        f"leave it out: --exclude {name!r}, or exclude={way}")  # fmt: skip
    return Column(name, (*categories, MISSING_CATEGORY) if gaps.any() else categories)


def encode(
    where: str | Path, frame: pd.DataFrame, gaps: pd.DataFrame, columns: Sequence[Column], unseen: str = "refuse"
) -> np.ndarray:
    """Encode columns as features (N, F) float64."""
    width, end = sum(len(column.features) for column in columns), 0
    x = np.empty((width, len(frame))).T  # columns of this layout are written faster
    for column in columns:
        block = x[:, end : (end := end + len(column.features))]
        cells, missing = frame[column.name], gaps[column.name].to_numpy()
        if column.categories is not None:
            cells = as_known(cells, column.categories)
            texts = cells.astype(object).where(~missing, MISSING_CATEGORY) if missing.any() else cells
            places = positions(where, cells, texts, column.categories, "category", refuse=unseen == "refuse")
            block[:] = places[:, None] == np.arange(len(column.categories))
        elif column.fill is None:
            block[:, 0] = numbers(where, cells, "exposure" if column.exposure else "")
        else:
            block[:, 0], block[:, 1] = column.fill, missing
            block[~missing, 0] = numbers(where, cells[~missing])
    return np.ascontiguousarray(x)
