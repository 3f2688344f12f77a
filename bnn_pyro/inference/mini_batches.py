"""Mini-batches of training rows, for one fit (read ahead and augmented) or many chains; step sizes of SGHMC and SGLD.

What an augmentation draws is a function of (seed, step), so that a resumed fit has the same rows, with any number of
processes. Only inputs in training steps are augmented, not those of validation rows, test rows or statistics.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError, refusing
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.isolation import chain_seed, isolated
from bnn_pyro.parts.nets import users_code
from bnn_pyro.parts.own_module import imported

Step = tuple[int, Tensor | slice]  # (number of the step, its rows)
ITERATIONS, REACH = 20, 1e-2  # power iterations, and the distance to both sides in finite differences of gradients
EXCESS = 0.03  # relative error of the largest variance that ``stable_step`` allows if every step takes all rows


@dataclass(frozen=True)
class Augmentation:
    """A user's random function from one input (in its own units, pixels in [0, 1]) to another of the same shape."""

    function: Callable[[Tensor], Any]

    @property
    def description(self) -> dict[str, Any]:
        """Its qualified name, or else its repr, for the settings that are saved."""
        return {"kind": "function", "name": getattr(self.function, "__qualname__", None) or repr(self.function)[:500]}


@dataclass
class MiniBatches(torch_data.Dataset):
    """The rows (x (B, *input_shape), y (B, …)) of steps.   augment: Augmentation, "package.module:function" or None."""

    data: Dataset
    seed: int
    augment: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.augment, str):
            self.augment = Augmentation(imported(self.augment))

    def __getitem__(self, step: Step) -> tuple[Tensor, Tensor]:
        number, rows = step
        x, y, schema = self.data.x_train[rows], self.data.y_train[rows], self.data.schema
        if self.augment is None:
            return x, y
        name = self.augment.description["name"]
        with isolated(chain_seed(self.seed, number, 3)):
            made = []
            for one in schema.unstandardise(x.cpu()):
                with users_code(f"augment: {name} failed"):
                    made.append(torch.as_tensor(self.augment.function(one.clone()), dtype=x.dtype))
                if made[-1].shape != one.shape:
                    raise UserError(f"augment: {name} makes {tuple(made[-1].shape)} of {tuple(one.shape)}; it must "
                                    "keep the shape of an input")  # fmt: skip
        return schema.standardise(torch.stack(made)).to(x.device), y

    def load(self, steps: Iterator[Step], workers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of these steps, in order, read ahead by worker processes. Raises UserError if one of them dies."""
        if not workers:
            yield from map(self.__getitem__, steps)
            return
        device = self.data.x_train.device
        on_cpu = MiniBatches(self.data.to("cpu"), self.seed, self.augment)  # workers cannot use a GPU's memory
        start_method = "fork" if sys.platform == "linux" else None  # "fork" takes functions that cannot be pickled
        steps = ((number, rows.cpu() if isinstance(rows, Tensor) else rows) for number, rows in steps)
        loader = torch_data.DataLoader(
            on_cpu, None, sampler=steps, num_workers=workers, pin_memory=device.type == "cuda",
            generator=torch.Generator(), multiprocessing_context=start_method,
        )  # fmt: skip
        died = ("a process that reads mini-batches died ({error}): the last checkpoint, if any, is whole; go on with "
                "--resume, or set workers to 0")  # fmt: skip
        with refusing(died, RuntimeError, saying="worker"):
            for x, y in loader:
                yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


class Batches:
    """Mini-batches of C chains: x (C, B, *input_shape) and y (C, B), or all rows if ``size`` is 0 or not less than N.

    In every epoch each chain divides the rows into random blocks of B and takes each block once, so that the noise of
    an epoch sums to zero; a remainder smaller than the number of blocks is left out. The rows depend on (seed, epoch).
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
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            orders = (torch.randperm(len(self.x), generator=generator) for _ in range(self.chains))
            blocks = [order[: self.per_epoch * self.size].view(self.per_epoch, self.size) for order in orders]
            for rows in torch.stack(blocks, 1).to(self.x.device)[first : first + stop - start]:  # (steps, C, B)
                yield tuple(part.index_select(0, rows.flatten()).unflatten(0, rows.shape) for part in (self.x, self.y))
                start += 1


def draws_due(steps: int, burn_in: int, num: int) -> np.ndarray:
    """(steps,), whether a draw is due: ``num`` evenly spaced ones after the burn-in, but at most one a step."""
    remaining = steps - burn_in
    serial = np.floor(np.arange(1, remaining + 1) / max(remaining / num, 1.0) + 1e-6)
    return np.append(np.zeros(burn_in, dtype=bool), np.diff(serial, prepend=0) > 0)


def stiffest(log_joint: LogJoint, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The largest |λ| (C,) of the Hessian of −log π at w (C, P), by power iteration with differences of gradients."""
    u = torch.randn_like(w)
    for _ in range(ITERATIONS):
        u = REACH * u / u.norm(dim=1, keepdim=True)
        ahead, behind = (log_joint.gradient(w + side * u, x, y)[1] for side in (1, -1))
        u = (behind - ahead) / (2 * REACH)
    return u.norm(dim=1)


def stable_step(curvature: float, friction: float, per_epoch: int, share: float) -> float:
    """η = min(0.03·(4 − 2α), 4α·share·B/N) / λ; without mini-batches the second bound does not apply.

    curvature: the largest λ of the chains.   per_epoch: N/B; 1: all rows.   share: ½ for SGLD, 1 for SGHMC.
    """
    least = 4 * friction * share / per_epoch if per_epoch > 1 else math.inf
    return min(EXCESS * (4 - 2 * friction), least) / curvature
