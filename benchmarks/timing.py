"""Times taken in turn, so that whatever else the machine does meets all contestants alike; and the clock of a fit."""

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any

__all__ = ["Enough", "Times", "clocked", "print_ratios", "ratio", "spread", "stopwatch", "take_turns"]

#: {contestant: seconds, one number a round}
Times = dict[str, list[float]]


def take_turns(contestants: Mapping[str, Callable[[], float]], rounds: int, times: Times, title: str = "") -> None:
    """Run every contestant once a round, in a new order; ``times`` takes whole rounds alone, also at an interrupt."""
    order, start = random.Random(0), time.perf_counter()
    for done in range(rounds):
        names = list(contestants)
        order.shuffle(names)
        round_times = {}
        for name in names:
            clock = f"{time.perf_counter() - start:.0f} s"
            print(f"\r  {title} round {done + 1} of {rounds}, {clock}: {name:40}", end="", file=sys.stderr, flush=True)
            round_times[name] = contestants[name]()
        for name in contestants:
            times.setdefault(name, []).append(round_times[name])
    print(file=sys.stderr)


def stopwatch(run: Callable[[], object], units: float = 1) -> Callable[[], float]:
    """What calls ``run`` and returns its seconds, divided by ``units``."""

    def timed() -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) / units

    return timed


def spread(values: list[float], digits: int = 4) -> dict[str, Any]:
    """Median and quartiles over the rounds."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": round(middle, digits), "quartiles": [round(low, digits), round(high, digits)]}


def ratio(times: Times, numerator: str, denominator: str) -> dict[str, Any] | None:
    """Ratio of two contestants' times: taken within every round, then median and quartiles of those."""
    if not times.get(numerator) or not times.get(denominator):
        return None
    return spread([a / b for a, b in zip(times[numerator], times[denominator], strict=True)])


def ratios(times: Times, pairs: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """{"a / b": ratio} of the pairs that were measured."""
    found = {f"{a} / {b}": ratio(times, a, b) for a, b in pairs}
    return {what: value for what, value in found.items() if value is not None}


def print_ratios(ratios: Mapping[str, Mapping[str, Any]]) -> None:
    """A line each: median (quartiles)."""
    for what, value in ratios.items():
        low, high = value["quartiles"]
        print(f"  {what:56} {value['median']:8.3f}   ({low:.3f} to {high:.3f})")


# -- a fit -------------------------------------------------------------------------------------------------------------
class Enough(Exception):
    """Raised in the middle of a fit that has been timed."""


class Clocked:
    """A method that notes when it began and when each epoch ended, and stops early; made by :func:`clocked`."""

    began: list[float]
    ticks: list[float]
    seconds: float
    epochs_least: int

    def run(self, model: Any, guide: Any, data: Any, *, report: Any = None, **rest: Any) -> Any:
        """The method's own, with a report that notes the time."""
        self.began.append(time.perf_counter())
        if self.epochs_least == 0:
            raise Enough

        def tick(done: int, of: int, figures: object = None) -> None:
            self.ticks.append(time.perf_counter())
            if len(self.ticks) >= self.epochs_least and self.ticks[-1] - self.ticks[0] >= self.seconds:
                raise Enough

        return super().run(model, guide, data, report=tick, **rest)

    def epoch_seconds(self) -> list[float]:
        """Of every epoch but the first, which also makes the optimiser's state."""
        return [b - a for a, b in pairwise(self.ticks)]


def clocked(method: Any, seconds: float = math.inf, epochs_least: int = 4) -> Any:
    """The method; raises ``Enough`` after ``epochs_least`` epochs and ``seconds`` since the first (0: before it)."""
    own = {"began": [], "ticks": [], "seconds": seconds, "epochs_least": epochs_least}
    kind = type("Timed" + type(method).__name__, (Clocked, type(method)), own)
    return kind(**{f.name: getattr(method, f.name) for f in fields(method)})
