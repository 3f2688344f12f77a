"""Odd inputs by the thousand, SIGKILL at any moment, Ctrl-C, two runs at once.

    pip install -e ".[test]"
    python -m benchmarks.reliability fuzz --cases 10000    # about ten minutes on a quiet core
    python -m benchmarks.reliability kills --number 25     # of svi, nuts and sghmc each: about five
    python -m benchmarks.reliability races --number 5      # two runs, begun at once in one folder

``fuzz`` runs the properties in ``tests/test_properties_*.py`` on so many cases in all, drawn by ``--seed``. ``kills``
trains on toy-curve without figures, with a checkpoint every 10 ms, kills the process at a moment drawn uniformly from
the time that the run takes, resumes, and compares every tensor of the posterior and metrics.json with those of the run
that was left alone; every fifth is interrupted (SIGINT) instead. Each writes its part of
``benchmarks/results/reliability.json``.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT, add_out, check_tree, provenance, write_json

sys.path.insert(0, str(ROOT / "tests"))

import run_folders
from forked import OFTEN, command, run, start

METHODS = {
    "svi": ["mean-field", "--epochs", "150", "--hidden", "8"],
    "nuts": ["mean-field", "--inference", "nuts", "--hidden", "3", "--set", "draws=15", "--set", "warmup=15",
             "--set", "chains=2", "--set", "compiled=no", "--set", "cores=1", "--set", "max_tree_depth=4",
             "--no-baseline"],
    "sghmc": ["mean-field", "--inference", "sghmc", "--hidden", "8", "--epochs", "600", "--set", "chains=2",
              "--no-baseline"],
}  # fmt: skip
COMMON = ["--data", "toy-curve", "--num-draws", "5", "--device", "cpu", "--quiet"]


# -- odd inputs ------------------------------------------------------------------------------------------------------
def fuzz(args: argparse.Namespace) -> dict[str, Any]:
    """Run the properties; how many cases of each, and which failed."""
    with tempfile.TemporaryDirectory() as folder:
        tally = Path(folder) / "tally"
        cases = {"BNN_PYRO_CASES": str(args.cases), "BNN_PYRO_TALLY": str(tally), "OMP_NUM_THREADS": "1"}
        tests = args.only or [str(path) for path in sorted((ROOT / "tests").glob("test_properties_*.py"))]
        pytest = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--hypothesis-seed={args.seed}", *tests]
        done = subprocess.run(pytest, env=os.environ | cases, cwd=ROOT, capture_output=True, text=True)
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
        counts = dict(collections.Counter(tally.read_text().splitlines()))
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"cases": sum(counts.values()), "cases_by_property": counts, "failed": failed, "seed": args.seed}


# -- SIGKILL and Ctrl-C ----------------------------------------------------------------------------------------------
def same(one: Path, other: Path) -> bool:
    """Whether two runs, and their baselines, are equal to the last bit."""
    pairs = [(one, other)] + [(one / "baseline", other / "baseline")] * (other / "baseline").is_dir()
    scores = (((folder / "metrics.json").read_bytes() for folder in pair) for pair in pairs)
    return all(a == b for a, b in scores) and all(run_folders.same(*pair) for pair in pairs)


def kills(args: argparse.Namespace) -> dict[str, Any]:
    """Stop each method's run at so many moments; how many went on to the same result."""
    found, draw = {"seed": args.seed, "checkpoint_every_seconds": OFTEN}, random.Random(args.seed)
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        log = str(Path(folder, "log"))
        for name in args.only or METHODS:
            whole, begun = Path(folder, name), time.monotonic()
            code = run(command, argv=training(name, whole), log=log)
            if code not in (0, 4):  # 4: few draws
                raise SystemExit(Path(log).read_text())
            seconds, bad, stopped = time.monotonic() - begun, [], 0
            for attempt in itertools.count():
                if stopped == args.number:
                    break
                out, moment = Path(folder, f"{name}-{attempt}"), draw.random() * seconds
                process = start(command, argv=training(name, out), log=log)
                time.sleep(moment)
                number = signal.SIGINT if stopped % 5 == 4 else signal.SIGKILL
                if process.is_alive():
                    os.kill(process.pid, number)
                process.join()
                if process.exitcode == code:  # it was quicker than the first
                    continue
                stopped += 1
                resumed = ["train", "--resume", "--out", str(out), "--quiet"]
                again = resumed if (out / "config.json").is_file() else training(name, out)
                if run(command, argv=again, log=log) != code or not same(out, whole) or list(out.rglob("*.part")):
                    output = Path(log).read_text()[-300:]
                    bad.append({"moment": round(moment, 3), "signal": number.name, "output": output})
                print(f"{name} {stopped}/{args.number}: {len(bad)} bad", file=sys.stderr)
            found[name] = {"stopped": stopped, "same_result": stopped - len(bad), "bad": bad, "seconds": seconds}
    return found


def training(name: str, out: Path, seed: int = 0) -> list[str]:
    """The command that trains."""
    return ["train", *METHODS[name], *COMMON, "--seed", str(seed), "--out", str(out)]


# -- two at once -----------------------------------------------------------------------------------------------------
def races(args: argparse.Namespace) -> dict[str, Any]:
    """Two runs of different seeds begun at once in one folder: one is refused, and the other whole."""
    outcomes, bad = collections.Counter(), 0
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        for seed in (1, 2):
            run(command, argv=training("svi", Path(folder, f"whole-{seed}"), seed), log=str(Path(folder, "log")))
        for k in range(args.number):
            out = Path(folder, f"run-{k}")
            logs = {seed: str(Path(folder, f"log-{seed}")) for seed in (1, 2)}
            both = {seed: start(command, argv=training("svi", out, seed), log=log) for seed, log in logs.items()}
            for process in both.values():
                process.join()
            codes = {seed: process.exitcode for seed, process in both.items()}
            outcomes[str(sorted(codes.values()))] += 1
            finished = [seed for seed, code in codes.items() if code == 0]
            refused = sorted(codes.values()) == [0, 2]
            bad += not refused or not same(out, Path(folder, f"whole-{finished[0]}"))
    return {"pairs": args.number, "exit_codes": dict(outcomes), "bad": bad}


PARTS = {"fuzz": fuzz, "kills": kills, "races": races}


def main() -> None:
    """Run one part and write it beside the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--cases", type=int, default=10_000, help="of fuzz, in all")
    parser.add_argument("--number", type=int, default=50, help="of kills (each method) or races")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="test files or test names of fuzz, methods of kills")
    parser.add_argument("--disk", help="a folder for the runs, such as /dev/shm (the default for temporary files)")
    add_out(parser, "reliability.json")
    args = parser.parse_args()
    check_tree(args.out)
    start = time.perf_counter()
    found = PARTS[args.part](args) | provenance()
    found["seconds"] = round(time.perf_counter() - start, 1)
    content = json.loads(args.out.read_text()) if args.out.is_file() else {}
    write_json(args.out, {**content, args.part: found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
