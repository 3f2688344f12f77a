"""Step sizes over a run of stochastic-gradient MCMC, and the steps at which a draw is kept.

A schedule is written as a short text, ``"cyclical:4"``, like a prior. Simulated time is the sum of the step sizes η of
the steps that sample: in the directions that relax slowest, and so decide how many independent draws there are, both
SGHMC and SGLD move by η a step. Stored draws weigh the same, so they are kept at equal increments of that time: as many
draws speak for a stretch of small steps as for one big step, where draws kept every so many steps would crowd at the
end (the weights ε_t of Welling & Teh 2011, equation 5, by choice instead of by weighting).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bnn_pyro.errors import UserError, unknown

__all__ = ["SCHEDULES", "Plan", "parse_schedule"]

#: Progress in [0, 1) of every step -> (step size as a share of the first, whether the step samples or optimises).
Schedule = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def _constant() -> Schedule:
    """constant — the same step throughout."""
    return lambda progress: (np.ones_like(progress), np.ones(len(progress), dtype=bool))


def _decaying(final: float = 0.1, power: float = 0.55) -> Schedule:
    """decaying:FINAL,POWER — (1 + t/b)^−POWER, from 1 to FINAL; 0 < FINAL <= 1, 0 < POWER <= 1 (Welling & Teh 2011)."""
    if not (0 < final <= 1 and 0 < power <= 1):
        raise ValueError
    growth = final ** (-1 / power) - 1
    return lambda progress: ((1 + growth * progress) ** -power, np.ones(len(progress), dtype=bool))


def _cyclical(cycles: float = 4, explore: float = 0.5) -> Schedule:
    """cyclical:CYCLES,EXPLORE — a cosine from 1 to 0 in every cycle; its first EXPLORE (0 to 1, excluded) optimises.

    Zhang et al. 2020, arXiv:1902.03932: the rest of the cycle samples. It starts at a mode: draws are too narrow
    where a cycle is short beside the time that an independent draw takes.
    """
    if cycles < 1 or cycles != int(cycles) or not 0 <= explore < 1:
        raise ValueError

    def schedule(progress: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inside = progress * cycles % 1.0
        return 0.5 * (1 + np.cos(math.pi * inside)), inside >= explore

    return schedule


#: Every schedule by name; the numbers after the colon are its arguments.
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": _constant,
    "decaying": _decaying,
    "cyclical": _cyclical,
}


def parse_schedule(text: str) -> Schedule:
    """``"cyclical:4,0.5"`` -> the schedule; numbers left out take their defaults.

    Raises UserError for an unknown name or numbers that it refuses.
    """
    name, colon, rest = str(text).partition(":")
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    try:
        return SCHEDULES[name](*(float(part) for part in rest.split(",")) if colon else ())
    except (ValueError, TypeError):
        form, _, limits = (SCHEDULES[name].__doc__ or "").partition("\n")[0].partition(" — ")
        raise UserError(f"the schedule '{text}' must have the form {form}: {limits.rstrip('.')}") from None


@dataclass(frozen=True)
class Plan:
    """What each of the steps of a run does; arrays of one number a step.

    share    its step size as a share of the first        samples  whether noise is injected
    serial   how many draws are due up to and with it: a draw is due where this grows (by 1 at most)
    """

    share: np.ndarray
    samples: np.ndarray
    serial: np.ndarray

    @classmethod
    def make(cls, schedule: Schedule, steps: int, burn_in: int, thin: int, max_draws: int) -> Plan:
        """The plan of ``steps`` steps.

        thin: mean number of sampling steps between two draws; 0 chooses it so that there are ``max_draws`` in the end.

        Raises UserError where no draw would be kept.
        """
        share, samples = schedule(np.arange(steps) / steps)
        kept = samples & (np.arange(steps) >= burn_in)
        if kept.sum() < max(thin, 1):
            raise UserError(
                f"no draw would be kept: {kept.sum()} of the {steps} steps sample after the burn-in, and a draw is due "
                f"every {max(thin, 1)}; train for more epochs, or take a smaller burn_in or thin"
            )
        moves = share * kept
        # Never less than the longest step: a step gives one draw at most.
        interval = max((thin or kept.sum() / max_draws) * moves.sum() / kept.sum(), moves.max())
        return cls(share, samples, np.floor(np.cumsum(moves) / interval + 1e-6).astype(np.int64))

    def due(self, step: int) -> bool:
        """Whether a draw is due at this step."""
        return bool(self.serial[step] > (self.serial[step - 1] if step else 0))
