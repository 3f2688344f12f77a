"""A Bayesian last layer: an epoch of SGHMC on features beside the same chain by hand; predictions of many draws.

Synthetic: 48,000 rows of 256 features in 10 classes, batches of 512; 10,000 images and a CNN with random weights. "By
hand" is one chain in plain torch: rows gathered, W xᵀ + b, the gradient of the cross-entropy, normal noise, the update.
"Matrix product" is that of 10,000 × 256 features with 100 draws of a 256 × 10 layer.
"""

from __future__ import annotations

import math
import statistics
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bnn_pyro as bp
from benchmarks.timing import Enough, Times, clocked, print_ratios, ratios, spread, stopwatch, take_turns

__all__ = ["time_last_layer"]

FEATURES, CLASSES, BATCH, DRAWS, CHAINS = 256, 10, 512, 100, 8
LR, FRICTION, PRIOR = 0.1, 0.03, "fan-in:4"
LABELS = tuple(map(str, range(CLASSES)))
SCHEMA = bp.Schema("classification", (FEATURES,), LABELS, tuple(f"x{i}" for i in range(FEATURES)))
IMAGES = bp.Schema("classification", (1, 28, 28), LABELS, ())
PAIRS = (
    ("SGHMC", "by hand"),
    (f"SGHMC, {CHAINS} chains", "SGHMC"),
    ("predict, features given", "matrix product"),
    ("predict", "CNN once + matrix product"),
)


def sghmc_epoch(data: bp.Dataset, chains: int) -> float:
    """Seconds of an epoch of ``bp.fit``, the median of three."""
    how = bp.SGHMC(
        epochs=4, burn_in=1, batch_size=BATCH, lr=LR, friction=FRICTION, jitter=0.1, chains=chains, max_draws=2
    )
    method = clocked(how, 0.0, epochs_least=4)
    with suppress(Enough):
        bp.fit(bp.MeanField(hidden=(), prior=PRIOR), data, method, device="cpu", progress=False)
    return statistics.median(method.epoch_seconds())


def epoch_by_hand(x: Tensor, y: Tensor) -> Tensor:
    """The same chain; nothing is recorded."""
    steps = math.ceil(len(x) / BATCH)
    size, eta, precision = len(x) // steps, LR / len(x), FEATURES / 16.0
    noise = math.sqrt(2 * FRICTION * eta)
    w, v = torch.zeros(FEATURES * CLASSES + CLASSES), torch.zeros(FEATURES * CLASSES + CLASSES)
    weight, bias = w[: FEATURES * CLASSES].view(CLASSES, FEATURES), w[FEATURES * CLASSES :].unsqueeze(-1)
    for order in torch.randperm(len(x))[: steps * size].view(steps, size):
        rows = x.index_select(0, order)
        residual = torch.addmm(bias, weight, rows.mT).softmax(0).sub_(F.one_hot(y.index_select(0, order), CLASSES).mT)
        gradient = torch.cat([(residual @ rows).flatten(), residual.sum(1)]).mul_(len(x) / size)
        gradient.add_(w, alpha=precision)
        v.mul_(1 - FRICTION).add_(gradient, alpha=-eta).add_(torch.randn_like(v), alpha=noise)
        w.add_(v)
    return w


def cnn() -> nn.Module:
    """Images -> features, (B, 1, 28, 28) -> (B, 256), random weights; of the shape that is tuned on MNIST."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, FEATURES), nn.ReLU(),
    )  # fmt: skip


def time_last_layer(rounds: int, result: dict[str, Any], rows: int = 48_000, images: int = 10_000) -> None:
    """Fill ``result`` with {"ms": {who: spread}, "ratios"}; print it."""
    with bp.isolated(0):
        x, y = torch.randn(rows, FEATURES).relu_(), torch.randint(CLASSES, (rows,))
        pictures, backbone = torch.randn(images, 1, 28, 28), cnn().eval()
        linear = bp.MeanField(hidden=(), prior=PRIOR).model(SCHEMA)
        chains = {s: torch.randn(1, DRAWS, *v.shape) / 16 for s, v in linear.initial.items()}
        on_images = bp.LastLayer(backbone=backbone, prior=PRIOR).model(IMAGES)
    data = bp.Dataset("rows", SCHEMA, x, y, x[:0], y[:0], x[:0], y[:0])
    given = bp.Posterior(linear, SCHEMA, chains=chains)
    whole = bp.Posterior(on_images, IMAGES, chains=chains)
    with torch.no_grad():
        features = backbone(pictures)
    weights = chains["layers.0.weight"][0].flatten(0, 1)

    @torch.no_grad()
    def once() -> Tensor:
        return weights @ backbone(pictures).mT

    contestants = {
        "SGHMC": lambda: sghmc_epoch(data, 1),
        f"SGHMC, {CHAINS} chains": lambda: sghmc_epoch(data, CHAINS),
        "by hand": stopwatch(lambda: epoch_by_hand(x, y)),
        "matrix product": stopwatch(lambda: weights @ features.mT),
        "predict, features given": stopwatch(lambda: bp.predict(given, features, num_draws=DRAWS)),
        "CNN once + matrix product": stopwatch(once),
        "predict": stopwatch(lambda: bp.predict(whole, pictures, num_draws=DRAWS)),
    }
    times = Times()
    try:
        take_turns(contestants, rounds, times, "last layer")
    finally:
        result |= {"ms": {name: spread([1000 * v for v in values], 2) for name, values in times.items()}}
        result["ratios"] = ratios(times, PAIRS)
        print("\na Bayesian last layer")
        for name, value in result["ms"].items():
            print(f"  {name:32} {value['median']:10.2f} ms")
        print_ratios(result["ratios"])
