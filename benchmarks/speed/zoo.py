"""Variants of this package, timed in ``bp.fit`` itself: rows gathered, a trace kept, and an optimiser's step."""

from __future__ import annotations

import math
import statistics
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

import bnn_pyro as bp
from benchmarks.speed.problem import INIT_SCALE, LR, NOISE, Contestant, Problem, network
from benchmarks.timing import Enough, clocked

__all__ = ["OURS", "PACKAGE", "Fit", "settings_of"]

#: The contestant that the comparisons are about.
OURS = "hidden-layer"


def settings_of(problem: Problem, prior: str = "normal:1") -> dict:
    """Settings of a variant at the problem's sizes."""
    sizes = {"hidden": problem.sizes[1:-1], "activation": "leaky_relu", "noise": NOISE}
    return {**sizes, "prior": prior, "init_scale": INIT_SCALE}


class Fit:
    """``bp.fit`` by SVI; as a step, an epoch of it."""

    def __init__(self, problem: Problem, entry: Any) -> None:
        self.problem, self.entry = problem, entry
        x, y = (torch.cat(part) for part in zip(*problem.batches, strict=True))
        self.data = bp.Dataset("rows", problem.schema, x, y, x[:0], y[:0], x[:0], y[:0])
        self.how = dict(device=problem.device.type, progress=False)

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """An epoch; its mean ELBO, negative."""
        return -bp.fit(self.entry, self.data, self._method(1), **self.how).trace["elbo"][-1]

    def seconds(self, steps: int) -> float:
        """Seconds a step, the median over the epochs after the first."""
        per_epoch = len(self.problem.batches)
        epochs = 1 + math.ceil(steps / per_epoch)
        method = clocked(self._method(epochs), 0.0, epochs_least=epochs)
        with suppress(Enough):
            bp.fit(self.entry, self.data, method, **self.how)
        return statistics.median(method.epoch_seconds()) / per_epoch

    def _method(self, epochs: int) -> bp.SVI:
        return bp.SVI(epochs=epochs, batch_size=self.problem.batch, lr=LR, patience=0)


def _variant(name: str, note: str, prior: str = "normal:1") -> Contestant:
    return Contestant(lambda problem: Fit(problem, bp.ZOO[name](**settings_of(problem, prior))), f"{note}; bp.fit")


def _module(sampling: str, note: str) -> Contestant:
    """A network as it is, with all of its weights Bayesian."""

    def build(problem: Problem) -> Fit:
        likelihood = dict(noise=NOISE) if problem.regression else {}
        # Noise of every row needs normalisation that does not mix the rows.
        fixed = dict(batch_norm="frozen") if sampling == "rows" else {}
        how = dict(prior="normal:1", init_scale=INIT_SCALE, sampling=sampling)
        return Fit(problem, bp.Bayesian(network(problem), **how, **likelihood, **fixed))

    return Contestant(build, f"{note}; bp.fit", modules=True)


PACKAGE: dict[str, Contestant] = {
    OURS: _variant("hidden-layer", "local reparametrization, a free σ for every weight"),
    "variational-dropout": _variant("variational-dropout", "one α a layer", prior="log-uniform"),
    "sparse-dropout": _variant("sparse-dropout", "one α a weight", prior="log-uniform"),
    "mean-field": _variant("mean-field", "sampled weights"),
    "my-network, weights": _module("weights", "any module, sampled weights"),
    "my-network, rows": _module("rows", "any module, noise of every row"),
}
