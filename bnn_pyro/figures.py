"""Which picture a report shows for which task and shape of data: one table, and the drawing of it into files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction
from bnn_pyro.report import Picture

__all__ = ["FIGURES", "Figure", "Outside", "Scene", "draw_all", "pictures"]


@dataclass(frozen=True)
class Outside:
    """Inputs from elsewhere (N, *input_shape), standardised, and what run and baseline say of them."""

    name: str
    x: Tensor
    prediction: Prediction
    baseline: Prediction | None = None


@dataclass(frozen=True)
class Scene:
    """All that a picture can be made of; predictions are for the test rows, None where there are none."""

    posterior: Posterior
    baseline: Posterior | None
    data: Dataset
    prediction: Prediction | None
    baseline_prediction: Prediction | None
    outside: Sequence[Outside] = field(default_factory=tuple)


@dataclass(frozen=True)
class Figure:
    """A line of the table: when it applies, how it is drawn, and what it honestly shows."""

    title: str
    sentence: str
    applies: Callable[[Scene], bool]
    draw: Callable[[Scene], object]
    wide: bool = False


FIGURES: dict[str, Figure] = {}


def draw_all(scene: Scene, folder: Path) -> None:
    """Draw every figure that applies."""


def pictures(scene: Scene, folder: Path) -> list[Picture]:
    """The figures there are."""
    return []
