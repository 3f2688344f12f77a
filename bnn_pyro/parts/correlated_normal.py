"""Normal approximations of all weights jointly, with correlations: distributions, guides and families by name.

    w = μ + σ ⊙ C ε,    ε ~ Normal(0, I)                  Normal(μ, diag(σ) C Cᵀ diag(σ))

    FullNormal       C = I + A, A (P, P) strictly lower triangular: any covariance
    LowRankNormal    C = [I, B], B (P, R): a diagonal, and R directions of correlated weights

A and B are relative to σ, so that one learning rate suits weights of any size. In a guide, one auxiliary site draws the
vector of all weights, and every site of the model takes its part of it. The auxiliary site has the density of the
vector and each part has density 1, so that Pyro's own ELBOs are correct. If the prior of a site is Normal and does not
depend on other sites, its cross-entropy −E_q[log p(w)] is exact, because it needs the marginal moments only.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Self

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, register_kl

from bnn_pyro.parts.guides import MeanFieldNormal, NormalGuide, inverse_softplus
from bnn_pyro.parts.weights import ArrayDistribution, CentredNormal, base_of
from bnn_pyro.settings import parse_named


class FullCovariance(dist.MultivariateNormal):
    """A multivariate Normal that draws by one matrix product, and computes its variances (P,) once for all sites."""

    variance = cached_property(lambda self: torch.linalg.vector_norm(self._unbroadcasted_scale_tril, dim=-1).square())

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Draws (*sample_shape, *batch_shape, P); torch's own method has one matrix product per draw."""
        noise = self.loc.new_empty(self._extended_shape(sample_shape)).normal_()
        return self.loc + noise @ self._unbroadcasted_scale_tril.mT


class Part(ArrayDistribution):
    """The part of one site in a draw of all weights: a value with density 1, and the marginal moments of q.

    joint: q of the whole vector.   part: the site's slice of it.   value: (*batch_shape, *shape), the draw.
    """

    def __init__(self, joint: dist.TorchDistribution, part: slice, shape: torch.Size, value: Tensor) -> None:
        self.joint, self.part, self.value = joint, part, value
        super().__init__(shape)
        self._batch_shape = value.shape[: value.dim() - len(shape)]

    #: Marginal moments, of the event's shape.
    mean = property(lambda self: self.joint.mean[self.part].view(self.event_shape))
    variance = property(lambda self: self.joint.variance[self.part].view(self.event_shape))

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> Self:
        """The same draw, expanded."""
        return Part(self.joint, self.part, self.event_shape, self.value.expand((*batch_shape, *self.event_shape)))

    def _draw(self, shape: torch.Size) -> Tensor:
        return self.value.expand(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """0, as the auxiliary site has the density of the whole vector."""
        return value.new_zeros(value.shape[: value.dim() - len(self.event_shape)])


@register_kl(Part, CentredNormal)
@register_kl(Part, Normal)
@register_kl(Part, Independent)
def _cross_entropy(q: Part, p: CentredNormal | Normal | Independent) -> Tensor:
    """−E_q[log Normal(w; loc, scale)] in nats, of q's batch shape; loc and scale: (), or (*batch, *event)."""
    p, shape = base_of(p), p.event_shape
    if not isinstance(p, CentredNormal | Normal) or q.event_shape != shape or not _is_fixed(p):
        raise NotImplementedError
    gap, constant = q.mean - p.mean, 0.5 * math.log(2 * math.pi)
    each = 0.5 * (q.variance + gap.square()) / p.scale.square() + p.scale.log() + constant
    return (each.sum(tuple(range(-len(shape), 0))) if shape else each).expand(q.batch_shape)


def _is_fixed(p: CentredNormal | Normal) -> bool:
    """Whether p is known not to depend on other sites, which q correlates with this one."""
    if isinstance(p, CentredNormal):
        return p.fixed is not None
    return torch.is_grad_enabled() and not (p.loc.requires_grad or p.scale.requires_grad)


class _CorrelatedGuide(NormalGuide):
    """distribution: q of the flat vector, in the order of the sites."""

    distribution: dist.TorchDistribution

    def _distributions(self) -> Iterable[tuple[str, dist.TorchDistribution]]:
        joint, start = self.distribution, 0
        flat = pyro.sample("_all_weights", joint, infer={"is_auxiliary": True})
        for name, shape in self.shapes.items():
            part = slice(start, start := start + shape.numel())
            yield name, Part(joint, part, shape, flat[..., part].view(flat.shape[:-1] + shape))


class FullNormal(_CorrelatedGuide):
    """q(w) = Normal(μ, LLᵀ), L = diag(σ)(I + A): any covariance, by P(P + 1)/2 numbers.

    initial: {site: initial value of μ}.   init_scale: initial value of σ; there are no correlations at the start.
    """

    def __init__(self, initial: Mapping[str, Tensor], init_scale: float = 0.01) -> None:
        super().__init__(initial, init_scale)
        #: A; only its lower triangle is used.
        self.lower = nn.Parameter(self.loc.new_zeros(len(self.loc), len(self.loc)))

    @property
    def distribution(self) -> "FullCovariance":
        """q of the flat vector."""
        root = (self.scale[:, None] * self.lower.tril(-1)).diagonal_scatter(self.scale)
        return FullCovariance(self.loc, scale_tril=root, validate_args=False)

    @classmethod
    def of(cls, mean: Mapping[str, Tensor], scale_tril: Tensor) -> Self:
        """q with these moments. mean: {site: value}, whose dtype q has.   scale_tril: L (P, P)."""
        guide, scale = cls(mean), scale_tril.diagonal()
        with torch.no_grad():
            guide.rho.copy_(inverse_softplus(scale))
            guide.lower.copy_((scale_tril / scale[:, None]).tril(-1))
        return guide


class LowRankNormal(_CorrelatedGuide):
    """q(w) = Normal(μ, diag(σ)(I + BBᵀ)diag(σ)), B (P, R): P(R + 2) numbers.

    rank: R >= 1.   initial, init_scale: as for :class:`FullNormal`. B starts at small random values, as 0 is a saddle.
    """

    def __init__(self, initial: Mapping[str, Tensor], init_scale: float = 0.01, rank: int = 10) -> None:
        super().__init__(initial, init_scale)
        self.factor = nn.Parameter(torch.randn(len(self.loc), rank, device=self.loc.device) * (0.5 / rank) ** 0.5)

    @property
    def distribution(self) -> dist.LowRankMultivariateNormal:
        """q of the flat vector."""
        directions, diagonal = self.scale[:, None] * self.factor, self.scale.square()
        return dist.LowRankMultivariateNormal(self.loc, directions, diagonal, validate_args=False)


Maker = Callable[[Mapping[str, Tensor], float], nn.Module]  # (initial, init_scale) -> guide


def _low_rank(rank: int = 10) -> Maker:
    """low-rank:RANK — a diagonal and RANK common directions; RANK is a positive whole number."""
    return partial(LowRankNormal, rank=rank)


#: Every family of Normal guides by name; the number after the colon is the argument of its function.
FAMILIES: dict[str, Callable[..., Maker]] = {
    "mean-field": lambda: MeanFieldNormal, "low-rank": _low_rank, "full": lambda: FullNormal
}  # fmt: skip

#: ``"low-rank:20"`` -> a function that creates guides. Raises UserError for an unknown name or an invalid rank.
parse_family: Callable[[str], Maker] = partial(parse_named, "family of guides", table=FAMILIES, number=int)
