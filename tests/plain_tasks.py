"""Tasks of plain Python, whose processes import neither torch nor Pyro."""

import os
import signal
import socket
import time

from bnn_pyro.errors import UserError
from bnn_pyro.progress import report_progress, should_stop


# -- that end the process they run in, whatever process that is --------------------------------------------------------
def die(task):
    """Each time, of one task."""
    if task == 1:
        os._exit(9)
    return task


def die_once(task):
    """SIGKILL, the first time; a task is (number, the path of a file that tells)."""
    number, path = task
    if number == 1 and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


# -- that end by themselves --------------------------------------------------------------------------------------------
def refuse(task):
    if task == 3:
        raise UserError("three is refused")
    if task == 4:
        raise ValueError("four is an error")
    return task


def half_way(task):
    report_progress(1, 2, {"figure": task})
    time.sleep(0.5)
    return should_stop()


def until_asked(task, fails=""):
    """Writes its file, a path, when it is asked to end; that named "fails" fails, "at work" or "asked to end"."""
    start, others, failing = time.monotonic(), task.with_name("others"), task.name == "fails"
    if not failing:
        others.touch()
    while not should_stop():
        assert time.monotonic() - start < 30
        report_progress(0.1, 1)
        time.sleep(0.01)
        if failing and fails == "at work" and others.exists():
            raise UserError("no space left")
    task.touch()
    if failing:
        raise UserError("no space left")
    raise KeyboardInterrupt


# -- programs ----------------------------------------------------------------------------------------------------------
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
