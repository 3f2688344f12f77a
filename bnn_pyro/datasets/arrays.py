"""Read arrays, in memory or in NPZ and NPY files; rows are counted from 0."""

import math
import mmap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnn_pyro.cells import gaps_in, numbered
from bnn_pyro.datasets.dataset import InputPart, Raw, Schema
from bnn_pyro.datasets.frames import as_array, as_table, as_target, named, refuse_gaps, target_fields
from bnn_pyro.datasets.rows import CHUNK, OnDisk, for_torch, is_large
from bnn_pyro.errors import UserError, refusing
from bnn_pyro.files import existing, read_archive

#: Suffixes of picture files; see ``images``.
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


def load_archive(
    path: str | Path, *, target: str | None = None, task: str | None, drop_missing: bool = False
) -> tuple[Raw, list[np.ndarray]]:
    """Read an NPZ file: x (N, F), (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W), and y (N,) or (N, T).

    The file may have a test part, x_test and y_test, which is returned as it is; x and y may then be called x_train and
    y_train.
    For task "survival" y is (N, 2), the time and the event (see ``dataset``). With an array ``classes`` of K names, y
    must be labels 0 … K−1. An NPY file is a table with the target in one of its columns x1, …, or the file x.npy
    (NAME_x.npy) with y.npy (NAME_y.npy) in the same folder.
    """
    if (path := existing(path)).suffix.lower() == ".npy":
        return _load_array(path, target, task, drop_missing), []
    arrays = read_archive(path)
    if "x" not in arrays:
        arrays |= {name: arrays.pop(f"{name}_train") for name in "xy" if f"{name}_train" in arrays}
    if "x" not in arrays or "y" not in arrays:
        raise UserError(f"{path}: has {', '.join(arrays) or 'no arrays'}; it needs arrays x and y")
    if target is not None and target != "y":
        raise UserError(f"{path}: the target of an NPZ file is its array y; leave target='{target}' out")
    classes = np.ravel(arrays["classes"]).tolist() if "classes" in arrays else None
    y = as_target(f"{path}: y", arrays["y"])
    raw = replace(raw_arrays(path, arrays.pop("x"), y, drop_missing, task=task, order=classes), name=path.stem)
    given = [name for name in ("x_test", "y_test") if name in arrays]
    if len(given) == 1:
        raise UserError(f"{path}: has {given[0]} alone; x_test and y_test are the test part together")
    return raw, [arrays[name] for name in given]


def _load_array(path: Path, target: str | None, task: str | None, drop_missing: bool) -> Raw:
    array = read_array(path)
    x, features = on_disk(path, array), {}
    beside = path.with_name(f"{path.stem[:-1]}y.npy")
    if target is not None:
        names = [f"x{k + 1}" for k in range(array.shape[1] if array.ndim == 2 else 0)]
        if target not in names:
            raise UserError(f"{path}: has no column '{target}'; its {len(names)} columns are x1, x2, …")
        columns = [k for k, name in enumerate(names) if name != target]
        y, features = np.array(array[:, names.index(target)]), {"features": tuple(names[k] for k in columns)}
        x = x[:, columns]
    elif path.stem[-1:] == "x" and beside.is_file():
        y = np.array(read_array(beside))
    else:
        raise UserError(f"{path}: which column is the target? Give target= (--target) x1, x2, …, or call the inputs "
                        "x.npy, with the targets as y.npy beside them")  # fmt: skip
    cells = as_target(f"{path}: y", y).rename(columns={"y": target or "y"})
    raw = raw_arrays(path, x if isinstance(x, OnDisk) else np.array(x), cells, drop_missing, task=task)
    return replace(raw, name=path.stem, **features)


def on_disk(where: str | Path, x: Any) -> Any:
    """Convert a large memory-mapped array to :class:`OnDisk`; return anything else unchanged."""
    if not (isinstance(x, np.memmap) and isinstance(x.base, mmap.mmap) and is_large(x.shape)):
        return x
    if not x.flags.c_contiguous:
        raise UserError(f"{where}: its rows lie apart, in Fortran's order; save numpy.ascontiguousarray of it")
    image_arrays(where, np.array(x[:1]))
    return OnDisk(x.filename, x.dtype, x.shape, x.offset)


def read_array(path: Path) -> np.memmap:
    """Memory-map an NPY file of numbers, without executing code from it."""
    damaged = f"{path}: is no NPY file of plain numbers, or damaged; save it with numpy.save"
    with refusing(damaged, ValueError, OSError, EOFError):
        return np.load(path, mmap_mode="r", allow_pickle=False)


