"""The tables of RESULTS.md that say which posteriors are right, from ``benchmarks/results/trust_full.json``."""

from __future__ import annotations

import json
from collections.abc import Callable

from result_cells import RESULTS

from bnn_pyro.checking.page import overview


def overview_table() -> str:
    """Variant × method × check, and what was run."""
    path = RESULTS / "trust_full.json"
    if not path.exists():
        return "Not measured yet: `python benchmarks/trust.py --budget full --out runs/check`."
    found = json.loads(path.read_text())
    head, rows = overview(found["subjects"])
    table = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
    facts = [subject["facts"] for subject in found["subjects"]]
    commits = ", ".join(dict.fromkeys(str(f["commit"]) for f in facts))
    run = f"`{found['command']}`; commit {commits}, {facts[-1]['machine']}, {facts[-1]['finished'][:10]}."
    return "\n".join(table) + "\n\n" + run


TRUST_TABLES: dict[str, Callable[[], str]] = {"trust": overview_table}
