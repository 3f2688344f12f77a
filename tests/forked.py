"""Processes that cost no import: one that has everything loaded forks a child for each job, which may then be killed.

    python tests/forked.py         # a job a line: JSON {"call": a function of this file, "with": its arguments}

It answers with the child's pid, and when that has ended with its exit code. It has one thread, so that a fork is whole.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

#: Seconds between two checkpoints of a job; 20 otherwise.
OFTEN = 0.01


# -- jobs ------------------------------------------------------------------------------------------------------------
def command(argv, log, every=OFTEN, figures=False):
    """A command line; what it says goes to a file."""
    import bnn_pyro.runs.evaluate
    from bnn_pyro.checkpoint import Checkpoint
    from bnn_pyro.run import main

    Checkpoint.__init__.__defaults__ = (None, every)
    if not figures:
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


JOBS = {job.__name__: job for job in (command, predict_within)}


# -- both sides ------------------------------------------------------------------------------------------------------
class Forks:
    """The parent of the children, as a context."""

    def __enter__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def start(self, call, **arguments):
        """Begin a job; its pid."""
        print(json.dumps({"call": call, "with": arguments}), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def result(self):
        """Wait for its end; the exit code, or minus the signal that ended it."""
        return int(self.process.stdout.readline())

    def kill(self, pid, number=signal.SIGKILL):
        """Send a signal to the job that was begun last, unless it has ended; the exit code, or minus the signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return self.result()

    def run(self, call, **arguments):
        self.start(call, **arguments)
        return self.result()


def serve():
    import torch

    import bnn_pyro.commands  # noqa: F401

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # what is loaded at the first use is loaded once
        tiny = ["--data", "toy-curve", "--hidden", "2", "--epochs", "1", "--num-draws", "2", "--device", "cpu"]
        command(["train", "--quiet", *tiny, "--out", f"{folder}/run"], f"{folder}/log", every=20.0)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.setpgid(0, 0)
                code = JOBS[job["call"]](**job["with"])
            finally:
                os._exit(code)
        print(child, flush=True)
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
