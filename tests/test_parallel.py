"""Many tasks at once: where they may run, the same results as one after the other, in order; progress, clean ends.

One Dask cluster of two workers on 127.0.0.1 serves all of these tests.
"""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from unittest.mock import Mock

import dask
import distributed
import numpy as np
import pytest
import torch
from conjugate import correlated
from monte_carlo import run_method, same
from plain_tasks import die, die_once, free_port, half_way, refuse, until_asked
from refused import refuses

import bnn_pyro as bp
from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.parallel import executor as executors
from bnn_pyro.parallel.executor import connect, current_executor, executor, usable_cores
from bnn_pyro.parallel.map import WorkerDied, map_tasks
from bnn_pyro.progress import report_progress, should_stop

PLACES = ["processes:2", "cluster"]

#: Modules of Dask that draw random numbers, also in threads of their own (to connect again, say).
RANDOM = ("comm.core", "scheduler", "utils_comm", "worker", "worker_state_machine")


@pytest.fixture(scope="module")
def cluster():
    """A client of two workers with one thread each, and nannies that start them again; of random numbers of its own."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        own = random.Random(0)
        for name in ("dask.sizeof", *(f"distributed.{name}" for name in RANDOM)):
            patch.setattr(f"{name}.random", own)
        patch.setattr("distributed.protocol.compression.randint", own.randint)
        # A task that kills its worker is ours to try again; and Dask would give up a worker that died twice.
        settings = {"distributed.scheduler.allowed-failures": 0, "distributed.deploy.lost-worker-timeout": "1 hour"}
        stack.enter_context(dask.config.set(settings))
        how = dict(host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs=logging.CRITICAL)
        workers = stack.enter_context(distributed.LocalCluster(n_workers=2, threads_per_worker=1, **how))
        yield connect(workers, stack)


@pytest.fixture
def at(request):
    """``at(place)``: an executor for a block, the cluster being that of the module."""
    with ExitStack() as stack:

        def enter(place):
            if place != "cluster":
                return executor(place)
            client = request.getfixturevalue("cluster")
            client.wait_for_workers(1)  # those of the test before may have died
            stack.callback(client.processing)  # what Dask still had to send, with a sample of it measured, is sent
            return executor(client)

        yield enter


def whose(_):
    return os.getpid(), usable_cores(), torch.get_num_threads()


def test_an_executor_is_a_text_in_force_for_the_block_alone_and_decides_instead_of_cores():
    assert current_executor() is None and usable_cores() >= 1
    with executor("processes:3"):
        assert usable_cores() == 3
        with executor(None):
            assert current_executor() == 3
        with executor("here"):
            assert usable_cores() == 1 and {pid for pid, *_ in map_tasks(whose, range(3), cores=2)} == {os.getpid()}
    assert current_executor() is None
    assert executors.parse_executor("dask://10.0.0.1:8786/") == "tcp://10.0.0.1:8786"
    for text in ("", "her", "processes:0", "processes:", "dask", "dask:2", "dask://host", "tcp://h:1", "dask://:"):
        refused = pytest.raises(bp.UserError, match=r"unknown executor .*; valid: here, processes, .*dask://HOST:PORT")
        with refused, executor(text):
            pass


def test_a_scheduler_is_found_by_its_address_or_that_is_told(at, cluster, capfd, monkeypatch):
    with at("cluster"), executor(f"dask://{cluster.scheduler.address.removeprefix('tcp://')}"):
        assert map_tasks(whose, [0])[0][0] != os.getpid()  # a single task too
    monkeypatch.setattr("bnn_pyro.parallel.executor.ANSWER", 1.0)
    start, port = time.monotonic(), free_port()
    message = rf"no Dask scheduler answers at dask://127.0.0.1:{port} .*dask scheduler"
    with pytest.raises(bp.UserError, match=message), executor(f"dask://127.0.0.1:{port}"):
        pass
    assert time.monotonic() - start < 10 and capfd.readouterr().err == ""


def product(seed):
    a = torch.randn(400, 400, generator=torch.Generator().manual_seed(seed))
    report_progress(1, 2)
    return ((a @ a).sum().item(), np.asarray(a[:5]).tobytes()), whose(seed)


@pytest.mark.parametrize("place", PLACES)
def test_results_are_those_of_this_process_bit_for_bit(at, place):
    reports = []
    with at(place):
        there = map_tasks(product, range(6), report=lambda *a: reports.append(a))
    here = map_tasks(product, range(6), cores=1)
    assert [result for result, _ in here] == [result for result, _ in there]
    assert {pid for _, (pid, *_) in here} == {os.getpid()}
    pids = {pid for _, (pid, *_) in there}
    assert len(pids) == 2 and os.getpid() not in pids
    assert {(cores, threads) for _, (_, cores, threads) in there} == {(1, 1)}
    assert reports[-1] == (6, 6, {}) and [r[0] for r in reports] == sorted(r[0] for r in reports)
    assert map_tasks(product, []) == []


@pytest.mark.parametrize("place", PLACES)
def test_a_task_that_ends_its_process_is_an_error_and_does_not_end_the_caller(at, place):
    with at(place), pytest.raises(RuntimeError, match="SystemExit: 3"):
        map_tasks(sys.exit, [3, 3])


@pytest.mark.parametrize("place", ["here", *PLACES])
def test_an_error_names_its_task_and_may_be_collected(at, place):
    before = torch.get_num_threads()
    with at(place):
        refuses(r"^the third: three is refused$", map_tasks, refuse, [1, 3], names=["the first", "the third"])
        with pytest.raises(ValueError, match="four") as error:  # a fault of the program's is not the user's to collect
            map_tasks(refuse, [1, 2, 4], failed=lambda task, error: None)
        assert "in task 3 of 3 (4)" in error.value.__notes__ and torch.get_num_threads() == before
        found = map_tasks(refuse, [1, 3, 2], failed=lambda task, error: (task, str(error)))
    assert found == [1, (3, "task 2 of 3 (3): three is refused"), 2]


def test_chains_that_are_finished_on_a_cluster_are_kept(at, tmp_path, monkeypatch):
    """SIGTERM after the first; the rest is drawn here, by the same chains."""
    method = bp.NUTS(chains=3, draws=6, warmup=20, max_tree_depth=3)
    run = partial(run_method, bp.MeanField(hidden=(3,)), correlated(num=30, noise=0.5).data, method)

    def stop(done, of, figures):
        if list(tmp_path.glob("*.chain-*.pt")) and not checkpoint.stop:
            signal.raise_signal(signal.SIGTERM)

    interrupted = pytest.raises(Interrupted, match=r"stopped after step \d+ of 78")
    with interrupted, Checkpoint(tmp_path) as checkpoint, at("cluster"):
        run(checkpoint=checkpoint, report=stop)
    steps = []
    again = run(checkpoint=Checkpoint(tmp_path), report=lambda done, *_: steps.append(done))
    assert steps[0] > 26 and same(run(), again)


@pytest.mark.parametrize("place", PLACES)
def test_a_task_whose_process_was_killed_runs_again_and_nothing_is_done_twice_for_the_caller(at, tmp_path, place):
    ended, tasks = [], [(number, tmp_path / "killed") for number in range(5)]
    with at(place):
        assert map_tasks(die_once, tasks, done=lambda *end: ended.append(end)) == [0, 1, 2, 3, 4]
    assert (tmp_path / "killed").exists() and sorted(ended) == [(i, i) for i in range(5)]


@pytest.mark.parametrize("place", PLACES)
def test_a_task_that_kills_its_process_each_time_is_given_up_alone(at, place):
    ended, errors = [], []
    how = dict(done=lambda index, _: ended.append(index), failed=lambda *failure: errors.append(failure) or "none")
    with at(place):
        found = map_tasks(die, [0, 1, 2, 3], **how)
    assert found == [0, "none", 2, 3]
    ((task, error),) = errors
    assert task == 1 and isinstance(error, WorkerDied) and "cores=1" in str(error)
    assert str(error).startswith("task 2 of 4 (1): its process died each time")
    assert sorted(ended) == [0, 1, 2, 3] and ended[-1] == 1  # the others did not wait for it


def test_ctrl_c_takes_a_clusters_tasks_back(at, cluster):
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    with at("cluster"):
        try:
            with pytest.raises(KeyboardInterrupt):
                map_tasks(time.sleep, [0.3] * 50, done=lambda index, result: signal.raise_signal(signal.SIGINT))
        finally:
            signal.signal(signal.SIGINT, former)
        deadline = time.monotonic() + 20
        while any(cluster.processing().values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(cluster.processing().values())
        assert map_tasks(whose, [0])  # and it goes on


def test_workers_are_looked_over():
    asked = Mock(**{"run.return_value": {}, "nthreads.return_value": {}, "scheduler.address": "tcp://b:2"})
    with pytest.warns(UserWarning, match=r"tcp://b:2 has no workers yet, .* `dask worker tcp://b:2 --nthreads 1`"):
        executors.check_workers(asked)
    asked.run.return_value = {"tcp://a:1": ModuleNotFoundError("No module named 'bnn_pyro'")}
    refuses(r"worker tcp://a:1 cannot import bnn_pyro .*: install it there too", executors.check_workers, asked)


# -- progress and ends -------------------------------------------------------------------------------------------------
def test_a_task_reports_its_progress():
    for cores, last in ((1, 8), (2, None)):
        reports, each = [], []
        how = dict(report=lambda *a: reports.append(a), progress=lambda *a: each.append(a))  # noqa: B023
        map_tasks(half_way, [7, 8], cores=cores, **how)
        assert reports[0][:2] == (0.5, 2) and reports[-1] == (2, 2, {})
        assert [r[0] for r in reports] == sorted(r[0] for r in reports)
        assert {(0, 0.5, 7), (1, 0.5, 8)} == {(i, share, f["figure"]) for i, share, f in each if f}
        assert last is None or (1.5, 2, {"figure": last}) in reports
    report_progress(1, 2)  # outside of a task, to nobody
    assert not should_stop()


Enough = type("Enough", (Exception,), {})


@pytest.mark.parametrize("cores", [1, 2])
def test_a_watcher_stops_tasks_which_may_end_in_order(tmp_path, cores):
    tasks, shares = [tmp_path / name for name in ("a", "b", "c")], []

    def watch():
        if shares and shares[-1] > 0.1 * cores - 0.05:  # all are at it
            raise Enough

    with pytest.raises((Enough, KeyboardInterrupt)):  # the task's own, where it runs here
        map_tasks(until_asked, tasks, cores=cores, report=lambda done, *_: shares.append(done), watch=watch)
    assert [task.exists() for task in tasks] == [True, cores == 2, False]


@pytest.mark.parametrize("when", ["asked to end", "at work"])
def test_the_error_of_a_task_is_raised_once_the_others_have_ended_in_order(tmp_path, when):
    """Of one that fails as it ends after Ctrl-C too: what it was to save is not there."""
    tasks, shares = [tmp_path / "fails", tmp_path / "b"], []

    def watch():
        if when == "asked to end" and shares and shares[-1] > 0.15:
            raise KeyboardInterrupt

    function = partial(until_asked, fails=when)
    with pytest.raises((bp.UserError, KeyboardInterrupt), match=r"^task 1 of 2 .*: no space left"):
        map_tasks(function, tasks, cores=2, report=lambda done, *_: shares.append(done), watch=watch)
    assert [task.exists() for task in tasks] == [when == "asked to end", True]


def test_tasks_that_do_not_ask_are_ended_after_some_seconds():
    start, watch = time.monotonic(), Mock(side_effect=Enough)
    with pytest.raises(Enough):
        map_tasks(time.sleep, [60, 60], cores=2, grace=0.3, watch=watch)
    assert time.monotonic() - start < 40 and watch.call_count == 1


CODE = """
import signal, time
from bnn_pyro.parallel.map import map_tasks

