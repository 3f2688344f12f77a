"""Normal approximations q(w): independent, or of all weights jointly, which know of correlations; and point masses.

    mean-field      independent Normals: P numbers twice
    low-rank:RANK   a diagonal, and RANK directions in which the weights move together
    full            any covariance

The last two: one auxiliary site draws the whole vector, and every site of the model takes its own part of it. The
density of the vector is the auxiliary site's, that of a part is 1, so that Pyro's own ELBOs are right as they are.
Where the prior of a site is Normal its cross-entropy −E_q[log p(w)] is exact: it needs the marginal moments alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnn_pyro.errors import UserError
from bnn_pyro.parts.correlated_normal import CorrelatedNormal, FullCovariance, LowRank, Part
from bnn_pyro.parts.weights import ArrayDistribution
from bnn_pyro.settings import parse_named

__all__ = ["ALL_WEIGHTS", "FAMILIES", "DroppedColumns", "DroppedInputs", "FullNormal", "LowRankNormal",
           "MeanFieldNormal", "PointMass", "new_name", "parse_family", "register"]  # fmt: skip

#: The auxiliary site that holds the whole vector.
ALL_WEIGHTS = "_all_weights"

_numbers = itertools.count()


def new_name(guide: nn.Module) -> str:
    """A name that no other guide has: two of one name would share their parameters in a user's global store."""
    return f"{type(guide).__name__}{next(_numbers)}"


def register(guide: nn.Module) -> None:
    """Tell Pyro of a guide's parameters, so that its own ``SVI`` finds them; nothing to do where they are local."""
    if not pyro.settings.get("module_local_params"):
        pyro.module(guide.name, guide)


