"""The main figures of this checkout, beside another one's: steps, prediction, samplers, start-up, in turn in one run.

A process of each checkout has its package loaded and measures what it is told; a figure is measured in turn by both, in
a new order every round, and a ratio is that of two times of one round. Beside the ratio it says whether both computed
the same number, bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT, commit
from benchmarks.speed.main_figures_worker import FIGURES
from benchmarks.timing import Times, ratio, spread, stopwatch, take_turns

__all__ = ["STARTS", "time_main_figures"]

WORKER = Path(__file__).with_name("main_figures_worker.py")
#: Commands whose whole time counts, imports included.
STARTS = {
    "start-up: list": ["list"],
    "start-up: train": ["train", "mean-field", "--data", "toy-curve", "--epochs", "5", "--num-draws", "5", "--device",
                        "cpu", "--no-baseline", "--quiet"],
}  # fmt: skip


class Checkout:
    """A checkout, and a process that has its package loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        if not (self.path / "bnn_pyro").is_dir():
            raise SystemExit(f"{path} is no checkout: it has no folder bnn_pyro")
        self.environment = {**os.environ, "PYTHONPATH": str(self.path)}
        self.answers: dict[str, float] = {}

    def __enter__(self) -> Checkout:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment, cwd=self.path,
        )  # fmt: skip
        package = Path(self._ask({"about": True})["package"])
        if not package.is_relative_to(self.path):
            raise SystemExit(f"{package} was imported in place of {self.path}/bnn_pyro")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def seconds(self, figure: str) -> float:
        """Of one measurement."""
        found = self._ask({"figure": figure})
        self.answers[figure] = found["answer"]
        return found["seconds"]

    def start(self, arguments: list[str]) -> None:
        """Run a command of this checkout from a fresh process."""
        with tempfile.TemporaryDirectory() as folder:
            out = ["--out", f"{folder}/run"] if arguments[0] == "train" else []
            command = [sys.executable, "-m", "bnn_pyro.run", *arguments, *out]
            done = subprocess.run(command, env=self.environment, cwd=self.path, stdout=subprocess.DEVNULL)
            if done.returncode not in (0, 4):  # 4: few draws
                raise subprocess.CalledProcessError(done.returncode, command)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.path} ended with code {self.process.wait()}")
        return json.loads(line)


def time_main_figures(other: Path | None, only: list[str], rounds: int, result: dict[str, Any]) -> None:
    """Fill ``result`` with {figure: {"new": spread, "old": spread, "ratio": new / old, "same": bool}}; print it."""
    names = [name for name in (*FIGURES, *STARTS) if not only or any(text in name for text in only)]
    with Checkout(ROOT) as new:
        if other is None:
            _measure({"new": new}, names, rounds, result)
        else:
            with Checkout(other) as old:
                result["against"] = commit(old.path)
                _measure({"new": new, "old": old}, names, rounds, result)


def _measure(checkouts: dict[str, Checkout], names: list[str], rounds: int, result: dict[str, Any]) -> None:
    print(f"  {'':28} {'new, s':>10} {'old, s':>10}   new / old")
    for name in names:
        if name in STARTS:
            contestants = {k: stopwatch(partial(c.start, STARTS[name])) for k, c in checkouts.items()}
        else:
            contestants = {k: partial(c.seconds, name) for k, c in checkouts.items()}
        for run in contestants.values():
            run()  # code that is read from disk, compiled gradients, caches
        times = Times()
        try:
            take_turns(contestants, rounds, times, name)
        finally:
            found = result[name] = {k: spread(values, 6) for k, values in times.items()}
            answers = {c.answers.get(name) for c in checkouts.values()}
            cells = [f"{found[k]['median']:10.5f}" if k in found else f"{'–':>10}" for k in ("new", "old")]
            if compared := ratio(times, "new", "old"):
                found |= {"ratio": compared, "same": len(answers) == 1}
                low, high = compared["quartiles"]
                cells.append(f"  {compared['median']:.3f} ({low:.3f} to {high:.3f})")
                cells.append("" if found["same"] else f"  other numbers: {answers}")
            print(f"  {name:28} {' '.join(cells)}", flush=True)
