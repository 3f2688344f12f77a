"""Tasks that end the process they run in, whatever process that is."""

import os
import signal


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