def raw_arrays(
    path: str | Path, x: np.ndarray | OnDisk, y: pd.DataFrame, drop_missing: bool = False,
    columns: np.ndarray | None = None, **of_target: Any,
) -> Raw:  # fmt: skip
    """Make a ``Raw`` of arrays as in :func:`load_archive`; path is named in errors.

    y: the result of ``as_target``.   of_target: see ``target_fields``.
    columns: numbers of the columns in which doubts are looked for; None: all columns of a table.
    """
    if 0 in (x.shape or [0]) or len(y) != len(x):
        raise UserError(f"{path}: x has shape {x.shape}, and y {len(y)} rows; x needs rows, and y one for each")
    rows, num = None, len(x)
    if drop_missing and isinstance(x, OnDisk):
        raise UserError(f"{path}: is not read into memory, so that no rows are dropped; leave missing='drop' out "
                        "(--missing drop), or set BNN_PYRO_MEMORY to more GiB")  # fmt: skip
    if drop_missing:
        _refuse(path, x, allow_nan=True)
        keep = ~((x != x).reshape(len(x), -1).any(1) | gaps_in(y).any(axis=1))  # x != x is True for NaN only
        if not keep.any():
            raise UserError(f"{path}: every row has a missing value (nan)")
        if not keep.all():
            x, y, rows = x[keep], y[keep], torch.from_numpy(np.flatnonzero(keep))
    x = image_arrays(path, x)
    refuse_gaps(path, y, gaps_in(y), ", or leave such rows out: missing='drop' (--missing drop)")
    if of_target.get("order") is not None and y.shape[1] == 1 and y.iloc[:, 0].dtype.kind in "iuf":
        task, values, classes = numbered(path, y.iloc[:, 0], of_target["task"], of_target["order"])
        fields = dict(task=task, y=torch.from_numpy(values), classes=classes, target=y.columns[0])
    else:
        fields = target_fields(path, y, **of_target)
    from bnn_pyro.doubts import of_table

    most = 5_000_000 // max(1, x.shape[1])  # rows in which doubts are looked for
    table = named(x[:most].numpy()) if isinstance(x, Tensor) and x.ndim == 2 else pd.DataFrame()
    doubts = tuple(of_table(table if columns is None else table.iloc[:, columns], None, y.iloc[:, :0]))
    features = () if len(x.shape) == 4 else tuple(f"x{i + 1}" for i in range(x.shape[1]))
    about = dict(name=str(path), source=str(path), features=features, doubts=doubts)
    return Raw(**fields, **about, x=x, rows=rows, dropped=num - len(x))


def read_inputs(path: Path) -> np.ndarray:
    """Read the array of inputs in an NPZ or NPY file; targets are not needed."""
    arrays = {"x": np.array(read_array(path))} if path.suffix.lower() == ".npy" else read_archive(path)
    key = next((name for name in ("x_test", "x") if name in arrays), "arr_0")
    if key not in arrays:
        raise UserError(f"{path}: has {', '.join(arrays) or 'no arrays'}; it needs an array x, x_test or arr_0")
    return arrays[key]


def image_arrays(path: str | Path, x: np.ndarray | OnDisk, first: int = 0) -> Tensor | OnDisk:
    """Convert x to (N, F), or to images (N, channels, H, W), uint8 or float32 in [0, 1]. NaN and inf are errors.

    Tables keep their type if torch has it, to save memory. Files are read in chunks.   first: number of the first row.
    """
    if isinstance(x, OnDisk):
        step = max(1, CHUNK // max(1, math.prod(x.shape[1:])))
        for start in range(0, len(x), step):
            image_arrays(path, x[start : start + step].numpy(), start)
        return x
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool) or np.iscomplexobj(x):
        raise UserError(f"{path}: x holds {x.dtype}; it must hold numbers")
    if x.ndim and not len(x):
        raise UserError(f"{path}: x has 0 rows; give one or more")
    if x.ndim not in (2, 3, 4) or 0 in x.shape:
        raise UserError(f"{path}: x has shape {x.shape}; it must be (N, features), (N, H, W) or (N, H, W, channels)")
    _refuse(path, x, first=first)
    if x.ndim > 2 and x.dtype != np.uint8 and (x.min() < 0 or x.max() > 1):
        raise UserError(f"{path}: pixels from {x.min()} to {x.max()}; store images as uint8, or as numbers in [0, 1]; "
                        "other inputs, such as series, are for a network of your own: bp.dataset((X,), y)")  # fmt: skip
    if x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] not in (1, 3):
        raise UserError(f"{path}: x has shape {x.shape}; images have 1 or 3 channels, on axis 1 or last")
    return for_torch(np.ascontiguousarray(x))


