"""Distributions of the array of a layer's weights, and the KLs between them.

    NormalWeights    wᵢ ~ Normal(μᵢ, σᵢ)        a free σ for every weight, given as σ
    JointlyDrawn     the same, σ = softplus(ρ)   one of many arrays, which a training step draws in one pass
    FreeWeights      the same, given as log σ²   an unconstrained parameter
    DropoutWeights   wᵢ ~ Normal(μᵢ, α μᵢ²)     Gaussian dropout of variance α (Kingma et al. 2015, arXiv:1506.02557)
    CentredNormal    wᵢ ~ Normal(0, s)          a prior, where s is one number or one per row
    LogUniform       p(w) ∝ ∏ 1/|wᵢ|            improper: ELBOs under it are comparable for the same model only

Each operation of a training step is a pass over millions of weights, so that the KLs have fused closed forms.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import torch
import torch.nn.functional as F
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, kl_divergence, register_kl

from bnn_pyro.parts import gradients


class ArrayDistribution(TorchDistribution):
    """A distribution whose event is an array of this shape. The batch shape is () except in a plate of draws.

    A subclass implements ``_draw(shape)``, shape = sample_shape + batch_shape + event_shape, unless it is improper.
    """

    arg_constraints: dict = {}  # noqa: RUF012
    has_rsample = True

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(torch.Size(), shape, validate_args=False)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        """Real arrays."""
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> Self:
        """Independent copies."""
        new = copy.copy(self)
        new._batch_shape = torch.Size(batch_shape)
        return new

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Draws of shape sample_shape + batch_shape + event_shape."""
        return self._draw(self.shape(torch.Size(sample_shape)))

    def linear(self, X: Tensor, bias: bool, sample_shape: torch.Size) -> Tensor:
        """Draws of X A, where A (D, H) has this distribution, by local reparametrization: see ``gradients``."""
        return gradients.local_linear(X, self.mean, self.variance, bias, sample_shape)

    def _draw(self, shape: torch.Size) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} is improper and has no samples")

    def _flat(self, value: Tensor) -> Tensor:
        """(…, *event shape) -> (…, numbers)."""
        return value.flatten(-len(self.event_shape)) if self.event_shape else value.unsqueeze(-1)


class _NormalArray(ArrayDistribution):
    """Independent Normals with ``loc``, ``variance`` and ``log_variance``, all (*shape)."""

    loc: Tensor
    variance: Tensor
    prior_scale: Tensor | None = None

    mean = property(lambda self: self.loc)
    scale = cached_property(lambda self: self.variance.sqrt())
    log_variance = cached_property(lambda self: self.variance.log())

    def _draw(self, shape: torch.Size) -> Tensor:
        return torch.addcmul(self.loc, self.scale, torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device))

    def log_prob(self, value: Tensor) -> Tensor:
        return self._flat(Normal(self.loc, self.scale, validate_args=False).log_prob(value)).sum(-1)


