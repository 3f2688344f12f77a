"""From rows as they were read to a Dataset: divide them once, standardise all parts with the training part.

What is computed in float64 is a chunk of rows at a time, of bounded size whatever that of the data set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.datasets.dataset import Column, Dataset, Raw, Schema
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.files import read_archive

__all__ = ["check_choice", "mean_and_scale", "prepare", "select_features", "standardised", "taken"]

#: Values of a chunk: 8 MB in float64.
CHUNK = 2**20
#: Training, validation and test share of a set that brings no test part of its own.
FRACTIONS = (0.70, 0.15, 0.15)
#: Standard deviation of a target over its largest value: below this, float32 rounds away more than 0.06 % of it.
MIN_RELATIVE_SPREAD = 1e-4


def check_choice(features: Sequence[str], names: Sequence[str], where: str) -> None:
    """Raise UserError unless the features are some of these names, each chosen once."""
    if not features:
        raise UserError(f"{where}: features=[] chooses no column; leave it out to take all")
    for name in features:
        if name not in names:
            raise unknown(f"feature of {where}", name, names)
        if features.count(name) > 1:
            raise UserError(f"{where}: feature '{name}' is chosen twice")


def select_features(raw: Raw, features: Sequence[str] | None, where: str) -> Raw:
    """``raw`` with the chosen columns of numbers alone, in the order asked for."""
    if features is not None:
        if raw.x.dim() == 4:
            raise UserError(f"{where} holds images, which have no columns to choose: leave features={features} out")
        check_choice(features, raw.features, where)
        x = raw.x[:, [raw.features.index(name) for name in features]]
        raw = replace(raw, x=x, features=tuple(features))
    return replace(raw, columns=tuple(Column(name) for name in raw.features))


def prepare(raw: Raw, *, limit: int | None = None, **how: Any) -> Dataset:
    """Divide ``raw`` into training, validation and test part, and standardise all three by the training part.

    how: see ``load_data``
    """
    train, val, test, record = _divide(raw, **how)
    if limit is not None:
        if limit < 1:
            raise UserError(f"limit={limit}: give the number of training rows to keep, 1 or more")
        train, record = train[:limit], {**record, "limit": limit}
    schema = _schema(raw, train)
    tested = (raw.x, raw.y, test) if raw.test is None else (*raw.test, torch.arange(len(raw.test[1])))
    parts = ((raw.x, raw.y, train), (raw.x, raw.y, val), tested)
    record["rows"] = [len(rows) for _, _, rows in parts]
    tensors: list[Tensor] = []
    for x, y, rows in parts:
        target = y[rows].to(torch.float32 if raw.task == "regression" else torch.int64)
        tensors += [standardised(x, schema, raw.white, rows), target]
    return Dataset(raw.name, schema, *tensors, source=raw.source, split=record)


# -- a chunk of rows at a time -----------------------------------------------------------------------------------------
def taken(x: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """``x[rows]`` in chunks of up to ``CHUNK`` values (or of one row)."""
    step = max(1, CHUNK // max(1, math.prod(x.shape[1:])))
    return (x[rows[start : start + step]] for start in range(0, len(rows), step))


def standardised(x: Tensor, schema: Schema, white: float = 1.0, rows: Tensor | None = None) -> Tensor:
    """``schema.standardise`` of x (N, F), or of pixels (N, channels, height, width) from 0 to ``white``: float32.

    rows: take these (all where not given).
    """
    rows, done = torch.arange(len(x)) if rows is None else rows, 0
    result = torch.empty((len(rows), *x.shape[1:]), dtype=torch.float32)
    for chunk in taken(x, rows):
        values = chunk.to(torch.float32) / white if x.dim() == 4 else chunk.double()
        result[done : (done := done + len(chunk))] = schema.standardise(values)
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


# -- the split ---------------------------------------------------------------------------------------------------------
def _divide(
    raw: Raw,
    splits: Path | None,
    split: int,
    seed: int,
    fractions: Sequence[float] | None,
    validation: int | None,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Row indices of the training (shuffled), validation and test part, and the JSON-able record of how.

    A given split (``splits``) and a set's own test part decide the test rows; of the rest, ``validation`` rows are
    held out (None: none with a given split, ``raw.validation`` with an own test part). Otherwise a random split by
    ``fractions``, stratified for classification.
    """
    everything = np.arange(len(raw.y))
    if raw.test is None and splits is None:
        shares = FRACTIONS if fractions is None else fractions
        num_val, num_test = _sizes(raw, shares, validation)
        rest, test = _cut(raw, everything, num_test, seed)
        record = {"kind": "random", "seed": seed, "fractions": list(shares)}
        record |= {} if validation is None else {"validation": validation}
    elif fractions is not None:
        raise UserError(f"{raw.name}: its test part is given, fractions={tuple(fractions)} don't apply; "
                        "use validation=N to hold out training rows")  # fmt: skip
    elif splits is not None and raw.test is not None:
        raise UserError(f"{raw.name} has a test part of its own; leave splits={splits} out")
    else:
        if splits is None:
            test, record = everything[:0], {"kind": "own test part", "seed": seed}
            default = len(raw.y) // 6 if raw.validation is None else raw.validation
        else:
            test, default = _given_split(splits, split, len(raw.y), raw.rows), 0
            record = {"kind": "given", "file": str(splits), "split": split, "seed": seed}
        rest = np.setdiff1d(everything, test)
        num_val = record["validation"] = default if validation is None else validation
        if not 0 <= num_val < len(rest):
            raise UserError(f"{raw.name}: validation={num_val} of {len(rest)} training rows; give 0 to {len(rest) - 1}")
    train, val = _cut(raw, rest, num_val, seed)
    return *map(torch.from_numpy, (train, val, test)), record


