"""Tables of sweeps, from ``benchmarks/results/sweep_NAME.json``: per data set one row a recipe."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.provenance import RESULTS, table

__all__ = ["sweep_tables"]

#: Metric -> its heading, factor and format.
COLUMNS: dict[str, dict[str, tuple[str, float, str]]] = {
    "classification": {
        "error": ("error %", 100, ".2f"),
        "nll": ("NLL", 1, ".4f"),
        "ece": ("ECE", 1, ".4f"),
        "auroc": ("AUROC", 1, ".4f"),
    },
    "regression": {
        "rmse": ("RMSE", 1, ".3f"),
        "nll": ("NLL", 1, ".3f"),
        "crps": ("CRPS", 1, ".3f"),
        "coverage_95": ("95 % coverage", 100, ".1f"),
    },
}
#: Scores by which `evaluate --ood` ranks inputs.
OOD = {"total_entropy": "H", "max_prob": "1 − max p", "mutual_information": "MI"}


def sweep_tables() -> dict[str, Callable[[], str]]:
    """{"sweep NAME": its table} of every sweep that was kept."""
    paths = sorted(RESULTS.glob("sweep_*.json"))
    return {f"sweep {path.stem.removeprefix('sweep_')}": partial(sweep_table, path) for path in paths}


def sweep_table(path: Path) -> str:
    """One row a recipe: mean ± standard error over the fits, and seconds a fit; command, commit, machine and date."""
    held = json.loads(path.read_text())
    parts = [_data_table(on, [fit for fit in held["fits"] if fit["data"] == on["data"]]) for on in held["summary"]]
    facts = held["facts"]
    origin = f"`{facts['command']}`; commit {facts['commit']}, {facts['machine']}, {facts['finished'][:10]}."
    return "\n\n".join([*parts, origin])


def _data_table(on: dict[str, Any], fits: list[dict[str, Any]]) -> str:
    used = [name for name in COLUMNS[on["task"]] if any(name in row["metrics"] for row in on["recipes"].values())]
    columns = {name: COLUMNS[on["task"]][name] for name in used}
    outside = list(dict.fromkeys(
        key.removeprefix("ood_").removesuffix("_mean_entropy")
        for fit in fits for key in fit["metrics"] if key.startswith("ood_") and key.endswith("_mean_entropy")
    ))  # fmt: skip
    scores = " / ".join(OOD.values())
    head = [on["data"], "fits", *(heading for heading, _, _ in columns.values()), "seconds a fit"]
    rows = []
    for recipe, row in on["recipes"].items():
        cells = [_cell(row["metrics"].get(name), factor, form) for name, (_, factor, form) in columns.items()]
        seconds = f"{row['seconds']['value']:.0f}"
        own = [fit["metrics"] for fit in fits if fit["recipe"] == recipe]
        rows.append([recipe, str(row["finished"]), *cells, seconds, *(_ood(own, name) for name in outside)])
    return table([*head, *(f"{name}: AUROC {scores}" for name in outside)], rows)


def _cell(mean: dict[str, Any] | None, factor: float, form: str) -> str:
    if mean is None or mean["value"] is None:
        return "–"
    error = mean.get("error")
    return f"{factor * mean['value']:{form}}" + (f" ± {factor * error:{form}}" if error else "")


def _ood(metrics: list[dict[str, float]], name: str) -> str:
    """Means over the fits; a score that a recipe has not, such as MI of one set of weights, is a dash."""
    values = [[m[f"ood_{name}_{score}"] for m in metrics if m.get(f"ood_{name}_{score}") is not None] for score in OOD]
    return " / ".join(f"{statistics.mean(v):.3f}" if v else "–" for v in values)
