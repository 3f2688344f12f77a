"""A last layer of ImageNet's shape: 1,000 classes on 2,048 features in a cache on disk that is mapped into memory.

No images: inputs of 16 numbers, of which a frozen random layer makes the features, and random labels. A thirty-second
part of ImageNet's 1,281,167 rows and an eighth of them show whether what grows with the rows grows in proportion.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from contextlib import suppress
from typing import Any

import torch

import bnn_pyro as bp
from benchmarks.memory import peak, run_apart
from benchmarks.provenance import Measurements
from benchmarks.timing import Enough, clocked

__all__ = ["METHODS", "ROWS", "measure_features", "run_features"]

#: ImageNet's training images, and the parts of them that are measured.
ROWS, PARTS = 1_281_167, (32, 8)
INPUTS, FEATURES, CLASSES, BATCH, DRAWS = 16, 2048, 1000, 512, 10
#: What is measured, in this order: the first makes the cache that the others map.
METHODS = {
    "cache": "making the cache, once",
    "map": "MAP, an epoch",
    "svi": "SVI, an epoch",
    "sghmc": "SGHMC, 1 chain, an epoch",
    "predict": "predict, 1,000 rows, 100 draws",
}


def measure_features(results: Measurements, repeats: int) -> None:
    """Each in a process of its own, of two threads, with a cache that begins empty."""
    for again in range(repeats):
        for part in PARTS:
            keys = [{"method": name, "rows": ROWS // part} for name in METHODS]
            if all(len(results.runs(key)) > again for key in keys):
                continue
            with tempfile.TemporaryDirectory(prefix="features-") as cache:
                for key in keys:
                    known, load = len(results.runs(key)) > again, os.getloadavg()[0]
                    if known and key["method"] != "cache":
                        continue
                    worker = ("benchmarks.scaling.worker", "features", json.dumps(key))
                    run = run_apart(*worker, OMP_NUM_THREADS="2", BNN_PYRO_CACHE=cache)
                    if not known:
                        results.add(key, run, load)
                    print(f"features {key}: {run}", flush=True)


def run_features(method: str, rows: int, features: int = FEATURES, classes: int = CLASSES) -> dict[str, Any]:
    """One of ``METHODS``; seconds of an epoch over these rows (svi, map, sghmc), or of the whole."""
    data, entry = _problem(min(rows, 600), features, min(classes, 4))
    _run("map" if method == "cache" else method, data, entry)  # code that is read from disk, threads
    data, entry = _problem(rows, features, classes)
    with peak() as found:
        seconds = _run(method, data, entry)
    return {"seconds": seconds, "resident": found.resident, "anonymous": found.anonymous}


def _problem(rows: int, features: int, classes: int) -> tuple[bp.Dataset, bp.LastLayer]:
    with bp.isolated(0):
        net = torch.nn.Sequential(torch.nn.Linear(INPUTS, features), torch.nn.ReLU())
        x, y = torch.randn(rows, INPUTS), torch.randint(classes, (rows,))
    schema = bp.Schema("classification", (INPUTS,), tuple(str(k) for k in range(classes)))
    return bp.Dataset("synthetic", schema, x, y, x[:0], y[:0], x[:0], y[:0]), bp.LastLayer(backbone=net)


def _run(method: str, data: bp.Dataset, entry: bp.LastLayer) -> float:
    start = time.perf_counter()
    if method == "predict":
        with bp.isolated(0):
            model = entry.model(data.schema)
            posterior = bp.Posterior(model, data.schema, guide=entry.guide(model))
        bp.predict(posterior, data.x_train[:1000], num_draws=100)
        return time.perf_counter() - start
    if method == "cache":  # and stop where the first epoch would begin
        timed = clocked(bp.MAP(epochs=1, batch_size=len(data.x_train)), 0.0, epochs_least=0)
    else:
        more = dict(chains=1, burn_in=1, max_draws=DRAWS) if method == "sghmc" else {}
        kind = {"map": bp.MAP, "svi": bp.SVI, "sghmc": bp.SGHMC}[method]
        timed = clocked(kind(epochs=5, batch_size=BATCH, lr=1e-3, **more), 0.0, epochs_least=2)
    with suppress(Enough):
        bp.fit(entry, data, timed, device="cpu", progress=False)
    return timed.began[0] - start if method == "cache" else statistics.median(timed.epoch_seconds())
