"""What grows how: one size at a time by factors, every measurement in a process of its own."""

from __future__ import annotations

import json
import os

from benchmarks.memory import run_apart
from benchmarks.provenance import Measurements
from benchmarks.scaling.subjects import SUBJECTS

__all__ = ["ALLOCATORS", "SWEEPS", "measure_growth"]

#: Seconds after which a measurement is given up.
LIMIT = 600
#: Part of the results -> how glibc is to hold memory. "growth": as it does by itself. "asked": every tensor is mapped
#: and given back at once, so that the resident set is what was asked for; slow.
ALLOCATORS: dict[str, dict[str, str]] = {
    "growth": {},
    "asked": {"MALLOC_MMAP_THRESHOLD_": "65536"},
}

WIDTHS, BATCHES, POINTS = (100, 400, 1600), (32, 128, 512, 2048), (1000, 4000, 16_000)
#: (subject, the size that grows, its values, how the other sizes differ from the subject's own).
SWEEPS: tuple[tuple[str, str, tuple[int, ...], dict[str, int]], ...] = (
    ("mean-field", "width", (*WIDTHS, 3200), {}),
    ("hidden-layer", "width", (*WIDTHS, 3200), {}),
    ("map", "width", (*WIDTHS, 3200), {}),
    ("mean-field", "batch", BATCHES, {"rows": 4096}),
    ("hidden-layer", "batch", BATCHES, {"rows": 4096}),
    ("map", "batch", BATCHES, {"rows": 4096}),
    ("mean-field", "rows", (2048, 8192, 32768, 131072), {"width": 100}),
    ("last-svi", "classes", (10, 100, 1000), {}),
    ("last-map", "classes", (10, 100, 1000), {}),
    ("last-sghmc", "classes", (10, 100, 1000), {}),
    ("last-svi", "inputs", (128, 512, 2048), {"classes": 100}),
    ("last-sghmc", "inputs", (128, 512, 2048), {"classes": 100}),
    ("laplace", "inputs", (31, 124, 499), {}),
    ("sghmc-chains", "chains", (1, 16, 256, 2048, 10_000), {}),
    ("chees-chains", "chains", (16, 64, 256, 1024, 10_240), {}),
    ("chees-net", "chains", (16, 64, 256, 1024), {}),
    ("predict", "draws", (16, 64, 256, 1024), {}),
    ("predict", "points", POINTS, {"draws": 32}),
    ("predict", "points", POINTS, {"draws": 32, "memory": 32}),
    ("predict", "points", POINTS, {"draws": 32, "memory": 0}),
)


def measure_growth(results: Measurements, subjects: list[str], repeats: int) -> None:
    """Every point of every sweep, ``repeats`` times over; what is in the results already counts."""
    for again in range(repeats):
        for subject, grows, values, fixed in SWEEPS:
            if subjects and subject not in subjects:
                continue
            for value in values:
                key = {"subject": subject, "grows": grows, "value": value, "fixed": fixed}
                if len(results.runs(key)) > again:
                    continue
                load, sizes = os.getloadavg()[0], {**fixed, grows: value}
                threads = str(SUBJECTS[subject].sizes.threads)
                worker = ("benchmarks.scaling", "run", subject, json.dumps(sizes))
                run = run_apart(*worker, timeout=LIMIT, OMP_NUM_THREADS=threads, **ALLOCATORS[results.part])
                results.add(key, run, load)
                print(f"{subject} {grows} {value} {fixed or ''}: {run['seconds']:.4g} s", flush=True)
