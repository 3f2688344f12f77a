"""Normal guides over all weights jointly: the posteriors that know of correlations.

    mean-field      independent Normals: P numbers twice (parts/guides.py)
    low-rank:RANK   a diagonal, and RANK directions in which the weights move together
    full            any covariance

In Pyro's terms: one auxiliary site draws the whole vector, and every site of the model takes its own part of it. The
density of the vector is the auxiliary site's, that of a part is 1, so that Pyro's ``Trace_ELBO`` and
``TraceMeanField_ELBO`` are right as they are. Where the prior of a site is Normal its cross-entropy −E_q[log p(w)] is
exact: it needs the marginal moments alone. Together with −entropy it makes the KL of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnn_pyro.errors import UserError
from bnn_pyro.parts.guides import MeanFieldNormal, _Flat, register
from bnn_pyro.parts.joint_normal import FullCovariance, JointNormal, LowRank, Part
from bnn_pyro.settings import parse_named

__all__ = ["FAMILIES", "FullNormal", "LowRankNormal", "parse_family"]

#: The auxiliary site that holds the whole vector.
JOINT = "_joint"


class _JointGuide(_Flat):
    """μ and σ = softplus(ρ), the same for every weight at the start."""

    def __init__(self, initial: Mapping[str, Tensor], init_scale: float) -> None:
        super().__init__(initial)
        self.rho = nn.Parameter(_inverse_softplus(torch.full_like(self.loc, init_scale)))

    @property
    def scale(self) -> Tensor:
        """σ (P,), in the order of the sites."""
        return F.softplus(self.rho)

    @property
    def joint(self) -> JointNormal:
        """q of the flat vector, in the order of the sites."""
        raise NotImplementedError

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> dict[str, Tensor]:
        """Sample every site; inputs and targets are taken for the sake of Pyro's calls and not used."""
        register(self)
        whole = self.joint
        flat = pyro.sample(JOINT, whole, infer={"is_auxiliary": True})
        found, start = {}, 0
        for name, shape in self.shapes.items():
            part = slice(start, start := start + shape.numel())
            found[name] = pyro.sample(name, Part(whole, part, shape, flat[..., part].view(flat.shape[:-1] + shape)))
        return found


class FullNormal(_JointGuide):
    """q(w) = Normal(μ, LLᵀ), L = diag(σ)(I + A): every covariance, of P(P + 1)/2 numbers.

    initial: {site: value} where μ starts.   init_scale: σ at the start, without correlations.
    """

    def __init__(self, initial: Mapping[str, Tensor], init_scale: float = 0.01) -> None:
        super().__init__(initial, init_scale)
        self.lower = nn.Parameter(self.loc.new_zeros(len(self.loc), len(self.loc)))  # A; its upper triangle stays 0

    @classmethod
    def of(cls, mean: Mapping[str, Tensor], scale_tril: Tensor) -> FullNormal:
        """q of given moments. mean: {site: value}, of the dtype to be kept.   scale_tril: L (P, P)."""
        guide = cls(mean)
        scale = scale_tril.diagonal()
        with torch.no_grad():
            guide.rho.copy_(_inverse_softplus(scale))
            guide.lower.copy_((scale_tril / scale[:, None]).tril(-1))
        return guide

    @property
    def joint(self) -> FullCovariance:
        """q of the flat vector, in the order of the sites."""
        return FullCovariance(self.loc, self.scale, self.lower)


class LowRankNormal(_JointGuide):
    """q(w) = Normal(μ, diag(σ)(I + BBᵀ)diag(σ)), B (P, R): P(R + 2) numbers.

    rank: R.   initial, init_scale: as for :class:`FullNormal`; B starts at random and small, as 0 is a saddle point.
    """

    def __init__(self, initial: Mapping[str, Tensor], init_scale: float = 0.01, rank: int = 10) -> None:
        super().__init__(initial, init_scale)
        if rank < 1:
            raise UserError(f"the rank of a low-rank guide must be at least 1, got {rank}")
        self.factor = nn.Parameter(torch.randn(len(self.loc), rank, device=self.loc.device) * (0.5 / rank) ** 0.5)

    @property
    def joint(self) -> LowRank:
        """q of the flat vector, in the order of the sites."""
        return LowRank(self.loc, self.scale, self.factor)


def _inverse_softplus(scale: Tensor) -> Tensor:
    return scale + (-torch.expm1(-scale)).log()


# -- by name -----------------------------------------------------------------------------------------------------
Maker = Callable[[Mapping[str, Tensor], float], nn.Module]  # (initial, init_scale) -> guide


def _mean_field() -> Maker:
    """mean-field — independent Normals."""
    return MeanFieldNormal


def _low_rank(rank: int = 10) -> Maker:
    """low-rank:RANK — a diagonal and RANK common directions; RANK is a positive whole number."""
    if rank < 1:
        raise ValueError
    return lambda initial, init_scale: LowRankNormal(initial, init_scale, rank)


def _full() -> Maker:
    """full — any covariance."""
    return FullNormal


#: Every family of Normal guides by name; the number after the colon is its argument.
FAMILIES: dict[str, Callable[..., Maker]] = {"mean-field": _mean_field, "low-rank": _low_rank, "full": _full}


def parse_family(text: str) -> Maker:
    """``"low-rank:20"`` -> a maker of guides.

    Raises UserError for an unknown name, or a rank that is no positive whole number.
    """
    return parse_named("family of guides", text, FAMILIES, number=int)
