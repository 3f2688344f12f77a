"""Where chains write how far they are, and read that they are to stop: one row each, shared by a memory map."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

__all__ = ["Board", "Row"]

#: What a row says. gradients, seconds: taken in this sitting; cost: seconds of a gradient, measured first.
COLUMNS = ("done", "gradients", "seconds", "accept", "step_size", "steps", "divergent", "cost", "pid")
DONE, GRADIENTS, SECONDS, ACCEPT, STEP_SIZE, STEPS, DIVERGENT, COST, PID = range(len(COLUMNS))

#: Chains up to which each has its own share of the bar's figures.
FEW = 8


class Board:
    """rows (C + 1, columns), float64: one for each chain, and a last one that says whether to stop.

    path: a file that several processes share; None keeps the board in this one.
    """

    def __init__(self, chains: int, path: Path | None = None) -> None:
        shape = (chains + 1, len(COLUMNS))
        if path is None:
            self.rows = np.zeros(shape)
        else:
            self.rows = np.memmap(path, np.float64, "r+" if path.exists() else "w+", shape=shape)

    @property
    def stopped(self) -> bool:
        """Whether every chain is asked to stop after the transition that it is in."""
        return bool(self.rows[-1, 0])

    def stop(self) -> None:
        """Ask them to."""
        self.rows[-1, 0] = 1.0

    @property
    def done(self) -> int:
        """Transitions of all chains so far."""
        return int(self.rows[:-1, DONE].sum())

    def figures(self, transitions: int) -> dict[str, float | str]:
        """What the progress bar shows; ``transitions``: of how many a chain."""
        rows = np.array(self.rows[:-1])
        going = rows[rows[:, GRADIENTS] > 0]
        if not len(going):
            return {}
        running = going[going[:, DONE] < transitions] if (going[:, DONE] < transitions).any() else going[-1:]
        shown: dict[str, float | str] = {
            "accept": going[:, ACCEPT].mean(),
            "step size": running[:, STEP_SIZE].mean(),
            "gradients": running[:, STEPS].mean(),
            "ms/gradient": 1e3 * going[:, SECONDS].sum() / going[:, GRADIENTS].sum(),
            "divergent": int(rows[:, DIVERGENT].sum()),
        }
        if 1 < len(rows) <= FEW:
            shown["chains"] = "·".join(f"{100 * done / transitions:.0f}" for done in rows[:, DONE]) + "%"
        return shown


class Row:
    """A chain's own row, written at most every ``every`` seconds: a transition may take less than writing it."""

    def __init__(self, board: Board, chain: int, every: float = 0.05) -> None:
        self.row, self.every = board.rows[chain], every
        self.row[PID] = os.getpid()
        self.start, self.last, self.gradients = time.perf_counter(), 0.0, 0

    def write(self, done: int, figures: Mapping[str, float], accept: float, divergent: int, force: bool) -> None:
        """figures: those of the last transition; accept: the mean so far."""
        self.gradients += int(figures["n_steps"])
        now = time.perf_counter()
        if force or now - self.last >= self.every:
            self.last = now
            self.row[:COST] = (
                done,
                self.gradients,
                now - self.start,
                accept,
                figures["step_size"],
                figures["n_steps"],
                divergent,
            )
