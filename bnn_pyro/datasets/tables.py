"""A user's table (CSV or TSV), for training and for prediction, with every doubt told by file, column and row.

Rows are numbered as an editor numbers them: the header is row 1.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.datasets.dataset import Column, Raw, Schema
from bnn_pyro.datasets.prepare import check_choice
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.files import existing

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load_table", "read_rows", "read_target"]

#: Cells that hold nothing.
MISSING = ("", "?", "NA", "N/A", "#N/A", "NaN", "nan", "NAN", "-nan", "null", "NULL", "None", "none", "n/a", "na")
#: A text column with more categories than this, and fewer than five rows for each, is a name or a comment.
MAX_CATEGORIES = 20
#: A target with more different whole numbers than this is a quantity.
MAX_CLASSES = 20
#: Names of columns that an error message shows.
MAX_SHOWN = 12
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")


def load_table(
    path: Path,
    *,
    target: str | None = None,
    features: Sequence[str] | None = None,
    task: str | None = None,
    drop_missing: bool = False,
) -> Raw:
    """Read a CSV or TSV file: numeric columns as they are, text columns one-hot, one column as the target.

    target   its column; where none is given, a column called "y"
    task     "regression" or "classification"; inferred from the target where not given
    """
    frame = _read_table(path)
    if target is None and "y" not in frame.columns:
        raise UserError(f"{path}: which column is the target? Give target= (--target) one of {_shown(frame)}")
    target = target or "y"
    if target not in frame.columns:
        raise unknown(f"target column of {path}", target, frame.columns)
    names = [name for name in frame.columns if name != target]
    if not names:
        raise UserError(f"{path}: no column but the target '{target}'; nothing to predict from")
    if features is not None:
        if target in features:
            raise UserError(f"{path}: column '{target}' is the target; choose other features")
        check_choice(features, names, str(path))
        names = list(features)
    complete = _complete(path, frame[[*names, target]], drop_missing)
    task, y, classes = read_target(path, complete[target], task)
    columns = tuple(_describe(path, complete[name]) for name in names)
    x, encoded = _encode(path, complete, columns)
    return Raw(
        name=path.stem,
        task=task,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        classes=classes,
        features=encoded,
        target=target,
        columns=columns,
        source=str(path),
        rows=None if len(complete) == len(frame) else torch.from_numpy(frame.index.get_indexer(complete.index)),
    )


def read_rows(path: str | Path, schema: Schema) -> tuple[Tensor, Tensor | None]:
    """Rows of a table for a model that is already trained: its schema decides how every column is read.

    Returns x (N, features), standardised by the schema, and y (N,), or None where the table has no target (or an
    empty one). Columns that the model doesn't know are left aside.

    Raises UserError for a missing column, a missing value, text where a number belongs, a category or a label that
    the training data did not have.
    """
    path = existing(path)
    if not schema.columns:
        wanted = "images" if schema.is_image else f"arrays x of shape (N, {schema.input_shape[0]})"
        raise UserError(f"{path}: this model takes {wanted}, not a table; give an .npz file (or PNG/JPG images)")
    frame = _read_table(path)
    for column in schema.columns:
        if column.name not in frame.columns:
            raise UserError(f"{path}: no column '{column.name}', which this model needs; it has {_shown(frame)}")
    inputs = _complete(path, frame[[column.name for column in schema.columns]], False)
    x = schema.standardise(torch.from_numpy(_encode(path, inputs, schema.columns)[0]))
    if schema.target not in frame.columns or frame[schema.target].isin(MISSING).all():
        return x, None
    cells = _complete(path, frame[[schema.target]], False)[schema.target]
    if schema.task == "regression":
        return x, torch.from_numpy(_numbers(path, cells)).to(torch.float32)
    labels = [cell if cell in schema.classes else _label(cell) for cell in cells]
    return x, torch.from_numpy(_positions(path, cells, labels, schema.classes, "class"))


# -- the table ---------------------------------------------------------------------------------------------------------
def _read_table(path: Path) -> pd.DataFrame:
    """Every cell as text of one line, indexed by row number; empty lines are left out."""
    import pandas as pd

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = file.readline()
        separator = "\t" if path.suffix.lower() == ".tsv" else ";" if ";" in line and "," not in line else ","
        frame = pd.read_csv(path, sep=separator, header=None, dtype=str, keep_default_na=False, na_filter=False,
                            skip_blank_lines=False, encoding="utf-8-sig")  # fmt: skip
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8 text; save the table as CSV in UTF-8") from None
    except pd.errors.EmptyDataError:
        raise UserError(f"{path}: is empty; row 1 must name the columns") from None
    except (pd.errors.ParserError, csv.Error) as error:
        reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
        raise UserError(f"{path}: rows of unequal length or an open quote: {reason}") from None
    frame = frame.fillna("").map(lambda cell: " ".join(cell.split()))
    header = frame.iloc[0].tolist()
    for number, name in enumerate(header, 1):
        if not name:
            raise UserError(f"{path}: column {number} has no name in row 1; name it, or remove it (a saved index?)")
        if name in header[: number - 1]:
            raise UserError(f"{path}: columns {header.index(name) + 1} and {number} are both called '{name}'; "
                            "rename or remove one")  # fmt: skip
    frame = frame.set_axis(header, axis=1).set_axis(range(1, len(frame) + 1)).iloc[1:]
    frame = frame[(frame != "").any(axis=1)]
    if frame.empty:
        raise UserError(f"{path}: has a header and no rows")
    return frame


def _complete(path: Path, frame: pd.DataFrame, drop_missing: bool) -> pd.DataFrame:
    """The frame without missing values: refused with their place, or their rows dropped when that was asked for."""
    missing = frame.isin(MISSING)
    if not missing.to_numpy().any():
        return frame
    if drop_missing:
        complete = frame[~missing.any(axis=1)]
        if complete.empty:
            empty = missing.mean().idxmax()
            raise UserError(f"{path}: every row has a missing value (column '{empty}' most often); leave that column "
                            "out with features=")  # fmt: skip
        return complete
    row, column = np.argwhere(missing.to_numpy())[0]
    cell, more = frame.iat[row, column], int(missing.any(axis=1).sum()) - 1
    raise UserError(f"{path}: column '{frame.columns[column]}', row {frame.index[row]}: missing value ('{cell}')"
                    f"{f', and {more} more rows have one' if more else ''}; fill it in, or train with drop_missing "
                    "(--drop-missing)")  # fmt: skip


def _shown(frame: pd.DataFrame) -> str:
    names = list(frame.columns)
    return ", ".join(names[:MAX_SHOWN]) + (f", … ({len(names)} columns)" if len(names) > MAX_SHOWN else "")


# -- its columns -------------------------------------------------------------------------------------------------------
def _describe(path: Path, cells: pd.Series) -> Column:
    """Numeric if every cell is a number; categorical if most are text; mostly numbers with some text is an error."""
    share = 1 - np.isnan(_parsed(cells)).mean()
    if share == 1:
        return Column(str(cells.name))
    if share >= 0.5 or all(DECIMAL_COMMA.fullmatch(cell) for cell in cells):
        _numbers(path, cells)
    categories = tuple(sorted(set(cells)))
    if len(categories) > max(MAX_CATEGORIES, len(cells) // 5):
        raise UserError(f"{path}: column '{cells.name}' holds {len(categories)} different texts in {len(cells)} rows "
                        f"(row {cells.index[0]}: '{cells.iloc[0]}'); leave it out with features=")  # fmt: skip
    return Column(str(cells.name), categories)


def _numbers(path: Path, cells: pd.Series) -> np.ndarray:
    """A column of text as (N,) float64; the first cell that is no finite number is an error."""
    values = _parsed(cells)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        cell = cells.iloc[bad[0]]
        why = "is not finite" if np.isinf(values[bad[0]]) else "is not a number, and the column is numeric"
        way = "write decimals with a point" if DECIMAL_COMMA.fullmatch(cell) else "correct or remove it"
        raise UserError(f"{path}: column '{cells.name}', row {cells.index[bad[0]]}: '{cell}' {why}; {way}")
    large = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
    if len(large):
        raise UserError(f"{path}: column '{cells.name}', row {cells.index[large[0]]}: {cells.iloc[large[0]]} is too "
                        "large for 32-bit numbers; rescale it")  # fmt: skip
    return values


def _encode(path: Path, frame: pd.DataFrame, columns: tuple[Column, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Columns -> features: x (N, F) float64 and the name of each; a category becomes the feature "column=category"."""
    blocks, names = [], []
    for column in columns:
        cells = frame[column.name]
        if column.categories is None:
            blocks.append(_numbers(path, cells)[:, None])
            names.append(column.name)
        else:
            blocks.append(np.eye(len(column.categories))[_positions(path, cells, cells, column.categories, "category")])
            names += [f"{column.name}={category}" for category in column.categories]
    return np.concatenate(blocks, axis=1), tuple(names)


