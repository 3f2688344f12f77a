"""A large data set of several processes: loaded by one of every machine, in memory once, gone when they have ended."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sharing
import torch

from bnn_pyro.datasets import load_data
from bnn_pyro.datasets.dataset import PARTS
from bnn_pyro.datasets.together import load_together
from bnn_pyro.distributed import Ranks

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="memory is shared through /proc")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """({case: what each of two processes found}, the data set)."""
    folder = tmp_path_factory.mktemp("together")
    x = np.random.default_rng(0).standard_normal((2000, 1024), dtype=np.float32)
    np.savez(folder / "rows.npz", x=x, y=np.arange(len(x)) % 5)
    command = [sys.executable, sharing.__file__, folder, folder / "rows.npz"]
    subprocess.run(command, check=True, timeout=120)
    both = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]
    return {case: [results[case] for results in both] for case in both[0]}, load_data(folder / "rows.npz")


def alike(a, b):
    return a.schema == b.schema and a.split == b.split and all(torch.equal(getattr(a, p), getattr(b, p)) for p in PARTS)


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        ("large", [1, 0]),
        ("small", [1, 1]),
        ("a machine each", [1, 1]),
        ("elsewhere", [1, 1]),
        ("gone", [1, 1]),
        ("no cache", [1, 1]),
    ],
)
def test_every_process_has_the_data_set(found, case, calls):
    results, data = found
    assert [result["calls"] for result in results[case]] == calls
    for result in results[case]:
        assert alike(result["data"], data) and result["fingerprint"] == data.fingerprint
        assert all(getattr(result["data"], name).is_contiguous() for name in PARTS)


def test_a_large_set_is_in_memory_once(found):
    """Both have read all of it and hold no byte of their own."""
    results, data = found
    assert [result["own"] for result in results["large"]] == [0, 0]
    assert min(result["own"] for result in results["small"]) >= data.x_train.nbytes


def test_what_one_process_writes_the_other_does_not_see(found):
    results, data = found
    first, second = (result["data"].x_train for result in results["changed by one"])
    assert (first == 7).all() and torch.equal(second, data.x_train)


def test_no_file_has_a_name_at_any_time(found):
    """So that nothing is left behind by processes that are killed."""
    results, _ = found
    assert len(results["large"][0]["files"]) == 2
    assert not any(name for case in results.values() for result in case for names in result["files"] for name in names)


@pytest.mark.parametrize(
    ("case", "words"),
    [("no cache", "a file"), ("elsewhere", "/dev/zero is another file"), ("gone", "No such file or directory")],
)
def test_copies_are_told(found, case, words):
    (said,), nothing = (result["said"] for result in found[0][case])
    assert said.startswith("processes hold a copy of the data each") and words in said and not nothing


def test_nothing_is_said_where_nothing_is_wrong(found):
    assert not any(result["said"] for case in ("large", "small", "a machine each") for result in found[0][case])


@pytest.mark.parametrize(("case", "rank"), [("first fails", 0), ("second fails", 1)])
def test_an_error_of_one_is_that_of_all(found, case, rank):
    assert [result["error"] for result in found[0][case]] == [("Agreed", f"rank {rank} has no such file")] * 2


def test_a_process_alone_just_loads():
    data = load_data("toy-curve")
    assert load_together(Ranks(), lambda: data) is data
    assert all(getattr(data.to("cpu"), name) is getattr(data, name) for name in PARTS)  # and moves no row
