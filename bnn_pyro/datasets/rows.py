"""Rows, a chunk at a time: what is computed in float64 is so large as a chunk, whatever the size of the data set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from bnn_pyro.datasets.dataset import Schema

__all__ = ["chunks", "mean_and_scale", "median", "standardised", "taken"]

#: Values of a chunk: 8 MB in float64.
CHUNK = 2**20


def chunks(num: int, shape: Sequence[int]) -> Iterator[slice]:
    """The rows 0 … num − 1, each of that shape, in slices of up to ``CHUNK`` values (or of one row)."""
    step = max(1, CHUNK // max(1, math.prod(shape)))
    return (slice(start, start + step) for start in range(0, num, step))


def taken(x: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """``x[rows]`` in chunks."""
    return (x[rows[part]] for part in chunks(len(rows), x.shape[1:]))


def standardised(x: Tensor, schema: Schema, white: float = 1.0, rows: Tensor | None = None) -> Tensor:
    """``schema.standardise`` of x (N, F), or of pixels (N, channels, height, width) from 0 to ``white``: float32.

    rows: take these (all where not given).
    """
    num = len(x) if rows is None else len(rows)
    result = torch.empty((num, *x.shape[1:]), dtype=torch.float32)
    for part in chunks(num, x.shape[1:]):
        chunk = x[part] if rows is None else x[rows[part]]
        result[part] = schema.standardise(chunk.to(torch.float32) / white if x.dim() == 4 else chunk.double())
    return result


def mean_and_scale(parts: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over the first axis of rows that come in parts, float64.

    The scale is 1 where all values are equal (rounding would leave 1e-17, not 0). Parts are put together as in Chan,
    Golub & LeVeque 1983, "Algorithms for computing the sample variance".
    """
    figures = ((len(x), x.mean(0), x.std(0, correction=0), x.amin(0), x.amax(0)) for x in map(Tensor.double, parts))
    _, mean, deviation, low, high = reduce(_pooled, figures)
    return mean, torch.where(low == high, 1.0, deviation)


def _pooled(a: tuple, b: tuple) -> tuple:
    """(number, mean, standard deviation, smallest, largest) of two parts -> of both."""
    share = b[0] / (a[0] + b[0])
    apart = b[1] - a[1]
    variance = (1 - share) * a[2].square() + share * b[2].square() + share * (1 - share) * apart.square()
    return a[0] + b[0], a[1] + share * apart, variance.sqrt(), a[3].minimum(b[3]), a[4].maximum(b[4])


def median(x: Tensor, rows: Tensor) -> float:
    """The (lower) median of all values of ``x[rows]``, which are float32 and not negative.

    The bits of such numbers are in their order: counted by the upper 16, then, of those that are in the middle, by the
    lower 16. Nothing is sorted or copied.
    """
    below, upper = (len(rows) * math.prod(x.shape[1:]) - 1) // 2, None
    for _ in range(2):
        counts = torch.zeros(2**16, dtype=torch.int64)
        for chunk in taken(x, rows):
            bits = (chunk.flatten() + 0.0).view(torch.int32)  # + 0.0: -0.0 is 0.0
            first = bits >> 16
            counts += torch.bincount(first if upper is None else bits[first == upper] & 0xFFFF, minlength=2**16)
        passed = counts.cumsum(0)
        middle = int((passed <= below).sum())
        below -= int(passed[middle] - counts[middle])
        upper, lower = (middle, 0) if upper is None else (upper, middle)
    return torch.tensor(upper << 16 | lower, dtype=torch.int32).view(torch.float32).item()
