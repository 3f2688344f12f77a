"""Deterministic networks: plain ``nn.Module``s that know nothing of Bayes.

Every layer takes weights with leading draw dimensions (S, out, in) as well as one set (out, in), so that
``torch.func.functional_call`` runs many draws in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnn_pyro.errors import UserError, unknown

__all__ = ["ACTIVATIONS", "MLP", "Linear", "Stage", "dropout_rate", "in_mode"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
}


#: (name, layer, what follows it or None).
Stage = tuple[str, nn.Module, Callable[[Tensor], Tensor] | None]


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Every submodule in training mode (dropout draws masks) or out of it; each one's former mode returns on exit."""
    changed = [part for part in module.modules() if part.training != training]  # none in most training steps
    for part in changed:
        part.training = training
    try:
        yield
    finally:
        for part in changed:
            part.training = not training


def dropout_rate(rate: float) -> float:
    """The rate itself. Raises UserError unless it lies between 0 (none) and 1 (excluded)."""
    if not 0 <= rate < 1:
        raise UserError(f"a dropout rate lies between 0 (none) and 1 (excluded), got {rate}")
    return rate


class Linear(nn.Linear):
    """y = x Wᵀ + b, for x (…, B, in) and W (out, in) or (S, out, in); b (out) or (S, out). Returns (…, B, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x, broadcasting over the draws' dimensions."""
        if self.weight.dim() == 2:
            return F.linear(x, self.weight, self.bias)
        y = self.weight @ x.mT  # not x @ Wᵀ: where outputs are few, as in a last layer, two to three times as fast
        return (y if self.bias is None else y.add_(self.bias.unsqueeze(-1))).mT  # in place: nobody needs y itself


class MLP(nn.Module):
    """A fully connected network; inputs are flattened.

    input_shape: shape of one input.   hidden: widths of the hidden layers; () is a linear model.
    outputs: width of the last layer.  activation: a key of ``ACTIVATIONS``.  bias: in every layer, or in none.
    dropout: (rate of the inputs, rate of every hidden unit), in training mode: each input of a layer is 0 with that
        probability and divided by 1 − rate otherwise, with a mask for every row (Srivastava et al. 2014).

    Raises UserError for an unknown activation or a rate outside [0, 1).
    """

    takes_draws = True

    def __init__(
        self,
        input_shape: Sequence[int],
        hidden: Sequence[int],
        outputs: int,
        activation: str = "relu",
        bias: bool = True,
        dropout: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__()
        dropout = tuple(dropout_rate(rate) for rate in dropout)
        if activation not in ACTIVATIONS:
            raise unknown("activation", activation, ACTIVATIONS)
        self.input_dims = len(input_shape)
        self.activation = ACTIVATIONS[activation]
        widths = [int(torch.Size(input_shape).numel()), *hidden, outputs]
        self.layers = nn.ModuleList(Linear(i, o, bias=bias) for i, o in pairwise(widths))
        self.rates = (dropout[0], *(dropout[1] for _ in hidden))

    def enter(self, x: Tensor) -> Tensor:
        """What the first layer takes: (B, *input_shape) -> (B, inputs)."""
        return x.flatten(-self.input_dims)

    def stages(self) -> list[Stage]:
        """The network as a chain: (name, layer, what follows it), in order. Dropout is not part of it."""
        last = len(self.layers) - 1
        return [(f"layers.{i}", layer, None if i == last else self.activation) for i, layer in enumerate(self.layers)]

    @property
    def dropout_rates(self) -> dict[str, float]:
        """{weight matrix: share of its columns, the inputs of its layer, that dropout removes}."""
        return {f"layers.{i}.weight": rate for i, rate in enumerate(self.rates)}

    def features(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> what the last layer takes: (B, F), or (S, B, F)."""
        x = self.enter(x)
        for layer, rate in zip(self.layers[:-1], self.rates[:-1], strict=True):
            x = self.activation(layer(self._drop(x, rate)))
        return self._drop(x, self.rates[-1])

    def forward(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> (B, outputs), or (S, B, outputs) where the weights carry S draws."""
        return self.layers[-1](self.features(x))

    def _drop(self, x: Tensor, rate: float) -> Tensor:
        return F.dropout(x, rate) if self.training and rate else x
