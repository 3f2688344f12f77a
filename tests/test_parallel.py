"""Many tasks at once: where they may run, the same results as one after the other, in order, and clean ends.

What a Dask cluster makes is in test_on_dask.py.
"""

import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from dying import die, die_once
from programs import free_port, stopped_by_ctrl_c

import bnn_pyro as bp
from bnn_pyro.errors import UserError
from bnn_pyro.parallel.cluster import check_workers, versions
from bnn_pyro.parallel.executor import Executor, current_executor, executor, parse_executor, usable_cores
from bnn_pyro.parallel.map import WorkerDied, map_tasks
from bnn_pyro.parallel.task import report_progress, run_task, should_stop
from bnn_pyro.progress import progress_bar


# -- where -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("here", Executor("here")),
        ("processes", Executor("processes")),
        ("processes:4", Executor("processes", 4)),
        ("dask", Executor("dask")),
        ("dask:4", Executor("dask", 4)),
        ("dask://10.0.0.1:8786/", Executor("dask", client="tcp://10.0.0.1:8786")),
    ],
)
def test_texts(text, expected):
    assert parse_executor(text) == expected


@pytest.mark.parametrize(
    "text", ["", "her", "processes:0", "processes:", "dask:-1", "dask:two", "dask://host", "tcp://host:1", "dask://:"]
)
def test_other_texts_are_told_the_list(text):
    refused = pytest.raises(UserError, match=r"unknown executor .*; valid: here, processes, .*dask://HOST:PORT")
    with refused, executor(text):
        pass


def test_what_else_is_refused(monkeypatch, capsys):
    from bnn_pyro.run import main

    with pytest.raises(UserError, match="an executor is a text"), executor(7):
        pass
    with pytest.raises(UserError, match="cores must be"):
        map_tasks(refuse, [1], cores=-1)
    assert main(["train", "--executor", "dusk"]) == 2 and "unknown executor 'dusk'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UserError, match=r'pip install "bnn-pyro\[cluster\]"'), executor("dask:2"):
        pass


def whose(_):
    return os.getpid(), usable_cores(), torch.get_num_threads()


def test_it_is_in_force_for_the_block_alone_and_decides_instead_of_cores():
    assert current_executor() is None and usable_cores() >= 1 and multiprocessing.parent_process() is None
    with executor("processes:3"):
        assert usable_cores() == 3
        with executor(None):
            assert current_executor() == Executor("processes", 3)
        with executor("here"):
            assert usable_cores() == 1 and {pid for pid, *_ in map_tasks(whose, range(3), cores=2)} == {os.getpid()}
    assert current_executor() is None
    with executor("processes:2"):
        found = map_tasks(whose, range(3), cores=1)
    assert os.getpid() not in {pid for pid, *_ in found} and {one[1:] for one in found} == {(1, 1)}
    # workers are kept for the next call
    assert {pid for pid, *_ in found} & {pid for pid, *_ in map_tasks(whose, range(3), cores=2)}


def test_a_scheduler_that_is_not_there(capfd, monkeypatch):
    monkeypatch.setattr("bnn_pyro.parallel.cluster.ANSWER", 1.0)
    start, port = time.monotonic(), free_port()
    said = rf"no Dask scheduler answers at dask://127.0.0.1:{port} .*dask scheduler"
    with pytest.raises(UserError, match=said), executor(f"dask://127.0.0.1:{port}"):
        pass
    assert time.monotonic() - start < 10 and capfd.readouterr().err == ""


# -- results -----------------------------------------------------------------------------------------------------------
def product(seed):
    a = torch.randn(400, 400, generator=torch.Generator().manual_seed(seed))
    return (a @ a).sum().item(), np.asarray(a[:5]), torch.get_num_threads(), os.getpid()


def test_results_are_those_of_this_process_bit_for_bit():
    here, there = (map_tasks(product, range(6), cores=cores) for cores in (1, 2))
    for (a, b, threads, _), (c, d, others, _) in zip(here, there, strict=True):
        assert a == c and np.array_equal(b, d) and threads == others == 1
    assert {p for *_, p in here} == {os.getpid()} and os.getpid() not in {p for *_, p in there}
    assert map_tasks(product, []) == []


