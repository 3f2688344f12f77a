"""The log joint given all rows, in the coordinates in which a sampler moves; optionally by compiled code.

Densities and gradients are float64. The coordinates z (C, P) are a linear map of the unconstrained numbers u, except
with gamma priors, which add coordinates for their scales (``NonCentred``).
"""

import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bnn_pyro.errors import UserError
from bnn_pyro.inference.log_joint import LogJoint, Weights, with_gradient
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.observed import Recorder, read_likelihood
from bnn_pyro.parts.priors import widest_activation

#: Largest number of bytes of the activations of chains evaluated at once, and of a chunk of rows in ``mixtures``.
MAX_MEMORY, ROWS_MEMORY = 512 * 2**20, 64 * 2**20
#: Largest error of a compiled gradient, relative to its largest entry (float32 has 1e-7), at MIN_COMPARED points.
AGREEMENT, MIN_COMPARED = 1e-4, 8
#: The error may also be MAX_ROUNDING times the change of the result for z · (1 + ROUNDING), but at most MAX_ERROR.
MAX_ROUNDING, ROUNDING, MAX_ERROR = 5.0, 1e-7, 1e-2
CENTRED = 3  # ``Potential.centred`` of new runs


class Space:
    """Coordinates z of the unconstrained numbers u; here z = u, see ``coordinates`` for others."""

    whitened: ClassVar[bool] = False  # whether the posterior of z is about equally wide in all directions

    def forward(self, z: Tensor) -> Tensor:
        """z (…, P) -> u (…, P)."""
        return z

    def inverse(self, u: Tensor) -> Tensor:
        """u (…, P) -> z (…, P)."""
        return u

    def extra(self, z: Tensor) -> Tensor | float:
        """log density of z minus log density of u, (…,), without the constant of a linear map."""
        return 0.0


