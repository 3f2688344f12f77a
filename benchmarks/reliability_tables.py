"""The table of docs/results that says what the program took, from ``benchmarks/results/reliability.json``."""

from __future__ import annotations

import json
from collections.abc import Callable

from result_cells import RESULTS, committed


def reliability_table() -> str:
    """Cases and results of each part."""
    found = json.loads((RESULTS / "reliability.json").read_text())
    kills = {name: part for name, part in found["kills"].items() if isinstance(part, dict) and "stopped" in part}
    stopped, same = (sum(part[what] for part in kills.values()) for what in ("stopped", "same_result"))
    threads = [part for part in found["threads"].values() if isinstance(part, dict) and "within" in part]
    largest = max(part["largest_difference_of_probabilities"] for part in threads)
    refused = sum(count for codes, count in found["races"]["exit_codes"].items() if codes == "[0, 2]")
    lines = {
        "strange files, options and damaged runs": (
            "fuzz",
            f"{found['fuzz']['cases']:,}",
            f"{len(found['fuzz']['failed'])} with a traceback, a changed file or code that ran",
        ),
        f"SIGKILL or Ctrl-C at a random moment, then resumed ({', '.join(kills)})": (
            "kills",
            f"{stopped}",
            f"{same} to the very same result, bit for bit",
        ),
        "two runs begun at once in one folder": (
            "races",
            f"{found['races']['pairs']}",
            f"{refused} with one refused and one whole",
        ),
        "the same seed on one thread and on two": (
            "threads",
            f"{len(threads)}",
            f"probabilities differ by {largest:.1g} at most (stated: {found['threads']['tolerance']:g})",
        ),
    }
    rows = ["| what happened | times | result | command; commit |", "|---|---|---|---|"]
    for what, (part, times, result) in lines.items():
        for run in committed([found[part]]):
            rows.append(f"| {what} | {times} | {result} | `{run['command']}`; {run['commit']} |")
    return "\n".join(rows)


RELIABILITY_TABLES: dict[str, Callable[[], str]] = {"reliability": reliability_table}