class NormalWeights(_NormalArray):
    """Independent Normals. loc, scale: (*shape), the event shape."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale
        super().__init__(loc.shape)

    variance = property(lambda self: self.scale.square())


class FlatNormals:
    """Independent Normals, σ = softplus(ρ), of arrays in one vector: loc, rho (P,).   spare: see ``DrawNormals``."""

    def __init__(self, loc: Tensor, rho: Tensor, shapes: Mapping[str, torch.Size], spare: list[Tensor]) -> None:
        self.loc, self.rho, self.shapes, self.spare = loc, rho, shapes, spare

    scale = cached_property(lambda self: F.softplus(self.rho))
    #: {array: σ} and {array: ρ} of a single split, as the backward pass of each split fills an array of all weights.
    scales = cached_property(lambda self: cut(self.scale, self.shapes))
    rhos = cached_property(lambda self: cut(self.rho, self.shapes))

    def scale_of(self, name: str) -> Tensor:
        """σ of an array (*shape), computed from its ρ alone unless σ of all arrays is known already."""
        return self.scales[name] if "scale" in vars(self) else F.softplus(self.rhos[name])

    @cached_property
    def drawn(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(Σ log σ (arrays,), Σ (μ² + σ²) (arrays,), {array: a draw (*shape)}), with gradients."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        large = len(self.loc) > gradients.PIECE and self.loc.is_cpu  # does not fit into the cache of a CPU
        if not (large and self.loc.dtype == torch.float32 and gradients.compiled()):
            draws = torch.addcmul(self.loc, self.scale, torch.randn_like(self.loc)).split(sizes)
            both = self.scale.log(), self.loc.square() + self.scale.square()
            logs, squares = (torch.stack([part.sum() for part in v.split(sizes)]) for v in both)
        else:
            logs, squares, *draws = gradients.DrawNormals.apply(self.loc, self.rho, sizes, self.spare)
        shapes = zip(self.shapes.items(), draws, strict=True)
        return logs, squares, {name: draw.view(shape) for (name, shape), draw in shapes}

    def arrays(self) -> Iterator[tuple[str, "JointlyDrawn"]]:
        """Pairs (array, its distribution)."""
        return ((name, JointlyDrawn(self, name, loc)) for name, loc in cut(self.loc, self.shapes).items())


class JointlyDrawn(NormalWeights):
    """One array of :class:`FlatNormals`; with gradients enabled, its first draw is part of the draw of all arrays."""

    def __init__(self, joint: FlatNormals, name: str, loc: Tensor) -> None:
        self.joint, self.name, self.loc, self.was_drawn = joint, name, loc, False
        ArrayDistribution.__init__(self, loc.shape)

    scale = cached_property(lambda self: self.joint.scale_of(self.name))

    def _draw(self, shape: torch.Size) -> Tensor:
        if self.was_drawn or shape != self.event_shape or not torch.is_grad_enabled():
            return super()._draw(shape)
        self.was_drawn = True  # together with ``pop`` this avoids a reference cycle, as draws refer to distributions
        return self.joint.drawn[2].pop(self.name)


class FreeWeights(_NormalArray):
    """Independent Normals. loc, log_variance: (*shape), the event shape.

    If ``prior_scale``, () or (D, 1), is the scale of a CentredNormal prior, a layer computes the KL to this prior
    together with its output, which takes the least time. The KL to any other prior is computed separately.
    """

    def __init__(self, loc: Tensor, log_variance: Tensor) -> None:
        self.loc, self.log_variance = loc, log_variance
        self.known_kl: Tensor | None = None
        super().__init__(loc.shape)

    #: The variances, (*shape), cached for the layer and the KL.
    variance = cached_property(lambda self: self.log_variance.exp())

    def linear(self, X: Tensor, bias: bool, sample_shape: torch.Size) -> Tensor:
        """Draws of X A; if the prior's scale is known, also compute the KL."""
        if self.prior_scale is None:
            return super().linear(X, bias, sample_shape)
        parameters = self.loc, self.log_variance, self.prior_scale
        output, self.known_kl = gradients.FreeLinear.apply(X, *parameters, bias, sample_shape)
        return output


class DropoutWeights(_NormalArray):
    """Normal(μ, α μ²). loc: (*shape); alpha: positive, broadcasts against loc."""

    def __init__(self, loc: Tensor, alpha: Tensor) -> None:
        self.loc, self.alpha = loc, alpha
        super().__init__(loc.shape)

    variance = property(lambda self: self.loc.square() * self.alpha)


class CentredNormal(ArrayDistribution):
    """w ~ Normal(0, scale). scale: () or (D, 1), one per row of w; or a number, with ``like`` for dtype and device.

    The same density as ``Normal(0, scale).expand(shape).to_event()``, by one sum of squares instead of a dozen
    elementwise passes; the KL of independent Normals to it is fast as well. A number as scale saves GPU kernels.
    """

    def __init__(self, scale: Tensor | float, shape: torch.Size, like: Tensor | None = None) -> None:
        self._given, self._like = scale, like
        #: The scale, where it is a number.
        self.fixed = None if like is None else scale
        super().__init__(shape)

    scale = cached_property(lambda self: self._given if self._like is None else self._like.new_tensor(self._given))

    #: (*shape).
    mean = property(lambda self: self.scale.new_zeros(()).expand(self.event_shape))
    variance = property(lambda self: self.scale.square().expand(self.event_shape))

    def _draw(self, shape: torch.Size) -> Tensor:
        return self.scale * torch.randn(shape, dtype=self.scale.dtype, device=self.scale.device)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of the whole array in nats."""
        if self.fixed is None:
            return self._flat(Normal(0.0, self.scale, validate_args=False).log_prob(value)).sum(-1)
        flat = self._flat(value)
        squares = flat.dot(flat) if flat.dim() == 1 else flat.square().sum(-1)
        return squares * (-0.5 / self.fixed**2) - flat.shape[-1] * math.log(math.sqrt(2 * math.pi) * self.fixed)


class LogUniform(ArrayDistribution):
    """p(w) ∝ ∏ 1/|wᵢ|: improper, with an unnormalised density and no samples (Hron et al. 2018, arXiv:1807.01969).

    It is the prior of variational dropout: the KL of Normal(μ, αμ²) to it depends on α alone, and decreases with α.
    """

    has_rsample = False

    def log_prob(self, value: Tensor) -> Tensor:
        """−Σ log|w| in nats, without a constant."""
        return -self._flat(value.abs().log()).sum(-1)


def cut(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Split (…, P) into {name: (…, *shape)}, in the order of ``shapes``."""
    pieces = flat.split([shape.numel() for shape in shapes.values()], -1)
    return {name: p.reshape(flat.shape[:-1] + shape) for (name, shape), p in zip(shapes.items(), pieces, strict=True)}


