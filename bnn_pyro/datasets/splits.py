"""Which rows train, validate and test: at random, by a given list, by groups, in time, or by an own test part."""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.datasets.dataset import Raw
from bnn_pyro.errors import UserError
from bnn_pyro.files import read_archive

#: Training, validation and test share of a set that brings no test part of its own.
FRACTIONS = (0.70, 0.15, 0.15)
#: Row indices of the training (shuffled), validation and test part, and the JSON-able record of how.
Division = tuple[Tensor, Tensor, Tensor, dict[str, Any]]


def divide(
    raw: Raw,
    splits: Path | None,
    split: int,
    seed: int,
    fractions: Sequence[float] | None,
    validation: int | None,
) -> Division:
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


def _shares(fractions: Sequence[float]) -> tuple[float, ...]:
    """Raises UserError unless they are three shares that sum to 1."""
    try:
        shares = tuple(float(f) for f in fractions)
    except (TypeError, ValueError):
        shares = ()
    if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6 or shares[0] == 0:
        raise UserError(f"fractions={fractions}: give three shares (train, validation, test) that sum to 1")
    return shares


def _sizes(raw: Raw, fractions: Sequence[float], validation: int | None) -> tuple[int, int]:
    """Numbers of validation and of test rows."""
    shares, num = _shares(fractions), len(raw.y)
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
    if raw.has_classes:
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


# -- rows of the user's choice ----------------------------------------------------------------------------------------
def chosen(raw: Raw, split: Any, seed: int, validation: int | None) -> Division:
    """A mask (N,) of test rows, their numbers, or a tuple of row numbers: (train, test) or (train, validation, test).

    Rows that a tuple does not name are left out. Without a tuple of three, ``validation`` of the other rows are held
    out.
    """
    num = len(raw.y)
    parts = [_numbers(part, num) for part in (split if isinstance(split, tuple) else (split,))]
    if len(parts) == 1:
        parts = [np.setdiff1d(np.arange(num), parts[0]), *parts]
    if len(parts) > 3:
        raise UserError(f"split= has {len(parts)} lists of rows; give (train, test) or (train, validation, test)")
    if len(np.unique(np.concatenate(parts))) < sum(map(len, parts)):
        raise UserError("split= names a row twice; every row belongs to one part")
    train, val, test = parts[0], parts[1] if len(parts) == 3 else parts[0][:0], parts[-1]
    if validation and not (len(parts) == 2 and 0 < validation < len(train)):
        raise UserError(f"validation={validation} can't be taken from {len(train)} training rows, or is given already")
    train, more = _cut(raw, train, validation or 0, seed)
    return _division(raw, (train, np.union1d(val, more), test), {"kind": "given", "seed": seed})


def by_values(raw: Raw, kind: str, values: Any, shares: Sequence[float], seed: int) -> Division:
    """Rows of equal values (N,) to one part, as near to the shares (train, validation, test) as they allow.

    kind  "groups": in random order; "time": the last rows test, those before them validate
    """
    codes, generator = _codes(values, len(raw.y), kind), np.random.default_rng(seed % 2**32)
    if kind == "groups":
        codes = generator.permutation(codes.max() + 1).argsort()[codes]
    train, val, test = _consecutive(codes, shares, kind)
    record = {"kind": kind, "seed": seed, "fractions": list(shares)}
    return _division(raw, (generator.permutation(train), val, test), record)


def _consecutive(codes: np.ndarray, shares: Sequence[float], what: str) -> list[np.ndarray]:
    """Rows of each part: of codes 0 … K−1 the first train, the next validate, the last test; in about these shares."""
    ends, shares = np.bincount(codes).cumsum(), _shares(shares)
    wanted = [share > 0 for share in shares]
    borders = [0, *(1 + np.abs(ends - share * len(codes)).argmin() for share in np.cumsum(shares)[:2]), len(ends)]
    borders[2] = max(borders[2], borders[1] + 1) if wanted[1] else borders[1]
    borders[2] = borders[2] if wanted[2] else len(ends)
    rows = [np.flatnonzero((codes >= a) & (codes < b)) for a, b in pairwise(borders)]
    if any(len(part) == 0 for part, due in zip(rows, wanted, strict=True) if due):
        raise UserError(f"{what}: {len(ends)} different values are too few for parts of {shares}; bring more, "
                        "or give other shares")  # fmt: skip
    return rows


def _codes(values: Any, num: int, what: str) -> np.ndarray:
    """(N,) int64: the rank of each row's value among the different ones, in their order."""
    import pandas as pd

    series = pd.Series(values).reset_index(drop=True)
    if len(series) != num:
        raise UserError(f"{what} has {len(series)} values for {num} rows; give one for each")
    if series.isna().any():
        raise UserError(f"{what}: row {int(series.isna().argmax())} (from 0) has no value; fill it in")
    try:
        if what == "time" and pd.api.types.infer_dtype(series) == "string":
            series = pd.to_datetime(series, format="ISO8601")
        return pd.factorize(series, sort=True)[0]
    except (TypeError, ValueError):
        raise UserError(f"{what} must be numbers, dates (a text as 2024-12-31) or texts that have an order; convert it "
                        "first, such as by pandas.to_datetime") from None  # fmt: skip


def _numbers(rows: Any, num: int) -> np.ndarray:
    """Row numbers, of a mask or of a list of them."""
    rows = np.asarray(rows)
    if rows.dtype == bool and rows.shape == (num,):
        return np.flatnonzero(rows)
    if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
        raise UserError(f"split= is {rows.dtype} of shape {rows.shape}; give a share, a mask of {num} rows, or a list "
                        "of row numbers")  # fmt: skip
    if len(rows) and not 0 <= rows.min() <= rows.max() < num:
        raise UserError(f"split= names rows {rows.min()} to {rows.max()}, but there are rows 0 to {num - 1}")
    return rows.astype(np.int64)


def _division(raw: Raw, parts: tuple[np.ndarray, ...], record: dict[str, Any]) -> Division:
    """Raises UserError for too few training rows, or a class without any."""
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
