"""Where to predict for a picture: a line through one input feature, a mesh over two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.errors import UserError, unknown

__all__ = ["Grid", "grid", "line", "one_feature"]


@dataclass(frozen=True)
class Grid:
    """A mesh over two input features; predict at ``x``.

    x         (rows·columns, *input_shape) standardised inputs, the other features at their training mean
    first     (columns,) values of the horizontal feature, in its own units
    second    (rows,) values of the vertical feature
    features  the positions of the two
    schema    of the data
    """

    x: Tensor
    first: np.ndarray
    second: np.ndarray
    features: tuple[int, int]
    schema: Schema

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two features."""
        return tuple(_name(self.schema, f) for f in self.features)

    def shaped(self, values: Tensor) -> np.ndarray:
        """(rows·columns, …) values at ``x`` as (rows, columns, …), for drawing."""
        shape = (len(self.second), len(self.first))
        if len(values) != shape[0] * shape[1]:
            raise UserError(f"the prediction has {len(values)} points, but the grid {len(self.x)}; predict at grid.x")
        return values.reshape(*shape, *values.shape[1:]).double().numpy()

    def points(self, x: Tensor) -> np.ndarray:
        """The two features of standardised inputs (B, *input_shape) in their own units, (B, 2)."""
        return self.schema.unstandardise(x.cpu()).numpy()[:, list(self.features)]


def grid(data: Dataset, features: Sequence[str | int] | None = None, *, num: int = 100, margin: float = 0.15) -> Grid:
    """A mesh of num × num points over two features of a table.

    features: names or positions of two; by default the only two that there are.
    margin: how far it reaches beyond all the data, as a share of their range; 1 or more shows how the network
        extrapolates.

    Raises UserError for data without two features, or an unknown name.
    """
    if features is None:
        if data.schema.input_shape != (2,):
            raise UserError(
                f"'{data.name}' has inputs of shape {data.schema.input_shape}; name the two features to draw"
            )
        features = (0, 1)
    if len(features) != 2:
        raise UserError(f"a grid has two features, {len(features)} were named")
    picked = tuple(_position(data.schema, f) for f in features)
    x = torch.cat([data.x_train, data.x_val, data.x_test]).cpu()
    low, high = x.amin(0)[list(picked)], x.amax(0)[list(picked)]
    low, high = low - margin * (high - low), high + margin * (high - low)
    steps = torch.linspace(0, 1, num)[:, None]
    axes = low + (high - low) * steps  # (num, 2)
    mesh = torch.zeros(num, num, *data.schema.input_shape)
    mesh[..., picked[0]] = axes[None, :, 0]
    mesh[..., picked[1]] = axes[:, None, 1]
    mesh = mesh.flatten(0, 1)
    raw = data.schema.unstandardise(mesh).reshape(num, num, -1)
    return Grid(mesh, raw[0, :, picked[0]].numpy(), raw[:, 0, picked[1]].numpy(), picked, data.schema)


def line(data: Dataset, low: float | None = None, high: float | None = None, *, num: int = 400) -> Tensor:
    """Standardised inputs (num, 1) from ``low`` to ``high``, in the feature's own units.

    By default the range of the training data and half of it more on both sides.
    Raises UserError where the data have not exactly one input feature.
    """
    one_feature(data.schema)
    x = data.schema.unstandardise(data.x_train.cpu())
    span = (x.amax() - x.amin()).item()
    low = x.amin().item() - span / 2 if low is None else low
    high = x.amax().item() + span / 2 if high is None else high
    return data.schema.standardise(torch.linspace(low, high, num, dtype=torch.float64)[:, None])


def one_feature(schema: Schema) -> None:
    """Raises UserError unless the inputs are single numbers."""
    if tuple(schema.input_shape) != (1,):
        raise UserError(f"this picture is for one input feature; these inputs have shape {tuple(schema.input_shape)}")


def _name(schema: Schema, position: int) -> str:
    return schema.features[position] if schema.features else f"feature {position}"


def _position(schema: Schema, feature: str | int) -> int:
    names = list(schema.features)
    if isinstance(feature, str):
        if feature not in names:
            raise unknown("feature", feature, names)
        return names.index(feature)
    if len(schema.input_shape) != 1 or not 0 <= feature < schema.input_shape[0]:
        raise UserError(f"there is no feature {feature} in inputs of shape {tuple(schema.input_shape)}")
    return int(feature)
