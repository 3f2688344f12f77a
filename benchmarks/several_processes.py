"""One fit, in one process and divided among several by torchrun: are the test metrics the same?

    python benchmarks/several_processes.py                      # 1 and 2 processes, 3 seeds: about 4 minutes
    python benchmarks/several_processes.py --processes 4 --seeds 0

MNIST (20,000 training images, the official test set), 784-200-200-10, mean-field, 8 epochs, temperature 1, 50 draws;
every process computes on one thread. The divided fit has the same initial weights and rows in every step, and noise of
its own in every process. A run that the results file has already is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "several_processes.json"
RECIPE = ["mean-field", "--data", "mnist", "--limit", "20000", "--hidden", "200,200", "--epochs", "8",
          "--num-draws", "50", "--no-baseline", "--device", "cpu"]  # fmt: skip
METRICS = {"error": ("error, %", 100, "%.2f"), "nll": ("NLL, nats", 1, "%.4f"), "ece": ("ECE", 1, "%.4f")}


def run(processes: int, seed: int) -> dict:
    """Metrics of one fit, with what it was made by."""
    launch = (
        [] if processes == 1 else ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        train = ["bnn_pyro.run", "train", *RECIPE, "--seed", str(seed), "--out", str(out), "--quiet"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", *launch, *train], env=environment, stdout=subprocess.DEVNULL, check=True)
        metrics, made = (json.loads((out / f"{name}.json").read_text()) for name in ("metrics", "environment"))
        provenance = json.loads((out / "posterior.json").read_text())["provenance"]
    assert provenance.get("processes", 1) == processes
    return {
        "processes": processes,
        "seed": seed,
        "metrics": {name: metrics[name] for name in METRICS},
        "command": " ".join(["python -m", *launch, *train[:-3], "--out …"]),
        **{key: made[key] for key in ("commit", "machine", "finished", "versions")},
    }


def table() -> str:
    """Means with standard errors over the seeds, and the paired difference to one process, as Markdown."""
    held = json.loads(RESULTS.read_text())
    by = {(one["processes"], one["seed"]): one["metrics"] for one in held}
    counts, seeds = sorted({p for p, _ in by}), sorted({s for _, s in by})
    heads = [head for head, _, _ in METRICS.values()]
    lines = [f"| processes | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for count in counts:
        cells = []
        for name, (_, factor, form) in METRICS.items():
            values = [factor * by[count, seed][name] for seed in seeds]
            cell = _mean(values, form)
            if count != 1:
                apart = [value - factor * by[1, seed][name] for value, seed in zip(values, seeds, strict=True)]
                cell += f" (difference {_mean(apart, form)})"
            cells.append(cell)
        lines.append(f"| {count} | {' | '.join(cells)} |")
    first = held[0]
    told = (
        f"{len(seeds)} seeds, ± standard error; {first['machine']}, {first['finished'][:10]}, commit {first['commit']}"
    )
    return "\n".join([*lines, "", f"{told}: `{held[-1]['command']}`"])


def _mean(values: list[float], form: str) -> str:
    if len(values) == 1:
        return form % values[0]
    return f"{form % statistics.mean(values)} ± {form % (statistics.stdev(values) / len(values) ** 0.5)}"


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    held = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    for seed in args.seeds:
        for processes in args.processes:
            if not any((one["processes"], one["seed"]) == (processes, seed) for one in held):
                held.append(run(processes, seed))
                RESULTS.write_text(json.dumps(held, indent=1) + "\n")
                print(held[-1]["processes"], seed, held[-1]["metrics"], flush=True)
    print(table())


if __name__ == "__main__":
    main()
