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
    """CPU seconds to the best ELBO and NLL that a package and this one both reach, and the ratio of these."""
    found, rows, fits = _part("fits"), [], {}
    for name, course in found.get("fits", {}).items():
        fits.setdefault(name.partition("; ")[0], []).append(course)
    here = {name: fits.pop(name) for name in list(fits) if name.startswith("my-net")}
    for name, courses in fits.items():
        for column, what in ((1, "ELBO a row"), (2, "NLL")):
            level = level_of({name: courses, **here}, column)
            own, *ours = (seconds_to(one, column, level) for one in (courses, *here.values()))
            cells = [f"{what} {level if column == 1 else -level:.4g}", f"{own:.0f}"]
            rows.append([name, *cells, *(f"{seconds:.0f}, {seconds / own:.2f}" for seconds in ours)])
    unit = "CPU seconds" if found.get("device") == "cpu" else "seconds"
    head = ["package", "to", unit, *(f"{name}: seconds, ratio" for name in here)]
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
