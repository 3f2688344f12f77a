"""Data sets from arrays, tensors, lists and data frames in memory, encoded like the rows of a file, from row 0."""

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils import data as torch_data

from bnn_pyro.cells import coded_cells, gaps_in, label, numbered
from bnn_pyro.datasets.arrays import image_arrays, load_archive, on_disk, pack, parts_of, raw_arrays
from bnn_pyro.datasets.dataset import Column, Dataset, Raw, Schema
from bnn_pyro.datasets.frames import as_array, as_cells, as_table, as_target, check_order, event_column, named, names_in
from bnn_pyro.datasets.prepare import check_options, prepare, say_doubts, select_features, standardised
from bnn_pyro.datasets.rows import OnDisk, read_items
from bnn_pyro.datasets.splits import FRACTIONS
from bnn_pyro.datasets.tables import encode_rows, encode_target, raw_table
from bnn_pyro.errors import UserError, refusing


def dataset(
    x: Any = None, y: Any = None, *, train: Any = None, test: Any = None, rows: int | tuple[int, int] | None = None,
    x_test: Any = None, y_test: Any = None, exclude: str | Sequence[str] = (), categorical: str | Sequence[str] = (),
    task: str | None = None, classes: Sequence[str] | None = None, split: Any = None, groups: Any = None,
    time: Any = None, exposure: Any = None, event: Any = None, missing: str = "refuse", unseen: str = "refuse",
    validation: int | float | None = None, limit: int | None = None, seed: int = 0, name: str = "data",
    target_scale: str = "identity", dates: str = "refuse", scale: str = "auto",
) -> Dataset:  # fmt: skip
    """Make a data set of data in memory: split the rows once and standardise them by the training rows.

    x       array, tensor or list (N, F), or of images (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W), uint8 or in
            [0, 1]; or a data frame of pandas, polars or any library with ``__dataframe__``, whose columns of text,
            categories and booleans become one 0/1 feature per category
            A torch ``Dataset`` of (input, target), such as an ``ImageFolder``, or a ``DataLoader`` is read once; y is
            then left out. For a module with several inputs: a tuple of arrays (N, …), passed by position, or {name:
            array}, passed by name; whole numbers other than uint8 are not standardised, for an ``nn.Embedding``.
            Inputs of more than ``BNN_PYRO_MEMORY`` GiB (by default 1) stay on disk, mapped arrays too
    y       numbers or labels of any type (N,), or the name of a column of the frame. Several targets (numbers, or 0
            and 1): (N, T), or a list of names. For task "survival" a positive time with ``event``, or both (N, 2)
    train, test  torch data sets or loaders, instead of x and x_test
    rows    their numbers of rows, if they have no length: of train, or (of train, of test)
    x_test, y_test  a given test part
    exclude, categorical  columns of the frame to leave out; columns whose numbers are codes of categories
    task    regression, classification, counts, ordinal, survival, targets (several numbers) or labels (several 0 or
            1). None: see ``cells.infer_task``; several targets are labels if all of them are 0 or 1
    classes names of the labels 0 … K−1, if y has these labels; or the values of y in the order of the labels (for
            ordinal the lowest first; needed if y is text and not an ordered category)
    split   share of test rows (by default 0.15), stratified for classification; or a mask (N,) of test rows, their
            numbers, or a tuple of row numbers (train, test) or (train, validation, test)
    groups  (N,), or a column's name: all rows of a group are put into the same part
    time    (N,), or a column's name: the last rows are test rows, the ones before them validation rows
    exposure  (N,), or a column's name: the quantity that a count is proportional to, such as hours or persons
    event   (N,), or a column's name: 1 if the event happened at that time, 0 if the time is censored; or the text
            "COLUMN=VALUE": the event happened in the rows with this value
    missing what to do with missing values: "refuse" them, "drop" their rows, or replace them and add an "indicator":
            numbers become the training rows' median, with a second feature that marks them; a missing text is one more
            category. Rows without y or exposure are then dropped
    unseen  categories that only new rows have: "refuse" them, or "ignore" them (all features of the column are 0)
    validation  number or share of validation rows (by default 0.15)
    limit   number of training rows to keep, the first ones after shuffling, for quick runs
    seed    of the split
    name    of the data, in reports
    target_scale  "log" for positive numbers: their logarithm is modelled, and all predictions are of y itself
    dates   columns of dates: "refuse" them; convert them to "parts" (the year, sine and cosine of the day of the year
            and of the hour, if there are times); or to days "elapsed" since the earliest. Texts such as 2024-12-31 or
            31.12.2024 are dates too
    scale   of inputs: "standard": mean 0 and standard deviation 1 of the training rows; "auto": the same, and networks
            of the package also take the asinh of columns with long tails (``schema.x_tails``, for rows in memory);
            "robust": median 0 and interquartile range 1.349, that of a standard Normal
    Raises UserError, one line with the place and what to do, for anything that is wrong with the input.
    """
    check_options(task=task, missing=missing, unseen=unseen, target_scale=target_scale, dates=dates, scale=scale)
    y = str(y) if isinstance(y, int | np.integer) else y  # ``as_table`` converts names to text
    if train is not None or isinstance(x, torch_data.Dataset | torch_data.DataLoader):
        if y is not None or (train is not None and x is not None):
            raise UserError("X is a torch data set, which has the targets; leave y out, and give X or train=")
        num, num_test = rows if isinstance(rows, tuple) else (rows, None)
        arg = "X" if train is None else "train"
        x, y, names = read_items(arg, x if train is None else train, num)
        if test is not None:
            x_test, y_test, others = read_items("test", test, num_test)
            if names != others:
                raise UserError(f"test has the classes {others}, and {arg} {names}; give both the same"[:300])
            y_test = y_test if names is None else np.array(names)[y_test[:, 0].astype(int)]
        classes = names if classes is None and task in (None, "classification", "ordinal") else classes
    elif test is not None or rows is not None:
        raise UserError("test= and rows= are of torch data sets and loaders; give train=, or x_test= and y_test=")
    x, parts, features = pack("X", several) if (several := parts_of(x)) else (on_disk("X", x), [], [])
    if parts and (exposure is not None or missing == "indicator"):
        raise UserError("X is a tuple or dict, inputs of a module, which take no exposure= and no missing='indicator'; "
                        "leave it out, or fill gaps in and give a mask as another input")  # fmt: skip
    table = as_table("X", x)
    own_name = event.name if isinstance(event, pd.Series) else None  # (times < 9).name is the name of the times
    own_name = "event" if own_name in (None, "", y.name if isinstance(y, pd.Series) else y) else own_name
    of_event: tuple[str, ...] = () if event is None else (str(own_name),)
    if isinstance(event, str):
        event, *_ = of_event = event_column("X", event, [] if table is None else list(table.columns))
    coded, non_inputs = names_in(table, "categorical", categorical), names_in(table, "exclude", exclude)
    table = table.assign(**{name: coded_cells(table[name]).astype("category") for name in coded}) if coded else table
    columns = {"y": y, "groups": groups, "time": time, "exposure": exposure, "event": event}
    check_order("split", split, x)
    for role, value in columns.items():
        check_order(role, value, x)
        several = role == "y" and isinstance(value, list | tuple) and len(value) < len(x)
        if isinstance(value, str) or (several and all(isinstance(column, str) for column in value)):
            non_inputs += names_in(table, role, value)
            columns[role] = table[value if isinstance(value, str) else list(value)]
    if event is not None:
        columns["y"] = _with_event(columns["y"], columns["event"], of_event[0])
    table = table if table is None else table.drop(columns=non_inputs)
    if (values := columns["exposure"]) is not None:
        if isinstance(x, OnDisk) or np.shape(values) != (len(x),):
            raise UserError(f"exposure has {np.size(values)} values, and X {len(x)} rows, in memory; give one for each")
        exposure = exposure if isinstance(exposure, str) else "exposure"
        table = named(as_array("X", x)) if table is None else table
        if exposure in table:
            raise UserError(f"X has a column '{exposure}', as exposure= is called: leave it out, or rename it")
        table = table.assign(**{exposure: as_array("exposure", values, text=True)})
    # Doubts are looked for in parts that are columns of a table, not in series and masks.
    looked_at = [len(p.shape) < 2 and not p.is_bool for p in parts for _ in range(math.prod(p.shape))]
    options = dict(task=task, order=classes, exposure=exposure, event=of_event)
    raw = _raw(x, table, columns["y"], missing, dates, np.flatnonzero(looked_at) if parts else None, **options)
    raw = replace(raw, name=name, source=f"in memory: {name}", unseen=unseen, target_scale=target_scale)
    if parts:
        names = {f"x{k}": feature for k, feature in enumerate(features, 1)}
        doubts = [re.sub(r"\bx\d+\b", lambda m: names.get(m[0], m[0]), doubt) for doubt in raw.doubts]
        raw = replace(raw, doubts=tuple(doubts), features=tuple(features))
        raw = replace(raw, columns=tuple(map(Column, features)), input_parts=tuple(parts))
    if (x_test is None) != (y_test is None):
        raise UserError("x_test and y_test are the test part together; give both, or none")
    if x_test is not None:
        raw = replace(raw, test=_test_part(raw, x_test, y_test))
    by = {kind: columns[kind] for kind in ("groups", "time") if columns[kind] is not None}
    return say_doubts(prepare(raw, limit=limit, scale=scale, seed=seed, **_division(raw, split, by, validation)))


