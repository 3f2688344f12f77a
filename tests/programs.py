"""Programs that tests start: a port for them, and what a terminal does to them (Ctrl-C comes to all processes)."""

import os
import signal
import socket
import subprocess
import sys
import time


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def stopped_by_ctrl_c(code, folder):
    """Run a program until it says "going", stop it: it ends by KeyboardInterrupt alone and leaves no process behind."""
    path = folder / "long.py"
    path.write_text(code)
    started = subprocess.Popen(
        [sys.executable, path], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout.readline() == "going\n"
    os.killpg(started.pid, signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    chained = errors.count("During handling of the above exception")  # the signal may arrive inside any "except"
    assert errors.count("Traceback") == 1 + chained and errors.rstrip().endswith("KeyboardInterrupt"), errors
    deadline = time.monotonic() + 20
    while _alive(started.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(started.pid)


def _alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
