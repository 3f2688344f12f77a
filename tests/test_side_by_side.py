"""Many tasks at once: the same results as one after the other, in order, and clean ends."""

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from dying import die, die_once
from programs import stopped_by_ctrl_c

import bnn_pyro as bp
from bnn_pyro.errors import UserError
from bnn_pyro.progress import progress_bar
from bnn_pyro.side_by_side import each, stopping, tell, usable_cores


def product(seed):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(400, 400, generator=g)
    return (a @ a).sum().item(), np.asarray(a[:5]), torch.get_num_threads(), os.getpid()


def slow_first(seed):
    time.sleep(0.4 if seed == 0 else 0.0)
    return seed


def refuse(task):
    if task == 3:
        raise UserError("three is refused")
    if task == 4:
        raise ValueError("four is an error")
    return task


def cores_here(_):
    return usable_cores()


def test_results_are_those_of_this_process_bit_for_bit():
    here, there = (each(product, range(6), cores=cores) for cores in (1, 2))
    for (a, b, threads, _), (c, d, others, _) in zip(here, there, strict=True):
        assert a == c and np.array_equal(b, d) and threads == others == 1
    assert {p for *_, p in here} == {os.getpid()} and os.getpid() not in {p for *_, p in there}


def test_results_come_in_the_order_of_the_tasks_and_are_reported():
    for cores in (1, 2):
        told = []
        assert each(slow_first, range(5), cores=cores, report=lambda *a: told.append(a)) == [0, 1, 2, 3, 4]  # noqa: B023
        assert told == [(i, 5, {}) for i in range(1, 6)]


def test_threads_come_back():
    before = torch.get_num_threads()
    each(slow_first, [1], cores=1)
    with pytest.raises(UserError):
        each(refuse, [3], cores=1)
    assert torch.get_num_threads() == before


def test_a_function_of_a_notebook_travels_by_value():
    base = 10
    assert each(lambda task: base + task, [1, 2, 3], cores=2) == [11, 12, 13]


@pytest.mark.parametrize("cores", [1, 2])
def test_an_error_names_its_task(cores):
    with pytest.raises(UserError, match=r"^task 2 of 2 \(3\): three is refused$"):
        each(refuse, [1, 3], cores=cores)
    with pytest.raises(ValueError, match="four") as error:
        each(refuse, [1, 2, 4], cores=cores)
    assert "in task 3 of 3 (4)" in error.value.__notes__


def test_a_process_that_was_killed_is_tried_again_and_nothing_is_done_twice_for_the_caller(tmp_path):
    ended = []
    tasks = [(number, tmp_path / "killed") for number in range(5)]
    assert each(die_once, tasks, cores=2, done=lambda index, result: ended.append((index, result))) == [0, 1, 2, 3, 4]
    assert (tmp_path / "killed").exists() and sorted(ended) == [(i, i) for i in range(5)]


def test_a_task_that_kills_its_process_each_time_is_given_up_alone():
    ended, errors = [], []

    def failed(task, error):
        errors.append((task, str(error)))
        return "none"

    def done(index, result):
        ended.append(index)

    assert each(die, [0, 1, 2, 3], cores=2, done=done, failed=failed) == [0, "none", 2, 3]
    ((task, error),) = errors
    assert task == 1 and error.startswith("task 2 of 4 (1): its process died each time") and "cores=1" in error
    assert sorted(ended) == [0, 1, 2, 3] and ended[-1] == 1  # the others did not wait for it
    assert each(slow_first, [1, 2], cores=2) == [1, 2]


@pytest.mark.parametrize("cores", [1, 2])
def test_what_stands_for_a_task_that_failed(cores):
    assert each(refuse, [1, 3, 2], cores=cores, failed=lambda task, error: (task, str(error))) == [
        1,
        (3, "task 2 of 3 (3): three is refused"),
        2,
    ]
    with pytest.raises(ValueError, match="four"):  # a fault of the program's is not the user's to collect
        each(refuse, [1, 4], cores=cores, failed=lambda task, error: None)


def half_way(task):
    tell(1, 2, {"figure": task})
    time.sleep(0.5)
    return stopping()


def test_a_task_tells_how_far_it_is():
    for cores, first in ((1, [(0.5, 2, {"figure": 7})]), (2, [(0.5, 2, {}), (1.0, 2, {})])):
        told = []
        each(half_way, [7, 8], cores=cores, report=lambda *a: told.append(a))  # noqa: B023
        assert told[0] in first and told[-1] == (2, 2, {})
        assert [t[0] for t in told] == sorted(t[0] for t in told)
    tell(1, 2)  # outside of a task, to nobody
    assert not stopping()


def a_fit(task):
    data = bp.load_data("toy-curve")
    bp.fit(bp.MLP(hidden=(3,)), data, bp.Ensemble(members=2, epochs=20), progress=False, device="cpu")
    return stopping()


def test_a_task_that_fits_tells_of_it():
    """Members in a fit in a task: a task in a task tells the outer one, once each."""
    told = []
    assert each(a_fit, [0, 1], cores=1, report=lambda *a: told.append(a)) == [False, False]
    assert [t[0] for t in told] == sorted(t[0] for t in told)
    assert {0.25, 0.5, 1.5} <= {t[0] for t in told} and told[-1][:2] == (2, 2)


def test_a_bar_of_fractions(capsys):
    with progress_bar("fits", unit="fit") as report:
        report(0.1 + 0.2, 5)
        report(2.0, 5)
    shown = capsys.readouterr().err
    assert "2/5" in shown and "0000" not in shown


def until_asked(task):
    start = time.monotonic()
    while not stopping():
        assert time.monotonic() - start < 30
        tell(0.1, 1)
        time.sleep(0.01)
    Path(task).touch()
    raise KeyboardInterrupt


def test_a_watcher_stops_tasks_which_may_end_in_order(tmp_path):
    class Enough(Exception):
        pass

    tasks, told = [tmp_path / name for name in ("a", "b", "c")], []

    def watch():
        if told and told[-1] > 0.15:  # both are at it
            raise Enough

    with pytest.raises(Enough):
        each(until_asked, tasks, cores=2, report=lambda done, *_: told.append(done), watch=watch)
    assert [task.exists() for task in tasks] == [True, True, False]


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
        each(odd, [task, task], cores=2)
    assert any(f"in task 1 of 2 ('{task}')" in note or "in task 2" in note for note in error.value.__notes__)


def warned(task):
    from bnn_pyro.inference import budget

    budget.announce(1.0, 1e6, 1)
    return task


def test_what_the_package_warns_of_is_said_here_and_once():
    with pytest.warns(UserWarning, match="this run will take about 278 hours") as said:
        assert each(warned, [1, 2, 3], cores=2) == [1, 2, 3]
    assert len(said) == 1


def test_nothing_to_do_and_what_is_refused():
    assert each(refuse, []) == []
    with pytest.raises(UserError, match="cores must be"):
        each(refuse, [1], cores=-1)


def test_one_of_several_processes_uses_one_core():
    assert usable_cores() >= 1 and multiprocessing.parent_process() is None
    assert each(cores_here, [0, 1], cores=2) == [1, 1]


CODE = """
import signal, sys, time
from bnn_pyro.side_by_side import each
signal.signal(signal.SIGINT, signal.default_int_handler)

def slow(task):
    time.sleep(1.0)

each(slow, range(100), cores=2, report=lambda *_: print("going", flush=True))
"""


def test_ctrl_c_ends_quietly_and_leaves_no_process(tmp_path):
    stopped_by_ctrl_c(CODE, tmp_path)