def inputs(x: Any, schema: Schema, arg: str = "X") -> Tensor:
    """Standardise inputs in memory (N, *input_shape) as the model's own; columns of a frame are matched by name.

    A torch data set or loader, of inputs or of (input, target), gives its inputs in the data set's order.
    Raises UserError for a missing column, a missing value or an unknown category (see ``dataset``).
    """
    x = read_items(arg, x, alone=True)[0] if isinstance(x, torch_data.Dataset | torch_data.DataLoader) else x
    return standardised(_encoded(arg, x, schema), schema)


def _with_event(y: Any, event: Any, name: str) -> pd.DataFrame:
    y, event = as_target("y", y), as_target("event", event).set_axis([name], axis=1)
    if len(y) != len(event) or name in y:
        raise UserError(f"event '{name}' has {len(event)} values, and the times {', '.join(y)} {len(y)}; give another "
                        "column, with one value for each time")  # fmt: skip
    return y.join(event)


def _raw(
    x: Any, table: pd.DataFrame | None, y: Any, missing: str, dates: str, looked_at: np.ndarray | None, **options: Any
) -> Raw:
    if y is None:
        raise UserError("y is missing: give the targets, or the name of a column of X")
    target, where = as_target("y", y), "X (rows from 0)"
    num = len(x) if table is None else len(table)
    if len(target) != num:
        way = "; an input among several is (N, …), such as column.reshape(-1, 1)" * isinstance(x, tuple)
        raise UserError(f"X has {num} rows and y {len(target)}; give one target for each row{way}")
    if num == 0 or 0 in getattr(table, "shape", ()):
        raise UserError("X has no columns" if num else "X has no rows")
    if table is None and not isinstance(x, OnDisk):
        x = as_array("X", x)
        if x.ndim == 2 and missing == "indicator" and (pd.isna(x).any() or gaps_in(target).any(axis=None)):
            table = named(x)
    if table is None:
        options.pop("exposure")
        return select_features(raw_arrays("X, y", x, target, missing == "drop", looked_at, **options), None, "X")
    if both := [name for name in target.columns if name in table.columns]:
        raise UserError(f"X has a column '{both[0]}', as y is called: leave it out, or rename y if it is another")
    cells = as_cells(table, dates=dates != "refuse").join(target)
    return raw_table(where, cells, list(target.columns), missing=missing, dates=dates, **options)


