"""Early stopping: the weights of the epoch that predicted the validation rows best, and when to stop looking further.

Choosing among the epochs is all that the validation rows do: no gradient is ever taken of them. Where a fit has several
processes, each scores its share of them.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from bnn_pyro.distributed import here
from bnn_pyro.inference.log_joint import log_likelihood
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import model_buffers

__all__ = ["EarlyStopping"]


class EarlyStopping:
    """Watches the mean validation NLL (nats per row) of a point estimate, and keeps its best weights.

    x, y: the validation rows.   patience: epochs without a better NLL after which :meth:`seen` says to stop.
    """

    def __init__(self, model: nn.Module, point: nn.Module, x: Tensor, y: Tensor, patience: int) -> None:
        self.model, self.point, self.x, self.y, self.patience = model, point, x, y, patience
        self.best_nll, self.best_epoch = math.inf, 0.0
        self.best = self._weights()

    @torch.no_grad()
    def seen(self, epoch: float) -> tuple[float, bool]:
        """(validation NLL of the weights as they are, whether to stop)."""
        weights = {site: value[None] for site, value in self.point.sites().items()}
        ranks = here()
        with in_mode(self.model, training=False):
            mine = log_likelihood(self.model, weights, ranks.part(self.x), ranks.part(self.y))
        nll = -ranks.total(mine.sum(dtype=torch.float64)).item() / len(self.x)
        if nll < self.best_nll:
            self.best_nll, self.best_epoch = nll, epoch
            self.best = self._weights()
        return nll, epoch - self.best_epoch >= self.patience

    def restore(self) -> None:
        """Put the best weights back."""
        self.point.load_state_dict(self.best["weights"])
        self.model.load_state_dict(self.best["buffers"], strict=False)

    def _weights(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the weights and of the model's buffers, which training may change too."""
        return copy.deepcopy({"weights": self.point.state_dict(), "buffers": model_buffers(self.model)})

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {"best": self.best, "best_nll": self.best_nll, "best_epoch": self.best_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        best = state["best"]  # of an earlier version: the weights alone
        self.best = best if best.keys() == {"weights", "buffers"} else {"weights": best, "buffers": {}}
        self.best_nll, self.best_epoch = state["best_nll"], state["best_epoch"]
