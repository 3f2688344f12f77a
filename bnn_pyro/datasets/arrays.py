"""NPZ files: arrays ``x`` and ``y``, or an official pair of images and labels, each with one array ``arr_0``.

Rows of arrays are counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bnn_pyro.datasets.dataset import Raw
from bnn_pyro.datasets.tables import read_target
from bnn_pyro.errors import UserError
from bnn_pyro.files import existing, read_archive

__all__ = ["check_labels", "image_pair", "load_archive", "read_inputs"]

#: Types of numbers that torch has too.
TORCH_TYPES = tuple(np.dtype(name) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "?"))


def load_archive(
    path: str | Path, *, target: str | None = None, task: str | None = None, drop_missing: bool = False
) -> Raw:
    """Read an NPZ file: x (N, F), (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W) and y (N,).

    With an array ``classes`` of K names, y must be labels 0 … K−1. Of an official pair, give the file of images; a
    training file takes the test file beside it as its own test part.
    """
    path = existing(path)
    arrays = read_archive(path)
    if "x" not in arrays and "arr_0" in arrays:
        return _pair(path, task)
    if "x" not in arrays or "y" not in arrays:
        raise UserError(f"{path}: has {', '.join(arrays) or 'no arrays'}; it needs arrays x and y (or one arr_0)")
    x, y = arrays.pop("x"), arrays["y"]  # pop: what follows may let the whole array go
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if x.ndim == 0 or x.size == 0 or y.ndim != 1 or len(y) != len(x):
        raise UserError(f"{path}: x has shape {x.shape} and y {arrays['y'].shape}; x needs rows, and y "
                        "one value for each, shape (N,)")  # fmt: skip
    if target is not None and target != "y":
        raise UserError(f"{path}: the target of an NPZ file is its array y; leave target='{target}' out")
    rows = None
    if drop_missing:
        _refuse(path, "x", x, np.isinf)
        _refuse(path, "y", y, np.isinf)
        x, y, rows = _without_nan(path, x, y)
    x = _inputs(path, x)
    _refuse(path, "y", y, _not_finite)
    task, labels, classes = _targets(path, y, task, arrays.get("classes"))
    return Raw(
        name=path.stem,
        task=task,
        x=torch.from_numpy(x),
        y=torch.from_numpy(labels),
        classes=classes,
        features=() if x.ndim == 4 else tuple(f"x{i + 1}" for i in range(x.shape[1])),
        source=str(path),
        white=_white(x),
        rows=rows,
    )


def read_inputs(path: str | Path) -> tuple[torch.Tensor, float]:
    """The inputs of an NPZ file, (N, F) or images (N, channels, H, W), and the value of a white pixel.

    Targets are not needed.
    """
    arrays = read_archive(path)
    key = "x" if "x" in arrays else "arr_0"
    if key not in arrays:
        raise UserError(f"{path}: has {', '.join(arrays) or 'no arrays'}; it needs an array x (or arr_0)")
    x = _inputs(Path(path), arrays[key])
    return torch.from_numpy(x), _white(x)


def image_pair(images: str | Path, labels: str | Path, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An official pair of NPZ files: images (N, 1, H, W) uint8 and labels (N,) int64."""
    first, second = read_archive(images), read_archive(labels)
    for path, arrays in ((images, first), (labels, second)):
        if list(arrays) != ["arr_0"]:
            raise UserError(f"{path}: has {', '.join(arrays) or 'no arrays'}; an official file has one, arr_0")
    x, y = first["arr_0"], second["arr_0"]
    if x.dtype != np.uint8 or x.ndim != 3:
        raise UserError(f"{images}: arr_0 is {x.dtype} of shape {x.shape}; images are uint8 of shape (N, H, W)")
    if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"{labels}: arr_0 is {y.dtype} of shape {y.shape}; {len(x)} images need ({len(x)},) integers")
    check_labels(str(labels), y, num_classes)
    return torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y.astype(np.int64))


def check_labels(where: str, y: np.ndarray, num_classes: int) -> None:
    """Refuse labels outside 0 … K−1."""
    bad = np.flatnonzero((y < 0) | (y >= num_classes))
    if len(bad):
        raise UserError(f"{where}: row {bad[0]} (from 0) has label {y[bad[0]]}, outside 0 to {num_classes - 1}")


