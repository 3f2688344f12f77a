"""From rows as they were read to a Dataset: divide them once, standardise all parts with the training part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.datasets.raw import Raw
from bnn_pyro.datasets.rows import mean_and_scale, median, standardised, taken
from bnn_pyro.datasets.splits import divide
from bnn_pyro.errors import UserError

__all__ = ["prepare"]

#: Standard deviation of a target over its largest value: below this, float32 rounds away more than 0.06 % of it.
MIN_RELATIVE_SPREAD = 1e-4


def prepare(
    raw: Raw,
    *,
    splits: str | Path | None = None,
    split: int = 0,
    seed: int = 0,
    fractions: Sequence[float] | None = None,
    validation: int | None = None,
    limit: int | None = None,
) -> Dataset:
    """Divide ``raw`` into training, validation and test part, and standardise all three by the training part."""
    train, val, test, record = divide(
        raw, splits=splits, split=split, seed=seed, fractions=fractions, validation=validation
    )
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
        task=raw.task,
        input_shape=tuple(raw.x.shape[1:]),
        classes=raw.classes,
        features=raw.features,
        target=raw.target,
        x_shift=shift,
        x_scale=scale,
        y_shift=y.double().mean().item() if regression else 0.0,
        y_scale=deviation,
        columns=raw.columns,
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
        pixels = (chunk.double().flatten() / raw.white for chunk in taken(raw.x, rows))
        return (median(raw.x, rows) / raw.white,), (mean_and_scale(pixels)[1].item(),)
    counts = sum(torch.bincount(chunk.flatten(), minlength=256) for chunk in taken(raw.x, rows)).double()  # exact
    values = torch.arange(256, dtype=torch.float64) / raw.white
    share = counts / counts.sum()
    middle = values[int((share.cumsum(0) < 0.5).sum())]
    mean = (share * values).sum()
    deviation = (share * (values - mean).square()).sum().sqrt().item() if (counts > 0).sum() > 1 else 1.0
    return (middle.item(),), (deviation,)
