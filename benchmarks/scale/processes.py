"""One fit in one process, of one thread and of several, and in several processes of one thread each, side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale.fits import FITS
from scale.store import add, done, stamp

__all__ = ["BATCHES", "Way", "launch", "measure_processes", "ways"]

WORKER = Path(__file__).parents[1] / "scaling_worker.py"
BATCHES = (128, 1024)


@dataclass(frozen=True)
class Way:
    """How many processes, of how many threads, and whether they average their gradients."""

    processes: int
    threads: int
    averaged: bool = True


def ways(count: int) -> list[Way]:
    """To use ``count`` cores, or GPUs. Without averaging, processes do all but communicate."""
    return [Way(1, 1), Way(1, count), Way(count, 1), Way(count, 1, averaged=False)]


def measure_processes(count: int, repeats: int, device: str) -> None:
    """All ways of a fit in turn, so that whatever else the machine does hits them alike."""
    for again in range(repeats):
        for name in FITS:
            for batch in BATCHES:
                for way in ways(count):
                    key = {"fit": name, "batch": batch, **vars(way), "device": device}
                    if done("processes", key) > again:
                        continue
                    load = os.getloadavg()[0]
                    run = launch(way, {"name": name, "batch": batch, "averaged": way.averaged, "device": device})
                    add("processes", key, {**run, **stamp(load)})
                    print(f"{key}: {run['rows_per_second']:,.0f} rows/s, {run['memory'] / 1e6:.0f} MB", flush=True)


def launch(way: Way, given: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 of such a fit tells."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(way.processes)]
    ended = subprocess.run(
        [sys.executable, *(start if way.processes > 1 else []), str(WORKER), "fit", json.dumps(given)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(way.threads)},
    )
    if ended.returncode:
        raise SystemExit(ended.stderr[-3000:])
    return json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("{")))