def _given_split(path: Path, split: int, num_rows: int, rows: Tensor | None) -> np.ndarray:
    """Test rows ``test_{split}`` of an NPZ file of given splits, as indices of the rows that were kept.

    The file counts the data rows from 0, in the order of the table; ``rows`` are the numbers of the rows kept.
    """
    arrays = read_archive(path)
    if f"test_{split}" not in arrays:
        have = sorted((name for name in arrays if name.startswith("test_")), key=lambda name: (len(name), name))
        content = f"{have[0]} to {have[-1]}" if have else ", ".join(arrays) or "nothing"
        raise UserError(f"{path}: no array test_{split}; it has {content}")
    chosen = arrays[f"test_{split}"]
    where = f"{path}: test_{split}"
    if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer) or not len(chosen):
        raise UserError(f"{where} must be a list of row numbers, and is {chosen.dtype} of shape {chosen.shape}")
    total = num_rows if rows is None else int(rows.max()) + 1
    bad = np.flatnonzero((chosen < 0) | (chosen >= total))
    if len(bad):
        raise UserError(f"{where}[{bad[0]}] is row {chosen[bad[0]]}, but the table has rows 0 to {total - 1}; "
                        "is it the splits file of another table?")  # fmt: skip
    if len(np.unique(chosen)) < len(chosen):
        raise UserError(f"{where} names a row twice; every test row may appear once")
    test = chosen if rows is None else np.flatnonzero(np.isin(rows.numpy(), chosen))
    if num_rows - len(test) < 2:
        raise UserError(f"{where} takes {len(test)} of {num_rows} rows for the test and leaves too few to train on")
    return test.astype(np.int64)


def _sizes(raw: Raw, fractions: Sequence[float], validation: int | None) -> tuple[int, int]:
    """Numbers of validation and of test rows."""
    try:
        shares = tuple(float(f) for f in fractions)
    except (TypeError, ValueError):
        shares = ()
    if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6 or shares[0] == 0:
        raise UserError(f"fractions={fractions}: give three shares (train, validation, test) that sum to 1")
    num = len(raw.y)
    test = round(num * shares[2])
    val = round(num * shares[1]) if validation is None else validation
    train = num - val - test
    starved = (shares[2] > 0 and test == 0) or (validation is None and shares[1] > 0 and val == 0)
    if train < 2 or val < 0 or starved:
        raise UserError(f"{raw.name} has {num} rows, too few to divide into {max(train, 0)} training, {val} "
                        f"validation and {test} test rows; bring more rows or change fractions=")  # fmt: skip
    return val, test


