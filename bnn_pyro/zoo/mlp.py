"""The deterministic network: the same model as mean-field weights, fitted to its most probable weights.

    ŵ = argmax_w log p(y | x, w) + log p(w)

It is the baseline of every comparison and answers the same calls: its posterior is one draw, its epistemic
uncertainty zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from bnn_pyro.zoo.mean_field import MeanField

__all__ = ["MLP"]


@dataclass(frozen=True)
class MLP(MeanField):
    """Settings of a deterministic multilayer perceptron: those of ``MeanField``, whose prior is the weight decay."""

    summary: ClassVar[str] = "The deterministic network: one point estimate, the baseline"
    paper: ClassVar[str] = "Rumelhart, Hinton & Williams 1986, doi:10.1038/323533a0"
    has: ClassVar[frozenset[str]] = frozenset({"weights", "deterministic"})

    def guide(self, model: nn.Module) -> None:
        """None: a point estimate needs no q."""
        return None