def test_a_function_of_a_notebook_travels_by_value_and_results_come_in_order():
    base = 10

    def slow_first(task):
        time.sleep(0.4 if task == 0 else 0.0)
        return base + task

    for cores in (1, 2):
        reports = []
        found = map_tasks(slow_first, range(5), cores=cores, report=lambda *a: reports.append(a))  # noqa: B023
        assert found == [10, 11, 12, 13, 14] and reports == [(i, 5, {}) for i in range(1, 6)]


def refuse(task):
    if task == 3:
        raise UserError("three is refused")
    if task == 4:
        raise ValueError("four is an error")
    return task


@pytest.mark.parametrize("cores", [1, 2])
def test_an_error_names_its_task_and_may_be_collected(cores):
    before = torch.get_num_threads()
    with pytest.raises(UserError, match=r"^task 2 of 2 \(3\): three is refused$"):
        map_tasks(refuse, [1, 3], cores=cores)
    with pytest.raises(UserError, match=r"^the third: three is refused$"):
        map_tasks(refuse, [1, 3], cores=cores, names=["the first", "the third"])
    with pytest.raises(ValueError, match="four") as error:  # a fault of the program's is not the user's to collect
        map_tasks(refuse, [1, 2, 4], cores=cores, failed=lambda task, error: None)
    assert "in task 3 of 3 (4)" in error.value.__notes__ and torch.get_num_threads() == before
    found = map_tasks(refuse, [1, 3, 2], cores=cores, failed=lambda task, error: (task, str(error)))
    assert found == [1, (3, "task 2 of 3 (3): three is refused"), 2]


class Hidden:
    """Cannot be taken apart, or put together."""

    def __init__(self, how):
        self.how = how

    def __reduce__(self):
        if self.how == "pickle":
            raise TypeError("not to be pickled")
        return int, ("no number",)


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def odd(task):
    if task == "error":
        raise Odd(1, 2)
    return Hidden(task)


@pytest.mark.parametrize(("task", "said"), [("pickle", "not to be"), ("read", "no number"), ("error", "1 and 2")])
def test_what_cannot_travel_back_is_an_error_of_its_task(task, said):
    with pytest.raises((TypeError, RuntimeError), match=said) as error:
        map_tasks(odd, [task, task], cores=2)
    assert any(f"in task 1 of 2 ('{task}')" in note or "in task 2" in note for note in error.value.__notes__)


def warned(task):
    from bnn_pyro.inference import sampler

    sampler.announce(1.0, 1e6, 1)
    return task


def test_what_the_package_warns_of_is_said_here_and_once():
    with pytest.warns(UserWarning, match="this run will take about 278 hours") as said:
        assert map_tasks(warned, [1, 2, 3], cores=2) == [1, 2, 3]
    assert len(said) == 1


def in_its_turn(folder):
    mine = folder / str(threading.get_ident())
    mine.touch()
    time.sleep(0.05)
    alone = len(list(folder.iterdir())) == 1
    mine.unlink()
    return alone


class Silent:
    """A channel that leads nowhere."""

    stopping = False

    def begin(self):
        pass


def test_threads_of_one_worker_take_turns(tmp_path):
    """As those of a Dask worker with ``--nthreads 3`` come to their tasks."""
    function, task = cloudpickle.dumps(in_its_turn), cloudpickle.dumps(tmp_path)
    with ThreadPoolExecutor(3) as threads:
        ends = [threads.submit(run_task, function, "digest", task, f"task {n}", Silent()) for n in range(6)]
    assert all(end.result().good and cloudpickle.loads(end.result().blob) for end in ends)


# -- processes that die ------------------------------------------------------------------------------------------------
def test_a_task_whose_process_was_killed_runs_again_and_nothing_is_done_twice_for_the_caller(tmp_path):
    ended, tasks = [], [(number, tmp_path / "killed") for number in range(5)]
    assert map_tasks(die_once, tasks, cores=2, done=lambda *end: ended.append(end)) == [0, 1, 2, 3, 4]
    assert (tmp_path / "killed").exists() and sorted(ended) == [(i, i) for i in range(5)]


