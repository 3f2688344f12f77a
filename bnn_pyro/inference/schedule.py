"""How an optimisation goes where its settings do not say: rows a step, learning rate, and when the ELBO has settled.

With N training rows and P weights, Adam takes

    B  = N up to 512 rows, else the power of 2 nearest to √N, 64 ≤ B ≤ 256
    lr = 0.01 · (1000 / P)^(1/3), 0.001 ≤ lr ≤ 0.02

until the objective has settled (:func:`settled`), and then half as many steps, in which the learning rate falls; at
most 10,000 steps in all, or 20 epochs where these are more (of wider networks: Yang & Hu 2021, arXiv:2011.14522).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Training rows up to which a step takes all of them; bounds of the rows of a step above.
WHOLE, BATCHES = 512, (64, 256)
#: Rows × weights up to which chains take all rows.
WHOLE_WORK = 5_000_000
#: Learning rate of 1,000 weights; bounds of those of any other number.
LR, LR_BOUNDS = 0.01, (1e-3, 0.02)
#: Most steps, and epochs that are taken in any case.
MAX_STEPS, MIN_EPOCHS = 10_000, 20
#: Lines of the trace that a verdict takes; standard errors and √N nats that are no rise; √N nats that may be missed.
LINES, ERRORS, NO_RISE, MOST_RISE = 20, 2.0, 0.3, 1.0


class Schedule(NamedTuple):
    """Rows of a step (0: all), first learning rate, and passes over the training rows at most."""

    batch_size: int
    lr: float
    epochs: int


def schedule(rows: int, weights: int) -> Schedule:
    """The rule above for N training rows and P weights."""
    low, high = BATCHES
    size = 0 if rows <= WHOLE else min(high, max(low, 2 ** round(math.log2(math.sqrt(rows)))))
    lr = min(LR_BOUNDS[1], max(LR_BOUNDS[0], LR * (1000 / max(weights, 1)) ** (1 / 3)))
    return Schedule(size, float(f"{lr:.2g}"), max(MIN_EPOCHS, MAX_STEPS // math.ceil(rows / (size or rows))))


def batch_of_chains(rows: int, weights: int, in_memory: bool) -> int:
    """Rows of a step of stochastic-gradient MCMC; 0: all, with which its step size is many times as large."""
    size = schedule(rows, weights).batch_size
    return 0 if in_memory and rows * weights <= WHOLE_WORK else size or BATCHES[0]


def settled(objective: Sequence[float], rows: int) -> bool:
    """Whether the objective's slope over the last third of its lines is within its noise.

    objective: nats of all rows, a line the mean of equally many steps.

    The rise over that third, by least squares, is no more than 2 of its standard errors, or than 0.3·√N nats; and with
    2 of them added it is no more than √N nats, as noise that could hide more shows nothing. √N nats is one standard
    error of the log density of N rows, of which each differs by about a nat.
    """
    y = np.asarray(objective[-(len(objective) // 3) :], dtype=np.float64)
    if len(objective) < LINES:
        return False
    x = np.arange(len(y)) - (len(y) - 1) / 2
    slope = (x @ y) / (x @ x)
    residual = y - y.mean() - slope * x
    rise, error = slope * len(y), len(y) * math.sqrt((residual @ residual) / (len(y) - 2) / (x @ x))
    noise = math.sqrt(rows)
    return bool(rise <= max(ERRORS * error, NO_RISE * noise) and rise + ERRORS * error <= MOST_RISE * noise)