def _test_part(raw: Raw, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    values, cells = _encoded("x_test", x, raw), as_target("y_test", y)
    if len(cells) != len(values):
        raise UserError(f"x_test has {len(values)} rows and y_test {len(cells)}; give one target for each row")
    if cells.shape[1] != len(raw.target_names):
        raise UserError(f"y_test has {cells.shape[1]} columns, and y {len(raw.target_names)}; give the same targets")
    are_numbers = cells.iloc[:, 0].dtype.kind in "iuf"
    if raw.has_classes and are_numbers and not {*map(label, cells.iloc[:, 0])} & {*raw.classes}:  # labels 0 … K−1
        return values, torch.from_numpy(numbered("y_test", cells.iloc[:, 0], raw.task, raw.classes)[1])
    return values, encode_target("y_test", cells.set_axis(raw.target_names, axis=1), raw)


def archive(path: str | Path, **options: Any) -> Raw:
    """Read an NPZ or NPY file with its test part; see ``load_archive`` for the arguments."""
    raw, test = load_archive(path, **options)
    with refusing(f"{path}: {{error}}", UserError):
        return replace(raw, test=_test_part(raw, *test)) if test else raw


def _encoded(arg: str, x: Any, like: Schema) -> Tensor | OnDisk:
    """Return features or pixels as in ``Raw.x``."""
    if like.input_parts and not isinstance(x, Tensor):
        x = pack(arg, parts_of(x, 0), like)[0]
    table = as_table(arg, x, like.table_columns)
    if table is None and not isinstance(x, OnDisk):
        x = as_array(arg, x)
        if x.ndim == 2 and x.shape[1] == len(like.columns) and (like.exposure or x.shape[1] < len(like.features)):
            table = named(x, [column.name for column in like.columns])
    if table is not None:
        if not like.columns:
            shape = ", ".join(map(str, like.input_shape))
            raise UserError(f"{arg} is a frame, and this model takes arrays of shape (N, {shape})")
        columns = like.table_columns
        if more := [name for name in table.columns if name not in (*columns, *like.target_names)]:
            warnings.warn(f"{arg}: columns that this model does not know are left aside: {', '.join(more[:12])}",
                          stacklevel=4)  # fmt: skip
        table = as_cells(table[[n for n in table.columns if n in columns]], f"{arg} (rows from 0)", bool(like.dates))
        coded = {column.name for column in like.columns if column.categories is not None} & set(table.columns)
        table = table.assign(**{name: coded_cells(table[name]) for name in coded if table[name].dtype.kind in "iuf"})
        return encode_rows(f"{arg} (rows from 0)", table, like)[0]
    values = image_arrays(arg, x)
    if tuple(values.shape[1:]) != like.input_shape:
        way = "; a folder of PNG or JPG files is scaled to that" if values.ndim == 4 and like.is_image else ""
        way = ", the last one the exposure" if like.exposure else way
        raise UserError(f"{arg}: inputs of shape {tuple(values.shape[1:])}; this model takes {like.input_shape}{way}")
    return values


def _division(raw: Raw, split: Any, by: dict[str, Any], validation: float | None) -> dict[str, Any]:
    """Return the arguments of ``divide``.   by: {"groups" or "time": (N,)}.   split: a share or rows."""
    num, is_share = len(raw.y), np.isscalar(split) and not isinstance(split, bool | str)
    if is_share and not 0 <= split < 1:
        raise UserError(f"split={split}: give the share of test rows, 0 to below 1; or a mask, or row numbers")
    if validation is not None and not (0 <= validation < 1 or float(validation).is_integer()):
        raise UserError(f"validation={validation}: give a number of rows, or a share below 1")
    of_rows = split is not None and not is_share
    if of_rows and raw.rows is not None:
        raise UserError("rows were dropped, so that rows in split= have other numbers; drop them from X and y first")
    held_out = None if validation is None else round(validation * num if validation < 1 else validation)
    if of_rows or raw.test is not None:
        return dict(rows=split, by=by, validation=held_out)
    shares = None
    if is_share or held_out is not None:
        test, val = split if is_share else FRACTIONS[2], FRACTIONS[1] if held_out is None else held_out / num
        if test + val >= 1:
            raise UserError(f"split={test:g} and validation={val:.3g} of the rows leave none to train; give smaller")
        shares = (1.0 - test - val, val, test)
    if raw.rows is not None:
        by = {kind: np.asarray(values)[raw.rows.numpy()] for kind, values in by.items()}
    return dict(by=by, fractions=shares, validation=None if by else held_out)
