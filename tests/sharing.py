"""What two processes do with one data set, for tests/test_together.py: ``python tests/sharing.py FOLDER ARCHIVE``.

It forks both, so that the imports are paid for once; each writes what it found to FOLDER.
"""

import os
import socket
import sys
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bnn_pyro import distributed as ranks
from bnn_pyro.datasets import load_data, together
from bnn_pyro.errors import UserError


def own(x):
    """Bytes, of the part of memory that x is in, of which this process has a copy of its own."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            start, end = (int(place, 16) for place in first.split("-"))
            inside = start <= x.data_ptr() < end
        elif inside and first == "Anonymous:":
            return 1024 * int(rest.split()[0])
    raise AssertionError("x is nowhere")


def loaded(here, path, large=0, broken=(), **changed):
    """What ``load_together`` made: how often this process loaded, its rows, what it said.

    broken: ranks whose load fails    changed: functions of together.py to replace
    """
    calls = []

    def load():
        calls.append(here.rank)
        if here.rank in broken:
            raise UserError(f"rank {here.rank} has no such file")
        return load_data(path)

    cache = together.cache_root()
    found = {"error": None, "files": []}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr(together, "LARGE", large)
        for name, function in changed.items():
            patch.setattr(together, name, function)
        mapped = together._map
        patch.setattr(together, "_map", lambda laid: found["files"].append(os.listdir(cache)) or mapped(laid))
        try:
            data = found["data"] = together.load_together(here, load)
            found["fingerprint"] = data.fingerprint  # reads every training row
            found["own"] = own(data.x_train)
        except UserError as error:
            found["error"] = type(error).__name__, str(error)
    if cache.is_dir():
        found["files"].append(os.listdir(cache))
    return found | {"calls": len(calls), "said": [str(warning.message) for warning in said]}


def elsewhere(laid):
    """As of a process of that number in another container."""
    return laid._replace(path="/dev/zero")


def tasks(here, folder, path):
    load_data(path)  # what is imported on the way
    yield "large", loaded(here, path)
    yield "small", loaded(here, path, large=2**40)
    lay = together._lay
    yield "elsewhere", loaded(here, path, _lay=lambda *given: elsewhere(lay(*given)))
    yield "gone", loaded(here, path, _lay=lambda *given: lay(*given)._replace(path="/proc/self/fd/none"))
    yield "first fails", loaded(here, path, broken=[0])
    yield "second fails", loaded(here, path, large=2**40, broken=[1])
    yield "a machine each", loaded(replace(here, local=0), path)
    shared = loaded(here, path)
    if here.rank == 0:
        shared["data"].x_train.fill_(7.0)
    here.gather(None)
    yield "changed by one", shared
    (folder / "a file").touch()
    os.environ["BNN_PYRO_CACHE"] = str(folder / "a file" / "cache")
    yield "no cache", loaded(here, path)


def main(folder, path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "BNN_PYRO_CACHE": str(folder / "cache")}
    torch.set_num_threads(1)
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with ranks.joined() as here:
                    torch.save(dict(tasks(here, folder, path)), folder / f"rank-{rank}.pt")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
