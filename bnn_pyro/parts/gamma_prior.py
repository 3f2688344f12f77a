"""A Normal prior whose precision is unknown itself: one for each parameter, with a Gamma hyperprior.

    τ ~ Gamma(shape, rate)        w | τ ~ Normal(0, I/τ)

With τ integrated out this is a multivariate Student t over the whole parameter, a density like any other, so that every
method takes the model as it is. A sampler may as well keep τ and draw it from its exact conditional now and then.
"""

from __future__ import annotations

import math

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

__all__ = ["GammaNormal"]


class GammaNormal(dist.TorchDistribution):
    """w with the precision τ ~ Gamma(shape, rate) integrated out; event shape that of the parameter, P numbers.

    p(w) = Γ(shape + P/2) / Γ(shape) · rate^shape · (2π)^(−P/2) · (rate + ½ Σ w²)^−(shape + P/2)
    """

    arg_constraints: dict = {"shape": constraints.positive, "rate": constraints.positive}  # noqa: RUF012
    has_rsample = True

    def __init__(
        self,
        shape: Tensor,
        rate: Tensor,
        event_shape: torch.Size,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008 (torch's own signature)
    ) -> None:
        self.shape_, self.rate = shape, rate
        super().__init__(batch_shape, event_shape, validate_args=False)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        """Reals, as one event."""
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> GammaNormal:
        """Independent copies, each with a precision of its own."""
        return GammaNormal(self.shape_, self.rate, self.event_shape, torch.Size(batch_shape))

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Draws of shape sample_shape + batch_shape + event_shape."""
        lead = torch.Size(sample_shape) + self.batch_shape
        precision = dist.Gamma(self.shape_, self.rate).rsample(lead)
        noise = torch.randn(lead + self.event_shape, device=self.rate.device, dtype=self.rate.dtype)
        return noise * _over(precision.rsqrt(), self.event_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density in nats, one a parameter."""
        power = self.shape_ + 0.5 * self._size
        constant = torch.lgamma(power) - torch.lgamma(self.shape_) + self.shape_ * self.rate.log()
        constant = constant - 0.5 * self._size * math.log(2 * math.pi)
        return constant - power * (self.rate + 0.5 * self._squares(value)).log()

    def precision_given(self, value: Tensor) -> dist.Gamma:
        """τ | w ~ Gamma(shape + P/2, rate + ½ Σ w²), for values (…, *event_shape) of batch shape (…)."""
        rate = self.rate + 0.5 * self._squares(value)
        return dist.Gamma((self.shape_ + 0.5 * self._size).expand(rate.shape), rate, validate_args=False)

    def log_prob_given(self, value: Tensor, precision: Tensor) -> Tensor:
        """log p(w | τ) in nats, one a parameter."""
        size = self._size
        return 0.5 * (size * (precision.log() - math.log(2 * math.pi)) - precision * self._squares(value))

    @property
    def _size(self) -> int:
        return self.event_shape.numel()

    def _squares(self, value: Tensor) -> Tensor:
        dims = tuple(range(-len(self.event_shape), 0))
        return value.square().sum(dims) if dims else value.square()


def _over(batch: Tensor, event_shape: torch.Size) -> Tensor:
    """A tensor of the batch's shape that broadcasts over the event."""
    return batch.reshape(batch.shape + (1,) * len(event_shape))
