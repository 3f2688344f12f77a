"""Processes that cost no import: a server with everything loaded forks one for each job, which may then be killed."""

import contextlib
import multiprocessing
import os
import resource
from pathlib import Path
from unittest import mock

#: Seconds between two checkpoints of a job; 20 otherwise.
OFTEN = 0.01
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["bnn_pyro.commands", "bnn_pyro.runs.train", "bnn_pyro.runs.evaluate", "bnn_pyro.runs.sweep"]
)


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


def predict_within(run, rows, draws, bound, room, log):
    """Predict where the address space ends ``room`` bytes above what is there after loading."""
    import torch

    import bnn_pyro as bp

    posterior = bp.load(run)
    x = torch.zeros(rows, *posterior.schema.input_shape)
    bp.predict(posterior, x[:8], num_draws=2)  # what is loaded at the first use is no part of the prediction
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))
    try:
        prediction = bp.predict(posterior, x, num_draws=draws, max_memory=bound)
    except bp.UserError as error:
        Path(log).write_text(f"error: {error}")
        return 2
    return 0 if len(prediction) == rows else 1