def _pair(path: Path, task: str | None) -> Raw:
    if task not in (None, "classification"):
        raise UserError(f"{path}: an official pair of images and labels is classification; leave task='{task}' out")
    if "imgs" not in path.name:
        raise UserError(f"{path}: has one array arr_0; give the file of images, called …imgs.npz, with its …labels.npz")
    labels = path.with_name(path.name.replace("imgs", "labels"))
    if not labels.is_file():
        raise UserError(f"{path}: its labels {labels} are missing; place them beside the images")
    num_classes = int(read_archive(labels).get("arr_0", np.zeros(1)).max()) + 1
    x, y = image_pair(path, labels, num_classes)
    test = path.with_name(path.name.replace("train", "test"))
    own = "train" in path.name and test.is_file()
    return Raw(
        name=path.stem.removesuffix("-imgs"),
        task="classification",
        x=x,
        y=y,
        classes=tuple(str(k) for k in range(num_classes)),
        target="label",
        source=str(path),
        white=255.0,
        test=image_pair(test, test.with_name(test.name.replace("imgs", "labels")), num_classes) if own else None,
    )


def _white(x: np.ndarray) -> float:
    return 255.0 if x.ndim == 4 and x.dtype == np.uint8 else 1.0


def _inputs(path: Path, x: np.ndarray) -> np.ndarray:
    """x as (N, F) or images (N, channels, H, W), uint8 or float32 in [0, 1]; NaN and inf refused.

    Tables keep the type that they came in, where torch has it: a copy in float64 could be many times the file.
    """
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool) or np.iscomplexobj(x):
        raise UserError(f"{path}: x holds {x.dtype}; it must hold numbers")
    if x.ndim not in (2, 3, 4) or 0 in x.shape:
        raise UserError(f"{path}: x has shape {x.shape}; it must be (N, features), (N, H, W) or (N, H, W, channels)")
    _refuse(path, "x", x, _not_finite)
    x = np.ascontiguousarray(x)
    if x.ndim == 2:
        return x if x.dtype in TORCH_TYPES else x.astype(np.float64)
    if x.dtype != np.uint8:
        if x.min() < 0 or x.max() > 1:
            raise UserError(f"{path}: pixels from {x.min()} to {x.max()}; store images as uint8, or as numbers in "
                            "[0, 1]")  # fmt: skip
        x = x.astype(np.float32, copy=False)
    if x.ndim == 3:
        return x[:, None]
    if x.shape[1] not in (1, 3) and x.shape[3] not in (1, 3):
        raise UserError(f"{path}: x has shape {x.shape}; images have 1 or 3 channels, on axis 1 or last")
    return x if x.shape[1] in (1, 3) else np.moveaxis(x, 3, 1)


def _without_nan(path: Path, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, torch.Tensor | None]:
    """x and y without the rows that have a NaN, and the numbers of the rows kept (None: all)."""
    whole = ~(_bad(x, np.isnan).reshape(len(x), -1).any(1) | _bad(y, np.isnan))
    if whole.all():
        return x, y, None
    if not whole.any():
        raise UserError(f"{path}: every row has a missing value (nan)")
    return x[whole], y[whole], torch.from_numpy(np.flatnonzero(whole))


def _refuse(path: Path, name: str, values: np.ndarray, bad: Callable[[np.ndarray], np.ndarray]) -> None:
    """The first bad value of an array of floats is an error with its place."""
    wrong = _bad(values, bad)
    if not wrong.any():
        return
    place = tuple(int(index) for index in np.unravel_index(wrong.argmax(), wrong.shape))
    drop = ", or train with drop_missing (--drop-missing)" if np.isnan(values[place]) else ""
    raise UserError(f"{path}: {name}{list(place)} is {values[place]}; correct or remove row {place[0]} (from 0){drop}")


def _bad(values: np.ndarray, bad: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """bad(values); nothing is bad where the array is not of floats."""
    return bad(values) if np.issubdtype(values.dtype, np.floating) else np.zeros(values.shape, dtype=bool)


def _not_finite(values: np.ndarray) -> np.ndarray:
    return ~np.isfinite(values)


def _targets(
    path: Path, y: np.ndarray, task: str | None, names: np.ndarray | None
) -> tuple[str, np.ndarray, tuple[str, ...]]:
    import pandas as pd

    if not (np.issubdtype(y.dtype, np.number) or y.dtype.kind in "bU"):
        raise UserError(f"{path}: y holds {y.dtype}; it must hold numbers or texts")
    if names is None:
        cells = pd.Series([str(v) for v in y.tolist()], name="y")
        return read_target(path, cells, task)
    classes = tuple(str(name) for name in names.ravel())
    if task == "regression":
        raise UserError(f"{path}: has an array classes, so its task is classification; leave task='regression' out")
    if not np.issubdtype(y.dtype, np.integer) or len(set(classes)) < max(2, len(classes)):
        raise UserError(f"{path}: with an array classes of two or more names, y must hold labels 0, 1, …")
    check_labels(f"{path}: y", y, len(classes))
    return "classification", y.astype(np.int64), classes
