"""Functions that split, join and select distributions of any family by their parameters, and cdfs of all families.

Also distributions of times until an event, which may be censored. A time is a signed number: t > 0 if the event
happened at t, and −t if it had not happened until t (censored). Its log density is log p(t), or log P(T > t).
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from pyro.distributions import Beta, Binomial, Categorical, Distribution, NegativeBinomial, Poisson, StudentT
from scipy import optimize, special, stats
from torch import Tensor
from torch.distributions.transforms import ExpTransform

from bnn_pyro.errors import UserError, refusing

#: The cumulative hazard continues linearly where its logarithm exceeds this (log p < −22,000), to bound gradients.
MAX_LOG_HAZARD = 10.0
#: Steps of the table of Student's t, and the largest |t| for which it is used: its outer steps are too wide for tails.
T_STEPS, MAX_T = 4096, 25.0
#: The error message for distributions without a mixture.
NO_PREDICTION = ("has no Prediction; use a univariate one that the tensors in its arg_constraints make, such as Normal"
                 ", a MixtureSameFamily of such, or .to_event(1) of one (docs/architecture.md)")  # fmt: skip


def parameters(d: Distribution) -> dict[str, tuple[Tensor, int]]:
    """{name: (value, its number of event dimensions)} of a distribution's parameters, with logits instead of probs.

    A MixtureSameFamily has the parameters of its components, and ``mixing``, the logits of its shares.
    Raises UserError for a distribution without tensors as parameters, and for one that is not univariate.
    """
    if isinstance(d, torch.distributions.MixtureSameFamily) and not d.event_shape:
        values = {name: (value, event + 1) for name, (value, event) in parameters(d.component_distribution).items()}
        return values | {"mixing": (d.mixture_distribution.logits, 1)}
    constraints = {} if d.event_shape else d.arg_constraints
    names = [name for name in constraints if name != "probs" or "logits" not in constraints]
    if not (values := {name: (getattr(d, name), constraints[name].event_dim) for name in names}):
        raise UserError(f"a likelihood of type {type(d).__name__} {NO_PREDICTION}")
    return values


def kind_of(d: Distribution) -> Callable[..., Distribution]:
    """The function that creates a distribution of d's family from :func:`parameters`."""
    if isinstance(d, torch.distributions.MixtureSameFamily):
        return partial(_same_family, kind_of(d.component_distribution))
    return type(d)


def _same_family(kind: Callable, mixing: Tensor, validate_args: bool, **values: Tensor) -> dist.MixtureSameFamily:
    shares = Categorical(logits=mixing, validate_args=False)
    return dist.MixtureSameFamily(shares, make(kind, values), validate_args=validate_args)


def make(kind: Callable[..., Distribution], values: dict[str, Tensor]) -> Distribution:
    """A distribution with these parameters. Logits must be normalised already, which saves the time for it."""
    if kind is not Categorical:
        return kind(**values, validate_args=False)
    logits = values["logits"]
    made = Categorical(logits=logits[:1, :1], validate_args=False).expand(logits.shape[:-1])
    made.logits = made._param = logits
    return made


def select(d: Distribution, index: Any) -> Distribution:
    """The distributions at an index of the batch shape."""
    return make(kind_of(d), {name: value[index] for name, (value, _) in parameters(d).items()})


def dtype_of(d: Distribution) -> torch.dtype:
    """The dtype of a distribution's parameters."""
    return next(iter(parameters(d).values()))[0].dtype


class HeavyTailed(StudentT):
    """Student's t, with gamma functions of the degrees of freedom computed before expansion to the batch shape."""

    def log_prob(self, value: Tensor) -> Tensor:
        """In nats."""
        df = self.df[tuple(slice(None) if stride else slice(1) for stride in self.df.stride())]
        z = (value - self.loc) / self.scale
        wide = df.double()  # float32 would lose digits in the difference of the gamma functions
        constant = torch.lgamma(0.5 * (wide + 1)) - torch.lgamma(0.5 * wide) - 0.5 * (math.pi * wide).log()
        return constant.to(df.dtype) - self.scale.log() - 0.5 * (df + 1) * (z.square() / df).log1p()


