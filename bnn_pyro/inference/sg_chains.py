"""What a run of stochastic-gradient MCMC goes by: mini-batches, step sizes, and which draws are stored.

A schedule is written as a short text, ``"cyclical:4"``, like a prior. Simulated time is the sum of the step sizes η of
the steps that sample: in the directions that relax slowest, and so decide how many independent draws there are, both
SGHMC and SGLD move by η a step. Stored draws weigh the same, so they are kept at equal increments of that time: as many
draws speak for a stretch of small steps as for one big step, where draws kept every so many steps would crowd at the
end (the weights ε_t of Welling & Teh 2011, equation 5, by choice instead of by weighting).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.errors import UserError
from bnn_pyro.settings import parse_named

#: What a checkpoint calls the parts of stored draws.
COLUMNS = ("draws", "log_joint", "validation")

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
SCHEDULES: dict[str, Callable[..., Schedule]] = {"constant": _constant, "decaying": _decaying, "cyclical": _cyclical}


#: ``"cyclical:4,0.5"`` -> the schedule. Raises UserError for an unknown name or numbers that it refuses.
parse_schedule: Callable[[str], Schedule] = partial(parse_named, "schedule", table=SCHEDULES)


@dataclass(frozen=True)
class Plan:
    """What each of the steps of a run does; arrays of one number a step.

    share    its step size as a share of the first        samples  whether noise is injected
    due      whether a draw is due                        serial   how many are due up to and with it
    """

    share: np.ndarray
    samples: np.ndarray
    due: np.ndarray
    serial: np.ndarray

    @classmethod
    def make(cls, schedule: Schedule, steps: int, burn_in: int, thin: int, max_draws: int) -> Plan:
        """The plan of ``steps`` steps.

        thin: mean number of sampling steps between two draws; 0 chooses it so that there are ``max_draws`` in the end.

        Raises UserError where no draw would be kept.
        """
        share, samples = schedule(np.arange(steps) / steps)
        used = samples & (np.arange(steps) >= burn_in)
        if used.sum() < max(thin, 1):
            raise UserError(
                f"no draw would be kept: {used.sum()} of the {steps} steps sample after the burn-in, and a draw is due "
                f"every {max(thin, 1)}; train for more epochs, or take a smaller burn_in or thin"
            )
        moves = share * used
        # Never less than the longest step: a step gives one draw at most.
        interval = max((thin or used.sum() / max_draws) * moves.sum() / used.sum(), moves.max())
        serial = np.floor(np.cumsum(moves) / interval + 1e-6).astype(np.int64)
        return cls(share, samples, np.diff(serial, prepend=0) > 0, serial)


class Batches:
    """Mini-batches of C chains: x (C, B, *input_shape) and y (C, B); without mini-batches the data as they are.

    Every epoch each chain divides the rows into blocks of B of its own (fewer rows than there are blocks are left out)
    and takes each block once, so that the noise of an epoch sums to zero. All of it is a function of (seed, epoch).
    """

    def __init__(self, x: Tensor, y: Tensor, size: int, chains: int, seed: int) -> None:
        self.x, self.y, self.chains, self.seed = x, y, chains, seed
        size = size if 0 < size < len(x) else len(x)
        self.per_epoch = math.ceil(len(x) / size)
        self.size = len(x) // self.per_epoch

    def steps(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(x, y) of steps start … stop−1."""
        if self.per_epoch == 1:
            yield from ((self.x, self.y) for _ in range(start, stop))
            return
        while start < stop:
            epoch, first = divmod(start, self.per_epoch)
            for rows in self._rows(epoch)[first : first + stop - start]:
                flat = rows.flatten()
                yield tuple(part.index_select(0, flat).unflatten(0, rows.shape) for part in (self.x, self.y))
                start += 1

    def _rows(self, epoch: int) -> Tensor:
        """Row numbers of every step of an epoch (steps, C, B)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        orders = (torch.randperm(len(self.x), generator=generator) for _ in range(self.chains))
        rows = [order[: self.per_epoch * self.size].view(self.per_epoch, self.size) for order in orders]
        return torch.stack(rows, 1).to(self.x.device)


@dataclass
class Stored:
    """The stored draws: equal weights, at most ``cap`` a chain, evenly spread over simulated time.

    draws: (w (C, P), log joint (C,)) of each, and where there are validation rows, log Σ_c p(y | x, w_c) of each.
    """

    cap: int
    draws: list[tuple[Tensor, ...]] = field(default_factory=list)
    stride: int = 1

    def wants(self, serial: int) -> bool:
        """Whether the draw with this serial number, 1, 2, …, is to be kept."""
        return serial % (self.stride * (2 if len(self.draws) == self.cap else 1)) == 0

    def add(self, *draw: Tensor) -> None:
        """Keep a draw. Where there are as many as may be, every second one is dropped and the interval doubles."""
        if len(self.draws) == self.cap:
            self.draws = self.draws[1::2]
            self.stride *= 2
        self.draws.append(draw)

    def validation_nll(self, now: Callable[[], Tensor], chains: int) -> float:
        """Mean NLL of the validation rows under the mixture of all stored draws of all chains, in nats a row.

        now: what to take where there are none yet.
        """
        parts = [scores for _, _, scores in self.draws] or [now()]
        return -(torch.stack(parts).logsumexp(0) - math.log(chains * len(parts))).mean().item()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        columns = dict(zip(COLUMNS, map(torch.stack, zip(*self.draws, strict=True)), strict=False))
        return {**dict.fromkeys(COLUMNS, torch.empty(0)), **columns, "stride": self.stride}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from what :meth:`state_dict` returned."""
        columns = [state[name].to(device) for name in COLUMNS if len(state[name])]
        self.draws, self.stride = list(zip(*columns, strict=True)), state["stride"]
