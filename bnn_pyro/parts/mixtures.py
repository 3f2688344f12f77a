"""Predictions: equally weighted mixtures of S components, one per draw of the weights, with moments and quantiles.

Probabilities are averaged, not log probabilities, and moments and quantiles are those of the mixture, not of a Gaussian
with its moments. ``MIXTURES`` has the mixture class of each family of components; a likelihood may name another class.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Self

import numpy as np
import torch
from pyro.distributions import Bernoulli, Categorical, Distribution, Normal
from torch import Tensor
from torch.special import entr

from bnn_pyro.errors import UserError
from bnn_pyro.parts.components import cdf_of, dtype_of, kind_of, make, parameters, select
from bnn_pyro.parts.decisions import BLOCK, COUNTS, GRID, Decisions, growing


class Mixture(Decisions):
    """p(y | x, D) as S components. Shapes: S draws, B points, K classes; the tensors of ``predict`` are on the CPU.

    components  the model's distribution at site "y", batch shape (S, B), in target units

    Components can be of any univariate family of numbers that has a mean, a variance, ``log_prob`` and ``cdf``, and
    whose parameters are the tensors in its ``arg_constraints``, or a ``MixtureSameFamily`` of such. A family without
    ``cdf`` needs an entry in ``components.CDFS``, or a likelihood whose ``mixture`` has a :meth:`component_cdf`.
    """

    #: The kind of targets. ``has_classes`` decides which metrics and figures apply.
    task = "regression"
    has_classes = False

    def __new__(cls, components: Distribution | None = None) -> Self:
        """``Mixture(…)`` creates an object of the class that ``MIXTURES`` has for these components."""
        new = super().__new__(MIXTURES.get(type(components), Mixture) if cls is Mixture else cls)
        new.components = components
        return new

    #: S, the number of draws.
    num_draws = property(lambda self: self.components.batch_shape[0])

    def __len__(self) -> int:
        return self.components.batch_shape[1]

    def __getitem__(self, index: Tensor | slice | Sequence[int]) -> Self:
        """The prediction for some of the points: a slice, a mask (B,) or indices."""
        return self._carry(self._like(select(self.components, (slice(None), index))), index)

    def of_draws(self, index: Tensor | slice | Sequence[int]) -> Self:
        """The prediction by some of the draws: a slice, a mask (S,) or indices."""
        return self._like(select(self.components, index))

    def _like(self, components: Distribution) -> Self:
        return type(self)(components)

    def _need(self, task: str, attribute: str) -> None:
        if task not in (self.task, "classification" if self.has_classes else ""):
            one = "; take prediction.target(k), k its name or number" * (self.task in ("targets", "labels"))
            raise UserError(f"'{attribute}' belongs to {task}, but this is a {self.task} prediction{one}")

    @property
    def probs(self) -> Tensor:
        """Class probabilities of every draw, (S, B, K); a Bernoulli's are those of K = 2 classes."""
        self._need("classification", "probs")

    @property
    def locs(self) -> Tensor:
        """Component means (S, B), target units."""
        self._need("regression", "locs")
        return self.components.mean

    @property
    def scales(self) -> Tensor:
        """Component standard deviations (S, B), target units."""
        self._need("regression", "scales")
        return self.components.stddev

    def log_probs(self, y: Tensor) -> Tensor:
        """log p_s(y), (S, B), nats. y: (B,)."""
        law = self.components
        if self.is_discrete and not self.has_classes:  # counts: float32 would lose digits in gamma functions
            law = make(kind_of(law), {name: value.double() for name, (value, _) in parameters(law).items()})
        return law.log_prob(y.to(dtype_of(law)))

    def component_cdf(self, y: Tensor) -> Tensor:
        """P_s(Y ≤ y), (…, S, B) float64, at real y (…, B); a step function for counts."""
        return cdf_of(self.components, y.unsqueeze(-2))

    def component_below(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """(P_s(Y < y), P_s(Y = y)), float64; the second is 0 of shape (1, 1) if Y is continuous. y: (B,)."""
        cdf = self.component_cdf(y)
        if not self.is_discrete:
            return cdf, cdf.new_zeros(1, 1)
        at = self.log_probs(y).double().exp()
        return cdf - at, at

    def output_values(self) -> Tensor:
        """The K numbers of a draw that diagnostics compare, (S, B, K) float64: here the mean, K = 1."""
        return self.components.mean.double()[..., None]

    #: Whether Y is discrete, such as counts.
    is_discrete = property(lambda self: self.components.support.is_discrete)
    #: Whether the PIT of a target is randomised; see ``metrics.pit``.
    randomised = property(lambda self: self.is_discrete)

    def discrepancy(self, y: Tensor, so_far: Tensor) -> Tensor:
        """Update ``so_far`` (S,), a draw's misfit to earlier points, by y (B,): the maximum of |y − mean| / sd."""
        return torch.maximum(so_far, ((y - self.components.mean) / self.components.stddev).abs().amax(1))

    @cached_property
    def mean(self) -> Tensor:
        """Mean class probabilities (B, K), or the predictive mean (B,) in target units."""
        return self.components.mean.mean(0)

    @cached_property
    def total(self) -> Tensor:
        """Total uncertainty (B,): entropy of the mean probabilities in nats, or the mixture's variance."""
        return self.aleatoric + self.epistemic

    @cached_property
    def aleatoric(self) -> Tensor:
        """Aleatoric uncertainty (B,), of the noise: mean entropy of the draws in nats, or mean component variance."""
        return self.components.variance.mean(0)

    @cached_property
    def epistemic(self) -> Tensor:
        """Epistemic uncertainty (B,), of the weights: mutual information I(y; w) in nats, or variance of the means."""
        return self.components.mean.double().var(0, unbiased=False).float()

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y | x, D) = logsumexp_s log p_s(y) − log S, in nats, (B,). y: labels or targets, (B,) or (B, T)."""
        y = torch.as_tensor(y)
        if y.shape != (shape := self.components.batch_shape[1:]):
            num = len(self)
            raise UserError(f"y has shape {tuple(y.shape)}, but the prediction is for {num} points: {tuple(shape)}")
        return torch.logsumexp(self.log_probs(y.cpu()), 0) - math.log(self.num_draws)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y ≤ y), (…, B) float64; y, a number or an array, broadcasts against (B,), any leading dimensions."""
        self._need("regression", "cdf")
        y = torch.as_tensor(y)
        return self.component_cdf(y if y.dim() else y.expand(len(self))).mean(-2)

    def bracket(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of the quantiles, each (Q, B) float64, by Cantelli's inequality."""
        mean, sd, odds = self.mean.double(), self.total.double().sqrt(), (levels / (1 - levels))[:, None].sqrt()
        return mean - sd / odds, mean + sd * odds

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Quantiles by bisection of the cdf, (len(q), B), to 1e-9 of the bracket. Raises UserError unless 0 < q < 1."""
        self._need("regression", "quantile")
        levels = torch.as_tensor(q if isinstance(q, Tensor) else np.asarray(q), dtype=torch.float64).reshape(-1)
        if not (len(levels) and bool(((levels > 0) & (levels < 1)).all())):
            raise UserError(f"quantile levels must lie strictly between 0 and 1, got {levels.tolist()}")
        points = max(1, 2 * BLOCK // (self.num_draws * len(levels)))
        parts = [self[i : i + points]._bisect(levels) for i in range(0, len(self), points)]
        return torch.cat([torch.empty(len(levels), 0), *parts], 1)

    def _bisect(self, levels: Tensor) -> Tensor:
        low, high = self.bracket(levels)
        for _ in range(30):
            middle = (low + high) / 2
            below = self.cdf(middle) < levels[:, None]
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        middle = (low + high) / 2
        return (middle.round() + 0.0 if self.is_discrete else middle).float()  # + 0.0 turns -0 into 0

    def crps(self, y: Tensor) -> Tensor:
        """∫ (P(Y ≤ t) − 1{y ≤ t})² dt, (B,) float64, y (B,) float64.

        For counts this is a sum over all counts within 1,024 of y; beyond, it is interpolated linearly between counts
        whose distances from y grow by 1 %. Else the trapezoid rule is used, on a grid (before the transform) whose
        steps grow with the distance from y, so that it resolves draws that are much narrower than others.
        """
        modelled, at_y = self.untransformed.components, self.transform.inv(y.double())
        mean, margin = modelled.mean.double(), 8 * modelled.stddev.double()
        low, high = torch.minimum((mean - margin).amin(0), at_y), torch.maximum((mean + margin).amax(0), at_y)
        if not bool((high - low).isfinite().all()):
            return torch.full_like(low, math.nan)
        if self.is_discrete:
            far = float((high - low).max())
            away = [*range(min(COUNTS // 4, math.ceil(far) + 2))]
            while away[-1] <= far:
                away.append(math.ceil(1.01 * away[-1]))
            steps = np.diff([*away, away[-1] + 1])
            weights = (steps + 1 + np.append(0, steps[:-1] - 1)) / 2  # of linear interpolation between counts
            total, below = torch.zeros_like(y), torch.ones(1)
            for weight, k in zip(weights, away, strict=True):
                below = self.cdf(y - 1 - k).square() if below.any() else below
                total += weight * (both := below + (1 - self.cdf(y + k)).square())
                if float(both.max()) < 1e-14:  # the terms decrease
                    break
            return total
        t = self.transform(growing(low, at_y, high, GRID - 1))
        below, (left, right) = self.cdf(t), (slice(GRID // 2), slice(GRID // 2 - 1, None))  # y is in both
        above = torch.trapezoid((1 - below[right]).square(), t[right], dim=0)
        return torch.trapezoid(below[left].square(), t[left], dim=0) + above


class NormalMixture(Mixture):
    """Mixture of Normals, whose cdf, bracket and CRPS have closed forms."""

    def component_cdf(self, y: Tensor) -> Tensor:
        """See :meth:`Mixture.component_cdf`; in float64 throughout."""
        z = (y.unsqueeze(-2).double() - self.components.loc.double()) / self.components.scale.double()
        return torch.special.ndtr(z)

    def bracket(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest of the components' quantiles."""
        z = torch.special.ndtri(levels)[:, None, None]  # (Q, 1, 1)
        ends = self.components.loc.double() + z * self.components.scale.double()  # (Q, S, B)
        return ends.amin(-2), ends.amax(-2)

    def crps(self, y: Tensor) -> Tensor:
        """E|Y − y| − ½ E|Y − Y'|, both in closed form for a mixture of S Gaussians (Grimit et al. 2006, eq. 5)."""
        draws, loc, scale = self.num_draws, self.components.loc.double(), self.components.scale.double()
        # Pairs (s, t) of draws are grouped by their cyclic lag, (S, B) at a time; each unordered pair is counted once.
        between = _mean_distance(torch.zeros_like(loc), math.sqrt(2) * scale).sum(0)
        for lag in range(1, draws // 2 + 1):
            distance = _mean_distance(loc - loc.roll(lag, 0), torch.hypot(scale, scale.roll(lag, 0))).sum(0)
            between += distance if 2 * lag == draws else 2 * distance
        return _mean_distance(y - loc, scale).mean(0) - between / (2 * draws**2)


class ClassMixture(Mixture):
    """Mixture of Categoricals over the labels 0 … K−1; entropies and information in nats."""

    task = "classification"
    has_classes = True

    @cached_property
    def probs(self) -> Tensor:
        """Class probabilities of every draw, (S, B, K)."""
        return self.components.logits.exp()  # normalised logits: no softmax, which is slower

    mean = cached_property(lambda self: self.probs.mean(0))
    total = cached_property(lambda self: entr(self.mean).sum(-1))
    #: At least 0 by Jensen's inequality, except for rounding errors.
    epistemic = cached_property(lambda self: (self.total - self.aleatoric).clamp_min(0.0))

    aleatoric = cached_property(lambda self: torch.cat([entr(p).sum(-1).mean(0) for p in self.probs.split(1000, 1)]))

    def component_below(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Mixture.component_below`, with classes in the order of the labels."""
        probs, label = self.probs.double(), y.long().expand(len(self.probs), -1)[..., None]
        at = probs.gather(-1, label)[..., 0]
        return probs.cumsum(-1).gather(-1, label)[..., 0] - at, at

    def output_values(self) -> Tensor:
        """Log odds of every class, (S, B, K) float64, or only of the second of two classes, (S, B, 1)."""
        logits, classes = self.components.logits.double(), self.components.logits.shape[-1]
        # log p/(1 − p) from logits: probabilities that round to 1 would be ties in ranks.
        others = [torch.cat([logits[..., :k], logits[..., k + 1 :]], -1).logsumexp(-1) for k in range(classes)]
        return (logits - torch.stack(others, -1))[..., int(classes == 2) :]

    def discrepancy(self, y: Tensor, so_far: Tensor) -> Tensor:
        """See :meth:`Mixture.discrepancy`; here the sum of −log p_s(y)."""
        return so_far - self.log_probs(y).double().sum(1).float()


class BernoulliMixture(ClassMixture):
    """Mixture of Bernoullis: K = 2 classes, with the log odds of the second one."""

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities of both classes, (S, B, 2)."""
        return torch.stack([torch.sigmoid(k * self.components.logits) for k in (-1, 1)], -1)

    def output_values(self) -> Tensor:
        """Log odds of the second class, (S, B, 1) float64."""
        return self.components.logits.double()[..., None]


#: The mixture class of a family of components; other families have :class:`Mixture`.
MIXTURES: dict[type, type[Mixture]] = {Categorical: ClassMixture, Bernoulli: BernoulliMixture, Normal: NormalMixture}


def _mean_distance(loc: Tensor, scale: Tensor) -> Tensor:
    """E|Z| for Z ~ Normal(loc, scale)."""
    z = loc / scale
    return loc * torch.erf(z / math.sqrt(2)) + scale * math.sqrt(2 / math.pi) * torch.exp(-z.square() / 2)
