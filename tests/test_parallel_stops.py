"""Tasks in processes report, are asked to end, fail, or are ended; Ctrl-C leaves no process behind."""

import time
from functools import partial

import pytest
from plain_tasks import half_way, stopped_by_ctrl_c, until_asked

from bnn_pyro.errors import UserError
from bnn_pyro.parallel.map import map_tasks
from bnn_pyro.progress import report_progress, should_stop


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


@pytest.mark.parametrize("when", ["asked to end", "at work"])
def test_the_error_of_a_task_is_raised_once_the_others_have_ended_in_order(tmp_path, when):
    """Of one that fails as it ends after Ctrl-C too: what it was to save is not there."""
    tasks, shares = [tmp_path / "fails", tmp_path / "b"], []

    def watch():
        if when == "asked to end" and shares and shares[-1] > 0.15:
            raise KeyboardInterrupt

    function = partial(until_asked, fails=when)
    with pytest.raises((UserError, KeyboardInterrupt), match=r"^task 1 of 2 .*: no space left"):
        map_tasks(function, tasks, cores=2, report=lambda done, *_: shares.append(done), watch=watch)
    assert [task.exists() for task in tasks] == [when == "asked to end", True]


def test_tasks_that_do_not_ask_are_ended_after_some_seconds():
    start, looks = time.monotonic(), []

    def watch():
        looks.append(0)
        raise Enough

    with pytest.raises(Enough):
        map_tasks(time.sleep, [60, 60], cores=2, grace=0.3, watch=watch)
    assert time.monotonic() - start < 40 and len(looks) == 1


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
    stopped_by_ctrl_c(CODE, tmp_path)
