"""Tables of what grows how, and of what processes bring, from ``benchmarks/results/scaling.json``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.provenance import RESULTS, Measurements, source, table
from benchmarks.scaling.growth import SWEEPS
from benchmarks.scaling.processes import BATCHES, FITS, ways
from benchmarks.scaling.subjects import SUBJECTS

__all__ = ["TABLES", "best", "exponent"]

#: The size that grows -> how it is written.
GROWS = {"width": "weights P", "batch": "batch B", "rows": "rows N", "classes": "classes K", "inputs": "features D",
         "chains": "chains C", "draws": "draws S", "points": "points"}  # fmt: skip


def best(line: dict[str, Any], figure: str, most: bool = False) -> float:
    """The least of a figure over the runs of a measurement: what others do on the machine only adds to it."""
    return (max if most else min)(run[figure] for run in line["runs"])


def exponent(x: list[float], y: list[float]) -> float:
    """Of the power law through the last two points."""
    return math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])


def grown(lines: list[dict[str, Any]], grows: str) -> list[float]:
    """The size that grows; weights in place of widths."""
    sizes = (replace(SUBJECTS[k["subject"]].sizes, **k["fixed"], **{k["grows"]: k["value"]})
             for k in (line["key"] for line in lines))  # fmt: skip
    return [s.weights if grows == "width" else getattr(s, grows) for s in sizes]


def sweep_lines(part: list[dict], subject: str, grows: str, values: tuple[int, ...], fixed: dict) -> list[dict]:
    """The measurements of a sweep, in its order."""
    found = [_line(part, subject=subject, grows=grows, value=value, fixed=fixed) for value in values]
    return [line for line in found if line is not None]


def growth_table() -> str:
    """Seconds and memory of every sweep, and the power of the last factor."""
    growth, asked = _part("growth"), _part("asked")
    head = ["what", "grows", "from … to", "ms of a", "…", "power", "MB, resident", "asked for"]
    rows = []
    for sweep in SWEEPS:
        subject, grows, _, fixed = sweep
        lines, bytes_asked = sweep_lines(growth, *sweep), sweep_lines(asked, *sweep)
        if len(lines) < 2:
            continue
        x, seconds = grown(lines, grows), [best(line, "seconds") for line in lines]
        also = ", ".join(f"{k} {v}" for k, v in fixed.items() if k != "rows")
        rows.append([
            SUBJECTS[subject].title + (f" ({also})" if also else ""),
            GROWS[grows], _each(_number(v) for v in x), SUBJECTS[subject].unit, _each(_ms(s) for s in seconds),
            f"{exponent(x, seconds):.2f}", _each(_mb(best(line, "anonymous")) for line in lines),
            _each(_mb(best(line, "anonymous")) for line in bytes_asked),
        ])  # fmt: skip
    return table(head, rows) + "\n\n" + source(growth)


def processes_table() -> str:
    """Rows a second of one fit, one process and several."""
    part, rows = _part("processes"), []
    count = max((line["key"]["processes"] for line in part), default=2)
    head = ["rows a second", "batch", "1 process, 1 thread", f"1 process, {count} threads",
            f"{count} processes, 1 thread each", "to 1 thread", f"to {count} threads",
            "MB, 1 process", f"MB, each of {count}"]  # fmt: skip
    for name, fitted in FITS.items():
        for batch in BATCHES:
            lines = [_line(part, fit=name, batch=batch, **vars(way), device="cpu") for way in ways(count)]
            if None in lines:
                continue
            one, threads, several = (best(line, "rows_per_second", most=True) for line in lines)
            speeds = [f"{speed:,.0f}" for speed in (one, threads, several)]
            ratios, memory = (several / one, several / threads), (best(lines[i], "memory") for i in (0, 2))
            rows.append([fitted.title, f"{batch:,}", *speeds, *(f"{r:.2f}" for r in ratios), *map(_mb, memory)])
    return table(head, rows) + "\n\n" + source(part)


TABLES: dict[str, Callable[[], str]] = {
    "scaling growth": growth_table,
    "scaling processes": processes_table,
}


def _part(name: str) -> list[dict[str, Any]]:
    return Measurements(RESULTS / "scaling.json", name).lines()


def _line(part: list[dict], **key: object) -> dict | None:
    return next((one for one in part if one["key"] == key), None)


def _each(cells: object) -> str:
    return " · ".join(cells) or "–"


def _number(value: float) -> str:
    return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value:,.0f}" if value < 1e5 else f"{value / 1e3:.0f} k"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def _mb(value: float) -> str:
    return f"{value / 1e6:,.0f}" if value >= 1e7 else f"{value / 1e6:.1f}"