class Potential(LogJoint):
    """log π and its gradient as functions of z; see :class:`LogJoint`.

    space     the coordinates, which may be replaced before sampling
    centred   the version of the coordinates with which the sampling run began. For a linear model they are centred at
              the mode (0), at the weights of the highest evidence found by one search (1), or by two searches, with
              the chains starting around them (2); 3 also uses ``NonCentred``
    compiled  the ``CompiledGradient``, or None
    Raises UserError for a discrete latent site, a prior without samples, or a density not finite at the initial values.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, temperature: float = 1.0) -> None:
        super().__init__(model, x, y, temperature)
        self.space, self.centred = Space(), CENTRED
        self.compiled: Any = None
        self.prior_draws(1)
        self._width = widest_activation(model, x)
        density, gradient = self.evaluate(self.initial[None])
        finite = torch.isfinite(density).all()
        if not (finite and torch.isfinite(gradient).all()):
            value = "finite but its gradient is not," if finite else density.item()
            raise UserError(f"the log joint density is {value} at the initial weights; look for inputs or targets that "
                            "are not finite, or far out of range")  # fmt: skip

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Log densities (C,) and gradients (C, P) at z (C, P), float64; they may be infinite or NaN."""
        return self.evaluate(z) if self.compiled is None else self.compiled(z)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The same, by PyTorch's operators, for as many chains at once as MAX_MEMORY allows."""
        block = max(1, MAX_MEMORY // (4 * len(self.x) * self._width))
        ys = self.y.split(block) if self.y.dim() > 1 + self.event_dim else [self.y] * len(z)
        parts = [self._gradient(part, y) for part, y in zip(z.split(block), ys, strict=False)]
        return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def give(self, y: Tensor) -> None:
        """Replace the targets: y (N,), or (C, N) with other targets for each chain, which are not compiled."""
        self.y = y.to(self.y)
        if self.compiled is not None and y.dim() == 1:
            self.compiled.targets.copy_(y)
        else:
            self.compiled = None

    def leapfrog(
        self, z: Tensor, r: Tensor, density: Tensor, gradient: Tensor, inverse_mass: Tensor, step: Tensor, steps: int
    ) -> None:
        """Take leapfrog steps of all chains, in place: z, r, gradient (C, P), density (C,), float64.

        inverse_mass: (P,), a diagonal.   step: (C,).   A chain may stop at a density that is not finite.
        """
        if self.compiled is not None:
            self.compiled.leapfrog(z, r, density, gradient, inverse_mass, step, steps=steps)
            return
        step = step[:, None]
        r.addcmul_(step, gradient, value=0.5)
        for s in range(steps):
            z.addcmul_(step, inverse_mass * r)
            for now, new in zip((density, gradient), self.evaluate(z), strict=True):
                now.copy_(new)
            r.addcmul_(step, gradient, value=1.0 if s < steps - 1 else 0.5)

    def weights(self, z: Tensor) -> dict[str, Tensor]:
        """z (…, P) -> {site: (…, *shape)} in the model's own precision."""
        return self.sites(self.space.forward(z))

    def position(self, w: Weights) -> Tensor:
        """{site: (num, *shape)} -> z (num, P)."""
        return self.space.inverse(self.flat(w).double())

    def prior_draws(self, num: int) -> Tensor:
        """Draws of the latent sites from their priors, z (num, P); call it inside ``isolated``."""
        return self.position(*self.sample_prior(num))

    def compile(self, chains: int = 1) -> bool:
        """Use compiled code from now on, if it agrees with PyTorch's operators; else warn and return False."""
        from bnn_pyro.inference.compiled import NotCompiled, compile_gradient, recipe  # imports torch's tracing

        g = torch.Generator().manual_seed(0)
        with isolated(0):
            start = self.space.inverse(self.initial)
        noise = torch.randn(max(chains, MIN_COMPARED), len(start), generator=g, dtype=torch.float64).to(self.x.device)
        z = start + 0.3 * noise
        same = recipe(self.model, self.x, self.y.shape, self.y.dtype, self.temperature, self.space)
        by_operators = self.evaluate(z)
        rounding = _difference(self.evaluate(z * (1 + ROUNDING)), by_operators)
        try:
            for key in (same, None):  # if code from the cache differs, trace again: a recipe may miss a dependency
                made = compile_gradient(self._gradient, z, self.y, key)
                error = _difference(made(z), by_operators)
                if error < max(AGREEMENT, min(MAX_ROUNDING * rounding, MAX_ERROR)):  # False for NaN
                    self.compiled = made
                    return True
            raise NotCompiled(f"its result is off by {error:.1g}")
        except NotCompiled as reason:
            warnings.warn(f"the gradient was not compiled, and sampling will be slower: {reason}", stacklevel=2)
            return False

    def _gradient(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return with_gradient(lambda z: self.log_density(self.space.forward(z), y) + self.space.extra(z), z)


def _difference(some: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> float:
    """The largest difference of two (densities, gradients), relative to the largest entry of each; may be NaN."""
    pairs = zip(some, others, strict=True)
    return torch.stack([(a - b).abs().max() / b.abs().max().clamp_min(1.0) for a, b in pairs]).max().item()


@torch.no_grad()
def log_likelihood(model: nn.Module, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    """log p(y_n | x_n, w_s) in nats, (S, B), for weights {site: (S, *shape)}; computed in chunks of rows."""
    draws = next(iter(weights.values())).shape[0]
    return torch.cat([p.log_probs(part).expand(draws, len(part)) for p, part in mixtures(model, weights, x, y)], 1)


def mixtures(model: nn.Module, weights: Weights, x: Tensor, y: Tensor) -> Iterator[tuple[Mixture, Tensor]]:
    """For each chunk of rows, (p(y | x), targets y); arguments as for :func:`log_likelihood`."""
    rows = max(1, ROWS_MEMORY // (4 * len(next(iter(weights.values()))) * widest_activation(model, x)))
    for k, (x_part, y_part) in enumerate(zip(x.split(rows), y.split(rows), strict=True)):
        with Recorder(weights):
            read = read_likelihood(model, x_part, k * rows)
        yield read.mixture(read.likelihood), y_part
