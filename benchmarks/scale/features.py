"""A last layer of ImageNet's shape: 1,000 classes on 2,048 features in a cache on disk that is mapped into memory.

No images: inputs of 16 numbers, of which a frozen random layer makes the features, and random labels. A thirty-second
part of ImageNet's 1,281,167 rows and an eighth of them show whether what grows with the rows grows in proportion.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import bnn_pyro as bp
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from scale.memory import peak
from scale.store import add, done, stamp
from scale.subjects import EPOCHS, Enough, clocked

__all__ = ["ROWS", "measure_features", "run_features"]

#: ImageNet's training images, and the parts of them that are measured.
ROWS, PARTS = 1_281_167, (32, 8)
INPUTS, FEATURES, CLASSES, BATCH, DRAWS = 16, 2048, 1000, 512, 10
WORKER = Path(__file__).parents[1] / "scaling_worker.py"
#: What is measured, in this order: the first makes the cache that the others map.
METHODS = ("cache", "map", "svi", "sghmc", "laplace", "predict")


def measure_features(repeats: int) -> None:
    """Each in a process of its own, of two threads, with a cache that begins empty."""
    for again in range(repeats):
        for part in PARTS:
            keys = [{"method": name, "rows": ROWS // part} for name in METHODS]
            if all(done("features", key) > again for key in keys):
                continue
            with tempfile.TemporaryDirectory(prefix="features-") as cache:
                for key in keys:
                    if key["method"] == "cache" or done("features", key) <= again:
                        _measure(key, cache, again)


def _measure(key: dict[str, Any], cache: str, again: int) -> None:
    load = os.getloadavg()[0]
    ended = subprocess.run(
        [sys.executable, str(WORKER), "features", json.dumps(key)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2", "BNN_PYRO_CACHE": cache},
    )
    if ended.returncode:
        raise SystemExit(ended.stderr[-3000:])
    run = json.loads(ended.stdout.splitlines()[-1])
    if done("features", key) <= again:
        add("features", key, {**run, **stamp(load)})
    print(f"features {key}: {run}", flush=True)


def run_features(method: str, rows: int, features: int = FEATURES, classes: int = CLASSES) -> dict[str, Any]:
    """One of ``METHODS``; seconds of an epoch over these rows (svi, map, sghmc), or of the whole."""
    data, entry = _problem(min(rows, 600), features, min(classes, 4))
    _run("map" if method == "cache" else method, data, entry)  # code that is read from disk, threads
    data, entry = _problem(rows, features, classes)
    with peak() as found:
        figures = _run(method, data, entry)
    return {**figures, "resident": found.resident, "anonymous": found.anonymous}


def _problem(rows: int, features: int, classes: int) -> tuple[bp.Dataset, bp.LastLayer]:
    with bp.isolated(0):
        net = torch.nn.Sequential(torch.nn.Linear(INPUTS, features), torch.nn.ReLU())
        x, y = torch.randn(rows, INPUTS), torch.randint(classes, (rows,))
    schema = Schema("classification", (INPUTS,), tuple(str(k) for k in range(classes)))
    return bp.Dataset("synthetic", schema, x, y, x[:0], y[:0], x[:0], y[:0]), bp.LastLayer(backbone=net)


def _run(method: str, data: bp.Dataset, entry: bp.LastLayer) -> dict[str, Any]:
    start = time.perf_counter()
    if method == "predict":
        with bp.isolated(0):
            model = entry.model(data.schema)
            posterior = bp.Posterior(model, data.schema, guide=entry.guide(model))
        bp.predict(posterior, data.x_train[:1000], num_draws=100)
        return {"seconds": time.perf_counter() - start}
    if method == "laplace":
        try:
            bp.fit(entry, data, bp.Laplace(structure="diag"), device="cpu", progress=False)
        except UserError as refused:
            return {"refused": str(refused)}
        return {"seconds": time.perf_counter() - start}
    if method == "cache":  # and stop where the first epoch would begin
        timed = clocked(bp.MAP(epochs=1, batch_size=len(data.x_train)), 0.0, least=0)
        _fit(entry, data, timed)
        return {"seconds": timed.began[0] - start}
    how = dict(epochs=EPOCHS + 2, batch_size=BATCH, lr=1e-3)
    more = dict(chains=1, burn_in=1, max_draws=DRAWS) if method == "sghmc" else {}
    kind = {"map": bp.MAP, "svi": bp.SVI, "sghmc": bp.SGHMC}[method]
    timed = clocked(kind(**how, **more), 0.0, least=2)
    _fit(entry, data, timed)
    epochs = [b - a for a, b in zip(timed.ticks, timed.ticks[1:], strict=False)]
    return {"seconds": statistics.median(epochs), "before": timed.began[0] - start}


def _fit(entry: bp.LastLayer, data: bp.Dataset, method: bp.SVI) -> None:
    with suppress(Enough):
        bp.fit(entry, data, method, device="cpu", progress=False)
