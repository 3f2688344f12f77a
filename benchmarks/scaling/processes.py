"""One fit in one process, of one thread and of several, and in several processes of one thread each, side by side."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

import bnn_pyro as bp
from benchmarks.memory import peak, run_apart
from benchmarks.provenance import Measurements
from benchmarks.timing import Enough, clocked
from bnn_pyro.distributed import joined_processes

__all__ = ["BATCHES", "FITS", "Way", "measure_processes", "time_fit", "ways"]

BATCHES = (128, 1024)
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


@dataclass(frozen=True)
class Way:
    """How many processes, of how many threads each."""

    processes: int
    threads: int


def ways(count: int) -> list[Way]:
    """To use ``count`` cores, or GPUs."""
    return [Way(1, 1), Way(1, count), Way(count, 1)]


def measure_processes(results: Measurements, count: int, repeats: int, device: str) -> None:
    """All ways of a fit in turn, so that whatever else the machine does hits them alike."""
    for again in range(repeats):
        for name in FITS:
            for batch in BATCHES:
                for way in ways(count):
                    key = {"fit": name, "batch": batch, **vars(way), "device": device}
                    if len(results.runs(key)) > again:
                        continue
                    load = os.getloadavg()[0]
                    run = launch(way, {"name": name, "batch": batch, "device": device})
                    results.add(key, run, load)
                    print(f"{key}: {run['rows_per_second']:,.0f} rows/s, {run['memory'] / 1e6:.0f} MB", flush=True)


def launch(way: Way, settings: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 of such a fit measures."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(way.processes))
    worker = ("benchmarks.scaling", "run", "fit", json.dumps(settings))
    return run_apart(*worker, launcher=torchrun if way.processes > 1 else (), OMP_NUM_THREADS=str(way.threads))


def time_fit(name: str, batch: int, rows: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Of the training loop, alike in all processes: rows a second, and bytes beyond the imports of each process."""
    fitted = FITS[name]
    data = bp.load_data("mnist", limit=rows or fitted.rows)
    none = {f"{axis}_{part}": getattr(data, f"{axis}_{part}")[:0] for axis in "xy" for part in ("val", "test")}
    data = replace(data, **none)
    method = clocked(fitted.method(epochs=100, batch_size=batch, lr=1e-4), 0.0, epochs_least=EPOCHS + 1)
    with joined_processes(), peak() as found, suppress(Enough):  # after as many epochs in each process
        bp.fit(fitted.entry(), data, method, device=device, progress=False)
    epochs = method.epoch_seconds()
    return {
        "threads": torch.get_num_threads(),
        "rows": len(data.x_train),
        "rows_per_second": len(data.x_train) / statistics.median(epochs),
        "fastest": len(data.x_train) / min(epochs),
        "memory": found.anonymous,
    }
