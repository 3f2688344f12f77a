"""How the program takes what may happen to it: 10,000 strange inputs, SIGKILL at any moment, Ctrl-C, two runs at once.

    pip install -e ".[test]"
    python benchmarks/reliability.py fuzz --cases 10000    # about ten minutes on a quiet core
    python benchmarks/reliability.py kills --number 25     # of svi, nuts and sghmc each: about five
    python benchmarks/reliability.py races --number 5      # two runs, begun at once in one folder
    python benchmarks/reliability.py threads               # the same seed on one thread and on two, larger networks

``fuzz`` runs the properties in ``tests/test_properties_*.py`` on so many cases in all, drawn by ``--seed``. ``kills``
trains on toy-curve without figures, with a checkpoint every 10 ms, kills the process at a moment drawn uniformly from
the time that the run takes, resumes, and compares every tensor of the posterior and metrics.json with those of the run
that was left alone; every fifth is interrupted (SIGINT) instead. Each writes its part of
``benchmarks/results/reliability.json``, with what was found and mended, which is told in ``MENDED``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
from forked import OFTEN, Forks  # noqa: E402

import bnn_pyro as bp  # noqa: E402
from bnn_pyro.posterior import read_archive  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "reliability.json"
#: What these runs, their tests, and reading the code for them have found, and what became of it.
MENDED = [
    "a checkpoint with a changed bit in a tensor was resumed, silently, to another result: it now ends with a checksum",
    "NPZ files with damaged deflate streams: a traceback of zlib",
    "column names and categories with line breaks made error lines of several lines: cells are of one line now",
    "configs with values of another kind (a list as variant, a number as data name, inf epochs): tracebacks",
    "config.json, environment.json, pruning.json, diagnosis.json that are JSON but not what they should be: tracebacks",
    "a failing evaluate left metrics.json rewritten beside an old report: all files are checked before one is written",
    "an archive that was altered and resealed: KeyError, AttributeError; now told in one line",
    "two runs begun at once in one folder mixed their files: the second is refused while the first is at it",
    "half-written files of a killed process stayed, and two processes shared their name",
    "a full disk was told without the file or a way out",
    "a prediction took up to 40 times max_memory: small kept pieces lay between the activations (fragmentation)",
    "too little memory for a prediction: a traceback of torch",
    "--data ~nobody/x.csv: a traceback of pathlib",
]
#: In probabilities, between one thread and two: a hundred roundings of 32 bits.
TOLERANCE = 1e-5
METHODS = {
    "svi": ["mean-field", "--epochs", "150", "--hidden", "8"],
    "nuts": ["mean-field", "--inference", "nuts", "--hidden", "3", "--set", "draws=15", "--set", "warmup=15",
             "--set", "chains=2", "--set", "compiled=no", "--set", "cores=1", "--set", "max_tree_depth=4",
             "--no-baseline"],
    "sghmc": ["mean-field", "--inference", "sghmc", "--hidden", "8", "--epochs", "600", "--set", "chains=2",
              "--no-baseline"],
}  # fmt: skip
COMMON = ["--data", "toy-curve", "--num-draws", "5", "--device", "cpu", "--quiet"]


# -- strange inputs --------------------------------------------------------------------------------------------------
def fuzz(args: argparse.Namespace) -> dict[str, Any]:
    """Run the properties; how many cases of each, and which failed."""
    with tempfile.TemporaryDirectory() as folder:
        tally = Path(folder) / "tally"
        environment = os.environ | {
            "BNN_PYRO_CASES": str(args.cases),
            "BNN_PYRO_TALLY": str(tally),
            "OMP_NUM_THREADS": "1",
        }
        tests = args.only or [str(path) for path in sorted((ROOT / "tests").glob("test_properties_*.py"))]
        pytest = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--hypothesis-seed={args.seed}", *tests]
        done = subprocess.run(pytest, env=environment, cwd=ROOT, capture_output=True, text=True)
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
        cases = dict(collections.Counter(tally.read_text().splitlines()))
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"cases": sum(cases.values()), "cases_by_property": cases, "failed": failed, "seed": args.seed}


# -- SIGKILL and Ctrl-C ----------------------------------------------------------------------------------------------
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of a guide, or of chains."""
    guide, chains = (read_archive(folder)[0][key] for key in ("guide", "chains"))
    return guide if guide is not None else chains


