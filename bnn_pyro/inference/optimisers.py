"""What steps down the gradient, written as a short text, ``"adam"`` or ``"sgd:0.95"``, like a prior.

Learning rates are those of the literature: Adam's does not see the scale of the objective, which here is a sum over
the training rows; that of gradient descent belongs to their mean, and is divided by N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from bnn_pyro.errors import UserError, unknown

__all__ = ["OPTIMISERS", "parse_optimiser"]

#: (parameters, learning rate, N) -> an optimiser of the sum over N rows.
Maker = Callable[[Iterable[nn.Parameter], float, int], torch.optim.Optimizer]


def _adam() -> Maker:
    """adam — Kingma & Ba 2015, arXiv:1412.6980, torch's fused kernel."""
    return lambda parameters, lr, rows: torch.optim.Adam(parameters, lr=lr, fused=True)


def _sgd(momentum: float) -> Maker:
    """sgd:MOMENTUM — v ← MOMENTUM·v + ∇(objective / N), w ← w − lr·v; 0 <= MOMENTUM < 1, without Nesterov's look-ahead.

    The velocity grows to 1/(1 − MOMENTUM) gradients.
    """
    if not 0 <= momentum < 1:
        raise ValueError
    return lambda parameters, lr, rows: torch.optim.SGD(parameters, lr=lr / rows, momentum=momentum, fused=True)


#: Every optimiser by name; the numbers after the colon are its arguments.
OPTIMISERS: dict[str, Callable[..., Maker]] = {"adam": _adam, "sgd": _sgd}


def parse_optimiser(text: str) -> Maker:
    """``"sgd:0.95"`` -> the optimiser.

    Raises UserError for an unknown name, or a momentum that is missing or outside [0, 1).
    """
    name, colon, rest = str(text).partition(":")
    if name not in OPTIMISERS:
        raise unknown("optimiser", name, OPTIMISERS)
    try:
        return OPTIMISERS[name](*(float(part) for part in rest.split(",")) if colon else ())
    except (ValueError, TypeError):
        form = (OPTIMISERS[name].__doc__ or "").split(" — ")[0]
        note = ", with 0 <= MOMENTUM < 1" if "MOMENTUM" in form else ""
        raise UserError(f"the optimiser '{text}' must have the form {form}{note}") from None
