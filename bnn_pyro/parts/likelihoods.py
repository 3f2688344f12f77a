"""From the network's output to the site "y" in the plate "data": the only file that names either.

To add a likelihood: a subclass of :class:`Likelihood`. The network works on standardised values, and the shift and
scale of the schema are applied to its output: ELBOs, test densities and intervals are all in the target's own units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from bnn_pyro.parts.mixtures import Mixture

__all__ = ["OBSERVED", "Bernoulli", "Categorical", "Heteroscedastic", "Likelihood", "Normal", "ReadLikelihood",
           "make_likelihood"]  # fmt: skip

#: The observed site of every model.
OBSERVED = "y"


def make_likelihood(schema: Schema, noise: str | float = "learned") -> Likelihood:
    """The likelihood for a schema.

    noise: for regression, ``"learned"`` (one standard deviation with a LogNormal prior), ``"heteroscedastic"`` (a
        second output of the network) or a fixed standard deviation in target units. Ignored in classification.
    """
    if schema.has_classes:
        return Bernoulli() if len(schema.classes) == 2 else Categorical(len(schema.classes))
    if noise == "heteroscedastic":
        return Heteroscedastic(schema.y_shift, schema.y_scale)
    if noise == "learned":
        return Normal(schema.y_shift, schema.y_scale, None)
    try:
        scale = float(noise)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise UserError(
            f"noise must be 'learned', 'heteroscedastic' or a positive number (target units), got {noise!r}"
        )
    return Normal(schema.y_shift, schema.y_scale, scale)


class Likelihood(nn.Module):
    """p(y | f) of the network's output f (…, B, outputs); call it as ``likelihood(f, y=None)``.

    outputs          width that the network must have
    mixture          the class of an equal mixture of its components, where that is not the one in ``MIXTURES``; it
                     says whether the targets are labels or numbers
    initial          {site: value} where its own latent sites start, such as the noise
    own_information  {site: number}, the Fisher information of one target about each of its own sites; between them and
                     the network's output there is none
    quadratic        whether log p(y | f) is quadratic in f, of a known curvature: the posterior of a linear model with
                     a Normal prior is then Normal
    """

    outputs: int = 1
    mixture: ClassVar[type[Mixture]] = Mixture
    initial: Mapping[str, Tensor] = {}
    own_information: Mapping[str, float] = {}
    quadratic: bool = False

    def components(self, f: Tensor) -> dist.TorchDistribution:
        """The distribution of y given f (…, B, outputs), batch shape (…, B); draws the likelihood's own sites."""
        raise NotImplementedError

    def information(self, f: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """Fisher information of one target about f, (B, outputs, outputs), given {own site: value}."""
        raise UserError(f"{type(self).__name__} defines no 'information', which a Laplace approximation is made of")

    def fitted_noise(self, error: Tensor) -> dict[str, Tensor]:
        """{own site: value} by which the noise is ``error``, a root mean square of residuals; {} where none says so."""
        return {}

    def forward(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample, or observe targets y (B,): labels, or numbers in target units."""
        # The plate's own dimension -2 is removed where Pyro's vectorised particles put a 1 there.
        components = self.components(f.squeeze(-3) if f.dim() > 3 else f)
        with pyro.plate("data", components.batch_shape[-1], dim=-1):
            return pyro.sample(OBSERVED, components, obs=y, infer={"mixture": self.mixture})


class Categorical(Likelihood):
    """y ~ Categorical(softmax f), f (…, B, K)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.outputs = classes

    def components(self, f: Tensor) -> dist.Categorical:
        """See ``Likelihood``."""
        return dist.Categorical(logits=f)

    def information(self, f: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """diag(p) − p pᵀ, which is minus the Hessian of log p(y | f) for every y."""
        p = f.softmax(-1)
        return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


class Bernoulli(Likelihood):
    """y ~ Bernoulli(sigmoid f), f (…, B, 1)."""

    def components(self, f: Tensor) -> dist.Bernoulli:
        """See ``Likelihood``."""
        return dist.Bernoulli(logits=f.squeeze(-1))

    def forward(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample, or observe labels y (B,), 0 or 1 of any dtype."""
        return super().forward(f, None if y is None else y.to(f.dtype))

    def information(self, f: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """p (1 − p), which is minus the second derivative of log p(y | f) for every y."""
        return (f.sigmoid() * (-f).sigmoid())[..., None]


class Normal(Likelihood):
    """y ~ Normal(shift + scale·f, σ), f (…, B, 1).

    noise: σ in target units, fixed; or None: log(σ / scale) ~ Normal(-1, 1), a latent site "log_noise" on the whole
        real line, so that every method takes it as it takes a weight (95 % of the prior: 0.05 to 2.7 of the target's
        standard deviation).
    """

    def __init__(self, shift: float = 0.0, scale: float = 1.0, noise: float | None = None) -> None:
        super().__init__()
        self.shift, self.scale, self.noise = shift, scale, noise
        self.register_buffer("log_noise_loc", torch.tensor(-1.0), persistent=False)
        self.register_buffer("log_noise_scale", torch.tensor(1.0), persistent=False)

    @property
    def initial(self) -> dict[str, Tensor]:
        """The noise starts at its prior's median."""
        return {} if self.noise is not None else {"log_noise": self.log_noise_loc}

    @property
    def quadratic(self) -> bool:
        """Where the noise is fixed."""
        return self.noise is not None

    def components(self, f: Tensor) -> dist.Normal:
        """See ``Likelihood``."""
        loc = self.shift + self.scale * f.squeeze(-1)
        if self.noise is not None:
            return dist.Normal(loc, self.noise)
        log_noise = pyro.sample("log_noise", dist.Normal(self.log_noise_loc, self.log_noise_scale))
        # One noise per draw: (S,) -> (S, 1) against (S, B); vectorised particles bring (P, 1) already.
        return dist.Normal(loc, self.scale * (log_noise.unsqueeze(-1) if log_noise.dim() == 1 else log_noise).exp())

    def fitted_noise(self, error: Tensor) -> dict[str, Tensor]:
        """See ``Likelihood``; at least a thousandth of the target's standard deviation, a density's bound."""
        return {} if self.noise is not None else {"log_noise": (error / self.scale).clamp_min(1e-3).log()}

    @property
    def own_information(self) -> dict[str, float]:
        """E[(∂ log p(y) / ∂ log σ)²] = E[(r² − 1)²] = 2, r standard Normal."""
        return {} if self.noise is not None else {"log_noise": 2.0}

    def information(self, f: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """(scale/σ)², which is minus the second derivative of log p(y | f) for every y."""
        ratio = own["log_noise"].exp() if self.noise is None else f.new_tensor(self.noise / self.scale)
        return ratio.pow(-2).expand(f.shape)[..., None]


class Heteroscedastic(Likelihood):
    """y ~ Normal(shift + scale·f₁, scale·(10⁻³ + softplus f₂)), f (…, B, 2): the noise depends on the input.

    The floor keeps the density finite where the network would explain a point exactly.
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

    def information(self, f: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """diag(1, 2 s'²) / s², s = 10⁻³ + softplus f₂: the expectation over y; the Hessian need not be positive."""
        raw = f[..., 1]
        s = self.floor + F.softplus(raw)
        return torch.diag_embed(torch.stack([s.pow(-2), 2 * (raw.sigmoid() / s).square()], -1))


class ReadLikelihood(Messenger):
    """Keeps the distribution at "y" and its mixture, and skips its sampling: how predictions read a model.

    likelihood  the distribution
    mixture     the class of its likelihood's mixture; :class:`Mixture` itself takes that of the distribution's family
    """

    likelihood: dist.TorchDistribution
    mixture: type[Mixture]

    def _pyro_sample(self, msg: dict) -> None:
        if msg["name"] == OBSERVED:
            self.likelihood = msg["fn"]
            while isinstance(self.likelihood, dist.Independent):
                self.likelihood = self.likelihood.base_dist
            self.mixture = msg["infer"].get("mixture", Mixture)
            msg["value"], msg["done"] = torch.empty(0), True
