"""What has been drawn so far, with what ``stats`` keeps of it; and, of chains that were stopped, what is of use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["Record", "most_draws"]

#: What is known of a transition: a number, or one for each of the chains that move as one.
Figure = float | np.ndarray


class Record:
    """z (draws, *shape) and stats {name: (draws, …)}, of which the first ``kept`` are there.

    shape: (P,) of one chain, or (C, P) of chains that move as one, whose stats are (draws, C).

    ``done`` counts transitions, ``divergent`` the bad ones after the warm-up. Of ``thin`` transitions the last one's
    position is kept. Its stats speak for all of them: the mean acceptance, whether any diverged, the gradients of all,
    the deepest tree.
    """

    def __init__(self, draws: int, warmup: int, thin: int, shape: tuple[int, ...]) -> None:
        self.warmup, self.thin = warmup, thin
        self.z = np.zeros((draws, *shape))
        self.stats: dict[str, np.ndarray] = {}
        self.done = self.kept = self.divergent = 0
        self.since: list[Mapping[str, Figure]] = []  # of the transitions since the last draw that was kept

    @property
    def finished(self) -> bool:
        """Whether every draw is there."""
        return self.kept == len(self.z)

    def add(self, z: np.ndarray, figures: Mapping[str, Figure]) -> None:
        """The outcome of one transition."""
        self.done += 1
        if self.done <= self.warmup:
            return
        self.divergent += int(np.count_nonzero(figures["diverging"]))
        self.since.append(figures)
        if len(self.since) < self.thin:
            return
        self.z[self.kept] = z
        for name, value in figures.items():
            if self.thin > 1 and name in _COMBINED:
                value = _COMBINED[name]([one[name] for one in self.since])
            if name not in self.stats:
                self.stats[name] = np.zeros((len(self.z), *np.shape(value)))
            self.stats[name][self.kept] = value
        self.since = []
        self.kept += 1

    def state(self) -> dict[str, Any]:
        """All of it as tensors and numbers."""
        return {
            "z": torch.from_numpy(self.z[: self.kept]),
            "stats": {name: torch.from_numpy(values[: self.kept]) for name, values in self.stats.items()},
            "since": [{name: torch.as_tensor(v, dtype=torch.float64) for name, v in one.items()} for one in self.since],
            **{name: getattr(self, name) for name in _COUNTS},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over such a state."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.since = [{name: value.numpy() for name, value in one.items()} for one in state["since"]]
        self.z[: self.kept] = state["z"].numpy()
        for name, values in state["stats"].items():
            self.stats[name] = np.zeros((len(self.z), *values.shape[1:]))
            self.stats[name][: self.kept] = values.numpy()


_COUNTS = ("done", "kept", "divergent")


def _mean(values: Sequence[Figure]) -> Figure:
    return sum(values) / len(values)


def _maximum(values: Sequence[Figure]) -> Figure:
    return np.max(values, axis=0)


#: How the stats of thinned transitions become one; the last one's, where it isn't said.
_COMBINED = {
    "acceptance_rate": _mean,
    "diverging": _maximum,
    "n_steps": sum,
    "tree_depth": _maximum,
    "trajectory_length": _mean,
}


def most_draws(records: Sequence[Record]) -> tuple[list[int], int]:
    """(which chains, how many draws of each): an equal number of draws of as many chains as makes the most of them."""
    lengths = sorted({record.kept for record in records if record.kept}, reverse=True)
    choices = [([c for c, record in enumerate(records) if record.kept >= n], n) for n in lengths]
    return max(choices, key=lambda choice: len(choice[0]) * choice[1], default=([], 0))
