"""The log joint given all rows in the coordinates that a sampler moves in, by compiled code where that is worth it.

Densities and gradients are float64, coordinates z (C, P) are a linear map of the unconstrained numbers u.

    seconds of a run  ≈  gradients · (overhead + arithmetic),   arithmetic ∝ rows · weights

Whether to compile and how many processes to start is decided by the settings and the sizes of the problem, never by a
clock: a compiled gradient rounds otherwise, and what a run draws must not depend on how busy the machine was.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bnn_pyro.checkpoint import Run
from bnn_pyro.errors import UserError
from bnn_pyro.inference.compiled import CompiledGradient, NotCompiled, compile_gradient, recipe
from bnn_pyro.inference.log_joint import LogJoint, Recorder, Weights
from bnn_pyro.isolation import isolated
from bnn_pyro.parallel.executor import current_executor, usable_cores
from bnn_pyro.parts.likelihoods import ReadLikelihood
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.priors import widest_activation
from bnn_pyro.progress import Figures, duration

__all__ = [
    "ARITHMETIC", "COMPILATION", "EAGER", "LARGE", "PROCESS", "PYRO_STEP", "Forecast", "Potential", "Space",
    "choose_compiled", "choose_cores", "gradient_seconds", "log_likelihood", "mixtures", "multiplications", "run_cost",
]  # fmt: skip

#: Bytes that the activations of the chains evaluated at once may take.
MAX_MEMORY = 512 * 2**20

#: Bytes that the widest activation of one chunk of rows may take.
ROWS_MEMORY = 64 * 2**20

#: How far a compiled gradient may be off, relative to its largest entry (float32 has 1e-7), and at how many points.
AGREEMENT, MIN_COMPARED = 1e-4, 8

#: Seconds that a gradient takes besides its arithmetic, by PyTorch's operators one by one and compiled, and a step of
#: an optimiser through Pyro; and seconds for 6 floating-point operations, what a weight costs with a row, both ways.
EAGER, COMPILED, PYRO_STEP, ARITHMETIC = 1e-3, 1e-5, 1e-2, 5e-10

#: Rows · weights above which compiled code was no faster than operators, and soon three times slower; what 6
#: floating-point operations take there, for several chains at once.
LARGE, LARGE_ARITHMETIC = 5e6, 8e-10

#: Seconds that a compilation takes, and that a process takes to start.
COMPILATION, PROCESS = 2.5, 5.0

#: Transitions that a run is timed by, after those that are not typical, and seconds that either may last; seconds of a
#: run that is long; the share of its draws that is proposed instead.
TIMED, MAX_TIMED, LONG, FEWER = 20, 30.0, 60.0, 5


class Space:
    """Coordinates z of the unconstrained numbers u, here the same; others are linear (see ``inference.linear``)."""

    def forward(self, z: Tensor) -> Tensor:
        """z (…, P) -> u (…, P)."""
        return z

    def inverse(self, u: Tensor) -> Tensor:
        """u (…, P) -> z (…, P)."""
        return u


class Potential(LogJoint):
    """log π and its gradient over z; see :class:`LogJoint`.

    space     the coordinates; may be replaced before sampling. The constant that a linear change adds to the density is
              left out: ``lp`` of a draw is its log joint
    compiled  the gradient as compiled code, if there is any

    Raises UserError for a discrete latent site, a prior without samples, or a density that is not finite at the model's
    initial values.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, temperature: float = 1.0) -> None:
        super().__init__(model, x, y, temperature)
        self.space = Space()
        self.compiled: CompiledGradient | None = None
        self.prior_draws(1)
        self._width = widest_activation(model, x)
        density, gradient = self.evaluate(self.initial[None])
        finite = torch.isfinite(density).all()
        if not (finite and torch.isfinite(gradient).all()):
            what = "finite but its gradient is not," if finite else density.item()
            raise UserError(f"the log joint density is {what} at the initial weights; look for inputs or targets that "
                            "are not finite, or far out of range")  # fmt: skip

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Log densities (C,) and gradients (C, P) at z (C, P), float64; what is not finite comes back as it is."""
        return self.evaluate(z) if self.compiled is None else self.compiled(z)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The same by PyTorch's operators, as many chains at once as memory allows."""
        block = max(1, MAX_MEMORY // (4 * len(self.x) * self._width))
        ys = self.y.split(block) if self.y.dim() > 1 else itertools.repeat(self.y)
        parts = [self._gradient(part, y) for part, y in zip(z.split(block), ys, strict=False)]
        return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def give(self, y: Tensor) -> None:
        """From now on the posterior given other targets of the same rows: y (N,), or (C, N), its own for each chain.

        Compiled code takes (N,) as it is, and is left for operators with (C, N).
        """
        self.y = y.to(self.y)
        if self.compiled is not None and y.dim() == 1:
            self.compiled.targets.copy_(y)
        else:
            self.compiled = None

    def leapfrog(
        self, z: Tensor, r: Tensor, density: Tensor, gradient: Tensor, inverse_mass: Tensor, step: Tensor, steps: int
    ) -> None:
        """``steps`` leapfrog steps of all chains, in place: z, r, gradient (C, P), density (C,), float64.

        inverse_mass: (P,), a diagonal.   step: (C,).   A chain whose density is not finite may stop there.
        """
        if self.compiled is not None:
            self.compiled.leapfrog(z, r, density, gradient, inverse_mass, step, steps)
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
        """Draws of the latent sites from their priors, z (num, P); call inside ``isolated``."""
        return self.position(*self.sample_prior(num))

    def compile(self, chains: int = 1) -> bool:
        """From now on by compiled code, for C chains; where there is none, warn and stay with PyTorch's operators.

        The compiled gradient is compared with the other one around the initial values first.
        """
        g = torch.Generator().manual_seed(0)
        noise = torch.randn(max(chains, MIN_COMPARED), self.size, generator=g, dtype=torch.float64).to(self.x.device)
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
        self.compiled = made
        return True

    def _error(self, made: CompiledGradient, z: Tensor) -> float:
        """Of compiled code, relative to the largest entry."""
        pairs = zip(made(z), self.evaluate(z), strict=True)
        errors = [((a - b).abs().max() / b.abs().max().clamp_min(1.0)).item() for a, b in pairs]
        return max(errors) if all(e == e for e in errors) else math.nan

    def _gradient(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = z.detach().requires_grad_(True)
            density = self.log_density(self.space.forward(leaf), y)
            (gradient,) = torch.autograd.grad(density.sum(), leaf)
        return density.detach(), gradient


@torch.no_grad()
def log_likelihood(model: nn.Module, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    """log p(y_n | x_n, w_s) in nats, (S, B), for weights {site: (S, *shape)}; a few rows at a time."""
    draws = next(iter(weights.values())).shape[0]
    return torch.cat([p.log_probs(part).expand(draws, len(part)) for p, part in mixtures(model, weights, x, y)], 1)


def mixtures(model: nn.Module, weights: Weights, x: Tensor, y: Tensor) -> Iterator[tuple[Mixture, Tensor]]:
    """(p(y | x) of a few rows, their targets), one after the other; arguments as for :func:`log_likelihood`."""
    draws = next(iter(weights.values())).shape[0]
    rows = max(1, ROWS_MEMORY // (4 * draws * widest_activation(model, x)))
    for x_part, y_part in zip(x.split(rows), y.split(rows), strict=True):
        with ReadLikelihood() as read, Recorder(weights):
            model(x_part)
        yield read.mixture(read.likelihood), y_part


# -- what a run is going to cost ---------------------------------------------------------------------------------------
def choose_compiled(asked: str, gradients: float, potential: Potential) -> bool:
    """For "auto", whether to compile saves twice the time that it takes. PyTorch multiplies large matrices faster."""
    long = gradients * (EAGER - COMPILED) > 2 * COMPILATION
    small = potential.x.device.type == "cpu" and len(potential.x) * potential.size <= LARGE
    return asked == "yes" or (asked == "auto" and long and small)


def gradient_seconds(rows: int, macs: int) -> float:
    """Of the arithmetic of one chain's gradient, on one core.   macs: multiplications of a row, forward."""
    return rows * macs * (LARGE_ARITHMETIC if rows * macs > LARGE else ARITHMETIC)


def run_cost(gradients: float, compiled: bool, potential: Potential, chains: int = 1) -> tuple[float, float]:
    """(seconds of so many gradients of C chains at once, seconds until another process takes its first)."""
    work = chains * len(potential.x) * potential.size if potential.x.device.type == "cpu" else 0
    seconds = gradients * ((COMPILED if compiled else EAGER) + ARITHMETIC * work)
    return seconds, PROCESS + (COMPILATION if compiled else 0.0)


def choose_cores(asked: int, tasks: int, device: torch.device, seconds: float, price: float = PROCESS) -> int:
    """How many processes: what was asked for, or for 0 as many as there are cores where that saves twice their price.

    1: in this process, as on a GPU and in a process that is itself one of several. An executor in force decides.

    device: where tasks compute.   seconds: of all of them.   price: seconds that a process takes to start.
    """
    current, cpu, cores = current_executor(), device.type == "cpu", min(tasks, usable_cores())
    if current is not None and current.kind != "dask":
        return cores if cpu else 1
    if asked:
        return min(asked, tasks)
    return cores if cpu and seconds * (1 - 1 / cores) > 2 * price else 1


class _Counter(TorchFunctionMode):
    """Counts multiplications. ``FlopCounterMode`` counts more operators, and imports the compiler, for seconds."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name == "linear" or name.startswith("conv"):
            self.count += out.numel() * args[1][0].numel()
        elif name in ("matmul", "bmm", "mm", "__matmul__"):
            self.count += out.numel() * args[0].shape[-1]
        return out


@torch.no_grad()
def multiplications(net: nn.Module, x: Tensor) -> int:
    """Of a forward pass of x (1, *input_shape); at least one a weight. Convolutions use a weight more than once."""
    with isolated(0), _Counter() as counter:
        net(x)
    return max(counter.count, sum(value.numel() for value in net.parameters() if value.dim() > 1))


class Forecast:
    """Says how long a sampler takes, once, by the pace of its first transitions, and how to have it done sooner."""

    def __init__(self, sampler: Any, run: Run) -> None:
        self.sampler, self.report, self.said = sampler, run.report, False
        self.run = replace(run, report=self)
        #: Transitions and time at which the run began, and at which it began to count.
        self.began: tuple[float, float] | None = None
        self.first: tuple[float, float] | None = None

    def __call__(self, done: float, of: int, figures: Figures) -> None:
        """A ``Report``."""
        if self.report is not None:
            self.report(done, of, figures)
        now = time.monotonic()
        self.began = self.began or (done, now)
        if self.said or done == of:
            return
        if self.first is None:
            untimed = self.sampler.untimed
            if done - self.began[0] >= untimed or (untimed <= 100 and now - self.began[1] > MAX_TIMED):
                self.first = done, now
            return
        timed, seconds = done - self.first[0], now - self.first[1]
        if timed >= 1 and seconds > 0 and ((timed >= TIMED and seconds > 1) or seconds > MAX_TIMED):
            self.said = True
            self._say((of - done) * seconds / timed)

    def _say(self, seconds: float) -> None:
        """Warn where it is long.   seconds: until the end."""
        sampler, fewer = self.sampler, max(1, self.sampler.draws // FEWER)
        if seconds < LONG:
            return
        less = ""
        if fewer < sampler.draws:
            share = (sampler.warmup + fewer * sampler.thin) / sampler.transitions
            less = f"--set draws={fewer} takes {duration(share * seconds)}, "
        warnings.warn(
            f"about {duration(seconds)}; {less}--max-minutes M ends after M minutes with the draws so far", stacklevel=1
        )
