"""The table of what the program survived, from ``benchmarks/results/reliability.json``."""

from __future__ import annotations

import json
from collections.abc import Callable

from benchmarks.provenance import RESULTS, table

__all__ = ["TABLES"]


def reliability_table() -> str:
    """Cases and results of each part that was measured."""
    found = json.loads((RESULTS / "reliability.json").read_text())
    rows = []
    if fuzz := found.get("fuzz"):
        failed = f"{len(fuzz['failed'])} with a traceback, a changed file or code that ran"
        rows.append(["fuzz", "strange files, options and damaged runs", f"{fuzz['cases']:,}", failed])
    if kills := {k: v for k, v in found.get("kills", {}).items() if isinstance(v, dict) and "stopped" in v}:
        stopped, same = (sum(part[what] for part in kills.values()) for what in ("stopped", "same_result"))
        what = f"SIGKILL or Ctrl-C at a random moment, then resumed ({', '.join(kills)})"
        rows.append(["kills", what, f"{stopped}", f"{same} to the very same result, bit for bit"])
    if races := found.get("races"):
        refused = races["exit_codes"].get("[0, 2]", 0)
        whole = f"{refused} with one refused and one whole"
        rows.append(["races", "two runs begun at once in one folder", f"{races['pairs']}", whole])
    origin = {part: f"`{found[part]['command']}`; {found[part]['commit']}" for part, *_ in rows}
    cells = [[*row, origin[part]] for part, *row in rows]
    return table(["what happened", "times", "result", "command; commit"], cells)


TABLES: dict[str, Callable[[], str]] = {"reliability": reliability_table}
