"""The sizes of a problem, and synthetic rows of these sizes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

import bnn_pyro as bp

__all__ = ["F32", "F64", "Sizes"]

#: Bytes of float32, float64 and int64.
F32, F64 = 4, 8


@dataclass(frozen=True)
class Sizes:
    """N rows of ``inputs`` numbers, two hidden layers of ``width`` (0: a linear model), K classes, B rows a batch.

    chains  C of a sampler      draws  stored of each chain, or S of a prediction      points  that are predicted
    memory  MiB that ``predict`` is told to keep within; 0: more than it can use
    threads of this process
    """

    rows: int = 512
    inputs: int = 784
    width: int = 400
    classes: int = 10
    batch: int = 128
    chains: int = 1
    draws: int = 100
    points: int = 1000
    memory: int = 256
    threads: int = 1

    @property
    def hidden(self) -> tuple[int, ...]:
        """Widths of the hidden layers."""
        return (self.width, self.width) if self.width else ()

    @property
    def outputs(self) -> int:
        """Numbers that the network gives: one log-odds for two classes."""
        return 1 if self.classes == 2 else self.classes

    @property
    def weights(self) -> int:
        """P, weights and biases of the network."""
        widths = (self.inputs, *self.hidden, self.outputs)
        return sum((i + 1) * o for i, o in pairwise(widths))

    @property
    def layers(self) -> tuple[int, ...]:
        """Widths of the activations, from the first hidden layer to the output."""
        return (*self.hidden, self.outputs)

    def data(self) -> bp.Dataset:
        """Standard normal inputs, random labels; no validation and no test rows."""
        g = torch.Generator().manual_seed(0)
        x = torch.randn(self.rows, self.inputs, generator=g)
        y = torch.randint(self.classes, (self.rows,), generator=g)
        schema = bp.Schema("classification", (self.inputs,), tuple(str(k) for k in range(self.classes)))
        return bp.Dataset("synthetic", schema, x, y, x[:0], y[:0], x[:0], y[:0])
