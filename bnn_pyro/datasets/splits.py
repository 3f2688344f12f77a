"""Split rows into training, validation and test rows: at random, by a list, by groups, in time, or by a test part."""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnn_pyro.datasets.dataset import Raw
from bnn_pyro.dates import find_dates
from bnn_pyro.errors import UserError, refusing
from bnn_pyro.files import read_archive

#: Shares of training, validation and test rows of a data set without its own test part.
FRACTIONS = (0.70, 0.15, 0.15)
#: Row indices of the training (shuffled), validation and test part, and a JSON-able record of the split.
Division = tuple[Tensor, Tensor, Tensor, dict[str, Any]]


def divide(
    raw: Raw, *, seed: int = 0, rows: Any = None, file: tuple[Path, int] | None = None,
    by: Mapping[str, Any] = MappingProxyType({}), fractions: Sequence[float] | None = None,
    validation: int | None = None,
) -> Division:  # fmt: skip
    """Split the rows; by default at random, stratified for classification, unless ``raw`` has its own test part.

    rows        a mask (N,) of test rows, their numbers, or a tuple of row numbers: (train, test) or (train, validation,
                test). Rows that a tuple does not contain are left out
    file        (an NPZ file of test rows test_0, test_1, …, the number of one); rows are numbered as in the table
    by          {"groups" or "time": (N,) values}: see :func:`_by_values`
    fractions   shares of the parts
    validation  number of validation rows. None: by the fractions; ``raw.validation`` if there is a test part; 0 if the
                test rows are given
    """
    if not isinstance(seed, int | np.integer):
        raise UserError(f"seed must be a whole number, got {seed!r:.40}")
    everything = train = np.arange(len(raw.y))
    val = test = everything[:0]
    shares, record = FRACTIONS if fractions is None else fractions, {"kind": "given", "seed": seed}
    ways = [name for name, value in {**by, "split": rows, "splits": file}.items() if value is not None]
    if ways and raw.test is not None:
        raise UserError(f"{raw.name}: its test part is given; leave {ways[0]}= out")
    if len(ways) > 1 or (by and validation is not None):
        raise UserError(f"{raw.name}: groups, time and given test rows are three ways to divide; give one of them, and "
                        "with groups or time shares by fractions (--fractions) instead of validation")  # fmt: skip
    for kind, values in by.items():
        return _by_values(raw, kind, values, shares, seed)
    is_given = rows is not None or file is not None or raw.test is not None
    if is_given and fractions is not None:
        raise UserError(f"{raw.name}: its test part is given, so give validation=N, not fractions={tuple(fractions)}")
    held_out = validation or 0
    if not is_given:
        held_out, num_test = _sizes(raw, shares, validation)
        train, test = _cut(raw, everything, num_test, seed)
        record |= {"kind": "random", "fractions": list(shares)}
        record |= {} if validation is None else {"validation": validation}
    elif rows is not None:
        train, val, test = _lists(rows, len(everything))
    elif file is not None:
        test = _rows_of_file(*file, raw)
        train = np.setdiff1d(everything, test)
        record |= {"file": str(file[0]), "split": file[1], "validation": held_out}
    else:
        if validation is None:
            held_out = len(train) // 6 if raw.validation is None else raw.validation
        record |= {"kind": "own test part", "validation": held_out}
    if held_out and (len(val) or not 0 < held_out < len(train)):
        raise UserError(f"{raw.name}: validation={held_out} of {len(train)} training rows; give 0 to "
                        f"{len(train) - 1}, and none where the validation rows are given")  # fmt: skip
    train, more = _cut(raw, train, held_out, seed)
    if rows is not None:
        return _checked(raw, (train, np.union1d(val, more), test), record)
    return *map(torch.from_numpy, (train, more, test)), record


