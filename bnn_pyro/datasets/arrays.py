"""NPZ files: arrays ``x`` and ``y``, or an official pair of images and labels, each with one array ``arr_0``.

Rows of arrays are counted from 0. And noise images.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.cells import read_target
from bnn_pyro.datasets.dataset import Raw, Schema
from bnn_pyro.datasets.rows import CHUNK, TORCH_TYPES, OnDisk, is_large
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.files import existing, read_archive

#: Of files of one picture each, see ``images``.
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


def load_archive(
    path: str | Path, *, target: str | None = None, task: str | None = None, drop_missing: bool = False
) -> Raw:
    """Read an NPZ file: x (N, F), (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W) and y (N,).

    With an array ``classes`` of K names, y must be labels 0 … K−1. Of an official pair, give the file of images; a
    training file takes the test file beside it as its own test part.
    """
    path = existing(path)
    if path.suffix.lower() == ".npy":
        return _load_array(path, target, task, drop_missing)
    arrays = read_archive(path)
    if "x" not in arrays and "arr_0" in arrays:
        return _pair(path, task)
    if "x" not in arrays or "y" not in arrays:
        raise UserError(f"{path}: has {', '.join(arrays) or 'no arrays'}; it needs arrays x and y (or one arr_0)")
    if target is not None and target != "y":
        raise UserError(f"{path}: the target of an NPZ file is its array y; leave target='{target}' out")
    raw = raw_arrays(path, arrays.pop("x"), arrays["y"], task, arrays.get("classes"), drop_missing)
    return replace(raw, name=path.stem)


def _load_array(path: Path, target: str | None, task: str | None, drop_missing: bool) -> Raw:
    """An NPY file: a table with the target among its columns x1, x2, …, or x.npy (NAME_x.npy) with y.npy beside it."""
    array = read_array(path)
    x, features = on_disk(path, array), {}
    beside = path.with_name(f"{path.stem[:-1]}y.npy")
    if target is not None:
        names = [f"x{k + 1}" for k in range(array.shape[1] if array.ndim == 2 else 0)]
        if target not in names:
            raise UserError(f"{path}: has no column '{target}'; its {len(names)} columns are x1, x2, …")
        columns = [k for k, name in enumerate(names) if name != target]
        y, features = np.array(array[:, names.index(target)]), {"features": tuple(names[k] for k in columns)}
        x = x.of_columns(columns) if isinstance(x, OnDisk) else x[:, columns]
    elif path.stem[-1:] == "x" and beside.is_file():
        y = np.array(read_array(beside))
    else:
        raise UserError(f"{path}: which column is the target? Give target= (--target) x1, x2, …, or call the inputs "
                        "x.npy, with the targets as y.npy beside them")  # fmt: skip
    raw = raw_arrays(path, x if isinstance(x, OnDisk) else np.array(x), y, task, None, drop_missing)
    return replace(raw, name=path.stem, target=target or "y", **features)


def on_disk(where: str | Path, x: Any) -> Any:
    """A large array that is a file's as the rows of that file; anything else as it is."""
    if not (isinstance(x, np.memmap) and isinstance(x.base, mmap.mmap) and is_large(x.shape)):
        return x
    if not x.flags.c_contiguous:
        raise UserError(f"{where}: its rows lie apart, in Fortran's order; save numpy.ascontiguousarray of it")
    image_arrays(where, np.array(x[:1]))
    return OnDisk(x.filename, x.dtype, x.shape, x.offset)


