"""What a chain has drawn so far, with what ``stats`` keeps of it; and, of chains that were stopped, what is of use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["Record", "most_draws"]


class Record:
    """z (draws, P) and stats {name: (draws,)}, of which the first ``kept`` are there; ``done`` counts transitions.

    Of ``thin`` transitions the last one's position is kept. Its stats speak for all of them: the mean acceptance,
    whether any diverged, the gradients of all, the deepest tree.
    """

    def __init__(self, draws: int, warmup: int, thin: int, size: int) -> None:
        self.warmup, self.thin = warmup, thin
        self.z = np.zeros((draws, size))
        self.stats: dict[str, np.ndarray] = {}
        self.done = self.kept = self.divergent = 0
        self.since: list[dict[str, float]] = []  # of the transitions since the last draw that was kept

    @property
    def finished(self) -> bool:
        """Whether every draw is there."""
        return self.kept == len(self.z)

    def add(self, z: np.ndarray, figures: Mapping[str, float]) -> None:
        """The outcome of one transition."""
        self.done += 1
        if self.done <= self.warmup:
            return
        self.divergent += int(figures["diverging"])
        self.since.append(dict(figures))
        if len(self.since) < self.thin:
            return
        self.z[self.kept] = z
        for name in figures:
            values = [one[name] for one in self.since]
            self.stats.setdefault(name, np.zeros(len(self.z)))[self.kept] = _COMBINED.get(name, _last)(values)
        self.since = []
        self.kept += 1

    def state(self) -> dict[str, Any]:
        """All of it as tensors and numbers."""
        return {
            "z": torch.from_numpy(self.z[: self.kept]),
            "stats": {name: torch.from_numpy(values[: self.kept]) for name, values in self.stats.items()},
            **{name: getattr(self, name) for name in ("done", "kept", "divergent", "since")},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over such a state."""
        for name in ("done", "kept", "divergent", "since"):
            setattr(self, name, state[name])
        self.z[: self.kept] = state["z"].numpy()
        for name, values in state["stats"].items():
            self.stats[name] = np.zeros(len(self.z))
            self.stats[name][: self.kept] = values.numpy()


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


#: How the stats of thinned transitions become one; the last one's, where it isn't said.
_COMBINED = {"acceptance_rate": _mean, "diverging": max, "n_steps": sum, "tree_depth": max, "trajectory_length": _mean}


def most_draws(records: Sequence[Record]) -> tuple[list[int], int]:
    """(which chains, how many draws of each): an equal number of draws of as many chains as makes the most of them."""
    lengths = sorted({record.kept for record in records if record.kept}, reverse=True)
    choices = [([c for c, record in enumerate(records) if record.kept >= n], n) for n in lengths]
    return max(choices, key=lambda choice: len(choice[0]) * choice[1], default=([], 0))
