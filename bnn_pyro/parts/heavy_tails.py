"""Likelihoods of numbers with outliers: Student's t with learned degrees of freedom, and Laplace."""

from __future__ import annotations

from collections.abc import Mapping

import pyro.distributions as dist
import torch
from scipy import special
from torch import Tensor

from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.observed import LearnedNoise

__all__ = ["LaplaceNoise", "StudentT", "StudentTMixture"]


class StudentTMixture(Mixture):
    """Mixture of Student's t distributions."""

    def component_cdf(self, y: Tensor) -> Tensor:
        """See :meth:`Mixture.component_cdf`; in float64 throughout."""
        df, loc, scale = (v.double() for v in (self.components.df, self.components.loc, self.components.scale))
        return torch.from_numpy(special.stdtr(df.numpy(), ((y.unsqueeze(-2).double() - loc) / scale).numpy()))

    def bracket(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """The extreme ones of the components' own quantiles."""
        df, loc, scale = (v.double() for v in (self.components.df, self.components.loc, self.components.scale))
        ends = loc + scale * torch.from_numpy(special.stdtrit(df.numpy(), levels[:, None, None].numpy()))  # (Q, S, B)
        return ends.amin(-2), ends.amax(-2)


class StudentT(LearnedNoise):
    """y ~ StudentT(ν; shift + scale·f, σ), ν = 2 + exp(log_df), log_df ~ Normal(2, 1); σ as in ``LearnedNoise``.

    ν > 2, so that the variance is finite; 95 % of its prior is between 3 and 54. Lange, Little & Taylor 1989.
    """

    mixture = StudentTMixture

    def __init__(self, shift: float = 0.0, scale: float = 1.0, noise: float | None = None) -> None:
        super().__init__(shift, scale, noise)
        self.add_own(log_df=(2.0, 1.0))

    def components(self, f: Tensor) -> dist.StudentT:
        """See ``Likelihood``."""
        return dist.StudentT(2 + self.own("log_df").exp(), *self.loc_and_scale(f))


class LaplaceNoise(LearnedNoise):
    """y ~ Laplace(shift + scale·f, σ), density exp(−|y − loc|/σ) / 2σ; σ as in ``LearnedNoise``."""

    def components(self, f: Tensor) -> dist.Laplace:
        """See ``Likelihood``."""
        return dist.Laplace(*self.loc_and_scale(f))

    @property
    def own_information(self) -> dict[str, float]:
        """E[(∂ log p(y) / ∂ log σ)²] = E[(|r| − 1)²] = 1, |r| standard exponential."""
        return dict.fromkeys(self.own_sites, 1.0)

    def information(self, f: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """(scale/σ)², the expectation of the squared slope of log p(y | f), which has no second derivative."""
        return self.relative_precision(f, own)
