"""Executors: what may be asked for, what is refused, and how workers are looked over and taken down.

What a cluster makes is in test_on_dask.py.
"""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import torch
from programs import free_port, stopped_by_ctrl_c

from bnn_pyro.errors import UserError
from bnn_pyro.executors import executor, in_force, parse
from bnn_pyro.executors.dask import check_workers, versions
from bnn_pyro.executors.where import Cluster, Here, LocalCluster, Processes
from bnn_pyro.side_by_side import each, usable_cores
from bnn_pyro.side_by_side.lines import Line
from bnn_pyro.side_by_side.task import work


# -- what is asked for -------------------------------------------------------------------------------------------------
def test_texts():
    assert parse("here") == Here() and parse("processes") == Processes() and parse("processes:4") == Processes(4)
    assert parse("dask") == LocalCluster() and parse("dask:4") == LocalCluster(4)
    assert parse("dask://10.0.0.1:8786") == Cluster("tcp://10.0.0.1:8786") == parse("dask://10.0.0.1:8786/")


@pytest.mark.parametrize(
    "text", ["", "her", "processes:0", "processes:", "dask:-1", "dask:two", "dask://host", "tcp://host:1", "dask://:"]
)
def test_other_texts_are_told_the_list(text):
    with (
        pytest.raises(UserError, match=r"unknown executor .*; valid: here, processes, .*dask://HOST:PORT"),
        executor(text),
    ):
        pass


def test_other_things_are_refused():
    with pytest.raises(UserError, match="an executor is a text"), executor(7):
        pass


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UserError, match=r'pip install "bnn-pyro\[cluster\]"'), executor("dask:2"):
        pass


def test_it_is_in_force_for_the_block_alone():
    assert in_force() is None
    with executor("processes:3"):
        assert in_force() == Processes(3) and usable_cores() == 3
        with executor(None):
            assert in_force() == Processes(3)
        with executor("here"):
            assert usable_cores() == 1
    assert in_force() is None


def whose(_):
    return os.getpid(), usable_cores(), torch.get_num_threads()


def test_it_decides_instead_of_cores():
    with executor("here"):
        assert {pid for pid, *_ in each(whose, range(3), cores=2)} == {os.getpid()}
    with executor("processes:2"):
        found = each(whose, range(3), cores=1)
    assert os.getpid() not in {pid for pid, *_ in found} and {one[1:] for one in found} == {(1, 1)}


def test_a_scheduler_that_is_not_there(capfd, monkeypatch):
    monkeypatch.setattr("bnn_pyro.executors.dask.ANSWER", 2.0)
    start, port = time.monotonic(), free_port()
    said = rf"no Dask scheduler answers at dask://127.0.0.1:{port} .*dask scheduler"
    with pytest.raises(UserError, match=said), executor(f"dask://127.0.0.1:{port}"):
        pass
    assert time.monotonic() - start < 10 and capfd.readouterr().err == ""


# -- the workers -------------------------------------------------------------------------------------------------------
def in_its_turn(folder):
    mine = folder / str(threading.get_ident())
    mine.touch()
    time.sleep(0.05)
    alone = len(list(folder.iterdir())) == 1
    mine.unlink()
    return alone


def test_threads_of_one_worker_take_turns(tmp_path):
    """As those of a Dask worker with ``--nthreads 3`` come to their tasks."""
    function, task = cloudpickle.dumps(in_its_turn), cloudpickle.dumps(tmp_path)
    with ThreadPoolExecutor(3) as threads:
        ends = [threads.submit(work, n, function, "digest", task, f"task {n}", Line()) for n in range(6)]
    assert all(end.result().good and cloudpickle.loads(end.result().blob) for end in ends)


class Workers:
    """A client of workers that are told of."""

    def __init__(self, **there):
        self.there = there

    def run(self, function, on_error):
        return {"tcp://a:1": self.there.get("versions", versions())}

    def nthreads(self):
        return {"tcp://a:1": self.there.get("threads", 1)}


def test_workers_are_looked_over():
    check_workers(Workers())
    with pytest.warns(UserWarning, match=r"3 threads runs one task at a time .* --nthreads 1"):
        check_workers(Workers(threads=3))
    with pytest.warns(
        UserWarning, match=rf"tcp://a:1 has torch 1.0 \(here {versions()['torch']}\): results may differ"
    ):
        check_workers(Workers(versions={**versions(), "torch": "1.0"}))
    with pytest.raises(UserError, match=r"worker tcp://a:1 cannot import bnn_pyro .*: install it there too"):
        check_workers(Workers(versions=ModuleNotFoundError("No module named 'bnn_pyro'")))


SCRIPT = """
import signal, time
from bnn_pyro.executors import executor
from bnn_pyro.side_by_side import each

def slow(task):
    time.sleep(0.5)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with executor("dask:2"):
        each(slow, range(100), report=lambda *_: print("going", flush=True))
"""


def test_workers_of_our_own_keep_their_memory():
    """Dask tells its workers to give it back in every step of a fit, which is then twice as long."""
    with executor("dask:1"):
        given = each(lambda name: os.environ.get(name), ["MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS"])
    assert given == [None, "1"]


def test_ctrl_c_closes_a_cluster_of_our_own(tmp_path):
    stopped_by_ctrl_c(SCRIPT, tmp_path)


def test_the_command_line_takes_it(capsys):
    from bnn_pyro.run import main

    assert main(["train", "--executor", "dusk"]) == 2
    assert "unknown executor 'dusk'" in capsys.readouterr().err
