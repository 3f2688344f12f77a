"""The likelihoods, and the choice of one for a schema. To add one, write a class and add a line to ``LIKELIHOODS``."""

import math
from collections.abc import Mapping

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError, check_known, refusing
from bnn_pyro.parts.components import HeavyTailed, LogNormalTimes, WeibullTimes
from bnn_pyro.parts.observed import LearnedNoise, Likelihood, LogNormalMixture, Ordinal, TimeMixture
from bnn_pyro.parts.several import CorrelatedNoise, Several


class Categorical(Likelihood):
    """y ~ Categorical(softmax f), f (…, B, K)."""

    has_classes = True

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.outputs = classes

    def components(self, f: Tensor) -> dist.Categorical:
        """See ``Likelihood``."""
        return dist.Categorical(logits=f)

    def information(self, f: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """diag(p) − p pᵀ, which is minus the Hessian of log p(y | f) for every y."""
        p = f.softmax(-1)
        return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


class Bernoulli(Likelihood):
    """y ~ Bernoulli(sigmoid f), f (…, B, 1)."""

    has_classes = True

    def components(self, f: Tensor) -> dist.Bernoulli:
        """See ``Likelihood``."""
        return dist.Bernoulli(logits=f.squeeze(-1))

    def forward(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample, or observe labels y (B,), 0 or 1 of any dtype."""
        return super().forward(f, None if y is None else y.to(f.dtype))

    def information(self, f: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """p (1 − p), which is minus the second derivative of log p(y | f) for every y."""
        return (f.sigmoid() * (-f).sigmoid())[..., None]


class Normal(LearnedNoise):
    """y ~ Normal(shift + scale·f, σ), f (…, B, 1); see :class:`LearnedNoise` for σ."""

    quadratic = property(lambda self: self.noise is not None)

    def fitted_noise(self, error: Tensor) -> dict[str, Tensor]:
        """See ``Likelihood``; at least 10⁻³ of the target's standard deviation, so that densities are bounded."""
        return {} if self.noise is not None else {"log_noise": (error / self.scale).clamp_min(1e-3).log()}

    #: E[(∂ log p(y) / ∂ log σ)²] = E[(r² − 1)²] = 2, r standard Normal.
    own_information = property(lambda self: dict.fromkeys(self.own_sites, 2.0))
    #: Minus the second derivative of log p(y | f) for every y.
    information = LearnedNoise.relative_precision


class Heteroscedastic(Likelihood):
    """y ~ Normal(shift + scale·f₁, scale·(10⁻³ + softplus f₂)), f (…, B, 2): the noise depends on the input.

    The floor of 10⁻³ bounds the density at points that the network fits exactly.
    """

    outputs = 2
    floor = 1e-3

    def __init__(self, shift: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.shift, self.scale = shift, scale

    def components(self, f: Tensor) -> dist.Normal:
        """See ``Likelihood``."""
        mean, raw = f.unbind(-1)
        return dist.Normal(self.shift + self.scale * mean, self.scale * (self.floor + F.softplus(raw)))

    def information(self, f: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """diag(1, 2 s'²) / s², s = 10⁻³ + softplus f₂: the expectation over y; the Hessian need not be positive."""
        raw = f[..., 1]
        s = self.floor + F.softplus(raw)
        return torch.diag_embed(torch.stack([s.pow(-2), 2 * (raw.sigmoid() / s).square()], -1))


class HeavyTails:
    """A mixin that turns Normal components into Student's t, ν = 2 + exp(log_df), log_df ~ Normal(2, 1).

    ν > 2, so that the variance is finite; 95 % of its prior is between 3 and 54. Lange, Little & Taylor 1989.
    """

    information = Likelihood.information

    def __init__(self, *units: float | None, **by_name: float | None) -> None:
        super().__init__(*units, **by_name)
        self.add_own(log_df=(2.0, 1.0))

    def components(self, f: Tensor) -> HeavyTailed:
        """See ``Likelihood``."""
        normal = super().components(f)
        return HeavyTailed(2 + self.own("log_df").exp(), normal.loc, normal.scale)


class StudentT(HeavyTails, LearnedNoise):
    """y ~ StudentT(ν; shift + scale·f, σ), ν as in ``HeavyTails``, σ as in ``LearnedNoise``."""


class HeteroscedasticT(HeavyTails, Heteroscedastic):
    """y ~ StudentT(ν; shift + scale·f₁, scale·(10⁻³ + softplus f₂)), ν as in ``HeavyTails``, one for all inputs."""


class LaplaceNoise(LearnedNoise):
    """y ~ Laplace(shift + scale·f, σ), density exp(−|y − loc|/σ) / 2σ; σ as in ``LearnedNoise``."""

    family = dist.Laplace
    #: E[(∂ log p(y) / ∂ log σ)²] = E[(|r| − 1)²] = 1, |r| standard exponential.
    own_information = property(lambda self: dict.fromkeys(self.own_sites, 1.0))
    #: The expectation of the squared slope of log p(y | f), which has no second derivative.
    information = LearnedNoise.relative_precision


class OnLogScale:
    """A mixin that turns Normal components for y into Normal components for log y: y > 0 is log-normal.

    The density of y includes the Jacobian 1/y. Functions of f alone, such as the information, do not change.
    """

    mixture = LogNormalMixture

    def components(self, f: Tensor) -> dist.LogNormal:
        """See ``Likelihood``."""
        normal = super().components(f)
        return dist.LogNormal(normal.loc, normal.scale)


class LogNormal(OnLogScale, Normal):
    """log y has the likelihood ``Normal``: y ~ LogNormal(shift + scale·f, σ)."""


class LogHeteroscedastic(OnLogScale, Heteroscedastic):
    """log y has the likelihood ``Heteroscedastic``: relative errors that depend on the input."""


#: The largest f in exp f, at e¹⁵ times the mean count, to avoid overflow in float32.
MAX_LOG = 15.0


class Poisson(Likelihood):
    """y ~ Poisson(shift · exp f), f (…, B, 1)."""

    def __init__(self, shift: float = 1.0) -> None:
        super().__init__()
        self.shift = shift if shift > 0 else 1.0

    def forward(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample, or observe counts y (B,), in float64 as the components: log y! of large counts cancels."""
        return super().forward(f, None if y is None else y.double())

    def log_mean(self, f: Tensor) -> Tensor:
        """f, at most ``MAX_LOG``, (…, B) float64."""
        return f.squeeze(-1).double().clamp_max(MAX_LOG)

    def components(self, f: Tensor) -> dist.Poisson:
        """See ``Likelihood``."""
        return dist.Poisson(self.shift * self.log_mean(f).exp())

    def information(self, f: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """The mean, which is minus the second derivative of log p(y | f) for every y."""
        return self.shift * self.log_mean(f).exp()[..., None, None]


class NegativeBinomial(Poisson):
    """y ~ NegativeBinomial of mean m = shift · exp f and variance m + m²/r; log r ~ Normal(2, 1.5), a latent site.

    95 % of the prior of r is between 0.4 and 140; r → ∞ is a Poisson.
    """

    information = Likelihood.information  # not available: the information about r has no closed form

    def __init__(self, shift: float = 1.0) -> None:
        super().__init__(shift)
        self.add_own(log_dispersion=(2.0, 1.5))

    def components(self, f: Tensor) -> dist.NegativeBinomial:
        """See ``Likelihood``."""
        log_r = self.own("log_dispersion").double()
        return dist.NegativeBinomial(log_r.exp(), logits=self.log_mean(f) + math.log(self.shift) - log_r)


class Weibull(LearnedNoise):
    """t ~ Weibull of scale exp(shift + scale·f) and shape 1/σ, f (…, B, 1); σ as in ``LearnedNoise``, of log t."""

    mixture, family = TimeMixture, WeibullTimes


class LogNormalTime(Weibull):
    """log t ~ Normal(shift + scale·f, σ), f (…, B, 1); σ as in ``LearnedNoise``, of log t."""

    family = LogNormalTimes


#: {setting ``likelihood``: (class, its task)}. A task's first one is its default: most counts are not Poisson.
LIKELIHOODS: dict[str, tuple[type[Likelihood], str]] = {
    "normal": (Normal, "regression"),
    "student-t": (StudentT, "regression"),
    "laplace": (LaplaceNoise, "regression"),
    "negative-binomial": (NegativeBinomial, "counts"),
    "poisson": (Poisson, "counts"),
    "ordinal": (Ordinal, "ordinal"),
    "weibull": (Weibull, "survival"),
    "log-normal": (LogNormalTime, "survival"),
}


def make_likelihood(schema: Schema, noise: str | float = "learned", likelihood: str | None = None) -> Likelihood:
    """The likelihood for a schema.

    noise: for numbers ``"learned"`` (one scale with a LogNormal prior), ``"heteroscedastic"`` (a second output of the
        network; "normal" and "student-t" only), ``"correlated"`` (several targets; "normal" only) or a fixed scale in
        target units (of log y if the target is on a log scale). Ignored for classes and counts.
    likelihood: a key of ``LIKELIHOODS``; by default that of the task.
    Raises UserError for a likelihood that does not suit the task, or a noise that it does not support.
    """
    name = likelihood or next((name for name, (_, task) in LIKELIHOODS.items() if task == schema.task), "normal")
    check_known("likelihood", LIKELIHOODS, name)
    kind, task = LIKELIHOODS[name]
    if likelihood is not None and task != (needed := "regression" if schema.task == "targets" else schema.task):
        fit = [name for name, (_, task) in LIKELIHOODS.items() if task == needed]
        way = f"take {' or '.join(fit)}" if fit else "leave it out"
        way += f", or say --task {task} (task=)"
        raise UserError(f"likelihood={name} is for {task}, and the task is {schema.task}; {way}")
    if noise == "correlated":
        if schema.task != "targets" or kind is not Normal:
            raise UserError("noise=correlated is of several targets that are numbers, with likelihood=normal")
        return CorrelatedNoise(schema.y_shift, schema.y_scale)
    if schema.task == "labels":
        return Several(Bernoulli(), *[(0.0,) * len(schema.targets)] * 2)
    if schema.targets:
        return Several(make_likelihood(schema.of_target(""), noise, likelihood), schema.y_shift, schema.y_scale)
    if task == "ordinal":
        return kind(len(schema.classes))
    if schema.has_classes:
        return Bernoulli() if len(schema.classes) == 2 else Categorical(len(schema.classes))
    if task == "counts":
        return kind(schema.y_shift)
    on_log_scale = schema.target_scale == "log"
    if on_log_scale and kind is not Normal:
        raise UserError(f"target_scale=log goes with likelihood=normal, not {name}: y need not have a finite mean")
    if noise == "heteroscedastic":
        by_input = {Normal: LogHeteroscedastic if on_log_scale else Heteroscedastic, StudentT: HeteroscedasticT}
        if kind not in by_input:
            raise UserError(f"noise=heteroscedastic goes with likelihood=normal or student-t, not {name}")
        return by_input[kind](schema.y_shift, schema.y_scale)
    with refusing("noise must be 'learned', 'heteroscedastic', 'correlated' (of several targets) or a positive number "
                  f"(target units), got {noise!r}", TypeError, ValueError):  # fmt: skip
        scale = None if noise == "learned" else float(noise)
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError
    return (LogNormal if on_log_scale else kind)(schema.y_shift, schema.y_scale, scale)
