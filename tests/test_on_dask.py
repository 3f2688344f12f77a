"""A Dask cluster of two workers draws, trains and calibrates what this process does to the bit, and may lose a worker.

One scheduler and two workers on 127.0.0.1 for all of these tests, started from the command line.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dying import die, die_once
from monte_carlo import same
from programs import free_port

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.checks.linear_regression import correlated
from bnn_pyro.errors import UserError
from bnn_pyro.parallel.executor import executor, usable_cores
from bnn_pyro.parallel.map import map_tasks
from bnn_pyro.parallel.task import report_progress

PROBLEM = correlated(num=30, noise=0.5)
NUTS = bp.NUTS(chains=3, draws=6, warmup=20, max_tree_depth=3)
ENSEMBLE = bp.Ensemble(members=3, epochs=6, batch_size=8)


class TwoWorkers:
    """A scheduler and two workers with one thread each, and nannies that start them again."""

    def __init__(self, log):
        self.address = f"127.0.0.1:{free_port()}"
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
        }
        where = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
        port = self.address.split(":")[1]
        commands = (
            ["scheduler", *where, "--port", port],
            [
                "worker",
                f"tcp://{self.address}",
                *where,
                "--nworkers",
                "2",
                "--nthreads",
                "1",
                "--preload",
                "bnn_pyro.fitting",
            ],
        )
        self.log = open(log, "w")  # noqa: SIM115
        group = {"start_new_session": True}
        self.started = [
            subprocess.Popen(
                [sys.executable, "-m", "dask", *command], env=env, stdout=self.log, stderr=self.log, **group
            )
            for command in commands
        ]

    def close(self):
        for process in reversed(self.started):
            process.terminate()
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a nanny that is starting a worker again
                process.wait(timeout=10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)
        self.log.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A client of the two workers, which run for as long as the tests of this module do."""
    two = TwoWorkers(tmp_path_factory.mktemp("dask") / "log")
    try:
        from distributed import Client

        with Client(f"tcp://{two.address}", timeout=60, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            yield client
    finally:
        two.close()


@pytest.fixture
def on_cluster(cluster):
    state = random.getstate()
    with executor(cluster):
        yield cluster
    cluster.processing()  # what Dask still had to send, with a sample of it measured by that generator, is sent
    random.setstate(state)


# -- the same results --------------------------------------------------------------------------------------------------
def run(method, entry, **settings):
    with bp.isolated(0):
        return method.run(entry.model(PROBLEM.schema), None, PROBLEM.data, seed=0, **settings)


def numbers(seed):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(300, 300, generator=g)
    report_progress(1, 2)
    return (a @ a).sum().item(), os.getpid(), usable_cores(), torch.get_num_threads()


def test_a_task_gives_the_same_there(on_cluster):
    told = []
    there = map_tasks(numbers, range(6), report=lambda *a: told.append(a))
    with executor("here"):
        here = map_tasks(numbers, range(6))
    assert [n[0] for n in there] == [n[0] for n in here]
    assert len({n[1] for n in there} | {os.getpid()}) == 3  # both workers were at it
    assert {n[2:] for n in there} == {(1, 1)}
    assert told[-1] == (6, 6, {}) and [t[0] for t in told] == sorted(t[0] for t in told)


def whose(_):
    return os.getpid()


def test_a_single_task_goes_there_too(on_cluster):
    assert map_tasks(whose, [0]) != [os.getpid()]


def local_entry():
    """A variant whose class no other process could import, as those of a notebook."""

    class Mine(bp.MeanField):
        def model(self, schema):
            return super().model(schema)

    return Mine(hidden=(3,))


def test_chains_are_the_same_there(cluster, tmp_path):
    entry, lines = local_entry(), []
    for method in (NUTS, replace(NUTS, compiled="yes", chains=2)):
        here = run(method, entry)
        with executor(cluster):
            there = run(
                method,
                entry,
                report=lambda *line: lines.append(line),
                checkpoint=Checkpoint(tmp_path / method.compiled),
            )
        assert same(here, there)
    assert lines[-1][:2] == (52, 52)


def test_members_are_the_same_everywhere(cluster):
    found = {}
    for where in ("here", "processes:2", cluster):
        with executor(where):
            found[str(where)] = run(ENSEMBLE, bp.MLP(hidden=(3,)))
    here, *others = found.values()
    for there in others:
        assert all(torch.equal(here.chains[site], value) for site, value in there.chains.items())
        assert here.trace == there.trace


def test_a_calibration_replica_is_the_same_there(cluster):
    from bnn_pyro.checks.replications import Plan, replications
    from bnn_pyro.checks.simulation import design

    given = design(PROBLEM.data, rows=10, points=4, seed=0)
    plan = Plan(bp.MeanField(hidden=()), given, bp.MAP(epochs=5), seed=1, draws=4)
    here = replications(plan, 2, cores=1)
    with executor(cluster):
        there = replications(plan, 2)
    for a, b in zip(here, there, strict=True):
        assert (a.truth == b.truth).all() and (a.draws == b.draws).all()


# -- what goes wrong there ---------------------------------------------------------------------------------------------
def refuse(task):
    raise UserError("refused")


def test_a_worker_that_is_killed(on_cluster, tmp_path):
    ended, tasks = [], [(number, tmp_path / "killed") for number in range(5)]
    assert map_tasks(die_once, tasks, done=lambda index, result: ended.append(index)) == list(range(5))
    assert (tmp_path / "killed").exists() and sorted(ended) == list(range(5))


def test_a_task_that_kills_its_worker_each_time_is_given_up(on_cluster):
    ended = []
    with pytest.raises(UserError, match=r"^task 2 of 3 \(1\): its process died each time"):
        map_tasks(die, [0, 1, 2], done=lambda index, result: ended.append(index))
    assert sorted(ended) == [0, 2]


def test_errors_are_named(on_cluster):
    with pytest.raises(UserError, match=r"^task 1 of 1 \(7\): refused$"):
        map_tasks(refuse, [7])
    assert map_tasks(refuse, [7, 8], failed=lambda task, error: str(error)) == [
        f"task {i} of 2 ({task}): refused" for i, task in ((1, 7), (2, 8))
    ]


def waits(task):
    time.sleep(0.3)


def test_ctrl_c_takes_tasks_back(on_cluster):
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            map_tasks(waits, range(50), done=lambda index, result: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, former)
    deadline = time.monotonic() + 20
    while any(on_cluster.processing().values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(on_cluster.processing().values())
    assert map_tasks(whose, [0])  # and it goes on


def test_chains_that_are_finished_are_kept(cluster, tmp_path, monkeypatch):
    """SIGTERM after the first; the rest is drawn here, by the same chains."""
    whole = run(NUTS, bp.MeanField(hidden=(3,)))
    with pytest.raises(Interrupted, match=r"stopped after step \d+ of 78"), Checkpoint(tmp_path) as checkpoint:

        def stop(done, of, figures):
            if list(tmp_path.glob("*.chain-*.pt")) and not checkpoint.stop:
                signal.raise_signal(signal.SIGTERM)

        with executor(cluster):
            run(NUTS, bp.MeanField(hidden=(3,)), checkpoint=checkpoint, report=stop)
    lines = []
    again = run(NUTS, bp.MeanField(hidden=(3,)), checkpoint=Checkpoint(tmp_path), report=lambda d, *_: lines.append(d))
    assert lines[0] > 26 and same(whole, again)


class Failing(bp.NUTS):
    def kernel(self, *args):
        raise UserError("no way to go on")


def test_a_chain_that_cannot_go_on_is_named(on_cluster):
    with pytest.raises(UserError, match=r"^chain [12] of 2: no way to go on$"):
        run(Failing(chains=2, draws=5, warmup=5), bp.MeanField(hidden=(3,)))
