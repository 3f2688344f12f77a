"""Tables of effective draws a second, from ``benchmarks/results/mcmc.json``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.mcmc.problems import TITLES
from benchmarks.mcmc.samplers import SAMPLERS
from benchmarks.provenance import RESULTS, Measurements, source, table

__all__ = ["TABLES"]


def median(runs: list[dict[str, Any]], name: str) -> float:
    """Of a figure, over the runs."""
    return statistics.median(run[name] for run in runs)


def speed_table() -> str:
    """Every sampler on every problem."""
    lines, parts = Measurements(RESULTS / "mcmc.json", "speed").lines(), []
    for problem, title in TITLES.items():
        head = [title, "chains × draws", "seconds", "effective draws, least (median)", "**a second**, least (median)",
                "R-hat, worst", "gradients a draw", "imports, s", "MB"]  # fmt: skip
        rows = []
        for sampler in SAMPLERS:
            own = [line for line in lines if (line["key"]["problem"], line["key"]["sampler"]) == (problem, sampler)]
            if runs := [run for line in own for run in line["runs"]]:  # of every seed
                first = runs[0]
                low, high = (_rate(median(runs, f"ess_{n}_per_second")) for n in ("min", "median"))
                rows.append([
                    f"{SAMPLERS[sampler].title} (`{sampler}`)",
                    f"{first['chains']} × {first['draws']:,}",
                    f"{median(runs, 'seconds'):.1f}",
                    f"{median(runs, 'ess_min'):,.0f} ({median(runs, 'ess_median'):,.0f})",
                    f"**{low}** ({high})",
                    f"{median(runs, 'rhat_max'):.3f}{' n' if first['rhat'] == 'nested' else ''}",
                    f"{first['gradients'] / (first['chains'] * first['draws']):,.0f}" if first["gradients"] else "–",
                    f"{median(runs, 'import_seconds'):.1f}",
                    f"{statistics.median(r['memory'] - r['memory_before'] for r in runs) / 1e6:,.0f}",
                ])  # fmt: skip
        parts.append(table(head, rows))
    return "\n\n".join([*parts, source(lines)])


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


TABLES: dict[str, Callable[[], str]] = {"mcmc speed": speed_table}
