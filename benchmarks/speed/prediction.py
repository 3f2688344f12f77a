"""Predicting many images with many draws: ``bp.predict`` and the loop over guide traces that people write.

The loop: for every draw and chunk of images trace the guide, replay the model, read the probabilities at "y", and add
them up. The floor is as many passes of the deterministic network.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

import bnn_pyro as bp
from benchmarks.speed.problem import Problem, network, wait_for
from benchmarks.speed.zoo import settings_of
from benchmarks.timing import Times, print_ratios, ratios, spread, stopwatch, take_turns

__all__ = ["PREDICTED", "predictors", "time_prediction"]

#: Images that a loop takes at once.
CHUNK = 500
#: Variants that are asked to predict.
PREDICTED = ("hidden-layer", "mean-field")

Predictor = Callable[[Tensor, int], Tensor]  # images, draws -> mean probabilities (B, K)


def chunked(classes: int, probabilities: Callable[[Tensor], Tensor]) -> Predictor:
    """The mean over draws of what a function gives for a chunk of images, (B, D) -> (B, K)."""

    @torch.no_grad()
    def run(x: Tensor, draws: int) -> Tensor:
        total = torch.zeros(len(x), classes)
        for _ in range(draws):
            for start in range(0, len(x), CHUNK):
                total[start : start + CHUNK] += probabilities(x[start : start + CHUNK]).cpu()
        return total / draws

    return run


def traced(posterior: bp.Posterior, chunk: Tensor) -> Tensor:
    """Probabilities of one draw of the guide, (B, K)."""
    with bp.isolated(None):
        drawn = poutine.trace(posterior.guide).get_trace(chunk)
        return poutine.trace(poutine.replay(posterior.model, trace=drawn)).get_trace(chunk).nodes["y"]["fn"].probs


def predictors(problem: Problem) -> dict[str, Predictor]:
    """Everybody who predicts, by name; posteriors as they are before training."""
    net, classes = network(problem).to(problem.device), problem.sizes[-1]
    found = {"deterministic": chunked(classes, lambda x: net(x).softmax(-1))}
    for name in PREDICTED:
        entry = bp.ZOO[name](**settings_of(problem))
        with bp.isolated(0):
            model = entry.model(problem.schema).to(problem.device)
            posterior = bp.Posterior(model, problem.schema, guide=entry.guide(model).to(problem.device))
        found[f"{name}, predict"] = lambda x, draws, p=posterior: bp.predict(p, x, num_draws=draws).mean
        found[f"{name}, loop over traces"] = chunked(classes, partial(traced, posterior))
    return found


def time_prediction(problem: Problem, images: int, draws: int, rounds: int, result: dict[str, Any]) -> None:
    """Fill ``result`` with {"seconds": {who: spread}, "ratios"}; print it."""
    x, times = torch.randn(images, problem.sizes[0], generator=torch.Generator().manual_seed(1)), Times()
    x = x.to(problem.device)

    def whole(run: Predictor) -> None:
        run(x, draws)
        wait_for(problem.device)

    contestants = {name: stopwatch(partial(whole, run)) for name, run in predictors(problem).items()}
    try:
        take_turns(contestants, rounds, times, "predict")
    finally:
        pairs = [(f"{v}, predict", who) for v in PREDICTED for who in (f"{v}, loop over traces", "deterministic")]
        result |= {"network": problem.name, "images": images, "draws": draws}
        result |= {"seconds": {name: spread(v) for name, v in times.items()}, "ratios": ratios(times, pairs)}
        print(f"\n{problem.name}: {images:,} images × {draws} draws")
        for name, value in result["seconds"].items():
            print(f"  {name:32} {value['median']:9.2f} s")
        print_ratios(result["ratios"])
