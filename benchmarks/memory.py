"""Memory at its highest: of this process during a block, of a process and its children."""

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks.provenance import ROOT

__all__ = ["Failed", "Peak", "peak", "run_apart", "tree"]

#: Seconds between two looks at the memory of this process, and of a tree of processes.
INTERVAL, TREE_INTERVAL = 0.002, 0.1


class Peak:
    """Bytes beyond those before the block: highest resident set, mapped pages included; highest memory asked for."""

    resident = 0
    anonymous = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Watch the block. Linux only."""
    found = Peak()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be used again unseen
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the kernel's highest resident set starts again from here
    before, anonymous = _status("VmRSS"), _status("RssAnon")
    highest = [anonymous]
    with _watching(lambda: _status("RssAnon"), highest, INTERVAL):
        yield found
    found.resident = _status("VmHWM") - before
    found.anonymous = highest[0] - anonymous


class Failed(Exception):
    """A process that ended with an error, and the last lines of what it wrote."""


def run_apart(
    module: str, *arguments: str, launcher: tuple[str, ...] = (), timeout: float | None = None, **environment: str
) -> dict[str, Any]:
    """What ``python -m module arguments`` prints as JSON in its last line, with "memory", bytes of its tree at most.

    launcher: what stands between python and the module, such as ("-m", "torch.distributed.run").
    Raises Failed where it ends with an error, and subprocess.TimeoutExpired.
    """
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    highest = [0]
    try:
        with _watching(lambda: tree(process.pid), highest, TREE_INTERVAL):
            out, trouble = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        raise Failed(f"{module} {' '.join(arguments)} failed:\n{trouble[-3000:]}")
    line = next(line for line in reversed(out.splitlines()) if line.startswith("{"))
    return {"memory": highest[0], **json.loads(line)}


def tree(pid: int | str = "self") -> int:
    """Bytes that a process and its children have asked for, without mapped files and shared libraries."""
    total = 0
    with suppress(OSError, StopIteration):  # it ended while it was looked at
        total = _status("RssAnon", str(pid))
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as children:
                total += sum(tree(int(child)) for child in children.read().split())
    return total


@contextmanager
def _watching(look: Callable[[], int], highest: list[int], interval: float) -> Iterator[None]:
    done = threading.Event()

    def watch() -> None:
        while not done.wait(interval):
            highest[0] = max(highest[0], look())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _status(name: str, pid: str = "self") -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(name + ":"))
