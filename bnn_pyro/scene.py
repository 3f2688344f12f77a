"""All that the pictures of a run can be made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.pruned_run import Pruning

__all__ = ["Outside", "Scene"]


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
    data: Dataset
    num_draws: int
    prediction: Prediction | None
    baseline: Prediction | None = None
    outside: Sequence[Outside] = field(default_factory=tuple)
    pruning: Pruning | None = None

    def at(self, x: Tensor) -> Prediction:
        """The run's prediction elsewhere."""
        return predict(self.posterior, x, num_draws=self.num_draws)