def read_array(path: Path) -> np.memmap:
    """A mapped NPY file of numbers; nothing in it is executed."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise UserError(f"{path}: is no NPY file of plain numbers, or damaged; save it with numpy.save") from None


def raw_arrays(
    path: str | Path,
    x: np.ndarray | OnDisk,
    y: np.ndarray,
    task: str | None = None,
    classes: Sequence[str] | None = None,
    drop_missing: bool = False,
) -> Raw:
    """Arrays as in :func:`load_archive`; ``path`` is what errors call them."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if 0 in (x.shape or [0]) or y.ndim != 1 or len(y) != len(x):
        raise UserError(f"{path}: x has shape {x.shape} and y {y.shape}; x needs rows, and y one value for each, shape "
                        "(N,)")  # fmt: skip
    rows = None
    if drop_missing and isinstance(x, OnDisk):
        raise UserError(f"{path}: is not read into memory, so that no rows are dropped; leave missing='drop' out "
                        "(--missing drop), or set BNN_PYRO_MEMORY to more GiB")  # fmt: skip
    if drop_missing:
        _refuse(path, "x", x, allow_nan=True)
        _refuse(path, "y", y, allow_nan=True)
        keep = ~((x != x).reshape(len(x), -1).any(1) | (y != y))  # nan alone differs from itself
        if not keep.any():
            raise UserError(f"{path}: every row has a missing value (nan)")
        if not keep.all():
            x, y, rows = x[keep], y[keep], torch.from_numpy(np.flatnonzero(keep))
    x, white = image_arrays(path, x)
    _refuse(path, "y", y)
    task, labels, classes = _targets(path, y, task, classes)
    features = () if len(x.shape) == 4 else tuple(f"x{i + 1}" for i in range(x.shape[1]))
    return Raw(
        name=str(path),
        task=task,
        x=x if isinstance(x, OnDisk) else torch.from_numpy(x),
        y=torch.from_numpy(labels),
        classes=classes,
        features=features,
        source=str(path),
        white=white,
        rows=rows,
    )


def read_inputs(path: str | Path) -> tuple[Tensor, float]:
    """The inputs of an NPZ file, (N, F) or images (N, channels, H, W), and the value of a white pixel.

    Targets are not needed.
    """
    path = Path(path)
    arrays = {"x": np.array(read_array(path))} if path.suffix.lower() == ".npy" else read_archive(path)
    key = "x" if "x" in arrays else "arr_0"
    if key not in arrays:
        raise UserError(f"{path}: has {', '.join(arrays) or 'no arrays'}; it needs an array x (or arr_0)")
    x, white = image_arrays(Path(path), arrays[key])
    return torch.from_numpy(x), white


def read_pair(images: Path, labels: Path, num_classes: int) -> tuple[Tensor, Tensor]:
    """An official pair of files, NPZ or idx: images (N, 1, H, W) uint8 and labels (N,) int64."""
    x, y = _official(images), _official(labels)
    if x.dtype != np.uint8 or x.ndim != 3:
        raise UserError(f"{images}: is {x.dtype} of shape {x.shape}; images are uint8 of shape (N, H, W)")
    if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"{labels}: is {y.dtype} of shape {y.shape}; the {len(x)} images of {images} need ({len(x)},) "
                        "integers")  # fmt: skip
    _check_labels(str(labels), y, num_classes)
    return torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y.astype(np.int64))


def _official(path: Path) -> np.ndarray:
    if path.suffix.lower() == ".npz":
        arrays = read_archive(path)
        if list(arrays) != ["arr_0"]:
            raise UserError(f"{path}: has {', '.join(arrays) or 'no arrays'}; an official file has one, arr_0")
        return arrays["arr_0"]
    from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

    try:
        return read_sn3_pascalvincent_tensor(str(path), strict=False).numpy()
    except (OSError, ValueError, RuntimeError, AssertionError, TypeError, KeyError):
        raise UserError(f"{path}: is missing, damaged or no idx file; delete it and it is downloaded again") from None


def _check_labels(where: str, y: np.ndarray, num_classes: int) -> None:
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
    x, y = read_pair(path, labels, num_classes)
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
        test=read_pair(test, test.with_name(test.name.replace("imgs", "labels")), num_classes) if own else None,
    )


