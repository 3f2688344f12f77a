"""The tables of which posteriors are right, and of the stored reference posteriors."""

from __future__ import annotations

import json
from collections.abc import Callable

from benchmarks.provenance import RESULTS, table
from bnn_pyro.checks.reference import load_reference, references
from bnn_pyro.runs.check import overview

__all__ = ["TABLES"]


def overview_table(budget: str) -> str:
    """Variant × method × check, those of which every check was made; and what was run."""
    found = json.loads((RESULTS / f"checks_{budget}.json").read_text())
    frame = overview(found["subjects"])
    rows = [[name, *row] for name, row in zip(frame.index, frame.to_numpy().tolist(), strict=True)]
    facts = found["facts"]
    run = f"`{facts['command']}`; commit {facts['commit']}, {facts['machine']}, {facts['finished'][:10]}."
    return table(["fit", *frame.columns], [row for row in rows if "…" not in row]) + "\n\n" + run


def references_table() -> str:
    """Every stored reference posterior and the criteria that it met."""
    head = ["reference", "weights", "draws", "R-hat (split / of starts)", "least E-BFMI",
            "largest lag-1 autocorrelation", "divergences", "second run: largest shift (sd)", "minutes"]  # fmt: skip
    rows = []
    for name in references():
        about = load_reference(name).about
        found = {criterion: value for criterion, (value, _, _) in about["criteria"].items()}
        rows.append([
            about["title"], f"{about['weights']:,}", f"{about['draws']:,}",
            f"{found['rhat_split_max']:.4f} / {found['rhat_of_starts_max']:.4f}", f"{found['bfmi_min']:.2f}",
            f"{found['lag1_max']:.3f}", f"{found['divergences']:.0f}", f"{about['largest_shift_between_runs']:.2f}",
            f"{sum(run['seconds'] for run in about['runs'].values()) / 60:.0f}",
        ])  # fmt: skip
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "checks full": lambda: overview_table("full"),
    "checks quick": lambda: overview_table("quick"),
    "references": references_table,
}
