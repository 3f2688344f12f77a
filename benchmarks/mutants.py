"""How many single-line faults, put in by hand, the tests notice.

    pip install -e ".[test]"
    python -m benchmarks.mutants                  # of benchmarks/mutants.toml all that were not tried on these files
    python -m benchmarks.mutants 'prior-*' sg-burn-in
    python -m benchmarks.mutants --dry-run        # only whether every fault still has its place

Each fault is a line of the package changed in a scratch copy of this checkout, in which its nearest tests are run,
first as they are (they must pass) and then with the fault. A fault is noticed where a test fails, or where they take
longer than a minute and four times as long. ``benchmarks/results/mutants.json`` has each fault as soon as it is tried:
a run that was interrupted goes on, and one after a change tries again where the file of the fault, or a file of its
tests, is another now.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import multiprocessing
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.provenance import RESULTS, ROOT, add_out, check_tree, provenance, table, write_json

__all__ = ["TABLES"]

FAULTS, PACKAGE, LOG = ROOT / "benchmarks" / "mutants.toml", "bnn_pyro", "tests.log"
#: Processes that begin with these loaded, on one thread.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "pyro", "arviz", "matplotlib.pyplot", "pandas", "scipy.stats", "pytest"])


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in ``path``; ``tests``: pytest's arguments, one list a file; ``harmless``: why."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    what: str
    harmless: str = ""


@dataclass(frozen=True)
class Outcome:
    """``by``: the test that noticed the fault, "" for none."""

    fault: Fault
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.fault.name:24} {self.by or 'NOT NOTICED: ' + self.fault.what}  ({self.seconds:.0f} s)"


def texts_of(fault: Fault) -> str:
    """A hash of what a fault's outcome rests on: the fault, its file, and the files of its tests."""
    digest = hashlib.sha256(repr((fault.old, fault.new, fault.tests)).encode())
    for name in (fault.path, *(tests.split("::")[0].split()[0] for tests in fault.tests)):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def read_faults(root: Path, patterns: list[str]) -> list[Fault]:
    """The faults of the list, each with the file that holds its text now. Exits with what is stale, if anything is."""
    files = [path for path in sorted((root / PACKAGE).rglob("*.*")) if path.suffix in {".py", ".c", ".h"}]
    package = {path: path.read_text(encoding="utf-8") for path in files}
    found, stale = [], []
    for name, (path, old, new, tests, what, *harmless) in tomllib.loads(FAULTS.read_text(encoding="utf-8")).items():
        if patterns and not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        home = root / PACKAGE / path
        places = [home] if old in package.get(home, "") else [p for p, text in package.items() if old in text]
        times = sum(package[place].count(old) for place in places)
        commands = tuple(f"tests/{part.strip()}" for part in tests.split(","))
        absent = [c.split()[0] for c in commands if not (root / c.split()[0]).is_file()]
        if times != 1 or absent:
            stale.append(f"{name} ({f'no {absent[0]}' if absent else f'its text is there {times} times: {old}'})")
            continue
        found.append(Fault(name, str(places[0].relative_to(root)), old, new, commands, what, *harmless))
    if stale or not found:
        sys.exit("the list is stale: " + "\n".join(stale) if stale else "no fault has such a name")
    return found


class Copies:
    """Scratch copies of the checkout, one a job, and the seconds that tests take without a fault."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.free: queue.Queue[Path] = queue.Queue()
        self._seconds: dict[str, float] = {}
        self._running: set[multiprocessing.process.BaseProcess] = set()
        self._stopped = False
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True)
        for job in range(jobs):
            copy = folder / str(job)
            for name in filter(None, listed.stdout.decode().split("\0")):
                if (ROOT / name).is_file() and not name.startswith(("docs/", "notebooks/")):
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, copy / name)
            # Compiled files that are checked by content: a fault may leave size and time of a file as they are.
            compiled = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", PACKAGE, "tests"]
            subprocess.run([sys.executable, *compiled], cwd=copy, check=True)
            self.free.put(copy)

    def judge(self, fault: Fault) -> Outcome:
        """Run the tests of a fault, without it where nobody has yet, and with it."""
        copy, start = self.free.get(), time.perf_counter()
        try:
            by = ""
            for tests in fault.tests:
                with self._locks[tests]:
                    if tests not in self._seconds:
                        self._seconds[tests] = self._without(copy, tests)
                path = copy / fault.path
                whole = path.read_text(encoding="utf-8")
                path.write_text(whole.replace(fault.old, fault.new), encoding="utf-8")
                try:
                    by = self._failed(copy, tests, 60 + 4 * self._seconds[tests])
                finally:
                    path.write_text(whole, encoding="utf-8")
                if by:
                    break
            return Outcome(fault, by, time.perf_counter() - start)
        finally:
            self.free.put(copy)

    def stop(self) -> None:
        """End the tests that run: Ctrl-C does not reach their process groups."""
        self._stopped = True
        for process in list(self._running):
            kill(process)

    def _without(self, copy: Path, tests: str) -> float:
        start = time.perf_counter()
        if failed := self._failed(copy, tests, 1800):
            raise RuntimeError(f"the list is stale: without a fault, {tests} does not pass: {failed}")
        return time.perf_counter() - start

    def _failed(self, copy: Path, tests: str, limit: float) -> str:
        """The first test that fails, or why there is none; "" where all pass."""
        process = FORKS.Process(target=run_tests, args=(copy, shlex.split(tests)))
        process.start()
        self._running.add(process)
        if self._stopped:
            kill(process)
        process.join(limit)
        self._running.discard(process)
        if process.is_alive():
            kill(process)
            process.join()
            return f"{tests}: more than {limit:.0f} s"
        if process.exitcode == 0:
            return ""
        if process.exitcode == 5:
            return f"{tests} selects no test"
        lines = (copy / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return (
            lines[0].split(" ", 1)[1].split(" - ")[0].removeprefix("tests/") if lines else f"{tests}: it does not start"
        )


def kill(process: multiprocessing.process.BaseProcess) -> None:
    """A process of tests, and what they have started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just begun, or has ended
        process.kill()


