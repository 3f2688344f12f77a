"""Tables of speed, from ``benchmarks/results/speed.json``: one for each part that was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from benchmarks.provenance import RESULTS, table
from benchmarks.speed.fits import level_of, seconds_to

__all__ = ["TABLES"]


def steps_table() -> str:
    """A training step as a multiple of the deterministic network's, and the ratios."""
    found = _part("steps")
    networks = found.get("networks", {})
    times = {name: None for of in networks.values() for name in of["ms"]}
    rows = []
    for name in times:
        cells = []
        for of in networks.values():
            value, floor = of["ms"].get(name), of["ms"]["deterministic"]["median"]
            cells.append(f"{value['median']:.2f} ms, {value['median'] / floor:.2f}" if value else "–")
        rows.append([name, *cells])
    names = {name: None for of in networks.values() for name in of["ratios"]}
    ratios = [[name, *(_spread(of["ratios"].get(name)) for of in networks.values())] for name in names]
    parts = (table(["a training step", *networks], rows), table(["ratio, median (quartiles)", *networks], ratios))
    return "\n\n".join([*parts, _origin(found)])


def main_table() -> str:
    """The main figures, beside those of another checkout."""
    found = _part("main")
    figures = dict(found.get("figures", {}))
    against = figures.pop("against", None)
    rows = [
        [name, *(f"{of[k]['median']:.4g}" if k in of else "–" for k in ("new", "old")), _spread(of.get("ratio"))]
        for name, of in figures.items()
    ]
    head = ["seconds", "this checkout", f"commit {against}" if against else "–", "ratio, median (quartiles)"]
    return table(head, rows) + "\n\n" + _origin(found)


def fits_table() -> str:
    """CPU seconds to the levels that all contestants reach, and this package's share of each other's."""
    found, fits = _part("fits"), {}
    for name, course in found.get("fits", {}).items():
        fits.setdefault(name.rpartition(", 0")[0] or name, []).append(course)
    levels = [level_of(fits, i) for i in (1, 2)] if fits else []
    times = {name: [seconds_to(courses, i + 1, levels[i]) for i in (0, 1)] for name, courses in fits.items()}
    rows, here = [], [name for name in fits if name.startswith("my-net")]
    for name, courses in fits.items():
        lines = [line for course in courses for line in course]
        best = [f"{max(line[1] for line in lines):.2f}", f"{min(line[2] for line in lines):.4f}"]
        shares = [f"{times[own][i] / times[name][i]:.2f}" for i in (0, 1) for own in here]
        rows.append([name, *best, *(f"{t:.0f}" for t in times[name]), *shares])
    head = ["a fit", "highest ELBO a row", "lowest NLL", f"CPU seconds to {levels[0]:.2f}", f"to {-levels[1]:.4f}"]
    head += [f"{what}: {way} / this" for what in ("ELBO", "NLL") for way in (name.rpartition(" ")[2] for name in here)]
    return table(head, rows) + "\n\n" + _origin(found)


TABLES: dict[str, Callable[[], str]] = {
    "speed fits": fits_table,
    "speed main": main_table,
    "speed steps": steps_table,
}


def _part(name: str) -> dict[str, Any]:
    path = RESULTS / "speed.json"
    return json.loads(path.read_text()).get(name, {}) if path.exists() else {}


def _spread(value: dict[str, Any] | None) -> str:
    return f"{value['median']:.2f} ({value['quartiles'][0]:.2f} to {value['quartiles'][1]:.2f})" if value else "–"


def _origin(found: dict[str, Any]) -> str:
    if not found:
        return "Not measured yet."
    machine = f"{found['machine']}, {found['threads']} threads, {found['date'][:10]}"
    return f"`{found['command']}`; commit {found['commit']}; {machine}."
