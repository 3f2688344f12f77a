"""Timing steps in turn, so that whatever else the machine does hits all contestants alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from speed.problem import Runner, step_time, wait_for

__all__ = ["Times", "ratio", "spread", "take_turns"]

#: {contestant: seconds a step, one number a round}
Times = dict[str, list[float]]


def seconds(runner: Runner, steps: int) -> float:
    """Seconds a step: the median of a block's steps, or on a GPU, where steps overlap, their mean.

    The median leaves out what a shared machine takes for others. A contestant may time its own block.
    """
    device, ticks = runner.problem.device, [0.0] * (steps + 1)
    if hasattr(runner.step, "seconds"):
        return runner.step.seconds(steps)
    wait_for(device)
    ticks[0] = time.perf_counter()
    for i in range(steps):
        runner.run(1)
        ticks[i + 1] = time.perf_counter()
    wait_for(device)
    ticks[-1] = time.perf_counter()
    return step_time(ticks, device)


def take_turns(
    runners: dict[str, Runner], times: Times, *, rounds: int, steps: int, block: float, report: Callable[[int], None]
) -> None:
    """Every round has one block of every contestant, in a new order; ``times`` is filled with whole rounds.

    A block is one step untimed, which brings the contestant's weights back into the caches, and then ``steps`` timed
    ones, or fewer where they would take more than ``block`` seconds.
    """
    lengths = {}
    order = random.Random(0)
    for name, runner in runners.items():
        with runner.at_work():
            if seconds(runner, 1) < block:  # the first step also makes parameters and optimiser state
                runner.run(1)
            lengths[name] = max(1, min(steps, int(block / seconds(runner, 1))))
    for i in range(rounds):
        names = list(runners)
        order.shuffle(names)
        found = {}
        for name in names:
            with runners[name].at_work():
                if lengths[name] > 1:
                    runners[name].run(1)
                found[name] = seconds(runners[name], lengths[name])
        for name, value in found.items():
            times.setdefault(name, []).append(value)
        report(i + 1)


def spread(values: list[float], digits: int = 4) -> dict[str, float]:
    """Median and quartiles over the rounds."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": round(middle, digits), "quartiles": [round(low, digits), round(high, digits)]}


def ratio(times: Times, numerator: str, denominator: str) -> dict[str, float] | None:
    """Ratio of two contestants' times: taken within every round, then the median and quartiles of those."""
    if not times.get(numerator) or not times.get(denominator):
        return None
    return spread([a / b for a, b in zip(times[numerator], times[denominator], strict=True)])
