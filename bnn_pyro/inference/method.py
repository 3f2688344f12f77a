"""The protocol of inference: a frozen dataclass whose fields are its settings, with one verb, ``run``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior

__all__ = ["CONVERGES_TO", "NEEDS", "Method", "Report", "check_finite", "diverged"]

#: Called with (steps done, of how many, figures to show).
Report = Callable[[int, int, Mapping[str, float | str]], None]


#: What the draws of a method tend to as it is given more time.
CONVERGES_TO: dict[str, str] = {
    "exact": "the exact posterior",
    "exact as lr → 0": "the exact posterior, but for a bias that falls with the step size",
    "best in family": "the member of a family that is closest to the posterior",
    "normal at the mode": "a Normal at a mode of the posterior, exact where the log joint is quadratic",
    "point": "one set of weights, or a few, with nothing said of what lies between them",
}
#: What a method can need of a variant, which declares in ``has`` what it has.
NEEDS: dict[str, str] = {
    "guide": "a guide that is trained by the ELBO",
    "weights": "a model p(y, w | x) of the network's own weights",
    "proper prior": "a prior over weights that can be sampled",
    "linear model": "a network that is linear in its weights",
    "dropout": "a network with dropout",
    "deterministic": "a network that is used with one set of weights",
}


class Method(Protocol):
    """One way to infer.

    converges_to  a key of ``CONVERGES_TO``: what it claims, and what ``checks`` hold it to
    needs         keys of ``NEEDS``: what a variant must have
    tiny          settings that suffice where there are a few weights and some dozen rows
    """

    converges_to: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    tiny: ClassVar[Mapping[str, Any]]

    def run(
        self,
        model: nn.Module,
        guide: nn.Module | None,
        data: Dataset,
        *,
        seed: int = 0,
        checkpoint: Checkpoint | None = None,
        report: Report | None = None,
    ) -> Posterior:
        """Infer the posterior of ``model`` given ``data``'s training rows; called inside ``isolated(seed)``.

        seed: for the order of mini-batches.   checkpoint: saved to as it asks, resumed from if it holds a state.
        """
        ...


def check_finite(recent: Sequence[Tensor] | Tensor, step: int, lr: float) -> None:
    """Raise UserError where the first figure of a line of ``recent`` is not finite, the last of them of this step."""
    bad = [i for i, parts in enumerate(recent) if not bool(torch.isfinite(parts[0]))]
    if bad:
        raise diverged(f"loss became {recent[bad[0]][0].item()} at", step - len(recent) + bad[0] + 1, lr)


def diverged(what: str, step: int, lr: float) -> UserError:
    """The error that says so, with what to do."""
    return UserError(
        f"the {what} step {step} (lr {lr}); the last good checkpoint, if any, is kept: "
        f"try a smaller --lr, such as {lr / 10:g}"
    )
