"""The highest memory of this process while something runs, beyond what it held before."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Peak", "peak", "tree"]

#: Seconds between two looks at anonymous memory.
INTERVAL = 0.002


class Peak:
    """Bytes, known when the block has ended.

    resident   highest resident set, which the kernel keeps; mapped files count in it while their pages are there
    anonymous  highest memory that the process had asked for, by looking again and again: without mapped files
    """

    resident = 0
    anonymous = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Watch the block."""
    found = Peak()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be used again unseen
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the kernel's highest resident set starts again from here
    before, anonymous = _status("VmRSS"), _status("RssAnon")
    highest, done = [anonymous], threading.Event()

    def look() -> None:
        while not done.wait(INTERVAL):
            highest[0] = max(highest[0], _status("RssAnon"))

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    try:
        yield found
    finally:
        done.set()
        watch.join()
        found.resident = _status("VmHWM") - before
        found.anonymous = highest[0] - anonymous


def tree(pid: int) -> int:
    """Bytes that a process and its children have asked for, without mapped files and shared libraries."""
    total = 0
    with suppress(OSError, StopIteration):  # it ended while it was looked at
        total = _status("RssAnon", str(pid))
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as children:
                total += sum(tree(int(child)) for child in children.read().split())
    return total


def _status(name: str, pid: str = "self") -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(name + ":"))