def test_a_task_that_kills_its_process_each_time_is_given_up_alone():
    ended, errors = [], []

    def failed(task, error):
        errors.append((task, error))
        return "none"

    found = map_tasks(die, [0, 1, 2, 3], cores=2, done=lambda index, _: ended.append(index), failed=failed)
    assert found == [0, "none", 2, 3]
    ((task, error),) = errors
    assert task == 1 and isinstance(error, WorkerDied) and "cores=1" in str(error)
    assert str(error).startswith("task 2 of 4 (1): its process died each time")
    assert sorted(ended) == [0, 1, 2, 3] and ended[-1] == 1  # the others did not wait for it


# -- progress and stopping ---------------------------------------------------------------------------------------------
def half_way(task):
    report_progress(1, 2, {"figure": task})
    time.sleep(0.5)
    return should_stop()


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


def a_fit(task):
    data = bp.load_data("toy-curve")
    bp.fit(bp.MLP(hidden=(3,)), data, bp.Ensemble(members=2, epochs=20), progress=False, device="cpu")
    return should_stop()


def test_a_task_that_fits_reports_the_fits_progress():
    """Members in a fit in a task: a task in a task reports to the outer one, once each."""
    reports = []
    assert map_tasks(a_fit, [0, 1], cores=1, report=lambda *a: reports.append(a)) == [False, False]
    assert [r[0] for r in reports] == sorted(r[0] for r in reports)
    assert {0.25, 0.5, 1.5} <= {r[0] for r in reports} and reports[-1][:2] == (2, 2)


def test_a_bar_of_fractions(capsys):
    with progress_bar("fits", unit="fit") as report:
        report(0.1 + 0.2, 5)
        report(2.0, 5)
    shown = capsys.readouterr().err
    assert "2/5" in shown and "0000" not in shown


def until_asked(task):
    start = time.monotonic()
    while not should_stop():
        assert time.monotonic() - start < 30
        report_progress(0.1, 1)
        time.sleep(0.01)
    Path(task).touch()
    raise KeyboardInterrupt


class Enough(Exception):
    pass


@pytest.mark.parametrize("cores", [1, 2])
def test_a_watcher_stops_tasks_which_may_end_in_order(tmp_path, cores):
    tasks, shares = [tmp_path / name for name in ("a", "b", "c")], []

    def watch():
        if shares and shares[-1] > 0.1 * cores - 0.05:  # all are at it
            raise Enough

    with pytest.raises((Enough, KeyboardInterrupt)):  # the task's own, where it runs here
        map_tasks(until_asked, tasks, cores=cores, report=lambda done, *_: shares.append(done), watch=watch)
    assert [task.exists() for task in tasks] == [True, cores == 2, False]


def never_asks(task):
    time.sleep(60)


def test_tasks_that_do_not_ask_are_ended_after_some_seconds():
    start, reports = time.monotonic(), []
    with pytest.raises(Enough):
        map_tasks(never_asks, [0, 1], cores=2, grace=0.3, watch=lambda: reports.append(0) or _raise(Enough))
    assert time.monotonic() - start < 40 and len(reports) == 1


def _raise(error):
    raise error


CODE = """
import signal, time
from bnn_pyro.parallel.executor import executor
from bnn_pyro.parallel.map import map_tasks

def slow(task):
    time.sleep(0.5)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with executor({where!r}):
        map_tasks(slow, range(100), report=lambda *_: print("going", flush=True))
"""


@pytest.mark.parametrize("where", ["processes:2", "dask:2"])
def test_ctrl_c_ends_quietly_and_leaves_no_process(tmp_path, where):
    stopped_by_ctrl_c(CODE.format(where=where), tmp_path)


# -- workers of a cluster ----------------------------------------------------------------------------------------------
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
    other = rf"tcp://a:1 has torch 1.0 \(here {versions()['torch']}\): results may differ"
    with pytest.warns(UserWarning, match=other):
        check_workers(Workers(versions={**versions(), "torch": "1.0"}))
    with pytest.raises(UserError, match=r"worker tcp://a:1 cannot import bnn_pyro .*: install it there too"):
        check_workers(Workers(versions=ModuleNotFoundError("No module named 'bnn_pyro'")))


def test_workers_of_our_own_keep_their_memory():
    """Dask tells its workers to give it back in every step of a fit, which is then twice as long."""
    with executor("dask:1"):
        given = map_tasks(os.environ.get, ["MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS"])
    assert given == [None, "1"]
