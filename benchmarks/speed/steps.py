"""A training step of every contestant, in one run: this package, plain PyTorch, Pyro alone, other packages' layers.

Steps are taken in turn, a block of each contestant a round, in a new order every round. Everybody has the same
synthetic inputs and batches (128 of 60,000 rows, or all of 100 in regression), leaky ReLU and fused Adam, and pays for
one forward and backward pass, one update and its own bookkeeping. A ratio is that of two blocks of one round.
"""

import gc
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.speed.peers import PEERS
from benchmarks.speed.plain import PLAIN
from benchmarks.speed.problem import MODULES, Contestant, Problem, Runner
from benchmarks.speed.through_pyro import THROUGH_PYRO
from benchmarks.speed.zoo import OURS, PACKAGE
from benchmarks.timing import Times, print_ratios, ratios, spread, take_turns
from bnn_pyro import isolated

__all__ = ["CONTESTANTS", "SIZES", "chosen", "problem", "time_steps"]

#: By name, in the order of the table.
CONTESTANTS: dict[str, Contestant] = {**PLAIN, **PACKAGE, **THROUGH_PYRO, **PEERS}
MODULE_PEERS = [name for name, who in PEERS.items() if who.modules]
SIZES = (*MODULES, "784-1024-1024-1024-10", "784-400-400-10", "1-32-1")
#: Seconds of a block, at most, but for one step.
BLOCK = 0.25
PAIRS = (
    (OURS, "deterministic"),
    ("mean-field", "deterministic"),
    ("variational-dropout", "deterministic"),
    ("my-network, weights", "deterministic"),
    ("my-network, rows", "deterministic"),
    (OURS, "plain torch"),
    ("Pyro AutoNormal", "mean-field"),
    *(("my-network, weights", peer) for peer in MODULE_PEERS),
)


def problem(sizes: str, device: torch.device) -> Problem:
    """Batches of 128 of 60,000 rows, or 100 rows at once where the network is a regression."""
    if sizes in MODULES:
        return Problem(sizes, 60_000, 128, device)
    widths = tuple(map(int, sizes.split("-")))
    rows, batch = (100, 100) if widths[-1] == 1 else (60_000, 128)
    return Problem(widths, rows, batch, device)


def chosen(only: Sequence[str], sizes: str) -> list[str]:
    """Contestants that are installed, take this network, and are named, by any part of their names."""
    able = [name for name, who in CONTESTANTS.items() if not who.absent and (who.modules or sizes not in MODULES)]
    return [name for name in able if not only or any(text in name for text in only)]


def time_steps(task: Problem, names: Sequence[str], rounds: int, steps: int, result: dict[str, Any]) -> None:
    """Fill ``result`` with rounds, ms and ratios (spreads), failed {contestant: error}; interrupts keep rounds."""
    runners, failed, times = {}, {}, Times()
    with warnings.catch_warnings(), isolated(0):
        warnings.simplefilter("ignore")  # the peers', and Pyro's of torch.jit
        for name in names:
            try:
                runners[name] = Runner(CONTESTANTS[name], task)
                runners[name].seconds(1)
            except Exception as error:  # other people's code: one that fails must not end the run
                runners.pop(name, None)
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        blocks = {}
        for name, runner in runners.items():
            blocks[name] = partial(runner.seconds, max(1, min(steps, int(BLOCK / runner.seconds(1)))))
        gc.collect()
        gc.freeze()  # many contestants' modules would make every collection dearer than it is for one alone
        try:
            take_turns(blocks, rounds, times, task.name)
        finally:
            gc.unfreeze()
            result |= {
                "rounds": len(next(iter(times.values()), [])),
                "ms": {name: spread([1000 * v for v in values]) for name, values in times.items()},
                "ratios": ratios(times, (*PAIRS, *((OURS, peer) for peer in PEERS))),
                "failed": failed,
            }
            _print(task.name, result)


def _print(sizes: str, result: dict[str, Any]) -> None:
    floor = result["ms"].get("deterministic", {}).get("median")
    print(f"\n{sizes}: a training step, median of {result['rounds']} rounds (quartiles)")
    for name, value in result["ms"].items():
        low, high = value["quartiles"]
        times = f"{value['median'] / floor:6.2f} × deterministic" if floor else ""
        print(f"  {name:28} {value['median']:9.3f} ms   ({low:.3f} to {high:.3f})   {times}")
    for name, error in result["failed"].items():
        print(f"  {name:28} failed: {error}")
    print_ratios(result["ratios"])
