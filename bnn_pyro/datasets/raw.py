"""What a loader hands over: rows as they were read, and the choice of their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bnn_pyro.datasets.dataset import Column
from bnn_pyro.errors import UserError, unknown

__all__ = ["Raw", "choose", "no_features"]


@dataclass(frozen=True)
class Raw:
    """Rows as they were read, neither divided nor standardised.

    x      (N, F) numbers of any type, or (N, channels, height, width): uint8 of 0 … white, or float32 in [0, 1] where
           white is 1
    y      (N,) float64 (regression) or int64 labels 0 … K−1 (classification)
    test   x and y of the set's own test part, None where it has none
    white  the value of a white pixel: images are divided by it
    rows   (N,) numbers of the rows in the file, counted from 0, where rows were dropped; None: all are there
    validation  training rows to hold out where there is an own test part; None: a sixth (10,000 of MNIST)
    """

    name: str
    task: str
    x: Tensor
    y: Tensor
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    target: str = "y"
    columns: tuple[Column, ...] = ()
    source: str = ""
    test: tuple[Tensor, Tensor] | None = None
    white: float = 1.0
    rows: Tensor | None = None
    validation: int | None = None


def no_features(name: str, features: Sequence[str] | None) -> None:
    """Refuse a choice of features where the inputs are images."""
    if features is not None:
        raise UserError(f"{name} holds images, which have no columns to choose: leave features={list(features)} out")


def choose(
    x: Tensor, names: Sequence[str], features: Sequence[str] | None, where: str
) -> tuple[Tensor, tuple[str, ...], tuple[Column, ...]]:
    """The chosen columns of x, in the order asked for."""
    chosen = [str(n) for n in names] if features is None else list(features)
    if not chosen:
        raise UserError(f"{where}: features=[] chooses no column; leave it out to take all")
    for name in chosen:
        if name not in names:
            raise unknown(f"feature of {where}", name, names)
        if chosen.count(name) > 1:
            raise UserError(f"{where}: feature '{name}' is chosen twice")
    if features is not None:
        x = x[:, [names.index(name) for name in chosen]]
    return x, tuple(chosen), tuple(Column(name) for name in chosen)
