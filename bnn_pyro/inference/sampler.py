"""What HMC, NUTS and ChEES have in common: settings and their bounds, and what is said of a run that went wrong."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from bnn_pyro.errors import UserError, unknown
from bnn_pyro.inference.starts import STARTS

__all__ = ["Sampler", "nothing_drawn", "warn_of_idle_chains"]

#: When the gradient is compiled.
COMPILED = ("auto", "yes", "no")

#: Draws of a chain from which on one that never moves, or always diverges, is told: fewer may be bad luck.
ENOUGH = 10

#: Chains that a warning names.
NAMED = 5


@dataclass(frozen=True)
class Sampler:
    """Settings that all share.

    draws          draws kept of each chain
    warmup         transitions before them, in which step size, mass and the like are adapted; dropped
    chains         independent chains
    target_accept  acceptance rate that the step size is adapted to; higher where trajectories diverge
    thin           transitions a draw
    start          where chains start: jitter, prior, map or svi
    jitter         how far apart jittered chains start, in standard deviations of the prior
    temperature    T: p(y | x, w)^(1/T) p(w) is sampled; 1 is Bayes, less is a cold posterior and is reported as such
    compiled       whether to compile the gradient: auto (where the run is long enough), yes or no
    """

    converges_to: ClassVar[str] = "exact"
    needs: ClassVar[frozenset[str]] = frozenset({"weights", "proper prior"})
    tiny: ClassVar[Mapping[str, Any]] = {"draws": 1000, "warmup": 300, "chains": 4, "cores": 1}
    limit: ClassVar[str] = "posterior"
    draws: int = 1000
    warmup: int = 500
    chains: int = 4
    target_accept: float = 0.8
    thin: int = 1
    start: str = "jitter"
    jitter: float = 1.0
    temperature: float = 1.0
    compiled: str = "auto"

    def __post_init__(self) -> None:
        self._at_least(draws=1, warmup=1, chains=1, thin=1)
        self._one_of(start=STARTS, compiled=COMPILED)
        if not 0 < self.target_accept < 1:
            raise UserError(
                f"target_accept must lie between 0 and 1, got {self.target_accept}; {type(self).target_accept} is usual"
            )
        if not 0 <= self.jitter < math.inf:
            raise UserError(f"jitter must be 0 or positive, got {self.jitter}")
        if not 0 < self.temperature < math.inf:
            raise UserError(f"temperature must be positive (1 is the Bayesian posterior), got {self.temperature}")

    def _at_least(self, **least: int) -> None:
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UserError(f"{name} must be at least {low}, got {getattr(self, name)}")

    def _one_of(self, **choices: Sequence[str]) -> None:
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise unknown(name, getattr(self, name), valid)

    @property
    def transitions(self) -> int:
        """Of every chain, with its warm-up."""
        return self.warmup + self.draws * self.thin


def nothing_drawn(stopped: str) -> KeyboardInterrupt:
    """For a run that was stopped too early; ``stopped`` says by what."""
    return KeyboardInterrupt(
        f"{stopped} in the warm-up, before the first draw; with a folder (out=…, --out) a run can go on from where it "
        "was stopped"
    )


def warn_of_idle_chains(z: Tensor, diverging: Tensor, numbers: Sequence[int], chains: int) -> None:
    """Warn of chains whose draws stand for nothing but their starts.

    z (C, D, P), diverging (C, D).   numbers: of these C among the ``chains`` of the run, from 0.
    """
    if z.shape[1] < ENOUGH:
        return
    diverged = diverging.bool().all(1)
    rejected = (z == z[:, :1]).flatten(1).all(1) & ~diverged
    for idle, what in ((diverged, "every draw diverged"), (rejected, "every transition was rejected")):
        which = [numbers[i] + 1 for i in idle.nonzero()[:, 0].tolist()]
        if which:
            named = ", ".join(map(str, which[:NAMED])) + (", …" if len(which) > NAMED else "")
            who = f"chain {named}" if len(which) == 1 else f"{len(which)} chains ({named})"
            warnings.warn(
                f"{who} of {chains}: {what}, and tells of its start alone; try start=map, a higher target_accept or a "
                "longer warm-up",
                stacklevel=5,
            )