def base_of(d: Distribution) -> Distribution:
    """The base distribution of nested ``Independent`` distributions; any other distribution itself."""
    while isinstance(d, Independent):
        d = d.base_dist
    return d


def log_alpha(q: _NormalArray) -> Tensor:
    """log α = log σ²/μ² of every weight, where 10⁻¹⁶ is added to μ²."""
    return q.log_variance - (q.loc.square() + 1e-16).log()


@register_kl(_NormalArray, _NormalArray)
@register_kl(_NormalArray, CentredNormal)
@register_kl(_NormalArray, Independent)
@register_kl(_NormalArray, Normal)
def _kl_normals(q: _NormalArray, p: _NormalArray | CentredNormal | Independent | Normal) -> Tensor:
    if q.event_shape != p.event_shape:
        shapes = tuple(q.event_shape), tuple(p.event_shape)
        raise ValueError("guide and model have weights of shapes {} and {} at one site".format(*shapes))
    if not isinstance(p := base_of(p), _NormalArray | CentredNormal | Normal):
        raise NotImplementedError
    pair, dims = (Normal(one.mean, one.scale, validate_args=False) for one in (q, p)), len(q.event_shape)
    each = kl_divergence(*pair)
    return (each.sum(tuple(range(-dims, 0))) if dims else each).expand(q.batch_shape)


@register_kl(FreeWeights, CentredNormal)
def _kl_known(q: FreeWeights, p: CentredNormal) -> Tensor:
    ready = q.known_kl is not None and p.scale is q.prior_scale
    if ready and (q.known_kl.requires_grad or not torch.is_grad_enabled()):  # unless it was computed without gradients
        return q.known_kl
    return _kl_normals(q, p)


@register_kl(JointlyDrawn, CentredNormal)
def _kl_jointly_drawn(q: JointlyDrawn, p: CentredNormal) -> Tensor:
    return joint_kl([(q, p, 1.0)]) if drawn_jointly(q, p) else _kl_normals(q, p)


def drawn_jointly(q: Any, p: Any) -> bool:
    """Whether ``joint_kl`` can compute KL(q ‖ p)."""
    by_number = isinstance(p, CentredNormal) and p.fixed is not None
    return by_number and isinstance(q, JointlyDrawn) and q.was_drawn and q.event_shape == p.event_shape


def joint_kl(arrays: Sequence[tuple[JointlyDrawn, CentredNormal, float]]) -> Tensor:
    """Σ factor · KL(q ‖ p) over triples (q, p, factor), in nats, where all q are arrays of one ``FlatNormals``.

    KL(∏ Normal(μᵢ, σᵢ) ‖ Normal(0, s²I)) = ½ Σ(μ² + σ²)/s² − Σ log σ + n (log s − ½)
    """
    joint = arrays[0][0].joint
    logs, squares, _ = joint.drawn
    factors = {q.name: (factor, 0.5 * factor / p.fixed**2) for q, p, factor in arrays}
    of_logs, of_squares = logs.new_tensor([factors.get(name, (0.0, 0.0)) for name in joint.shapes]).unbind(1)
    constant = sum(factor * p.event_shape.numel() * (math.log(p.fixed) - 0.5) for _, p, factor in arrays)
    return squares.dot(of_squares) - logs.dot(of_logs) + constant


@register_kl(_NormalArray, LogUniform)
def _kl_free(q: _NormalArray, p: LogUniform) -> Tensor:
    return gradients.kl_log_uniform(log_alpha(q)).sum()


@register_kl(DropoutWeights, LogUniform)
def _kl_dropout(q: DropoutWeights, p: LogUniform) -> Tensor:
    """The KL depends on α only, and every α is shared by the same number of weights."""
    return gradients.kl_log_uniform(q.alpha.log()).sum() * (q.loc.numel() / q.alpha.numel())