def image_arrays(path: str | Path, x: np.ndarray | OnDisk, first: int = 0) -> tuple[np.ndarray | OnDisk, float]:
    """x as (N, F) or images (N, channels, H, W), uint8 or float32 in [0, 1], and a white pixel; NaN and inf refused.

    Tables keep the type that they came in, where torch has it: a copy in float64 could be many times the file. A file
    is read a chunk at a time.   first: number of the first row.
    """
    if isinstance(x, OnDisk):
        step = max(1, CHUNK // max(1, math.prod(x.shape[1:])))
        for start in range(0, len(x), step):
            white = image_arrays(path, x[start : start + step].numpy(), start)[1]
        return x, white
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool) or np.iscomplexobj(x):
        raise UserError(f"{path}: x holds {x.dtype}; it must hold numbers")
    if x.ndim not in (2, 3, 4) or 0 in x.shape:
        raise UserError(f"{path}: x has shape {x.shape}; it must be (N, features), (N, H, W) or (N, H, W, channels)")
    _refuse(path, "x", x, first=first)
    x = np.ascontiguousarray(x)
    if x.ndim == 2:
        return x if x.dtype in TORCH_TYPES else x.astype(np.float64), 1.0
    white = 255.0 if x.dtype == np.uint8 else 1.0
    if x.dtype != np.uint8:
        if x.min() < 0 or x.max() > 1:
            raise UserError(f"{path}: pixels from {x.min()} to {x.max()}; store images as uint8, or as numbers in "
                            "[0, 1]")  # fmt: skip
        x = x.astype(np.float32, copy=False)
    if x.ndim == 3:
        return x[:, None], white
    if x.shape[1] not in (1, 3) and x.shape[3] not in (1, 3):
        raise UserError(f"{path}: x has shape {x.shape}; images have 1 or 3 channels, on axis 1 or last")
    return x if x.shape[1] in (1, 3) else np.moveaxis(x, 3, 1), white


def _refuse(path: str | Path, name: str, values: np.ndarray, allow_nan: bool = False, first: int = 0) -> None:
    """The first value of an array of floats that is infinite, or nan, is an error with its place."""
    if not np.issubdtype(values.dtype, np.floating):
        return
    wrong = np.isinf(values) if allow_nan else ~np.isfinite(values)
    if wrong.any():
        value, (row, *rest) = values[wrong][0], (int(at) for at in np.unravel_index(wrong.argmax(), wrong.shape))
        row += first
        way = "'drop' (--missing drop)" if isinstance(path, Path) else "'drop' or 'indicator'"
        drop = f", or give missing={way}" if np.isnan(value) else ""
        raise UserError(f"{path}: {name}{[row, *rest]} is {value}; correct or remove row {row} (from 0)"
                        f"{drop}")  # fmt: skip


def _targets(
    path: str | Path, y: np.ndarray, task: str | None, names: Sequence[str] | None
) -> tuple[str, np.ndarray, tuple[str, ...]]:
    import pandas as pd

    if not (np.issubdtype(y.dtype, np.number) or y.dtype.kind in "bU"):
        raise UserError(f"{path}: y holds {y.dtype}; it must hold numbers or texts")
    if names is None or y.dtype.kind == "U":
        cells = pd.Series(y if y.dtype.kind in "iuf" else [str(v) for v in y.tolist()], name="y")
        return read_target(path, cells, task, names)
    classes = tuple(str(name) for name in np.ravel(names))
    if task not in (None, "classification", "ordinal"):
        raise UserError(f"{path}: has an array classes, so its task is classification; leave task='{task}' out")
    if y.dtype.kind not in "iuf" or (y != np.round(y)).any() or len(set(classes)) < max(2, len(classes)):
        raise UserError(f"{path}: with an array classes of two or more names, y must hold labels 0, 1, …")
    _check_labels(f"{path}: y", y, len(classes))
    return task or "classification", y.astype(np.int64), classes


# -- noise -------------------------------------------------------------------------------------------------------------
def noise_images(kind: str, num: int, schema: Schema, seed: int = 0) -> Tensor:
    """Standardised noise (num, channels, height, width), every pixel drawn by itself.

    kind  "uniform": in [0, 1]; "gaussian": standard Normal after standardisation, so with the schema's shift and scale
          in pixels; not clipped
    """
    if not schema.is_image:
        raise UserError(f"noise images don't fit a model of {len(schema.features)} features; give it a table")
    if kind not in ("gaussian", "uniform"):
        raise unknown("kind of noise", kind, ("gaussian", "uniform"))
    if num < 1:
        raise UserError(f"num={num}: give the number of noise images, 1 or more")
    generator = torch.Generator().manual_seed(seed)
    shape = (num, *schema.input_shape)
    if kind == "gaussian":
        return torch.randn(shape, generator=generator)
    return schema.standardise(torch.rand(shape, generator=generator))