def run_tests(copy: Path, tests: list[str]) -> None:
    """pytest in a fork of a process that has loaded what takes seconds to import; what it prints goes to a file."""
    import pytest

    os.setpgid(0, 0)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "Agg"}
    sys.dont_write_bytecode = True
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(pytest.main(["-qx", "--no-header", "--tb=no", "-p", "no:cacheprovider", *tests]))


def mutants_table() -> str:
    """How many were noticed, by folder, and which were not or do no harm."""
    path = RESULTS / "mutants.json"
    if not path.is_file():
        return "Not measured yet."
    found = json.loads(path.read_text(encoding="utf-8"))
    folders: dict[str, list[dict]] = defaultdict(list)
    for fault in found["faults"].values():
        folders["/".join(Path(fault["file"]).parts[:2])].append(fault)
    rows = [[name, len(some), sum(bool(f["noticed_by"]) for f in some)] for name, some in sorted(folders.items())]
    rows.append(["all", sum(row[1] for row in rows), sum(row[2] for row in rows)])
    listed = sum(len(fault) == 5 for fault in tomllib.loads(FAULTS.read_text(encoding="utf-8")).values())
    commits = sorted({fault["commit"] for fault in found["faults"].values()})
    lines = [
        table(["", "faults", "noticed"], [[str(cell) for cell in row] for row in rows]) + "\n",
        *(f"- not noticed: {f['what']} ({f['file']})" for f in found["faults"].values() if not f["noticed_by"]),
        *(f"- left out: {f['what']} ({f['file']}): {f['harmless']}" for f in found["harmless"].values()),
        f"\n{rows[-1][1]} of the {listed} faults listed were tried.",
        f"\n`{found['command']}`; commit {', '.join(commits)}; {found['machine']}; {found['date']}.",
    ]
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"mutants": mutants_table}


def main() -> None:
    """Read the command line, run the tests, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="of faults, with * for any letters (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="so many at once")
    parser.add_argument("--dry-run", action="store_true", help="look only whether every fault has its place")
    add_out(parser, "mutants.json")
    args = parser.parse_args()
    faults = read_faults(ROOT, args.names)
    tried, harmless = [f for f in faults if not f.harmless], [f for f in faults if f.harmless]
    print(f"{len(tried)} faults in {len({f.path for f in tried})} files, and {len(harmless)} that do no harm")
    if args.dry_run:
        return
    check_tree(args.out)
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    facts, texts = provenance(), {fault.name: texts_of(fault) for fault in tried}
    former = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {"faults": {}, "harmless": {}}
    if args.names:
        kept = {name: outcome for name, outcome in former["faults"].items() if name not in texts}
    else:
        kept = {name: outcome for name, outcome in former["faults"].items() if outcome["texts"] == texts.get(name)}
    left = {f.name: {"file": f.path, "what": f.what, "harmless": f.harmless} for f in harmless}
    content = {**facts, "faults": kept, "harmless": former["harmless"] | left}
    with tempfile.TemporaryDirectory(prefix="bnn-pyro-faults-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies = Copies(Path(folder), args.jobs)
        try:
            for outcome in pool.map(copies.judge, [fault for fault in tried if fault.name not in kept]):
                print(outcome, flush=True)
                fault = outcome.fault
                content["faults"][fault.name] = {"file": fault.path, "what": fault.what, "noticed_by": outcome.by,
                                                 "commit": facts["commit"], "texts": texts[fault.name]}  # fmt: skip
                write_json(args.out, content)
        finally:
            copies.stop()
    judged = content["faults"].values()
    print(f"{sum(bool(fault['noticed_by']) for fault in judged)} of {len(judged)} noticed")


if __name__ == "__main__":
    main()