def slow(task):
    time.sleep(0.5)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    map_tasks(slow, range(100), cores=2, report=lambda *_: print("going", flush=True))
"""


def test_ctrl_c_ends_quietly_and_leaves_no_process(tmp_path):
    """By KeyboardInterrupt alone; tried again where the signal came in a destructor, in which Python drops it."""
    errors = "Exception ignored in"
    while errors.startswith("Exception ignored in"):
        started = begun(tmp_path / "long.py", CODE)
        os.killpg(started.pid, signal.SIGINT)
        _, errors = started.communicate(timeout=60)
    chained = errors.count("During handling of the above exception")  # the signal may arrive inside any "except"
    assert errors.count("Traceback") == 1 + chained and errors.rstrip().endswith("KeyboardInterrupt"), errors
    leaves_nothing(started)


def test_processes_end_with_a_parent_that_was_killed(tmp_path):
    started = begun(tmp_path / "long.py", CODE.replace("0.5", "60 * task"))
    started.kill()
    started.communicate(timeout=60)
    leaves_nothing(started)


def begun(path, code):
    path.write_text(code)
    how = dict(start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = subprocess.Popen([sys.executable, path], **how)
    assert started.stdout.readline() == "going\n"
    return started


def leaves_nothing(started):
    deadline = time.monotonic() + 20
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(started.pid, 0)
            time.sleep(0.1)
