"""The protocol of inference: a frozen dataclass whose fields are its settings, with one verb, ``run``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import nn

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.posterior import Posterior

__all__ = ["Method", "Report"]

#: Called with (steps done, of how many, figures to show).
Report = Callable[[int, int, Mapping[str, float | str]], None]


class Method(Protocol):
    """One way to infer."""

    def run(
        self,
        model: nn.Module,
        guide: nn.Module | None,
        data: Dataset,
        *,
        seed: int = 0,
        checkpoint: Checkpoint | None = None,
        report: Report | None = None,
    ) -> Posterior:
        """Infer the posterior of ``model`` given ``data``'s training rows; called inside ``isolated(seed)``.

        seed: for the order of mini-batches.   checkpoint: saved to as it asks, resumed from if it holds a state.
        """
        ...
