"""The protocol of inference: a frozen dataclass whose fields are its settings, with one verb, ``run``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

from torch import nn

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.posterior import Posterior

__all__ = ["LIMITS", "Method", "Report"]

#: Called with (steps done, of how many, figures to show).
Report = Callable[[int, int, Mapping[str, float | str]], None]


#: What the draws of a method tend to as it is given more time.
LIMITS: dict[str, str] = {
    "posterior": "the exact posterior",
    "posterior at step size 0": "the exact posterior, but for a bias that falls with the step size",
    "best of a family": "the member of a family that is closest to the posterior",
    "normal at the mode": "a Normal at a mode of the posterior, exact where the log joint is quadratic",
    "points": "one set of weights, or a few, with nothing said of what lies between them",
}


class Method(Protocol):
    """One way to infer.

    ``limit``, a key of ``LIMITS``, is what it claims, and what the checks of ``trust`` hold it to.
    """

    limit: ClassVar[str]

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
