"""What grows how: one size at a time by factors, every measurement in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scale.store import add, done, stamp
from scale.subjects import SUBJECTS

__all__ = ["ALLOCATORS", "SWEEPS", "measure_growth", "worker"]

WORKER = Path(__file__).parents[1] / "scaling_worker.py"
#: Seconds after which a measurement is given up.
LIMIT = 600
#: Part of the results -> how glibc is to hold memory. "growth": as it does by itself. "asked": every tensor is mapped
#: and given back at once, so that the resident set is what was asked for; slow. "held": nothing is mapped.
ALLOCATORS: dict[str, dict[str, str]] = {
    "growth": {},
    "asked": {"MALLOC_MMAP_THRESHOLD_": "65536"},
    "held": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
}

WIDTHS, BATCHES = (100, 400, 1600), (32, 128, 512, 2048)
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
    ("laplace-full", "inputs", (31, 124, 499), {}),
    ("laplace-kron", "inputs", (31, 124, 499), {}),
    ("laplace-diag", "inputs", (31, 124, 499), {}),
    ("sghmc-chains", "chains", (1, 16, 256, 2048, 10_000), {}),
    ("chees-chains", "chains", (16, 64, 256, 1024, 10_240), {}),
    ("chees-net", "chains", (16, 64, 256, 1024), {}),
    ("predict", "draws", (16, 64, 256, 1024), {}),
    ("predict", "points", (1000, 4000, 16_000), {"draws": 32}),
    ("predict", "points", (1000, 4000, 16_000), {"draws": 32, "memory": 32}),
    ("predict", "points", (1000, 4000, 16_000), {"draws": 32, "memory": 0}),
)  # fmt: skip


def measure_growth(subjects: list[str], repeats: int, part: str) -> None:
    """Every point of every sweep, ``repeats`` times over; what is in the results already counts.

    part: one of ``ALLOCATORS``; "held" is of large networks alone.
    """
    for again in range(repeats):
        for subject, grows, values, fixed in SWEEPS:
            if subjects and subject not in subjects:
                continue
            for value in values:
                key = {"subject": subject, "grows": grows, "value": value, "fixed": fixed}
                large = grows == "width" and value >= WIDTHS[-1]
                if done(part, key) > again or (part == "held" and not large):
                    continue
                load = os.getloadavg()[0]
                run = worker(subject, {**fixed, grows: value}, **ALLOCATORS[part])
                add(part, key, {**run, **stamp(load)})
                spoken = " ".join(f"{k} {v:.4g}" for k, v in run.items() if k != "peak")
                print(f"{subject} {grows} {value} {fixed or ''}: {spoken}", flush=True)


def worker(subject: str, sizes: dict[str, int], **environment: str) -> dict[str, Any]:
    """What a process of its own measures."""
    threads = sizes.get("threads", SUBJECTS[subject].sizes.threads)
    given = {**os.environ, "OMP_NUM_THREADS": str(threads), **environment}
    ended = subprocess.run(
        [sys.executable, str(WORKER), subject, json.dumps(sizes)],
        capture_output=True, text=True, env=given, timeout=LIMIT,
    )  # fmt: skip
    if ended.returncode:
        raise SystemExit(f"{subject} {sizes} failed:\n{ended.stderr[-3000:]}")
    return json.loads(ended.stdout.splitlines()[-1])
