"""Many fits: one after the other, in processes of this machine, in the workers of a Dask cluster on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bnn_pyro as bp
from bnn_pyro.executors import executor
from bnn_pyro.side_by_side import each
from scale.memory import tree
from scale.sizes import Sizes
from scale.store import add, done, stamp

__all__ = ["JOBS", "WAYS", "measure_many", "run_job"]

WORKER = Path(__file__).parents[1] / "scaling_worker.py"
#: How the table names it -> the executor; a plain loop has all threads.
WAYS = {"here, one thread": "here", "a plain loop": "", "processes": "processes:{cores}", "Dask": "dask:{cores}"}
#: Seconds between two looks at the memory of all processes.
INTERVAL = 0.1


def svi(seed: int, steps: int = 500) -> float:
    """A mean-field fit of 784-400-400-10, of some seconds; its last ELBO."""
    data = Sizes(rows=512).data()
    how = bp.SVI(epochs=steps // 4, batch_size=128, lr=1e-4)
    return bp.fit(bp.MeanField(hidden=(400, 400)), data, how, seed=seed, progress=False).trace["elbo"][-1]


def chees(seed: int, chains: int = 512) -> float:
    """Logistic regression by many chains; the mean acceptance rate."""
    data = Sizes(rows=284, inputs=30, width=0, classes=2).data()
    how = bp.ChEES(chains=chains, warmup=100, draws=50)
    found = bp.fit(bp.MeanField(hidden=()), data, how, seed=seed, progress=False)
    return found.stats["acceptance_rate"].mean().item()


def nothing(seed: int) -> int:
    """A task that takes no time: what is left is what tasks cost."""
    return seed


#: Job -> (what a task does, tasks, ways).
JOBS: dict[str, tuple[Callable[[int], float], int, tuple[str, ...]]] = {
    "fits": (svi, 8, tuple(WAYS)),
    "overhead": (nothing, 64, ("processes", "Dask")),
    "chains": (chees, 20, ("processes",)),
    "ensemble": (svi, 4, ("here, one thread", "processes")),
}


def run_job(job: str, way: str, cores: int, tasks: int = 0) -> dict[str, Any]:
    """Seconds of a job, start and end of the workers included; of the overhead also those of a second round."""
    function, number, _ = JOBS[job]
    seeds, place = list(range(tasks or number)), WAYS[way].format(cores=cores)
    start = time.perf_counter()
    if job == "ensemble":
        data = Sizes(rows=512).data()
        how = bp.Ensemble(
            members=len(seeds), cores=1 if place == "here" else cores, epochs=125, batch_size=128, lr=1e-4
        )
        bp.fit(bp.MLP(hidden=(400, 400)), data, how, progress=False)
        return {"seconds": time.perf_counter() - start}
    if not place:
        results = [function(seed) for seed in seeds]
        return {"seconds": time.perf_counter() - start, "results": results}
    with executor(place):
        results = each(function, seeds)
        first = time.perf_counter() - start
        again = {}
        if job == "overhead":
            each(function, seeds)
            again = {"again": time.perf_counter() - start - first}
    return {"seconds": time.perf_counter() - start, "first": first, **again, "results": results}


def measure_many(cores: int, repeats: int) -> None:
    """All ways of a job in turn, each in processes of its own."""
    for again in range(repeats):
        for job, (_, tasks, names) in JOBS.items():
            for way in names:
                key = {"job": job, "way": way, "tasks": tasks, "cores": cores}
                if done("many", key) > again:
                    continue
                load = os.getloadavg()[0]
                run = watched(job, way, cores)
                add("many", key, {**run, **stamp(load)})
                print(f"{key}: {run['seconds']:.1f} s, {run['memory'] / 1e6:,.0f} MB", flush=True)


def watched(job: str, way: str, cores: int) -> dict[str, Any]:
    """What a process of its own tells, and the most memory that it and its children had at once."""
    threads = cores if way == "a plain loop" else 1
    process = subprocess.Popen(
        [sys.executable, str(WORKER), "many", json.dumps({"job": job, "way": way, "cores": cores})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    highest, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(INTERVAL):
            highest[0] = max(highest[0], tree(process.pid))

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    out, trouble = process.communicate()
    over.set()
    if process.returncode:
        raise SystemExit(trouble[-3000:])
    return {**json.loads(next(line for line in out.splitlines() if line.startswith("{"))), "memory": highest[0]}
