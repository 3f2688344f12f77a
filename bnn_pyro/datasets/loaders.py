"""Torch data sets and loaders of (input, target): read once, in memory or, where they are large, into a file."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from bnn_pyro.datasets.rows import OnDisk, stored
from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated


def read_items(what: str, items: Any, rows: int | None = None) -> tuple[np.ndarray | OnDisk, np.ndarray, Any]:
    """(x (N, …), y (N, …), names of the classes or None) of a torch data set or loader.

    Of a loader that takes each row of a map-style data set once, in whatever order, the data set is read in its own
    order, so that rows keep their numbers; of any other, what its one pass gives.

    rows: N, needed where there is no length.   Raises UserError for items or batches that are no pair, another number
        of rows, or rows of other shapes.
    """
    names = getattr(getattr(items, "dataset", items), "classes", None)
    items = items.dataset if isinstance(items, DataLoader) and _takes_each_once(items) else items
    batches = isinstance(items, DataLoader)
    source = items.sampler if batches else items  # what has the number of rows
    if isinstance(items.dataset if batches else items, IterableDataset) or not hasattr(source, "__len__"):
        if rows is None:
            raise UserError(f"{what} has no length; give rows=, the number of its rows")
        num = rows
    else:
        num = len(source)
        if rows not in (None, num):
            raise UserError(f"{what} has {num:,} rows, and rows={rows:,}; leave rows= out")
    if not num:
        raise UserError(f"{what} is a torch data set without items")
    with isolated(0):  # a loader's order, and what a transform draws
        return *stored(what, _pairs(what, items, batches), num), names


def _takes_each_once(loader: DataLoader) -> bool:
    """Whether a loader of a map-style data set changes nothing but the order of the rows."""
    sampler = loader.sampler
    whole = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == len(loader.dataset)
    )
    return whole and loader.collate_fn is default_collate


def _pairs(what: str, items: Any, batches: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each row's input and target, of single items or of batches."""
    by_number = not batches and hasattr(items, "__getitem__") and not isinstance(items, IterableDataset)
    for number, item in enumerate(map(items.__getitem__, range(len(items))) if by_number else items):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(f"{what}[{number}] is a {type(item).__name__}; an item must be a pair, (input, target)")
        x, y = map(np.asarray, item)
        if not batches:
            yield x, y.reshape(-1)
        elif len(x) != len(y):
            raise UserError(f"{what}: batch {number} has {len(x)} inputs and {len(y)} targets")
        else:
            yield from zip(x, y.reshape(len(y), -1), strict=True)
