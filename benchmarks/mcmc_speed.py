"""Runs of ``benchmarks/mcmc.py speed``: every one in a fresh process, watched from outside, a line of JSON each."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from mcmc_problems import PROBLEMS
from mcmc_samplers import SAMPLERS, Sampler, in_full
from mcmc_worker import anonymous

__all__ = ["RESULTS", "append", "measure", "read", "stamp"]

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "mcmc_speed.json"
#: Seconds after which a run is given up.
LIMIT = 1800


class Failed(Exception):
    """A run that ended with an error, and the last lines of what it said."""


def measure(problems: list[str], samplers: list[str], seeds: list[int] | None, again: bool) -> None:
    """Run what is not yet in the results with these settings; everything, if ``again``."""
    checked: dict[str, float] = {}
    for problem in problems:
        for name in samplers:
            sampler = SAMPLERS[name]
            for seed in sampler.seeds if seeds is None else seeds:
                key = {"problem": problem, "sampler": name, "seed": seed, "settings": in_full(sampler, problem)}
                if not again and any(key.items() <= line.items() for line in read(RESULTS)):
                    print(f"{problem} {name} seed {seed}: known", flush=True)
                    continue
                if problem not in checked:  # nothing is timed before the models are known to be the same
                    checked[problem] = worker(problem, "numpyro", "--check")["log_joint_difference"]
                load = os.getloadavg()[0]
                try:
                    found = run(problem, name, sampler, seed)
                except Failed as reason:
                    print(reason, flush=True)
                    break
                if "absent" in found:
                    print(f"{problem} {name}: skipped; {found['absent']}", flush=True)
                    break
                line = {**key, **found, "log_joint_difference": checked[problem], "load_before": round(load, 2)}
                append(RESULTS, {**line, **stamp()}, ("problem", "sampler", "seed"))
                print(
                    f"{problem} {name} seed {seed}: {found['seconds']:.1f} s, effective draws {found['ess_min']:.0f} "
                    f"(median {found['ess_median']:.0f}), {found['ess_min_per_second']:.2f} "
                    f"({found['ess_median_per_second']:.2f}) a second, R-hat {found['rhat_max']}",
                    flush=True,
                )


def run(problem: str, name: str, sampler: Sampler, seed: int) -> dict:
    """One run, with caches of its own: empty ones, or as a run before has left them."""
    with tempfile.TemporaryDirectory(prefix="mcmc-") as cache:
        flags = f"--xla_force_host_platform_device_count={sampler.devices}" if sampler.devices > 1 else ""
        given = {
            "OMP_NUM_THREADS": str(sampler.threads),
            "XLA_FLAGS": flags,
            "TORCHINDUCTOR_CACHE_DIR": cache + "/torch",
            "XDG_CACHE_HOME": cache + "/user",
        }
        if sampler.cached:
            given |= {
                "JAX_COMPILATION_CACHE_DIR": cache + "/jax",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
            worker(problem, name, "--seed", str(seed), **given)
        return worker(problem, name, "--seed", str(seed), **given)


def worker(problem: str, name: str, *options: str, **environment: str) -> dict:
    """What ``mcmc_worker.py`` prints, and the peak of the memory of all its processes together."""
    command = [sys.executable, str(HERE / "mcmc_worker.py"), problem, name, *options]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=inherited | environment
    )
    peak = [0.0]
    watch = threading.Thread(target=watched, args=(process, peak), daemon=True)
    watch.start()
    try:
        out, trouble = process.communicate(timeout=LIMIT)
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        raise Failed(f"{' '.join(command[1:])} failed:\n{trouble[-3000:]}")
    found = json.loads(out.splitlines()[-1])
    return found | ({"peak_mb": round(peak[0], 1)} if "seconds" in found else {})


def watched(process: subprocess.Popen, peak: list[float]) -> None:
    """Look at the process tree five times a second."""
    while process.poll() is None:
        peak[0] = max(peak[0], tree(process.pid))
        time.sleep(0.2)


def tree(pid: int) -> float:
    """Memory that a process and its children have asked for (no files, no shared libraries), MB."""
    total = 0.0
    try:
        total = anonymous(pid)
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as children:
                total += sum(tree(int(child)) for child in children.read().split())
    except (OSError, StopIteration):
        pass  # it ended while it was looked at
    return total


def read(path: Path) -> list[dict]:
    """The lines of a results file; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def append(path: Path, line: dict, key: tuple[str, ...]) -> None:
    """Put a line into the results, in place of an earlier one with the same key."""
    others = [old for old in read(path) if any(old[k] != line[k] for k in key)]
    path.write_text("[\n" + ",\n".join(json.dumps(one) for one in [*others, line]) + "\n]\n")


def stamp() -> dict:
    """Where a figure comes from."""
    import torch

    with open("/proc/cpuinfo") as info:
        cpu = next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    return {
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "commit": subprocess.check_output(["git", "describe", "--always", "--dirty"], text=True, cwd=HERE).strip(),
        "machine": f"{platform.machine()}, {cpu}, {os.cpu_count()} cores, torch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
    }


def choices() -> tuple[list[str], list[str]]:
    """The names of the problems and of the samplers."""
    return list(PROBLEMS), list(SAMPLERS)
