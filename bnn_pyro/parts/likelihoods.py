"""From the network's output to the site "y" in the plate "data": the only file that names either.

A likelihood is a callable ``likelihood(f, y=None)`` with two attributes: ``outputs``, the width that the network must
have, and ``initial``, where the latent sites of its own start (the noise). Its method ``information(f, own)`` is the
Fisher information of one target about the network's output, (B, outputs, outputs), given {own site: value}, and
``own_information`` that about its own sites, {site: number}; between the two there is none. Targets are in their own
units here: the network works on standardised values, and the shift and scale of the schema are applied to its output,
so that an ELBO, a test density and an interval all speak the user's units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError

__all__ = ["OBSERVED", "Bernoulli", "Categorical", "Heteroscedastic", "Normal", "ReadLikelihood", "make_likelihood"]

#: The observed site of every model.
OBSERVED = "y"


def make_likelihood(schema: Schema, noise: str | float = "learned") -> nn.Module:
    """The likelihood for a schema.

    noise: for regression, ``"learned"`` (one standard deviation with a LogNormal prior), ``"heteroscedastic"`` (a
        second output of the network) or a number: the standard deviation, fixed, in target units. Ignored in
        classification.
    """
    if schema.task == "classification":
        return Bernoulli() if len(schema.classes) == 2 else Categorical(len(schema.classes))
    if noise == "heteroscedastic":
        return Heteroscedastic(schema.y_shift, schema.y_scale)
    if noise == "learned":
        return Normal(schema.y_shift, schema.y_scale, None)
    try:
        scale = float(noise)
    except ValueError:
        scale = math.nan
    if not (scale > 0 and math.isfinite(scale)):
        raise UserError(
            f"noise must be 'learned', 'heteroscedastic' or a positive number (target units), got {noise!r}"
        )
    return Normal(schema.y_shift, schema.y_scale, scale)


def _observe(likelihood: dist.TorchDistribution, points: int, y: Tensor | None) -> Tensor:
    with pyro.plate("data", points, dim=-1):
        return pyro.sample(OBSERVED, likelihood, obs=y)


def _outputs(f: Tensor) -> Tensor:
    """(…, B, out) with the plate's own dimension -2 removed where Pyro's vectorised particles put a 1 there."""
    return f.squeeze(-3) if f.dim() > 3 else f


class Categorical(nn.Module):
    """y ~ Categorical(softmax f), f (…, B, K)."""

    own_information: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.outputs = classes
        self.initial: dict[str, Tensor] = {}

    def forward(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample, or observe labels y (B,), int64."""
        f = _outputs(f)
        return _observe(dist.Categorical(logits=f), f.shape[-2], y)

    def information(self, f: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """diag(p) − p pᵀ, which is minus the Hessian of log p(y | f) for every y."""
        p = f.softmax(-1)
        return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


class Bernoulli(nn.Module):
    """y ~ Bernoulli(sigmoid f), f (…, B, 1)."""

    outputs = 1
    initial: dict[str, Tensor] = {}  # noqa: RUF012
    own_information: dict[str, float] = {}  # noqa: RUF012

    def forward(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample, or observe labels y (B,), 0 or 1 of any dtype."""
        logits = _outputs(f).squeeze(-1)
        return _observe(dist.Bernoulli(logits=logits), logits.shape[-1], None if y is None else y.to(f.dtype))

    def information(self, f: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """p (1 − p), which is minus the second derivative of log p(y | f) for every y."""
        return (f.sigmoid() * (-f).sigmoid())[..., None]


class Normal(nn.Module):
    """y ~ Normal(shift + scale·f, σ), f (…, B, 1).

    noise: σ in target units, fixed; or None: log(σ / scale) ~ Normal(-1, 1), a latent site "log_noise" on the whole
        real line, so that every method takes it as it takes a weight (95 % of the prior: 0.05 to 2.7 of the target's
        standard deviation).
    """

    outputs = 1

    def __init__(self, shift: float = 0.0, scale: float = 1.0, noise: float | None = None) -> None:
        super().__init__()
        self.shift, self.scale, self.noise = shift, scale, noise
        self.register_buffer("log_noise_loc", torch.tensor(-1.0), persistent=False)
        self.register_buffer("log_noise_scale", torch.tensor(1.0), persistent=False)

    @property
    def initial(self) -> dict[str, Tensor]:
        """The noise starts at its prior's median."""
        return {} if self.noise is not None else {"log_noise": self.log_noise_loc}

    def forward(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample, or observe targets y (B,), target units."""
        loc = self.shift + self.scale * _outputs(f).squeeze(-1)
        if self.noise is not None:
            sigma: Tensor | float = self.noise
        else:
            log_noise = pyro.sample("log_noise", dist.Normal(self.log_noise_loc, self.log_noise_scale))
            # One noise per draw: (S,) -> (S, 1) against (S, B); vectorised particles bring (P, 1) already.
            sigma = self.scale * (log_noise.unsqueeze(-1) if log_noise.dim() == 1 else log_noise).exp()
        return _observe(dist.Normal(loc, sigma), loc.shape[-1], y)

    @property
    def own_information(self) -> dict[str, float]:
        """E[(∂ log p(y) / ∂ log σ)²] = E[(r² − 1)²] = 2, r standard Normal."""
        return {} if self.noise is not None else {"log_noise": 2.0}

    def information(self, f: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """(scale/σ)², which is minus the second derivative of log p(y | f) for every y."""
        ratio = own["log_noise"].exp() if self.noise is None else f.new_tensor(self.noise / self.scale)
        return ratio.pow(-2).expand(f.shape)[..., None]


class Heteroscedastic(nn.Module):
    """y ~ Normal(shift + scale·f₁, scale·(10⁻³ + softplus f₂)), f (…, B, 2): the noise depends on the input.

    The floor keeps the density finite where the network would explain a point exactly.
    """

    outputs = 2
    initial: dict[str, Tensor] = {}  # noqa: RUF012
    own_information: dict[str, float] = {}  # noqa: RUF012
    floor = 1e-3

    def __init__(self, shift: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.shift, self.scale = shift, scale

    def forward(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample, or observe targets y (B,), target units."""
        mean, raw = _outputs(f).unbind(-1)
        loc = self.shift + self.scale * mean
        return _observe(dist.Normal(loc, self.scale * (self.floor + F.softplus(raw))), loc.shape[-1], y)

    def information(self, f: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """diag(1, 2 s'²) / s², s = 10⁻³ + softplus f₂: the expectation over y; the Hessian need not be positive."""
        raw = f[..., 1]
        s = self.floor + F.softplus(raw)
        return torch.diag_embed(torch.stack([s.pow(-2), 2 * (raw.sigmoid() / s).square()], -1))


class ReadLikelihood(Messenger):
    """Keeps the distribution at "y" as ``self.likelihood`` and skips its sampling: how predictions read a model."""

    likelihood: dist.TorchDistribution

    def _pyro_sample(self, msg: dict) -> None:
        if msg["name"] == OBSERVED:
            self.likelihood = msg["fn"]
            msg["value"], msg["done"] = torch.empty(0), True
