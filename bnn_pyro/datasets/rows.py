"""Large inputs that stay in a file: rows are read and standardised when they are needed; see :func:`is_large`.

:class:`OnDisk` replaces a tensor of raw inputs in ``prepare``, and :class:`Rows` a tensor of standardised inputs where
mini-batches are taken: indexing reads and standardises the chosen rows, bit for bit as in memory.
"""

import math
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError, first_line, refusing
from bnn_pyro.files import cache_root, telling
from bnn_pyro.isolation import isolated

#: Number of values of a chunk: 8 MB in float64.
CHUNK = 2**20
#: Numpy types that torch has too.
TORCH_TYPES = tuple(np.dtype(name) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "?"))
CPU = torch.device("cpu")
#: A column of at least three different values has long tails if one of them is further than this number
#: of standard deviations from the mean.
LONG = 6.0
#: Interquartile range of a standard Normal; and the smallest range of standardised columns, below which half of the
#: values count as equal.
NORMAL_RANGE, MIN_RANGE = 1.3489795, 1e-5


def is_large(shape: Sequence[int]) -> bool:
    """Return whether float32 inputs of shape (N, …) would take more than ``BNN_PYRO_MEMORY`` GiB (by default 1)."""
    text = os.environ.get("BNN_PYRO_MEMORY") or "1"
    with refusing(f"BNN_PYRO_MEMORY is a number of GiB, got '{text}'", ValueError, OverflowError):
        return 4 * math.prod(shape) > int(float(text) * 2**30)


def for_torch(x: np.ndarray) -> Tensor:
    """Convert a table (N, F), in its own type if torch has it, or images, to (N, channels, H, W) uint8 or float32."""
    if x.ndim < 3:
        return torch.from_numpy(x if x.dtype in TORCH_TYPES else x.astype(np.float64))
    x = x[:, None] if x.ndim == 3 else x
    x = x if x.shape[1] in (1, 3) else np.moveaxis(x, 3, 1)
    return torch.from_numpy(x if x.dtype == np.uint8 else x.astype(np.float32, copy=False))


class OnDisk:
    """An array (N, …) in a file, whose rows are read when it is indexed along the first axis.

    path, dtype, shape, offset: as in ``numpy.memmap``; images (N, H, W) and (N, H, W, channels) are read as (N,
        channels, H, W).   columns: columns of a table to read, in this order; None: all.
    owner: an open temporary file that is removed when it is closed.
    """

    def __init__(self, path: str | Path, dtype: Any, shape: Sequence[int], offset: int = 0, columns: Any = None,
                 owner: Any = None) -> None:  # fmt: skip
        self.where, self.owner = (str(path), np.dtype(dtype), tuple(shape), offset, columns), owner
        # Not a memory map: reading one row of it would load up to a MiB around the row.
        self.file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.file)
        row = self[:1]
        self.shape, self.dtype = torch.Size([shape[0], *row.shape[1:]]), row.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Tensor | slice | tuple[slice, Sequence[int]]) -> Tensor | Self:
        path, dtype, shape, offset, columns = self.where
        if isinstance(rows, tuple):  # all rows, some of the columns
            some = np.arange(self.shape[1])[rows[1]] if columns is None else columns[rows[1]]
            return OnDisk(path, dtype, shape, offset, some, self.owner)
        size = dtype.itemsize * math.prod(shape[1:])
        numbers = range(shape[0])[rows] if isinstance(rows, slice) else rows.tolist()
        at_once = isinstance(numbers, range) and numbers.step == 1
        spans = [(numbers.start, len(numbers))] if at_once else [(number, 1) for number in numbers]
        parts = [os.pread(self.file, size * num, offset + size * start) for start, num in spans]
        chunk = np.ndarray((sum(num for _, num in spans), *shape[1:]), dtype, bytearray().join(parts))
        return for_torch(chunk if columns is None else chunk[:, columns])

    def __reduce__(self) -> tuple[Any, ...]:
        return OnDisk, self.where


