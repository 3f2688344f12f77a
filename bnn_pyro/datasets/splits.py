"""One division of the rows into training, validation and test part, made once and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.datasets.raw import Raw
from bnn_pyro.datasets.sources import read_archive
from bnn_pyro.errors import UserError

__all__ = ["FRACTIONS", "divide", "given_split"]

#: Training, validation and test share of a set that brings no test part of its own.
FRACTIONS = (0.70, 0.15, 0.15)

_Parts = tuple[Tensor, Tensor, Tensor, dict[str, Any]]


def divide(
    raw: Raw,
    *,
    splits: str | Path | None,
    split: int,
    seed: int,
    fractions: Sequence[float] | None,
    validation: int | None,
) -> _Parts:
    """Row indices of the training (shuffled), validation and test part, and the JSON-able record of how.

    A given split (``splits``) and a set's own test part decide the test rows; of the rest, ``validation`` rows are
    held out (None: none with a given split, ``raw.validation`` with an own test part). Otherwise a random split by
    ``fractions``, stratified for classification.
    """
    labels = raw.y.numpy() if raw.task == "classification" else None
    everything = np.arange(len(raw.y))
    if raw.test is None and splits is None:
        sizes = _sizes(raw, FRACTIONS if fractions is None else fractions, validation)
        rest, test = _cut(raw, everything, sizes[2], labels, seed)
        train, val = _cut(raw, rest, sizes[1], labels, seed)
        shares = list(FRACTIONS if fractions is None else fractions)
        record: dict[str, Any] = {"kind": "random", "seed": seed, "fractions": shares}
        if validation is not None:
            record["validation"] = validation
    else:
        if fractions is not None:
            raise UserError(f"{raw.name}: its test part is given, fractions={tuple(fractions)} don't apply; "
                            "use validation=N to hold out training rows")  # fmt: skip
        if splits is not None and raw.test is not None:
            raise UserError(f"{raw.name} has a test part of its own; leave splits={splits} out")
        if splits is not None:
            test = given_split(Path(splits), split, len(raw.y), raw.rows)
            record = {"kind": "given", "file": str(splits), "split": split, "seed": seed}
            held = validation or 0
        else:
            test = everything[:0]
            record = {"kind": "own test part", "seed": seed}
            default = len(raw.y) // 6 if raw.validation is None else raw.validation
            held = default if validation is None else validation
        rest = np.setdiff1d(everything, test)
        if held < 0 or held >= len(rest):
            raise UserError(f"{raw.name}: validation={held} of {len(rest)} training rows; give 0 to {len(rest) - 1}")
        train, val = _cut(raw, rest, held, labels, seed)
        record["validation"] = held
    return *(torch.from_numpy(np.asarray(part, dtype=np.int64)) for part in (train, val, test)), record


def given_split(path: Path, split: int, num_rows: int, rows: Tensor | None = None) -> np.ndarray:
    """Test rows ``test_{split}`` of an NPZ file of given splits, as indices of the rows that were kept.

    The file counts the data rows from 0, in the order of the table. ``rows`` are the numbers of the rows kept, where
    rows with missing values were dropped.
    """
    arrays = read_archive(path)
    if f"test_{split}" not in arrays:
        have = sorted((name for name in arrays if name.startswith("test_")), key=lambda name: (len(name), name))
        tell = f"{have[0]} to {have[-1]}" if have else ", ".join(arrays) or "nothing"
        raise UserError(f"{path}: no array test_{split}; it has {tell}")
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


def _sizes(raw: Raw, fractions: Sequence[float], validation: int | None) -> tuple[int, int, int]:
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
    return train, val, test


def _cut(raw: Raw, rows: np.ndarray, num: int, labels: np.ndarray | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle ``rows`` and cut ``num`` off their end, with the classes in proportion: (rest, cut)."""
    if num == 0:
        return np.random.default_rng(seed % 2**32).permutation(rows), rows[:0]
    from sklearn.model_selection import train_test_split

    strata = None if labels is None else labels[rows]
    if strata is not None:
        _enough(raw, strata, num)
    rest, cut = train_test_split(rows, test_size=num, random_state=seed % 2**32, stratify=strata)
    return rest, cut


def _enough(raw: Raw, strata: np.ndarray, num: int) -> None:
    """Refuse what stratifying cannot do: a class of one row, or fewer rows to take (or to leave) than classes."""
    present, counts = np.unique(strata, return_counts=True)
    if counts.min() < 2:
        rare = raw.classes[present[counts.argmin()]]
        raise UserError(f"{raw.name}: too few rows of class '{rare}' of '{raw.target}' to have it in every part of the "
                        "split; bring more, merge it with another class, or remove it")  # fmt: skip
    if min(num, len(strata) - num) < len(present):
        raise UserError(f"{raw.name}: {len(strata)} rows of {len(present)} classes can't be cut into "
                        f"{len(strata) - num} and {num} with every class in both; bring more rows or change the "
                        "fractions")  # fmt: skip