class _Flat(nn.Module):
    """Sites cut from one flat vector: one optimiser tensor and one elementwise kernel, however many layers.

    Not a ``PyroModule``, which could not be called under ``isolated()`` unless it was made there.
    """

    def __init__(self, initial: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.name = new_name(self)
        self.shapes = {name: value.shape for name, value in initial.items()}
        self.loc = nn.Parameter(torch.cat([value.detach().flatten() for value in initial.values()]).clone())

    def _cut(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: p.view(shape) for (name, shape), p in zip(self.shapes.items(), pieces, strict=True)}

    def sites(self) -> dict[str, Tensor]:
        """{site: location}."""
        return self._cut(self.loc)

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> dict[str, Tensor]:
        """Sample every site; inputs and targets are taken for the sake of Pyro's calls and not used."""
        register(self)
        return {name: pyro.sample(name, q) for name, q in self._distributions()}

    def _distributions(self) -> Iterable[tuple[str, dist.TorchDistribution]]:
        """(site, its q) of every site."""
        return ((name, self._site(name, loc)) for name, loc in self.sites().items())


class _NormalGuide(_Flat):
    """μ and σ = softplus(ρ), the same for every weight at the start."""

    def __init__(self, initial: Mapping[str, Tensor], init_scale: float) -> None:
        super().__init__(initial)
        self.rho = nn.Parameter(_inverse_softplus(torch.full_like(self.loc, init_scale)))

    @property
    def scale(self) -> Tensor:
        """σ of every weight, flat, in the order of the sites."""
        return F.softplus(self.rho)


class MeanFieldNormal(_NormalGuide):
    """q(w) = ∏ᵢ Normal(wᵢ; μᵢ, σᵢ), σ = softplus(ρ) (Blundell et al. 2015, section 3.2).

    initial: {site: value} where μ starts.   init_scale: σ at the start, for all weights: small, so that training
        begins like that of a deterministic network.
    """

    def __init__(self, initial: Mapping[str, Tensor], init_scale: float = 0.01) -> None:
        super().__init__(initial, init_scale)
        self.rho.data.fill_(init_scale + math.log(-math.expm1(-init_scale)))

    def _distributions(self) -> Iterable[tuple[str, dist.TorchDistribution]]:
        scales = self._cut(self.scale)
        for name, loc in self.sites().items():
            yield name, dist.Normal(loc, scales[name], validate_args=False).to_event(loc.dim())


class PointMass(_Flat):
    """q(w) = δ(w − μ): a point estimate as a guide."""

    def _site(self, name: str, loc: Tensor) -> dist.TorchDistribution:
        return dist.Delta(loc, validate_args=False).to_event(loc.dim())

    @torch.no_grad()
    def shorten(self, length: float) -> None:
        """Shorten every row of a weight matrix, a unit's incoming weights, to ``length`` at most; biases stay.

        Max-norm regularisation (Srivastava, Hinton, Krizhevsky, Sutskever & Salakhutdinov 2014, section 5.1).
        """
        for weight in self._cut(self.loc.detach()).values():
            if weight.dim() > 1:
                weight.renorm_(2, 0, length)


# -- dropout -----------------------------------------------------------------------------------------------------
class DroppedColumns(ArrayDistribution):
    """W · diag(z / (1 − p)), zⱼ ~ Bernoulli(1 − p): a whole column of W (out, in) is 0, or divided by 1 − p.

    Mean W, variance W² p / (1 − p). One z for all rows of an input batch, so that a draw is one function of x.

    weight: W (out, in).   rate: p, in [0, 1).
    """

    def __init__(self, weight: Tensor, rate: float) -> None:
        self.weight, self.rate = weight, rate
        super().__init__(weight.shape)

    @property
    def mean(self) -> Tensor:
        """W."""
        return self.weight.expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        """W² p / (1 − p)."""
        return self.mean.square() * (self.rate / (1 - self.rate))

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Draws of shape sample_shape + batch_shape + (out, in), each with a mask of its own."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape[-1:]
        return self._masked(torch.rand(shape, device=self.weight.device) >= self.rate)

    def _masked(self, kept: Tensor) -> Tensor:
        return self.weight * (kept.to(self.weight.dtype) / (1 - self.rate)).unsqueeze(-2)

    def log_prob(self, value: Tensor) -> Tensor:
        """log P(W = value) in nats, the probability of the masks that give ``value``: a mass, as Pyro's Delta has."""
        kept = (value != 0).any(-2)
        chosen = (self.weight != 0).any(-2)  # a column of zeros says nothing of its mask
        log_kept, log_dropped = math.log1p(-self.rate), math.log(self.rate) if self.rate else -math.inf
        mass = torch.where(chosen, torch.where(kept, log_kept, log_dropped), 0.0).sum(-1)
        possible = (value == self._masked(kept)).all(-1).all(-1)
        return torch.where(possible, mass, -math.inf)


class DroppedInputs(PointMass):
    """q(w) of MC dropout: weight matrices with dropped columns, everything else where it is.

    initial: {site: value} before training.   rates: {weight matrix: dropout rate of its layer's inputs}.
    """

    def __init__(self, initial: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        super().__init__(initial)
        self.rates = dict(rates)

    def _site(self, name: str, loc: Tensor) -> dist.TorchDistribution:
        rate = self.rates.get(name, 0.0)
        return DroppedColumns(loc, rate) if rate else super()._site(name, loc)


# -- all weights jointly -----------------------------------------------------------------------------------------
class _CorrelatedGuide(_NormalGuide):
    @property
    def distribution(self) -> CorrelatedNormal:
        """q of the flat vector, in the order of the sites."""
        raise NotImplementedError

    def _distributions(self) -> Iterable[tuple[str, dist.TorchDistribution]]:
        whole, start = self.distribution, 0
        flat = pyro.sample(ALL_WEIGHTS, whole, infer={"is_auxiliary": True})
        for name, shape in self.shapes.items():
            part = slice(start, start := start + shape.numel())
            yield name, Part(whole, part, shape, flat[..., part].view(flat.shape[:-1] + shape))


class FullNormal(_CorrelatedGuide):
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
    def distribution(self) -> FullCovariance:
        """q of the flat vector, in the order of the sites."""
        return FullCovariance(self.loc, self.scale, self.lower)


class LowRankNormal(_CorrelatedGuide):
    """q(w) = Normal(μ, diag(σ)(I + BBᵀ)diag(σ)), B (P, R): P(R + 2) numbers.

    rank: R.   initial, init_scale: as for :class:`FullNormal`; B starts at random and small, as 0 is a saddle point.
    """

    def __init__(self, initial: Mapping[str, Tensor], init_scale: float = 0.01, rank: int = 10) -> None:
        super().__init__(initial, init_scale)
        if rank < 1:
            raise UserError(f"the rank of a low-rank guide must be at least 1, got {rank}")
        self.factor = nn.Parameter(torch.randn(len(self.loc), rank, device=self.loc.device) * (0.5 / rank) ** 0.5)

    @property
    def distribution(self) -> LowRank:
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
