"""The tables of docs/results that say which posteriors are right, from ``trust_full.json`` and ``trust_quick.json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from result_cells import RESULTS

from bnn_pyro.runs.check_page import overview

REFERENCES = Path(__file__).parents[1] / "bnn_pyro/checks/references"


def overview_table(budget: str) -> str:
    """Variant × method × check, and what was run."""
    path = RESULTS / f"trust_{budget}.json"
    if not path.exists():
        return f"Not measured yet: `python benchmarks/trust.py --budget {budget} --out FOLDER`."
    found = json.loads(path.read_text())
    head, rows = overview(found["subjects"])
    rows = [row for row in rows if "…" not in row]  # a check of it is still to be made
    table = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
    facts = [subject["facts"] for subject in found["subjects"]]
    commits = ", ".join(dict.fromkeys(str(f["commit"]) for f in facts))
    run = f"`{found['command']}`; commit {commits}, {facts[-1]['machine']}, {facts[-1]['finished'][:10]}."
    return "\n".join(table) + "\n\n" + run


def references_table() -> str:
    """Every stored reference posterior and the bar that it was held to."""
    rows = [
        "| reference | weights | draws | R-hat (split / of starts) | least E-BFMI | largest lag-1 autocorrelation "
        "| divergences | second run: largest shift (sd) | minutes |",
        "|---" * 9 + "|",
    ]
    for path in sorted(REFERENCES.glob("*.json")):
        about = json.loads(path.read_text())
        found = {name: value for name, (value, _, _) in about["criteria"].items()}
        minutes = sum(run["seconds"] for run in about["runs"].values()) / 60
        rows.append(
            f"| {about['title']} | {about['weights']:,} | {about['draws']:,} | {found['rhat_split_max']:.4f} / "
            f"{found['rhat_of_starts_max']:.4f} | {found['bfmi_min']:.2f} | {found['lag1_max']:.3f} "
            f"| {found['divergences']:.0f} | {about['largest_shift_between_runs']:.2f} | {minutes:.0f} |"
        )
    return "\n".join(rows)


TRUST_TABLES: dict[str, Callable[[], str]] = {
    "trust full": lambda: overview_table("full"),
    "trust quick": lambda: overview_table("quick"),
    "references": references_table,
}
