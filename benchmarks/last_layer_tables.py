"""The tables of docs/results about the last layer, from ``benchmarks/results``; written by ``write_results.py``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

from result_cells import RESULTS, Line, cell, committed

#: Recipe of ``benchmarks/last_layer.py`` -> how the tables name it.
LAST_LAYER = {
    "cnn": "CNN, point estimate",
    "svi": "SVI, mean-field",
    "svi-full": "SVI, full covariance",
    "laplace": "Laplace, full",
    "laplace-kron": "Laplace, Kronecker",
    "sghmc": "SGHMC",
    "sghmc-long": "SGHMC, 4,000 epochs",
    "nuts": "NUTS",
    "ensemble": "deep ensemble of the CNNs of 5 seeds",
}


def last_layer_lines(recipe: str, few: bool, file: str = "last_layer") -> list[Line]:
    """The lines of a recipe, one a seed (the latest of each), with few training images or all."""
    lines = committed(json.loads((RESULTS / f"{file}.json").read_text()))
    latest = {e["seed"]: e for e in lines if e["recipe"] == recipe and (e["rows"] <= 5000) == few}
    return [latest[seed] for seed in sorted(latest)]


def last_layer_table(few: bool) -> str:
    """Test metrics of the point estimate, of posteriors of its last layer, and of an ensemble."""
    rows = [
        "| posterior | seeds | error % | NLL | ECE (noise floor) | NLL minus the point estimate's (95 % interval, "
        "paired; the seeds' means) | KMNIST: H | KMNIST AUROC H / 1 − max p / MI | seconds |",
        "|---" * 9 + "|",
    ]
    for recipe, name in LAST_LAYER.items():
        lines = last_layer_lines(recipe, few)
        if not lines:
            continue
        scores = ("total_entropy", "max_prob", "mutual_information")
        auroc = (cell(lines, lambda m, s=s: m["kmnist"].get(s), "%.3f") for s in scores)
        gap = "–"
        if all("minus_point" in e["metrics"] for e in lines):
            gaps = [e["metrics"]["minus_point"]["nll"] for e in lines]
            value, low, high = (statistics.mean(one[k] for one in gaps) for k in range(3))
            gap = f"{value:+.4f} [{low:+.4f}, {high:+.4f}]".replace("-", "−")
        rows.append(
            f"| {name} | {', '.join(str(e['seed']) for e in lines)} "
            f"| {cell(lines, lambda m: 100 * m['error'], '%.2f')} "
            f"| {cell(lines, lambda m: m['nll'], '%.4f')} "
            f"| {cell(lines, lambda m: m['ece'], '%.4f')} ({cell(lines, lambda m: m['ece_floor'], '%.4f')}) | {gap} "
            f"| {cell(lines, lambda m: m['kmnist']['mean_entropy'], '%.2f')} | {' / '.join(auroc)} "
            f"| {statistics.mean(e['seconds'] for e in lines):.0f} |"
        )
    names = {e["commit"] for recipe in LAST_LAYER for e in last_layer_lines(recipe, few)}
    recipes = " ".join(recipe for recipe in LAST_LAYER if last_layer_lines(recipe, few))
    option = " --rows 1000" if few else ""
    return (
        "\n".join(rows)
        + f"\n\n`python benchmarks/last_layer.py {recipes}{option} --seed …`; commits {', '.join(sorted(names))}."
    )


def reference_table() -> str:
    """Distances of every posterior's predictions from those of NUTS, and R-hat where there are chains."""
    rows = [
        "| training images | posterior | agreement with NUTS % | total variation | test NLL "
        "| R-hat, worst (share below 1.01) | effective draws, least (median) |",
        "|---" * 7 + "|",
    ]
    for few in (False, True):
        for recipe, name in LAST_LAYER.items():
            lines = last_layer_lines(recipe, few, "last_layer_reference")
            if not lines:
                continue
            found = lines[0]["reference"]
            distances = f"{100 * found['agreement'][0]:.2f} | {found['total_variation'][0]:.4f}"
            if "agreement_floor" in found:
                floor = f"{100 * found['agreement_floor']:.2f} | {found['total_variation_floor']:.4f}"
                distances = " | ".join(f"halves: {v}" for v in floor.split(" | "))
            r_hat = (
                f"{found['rhat_worst']:.3f} ({100 * found['rhat_below_1.01']:.0f} %)" if "rhat_worst" in found else "–"
            )
            ess = f"{found['ess_least']:,.0f} ({found['ess_median']:,.0f})" if "ess_least" in found else "–"
            rows.append(f"| {lines[0]['rows']:,} | {name} | {distances} | {found['nll']:.4f} | {r_hat} | {ess} |")
    commits = {e["commit"] for e in json.loads((RESULTS / "last_layer_reference.json").read_text())}
    return (
        "\n".join(rows)
        + f"\n\n`python benchmarks/last_layer_reference.py --seed 0`; commits {', '.join(sorted(commits))}."
    )


LAST_LAYER_TABLES: dict[str, Callable[[], str]] = {
    "last layer": lambda: last_layer_table(few=False),
    "last layer reference": reference_table,
    "last layer few": lambda: last_layer_table(few=True),
}
