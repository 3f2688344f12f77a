"""From rows as they were read to a Dataset: divide them once, standardise all parts with the training part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bnn_pyro.datasets.dataset import Column, Dataset, Schema
from bnn_pyro.datasets.raw import Raw
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
    x_test, y_test = raw.test if raw.test is not None else (raw.x[test], raw.y[test])
    schema = _schema(raw, raw.x[train], raw.y[train])
    parts = ((raw.x[train], raw.y[train]), (raw.x[val], raw.y[val]), (x_test, y_test))
    record["rows"] = [len(y) for _, y in parts]
    tensors: list[Tensor] = []
    for x, y in parts:
        tensors += [schema.standardise(raw.units(x)), y.to(torch.float32 if raw.task == "regression" else torch.int64)]
    return Dataset(raw.name, schema, *tensors, source=raw.source, split=record)


def _schema(raw: Raw, x: Tensor, y: Tensor) -> Schema:
    shift, scale = _pixel_statistics(x, raw.white) if x.dim() == 4 else _column_statistics(x, raw.columns)
    regression = raw.task == "regression"
    deviation = _scale(y.double()).item() if regression else 1.0
    if regression and deviation < MIN_RELATIVE_SPREAD * y.abs().max().item():
        raise UserError(
            f"{raw.name}: the target '{raw.target}' varies by {deviation:.3g} around {y.double().mean().item():.6g}, "
            "too little for 32-bit numbers; subtract a constant from it first"
        )
    return Schema(
        task=raw.task,
        input_shape=tuple(x.shape[1:]),
        classes=raw.classes,
        features=raw.features,
        target=raw.target,
        x_shift=shift,
        x_scale=scale,
        y_shift=y.double().mean().item() if regression else 0.0,
        y_scale=deviation,
        columns=raw.columns,
    )


def _scale(x: Tensor) -> Tensor:
    """Standard deviation over the first axis; 1 where all values are equal (rounding would leave 1e-17, not 0)."""
    constant = x.amax(0) == x.amin(0)
    return torch.where(constant, 1.0, x.std(0, correction=0))


def _column_statistics(x: Tensor, columns: tuple[Column, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each feature; one-hot features keep their 0 and 1."""
    x = x.double()
    shift, scale = x.mean(0), _scale(x)
    start = 0
    for column in columns:
        width = 1 if column.categories is None else len(column.categories)
        if column.categories is not None:
            shift[start : start + width], scale[start : start + width] = 0.0, 1.0
        start += width
    return tuple(shift.tolist()), tuple(scale.tolist())


def _pixel_statistics(x: Tensor, white: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The median pixel and one standard deviation for all pixels.

    The median, because it is the background where there is one: an input of exactly 0 carries none of its weight's
    uncertainty, while a background shifted to -0.4 would add the noise of some 500 uninformative weights to every
    hidden unit of an MNIST network.
    """
    if x.dtype != torch.uint8:
        pixels = x.double().flatten() / white
        return (pixels.median().item(),), (_scale(pixels).item(),)
    counts = torch.bincount(x.flatten(), minlength=256).double()  # exact, and no float copy of the images
    values = torch.arange(256, dtype=torch.float64) / white
    share = counts / counts.sum()
    median = values[int((share.cumsum(0) < 0.5).sum())]
    mean = (share * values).sum()
    deviation = (share * (values - mean).square()).sum().sqrt().item() if (counts > 0).sum() > 1 else 1.0
    return (median.item(),), (deviation,)
