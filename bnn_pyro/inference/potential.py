"""log p(y, w | x) of a Pyro model on all of its rows, and its gradient, for many chains at once in flat coordinates.

    log π(z) = log p(y | x, w) / T + log p(w) + log |∂u/∂z|,     w = transform(u),  u = space(z)

What every sampler of whole data sets follows. z is (C, P), float64, P unconstrained numbers for all latent sites; the
model is evaluated in its own precision, for all chains in one call, and its terms are added up in float64: at 50,000
rows a float32 sum is off by a hundredth of a nat, which is noise in every Metropolis step.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping

import pyro
import torch
from pyro.distributions import constraints
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import biject_to

from bnn_pyro.errors import UserError
from bnn_pyro.inference.compiled import CompiledGradient, NotCompiled, compile_gradient, recipe
from bnn_pyro.inference.log_joint import log_joints
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.parts.priors import widest_activation

__all__ = ["Potential", "Space"]

#: Bytes that the activations of the chains evaluated at once may take.
MAX_MEMORY = 512 * 2**20

#: How far a compiled gradient may be off, relative to the largest entry, before it is refused; float32 has 1e-7.
AGREEMENT = 1e-4

#: At how many points at least it is compared.
CHECKED = 8


class Space:
    """Coordinates z of the unconstrained numbers u, here the same; others are linear (see ``whitening``)."""

    def forward(self, z: Tensor) -> Tensor:
        """z (…, P) -> u (…, P)."""
        return z

    def inverse(self, u: Tensor) -> Tensor:
        """u (…, P) -> z (…, P)."""
        return u


class Potential:
    """The log joint density in nats at temperature T, in coordinates on all of ℝᴾ.

    priors   {latent site: its prior}          initial  (P,) u where the model starts, float64
    size     P
    free     {latent site: shape of its unconstrained numbers}, in the order of z
    space    the coordinates of z; may be replaced before sampling. A linear change adds a constant to the density,
             which is left out: ``lp`` of a draw is its log joint

    Raises UserError for a discrete latent site, a prior without samples (there is no posterior to speak of), or a
    density that is not finite at the model's initial values.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, temperature: float = 1.0) -> None:
        self.model, self.x, self.y, self.temperature = model, x, y, temperature
        self.space = Space()
        self._compiled: CompiledGradient | None = None
        values = {site: value.detach().to(x.device) for site, value in model.initial.items()}
        # Once with Pyro's checks of shapes and supports, which then stay off: a trajectory may meet infinities.
        with torch.no_grad(), in_mode(model, training=False), _Latent(values) as first:
            model(x, y)
        self.priors = first.priors
        self._transforms = {site: _transform(site, prior) for site, prior in self.priors.items()}
        for site in self.priors.keys() - values.keys():
            raise UserError(f"the model's `initial` has no value for its latent site '{site}'")
        self._shapes = {site: value.shape for site, value in values.items()}
        self._dtype = next(iter(values.values())).dtype
        parts = {site: self._transforms[site].inv(value) for site, value in values.items()}
        self.free = {site: part.shape for site, part in parts.items()}  # shapes of the unconstrained numbers
        self.initial = torch.cat([part.double().flatten() for part in parts.values()])
        self.size = len(self.initial)
        try:
            self.prior_draws(1)
        except NotImplementedError:
            raise UserError(
                "samplers need a proper prior, and this variant's has no samples; take another, such as fan-in:1"
            ) from None
        self._width = widest_activation(model, x)
        density, gradient = self._evaluate(self.initial[None])
        if not (torch.isfinite(density).all() and torch.isfinite(gradient).all()):
            what = density.item() if not torch.isfinite(density).all() else "finite but its gradient is not,"
            raise UserError(
                f"the log joint density is {what} at the initial weights; look for inputs or targets that are not "
                "finite, or far out of range"
            )

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Log densities (C,) and gradients (C, P) at z (C, P), float64; what is not finite comes back as it is."""
        return self._compiled(z) if self._compiled is not None else self._evaluate(z)

    def give(self, y: Tensor) -> None:
        """From now on the posterior given other targets of the same rows: y (N,), or (C, N), its own for each chain.

        Compiled code takes (N,) as it is, and is left for operators with (C, N).
        """
        self.y = y.to(self.y)
        if self._compiled is not None and y.dim() == 1:
            self._compiled.targets.copy_(y)
        else:
            self._compiled = None

    @property
    def compiled(self) -> bool:
        """Whether the gradient is compiled code."""
        return self._compiled is not None

    def leapfrog(
        self, z: Tensor, r: Tensor, density: Tensor, gradient: Tensor, inverse_mass: Tensor, step: Tensor, steps: int
    ) -> None:
        """``steps`` leapfrog steps of all chains, in place: z, r, gradient (C, P), density (C,), float64.

        inverse_mass: (P,), a diagonal.   step: (C,).   A chain whose density is not finite may stop there.
        """
        if self._compiled is not None:
            self._compiled.leapfrog(z, r, density, gradient, inverse_mass, step, steps)
            return
        step = step[:, None]
        r.addcmul_(step, gradient, value=0.5)
        for s in range(steps):
            z.addcmul_(step, inverse_mass * r)
            found, slope = self._evaluate(z)
            density.copy_(found)
            gradient.copy_(slope)
            r.addcmul_(step, gradient, value=1.0 if s < steps - 1 else 0.5)

    def subtree(self, *pointers: int, step: float, energy: float, depth: int) -> None:
        """A subtree of NUTS by compiled code; see ``compiled``."""
        self._compiled.subtree(*pointers, step=step, energy=energy, depth=depth)

    def log_density(self, u: Tensor, y: Tensor | None = None) -> Tensor:
        """(C,) at unconstrained u (C, P), differentiable.   y: other targets than the potential's own."""
        jacobian, w = 0.0, {}
        for site, free in self._split(u).items():
            transform = self._transforms[site]
            value = transform(free)
            w[site] = value.to(self._dtype)
            if transform != _IDENTITY:  # equal, too, after a journey to another process
                jacobian = jacobian + transform.log_abs_det_jacobian(free, value).reshape(len(u), -1).sum(1)
        with pyro.validation_enabled(False), in_mode(self.model, training=False):
            prior, likelihood = log_joints(self.model, w, self.x, self.y if y is None else y, 1.0 / self.temperature)
        return prior + likelihood + jacobian

    def weights(self, z: Tensor) -> dict[str, Tensor]:
        """z (…, P) -> {site: (…, *shape)} in the model's own precision."""
        lead, u = z.shape[:-1], self.space.forward(z).reshape(-1, self.size)
        return {
            site: self._transforms[site](free).to(self._dtype).reshape(*lead, *self._shapes[site])
            for site, free in self._split(u).items()
        }

    def position(self, w: Mapping[str, Tensor]) -> Tensor:
        """{site: (num, *shape)} -> z (num, P)."""
        parts = [self._transforms[site].inv(w[site]).double().reshape(len(w[site]), -1) for site in self._shapes]
        return self.space.inverse(torch.cat(parts, 1))

    def prior_draws(self, num: int) -> Tensor:
        """Draws of the latent sites from their priors, z (num, P); call inside ``isolated``."""
        return self.position({site: self.priors[site].sample((num,)) for site in self._shapes})

    def compile(self, chains: int = 1) -> bool:
        """From now on by compiled code, for C chains; where there is none, warn and stay with PyTorch's operators.

        The compiled gradient is compared with the other one around the initial values first.
        """
        g = torch.Generator().manual_seed(0)
        noise = torch.randn(max(chains, CHECKED), self.size, generator=g, dtype=torch.float64).to(self.x.device)
        z = self.space.inverse(self.initial) + 0.3 * noise
        same = recipe(self.model, self.x, self.y.shape, self.y.dtype, self.temperature, self.space)
        try:
            made = compile_gradient(self._gradient, z, self.y, same)
            if not (error := self._error(made, z)) < AGREEMENT:  # a model that its recipe does not say all of?
                made = compile_gradient(self._gradient, z, self.y)
                if not (error := self._error(made, z)) < AGREEMENT:
                    raise NotCompiled(f"its result is off by {error:.1g}")
        except NotCompiled as reason:
            warnings.warn(f"the gradient was not compiled, and sampling will be slower: {reason}", stacklevel=2)
            return False
        self._compiled = made
        return True

    def _error(self, made: CompiledGradient, z: Tensor) -> float:
        """Of compiled code, relative to the largest entry."""
        pairs = zip(made(z), self._evaluate(z), strict=True)
        errors = [
            ((found - expected).abs().max() / expected.abs().max().clamp_min(1.0)).item() for found, expected in pairs
        ]
        return max(errors) if all(e == e for e in errors) else math.nan

    def _evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """By PyTorch's operators, as many chains at once as memory allows."""
        block = max(1, MAX_MEMORY // (4 * len(self.x) * self._width))
        ys = self.y.split(block) if self.y.dim() > 1 else itertools.repeat(self.y)
        parts = [self._gradient(part, y) for part, y in zip(z.split(block), ys, strict=False)]
        return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _gradient(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = z.detach().requires_grad_(True)
            density = self.log_density(self.space.forward(leaf), y)
            (gradient,) = torch.autograd.grad(density.sum(), leaf)
        return density.detach(), gradient

    def _split(self, u: Tensor) -> dict[str, Tensor]:
        """{site: (C, *free shape)} of u (C, P)."""
        parts = u.split([shape.numel() for shape in self.free.values()], 1)
        return {site: part.reshape(-1, *self.free[site]) for site, part in zip(self.free, parts, strict=True)}


_IDENTITY = biject_to(constraints.real)


def _transform(site: str, prior: pyro.distributions.TorchDistribution) -> torch.distributions.Transform:
    """From ℝ to the support of a site."""
    support = prior.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if support is constraints.real:
        return _IDENTITY
    if support.is_discrete:
        raise UserError(
            f"the latent site '{site}' is discrete, and Hamiltonian Monte Carlo needs gradients; sum it out of the "
            "model, or give it a continuous relaxation"
        )
    return biject_to(prior.support)


class _Latent(Messenger):
    """Gives the latent sites their values and keeps their priors."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values
        self.priors: dict[str, pyro.distributions.TorchDistribution] = {}

    def _pyro_sample(self, msg: dict) -> None:
        if msg["is_observed"] or site_is_subsample(msg):
            return
        self.priors[msg["name"]] = msg["fn"]
        if msg["name"] in self.values:
            msg["value"], msg["done"] = self.values[msg["name"]], True
