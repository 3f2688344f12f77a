"""All that the pictures of a run can be made of, and which kinds of pictures that allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.runs.prune import Pruning

__all__ = ["Outside", "Scene"]

#: Where so many rows have such a confidence, errors are told by doubt on a log scale as well.
SURE, SURE_SHARE = 0.99, 0.5


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

    @property
    def optimised(self) -> bool:
        """Whether the trace is that of an optimiser."""
        return not self.sampled and any(self.posterior.trace.get(name) for name in ("elbo", "log_joint"))

    @property
    def sampled(self) -> bool:
        """Whether the trace is that of a stochastic-gradient sampler."""
        return any(self.posterior.trace.get(name) for name in ("kinetic_temperature", "step_size"))

    @property
    def transitions(self) -> bool:
        """Whether the statistics are those of Hamiltonian Monte Carlo."""
        return "lp" in self.posterior.stats

    @property
    def stored(self) -> bool:
        """Whether there are test rows and several stored draws."""
        chains = self.posterior.chains
        return self.prediction is not None and chains is not None and next(iter(chains.values())).shape[:2].numel() > 1

    @property
    def classified(self) -> bool:
        """Whether there are test rows, with classes."""
        return self.prediction is not None and self.data.schema.has_classes

    @property
    def regressed(self) -> bool:
        """Whether there are test rows, with numbers."""
        return self.prediction is not None and not self.data.schema.has_classes

    @property
    def images(self) -> bool:
        """Whether the test rows are images with classes."""
        return self.classified and self.data.schema.is_image

    @property
    def draws_of_rows(self) -> bool:
        """Whether several draws say something of test rows that are no images."""
        return self.classified and self.prediction.num_draws > 1 and not self.images

    @property
    def sure(self) -> bool:
        """Whether most test rows lie in the last bin of a reliability diagram, with nothing to tell them apart."""
        return self.classified and (self.prediction.mean.amax(1) > SURE).float().mean().item() > SURE_SHARE

    @property
    def one_input(self) -> bool:
        """Whether it is a curve."""
        return not self.data.schema.has_classes and self.data.schema.input_shape == (1,)

    @property
    def two_inputs(self) -> bool:
        """Whether it is a map of classes."""
        return self.data.schema.has_classes and self.data.schema.input_shape == (2,)

    @property
    def elsewhere(self) -> bool:
        """Whether there are inputs from elsewhere beside the test rows."""
        return self.classified and bool(self.outside)

    @property
    def pruned(self) -> bool:
        """Whether weights were removed."""
        return self.pruning is not None
