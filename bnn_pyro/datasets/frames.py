"""Frames of any library, arrays, tensors and lists: as frames of cells, or as arrays of numbers. Rows count from 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from bnn_pyro.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

#: Kinds of an array's type that may hold text.
TEXT = ("O", "U", "S")
#: How pandas calls values that are times.
DATES = ("datetime64", "datetime", "date", "timedelta64", "timedelta", "time", "period")


def as_table(what: str, x: Any) -> pd.DataFrame | None:
    """A frame of any library, or an array or list with text in it, as one of pandas; None for numbers."""
    import pandas as pd

    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple) else ()
    if len({tuple(part.shape) for part in parts if getattr(part, "ndim", 0) > 1}) > 1:
        raise UserError(f"{what} has several inputs; join them to one array (N, columns), and split it in the module")
    if isinstance(x, Mapping):
        x = pd.DataFrame(dict(x))
    if isinstance(x, pd.Series):
        x = x.to_frame()
    if not isinstance(x, pd.DataFrame):
        if hasattr(x, "__dataframe__") or hasattr(x, "to_pandas"):
            try:
                x = x.to_pandas()
            except (AttributeError, ImportError):  # polars needs pyarrow for it
                names = x.columns if hasattr(x, "columns") else x.__dataframe__().column_names()
                x = pd.DataFrame({name: x[name].to_list() for name in names})
        elif isinstance(x, list | tuple) or getattr(getattr(x, "dtype", None), "kind", "") in TEXT:
            array = as_array(what, x, text=True)
            if array.dtype.kind not in TEXT or array.ndim != 2:
                return None
            x = named(x).infer_objects()
        else:
            return None
    frame = x.reset_index(drop=True)
    names = [" ".join(str(name).split()) for name in frame.columns]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{what} has {names.count(name)} columns called '{name}'; rename or remove all but one")
    return frame.set_axis(names, axis=1)


def named(x: Any, names: Sequence[str] | None = None) -> pd.DataFrame:
    """An array (N, F) as a frame, of columns x1, x2, … where there are no names."""
    import pandas as pd

    frame = pd.DataFrame(x)
    return frame.set_axis(names or [f"x{k + 1}" for k in range(frame.shape[1])], axis=1)


def as_array(what: str, x: Any, text: bool = False) -> np.ndarray:
    """Numbers (N, …)."""
    try:
        array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    except (TypeError, ValueError):
        raise UserError(f"{what}: rows of unequal length; give every row the same number of values") from None
    if array.dtype.kind == "U" and not array.ndim:
        raise UserError(f"{what} is the text '{array}'; of a file, give bp.load_inputs(path, posterior.schema)")
    if array.ndim < 2 and not text:
        way = f"; one column is {what}.reshape(-1, 1), one row {what}.reshape(1, -1)" if array.ndim else ""
        raise UserError(f"{what} has shape {array.shape}; give (N, features){way}")
    return array if array.flags.writeable else array.copy()  # torch shares memory, and warns where it is read-only


def as_cells(frame: pd.DataFrame, where: str = "X (rows from 0)") -> pd.DataFrame:
    """Each column as float64 (nan where missing), text ("" where missing), or categories of text."""
    import pandas as pd

    return pd.DataFrame({name: _column(where, frame[name]) for name in frame.columns})


def _column(where: str, cells: pd.Series) -> pd.Series:
    """Raises UserError for dates, and for values of several types."""
    import pandas as pd

    kind, gaps = pd.api.types.infer_dtype(cells, skipna=True), cells.isna()
    if kind in ("integer", "floating", "mixed-integer-float", "decimal"):
        return pd.Series(
            pd.to_numeric(cells).to_numpy(dtype=np.float64, na_value=math.nan), cells.index, name=cells.name
        )
    if kind in ("string", "boolean", "categorical"):
        text = cells.astype(object).where(~gaps, "").map(lambda cell: " ".join(str(cell).split()))
        if not getattr(cells.dtype, "ordered", False):
            return text if kind == "string" else text.astype("category")
        order = dict.fromkeys(" ".join(str(name).split()) for name in cells.cat.categories)
        return text.astype(pd.CategoricalDtype(list(order), ordered=True))
    if kind == "empty":
        return pd.Series(math.nan, cells.index, name=cells.name)
    place = f"{where}: column '{cells.name}'"
    if kind in DATES:
        raise UserError(f"{place} holds dates or times, which a network does not take; make numbers of them (days "
                        "since a day, the month), or leave the column out")  # fmt: skip
    types = cells[~gaps].map(lambda cell: type(cell).__name__)
    other = types.index[types.ne(types.iloc[0]).argmax()]
    raise UserError(f"{place} holds {kind} values (row {types.index[0]}: {types.iloc[0]}, row {other}: "
                    f"{types[other]}); make them all numbers or all text")  # fmt: skip


def as_target(what: str, y: Any) -> pd.DataFrame:
    """The targets as columns of cells, by their names; where they have none "y", or of several "y1", "y2", …"""
    import pandas as pd

    nested = isinstance(y, list | tuple) and len(y) and isinstance(y[0], list | tuple | np.ndarray)
    if nested or not isinstance(y, pd.Series | list | tuple):
        table = as_table(what, y) if hasattr(y, "__dataframe__") or hasattr(y, "to_pandas") else None
        if table is None and hasattr(y, "to_list"):  # a column of polars
            y = pd.Series(y.to_list(), name=getattr(y, "name", None))
        else:
            y = as_array(what, y, text=True) if table is None else table
        if len(y.shape) == 2 and y.shape[1] == 1:
            y = y[:, 0] if isinstance(y, np.ndarray) else y.iloc[:, 0]
        if len(y.shape) == 2 and y.shape[1]:
            names = [f"y{k + 1}" for k in range(y.shape[1])] if isinstance(y, np.ndarray) else None
            frame = (y if names is None else named(y, names)).reset_index(drop=True)
            return as_cells(frame, f"{what} (rows from 0)")
        if len(y.shape) != 1:
            raise UserError(f"{what} has shape {tuple(y.shape)}; give one target for each row, (N,)")
    cells = pd.Series(y).reset_index(drop=True)
    cells = cells.rename("y" if cells.name is None else str(cells.name))
    return _column(f"{what} (rows from 0)", cells).to_frame()
