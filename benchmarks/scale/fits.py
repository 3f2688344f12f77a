"""One fit in one process or in several: what is fitted, and how one of its processes times its training loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

import bnn_pyro as bp
from bnn_pyro.distributed import Ranks, joined
from scale.memory import peak
from scale.subjects import Enough, clocked

__all__ = ["FITS", "Fitted", "time_fit"]

#: Epochs that are timed, after a first one that is not.
EPOCHS = 4


@dataclass(frozen=True)
class Fitted:
    """A fit of MNIST.   rows: how many, so that an epoch takes a second or two."""

    title: str
    rows: int
    entry: Callable[[], object]
    method: Callable[..., object]


def _last_layer() -> bp.LastLayer:
    """On 256 features of a random network, which are computed before the clock starts."""
    with bp.isolated(0):
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 256), torch.nn.ReLU())
    return bp.LastLayer(backbone=net)


FITS: dict[str, Fitted] = {
    "mean-field": Fitted(
        "mean-field 784-400-400-10, SVI", 4096, lambda: bp.MeanField(hidden=(400, 400), prior="normal:3"), bp.SVI
    ),
    "hidden-layer": Fitted("hidden-layer 3×1024, SVI", 2048, lambda: bp.HiddenLayerNet(hidden=(1024,) * 3), bp.SVI),
    "convnet": Fitted(
        "convnet, MAP", 2048, lambda: bp.ConvNet(channels=(32, 64), kernel=5, padding=0, prior="normal:1"), bp.MAP
    ),
    "last-layer": Fitted("last layer, 256 features, SVI", 32_768, _last_layer, bp.SVI),
}


def time_fit(name: str, batch: int, rows: int = 0, averaged: bool = True, device: str = "cpu") -> dict[str, Any]:
    """Of the training loop, alike in all processes: rows a second, and bytes beyond the imports of each process.

    averaged: whether gradients are; without, what is left is the time of everything else.
    """
    fitted = FITS[name]
    data = bp.load_data("mnist", limit=rows or fitted.rows)
    none = {f"{axis}_{part}": getattr(data, f"{axis}_{part}")[:0] for axis in "xy" for part in ("val", "test")}
    data = replace(data, **none)
    method = clocked(fitted.method(epochs=100, batch_size=batch, lr=1e-4), 0.0, least=EPOCHS + 1)
    averaging = nullcontext() if averaged else apart()
    with joined(), averaging, peak() as found, suppress(Enough):  # after as many epochs in each process
        bp.fit(fitted.entry(), data, method, device=device, progress=False)
    epochs = [b - a for a, b in pairwise(method.ticks)]
    return {
        "threads": torch.get_num_threads(),
        "rows": len(data.x_train),
        "rows_per_second": len(data.x_train) / statistics.median(epochs),
        "fastest": len(data.x_train) / min(epochs),
        "memory": found.anonymous,
    }


@contextmanager
def apart() -> Iterator[None]:
    """Gradients stay each process's own."""
    kept = Ranks.averaged
    Ranks.averaged = lambda self, module: module
    try:
        yield
    finally:
        Ranks.averaged = kept