@lru_cache(1)
def _t_table(df: tuple[float, ...]) -> np.ndarray:
    """P(T ≤ t) for each of the degrees of freedom, (S, T_STEPS + 1), at equal steps of u = t / √(t² + 8)."""
    u = np.linspace(-1, 1, T_STEPS + 1)[1:-1]
    inner = special.stdtr(np.array(df)[:, None], u * np.sqrt(8 / (1 - u * u)))
    return np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, 1)))


def _t_cdf(y: np.ndarray, df: np.ndarray, loc: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The cdf with an error below 10⁻⁷; for many points per df by a table, which is much faster than scipy."""
    z = (y - loc) / scale
    if df.ndim != 2 or z.size < T_STEPS // 32 * len(df) or not z.size or (df != df[:, :1]).any():
        return special.stdtr(df, z)
    table = _t_table(tuple(df[:, 0])).ravel()
    with np.errstate(invalid="ignore"):
        at = (z / np.sqrt(z * z + 8) + 1) * (T_STEPS / 2)  # nan where z is not finite
        left = np.nan_to_num(np.minimum(at, T_STEPS - 1)).astype(np.int64)
    share, left = at - left, left + (T_STEPS + 1) * np.arange(len(df))[:, None]
    below, far = table[left] * (1 - share) + table[left + 1] * share, np.abs(z) > MAX_T
    below[far] = special.stdtr(np.broadcast_to(df, z.shape)[far], z[far])
    return below


def _binomial_cdf(y: np.ndarray, total_count: np.ndarray, logits: np.ndarray) -> np.ndarray:
    k = np.floor(y)
    inside = special.betainc((total_count - k).clip(1), k.clip(0) + 1, special.expit(-logits))
    return np.where(k < 0, 0.0, np.where(k < total_count, inside, 1.0))


#: P(Y ≤ y) of families without a cdf in PyTorch, as functions of y and the parameters; a step function for counts.
CDFS: dict[type, Callable[..., np.ndarray]] = {
    Poisson: lambda y, rate: np.where(y < 0, 0.0, special.gammaincc(np.floor(y).clip(0) + 1, rate)),
    NegativeBinomial: lambda y, total_count, logits: np.where(
        y < 0, 0.0, special.betainc(total_count, np.floor(y).clip(0) + 1, special.expit(-logits))
    ),
    Binomial: _binomial_cdf,
    Beta: lambda y, concentration1, concentration0: special.betainc(concentration1, concentration0, y.clip(0, 1)),
    StudentT: lambda y, df, loc, scale: special.stdtr(df, (y - loc) / scale),
    HeavyTailed: _t_cdf,
}


def cdf_of(d: Distribution, y: Tensor) -> Tensor:
    """P(Y ≤ y) float64, at real y that broadcasts. Raises UserError for a family without a cdf."""
    if isinstance(d, torch.distributions.MixtureSameFamily):
        return (cdf_of(d.component_distribution, y.unsqueeze(-1)) * d.mixture_distribution.probs).sum(-1)
    if type(d) in CDFS:
        values = {name: value.double().numpy() for name, (value, _) in parameters(d).items()}
        return torch.from_numpy(CDFS[type(d)](y.double().numpy(), **values))
    y = y.clamp_min(getattr(d.support, "lower_bound", -math.inf))  # some families give NaN below it
    absent = f"{type(d).__name__} has no cdf; give its likelihood a mixture with 'component_cdf'"
    with refusing(absent, NotImplementedError):
        return d.cdf(y.to(dtype_of(d))).double()


class LeastExtreme(dist.Gumbel):
    """loc + scale·ε, P(ε > z) = exp(−eᶻ): the logarithm of a Weibull variable, of shape 1/scale and scale exp(loc)."""

    #: loc − 0.5772 scale.
    mean = property(lambda self: 2 * self.loc - super().mean)

    def hazard(self, value: Tensor) -> Tensor:
        """The cumulative hazard −log P(X > value)."""
        z = (value - self.loc) / self.scale
        return z.clamp_max(MAX_LOG_HAZARD).exp() * (1 + (z - MAX_LOG_HAZARD).clamp_min(0))

    def log_prob(self, value: Tensor) -> Tensor:
        """z − eᶻ − log scale."""
        return (value - self.loc) / self.scale - self.hazard(value) - self.scale.log()

    def cdf(self, value: Tensor) -> Tensor:
        """1 − exp(−eᶻ)."""
        return -torch.expm1(-self.hazard(value))

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws of a Gumbel distribution, mirrored at loc."""
        return 2 * self.loc - super().rsample(torch.Size(sample_shape))

    sample = torch.no_grad()(rsample)


class Times(dist.TransformedDistribution):
    """T = exp X, where X is of class ``of_log`` with this loc and scale; ``log_prob`` takes −t for "later than t"."""

    arg_constraints = {"loc": dist.constraints.real, "scale": dist.constraints.positive}  # noqa: RUF012
    support = dist.constraints.real
    of_log: type[dist.TorchDistribution]

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        base = self.of_log(loc, scale, validate_args=validate_args)
        super().__init__(base, ExpTransform(), validate_args=validate_args)

    loc = property(lambda self: self.base_dist.loc)
    scale = property(lambda self: self.base_dist.scale)
    mean = property(lambda self: self._log_moment(1).exp())
    variance = property(lambda self: self.mean.square() * (self._log_moment(2) - 2 * self._log_moment(1)).expm1())

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> "Times":
        """See ``torch.distributions.Distribution``."""
        return type(self)(self.loc.expand(batch_shape), self.scale.expand(batch_shape), validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(t) at t > 0, log P(T > t) at −t, in nats."""
        log_t = value.abs().log()
        return torch.where(value > 0, self.base_dist.log_prob(log_t) - log_t, self._log_survival(log_t))


class WeibullTimes(Times):
    """P(T > t) = exp(−(t / exp loc)^(1/scale))."""

    of_log = LeastExtreme

    def _log_moment(self, k: int) -> Tensor:
        return k * self.loc + (1 + k * self.scale).lgamma()

    def _log_survival(self, log_t: Tensor) -> Tensor:
        return -self.base_dist.hazard(log_t)


class LogNormalTimes(Times):
    """log T ~ Normal(loc, scale)."""

    of_log = dist.Normal

    def _log_moment(self, k: int) -> Tensor:
        return k * self.loc + (k * self.scale).square() / 2

    def _log_survival(self, log_t: Tensor) -> Tensor:
        return torch.special.log_ndtr((self.loc - log_t) / self.scale)


def without_inputs(y: Tensor) -> WeibullTimes:
    """The maximum-likelihood Weibull distribution of times (N,), negative if censored; batch shape ()."""
    data = stats.CensoredData.right_censored(y.abs().double().numpy(), (y < 0).numpy())
    shape, _, scale = map(torch.tensor, stats.weibull_min.fit(data, floc=0))
    return WeibullTimes(scale.log().float(), (1 / shape).float())


def spread_counts(means: Tensor, y: Tensor, fitted: Tensor) -> NegativeBinomial:
    """Negative binomials with ``means``; dispersion by maximum likelihood from counts y (N,) with means ``fitted``."""
    y, fitted = (v[:: math.ceil(len(y) / 100_000)].double().numpy() for v in (y, fitted))
    loss = lambda log_r: -stats.nbinom.logpmf(y, r := math.exp(log_r), r / (r + fitted)).mean()  # noqa: E731
    log_r = optimize.minimize_scalar(loss, bounds=(-10, 16 + math.log1p(fitted.max())), method="bounded").x  # a Poisson
    return dist.NegativeBinomial(torch.tensor(math.exp(log_r)).double(), logits=means.double().log() - log_r)
