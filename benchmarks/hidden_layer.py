"""Speed and memory: a training step and a prediction of the hidden-layer variant, against everybody else, in one run.

    pip install -e ".[peers]"                               # other packages' layers; may be left out
    python benchmarks/hidden_layer.py                       # about 25 minutes on two cores
    python benchmarks/hidden_layer.py --device cuda
    python benchmarks/hidden_layer.py --quick               # three minutes; writes nothing
    python benchmarks/hidden_layer.py --only deterministic plain --sizes 784-400-400-10 --parts steps

Steps are taken in turn, a block of each contestant a round, in a new order every round. A block's number is its median
step (on a GPU, where steps overlap, the mean); a ratio is that of two blocks of one round, and the table has its
median and quartiles over the rounds. Everybody has the same synthetic inputs and batches (128 of 60,000 rows, or all
of 100 in regression), leaky ReLU and fused Adam, and pays for one forward and backward pass, one update and its own
bookkeeping. Who the contestants are is in ``benchmarks/speed``, and with each result. Packages that cannot be imported
are listed as absent. Ctrl-C keeps what has been measured.

Memory is what the allocator was asked for: "held" between steps (parameters, gradients, optimiser state), and the
highest point of a step; in multiples of the deterministic network's weights, and, what comes on top during a step, of
one activation of every layer.

Tried for a faster step, and not kept:

* Means and log-variances of all layers as two flat vectors: within the noise at 2×400 and 3×1024, a tenth at 1-32-1.

And kept for its memory, not for its time: a layer's output and KL in one autograd function, with variances made again
for the gradients; the step is the same within the noise.

On a machine that others use too, take ``--threads 1``: threads that wait for each other's turns cost small steps more
than everything else here.

Writes ``benchmarks/results/hidden_layer.json``, one entry for each kind of device.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler complains about a GPU that is not there

import torch
from speed import CONTESTANTS, OURS, Problem
from speed.memory import step_memory
from speed.peers import PEERS
from speed.prediction import measure
from speed.problem import Runner
from speed.table import comparisons, over_deterministic, print_memory, print_prediction, print_steps
from speed.timing import spread, take_turns

from bnn_pyro import isolated

RESULTS = Path(__file__).parent / "results" / "hidden_layer.json"
SIZES = ("784-1024-1024-1024-10", "784-400-400-10", "1-32-1")
PREDICTION = "784-400-400-10"
PARTS = ("steps", "memory", "prediction")
#: Weights of the smallest network that is weighed.
LARGE = 10_000
#: Who is weighed as well as timed.
WEIGHED = (
    "deterministic",
    "plain torch",
    OURS,
    "variational-dropout",
    "mean-field",
    "naive HiddenLayer",
    "stock HiddenLayer",
)
PACKAGES = ("bnn-pyro", "torch", "pyro-ppl", "numpy", "torchbnn", "bayesian-torch", "blitz-bayesian-pytorch", "tyxe")


def problem(sizes: str, device: torch.device) -> Problem:
    """Batches of 128 of 60,000 rows, or 100 rows at once where the network is a regression."""
    widths = tuple(map(int, sizes.split("-")))
    rows, batch = (100, 100) if widths[-1] == 1 else (60_000, 128)
    return Problem(widths, rows, batch, device)


def chosen(only: list[str]) -> list[str]:
    """Contestants that are here and were asked for, by any part of their names."""
    return [
        name for name, who in CONTESTANTS.items() if not who.absent and (not only or any(text in name for text in only))
    ]


def time_steps(task: Problem, names: list[str], args: argparse.Namespace, found: dict) -> None:
    """Fill ``found``, for one network, with {"ms": {contestant: spread}, "ratios": …, "failed": …}."""
    runners, failures, times = {}, {}, {}
    for name in names:
        try:
            runners[name] = Runner(CONTESTANTS[name], task)
            with runners[name].at_work():
                runners[name].run(1)
        except Exception as error:  # other people's code: one that fails must not end the run
            runners.pop(name, None)
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    gc.collect()
    gc.freeze()  # many contestants' modules would make every collection dearer than it is for one alone
    start = time.perf_counter()

    def report(done: int) -> None:
        clock = f"{time.perf_counter() - start:.0f} s"
        print(f"\r  {task.name}: round {done} of {args.rounds}, {clock}", end="", flush=True)

    try:
        take_turns(runners, times, rounds=args.rounds, steps=args.steps, block=args.block, report=report)
    finally:
        gc.unfreeze()
        found |= {
            "rounds": len(next(iter(times.values()), [])),
            "ms": {name: spread([1000 * v for v in times[name]]) for name in names if name in times},
            "ratios": comparisons(times, OURS, PEERS),
            "failed": failures,
        }
        print_steps(task.name, found, OURS)


def provenance(device: torch.device) -> dict:
    """How to make these numbers again, and on what."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, text=True, capture_output=True, check=False).stdout.strip()
    return {
        "command": "python " + " ".join(sys.argv),
        "commit": commit or "unknown",
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **versions},
        "date": datetime.date.today().isoformat(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def failed(result: dict, sizes: str) -> dict[str, str]:
    """{contestant: error} of those that could not take a step on this network."""
    return result.get("steps", {}).get(sizes, {}).get("failed", {})


def run(args: argparse.Namespace, result: dict) -> None:
    """Fill ``result`` part by part, printing a table after each."""
    device, names = torch.device(args.device), chosen(args.only)
    if "steps" in args.parts:
        result["steps"] = {}
        for sizes in args.sizes:
            time_steps(problem(sizes, device), names, args, result["steps"].setdefault(sizes, {}))
    if "memory" in args.parts:
        result["memory"] = {}
        for sizes in args.sizes:
            task = problem(sizes, device)
            if task.weights < LARGE:
                continue
            found = result["memory"][sizes] = {}
            for name in (n for n in WEIGHED if n in names and n not in failed(result, sizes)):
                found[name] = step_memory(CONTESTANTS[name], task)
            print_memory(sizes, found, OURS)
            found["ours over deterministic"] = over_deterministic(found, OURS)
    if "prediction" in args.parts:
        time_prediction(problem(PREDICTION, device), args, result.setdefault("prediction", {}))


def time_prediction(task: Problem, args: argparse.Namespace, found: dict) -> None:
    """Fill ``found`` with {"seconds": {who: spread}, "peak_bytes": …, "ratios": …}."""
    settings = {"images": args.images, "draws": args.draws, "rounds": args.prediction_rounds}
    times, memory = {}, {}
    try:
        measure(task, times, memory, **settings, report=lambda line: print(f"\r  {line:60}", end="", flush=True))
    finally:
        found |= {
            "network": task.name,
            **settings,
            "seconds": {name: spread(values) for name, values in times.items()},
            "peak_bytes": memory,
            "ratios": comparisons(times, OURS, {}),
        }
        print_prediction(found)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="IN-…-OUT", help="networks")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="contestants with this in their name")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100, help="steps of a block, at most")
    parser.add_argument("--block", type=float, default=0.25, help="seconds of a block, at most, but for one step")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--prediction-rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=None, help="torch's; by default as many as it takes")
    parser.add_argument("--quick", action="store_true", help="few rounds, images and draws; writes nothing")
    parser.add_argument("--out", type=Path, default=None, help=f"default: {RESULTS.name} for a whole run, else none")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.steps, args.block = min(args.rounds, 3), min(args.steps, 10), min(args.block, 0.1)
        args.images, args.draws, args.prediction_rounds = min(args.images, 1000), min(args.draws, 10), 1
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    absent = [name for name, who in CONTESTANTS.items() if who.absent]
    if absent:
        print("absent, not installed:", ", ".join(absent))
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # the peers', and Pyro's of torch.jit
    result: dict = {**provenance(torch.device(args.device)), "ours": OURS, "absent": absent, "interrupted": False}
    result["contestants"] = {name: CONTESTANTS[name].note for name in chosen(args.only)}
    try:
        with isolated(0):
            run(args, result)
    except KeyboardInterrupt:
        result["interrupted"] = True
        print("\ninterrupted; what was measured is kept")
    whole = not (args.quick or args.only) and set(args.parts) == set(PARTS) and set(args.sizes) == set(SIZES)
    out = args.out or (RESULTS if whole else None)
    if out is not None:
        kept = json.loads(out.read_text()) if out.exists() else {}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**kept, args.device: result}, indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
