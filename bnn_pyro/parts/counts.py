"""Likelihoods of counts 0, 1, 2, …, by the logarithm of their mean: Poisson and negative binomial.

mean = shift · exp f, where the shift of the schema is the training targets' mean
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pyro.distributions as dist
import torch
from scipy import special
from torch import Tensor

from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.observed import Likelihood

__all__ = ["NegativeBinomial", "NegativeBinomialMixture", "Poisson", "PoissonMixture"]

#: Where f is cut off: e¹⁵ times the mean. Beyond it 32-bit numbers would soon end.
MAX_LOG = 15.0


class PoissonMixture(Mixture):
    """Mixture of Poissons."""

    def component_cdf(self, y: Tensor) -> Tensor:
        """See :meth:`Mixture.component_cdf`."""
        k = y.unsqueeze(-2).double().floor()
        return torch.special.gammaincc(k.clamp_min(0) + 1, self.components.rate.double()).where(k >= 0, 0.0)


class NegativeBinomialMixture(Mixture):
    """Mixture of negative binomials."""

    def component_cdf(self, y: Tensor) -> Tensor:
        """See :meth:`Mixture.component_cdf`: I_{1−p}(r, k + 1)."""
        k = y.unsqueeze(-2).double().floor()
        r, failure = self.components.total_count.double(), torch.sigmoid(-self.components.logits.double())
        cdf = special.betainc(r.numpy(), k.clamp_min(0).numpy() + 1, failure.numpy())
        return torch.from_numpy(cdf).where(k >= 0, 0.0)


class Poisson(Likelihood):
    """y ~ Poisson(shift · exp f), f (…, B, 1)."""

    mixture = PoissonMixture

    def __init__(self, shift: float = 1.0) -> None:
        super().__init__()
        self.shift = shift if shift > 0 else 1.0

    def log_mean(self, f: Tensor) -> Tensor:
        """f, cut off where numbers would overflow, (…, B)."""
        return f.squeeze(-1).clamp_max(MAX_LOG)

    def components(self, f: Tensor) -> dist.Poisson:
        """See ``Likelihood``."""
        return dist.Poisson(self.shift * self.log_mean(f).exp())

    def information(self, f: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """The mean, which is minus the second derivative of log p(y | f) for every y."""
        return self.shift * self.log_mean(f).exp()[..., None, None]


class NegativeBinomial(Poisson):
    """y ~ NegativeBinomial of mean m = shift · exp f and variance m + m²/r; log r ~ Normal(2, 1.5), a latent site.

    95 % of the prior of r is between 0.4 and 140; r → ∞ is a Poisson.
    """

    mixture = NegativeBinomialMixture
    information = Likelihood.information  # none: that about r has no closed form

    def __init__(self, shift: float = 1.0) -> None:
        super().__init__(shift)
        self.add_own(log_dispersion=(2.0, 1.5))

    def components(self, f: Tensor) -> dist.NegativeBinomial:
        """See ``Likelihood``."""
        log_r = self.own("log_dispersion")
        return dist.NegativeBinomial(log_r.exp(), logits=self.log_mean(f) + math.log(self.shift) - log_r)