def same(one: Path, other: Path) -> bool:
    """Whether two runs, and their baselines, are equal to the last bit."""
    pairs = [(one, other)] + [(one / "baseline", other / "baseline")] * (other / "baseline").is_dir()
    for a, b in pairs:
        if (a / "metrics.json").read_bytes() != (b / "metrics.json").read_bytes():
            return False
        first, second = tensors(a), tensors(b)
        if first.keys() != second.keys() or not all(torch.equal(first[k], second[k]) for k in first):
            return False
    return True


def kills(args: argparse.Namespace) -> dict[str, Any]:
    """Stop each method's run at so many moments; how many went on to the same result, and when they were stopped."""
    found, draw = {"seed": args.seed, "checkpoint_every_seconds": OFTEN}, random.Random(args.seed)
    with tempfile.TemporaryDirectory(dir=args.disk) as folder, Forks() as forks:
        for name, options in METHODS.items():
            if args.only and name not in args.only:
                continue
            whole, log = Path(folder, name), str(Path(folder, "log"))
            forks.start("command", argv=["train", *options, *COMMON, "--out", str(whole)], log=log)
            start = time.monotonic()
            if forks.result() != 0:
                raise SystemExit(Path(log).read_text())
            seconds, stages, bad = time.monotonic() - start, collections.Counter(), []
            k = tries = 0
            while k < args.number:
                out, moment, tries = Path(folder, f"{name}-{tries}"), draw.random() * seconds, tries + 1
                argv = ["train", *options, *COMMON, "--out", str(out)]
                pid = forks.start("command", argv=argv, log=log)
                time.sleep(moment)
                number = signal.SIGINT if k % 5 == 4 else signal.SIGKILL
                ended = forks.kill(pid, number)
                if ended == 0:  # it was quicker than the first
                    continue
                k += 1
                stages[stage(out, number)] += 1
                again = ["train", "--resume", "--out", str(out), "--quiet"] if (out / "config.json").is_file() else argv
                code = forks.run("command", argv=again, log=log)
                if code != 0 or not same(out, whole) or list(out.rglob("*.part")):
                    bad.append(
                        {"moment": round(moment, 3), "signal": number.name, "said": Path(log).read_text()[-300:]}
                    )
                print(f"{name} {k}/{args.number}: {len(bad)} bad", file=sys.stderr)
            found[name] = {
                "stopped": args.number,
                "same_result": args.number - len(bad),
                "bad": bad,
                "stopped_while": dict(stages),
                "seconds_of_the_whole_run": round(seconds, 2),
            }
    return found


def stage(out: Path, number: signal.Signals) -> str:
    """What the run was at when it was stopped."""
    what = f"{number.name}: "
    if not (out / "config.json").is_file():
        return what + "before it was begun"
    if (out / "checkpoint").is_dir():
        return what + "training, with a checkpoint"
    if not (out / "posterior.json").is_file():
        return what + "training, before the first checkpoint"
    baseline = out / "baseline"
    return what + ("evaluation" if not baseline.is_dir() or (baseline / "posterior.json").is_file() else "the baseline")


