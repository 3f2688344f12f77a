"""The deterministic network: the same model as mean-field weights, fitted to its most probable weights.

    ŵ = argmax_w log p(y | x, w) + log p(w)

It is the baseline of every comparison and answers the same calls: its posterior is one draw, its epistemic
uncertainty zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from bnn_pyro.zoo.entry import Fit
from bnn_pyro.zoo.mean_field import MeanField

__all__ = ["MLP"]


@dataclass(frozen=True)
class MLP(MeanField):
    """Settings of a deterministic multilayer perceptron: those of ``MeanField``, whose prior is the weight decay."""

    summary: ClassVar[str] = "The deterministic network: one point estimate, the baseline"
    paper: ClassVar[str] = "Rumelhart, Hinton & Williams 1986, doi:10.1038/323533a0"
    has: ClassVar[frozenset[str]] = frozenset({"weights", "deterministic"})
    fits: ClassVar[Mapping[str, Mapping[str, Fit]]] = {
        "toy-curve": {
            "map": Fit(entry={"hidden": (32,), "prior": "normal:3", "noise": 1.0}, method={"epochs": 3000, "lr": 0.01})
        },
        "breast-cancer": {
            "map": Fit(
                entry={"hidden": (5, 5), "activation": "tanh", "prior": "fan-in:2"}, method={"epochs": 600, "lr": 0.02}
            )
        },
        "diabetes": {"map": Fit(entry={"hidden": (50,), "prior": "fan-in:1"}, method={"epochs": 800, "lr": 0.02})},
        "digits": {
            "map": Fit(
                entry={"hidden": (100,), "prior": "normal:1"}, method={"epochs": 100, "batch_size": 64, "lr": 3e-3}
            )
        },
        **{
            name: {
                "map": Fit(
                    entry={"hidden": (400, 400), "prior": "normal:1"},
                    method={"epochs": 20, "batch_size": 128, "lr": 1e-3},
                )
            }
            for name in ("mnist", "fashion-mnist", "kmnist")
        },
    }

    def guide(self, model: nn.Module) -> None:
        """None: a point estimate needs no q."""
        return None
