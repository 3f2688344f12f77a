"""What steps down the gradient, written as a short text, ``"adam"`` or ``"sgd:0.95"``, like a prior.

Learning rates are those of the literature: Adam's does not see the scale of the objective, which here is a sum over
the training rows; that of gradient descent belongs to their mean, and is divided by N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from bnn_pyro.settings import parse_named

__all__ = ["OPTIMISERS", "parse_optimiser"]

#: (parameters, learning rate, N) -> an optimiser of the sum over N rows.
Maker = Callable[[Iterable[nn.Parameter], float, int], torch.optim.Optimizer]


def _adam() -> Maker:
    """adam — Kingma & Ba 2015, arXiv:1412.6980, torch's fused kernel."""
    return lambda parameters, lr, rows: torch.optim.Adam(parameters, lr=lr, fused=True)


def _sgd(momentum: float) -> Maker:
    """sgd:MOMENTUM — v ← MOMENTUM·v + ∇(objective / N), w ← w − lr·v; 0 <= MOMENTUM < 1.

    Without Nesterov's look-ahead: the velocity grows to 1/(1 − MOMENTUM) gradients.
    """
    if not 0 <= momentum < 1:
        raise ValueError
    return lambda parameters, lr, rows: torch.optim.SGD(parameters, lr=lr / rows, momentum=momentum, fused=True)


#: Every optimiser by name; the numbers after the colon are its arguments.
OPTIMISERS: dict[str, Callable[..., Maker]] = {"adam": _adam, "sgd": _sgd}


def parse_optimiser(text: str) -> Maker:
    """``"sgd:0.95"`` -> the optimiser. Raises UserError for an unknown name, or a momentum outside [0, 1)."""
    return parse_named("optimiser", text, OPTIMISERS)
