"""Predicting many images with many draws: ours, and the loops that people write, in time and peak memory.

The naive loop over guide traces: for every draw and chunk of images trace the guide, replay the model, read the
logits, and add up the softmax. The floor is as many passes of the deterministic network.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pyro.poutine as poutine
import torch
from torch import Tensor

from bnn_pyro import isolated
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import predict
from speed.memory import peak_bytes
from speed.problem import Problem, network, wait_for
from speed.timing import Times
from speed.zoo import variant

__all__ = ["CHUNK", "PREDICTED", "measure", "predictors"]

#: Images that a loop takes at once.
CHUNK = 500
#: Variants that are asked to predict.
PREDICTED = ("hidden-layer", "mean-field")

Predictor = Callable[[Tensor, int], Tensor]  # images, draws -> mean probabilities (B, K)


def deterministic(problem: Problem) -> Predictor:
    """As many passes of the deterministic network as there are draws."""
    net = network(problem).to(problem.device)

    def run(x: Tensor, draws: int) -> Tensor:
        total = torch.zeros(len(x), problem.sizes[-1])
        with torch.no_grad():
            for _ in range(draws):
                for start in range(0, len(x), CHUNK):
                    total[start : start + CHUNK] += net(x[start : start + CHUNK]).softmax(-1).cpu()
        return total / draws

    return run


def ours(name: str, problem: Problem, max_memory: int | None = None) -> Predictor:
    """``predict`` for a variant, with its own bound of memory or another."""
    model, guide = variant(name, problem)
    posterior = Posterior(model, problem.schema, guide=guide)
    settings = {} if max_memory is None else {"max_memory": max_memory}
    return lambda x, draws: predict(posterior, x, num_draws=draws, **settings).mean


def naive_loop(name: str, problem: Problem) -> Predictor:
    """The loop over guide traces."""
    model, guide = variant(name, problem)

    def run(x: Tensor, draws: int) -> Tensor:
        total = torch.zeros(len(x), problem.sizes[-1])
        with torch.no_grad(), isolated(None):
            for _ in range(draws):
                for start in range(0, len(x), CHUNK):
                    chunk = x[start : start + CHUNK]
                    drawn = poutine.trace(guide).get_trace(chunk)
                    replayed = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(chunk)
                    total[start : start + CHUNK] += replayed.nodes["y"]["fn"].probs.cpu()
        return total / draws

    return run


def predictors(problem: Problem) -> dict[str, Predictor]:
    """Everybody who predicts, by name."""
    found = {"deterministic": deterministic(problem)}
    for name in PREDICTED:
        found[f"{name}, predict"] = ours(name, problem)
        found[f"{name}, naive loop"] = naive_loop(name, problem)
    return found


def measure(
    problem: Problem,
    times: Times,
    memory: dict[str, int],
    *,
    images: int,
    draws: int,
    rounds: int,
    report: Callable[[str], None],
) -> None:
    """Fill ``memory`` with peak bytes above the images, and ``times`` with seconds of whole predictions, by rounds."""
    x = torch.randn(images, problem.sizes[0], generator=torch.Generator().manual_seed(1)).to(problem.device)
    everybody = predictors(problem)
    for name, run in everybody.items():
        report(f"memory: {name}")
        run(x[:CHUNK], 1)
        # A tenth of the draws: the profiler notes every allocation, and the peak is reached in the first few.
        memory[name] = peak_bytes(problem.device, lambda run=run: run(x, max(1, draws // 10)))[1][0]
    for i in range(rounds):
        found = {}
        for name, run in everybody.items():
            report(f"round {i + 1} of {rounds}: {name}")
            wait_for(problem.device)
            start = time.perf_counter()
            run(x, draws)
            found[name] = time.perf_counter() - start
        for name, value in found.items():
            times.setdefault(name, []).append(value)
