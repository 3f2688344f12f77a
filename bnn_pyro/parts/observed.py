"""The observed site "y" in the plate "data", whose names are used in this file only.

To add a likelihood, write a subclass of :class:`Likelihood`. The network's output is in standardised units, and the
likelihood applies the schema's shift and scale: ELBOs, test densities and intervals are in target units.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions.transforms import ExpTransform

from bnn_pyro.errors import UserError
from bnn_pyro.parts.mixtures import MIXTURES, ClassMixture, Mixture, NormalMixture
from bnn_pyro.parts.weights import base_of

#: The observed site of every model.
OBSERVED = "y"


class Likelihood(nn.Module):
    """p(y | f) of the network's output f (…, B, outputs); call it as ``likelihood(f, y=None)``.

    outputs          number of outputs that the network must have
    mixture          the class of an equally weighted mixture of its components (of one target); needed if it differs
                     from the class in ``MIXTURES``
    event_dim        1 if a row has several targets, y (B, T), and the components end in ``.to_event(1)``; else 0
    own_sites        the names of the likelihood's latent sites, such as the noise; see :meth:`add_own`
    own_information  {site: number}, the Fisher information of one target about each of these sites; the mixed
                     information of a site and the network's output must be 0
    has_classes      whether targets are labels of classes
    quadratic        whether log p(y | f) is quadratic in f with a known curvature, as in Bayesian linear regression
    """

    outputs: int = 1
    mixture: Callable[..., Mixture] = Mixture
    event_dim: int = 0
    own_sites: tuple[str, ...] = ()
    own_information: Mapping[str, float] = {}
    has_classes: bool = False
    quadratic: bool = False

    def add_own(self, **priors: tuple[float | Tensor, float | Tensor]) -> None:
        """Add latent sites: {name: mean and standard deviation, () or (n,), of its Normal prior}."""
        self.own_sites = (*self.own_sites, *priors)
        for name, (loc, scale) in priors.items():
            self.register_buffer(f"{name}_loc", torch.as_tensor(loc), persistent=False)
            self.register_buffer(f"{name}_scale", torch.as_tensor(scale), persistent=False)

    #: {own latent site: initial value}, the median of its prior.
    initial = property(lambda self: {name: getattr(self, f"{name}_loc") for name in self.own_sites})

    def own(self, name: str) -> Tensor:
        """Sample one of the likelihood's latent sites: (…, 1) per draw, or (…, 1, T) per draw and target."""
        loc, scale = getattr(self, f"{name}_loc"), getattr(self, f"{name}_scale")
        value = pyro.sample(name, dist.Normal(loc, scale).to_event(loc.dim()))
        # (S,) -> (S, 1), to broadcast with (S, B); vectorised particles have the shape (P, 1) already.
        return value.unsqueeze(-1 - loc.dim()) if value.dim() == 1 + loc.dim() else value

    #: The entry in the provenance for a user's own likelihood.
    description = property(lambda self: {"class": type(self).__name__})

    def components(self, f: Tensor) -> dist.TorchDistribution:
        """The distribution of y given f (…, B, outputs), batch shape (…, B); samples the likelihood's own sites."""
        raise UserError(f"{type(self).__name__} defines no 'components': a method that returns p(y | f), f the outputs")

    def information(self, f: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Fisher information of one target about f, (B, outputs, outputs), given {own site: value}."""
        raise UserError(f"{type(self).__name__} defines no 'information', which a Laplace approximation is made of")

    def fitted_noise(self, error: Tensor) -> dict[str, Tensor]:
        """{own site: value} for which the noise is ``error``, a root mean square of residuals; {} if there is none."""
        return {}

    def forward(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample, or observe targets y (B,), or (B, T): labels, or numbers in target units."""
        # Pyro's vectorised particles add a dimension of size 1 at -3.
        components = self.components(f := f.squeeze(-3) if f.dim() > 3 else f)
        name = f"{type(self).__name__}.components"
        if not isinstance(components, torch.distributions.Distribution):
            raise UserError(f"{name} must return a torch distribution, and gave {type(components).__name__}")
        if (shape := components.batch_shape)[-1:] != f.shape[-2:-1]:
            raise UserError(f"{name} makes a distribution of batch shape {tuple(shape)} of f {tuple(f.shape)}, where "
                            f"{tuple(f.shape[:-1])} is right; take f.squeeze(-1), or .to_event(1) with several "
                            "targets")  # fmt: skip
        if (dims := len(components.event_shape)) != self.event_dim:
            raise UserError(f"{name} makes events of {dims} dimensions, and its event_dim is {self.event_dim}; for "
                            "several targets both are 1")  # fmt: skip
        with pyro.plate("data", components.batch_shape[-1], dim=-1):
            return pyro.sample(OBSERVED, components, obs=y, infer={"mixture": self.mixture})


class LearnedNoise(Likelihood):
    """y = shift + scale·f + noise of one scale σ, f (…, B, 1).

    noise: a fixed σ in target units; or None for a latent site "log_noise", log(σ / scale) ~ Normal(-1, 1), which is
        unconstrained like a weight (95 % of the prior of σ: 0.05 to 2.7 target standard deviations).
    """

    #: (shift + scale·f, σ) -> the distribution of y.
    family: Callable[..., dist.TorchDistribution] = dist.Normal

    def __init__(self, shift: float = 0.0, scale: float = 1.0, noise: float | None = None) -> None:
        super().__init__()
        self.shift, self.scale, self.noise = shift, scale, noise
        self.add_own(**({} if noise is not None else {"log_noise": (-1.0, 1.0)}))

    def components(self, f: Tensor) -> dist.TorchDistribution:
        """See ``Likelihood``: distributions of the class ``family``."""
        loc = self.shift + self.scale * f.squeeze(-1)
        return self.family(loc, self.noise if self.noise is not None else self.scale * self.own("log_noise").exp())

    def relative_precision(self, f: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """(scale/σ)², (B, 1, 1)."""
        ratio = values["log_noise"].exp() if self.noise is None else f.new_tensor(self.noise / self.scale)
        return ratio.pow(-2).expand(f.shape)[..., None]


class OrdinalMixture(ClassMixture):
    """Mixture of Categoricals over ordered classes, which ``metrics.rps`` scores."""

    task = "ordinal"


class LogNormalMixture(NormalMixture):
    """Mixture of log-normals, with closed-form moments and densities, and transformed quantiles of log y."""

    transform = ExpTransform()

    #: The mixture of log y; see :meth:`Decisions.untransformed`.
    untransformed = cached_property(lambda self: NormalMixture(self.components.base_dist))

    def component_cdf(self, y: Tensor) -> Tensor:
        """See :meth:`Mixture.component_cdf`; it is 0 for y ≤ 0."""
        return self.untransformed.component_cdf(y.double().clamp_min(0).log())

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """See :meth:`Mixture.quantile`."""
        return self.untransformed.quantile(q).double().exp().float()

    crps = Mixture.crps  # by integration

    def discrepancy(self, y: Tensor, so_far: Tensor) -> Tensor:
        """See :meth:`Mixture.discrepancy`, here for log y."""
        return self.untransformed.discrepancy(y.log(), so_far)


class TimeMixture(LogNormalMixture):
    """Mixture of times; targets are signed, −t if censored at t. Draws are compared by their means of log t."""

    task = "survival"
    randomised = True

    def _need(self, task: str, attribute: str) -> None:
        super()._need(self.task if task == "regression" else task, attribute)

    untransformed = cached_property(lambda self: Mixture(self.components.base_dist))

    def component_below(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Mixture.component_below`; for a censored time (P_s(T ≤ t), P_s(T > t))."""
        cdf = self.component_cdf(y.abs())
        return cdf, torch.where(y > 0, 0.0, 1 - cdf)

    def output_values(self) -> Tensor:
        """The means of log t, (S, B, 1) float64: the means of t may overflow in float32."""
        return self.untransformed.output_values()

    def crps(self, y: Tensor) -> Tensor:
        """See :meth:`Mixture.crps`. Raises UserError for censored times, for which it is not a proper score."""
        if bool((y < 0).any()):
            raise UserError("the CRPS is of times that happened, and some are censored; take nll and concordance")
        return super().crps(y)


class Ordinal(Likelihood):
    """The cumulative logit model of K ordered classes (McCullagh 1980, JRSS B 42:109-142), with learned cut points.

    P(y ≤ k) = sigmoid(c_k − f), f (…, B, 1); c_k = c_{k−1} + exp(gap_k), a latent site "cuts" (first cut, gaps).

    Its prior is Normal, centred at the cuts for which the K classes are equally probable at f = 0. Its scale is 1.5 for
    the first cut, and 1 for each gap, the logarithm of a difference of cuts.
    """

    has_classes = True
    mixture = OrdinalMixture

    def __init__(self, classes: int) -> None:
        super().__init__()
        even = torch.arange(1, classes).div(classes).logit()
        self.add_own(cuts=(torch.cat([even[:1], even.diff().log()]), torch.tensor([1.5] + [1.0] * (classes - 2))))
        self.register_buffer("sums", torch.ones(classes - 1, classes - 1).triu(), persistent=False)

    def components(self, f: Tensor) -> dist.Categorical:
        """See ``Likelihood``."""
        cuts = self.own("cuts")
        first, gaps = cuts[..., :1], cuts[..., 1:].exp()
        above = torch.cat([first, gaps], -1) @ self.sums.to(cuts.dtype) - f  # c_k − f, (…, B, K − 1)
        # log(sigmoid(a) − sigmoid(b)) = log sigmoid(a) + log sigmoid(−b) + log(1 − exp(b − a)).
        end, between = torch.zeros_like(above[..., :1]), (-torch.expm1(-gaps)).log()
        tails = torch.cat([F.logsigmoid(above), end], -1) + torch.cat([end, F.logsigmoid(-above)], -1)
        return dist.Categorical(logits=tails + torch.cat([0 * first, between, 0 * first], -1))


class Recorder(Messenger):
    """Sets the values of latent sites and records all sites of a call: faster than two of Pyro's handlers."""

    def __init__(self, values: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.values = values or {}
        self.sites: dict[str, dict] = {}
        self.params: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: dict) -> None:
        if not msg["is_observed"] and msg["name"] in self.values:
            msg["value"], msg["done"] = self.values[msg["name"]], True

    def _pyro_post_sample(self, msg: dict) -> None:
        if not site_is_subsample(msg):
            self.sites[msg["name"]] = msg

    def _pyro_post_param(self, msg: dict) -> None:
        self.params[msg["name"]] = msg["value"]


class ReadLikelihood(Messenger):
    """Records the distribution at "y" and its mixture class, without sampling "y"; predictions are made from these.

    likelihood  the distribution of a single target
    mixture     its mixture class, or a function that creates a mixture
    """

    likelihood: dist.TorchDistribution
    mixture: Callable[..., Mixture]

    def _pyro_sample(self, msg: dict) -> None:
        if msg["name"] == OBSERVED:
            self.likelihood = base_of(msg["fn"])
            self.mixture = msg["infer"].get("mixture", Mixture)
            several, usual = MIXTURES[dist.Independent], self.mixture
            if isinstance(msg["fn"], dist.Independent) and isinstance(usual, type) and not issubclass(usual, several):
                self.mixture = partial(several, one=usual)
            msg["value"], msg["done"] = torch.empty(0), True


def read_likelihood(model: Callable[..., object], x: Tensor, first: int = 0) -> ReadLikelihood:
    """Call the model with rows x, the first of which has number ``first``.   Raises UserError for invalid outputs."""
    try:
        with ReadLikelihood() as read:
            model(x)
        return read
    except ValueError as refused:
        if "constraint" not in str(refused):
            raise
        for half, start in ((x[: len(x) // 2], first), (x[len(x) // 2 :], first + len(x) // 2)):
            if len(x) > 1:
                read_likelihood(model, half, start)
        raise UserError(f"the model's output at row {first} (from 0) is nan, infinite or out of range") from None