def _cut(raw: Raw, rows: np.ndarray, num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle ``rows`` and cut ``num`` off their end, with the classes in proportion: (rest, cut)."""
    if num == 0:
        return np.random.default_rng(seed % 2**32).permutation(rows), rows[:0]
    from sklearn.model_selection import train_test_split

    strata = None
    if raw.task == "classification":
        strata = raw.y.numpy()[rows]
        present, counts = np.unique(strata, return_counts=True)
        if counts.min() < 2:
            rare = raw.classes[present[counts.argmin()]]
            raise UserError(f"{raw.name}: too few rows of class '{rare}' of '{raw.target}' to have it in every part of "
                            "the split; bring more, merge it with another class, or remove it")  # fmt: skip
        if min(num, len(rows) - num) < len(present):
            raise UserError(f"{raw.name}: {len(rows)} rows of {len(present)} classes can't be cut into "
                            f"{len(rows) - num} and {num} with every class in both; bring more rows or change the "
                            "fractions")  # fmt: skip
    rest, cut = train_test_split(rows, test_size=num, random_state=seed % 2**32, stratify=strata)
    return rest, cut


# -- what the training rows tell --------------------------------------------------------------------------------------
def _schema(raw: Raw, rows: Tensor) -> Schema:
    """What the training rows, and no others, tell."""
    y, statistics = raw.y[rows], _pixel_statistics if raw.x.dim() == 4 else _column_statistics
    shift, scale = statistics(raw, rows)
    regression = raw.task == "regression"
    deviation = mean_and_scale([y])[1].item() if regression else 1.0
    if regression and deviation < MIN_RELATIVE_SPREAD * y.abs().max().item():
        raise UserError(
            f"{raw.name}: the target '{raw.target}' varies by {deviation:.3g} around {y.double().mean().item():.6g}, "
            "too little for 32-bit numbers; subtract a constant from it first"
        )
    return Schema(
        **{name: getattr(raw, name) for name in ("task", "classes", "features", "target", "columns")},
        input_shape=tuple(raw.x.shape[1:]),
        x_shift=shift,
        x_scale=scale,
        y_shift=y.double().mean().item() if regression else 0.0,
        y_scale=deviation,
    )


def _column_statistics(raw: Raw, rows: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each feature; one-hot features keep their 0 and 1."""
    shift, scale = mean_and_scale(taken(raw.x, rows))
    start = 0
    for column in raw.columns:
        width = 1 if column.categories is None else len(column.categories)
        if column.categories is not None:
            shift[start : start + width], scale[start : start + width] = 0.0, 1.0
        start += width
    return tuple(shift.tolist()), tuple(scale.tolist())


def _pixel_statistics(raw: Raw, rows: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The median pixel and one standard deviation for all pixels.

    The median, because it is the background where there is one: an input of exactly 0 carries none of its weight's
    uncertainty, while a background shifted to -0.4 would add the noise of some 500 uninformative weights to every
    hidden unit of an MNIST network.
    """
    if raw.x.dtype != torch.uint8:
        values = raw.x[rows].numpy().ravel()  # a copy, which may be reordered
        values.partition(half := (len(values) - 1) // 2)
        pixels = (chunk.double().flatten() / raw.white for chunk in taken(raw.x, rows))
        return (values[half].item() / raw.white + 0.0,), (mean_and_scale(pixels)[1].item(),)  # + 0.0: no −0.0
    counts = sum(torch.bincount(chunk.flatten(), minlength=256) for chunk in taken(raw.x, rows)).double()  # exact
    values = torch.arange(256, dtype=torch.float64) / raw.white
    share = counts / counts.sum()
    middle = values[int((share.cumsum(0) < 0.5).sum())]
    mean = (share * values).sum()
    deviation = (share * (values - mean).square()).sum().sqrt().item() if (counts > 0).sum() > 1 else 1.0
    return (middle.item(),), (deviation,)
