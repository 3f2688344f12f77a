"""Tables of effective draws a second, from ``benchmarks/results/mcmc.json``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.mcmc.problems import TITLES
from benchmarks.mcmc.samplers import SAMPLERS
from benchmarks.provenance import RESULTS, Measurements, source, table

__all__ = ["TABLES"]

#: NumPyro with 1,000 + 1,000 transitions a chain, whatever its chains do; and with any.
SAME_BUDGET = ("numpyro-parallel", "numpyro-vectorized", "numpyro-sequential")
ANY_BUDGET = (*SAME_BUDGET, "numpyro", "numpyro-dense", "numpyro-long")
CHEES = ("chees-16", "chees-64", "chees-256")

Runs = dict[tuple[str, str], list[dict[str, Any]]]


def runs_of() -> Runs:
    """{(problem, sampler): all runs, of every seed}."""
    found: Runs = {}
    for line in Measurements(RESULTS / "mcmc.json", "speed").lines():
        found.setdefault((line["key"]["problem"], line["key"]["sampler"]), []).extend(line["runs"])
    return found


def median(runs: list[dict[str, Any]], name: str) -> float:
    """Of a figure, over the runs."""
    return statistics.median(run[name] for run in runs)


def speed_table() -> str:
    """Every sampler on every problem."""
    found, parts = runs_of(), []
    for problem, title in TITLES.items():
        head = [title, "chains × draws", "seconds", "effective draws, least (median)", "**a second**, least (median)",
                "R-hat, worst", "gradients a draw", "imports, s", "MB"]  # fmt: skip
        rows = []
        for sampler in SAMPLERS:
            if runs := found.get((problem, sampler)):
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
    return "\n\n".join([*parts, source(Measurements(RESULTS / "mcmc.json", "speed").lines())])


def best(found: Runs, problem: str, samplers: tuple[str, ...]) -> tuple[str, float, bool] | None:
    """(sampler, least effective draws a second, R-hat at most 1.01) of the fastest; a larger R-hat counts last."""
    rates = [
        (median(found[problem, s], "rhat_max") <= 1.01, median(found[problem, s], "ess_min_per_second"), s)
        for s in samplers
        if (problem, s) in found
    ]
    return max(rates)[::-1] if rates else None


def ratio_table() -> str:
    """The package's samplers beside Pyro's and NumPyro's."""
    found, rows = runs_of(), []
    for title, ours, theirs in (
        ("NUTS, one chain / Pyro NUTS", ("nuts",), ("pyro",)),
        ("NUTS, one chain / NumPyro NUTS, one chain", ("nuts",), ("numpyro",)),
        ("4 chains of NUTS / NumPyro, best way to run 4 × (1,000 + 1,000)", ("nuts-4",), SAME_BUDGET),
        ("ChEES / Pyro NUTS", CHEES, ("pyro",)),
        ("ChEES / NumPyro, best way to run 4 × (1,000 + 1,000)", CHEES, SAME_BUDGET),
        ("ChEES / NumPyro, best of everything tried", (*CHEES, "chees-long", "chees-wide"), ANY_BUDGET),
    ):
        cells = []
        for problem in TITLES:
            one, other = best(found, problem, ours), best(found, problem, theirs)
            if one is None or other is None:
                cells.append("–")
                continue
            sides = ((one, ours), (other, theirs))
            named = [s + "†" * (not fine) for (s, _, fine), among in sides if len(among) > 1 or not fine]
            cells.append(_rate(one[1] / other[1]) + (f" ({', '.join(named)})" if named else ""))
        rows.append([title, *cells])
    return table(["ratio of the least effective draws a second", *TITLES.values()], rows) + "\n\n† R-hat above 1.01."


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


TABLES: dict[str, Callable[[], str]] = {"mcmc ratios": ratio_table, "mcmc speed": speed_table}
