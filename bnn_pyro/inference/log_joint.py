"""The log joint of a Pyro model over one flat vector, for many chains at once: what samplers and mode searches follow.

    log π(u) = log p(w) + log |∂w/∂u| + (1/T)·(N/B)·Σ_b log p(y_b | x_b, w),     w = transform(u)

u is (C, P), P unconstrained numbers for all latent sites. N rows meet a mini-batch of B of them here and nowhere else.
The model is evaluated in its own precision, for all chains in one call, and its terms are added up in float64: at
50,000 rows a float32 sum is off by a hundredth of a nat, which is noise in every Metropolis step.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyro
import pyro.poutine as poutine
import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Transform, biject_to

from bnn_pyro.errors import UserError
from bnn_pyro.parts.likelihoods import OBSERVED, ReadLikelihood
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.parts.priors import GammaNormal, widest_activation

__all__ = ["LogJoint", "Pair", "Precision", "Rescale", "log_joints", "log_likelihood"]

Pair = tuple[Tensor, Tensor]
#: {site: (C,)}, given precisions of ``GammaNormal`` priors.
Precision = Mapping[str, Tensor] | None

#: Bytes that the widest activation of one chunk of rows may take.
MAX_MEMORY = 64 * 2**20


class Rescale(Messenger):
    """Multiply log p(y | x, w) by ``likelihood`` and the log-density of every latent site by ``latent``.

    likelihood: N/B, for the log joint of B random rows to estimate that of all N without bias.
    latent: the temperature T, of a model and its guide alike; 1 is Bayes, 0 leaves the likelihood alone.
    """

    def __init__(self, likelihood: float = 1.0, latent: float = 1.0) -> None:
        super().__init__()
        self.likelihood, self.latent = likelihood, latent

    def _pyro_sample(self, msg: dict) -> None:
        factor = self.likelihood if msg["name"] == OBSERVED else self.latent
        if factor != 1.0:
            msg["scale"] = msg["scale"] * factor


class LogJoint:
    """log π of a model given the rows x (N, *input_shape), y (N,), at temperature T.

    priors       {latent site: its prior}
    free         {latent site: shape of its unconstrained numbers}, in the order of u
    size         P
    initial      (P,) u where the model starts, float64
    constrained  whether a site does not have all of ℝ for its support, so that u is not w

    Raises UserError for a latent site that is discrete or has no initial value.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, temperature: float = 1.0) -> None:
        self.model, self.x, self.y, self.temperature = model, x, y, temperature
        values = {site: value.detach().to(x.device) for site, value in model.initial.items()}
        # Once with Pyro's checks of shapes and supports, which then stay off: a trajectory may meet infinities.
        with torch.no_grad(), in_mode(model, training=False), _Given(values) as first:
            model(x[:2], y[:2])
        for site in first.priors.keys() - values.keys():
            raise UserError(f"the model's `initial` has no value for its latent site '{site}'")
        self.priors = {site: first.priors[site] for site in values}
        self.dtype = next(iter(values.values())).dtype
        self._transforms = {site: _transform(site, prior) for site, prior in self.priors.items()}
        # Equal transforms: not the same objects any more after a journey to another process.
        self.constrained = any(transform != _IDENTITY for transform in self._transforms.values())
        self._shapes = {site: value.shape for site, value in values.items()}
        self.free = {site: self._transforms[site].inv(value).shape for site, value in values.items()}
        self.initial = self.flat({site: value[None] for site, value in values.items()})[0].double()
        self.size = len(self.initial)

    def terms(self, u: Tensor, x: Tensor | None = None, y: Tensor | None = None, precision: Precision = None) -> Pair:
        """(log p(w) + log |∂w/∂u|, (N/B)·log p(y | x, w)/T), each (C,) in nats, at u (C, P); differentiable.

        x, y, precision: as for :func:`log_joints`; without x or y, those of all rows.
        """
        y = self.y if y is None else y
        jacobian, w = 0.0, {}
        for site, free in self._split(u).items():
            transform = self._transforms[site]
            value = transform(free)
            w[site] = value.to(self.dtype)
            if transform != _IDENTITY:
                jacobian = jacobian + transform.log_abs_det_jacobian(free, value).reshape(len(u), -1).sum(1)
        factor = len(self.x) / y.shape[-1] / self.temperature
        with pyro.validation_enabled(False), in_mode(self.model, training=False):
            prior, likelihood = log_joints(self.model, w, self.x if x is None else x, y, factor, precision)
        return prior + jacobian, likelihood

    def log_density(self, u: Tensor, y: Tensor | None = None) -> Tensor:
        """log π (C,) in nats at u (C, P), given all rows; differentiable.   y: other targets than theirs."""
        prior, likelihood = self.terms(u, y=y)
        return prior + likelihood

    def gradient(
        self, u: Tensor, x: Tensor | None = None, y: Tensor | None = None, precision: Precision = None
    ) -> Pair:
        """(log π (C,), its gradient (C, P)); arguments as for :meth:`terms`.

        Where ``precision`` is given, the gradient is that of the conditional; log π has it integrated out all the same.
        """
        with torch.enable_grad():
            leaf = u.detach().requires_grad_(True)
            density = sum(self.terms(leaf, x, y, precision))
            (gradient,) = torch.autograd.grad(density.sum(), leaf)
        density, sites = density.detach(), self.sites(u) if precision else {}
        for site, given in (precision or {}).items():
            prior, value = self.priors[site], sites[site]
            density = density + prior.log_prob(value) - prior.log_prob_given(value, given)
        return density, gradient

    def sites(self, u: Tensor) -> dict[str, Tensor]:
        """u (…, P) -> {site: (…, *shape)} in the model's own precision."""
        lead = u.shape[:-1]
        return {
            site: self._transforms[site](free).to(self.dtype).reshape(lead + self._shapes[site])
            for site, free in self._split(u.reshape(-1, u.shape[-1])).items()
        }

    def flat(self, w: Mapping[str, Tensor]) -> Tensor:
        """{site: (num, *shape)} -> u (num, P)."""
        return torch.cat([self._transforms[site].inv(w[site]).reshape(len(w[site]), -1) for site in self._shapes], 1)

    def sample_prior(self, *numbers: int) -> list[dict[str, Tensor]]:
        """For each number, as many draws from the prior: {site: (number, *shape)}; call inside ``isolated``.

        Raises UserError for a prior without samples: there is no posterior to speak of.
        """
        try:
            drawn = {site: [prior.sample((num,)) for num in numbers] for site, prior in self.priors.items()}
        except NotImplementedError:
            raise UserError(
                "samplers need a proper prior, and this variant's has no samples; take another, such as fan-in:1"
            ) from None
        return [{site: draws[i] for site, draws in drawn.items()} for i in range(len(numbers))]

    def _split(self, u: Tensor) -> dict[str, Tensor]:
        """{site: (C, *free shape)} of u (C, P)."""
        parts = u.split([shape.numel() for shape in self.free.values()], 1)
        return {site: part.reshape(-1, *self.free[site]) for site, part in zip(self.free, parts, strict=True)}


