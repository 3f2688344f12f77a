"""Read a user's table (CSV, TSV, Parquet); errors name file, column and row. The header of a text file is row 1."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import bnn_pyro.datasets.frames as frames
from bnn_pyro.cells import MISSING, as_known, coded_cells, gaps_in, label, numbers, parsed, positions, truth
from bnn_pyro.datasets.arrays import raw_arrays
from bnn_pyro.datasets.dataset import Column, Raw, Schema
from bnn_pyro.datasets.prepare import check_choice, check_positive, select_features
from bnn_pyro.datasets.rows import OnDisk, is_large, rows_file
from bnn_pyro.dates import find_dates
from bnn_pyro.errors import UserError, check_known, refusing
from bnn_pyro.files import cache_root, existing, telling


def load_table(
    path: Path, *, target: str | Sequence[str] | None, features: Sequence[str] | None, exclude: Sequence[str],
    categorical: Sequence[str], task: str | None, missing: str, aside: Sequence[str], classes: Sequence[str] | None,
    exposure: str | None, event: str | None, dates: str,
) -> tuple[Raw, dict[str, np.ndarray]]:  # fmt: skip
    """Read a CSV, TSV or Parquet file; numeric columns stay as they are, columns of text are one-hot encoded.

    The options are those of ``load_data``.   aside: columns that are not inputs; {name: values (N,)} is returned.
    """
    needs_all_rows = bool(categorical or aside or exposure or event or classes) or missing != "refuse"
    if path.suffix.lower() == ".parquet" and not needs_all_rows and (raw := _large_parquet(path, target or "y", task)):
        return select_features(raw, features, str(path), exclude), {}
    frame = _cells(path, categorical, categorical)
    where = f"{path}{frame.attrs.get('unnamed', '')}"
    if target is None and "y" not in frame.columns:
        raise UserError(f"{where}: which column is the target? Give target= (--target) one of {', '.join(frame):.200}")
    target = target or "y"
    if isinstance(target, str):
        target = [target] if target in frame.columns else next(csv.reader([target], skipinitialspace=True), [target])
    of_event = () if event is None else frames.event_column(str(path), event, list(frame.columns))
    target = [*target, *of_event[:1]]
    exposures = [] if exposure is None else [exposure]
    check_known(f"target column of {where}", frame.columns, *target)
    check_known(f"column of {path}", frame.columns, *exclude, *categorical, *aside, *exposures)
    for name in target:
        if name in (*aside, *exclude, *exposures, *(features or ())) or target.count(name) > 1:
            raise UserError(f"{path}: column '{name}' is the target; do not choose it as a feature, leave it out, take "
                            "it as exposure, divide by it, or give it twice")  # fmt: skip
    exclude = [*exclude, *aside]
    if not (names := [name for name in frame.columns if name not in (*target, *exclude, *exposures)]):
        raise UserError(f"{path}: no column is left but the target '{', '.join(target)}'; nothing to predict from")
    if features is not None:
        check_choice(features, names, str(path))
        names = features
    frame = frame.astype(dict.fromkeys(categorical, "category")) if categorical else frame
    kw = dict(task=task, missing=missing, nulls=MISSING, order=classes, exposure=exposure, event=of_event, dates=dates)
    raw = raw_table(path, frame[[*names, *exposures, *target]], target, **kw)
    cells = frame.loc[raw.index.numpy(), list(dict.fromkeys(aside))]
    frames.refuse_gaps(path, cells, gaps_in(cells, MISSING))
    values = {name: texts.to_numpy() if np.isnan(v := parsed(texts)).any() else v for name, texts in cells.items()}
    return replace(raw, name=path.stem, source=str(path)), values


def _cells(path: Path, text: Sequence[str] | None, codes: Sequence[str]) -> pd.DataFrame:
    """Read the cells of CSV and TSV (see :func:`read_cells`), or Parquet.   codes: columns of codes in Parquet."""
    if path.suffix.lower() != ".parquet":
        from bnn_pyro.csv_files import read_cells  # not needed for the named data sets

        return read_cells(path, text)
    needs = f'{path}: Parquet files need pyarrow; install it: pip install "bnn_pyro[parquet]"'
    with refusing(f"{path}: is no Parquet file, or damaged: {{error}}"), refusing(needs, ImportError):
        frame = pd.read_parquet(path)
    frame = frames.as_cells(frames.as_table(str(path), frame), str(path), dates=True)
    if frame.empty:
        raise UserError(f"{path}: has no rows")
    return frame.assign(**{name: coded_cells(frame[name]) for name in codes if name in frame})


def _large_parquet(path: Path, target: str | Sequence[str], task: str | None) -> Raw | None:
    """Copy a Parquet file of numbers that is too large for memory to a file of rows; return None for other files."""
    try:
        from pyarrow import parquet, types

        file = parquet.ParquetFile(path, pre_buffer=False)  # a buffer would keep all that was read
    except Exception:  # the caller then reads the whole file, which raises a UserError
        return None
    columns, num = file.schema_arrow, file.metadata.num_rows
    numeric = all(types.is_floating(kind) or types.is_integer(kind) for kind in columns.types)
    index = [name for name in (columns.pandas_metadata or {}).get("index_columns", ()) if isinstance(name, str)]
    names = [name for name in columns.names if name not in (target, *index)]  # row labels of pandas are no inputs
    if len(names) + 1 + len(index) != len(columns.names) or not numeric or not is_large((num, len(columns.names))):
        return None
    kind = np.float32 if all(columns.field(name).type == "float" for name in names) else np.float64
    y, rows = [], rows_file()
    with telling(cache_root()):
        for batch in file.iter_batches(2**14, use_threads=False):
            frame = batch.to_pandas()
            rows.write(frame[names].to_numpy(kind).tobytes())
            y.append(frame[target].to_numpy(copy=True))  # a view would keep the whole batch in memory
        rows.flush()
    x = OnDisk(rows.name, kind, (num, len(names)), owner=rows)
    cells = frames.as_target("y", pd.Series(np.concatenate(y), name=target))
    return replace(raw_arrays(path, x, cells, task=task), name=path.stem, features=tuple(names))


def raw_table(
    where: str | Path, frame: pd.DataFrame, target: Sequence[str], *, missing: str, dates: str,
    nulls: Sequence[str] = ("",), exposure: str | None = None, **of_target: Any,
) -> Raw:  # fmt: skip
    """Encode columns of numbers or text as features, and one or several columns as targets.

    missing, dates  see ``dataset``   words  texts that stand for a missing value
    exposure  the name of the last column of inputs, if it is an exposure   of_target  see ``frames.target_fields``
    """
    from bnn_pyro.doubts import may_be_class, of_table

    gaps, read = gaps_in(frame, nulls), ()
    if missing == "refuse":
        frames.refuse_gaps(where, frame, gaps, ", or give missing='drop' or 'indicator' (--missing)")
    if dates != "refuse":
        hits = (find_dates(where, cells[~gaps[name]], dates) for name, cells in frame.drop(columns=target).items())
        for date in (read := tuple(filter(None, hits))):
            frame = date.replaced(where, frame, gaps)
        gaps = gaps_in(frame, nulls)
    of_rows, complete = [*target, *([] if exposure is None else [exposure])], frame  # columns that cannot be filled in
    if missing != "refuse":
        complete = frame[~(gaps if missing == "drop" else gaps[of_rows]).any(axis=1)]
    if complete.empty:
        mended = missing == "drop" and not gaps[of_rows].all().any()
        name = gaps.loc[:, gaps.columns.isin(of_rows) != mended].mean().idxmax()
        way = "; leave it out (--exclude, exclude=), or give missing='indicator' (--missing indicator)" * mended
        raise UserError(f"{where}: every row has a missing value, most often in column '{name}'{way}")
    remark, gaps = may_be_class(frame[target[0]], gaps[target[0]]), gaps.loc[complete.index]
    fields = frames.target_fields(where, complete[target], **of_target)
    columns = [frames.describe(where, complete[name], gaps[name]) for name in complete.columns if name not in target]
    if exposure is not None:
        if fields["task"] != "counts":
            raise UserError(f"{where}: exposure (--exposure) is for counts, and the task is {fields['task']} (--task)")
        columns[-1] = Column(exposure, exposure=True)
    made, num_dropped = {part for date in read for part in date.parts}, len(frame) - len(complete)
    looked_at = [name for name in complete.columns if name not in made and name not in target]
    doubt = [f"{' or '.join(of_rows)}: missing in {num_dropped:,} of the rows, which are left out{remark}"]
    doubts = (*doubt[: num_dropped * (missing == "indicator")], *of_table(complete[looked_at], gaps, complete[target]))
    features = tuple(feature for column in columns for feature in column.features)
    about = dict(name=str(where), source=str(where), features=features, columns=tuple(columns), dates=read)
    rows = None if not num_dropped else torch.from_numpy(frame.index.get_indexer(complete.index))
    index, x = complete.index.to_numpy(copy=True), torch.from_numpy(frames.encode(where, complete, gaps, columns))
    return Raw(**fields, **about, x=x, dropped=num_dropped, doubts=doubts, rows=rows, index=torch.from_numpy(index))


def read_rows(path: str | Path, schema: Schema) -> tuple[Tensor, Tensor | None]:
    """Read rows of a table for a trained model, whose schema determines how every column is read.

    Returns x (N, features), standardised by the schema, and y (N,), or None if the table has no target column (or an
    empty one). Columns that the model does not know are ignored.
    Raises UserError for a missing column or value, text instead of a number, or a category or label unknown to the
    model.
    """
    x, y = encode_rows(path, read_table(path, schema), schema, MISSING)
    return schema.standardise(x), y


def read_table(path: str | Path, schema: Schema) -> pd.DataFrame:
    """Read the cells of a table for a trained model; see :func:`read_rows`."""
    path = existing(path)
    if not schema.columns:
        needed = "images" if schema.is_image else f"arrays x of shape (N, {schema.input_shape[0]})"
        raise UserError(f"{path}: this model takes {needed}, not a table; give an .npz file (or PNG/JPG images)")
    coded = [column.name for column in schema.columns if column.categories is not None]
    return _with_columns(path, _cells(path, None, coded), schema)


def row_problems(frame: pd.DataFrame, like: Schema, nulls: Sequence[str] = MISSING) -> pd.Series:
    """Say what is wrong with the inputs of each row, (N,); "" for rows that :func:`encode_rows` accepts."""
    gaps, problems = gaps_in(frame, nulls, _texts_of(like)), pd.Series("", frame.index)
    dates = {date.parts[0]: date for date in like.dates}
    for column in like.columns:
        date = dates.get(column.name)
        name = column.name if date is None else date.name
        if name not in frame:  # another part of a date; the first part represents it
            continue
        cells, missing = frame[name], gaps[name]
        if date is not None:
            valid, flaw = date.read(cells).notna(), date.no_date
        elif column.categories is None:
            valid, flaw = np.abs(parsed(truth(cells))) <= np.finfo(np.float32).max, "is no number, or too large a one"
            if column.exposure:
                valid, flaw = valid & (parsed(cells) > 0), "is no exposure, which is positive"
        else:
            valid, flaw = as_known(cells, column.categories).isin(column.categories), "is a category new to the model"
            valid |= like.unseen == "ignore"
        if frames.takes_no_gaps(column):
            problems[missing] += f"; {name} is missing"
        strange = ~(missing | valid)
        problems[strange] += f"; {name}: '" + cells[strange].astype(str) + f"' {flaw}"
    return problems.str.removeprefix("; ")


def encode_rows(
    where: str | Path, frame: pd.DataFrame, like: Schema, nulls: Sequence[str] = ("",)
) -> tuple[Tensor, Tensor | None]:
    """Encode rows as for ``like``: x (N, features), not standardised, and y (N,) or None. See :func:`read_rows`."""
    gaps = gaps_in(_with_columns(where, frame, like), nulls, _texts_of(like))
    dates = {part: date.name for date in like.dates for part in date.parts}
    strict = [*dict.fromkeys(dates.get(c.name, c.name) for c in like.columns if frames.takes_no_gaps(c))]
    frames.refuse_gaps(where, frame[strict], gaps[strict])
    for date in like.dates:
        frame = date.replaced(where, frame, gaps)
    gaps = gaps_in(frame, nulls, _texts_of(like)) if like.dates else gaps
    x = torch.from_numpy(frames.encode(where, frame, gaps, like.columns, like.unseen))
    names = list(like.target_names)
    if not set(names) <= set(frame.columns) or gaps[names].all(axis=None):
        return x, None
    return x, encode_target(where, frame[names], like, nulls)


def encode_target(where: str | Path, frame: pd.DataFrame, like: Schema, nulls: Sequence[str] = ("",)) -> Tensor:
    """Convert the columns of the targets to (N,) or (N, T) float32, or to labels by the names of the classes."""
    frames.refuse_gaps(where, frame, gaps_in(frame, nulls, _texts_of(like)), ", or leave such rows out")
    if like.targets or like.event:
        return frames.target_fields(where, frame, like.task, event=like.event)["y"].to(torch.float32)
    cells = frame.iloc[:, 0]
    if not like.has_classes:
        y = torch.from_numpy(numbers(where, cells)).to(torch.float32)
        if like.target_scale == "log":
            check_positive(like, y, cells.index, str(where))
        return y
    labels = [cell if cell in like.classes else label(cell) for cell in cells]
    return torch.from_numpy(positions(where, cells, labels, like.classes, "class"))


def _texts_of(like: Schema) -> dict[str, Sequence[str]]:
    """Return {column: its categories, or the classes of a target}; () for numbers."""
    return {c.name: c.categories or () for c in like.columns} | dict.fromkeys(like.target_names, like.classes or ())


def _with_columns(where: str | Path, frame: pd.DataFrame, like: Schema) -> pd.DataFrame:
    have = f"{', '.join(frame) or 'none of them':.200}"
    if absent := [name for name in like.table_columns if name not in frame.columns]:
        raise UserError(f"{where}: no column '{absent[0]}', which this model needs; it has {have}")
    return frame
