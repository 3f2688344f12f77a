"""Deterministic networks: plain ``nn.Module``s that know nothing of Bayes.

Every layer takes weights with leading draw dimensions (S, out, in) as well as one set (out, in), so that
``torch.func.functional_call`` runs many draws in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnn_pyro.errors import unknown

__all__ = ["ACTIVATIONS", "MLP", "Linear"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
}


class Linear(nn.Linear):
    """y = x Wᵀ + b, for x (…, B, in) and W (out, in) or (S, out, in); b (out) or (S, out). Returns (…, B, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x, broadcasting over the draws' dimensions."""
        if self.weight.dim() == 2:
            return F.linear(x, self.weight, self.bias)
        y = x @ self.weight.mT
        return y if self.bias is None else y + self.bias.unsqueeze(-2)


class MLP(nn.Module):
    """A fully connected network; inputs are flattened.

    input_shape: shape of one input.   hidden: widths of the hidden layers; () is a linear model.
    outputs: width of the last layer.  activation: a key of ``ACTIVATIONS``.  bias: in every layer, or in none.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        hidden: Sequence[int],
        outputs: int,
        activation: str = "relu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise unknown("activation", activation, ACTIVATIONS)
        self.input_dims = len(input_shape)
        self.activation = ACTIVATIONS[activation]
        widths = [int(torch.Size(input_shape).numel()), *hidden, outputs]
        self.layers = nn.ModuleList(Linear(i, o, bias=bias) for i, o in pairwise(widths))

    @property
    def width(self) -> int:
        """The widest activation, in numbers per point: what a memory bound counts."""
        return max(layer.out_features for layer in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> (B, outputs), or (S, B, outputs) where the weights carry S draws."""
        x = x.flatten(-self.input_dims)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)