_IDENTITY = biject_to(constraints.real)


def _transform(site: str, prior: TorchDistribution) -> Transform:
    """From ℝ to the support of a site."""
    support = prior.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if support is constraints.real:
        return _IDENTITY
    if support.is_discrete:
        raise UserError(
            f"the latent site '{site}' is discrete, and samplers need gradients; sum it out of the model, or give it a "
            "continuous relaxation"
        )
    return biject_to(prior.support)


def log_joints(
    model: nn.Module,
    w: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    likelihood: float = 1.0,
    precision: Precision = None,
) -> Pair:
    """(log p(w), ``likelihood`` · log p(y | x, w)) of C sets of weights at once, each (C,), in nats.

    w: {site: (C, *shape)}.   x, y: (B, *input_shape) and (B,) for all of them, or (C, B, …), rows of its own for each.
    likelihood: N/B/T where the B rows stand for N, at temperature T.
    precision: {site: (C,)} of ``GammaNormal`` priors, where it is given instead of integrated out.
    """
    with _Terms(w, precision or {}) as terms:
        model(x, y)
    return terms.prior, likelihood * terms.likelihood


class _Given(Messenger):
    """Gives the latent sites their values and keeps their priors."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values
        self.priors: dict[str, TorchDistribution] = {}

    def _pyro_sample(self, msg: dict) -> None:
        if msg["is_observed"] or site_is_subsample(msg):
            return
        self.priors[msg["name"]] = msg["fn"]
        if msg["name"] in self.values:
            msg["value"], msg["done"] = self.values[msg["name"]], True


class _Terms(_Given):
    """Adds up log-densities besides, for each of the C draws: several times as fast as a conditioned trace."""

    def __init__(self, values: Mapping[str, Tensor], precision: Mapping[str, Tensor]) -> None:
        super().__init__(values)
        self.precision = precision
        self.prior: Tensor | float = 0.0
        self.likelihood: Tensor | float = 0.0

    def _pyro_post_sample(self, msg: dict) -> None:
        if site_is_subsample(msg):
            return
        fn, value, precision = msg["fn"], msg["value"], self.precision.get(msg["name"])
        given = precision is not None and isinstance(fn, GammaNormal)
        term = fn.log_prob_given(value, precision) if given else fn.log_prob(value)
        if msg["mask"] is not None or not (isinstance(msg["scale"], float | int) and msg["scale"] == 1):
            term = scale_and_mask(term, msg["scale"], msg["mask"])
        if term.dim() > 1:
            term = term.flatten(1).sum(1, dtype=torch.float64)  # thousands of rows: float32 would be noise
        if msg["is_observed"]:
            self.likelihood = self.likelihood + term
        else:
            self.prior = self.prior + term


@torch.no_grad()
def log_likelihood(model: nn.Module, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """log p(y_n | x_n, w_s) in nats, (S, B), for weights {site: (S, *shape)}; a few rows at a time."""
    draws = next(iter(weights.values())).shape[0]
    rows = max(1, MAX_MEMORY // (4 * draws * widest_activation(model, x)))
    found = []
    for x_part, y_part in zip(x.split(rows), y.split(rows), strict=True):
        with ReadLikelihood() as read, poutine.condition(data=dict(weights)):
            model(x_part)
        found.append(read.mixture(read.likelihood).log_probs(y_part).expand(draws, len(x_part)))
    return torch.cat(found, 1)
