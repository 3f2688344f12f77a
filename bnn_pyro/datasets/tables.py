"""A user's table (CSV or TSV), for training and for prediction, with every doubt told by file, column and row.

Rows are numbered as an editor numbers them: the header is row 1.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.datasets.columns import describe, encode, known_labels, numbers, read_target
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.datasets.raw import Raw
from bnn_pyro.datasets.sources import existing
from bnn_pyro.errors import UserError, unknown

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load_table", "read_rows", "read_table"]

#: Cells that hold nothing.
MISSING = ("", "?", "NA", "N/A", "#N/A", "NaN", "nan", "NAN", "-nan", "null", "NULL", "None", "none", "n/a", "na")


def read_table(path: str | Path) -> pd.DataFrame:
    """Every cell as text of one line, indexed by row number; empty lines are left out."""
    import pandas as pd

    path = existing(path)
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
        told = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
        raise UserError(f"{path}: rows of unequal length or an open quote: {told}") from None
    frame = frame.fillna("").map(lambda cell: " ".join(cell.split()))
    header = frame.iloc[0].tolist()
    _check_header(path, header)
    frame = frame.iloc[1:]
    frame.columns = header
    frame.index = range(2, len(frame) + 2)
    frame = frame[(frame != "").any(axis=1)]
    if frame.empty:
        raise UserError(f"{path}: has a header and no rows")
    return frame


def load_table(
    path: str | Path,
    *,
    target: str | None = None,
    features: Sequence[str] | None = None,
    task: str | None = None,
    drop_missing: bool = False,
) -> Raw:
    """Read a CSV or TSV file: numeric columns as they are, text columns one-hot, one column as the target.

    target   its column; where none is given, a column called "y"
    task     "regression" or "classification"; inferred from the target where not given (``columns.infer_task``)
    """
    path = Path(path)
    frame = read_table(path)
    names = list(frame.columns)
    target = _target(path, names, target)
    chosen = [n for n in names if n != target] if features is None else list(features)
    for name in chosen:
        if name not in names:
            raise unknown(f"column of {path}", name, [n for n in names if n != target])
        if name == target or chosen.count(name) > 1:
            why = "is the target" if name == target else "is chosen twice"
            raise UserError(f"{path}: column '{name}' {why}; choose other features")
    if not chosen:
        raise UserError(f"{path}: no column but the target '{target}'; nothing to predict from")
    position = dict(zip(frame.index, range(len(frame)), strict=True))
    num = len(frame)
    frame = _complete(path, frame[[*chosen, target]], drop_missing)
    task, y, classes = read_target(path, frame[target], task)
    columns = tuple(describe(path, frame[name]) for name in chosen)
    x, encoded = encode(path, frame, columns)
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
        rows=None if len(frame) == num else torch.tensor([position[row] for row in frame.index]),
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
    frame = read_table(path)
    for column in schema.columns:
        if column.name not in frame.columns:
            raise UserError(f"{path}: no column '{column.name}', which this model needs; it has "
                            f"{_shown(list(frame.columns))}")  # fmt: skip
    inputs = _complete(path, frame[[column.name for column in schema.columns]], False)
    x, _ = encode(path, inputs, schema.columns)
    return schema.standardise(torch.from_numpy(x)), _known_target(path, frame, schema)


def _known_target(path: Path, frame: pd.DataFrame, schema: Schema) -> Tensor | None:
    if schema.target not in frame.columns or frame[schema.target].isin(MISSING).all():
        return None
    column = _complete(path, frame[[schema.target]], False)[schema.target]
    if schema.task == "regression":
        return torch.from_numpy(numbers(path, column)).to(torch.float32)
    return torch.from_numpy(known_labels(path, column, schema.classes))


def _check_header(path: Path, header: list[str]) -> None:
    for number, name in enumerate(header, 1):
        if not name:
            raise UserError(f"{path}: column {number} has no name in row 1; name it, or remove it (a saved index?)")
        if name in header[: number - 1]:
            raise UserError(f"{path}: columns {header.index(name) + 1} and {number} are both called '{name}'; "
                            "rename or remove one")  # fmt: skip


def _target(path: Path, names: list[str], target: str | None) -> str:
    if target is None:
        if "y" in names:
            return "y"
        raise UserError(f"{path}: which column is the target? Give target= (--target) one of {_shown(names)}")
    if target not in names:
        raise unknown(f"target column of {path}", target, names)
    return target


def _complete(path: Path, frame: pd.DataFrame, drop_missing: bool) -> pd.DataFrame:
    """The frame without missing values: refused with their place, or their rows dropped when that was asked for."""
    missing = frame.isin(MISSING)
    if not missing.to_numpy().any():
        return frame
    if drop_missing:
        kept = frame[~missing.any(axis=1)]
        if kept.empty:
            empty = missing.mean().idxmax()
            raise UserError(f"{path}: every row has a missing value (column '{empty}' most often); leave that column "
                            "out with features=")  # fmt: skip
        return kept
    row, column = np.argwhere(missing.to_numpy())[0]
    cell, more = frame.iat[row, column], int(missing.any(axis=1).sum()) - 1
    raise UserError(f"{path}: column '{frame.columns[column]}', row {frame.index[row]}: missing value ('{cell}')"
                    f"{f', and {more} more rows have one' if more else ''}; fill it in, or train with drop_missing "
                    "(--drop-missing)")  # fmt: skip


def _shown(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names)} columns)" if len(names) > most else "")