def _refuse(path: str | Path, x: np.ndarray, allow_nan: bool = False, first: int = 0) -> None:
    """Raise UserError with the place of the first value that is infinite, or NaN unless allowed, in floats."""
    if not np.issubdtype(x.dtype, np.floating):
        return
    if (wrong := np.isinf(x) if allow_nan else ~np.isfinite(x)).any():
        value, (row, *rest) = x[wrong][0], (int(at) for at in np.unravel_index(wrong.argmax(), wrong.shape))
        row += first
        way = ", as missing='drop' (--missing drop) does with rows to train on" if np.isnan(value) else ""
        raise UserError(f"{path}: x{[row, *rest]} is {value}; correct or remove row {row} (from 0){way}")


def parts_of(x: Any, axes: int = 2) -> dict[str, Any]:
    """Return {name: array} for a mapping, or for a tuple with names "0", "1", …; {} if no part has ``axes`` axes."""
    parts = x if isinstance(x, Mapping) else dict(enumerate(x)) if isinstance(x, tuple) else {}
    parts = {str(k): v for k, v in parts.items()}
    for name, part in parts.items():
        of_objects = getattr(getattr(part, "dtype", None), "kind", "") == "O" and np.ndim(part) == 1
        parts[name] = list(part) if of_objects and _axes(next(iter(part), 0)) else part  # an array of arrays
    return parts if any(_axes(part) >= axes for part in parts.values()) else {}


def _axes(part: Any) -> int:
    try:
        return np.ndim(part)
    except ValueError:  # rows of unequal length, which ``as_array`` refuses
        return 2


def pack(
    arg: str, parts: Mapping[str, Any], schema: Schema | None = None
) -> tuple[np.ndarray, list[InputPart], list[str]]:
    """Pack named arrays (N, …) into one: (float32 (N, F), its parts, names of the features).

    schema: the schema of a trained model with the same parts; columns of a part that was a frame are matched by name.
    """
    like, features = ((), ()) if schema is None else (schema.input_parts, schema.features)
    tables = {name: as_table(f"{arg}['{name}']", part) for name, part in parts.items() if hasattr(part, "columns")}
    for name, table in tables.items():
        names = [text[len(name) + 1 : -1] for text in features if text.startswith(f"{name}[")]
        if {*names} == {*table.columns}:
            tables[name] = table[names]
        elif any(not text.isdigit() for text in names):
            raise UserError(f"{arg}['{name}'] has the columns {', '.join(table.columns)}; this model was trained on "
                            f"{', '.join(names)}"[:300])  # fmt: skip
    way = "pad series to one length, and give a mask as another input"
    arrays = {name: as_array(f"{arg}['{name}']", part, True, way) for name, part in {**parts, **tables}.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf" or not array.ndim:
            raise UserError(f"{arg}['{name}'] is no array of numbers; number categories 0, 1, … for an nn.Embedding")
        if array.dtype.kind in "iu" and np.abs(array).max(initial=0) > 2**24:
            raise UserError(f"{arg}['{name}'] has whole numbers above 2^24, too many for 32-bit floats; number from 0")
    rows = {name: len(array) for name, array in arrays.items()}
    if len(set(rows.values())) > 1:
        lengths = ", ".join(f"'{name}' {num}" for name, num in rows.items())
        raise UserError(f"{arg}: its inputs have different numbers of rows ({lengths}); give one of each for each row")
    kinds = {name: (a.dtype.kind in "iu" and a.itemsize > 1, a.dtype.kind == "b") for name, a in arrays.items()}
    inputs = [InputPart(name, array.shape[1:], *kinds[name]) for name, array in arrays.items()]
    if like and {p.name: p.shape for p in inputs} != {p.name: p.shape for p in like}:
        got, needed = (", ".join(f"'{p.name}' {('N', *p.shape)}" for p in some) for some in (inputs, like))
        given = f"has the inputs {got}" if got else "is no tuple or dict of arrays (N, …)"
        raise UserError(f"{arg} {given}; this model takes {needed}".replace("'N'", "N"))
    for part in like:
        if part.is_whole and (arrays[part.name] % 1 != 0).any():
            raise UserError(f"{arg}['{part.name}'] must be whole numbers, as those that this model was trained on")
        if part.is_bool and not np.isin(arrays[part.name], (0, 1)).all():
            raise UserError(f"{arg}['{part.name}'] must be true or false, as what this model was trained on")
    order = [part.name for part in like] or list(arrays)
    packed = [a.reshape(len(a), math.prod(a.shape[1:])).astype(np.float32) for a in map(arrays.get, order)]
    places = {part.name: tables.get(part.name, range(math.prod(part.shape))) for part in inputs}  # or columns
    return np.concatenate(packed, 1), list(like) or inputs, [f"{name}[{i}]" for name in order for i in places[name]]
