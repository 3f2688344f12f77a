"""Many tasks at once: the same results as one after the other, in order, and clean ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from bnn_pyro.errors import UserError
from bnn_pyro.side_by_side import each, usable_cores


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


def die(task):
    if task == 1:
        os._exit(9)
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


def test_a_dead_process_is_one_sentence_and_the_next_call_works():
    with pytest.raises(UserError, match=r"a process of its own died.*cores=1"):
        each(die, [0, 1, 2], cores=2)
    assert each(slow_first, [1, 2], cores=2) == [1, 2]


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
    path = tmp_path / "long.py"
    path.write_text(CODE)
    started = subprocess.Popen(
        [sys.executable, path], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout.readline() == "going\n"
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, errors = started.communicate(timeout=60)
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
    deadline = time.monotonic() + 20
    while alive(started.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(started.pid)


def alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