@dataclass(frozen=True, eq=False)
class Rows:
    """Standardised inputs (N, *input_shape) in a file; ``x[rows]`` is float32.   numbers: row numbers (N,)."""

    source: OnDisk
    schema: Schema
    numbers: Tensor
    device: torch.device = CPU
    dtype = torch.float32

    def __len__(self) -> int:
        return len(self.numbers)

    #: (N, *input_shape).
    shape = property(lambda self: torch.Size([len(self.numbers), *self.source.shape[1:]]))

    def __getitem__(self, rows: Any) -> Tensor:
        numbers = self.numbers[rows.cpu() if isinstance(rows, Tensor) else rows]
        x = standardised(self.source, self.schema, numbers.flatten())
        return x.reshape(*numbers.shape, *self.shape[1:]).to(self.device)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Select rows like ``Tensor.index_select`` along the first axis."""
        return self[rows]

    def split(self, size: int) -> Iterator[Tensor]:
        """Read ``size`` rows at a time; yields at least one part."""
        return (self[start : start + size] for start in range(0, max(1, len(self)), size))

    def tensor_split(self, parts: int) -> list[Self]:
        """Split like ``Tensor.tensor_split``, without reading."""
        return [replace(self, numbers=numbers) for numbers in self.numbers.tensor_split(parts)]

    def to(self, device: torch.device | str) -> Self:
        """Return the same rows, which are moved to the device when they are read."""
        return replace(self, device=torch.device(device))


def part_of(x: Tensor | Rows, rows: Tensor) -> Tensor | Rows:
    """Return ``x[rows]``; rows of a file stay in the file."""
    return replace(x, numbers=x.numbers[rows.cpu()]) if isinstance(x, Rows) else x[rows]


def taken(x: Tensor | OnDisk, rows: Tensor) -> Iterator[Tensor]:
    """Yield ``x[rows]`` in chunks of up to ``CHUNK`` values (at least one row)."""
    step = max(1, CHUNK // max(1, math.prod(x.shape[1:])))
    return (x[rows[start : start + step]] for start in range(0, len(rows), step))


def standardised(x: Tensor | OnDisk, schema: Schema, rows: Tensor | None = None) -> Tensor:
    """Apply ``schema.standardise`` to rows of x (N, F), or to pixels as in ``Raw.x``; returns float32."""
    rows, done = torch.arange(len(x)) if rows is None else rows, 0
    result = torch.empty((len(rows), *x.shape[1:]), dtype=torch.float32)
    for chunk in taken(x, rows):
        values = chunk.to(torch.float32 if chunk.dim() == 4 else torch.float64)
        values = values / 255 if chunk.dim() == 4 and chunk.dtype == torch.uint8 else values
        result[done : (done := done + len(chunk))] = schema.standardise(values)
    return result


def long_tails(x: Tensor, features: Iterable[int]) -> tuple[tuple[int, float, float, float, float], ...]:
    """Return (feature, a, b, c, d) for every feature with long tails of standardised training rows (N, F).

    A network takes (asinh((x − a)/b) − c)/d in addition to x: linear near the median a and logarithmic far out, so that
    a few large values do not make the others look equal (Burbidge, Magee & Robb 1988,
    doi:10.1080/01621459.1988.10478575). b is the interquartile range divided by that of a standard Normal, or the
    median distance of the others if half of the values are equal; c and d: mean and standard deviation of the asinh.
    """
    tails = []
    for feature, column in ((f, x[:, f].double().numpy()) for f in features):
        far = len(column) and np.abs(column - column.mean()).max() > LONG * column.std()
        if not far or len(np.unique(column)) < 3:
            continue
        low, middle, high = np.quantile(column, (0.25, 0.5, 0.75))
        away = np.abs(column - middle)
        width = (high - low) / NORMAL_RANGE if high - low > MIN_RANGE else np.median(away[away > MIN_RANGE])
        curved = np.arcsinh((column - middle) / width)
        tails.append((feature, *map(float, (middle, width, curved.mean(), curved.std()))))
    return tuple(tails)


def rows_file() -> Any:
    """Create a file in ``cache_root()`` that is removed when it is closed. Raises UserError if it cannot be created."""
    with telling(place := cache_root()):
        place.mkdir(parents=True, exist_ok=True)
        return tempfile.NamedTemporaryFile(prefix="rows-", dir=place)


def stored(arg: str, rows: Iterable[tuple[np.ndarray, np.ndarray]], num: int) -> tuple[Any, np.ndarray]:
    """Collect N = ``num`` rows to (x (N, …), y (N, …)); a large x goes to a file in ``cache_root()``.

    The file is removed when this process ends. Raises UserError for a row of another shape or type than the first, for
    more or fewer rows than N, and for a full disk.
    """
    array, file, like, targets = np.empty(0), None, [], []
    for number, (x, y) in enumerate(rows):
        if number == num:
            raise UserError(f"{arg} has more rows than {num:,}; give their number, rows=")
        mine, shape = [(part.shape, part.dtype) for part in (x, y)], (num, *x.shape)
        if not number:
            like, place = mine, cache_root()
            file, array = (rows_file(), array) if is_large(shape) else (None, np.empty(shape, x.dtype))
        if mine != like:
            forms = [" and ".join(f"{dtype} {shape}" for shape, dtype in one) for one in (mine, like)]
            raise UserError(f"{arg}[{number}] is {forms[0]}, and {arg}[0] {forms[1]}; resize them in the transform")
        if file is None:
            array[number] = x
        else:
            with telling(place):
                file.write(np.ascontiguousarray(x).data)
        targets.append(y)
    if len(targets) < num:
        raise UserError(f"{arg} ends after {len(targets):,} of {num:,} rows; give their number, rows=")
    if file is not None:
        with telling(place):
            file.flush()
        array = OnDisk(file.name, like[0][1], shape, owner=file)
    return array, np.stack(targets)


def row_digests(x: Tensor, y: Tensor) -> Tensor:
    """Return a 64-bit hash of each row's inputs and target, (N,) int64: a sum of 32-bit words times odd numbers."""
    width, sums = sum(math.prod(part.shape[1:]) for part in (x, y)), []
    odd = np.random.default_rng(0).integers(2**64, size=width, dtype=np.uint64) | np.uint64(1)
    for some in zip(*(part.split(max(1, 2**20 // width)) for part in (x, y)), strict=True):
        parts = (part.detach().cpu().float().numpy().reshape(len(part), math.prod(part.shape[1:])) for part in some)
        sums.append((np.concatenate([*parts], 1) + 0.0).view(np.uint32).astype(np.uint64) @ odd)
    return torch.from_numpy(np.concatenate(sums).view(np.int64))


def read_items(
    arg: str, items: Any, rows: int | None = None, alone: bool = False
) -> tuple[np.ndarray | OnDisk, np.ndarray, Any]:
    """Read a torch data set or loader: (x (N, …), y (N, …), names of the classes or None).

    If a loader takes each row of a map-style data set once, the data set is read in its own order, so that rows keep
    their numbers; other loaders are iterated over once.
    rows: N, needed if there is no length.   alone: items may be inputs without targets, whose targets are then 0.
    Raises UserError for other items that are not pairs, another number of rows, differing shapes, or errors in reading.
    """
    names = getattr(getattr(items, "dataset", items), "classes", None)
    if batches := isinstance(items, DataLoader):
        order = items.sampler
        each = isinstance(order, RandomSampler) and not order.replacement and len(order) == len(items.dataset)
        batches = not (each or isinstance(order, SequentialSampler)) or items.collate_fn is not default_collate
        items = items if batches else items.dataset
    source = items.sampler if batches else items  # its length is the number of rows
    is_stream = isinstance(items.dataset if batches else items, IterableDataset) or not hasattr(source, "__len__")
    num = rows if is_stream else len(source)
    if num is None:
        raise UserError(f"{arg} has no length; give rows=, the number of its rows")
    if rows not in (None, num):
        raise UserError(f"{arg} has {num:,} rows, and rows={rows:,}; leave rows= out")
    if not num:
        raise UserError(f"{arg} is a torch data set without items")
    try:
        with isolated(0):  # seeds the order of a loader and random transforms
            return *stored(arg, _pairs(arg, items, batches, alone), num), names
    except UserError:
        raise
    except Exception as error:  # of the user's own code, or of a worker process that died
        line = str(error).strip().splitlines()[-1] if "Original Traceback" in str(error) else first_line(error)
        raise UserError(f"{arg} could not be read to its end ({line:.200}); correct or leave out such rows") from error


def _pairs(arg: str, items: Any, batches: bool, alone: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    by_number = not batches and hasattr(items, "__getitem__") and not isinstance(items, IterableDataset)
    for number, item in enumerate(map(items.__getitem__, range(len(items))) if by_number else items):
        parts = tuple(item) if isinstance(item, tuple | list) else (item,)
        if alone and len(parts) == 1 and not isinstance(item, dict):
            parts = *parts, np.zeros(len(parts[0]) if batches else ())
        if len(parts) != 2:
            raise UserError(f"{arg}[{number}] is a {type(item).__name__}; an item must be a pair, (input, target)")
        x, y = (np.asarray(part) if batches else np.asarray(part)[None] for part in parts)
        if len(x) != len(y):
            raise UserError(f"{arg}: batch {number} has {len(x)} inputs and {len(y)} targets")
        yield from zip(x, y.reshape(len(y), -1), strict=True)