# -- two at once -----------------------------------------------------------------------------------------------------
def races(args: argparse.Namespace) -> dict[str, Any]:
    """Two runs of different seeds begun at once in one folder: one is refused, and the other whole."""
    outcomes, bad = collections.Counter(), 0
    with tempfile.TemporaryDirectory(dir=args.disk) as folder, Forks() as one, Forks() as other:
        for seed in (1, 2):
            argv = ["train", *METHODS["svi"], *COMMON, "--seed", str(seed), "--out", str(Path(folder, f"whole-{seed}"))]
            one.run("command", argv=argv, log=str(Path(folder, "log")))
        for k in range(args.number):
            out = Path(folder, f"run-{k}")
            for seed, forks in ((1, one), (2, other)):
                argv = ["train", *METHODS["svi"], *COMMON, "--seed", str(seed), "--out", str(out)]
                forks.start("command", argv=argv, log=str(Path(folder, f"log-{seed}")))
            codes = one.result(), other.result()
            outcomes[str(sorted(codes))] += 1
            whole = [seed for seed in (1, 2) if codes[seed - 1] == 0]
            bad += sorted(codes) != [0, 2] or not same(out, Path(folder, f"whole-{whole[0]}"))
    return {"pairs": args.number, "exit_codes": dict(outcomes), "bad": bad}


# -- threads ---------------------------------------------------------------------------------------------------------
def threads(args: argparse.Namespace) -> dict[str, Any]:
    """Predictions after training on one thread and on two: how far apart, and whether within ``TOLERANCE``.

    Where a sum is split between threads it is rounded otherwise (2⁻²⁴ relative), and training carries that on.
    """
    found, former = {}, torch.get_num_threads()
    data = bp.load_data("breast-cancer")
    wide = bp.MeanField(hidden=(1024, 1024))
    for name, entry, method in (
        ("svi, 5-5", bp.MeanField(hidden=(5, 5)), bp.SVI(epochs=200)),
        ("svi, 1024-1024", wide, bp.SVI(epochs=20)),
        ("sghmc, 50", bp.MeanField(hidden=(50,)), bp.SGHMC(epochs=200, chains=2)),
    ):
        probs = []
        for number in (1, 2):
            torch.set_num_threads(number)
            posterior = bp.fit(entry, data, method, seed=0, progress=False, device="cpu")
            torch.set_num_threads(1)
            probs.append(bp.predict(posterior, data.x_test, num_draws=50).mean)
        difference = float((probs[0] - probs[1]).abs().max())
        found[name] = {
            "equal": torch.equal(*probs),
            "largest_difference_of_probabilities": difference,
            "within": difference <= TOLERANCE,
        }
    torch.set_num_threads(former)
    return {"tolerance": TOLERANCE, **found}


PARTS = {"fuzz": fuzz, "kills": kills, "races": races, "threads": threads}


def main() -> None:
    """Run one part and write it beside the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--cases", type=int, default=10_000, help="of fuzz, in all")
    parser.add_argument("--number", type=int, default=50, help="of kills (each method) or races")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="test files or test names of fuzz, methods of kills")
    parser.add_argument("--disk", help="a folder for the runs, such as /dev/shm (the default for temporary files)")
    parser.add_argument("--add", action="store_true", help="of fuzz: add the cases to those in the results")
    args = parser.parse_args()
    start, tree = time.perf_counter(), commit()
    found = PARTS[args.part](args)
    held = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if args.add and args.part == "fuzz" and "fuzz" in held:
        before = held["fuzz"]
        counts = collections.Counter(before["cases_by_property"]) + collections.Counter(found["cases_by_property"])
        found |= {"cases": sum(counts.values()), "cases_by_property": dict(counts)}
        found["added"] = [*before.get("added", []), {k: before[k] for k in ("seed", "failed", "commit", "command")}]
    held[args.part] = found | {
        "command": " ".join(["python", "benchmarks/reliability.py", *sys.argv[1:]]),
        "seconds": round(time.perf_counter() - start, 1),
        "date": datetime.date.today().isoformat(),
        "commit": tree,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    RESULTS.write_text(json.dumps(held | {"found_and_mended": MENDED}, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(held[args.part], indent=1))


def commit() -> str:
    """Of this checkout."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    return ""


if __name__ == "__main__":
    main()
