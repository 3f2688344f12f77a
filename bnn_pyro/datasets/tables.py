"""A user's table (CSV or TSV), for training and for prediction, with every doubt told by file, column and row.

Rows are numbered as an editor numbers them: the header is row 1.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.cells import (
    MISSING,
    label,
    numbers,
    parsed,
    positions,
    read_cells,
    read_target,
    read_targets,
)
from bnn_pyro.datasets.dataset import Column, Raw, Schema
from bnn_pyro.datasets.frames import as_cells, as_table, describe, encode, takes_no_gaps
from bnn_pyro.datasets.prepare import check_choice, check_positive
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.files import existing

if TYPE_CHECKING:
    import pandas as pd

#: Names of columns that an error message shows.
MAX_SHOWN = 12


def load_table(
    path: Path,
    *,
    target: str | Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    categorical: Sequence[str] = (),
    task: str | None = None,
    missing: str = "refuse",
    aside: Sequence[str] = (),
    classes: Sequence[str] | None = None,
    exposure: str | None = None,
) -> tuple[Raw, dict[str, np.ndarray]]:
    """Read a CSV, TSV or Parquet file: numeric columns as they are, text columns one-hot, one column as the target.

    target   its column; where none is given, a column called "y". Several, also as one text with commas
    aside    columns that are no inputs, whose values (N,) are returned beside the rows, by their names
    task     one of ``TASKS``; regression or classification by the target where not given
    classes  the names of the classes in their order
    exposure see :class:`Column`
    """
    frame = _cells(path, categorical, categorical)
    if target is None and "y" not in frame.columns:
        raise UserError(f"{path}: which column is the target? Give target= (--target) one of {_shown(frame)}")
    target = target or "y"
    if isinstance(target, str):
        target = [target] if target in frame.columns else next(csv.reader([target], skipinitialspace=True), [target])
    known = [] if exposure is None else [exposure]
    for name in (*target, *exclude, *categorical, *aside, *known):
        if name not in frame.columns:
            raise unknown(f"{'target ' * (name in target)}column of {path}", name, frame.columns)
    ways = {"divide the rows by another": aside, "do not exclude it": exclude, "choose other features": features or ()}
    ways["take another exposure"] = known
    for name in target:
        for way in (way for way, names in ways.items() if name in names):
            raise UserError(f"{path}: column '{name}' is the target; {way}")
        if target.count(name) > 1:
            raise UserError(f"{path}: target '{name}' is given twice")
    exclude = [*exclude, *aside]
    names = [name for name in frame.columns if name not in (*target, *exclude, *known)]
    if not names:
        raise UserError(f"{path}: no column is left but the target '{', '.join(target)}'; nothing to predict from")
    if features is not None:
        check_choice(features, names, str(path))
        names = [name for name in features if name not in exclude]
    frame = frame.astype(dict.fromkeys(categorical, "category")) if categorical else frame
    how = dict(task=task, missing=missing, words=MISSING, order=classes, exposure=exposure)
    raw = raw_table(path, frame[[*names, *known, *target]], target, **how)
    values = {}
    for name in aside:
        cells = frame.loc[raw.index.numpy(), name]
        _complete(path, cells.to_frame(), _gaps(cells.to_frame(), MISSING), False)
        values[name] = cells.to_numpy() if np.isnan(parsed(cells)).any() else parsed(cells)
    return replace(raw, name=path.stem, source=str(path), dropped=len(frame) - len(raw.y)), values


def _cells(path: Path, text: Sequence[str] | None, codes: Sequence[str]) -> pd.DataFrame:
    """The cells of a table's file: of CSV and TSV see :func:`read_cells`; of Parquet, whose rows count from 0, by type.

    codes: columns of Parquet whose numbers are names of categories.
    """
    if path.suffix.lower() != ".parquet":
        return read_cells(path, text)
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise UserError(f'{path}: Parquet files need pyarrow; install it: pip install "bnn_pyro[parquet]"') from None
    except Exception as error:  # pyarrow has errors of its own
        raise UserError(f"{path}: is no Parquet file, or damaged: {' '.join(str(error).split()):.120}") from None
    frame = as_cells(as_table(str(path), frame), str(path))
    if frame.empty:
        raise UserError(f"{path}: has no rows")
    return frame.assign(**{name: frame[name].map(label) for name in codes if name in frame})


def raw_table(
    where: str | Path,
    frame: pd.DataFrame,
    target: Sequence[str],
    *,
    task: str | None = None,
    missing: str = "refuse",
    words: Sequence[str] = ("",),
    order: Sequence[str] | None = None,
    exposure: str | None = None,
) -> Raw:
    """Columns of numbers or of text to features and the target, or several.

    missing  of a missing value, "refuse" it, "drop" its row, or have an "indicator": numbers are filled with the
             training rows' median and a second feature says where; of text, "missing" is one more category
    words    texts that stand for a missing value
    order    see ``cells.read_target``.   exposure: the name of the last column of inputs, where that is one
    """
    gaps, whole = _gaps(frame, words), frame
    if missing == "indicator":
        _complete(where, frame[target], gaps[target], False, "; leave such rows out")
    else:
        whole = _complete(where, frame, gaps, missing == "drop", ", or give missing='drop' or 'indicator' (--missing)")
    gaps = gaps.loc[whole.index]
    if len(target) == 1:
        task, y, classes = read_target(where, whole[target[0]], task, order)
    else:
        task, y, classes = read_targets(where, whole[target], task)
    columns = [describe(where, whole[name], gaps[name]) for name in whole.columns if name not in target]
    if exposure is not None:
        if task != "counts":
            raise UserError(f"{where}: exposure (--exposure) is for counts, and the task is {task}; say --task counts "
                            "(task=)")  # fmt: skip
        columns[-1] = Column(exposure, exposure=True)
    return Raw(
        name=str(where),
        task=task,
        x=torch.from_numpy(encode(where, whole, gaps, columns)),
        y=torch.from_numpy(y),
        classes=classes,
        features=tuple(feature for column in columns for feature in column.features),
        target=", ".join(target),
        targets=tuple(target) if len(target) > 1 else (),
        columns=tuple(columns),
        source=str(where),
        rows=None if len(whole) == len(frame) else torch.from_numpy(frame.index.get_indexer(whole.index)),
        index=torch.from_numpy(whole.index.to_numpy(copy=True)),
    )


def read_rows(path: str | Path, schema: Schema) -> tuple[Tensor, Tensor | None]:
    """Rows of a table for a model that is already trained: its schema decides how every column is read.

    Returns x (N, features), standardised by the schema, and y (N,), or None where the table has no target (or an
    empty one). Columns that the model doesn't know are left aside.

    Raises UserError for a missing column, a missing value, text where a number belongs, a category or a label that
    the training data did not have.
    """
    path, frame = existing(path), read_table(path, schema)
    x, y = encode_rows(path, frame, schema, MISSING)
    return schema.standardise(x), y


def read_table(path: str | Path, schema: Schema) -> pd.DataFrame:
    """The cells of a table that has the columns of a model that is already trained; see :func:`read_rows`."""
    path = existing(path)
    if not schema.columns:
        wanted = "images" if schema.is_image else f"arrays x of shape (N, {schema.input_shape[0]})"
        raise UserError(f"{path}: this model takes {wanted}, not a table; give an .npz file (or PNG/JPG images)")
    coded = [column.name for column in schema.columns if column.categories is not None]
    return _with_columns(path, _cells(path, None, coded), schema)


def row_problems(frame: pd.DataFrame, like: Schema, words: Sequence[str] = MISSING) -> pd.Series:
    """What is wrong with the inputs of each row, (N,); "" where :func:`encode_rows` takes them."""
    import pandas as pd

    gaps, problems = _gaps(frame, words), pd.Series("", frame.index)
    for column in like.columns:
        cells, missing = frame[column.name], gaps[column.name]
        if column.categories is None:
            known, what = np.abs(parsed(cells)) <= np.finfo(np.float32).max, "is no number, or too large a one"
            if column.exposure:
                known, what = known & (parsed(cells) > 0), "is no exposure, which is positive"
        else:
            known, what = like.unseen == "ignore" or cells.isin(column.categories), "is a category new to the model"
        if takes_no_gaps(column):
            problems[missing] += f"; {column.name} is missing"
        strange = ~(missing | known)
        problems[strange] += f"; {column.name}: '" + cells[strange].astype(str) + f"' {what}"
    return problems.str.removeprefix("; ")


def encode_rows(
    where: str | Path, frame: pd.DataFrame, like: Schema | Raw, words: Sequence[str] = ("",)
) -> tuple[Tensor, Tensor | None]:
    """Rows as those that ``like`` was made of: x (N, features), not standardised, and y (N,) or None.

    Raises UserError as :func:`read_rows`.
    """
    gaps = _gaps(_with_columns(where, frame, like), words)
    strict = [column.name for column in like.columns if takes_no_gaps(column)]
    _complete(where, frame[strict], gaps[strict], False)
    x = torch.from_numpy(encode(where, frame, gaps, like.columns, like.unseen))
    names = list(like.target_names)
    if not set(names) <= set(frame.columns) or gaps[names].all(axis=None):
        return x, None
    return x, encode_target(where, frame[names], like, words)


def encode_target(where: str | Path, frame: pd.DataFrame, like: Schema | Raw, words: Sequence[str] = ("",)) -> Tensor:
    """Targets (N,) or (N, T) float32, or labels by the names of the classes; of the columns of the targets."""
    _complete(where, frame, _gaps(frame, words), False)
    if like.targets:
        return torch.from_numpy(read_targets(where, frame, like.task)[1]).to(torch.float32)
    cells = frame.iloc[:, 0]
    if not like.has_classes:
        y = torch.from_numpy(numbers(where, cells)).to(torch.float32)
        if like.target_scale == "log":
            check_positive(like, y, cells.index, str(where))
        return y
    labels = [cell if cell in like.classes else label(cell) for cell in cells]
    return torch.from_numpy(positions(where, cells, labels, like.classes, "class"))


def _with_columns(where: str | Path, frame: pd.DataFrame, like: Schema | Raw) -> pd.DataFrame:
    for column in like.columns:
        if column.name not in frame.columns:
            raise UserError(f"{where}: no column '{column.name}', which this model needs; it has {_shown(frame)}")
    return frame


# -- the table ---------------------------------------------------------------------------------------------------------
def _gaps(frame: pd.DataFrame, words: Sequence[str]) -> pd.DataFrame:
    """Where values are missing."""
    import pandas as pd

    return pd.DataFrame({name: cells.isna() | (cells.isin(list(words)) if cells.dtype.kind not in "iuf" else False)
                         for name, cells in frame.items()}, frame.index)  # fmt: skip


def _complete(where: str | Path, frame: pd.DataFrame, gaps: pd.DataFrame, drop: bool, way: str = "") -> pd.DataFrame:
    """The frame without missing values: refused with their place, or their rows dropped when that was asked for."""
    if not gaps.to_numpy().any():
        return frame
    if drop:
        complete = frame[~gaps.any(axis=1)]
        if complete.empty:
            empty = gaps.mean().idxmax()
            raise UserError(f"{where}: every row has a missing value (column '{empty}' most often); leave that column "
                            f"out: --exclude {empty!r}, or exclude=")  # fmt: skip
        return complete
    row, column = np.argwhere(gaps.to_numpy())[0]
    cell, more = frame.iat[row, column], int(gaps.any(axis=1).sum()) - 1
    raise UserError(f"{where}: column '{frame.columns[column]}', row {frame.index[row]}: missing value ('{cell}')"
                    f"{f', and {more} more rows have one' if more else ''}; fill it in{way}")  # fmt: skip


def _shown(frame: pd.DataFrame) -> str:
    names = list(frame.columns)
    return ", ".join(names[:MAX_SHOWN]) + (f", … ({len(names)} columns)" if len(names) > MAX_SHOWN else "")
