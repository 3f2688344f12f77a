"""An equal mixture of S components, one per draw of the weights: its moments, quantiles and scores.

Probabilities are averaged, never log-probabilities, and moments and quantiles are those of the mixture, not of a
matched Gaussian. A likelihood names its class of mixture; a bare distribution's is looked up in ``MIXTURES``. Shapes:
S draws, B points, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar

import torch
from pyro.distributions import Bernoulli, Categorical, Distribution, Normal
from torch import Tensor

from bnn_pyro.errors import UserError

__all__ = ["MIXTURES", "BernoulliMixture", "ClassMixture", "Mixture", "NormalMixture", "make", "parameters", "rebuild"]

#: Entries of the largest array of one block, 8 MB in float64.
BLOCK = 2**20
#: Points at which a cdf is evaluated to integrate it: of a continuous one on either side of y, of counts.
GRID, COUNTS = 512, 4096


class Mixture:
    """Mixture of any univariate distribution of numbers that has a mean, a variance, ``log_prob`` and ``cdf``.

    components  a distribution of batch shape (S, B)

    A family without ``cdf`` gets a subclass with :meth:`component_cdf`, named by its likelihood as ``mixture``.
    """

    #: What the targets are: numbers or labels. ``has_classes`` decides which metrics and figures apply.
    task: ClassVar[str] = "regression"
    has_classes: ClassVar[bool] = False

    def __init__(self, components: Distribution) -> None:
        self.components = components

    def log_probs(self, y: Tensor) -> Tensor:
        """log p_s(y), (S, B), nats. y: (B,)."""
        return self.components.log_prob(y.to(_dtype(self.components)))

    def component_cdf(self, y: Tensor) -> Tensor:
        """P_s(Y ≤ y), (…, S, B) float64, at real y (…, B); of counts, a step function."""
        try:
            return self.components.cdf(y.unsqueeze(-2).to(_dtype(self.components))).double()
        except NotImplementedError:
            family = type(self.components).__name__
            raise UserError(f"{family} has no cdf; give its likelihood a mixture with 'component_cdf'") from None

    def component_below(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """(P_s(Y < y), P_s(Y = y)), float64, the second 0 of shape (1, 1) where Y is continuous. y: (B,)."""
        cdf = self.component_cdf(y)
        if not self.is_discrete:
            return cdf, cdf.new_zeros(1, 1)
        at = self.log_probs(y).double().exp()
        return cdf - at, at

    def output_values(self) -> Tensor:
        """The K numbers by which draws are compared, (S, B, K) float64: here the means, K = 1."""
        return self.components.mean.double()[..., None]

    @property
    def is_discrete(self) -> bool:
        """Whether Y takes separate values only, such as counts."""
        return self.components.support.is_discrete

    def discrepancy(self, y: Tensor, so_far: Tensor) -> Tensor:
        """How badly y (B,) and the points before, (S,), fit: the largest |y − mean| / standard deviation."""
        return torch.maximum(so_far, ((y - self.components.mean) / self.components.stddev).abs().amax(1))

    @cached_property
    def mean(self) -> Tensor:
        """Predictive mean (B,), target units."""
        return self.components.mean.mean(0)

    @cached_property
    def total(self) -> Tensor:
        """Variance of the mixture (B,)."""
        return self.aleatoric + self.epistemic

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean variance of the components (B,)."""
        return self.components.variance.mean(0)

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance of the components' means (B,)."""
        return self.components.mean.double().var(0, unbiased=False).float()

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) = logsumexp_s log p_s(y) − log S, (B,), nats."""
        return torch.logsumexp(self.log_probs(y), 0) - math.log(self.components.batch_shape[0])

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y ≤ y), (…, B) float64; y (…, B)."""
        return self.component_cdf(y).mean(-2)

    def bracket(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Ends between which the quantiles lie, each (Q, B) float64: those of Cantelli's inequality."""
        mean, sd, odds = self.mean.double(), self.total.double().sqrt(), (levels / (1 - levels))[:, None].sqrt()
        return mean - sd / odds, mean + sd * odds

    def quantile(self, levels: Tensor) -> Tensor:
        """Quantiles (Q, B) by bisection of the cdf to 1e-9 of the bracket; levels (Q,) float64 in (0, 1)."""
        low, high = self.bracket(levels)
        for _ in range(30):
            middle = (low + high) / 2
            below = self.cdf(middle) < levels[:, None]
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        middle = (low + high) / 2
        return (middle.round() if self.is_discrete else middle).float()

    def crps(self, y: Tensor) -> Tensor:
        """∫ (P(Y ≤ t) − 1{y ≤ t})² dt, (B,) float64, y (B,) float64.

        Of counts a sum, over every one of up to 4,096; else by the trapezoid rule on either side of y.
        """
        mean, margin = self.components.mean.double(), 8 * self.components.stddev.double()
        low, high = torch.minimum((mean - margin).amin(0), y), torch.maximum((mean + margin).amax(0), y)
        if not bool((high - low).isfinite().all()):
            return torch.full_like(low, math.nan)
        if self.is_discrete:
            low, span = low.floor(), math.ceil(float((high - low).max())) + 1
            step = max(1, span // COUNTS)
            at = (low + k for k in range(0, span + 1, step))
            return step * sum((self.cdf(t) - (y <= t).double()).square() for t in at)
        share = torch.linspace(0, 1, GRID, dtype=torch.float64)[:, None]
        left, right = low + share * (y - low), y + share * (high - y)
        below, above = self.cdf(left).square(), (1 - self.cdf(right)).square()
        return torch.trapezoid(below, left, dim=0) + torch.trapezoid(above, right, dim=0)


class NormalMixture(Mixture):
    """Mixture of Normals, whose cdf, bracket and CRPS have closed forms."""

    def component_cdf(self, y: Tensor) -> Tensor:
        """See :meth:`Mixture.component_cdf`; in float64 throughout."""
        z = (y.unsqueeze(-2).double() - self.components.loc.double()) / self.components.scale.double()
        return torch.special.ndtr(z)

    def bracket(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """The extreme ones of the components' own quantiles."""
        z = torch.special.ndtri(levels)[:, None, None]  # (Q, 1, 1)
        ends = self.components.loc.double() + z * self.components.scale.double()  # (Q, S, B)
        return ends.amin(-2), ends.amax(-2)

    def crps(self, y: Tensor) -> Tensor:
        """E|Y − y| − ½ E|Y − Y'|, both in closed form for a mixture of S Gaussians (Grimit et al. 2006, eq. 5)."""
        draws = self.components.batch_shape[0]
        scores = []
        for rows in torch.arange(len(y)).split(max(1, BLOCK // draws)):
            loc, scale = self.components.loc[:, rows].double(), self.components.scale[:, rows].double()
            to_y = _mean_distance(y[rows] - loc, scale).mean(0)
            # Every pair (s, t) of draws by their lag around the circle: (S, B) at a time, and each unordered pair once.
            between = _mean_distance(torch.zeros_like(loc), math.sqrt(2) * scale).sum(0)
            for lag in range(1, draws // 2 + 1):
                distance = _mean_distance(loc - loc.roll(lag, 0), torch.hypot(scale, scale.roll(lag, 0))).sum(0)
                between += distance if 2 * lag == draws else 2 * distance
            scores.append(to_y - between / (2 * draws**2))
        return torch.cat(scores)


class ClassMixture(Mixture):
    """Mixture of Categoricals over the labels 0 … K−1; entropies and information in nats."""

    task = "classification"
    has_classes = True

    @cached_property
    def probs(self) -> Tensor:
        """Class probabilities of every component, (S, B, K)."""
        return self.components.logits.exp()  # they are normalised; a softmax would take eight times as long

    @cached_property
    def mean(self) -> Tensor:
        """Mean class probabilities (B, K)."""
        return self.probs.mean(0)

    @cached_property
    def total(self) -> Tensor:
        """Entropy of the mean probabilities (B,)."""
        return _entropy(self.mean)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean entropy of the components (B,)."""
        return torch.cat([_entropy(p).mean(0) for p in self.probs.split(1000, dim=1)])

    @cached_property
    def epistemic(self) -> Tensor:
        """Mutual information I(y; w) (B,)."""
        return (self.total - self.aleatoric).clamp_min(0.0)  # ≥ 0 by Jensen; the clamp removes rounding only

    def log_probs(self, y: Tensor) -> Tensor:
        """log p_s(y), (S, B), of labels y (B,)."""
        return self.components.log_prob(y.long())

    def component_below(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """(P_s(Y < y), P_s(Y = y)) in the order of the labels, each (S, B) float64."""
        probs, label = self.probs.double(), y.long().expand(len(self.probs), -1)[..., None]
        at = probs.gather(-1, label)[..., 0]
        return probs.cumsum(-1).gather(-1, label)[..., 0] - at, at

    def output_values(self) -> Tensor:
        """Log-odds of every class, (S, B, K) float64."""
        logits = self.components.logits.double()
        # log p/(1 − p): probabilities that round to 1 would tie in rank.
        others = [torch.cat([logits[..., :k], logits[..., k + 1 :]], -1).logsumexp(-1) for k in range(logits.shape[-1])]
        return logits - torch.stack(others, -1)

    def discrepancy(self, y: Tensor, so_far: Tensor) -> Tensor:
        """How badly y (B,) and the points before, (S,), fit: the sum of −log p_s(y)."""
        return so_far - self.log_probs(y).double().sum(1).float()


class BernoulliMixture(ClassMixture):
    """Mixture of Bernoullis: K = 2 classes by one log-odds."""

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities of both classes, (S, B, 2)."""
        return torch.stack([torch.sigmoid(-self.components.logits), torch.sigmoid(self.components.logits)], -1)

    log_probs = Mixture.log_probs

    def output_values(self) -> Tensor:
        """Log-odds of the second class, (S, B, 1) float64."""
        return self.components.logits.double()[..., None]


#: The mixture of a distribution that comes without a likelihood of ours; of any other, :class:`Mixture`.
MIXTURES: dict[type, type[Mixture]] = {Categorical: ClassMixture, Bernoulli: BernoulliMixture, Normal: NormalMixture}


# -- distributions by their parameters -----------------------------------------------------------------------------
def parameters(d: Distribution) -> dict[str, tuple[Tensor, int]]:
    """{name: (value, its number of event dimensions)} of what makes a distribution; as logits where it has them.

    Raises UserError for a distribution that is not made of tensors, or of an event that is not one number.
    """
    constraints = {} if d.event_shape else d.arg_constraints
    found = {
        name: (getattr(d, name), constraint.event_dim)
        for name, constraint in constraints.items()
        if name != "probs" or "logits" not in constraints
    }
    if not found:
        raise UserError(
            f"a likelihood of type {type(d).__name__} has no Prediction; use a univariate one, such as Categorical, "
            "Bernoulli, Normal or Poisson"
        )
    return found


def make(kind: type, values: dict[str, Tensor]) -> Distribution:
    """A distribution of parameters that were read off others of its kind.

    Their logits are normalised; the constructor would do it again, in the time of the product that they came from.
    """
    if kind is not Categorical:
        return kind(**values, validate_args=False)
    logits = values["logits"]
    made = Categorical(logits=logits[:1, :1], validate_args=False).expand(logits.shape[:-1])
    made.logits = made._param = logits
    return made


def rebuild(d: Distribution, change: Callable[[Tensor, int], Tensor]) -> Distribution:
    """The same distribution of changed parameters; change(value, event dimensions)."""
    return make(type(d), {name: change(value, event) for name, (value, event) in parameters(d).items()})


def _dtype(d: Distribution) -> torch.dtype:
    return next(iter(parameters(d).values()))[0].dtype


def _mean_distance(loc: Tensor, scale: Tensor) -> Tensor:
    """E|Z| for Z ~ Normal(loc, scale)."""
    z = loc / scale
    return loc * torch.erf(z / math.sqrt(2)) + scale * math.sqrt(2 / math.pi) * torch.exp(-z.square() / 2)


def _entropy(probs: Tensor) -> Tensor:
    """Entropy in nats over the last dimension; 0·log 0 = 0."""
    return -torch.special.xlogy(probs, probs).sum(-1)
