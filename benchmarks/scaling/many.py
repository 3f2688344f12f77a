"""Many fits: one after the other, in processes of this machine, in the workers of a Dask cluster on it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import bnn_pyro as bp
from benchmarks.memory import run_apart
from benchmarks.provenance import Measurements
from benchmarks.scaling.sizes import Sizes
from bnn_pyro.parallel.map import map_tasks

__all__ = ["JOBS", "WAYS", "measure_many", "run_job"]

#: How the table names it -> the executor; a plain loop has all threads.
WAYS = {"here, one thread": "here", "a plain loop": "", "processes": "processes:{cores}", "Dask": "dask"}


def svi(seed: int, steps: int = 500) -> float:
    """A mean-field fit of 784-400-400-10, of some seconds; its last ELBO."""
    data = Sizes(rows=512).data()
    how = bp.SVI(epochs=steps // 4, batch_size=128, lr=1e-4)
    return bp.fit(bp.MeanField(hidden=(400, 400)), data, how, seed=seed, progress=False).trace["elbo"][-1]


def nothing(seed: int) -> int:
    """A task that takes no time: what is left is what tasks cost."""
    return seed


#: Job -> (title, what a task does, tasks, ways).
JOBS: dict[str, tuple[str, Callable[[int], float], int, tuple[str, ...]]] = {
    "fits": ("8 mean-field fits of 500 steps", svi, 8, tuple(WAYS)),
    "overhead": ("64 tasks of nothing", nothing, 64, ("processes", "Dask")),
}


def run_job(job: str, way: str, cores: int) -> dict[str, Any]:
    """Seconds of a job, start and end of the workers included; of the overhead also those of a second round."""
    _, function, tasks, _ = JOBS[job]
    seeds, place = list(range(tasks)), WAYS[way].format(cores=cores)
    start = time.perf_counter()
    if not place:
        results = [function(seed) for seed in seeds]
        return {"seconds": time.perf_counter() - start, "results": results}
    with nullcontext(place) if place != "dask" else _cluster(cores) as place, bp.executor(place):
        results = map_tasks(function, seeds)
        first = time.perf_counter() - start
        again = {}
        if job == "overhead":
            map_tasks(function, seeds)
            again = {"again": time.perf_counter() - start - first}
    return {"seconds": time.perf_counter() - start, "first": first, **again, "results": results}


def _cluster(cores: int) -> Any:
    from distributed import LocalCluster

    return LocalCluster(n_workers=cores, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0")


def measure_many(results: Measurements, cores: int, repeats: int) -> None:
    """All ways of a job in turn, each in processes of its own; "memory" is that of all of them together."""
    for again in range(repeats):
        for job, (_, _, tasks, names) in JOBS.items():
            for way in names:
                key = {"job": job, "way": way, "tasks": tasks, "cores": cores}
                if len(results.runs(key)) > again:
                    continue
                load, threads = os.getloadavg()[0], cores if way == "a plain loop" else 1
                settings = json.dumps({"job": job, "way": way, "cores": cores})
                run = run_apart("benchmarks.scaling.worker", "many", settings, OMP_NUM_THREADS=str(threads))
                results.add(key, run, load)
                print(f"{key}: {run['seconds']:.1f} s, {run['memory'] / 1e6:,.0f} MB", flush=True)