def _positions(path: Path, cells: pd.Series, texts: Sequence[str], known: Sequence[str], what: str) -> np.ndarray:
    """(N,) int64, where each text stands among the known ones; the cell of another text is an error."""
    import pandas as pd

    positions = pd.Index(known).get_indexer(texts).astype(np.int64)
    if (positions < 0).any():
        first = int(np.argmin(positions))
        raise UserError(f"{path}: column '{cells.name}', row {cells.index[first]}: "
                        f"{unknown(what, cells.iloc[first], known)}")  # fmt: skip
    return positions


# -- the target --------------------------------------------------------------------------------------------------------
def _infer_task(cells: pd.Series) -> str:
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
    task = _infer_task(cells) if task is None else task
    where = f"{path}: target '{cells.name}'"
    if task == "regression":
        values = _numbers(path, cells)
        if len(values) > 1 and values.min() == values.max():
            raise UserError(f"{where} is {cells.iloc[0]} in every row; there is nothing to learn")
        return task, values, ()
    labels = list(cells)
    if not np.isnan(_parsed(cells)).any():
        _numbers(path, cells)
        labels = [_label(cell) for cell in cells]
    names = sorted(set(labels))
    classes = tuple(names[i] for i in _parsed(names).argsort(kind="stable"))  # numbers by size, before texts
    if len(classes) < 2:
        raise UserError(f"{where} has one class only, '{classes[0]}'; classification needs two")
    if len(classes) > max(2, len(labels) // 2):
        raise UserError(f"{where} has {len(classes)} classes in {len(labels)} rows; is it a quantity? Then give "
                        "task='regression'")  # fmt: skip
    return task, _positions(path, cells, labels, classes, "class"), classes


def _label(cell: str) -> str:
    """The name of a class in a column of numbers, where 1, 1.0 and 1e0 are one class; text as it is."""
    try:
        value = float(cell)
    except ValueError:
        return cell
    return str(int(value)) if value.is_integer() else str(value)


def _parsed(cells: Sequence[str]) -> np.ndarray:
    """(N,) float64, nan for a text that is no number."""
    import pandas as pd

    return pd.to_numeric(pd.Series(cells), errors="coerce").to_numpy(dtype=np.float64, copy=True)
