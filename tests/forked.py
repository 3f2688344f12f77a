"""Processes that cost no import: a server with everything loaded forks one for each job, which may then be killed."""

import contextlib
import multiprocessing
import os
from unittest import mock

#: Seconds between two checkpoints of a job; 20 otherwise.
OFTEN = 0.01
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["bnn_pyro.commands", "bnn_pyro.runs.evaluate", "bnn_pyro.runs.sweep"])


def start(job, **arguments):
    """Begin a job, a function of this file: its process, whose ``exitcode`` is what the job returns."""
    with mock.patch.dict(os.environ, {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}):
        process = SERVER.Process(target=_leave, args=(job,), kwargs=arguments)
        process.start()
    return process


def run(job, **arguments):
    """Begin a job and wait for its end."""
    process = start(job, **arguments)
    process.join()
    return process.exitcode


def as_rank(task, number, port, **arguments):
    """A task as one of two processes that torchrun started."""
    multiprocessing.process._parent_process = None  # a process with a parent is a worker, no rank
    where = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()}, GLOO_SOCKET_IFNAME="lo")
    return task(**arguments)


def _leave(job, **arguments):
    import torch

    torch.set_num_threads(1)
    os._exit(job(**arguments))


def command(argv, log):
    """A command line, with checkpoints often and without figures of runs; what it says goes to a file."""
    import bnn_pyro.runs.evaluate
    from bnn_pyro.checkpoint import Checkpoint
    from bnn_pyro.run import main

    Checkpoint.__init__.__defaults__ = (None, OFTEN)
    bnn_pyro.runs.evaluate.draw_all = lambda scene, folder: []
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        return main(argv)