def _sizes(raw: Raw, fractions: Sequence[float], validation: int | None) -> tuple[int, int]:
    """Return the numbers of validation and test rows."""
    shares, num = _shares(fractions), len(raw.y)
    test = round(num * shares[2])
    val = round(num * shares[1]) if validation is None else validation
    train = num - val - test
    starved = (shares[2] > 0 and test == 0) or (validation is None and shares[1] > 0 and val == 0)
    if train < 2 or val < 0 or starved:
        raise UserError(f"{raw.name} has {num} rows, too few to divide into {max(train, 0)} training, {val} "
                        f"validation and {test} test rows; bring more rows or other shares")  # fmt: skip
    return val, test


def _shares(fractions: Sequence[float]) -> tuple[float, ...]:
    wrong = f"fractions={fractions}: give three shares (train, validation, test) that sum to 1"
    with refusing(wrong, TypeError, ValueError):
        shares = tuple(float(f) for f in fractions)
        if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6 or shares[0] == 0:
            raise ValueError
        return shares


def _cut(raw: Raw, rows: np.ndarray, num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle ``rows`` and split ``num`` of them off, stratified by class: (rest, the others)."""
    if num == 0:
        return np.random.default_rng(seed % 2**32).permutation(rows), rows[:0]
    from sklearn.model_selection import train_test_split

    strata = raw.y.numpy()[rows] if raw.has_classes else None
    try:
        rest, cut = train_test_split(rows, test_size=num, random_state=seed % 2**32, stratify=strata)
    except ValueError:
        present, counts = np.unique(strata, return_counts=True)
        rare = raw.classes[present[counts.argmin()]]
        raise UserError(f"{raw.name}: {len(rows)} rows can't be cut into {len(rows) - num} and {num} with every class "
                        f"in both: too few rows of class '{rare}' of '{raw.target}' ({counts.min()}), or in a part; "
                        "bring more, merge classes, or change the fractions") from None  # fmt: skip
    return rest, cut


def _lists(rows: Any, num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    parts = [_numbers("split=", part, num) for part in (rows if isinstance(rows, tuple) else (rows,))]
    if len(parts) == 1:
        parts = [np.setdiff1d(np.arange(num), parts[0]), *parts]
    if len(parts) > 3:
        raise UserError(f"split= has {len(parts)} lists of rows; give (train, test) or (train, validation, test)")
    if len(np.unique(np.concatenate(parts))) < sum(map(len, parts)):
        raise UserError("split= names a row twice; every row belongs to one part")
    return parts[0], parts[1] if len(parts) == 3 else parts[0][:0], parts[-1]


def _rows_of_file(path: Path, split: int, raw: Raw) -> np.ndarray:
    """Read the test rows ``test_{split}`` (numbered from 0) of a file, as indices of the rows that were not dropped."""
    arrays, name = read_archive(path), f"test_{split}"
    if name not in arrays:
        have = sorted((name for name in arrays if name.startswith("test_")), key=lambda name: (len(name), name))
        content = f"{have[0]} to {have[-1]}" if have else ", ".join(arrays) or "nothing"
        raise UserError(f"{path}: no array {name}; it has {content}")
    rows = np.arange(len(raw.y)) if raw.rows is None else raw.rows.numpy()
    chosen = _numbers(f"{path}: {name}", arrays[name], len(rows) + (0 if raw.rows is None else raw.dropped))
    if len(np.unique(chosen)) < len(chosen):
        raise UserError(f"{path}: {name} names a row twice; every test row may appear once")
    test = chosen if raw.rows is None else np.flatnonzero(np.isin(rows, chosen))
    if not len(chosen) or len(rows) - len(test) < 2:
        raise UserError(f"{path}: {name} takes {len(test)} of {len(rows)} rows for the test; give some, and leave two "
                        "or more to train on")  # fmt: skip
    return test


def _numbers(where: str, rows: Any, num: int) -> np.ndarray:
    """Convert a mask or a list of row numbers to row numbers."""
    rows = np.asarray(rows)
    rows = rows.astype(int) if rows.shape == (0,) and rows.dtype.kind == "f" else rows  # an empty list
    if rows.dtype == bool and rows.shape == (num,):
        return np.flatnonzero(rows)
    if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
        raise UserError(f"{where} is {rows.dtype} of shape {rows.shape}; give a mask of {num} rows, or row numbers")
    if len(rows) and not 0 <= rows.min() <= rows.max() < num:
        raise UserError(f"{where} names rows {rows.min()} to {rows.max()}, but there are rows 0 to {num - 1}")
    return rows.astype(np.int64)


def _by_values(raw: Raw, kind: str, values: Any, fractions: Sequence[float], seed: int) -> Division:
    """Split so that rows of equal values (N,) are in one part; for "time" the last are test, then validation rows."""
    codes, generator, shares = _codes(values, len(raw.y), kind), np.random.default_rng(seed % 2**32), _shares(fractions)
    if kind == "groups":
        codes = generator.permutation(codes.max() + 1).argsort()[codes]
    ends, is_wanted = np.bincount(codes).cumsum(), [share > 0 for share in shares]
    borders = [0, *(1 + np.abs(ends - share * len(codes)).argmin() for share in np.cumsum(shares)[:2]), len(ends)]
    borders[2] = max(borders[2], borders[1] + 1) if is_wanted[1] else borders[1]
    borders[2] = borders[2] if is_wanted[2] else len(ends)
    train, val, test = parts = [np.flatnonzero((codes >= a) & (codes < b)) for a, b in pairwise(borders)]
    if kind == "groups":  # sorted, so that each half of the validation rows consists of whole groups, except for one
        val = val[codes[val].argsort(kind="stable")]
    if any(len(part) == 0 for part, due in zip(parts, is_wanted, strict=True) if due):
        raise UserError(f"{kind}: {len(ends)} different values, of which one has up to {np.bincount(codes).max():,} of "
                        f"{len(codes):,} rows, cannot be parted in {shares}; give more, or other shares")  # fmt: skip
    record = {"kind": kind, "seed": seed, "fractions": list(fractions)}
    return _checked(raw, (generator.permutation(train), val, test), record)


def _codes(values: Any, num: int, role: str) -> np.ndarray:
    """Return the rank of each row's value among the different values, (N,) int64."""
    series = pd.Series(values).reset_index(drop=True)
    if series.dtype == "category" and not series.cat.ordered:
        series = series.astype(series.cat.categories.dtype)
    if len(series) != num:
        raise UserError(f"{role} has {len(series)} values for {num} rows; give one for each")
    if series.isna().any():
        raise UserError(f"{role}: row {int(series.isna().argmax())} (from 0) has no value; fill it in")
    try:
        if role == "time" and pd.api.types.infer_dtype(series) == "string":
            try:
                series = pd.to_datetime(series, format="ISO8601")
            except ValueError:
                if (dates := find_dates(role, series)) is None or (series := dates.read(series)).isna().any():
                    raise
        return pd.factorize(series, sort=True)[0]
    except (TypeError, ValueError):
        raise UserError(f"{role} must be numbers, dates (a text as 2024-12-31) or texts that have an order; convert it "
                        "first, such as by pandas.to_datetime") from None  # fmt: skip


def _checked(raw: Raw, parts: tuple[np.ndarray, ...], record: dict[str, Any]) -> Division:
    train, _, test = parts
    if len(train) < 2:
        raise UserError(f"{raw.name}: the split leaves {len(train)} rows to train on; two are the fewest")
    if raw.has_classes:
        absent = np.flatnonzero(np.bincount(raw.y.numpy()[train], minlength=len(raw.classes)) == 0)
        if len(absent):
            raise UserError(f"{raw.name}: class '{raw.classes[absent[0]]}' of '{raw.target}' has no training row in "
                            "this split; choose another, or leave its rows out")  # fmt: skip
    digest = hashlib.sha256(np.sort(test).astype(np.int64).tobytes()).hexdigest()[:16]
    return *map(torch.from_numpy, parts), {**record, "test_rows": digest}
