"""What a run of stochastic-gradient MCMC goes by: mini-batches, which draws are stored, and the largest curvature."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.inference.log_joint import LogJoint

#: Power iterations, and the half distance of the gradients whose difference is a curvature.
ITERATIONS, REACH = 20, 1e-2
#: By how much a step size that is found makes the largest variance too large, with all rows in every step.
EXCESS = 0.03


def draws_due(steps: int, burn_in: int, num: int) -> np.ndarray:
    """(steps,), whether a draw is due: ``num`` of them after the burn-in, evenly spaced, or one a step."""
    left = steps - burn_in
    serial = np.floor(np.arange(1, left + 1) / max(left / num, 1.0) + 1e-6)
    return np.append(np.zeros(burn_in, dtype=bool), np.diff(serial, prepend=0) > 0)


def stiffest(log_joint: LogJoint, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The largest |λ| of the Hessian of −log π at w (C, P), (C,): power iteration by differences of gradients."""
    u = torch.randn_like(w)
    for _ in range(ITERATIONS):
        u = REACH * u / u.norm(dim=1, keepdim=True)
        ahead, behind = (log_joint.gradient(w + side * u, x, y)[1] for side in (1, -1))
        u = (behind - ahead) / (2 * REACH)
    return u.norm(dim=1)


def stable_step(
    log_joint: LogJoint, w: Tensor, x: Tensor, y: Tensor, friction: float, per_epoch: int, share: float
) -> float:
    """η = min(0.03·(4 − 2α), 4α·share·B/N where there are mini-batches) / max λ over the chains.

    x, y: all rows (per_epoch 1), or a mini-batch of per_epoch = N/B.   share: of SGLD a half, of SGHMC 1.
    """
    most = EXCESS * (4 - 2 * friction)
    if per_epoch > 1:
        most = min(most, 4 * friction * share / per_epoch)
    return most / stiffest(log_joint, w, x, y).max().item()


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
