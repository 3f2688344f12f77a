"""The tables of docs/results about Markov chains, from ``benchmarks/results``; written by ``write_results.py``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.stats import norm

__all__ = ["MCMC_TABLES"]

RESULTS = Path(__file__).parent / "results"
PROBLEMS = {
    "breast-cancer": "breast-cancer 2-5-5-1",
    "toy-curve": "toy-curve 1-32-1",
    "logistic": "logistic regression, 30 features",
}
#: Sampler -> how the tables name it.
SAMPLERS = {
    "pyro": "Pyro NUTS",
    "pyro-jit": "Pyro NUTS, `jit_compile`",
    "numpyro": "NumPyro NUTS",
    "numpyro-sequential": "NumPyro NUTS, sequential",
    "numpyro-vectorized": "NumPyro NUTS, vectorized",
    "numpyro-parallel": "NumPyro NUTS, parallel",
    "numpyro-dense": "NumPyro NUTS, parallel, dense mass",
    "numpyro-long": "NumPyro NUTS, parallel, long",
    "numpyro-cached": "NumPyro NUTS, parallel, compiled before",
    "nuts": "bnn_pyro NUTS",
    "nuts-4": "bnn_pyro NUTS",
    "chees-16": "bnn_pyro ChEES",
    "chees-64": "bnn_pyro ChEES",
    "chees-256": "bnn_pyro ChEES",
    "chees-long": "bnn_pyro ChEES, long",
    "chees-wide": "bnn_pyro ChEES, long",
}
#: NumPyro with 1,000 + 1,000 transitions a chain, whatever its chains do.
SAME_BUDGET = ("numpyro-parallel", "numpyro-vectorized", "numpyro-sequential")
ANY_BUDGET = (*SAME_BUDGET, "numpyro", "numpyro-dense", "numpyro-long", "numpyro-cached")
CHEES = ("chees-16", "chees-64", "chees-256")
METHODS = {
    "svi": "mean-field SVI, as tuned",
    "svi-converged": "mean-field SVI, converged",
    "hmc": "HMC",
    "nuts": "NUTS",
    "chees": "ChEES",
}
AREAS = {"among": "grid, among the training rows", "beyond": "grid, beyond them", "rows": "test rows"}
#: Below so many effective draws, the standard error of a mean is not known well enough for a z-test.
ENOUGH = 100


def read(name: str) -> list[dict]:
    """The lines of a results file; none where there is no file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def speed_lines() -> dict[tuple[str, str], list[dict]]:
    """{(problem, sampler): a line a seed}."""
    found: dict[tuple[str, str], list[dict]] = {}
    for line in read("mcmc_speed"):
        found.setdefault((line["problem"], line["sampler"]), []).append(line)
    return found


def median(lines: list[dict], name: str) -> float:
    """Over the seeds."""
    return statistics.median(line[name] for line in lines)


def speed_table() -> str:
    """Every sampler on every problem."""
    found, parts = speed_lines(), []
    for problem, title in PROBLEMS.items():
        limit, zs = agreement(found, problem)
        rows = [
            f"| {title} | chains × (warm-up + draws) | seconds | effective draws, least (median) "
            "| **a second**, least (median) | R-hat, worst | gradients a draw | imports, s | MB | worst \\|z\\| |",
            "|---" * 10 + "|",
        ]
        for sampler, name in SAMPLERS.items():
            lines = found.get((problem, sampler))
            if lines:
                cells = [name, budget(lines[0]), seeds(lines, "seconds", 1)]
                cells.append(f"{median(lines, 'ess_min'):,.0f} ({median(lines, 'ess_median'):,.0f})")
                cells.append(
                    f"**{rate(median(lines, 'ess_min_per_second'))}** ({rate(median(lines, 'ess_median_per_second'))})"
                )
                cells.append(f"{median(lines, 'rhat_max'):.3f}{' n' if lines[0]['rhat'] == 'nested' else ''}")
                cells.append(f"{lines[0]['gradients'] / (lines[0]['chains'] * lines[0]['draws']):,.0f}")
                cells.append(f"{median(lines, 'import_seconds'):.1f}")
                cells.append(f"{statistics.median(e['peak_mb'] - e['memory_before_mb'] for e in lines):,.0f}")
                cells.append(f"{zs[sampler]:.1f}" if sampler in zs else "–")
                rows.append("| " + " | ".join(cells) + " |")
        if len(rows) > 2:
            chance = f"\n\nChance alone: \\|z\\| up to {limit:.1f} (two-sided, 1 % over all of them)." if zs else ""
            parts.append("\n".join(rows) + chance)
    return "\n\n".join([*parts, origin([line for lines in found.values() for line in lines], "speed")])


def seeds(lines: list[dict], name: str, digits: int) -> str:
    """The median over the seeds, and the range where there are several."""
    values = sorted(line[name] for line in lines)
    text = f"{statistics.median(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({values[0]:.{digits}f} to {values[-1]:.{digits}f})"


def rate(value: float) -> str:
    """Three digits or so."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def budget(line: dict) -> str:
    """4 × (1,000 + 1,000)."""
    warmup = line["settings"].get("warmup")
    return f"{line['chains']} × ({'?' if warmup is None else format(warmup, ',')} + {line['draws']:,})"


def agreement(found: dict, problem: str) -> tuple[float, dict[str, float]]:
    """(where chance ends, {sampler: largest |z| of its means against those of NumPyro's long run})."""
    if (problem, "numpyro-long") not in found:
        return float("nan"), {}  # nothing to compare with
    reference = found[problem, "numpyro-long"][0]
    zs: dict[str, list[np.ndarray]] = {}
    for sampler in SAMPLERS:
        for line in found.get((problem, sampler), []):
            if sampler != "numpyro-long" and line["ess_min"] >= ENOUGH:
                error = np.hypot(line["mcse"], reference["mcse"])
                zs.setdefault(sampler, []).append((np.array(line["mean"]) - reference["mean"]) / error)
    tests = sum(z.size for each in zs.values() for z in each)
    return float(norm.isf(0.005 / max(tests, 1))), {s: float(np.abs(each).max()) for s, each in zs.items()}


def best(found: dict, problem: str, samplers: tuple[str, ...]) -> tuple[str, float, bool] | None:
    """The fastest of some samplers, its least effective draws per second, and whether its R-hat is at most 1.01.

    One with a larger R-hat counts only where there is none with a smaller.
    """
    rates = [
        (median(found[problem, s], "rhat_max") <= 1.01, median(found[problem, s], "ess_min_per_second"), s)
        for s in samplers
        if (problem, s) in found
    ]
    return max(rates)[::-1] if rates else None


def ratio_table() -> str:
    """The targets."""
    found = speed_lines()
    rows = [
        "| ratio of the least effective draws a second | target | " + " | ".join(PROBLEMS.values()) + " |",
        "|---" * (2 + len(PROBLEMS)) + "|",
    ]
    for title, target, ours, theirs in (
        ("NUTS, one chain / Pyro NUTS", "≥ 20", ("nuts",), ("pyro",)),
        ("NUTS, one chain / NumPyro NUTS, one chain", "≥ 1", ("nuts",), ("numpyro",)),
        ("ChEES / Pyro NUTS", "≥ 100", CHEES, ("pyro",)),
        ("ChEES / NumPyro, best way to run 4 × (1,000 + 1,000)", "≥ 5", CHEES, SAME_BUDGET),
        ("ChEES / NumPyro, best of everything tried", "–", (*CHEES, "chees-long", "chees-wide"), ANY_BUDGET),
        ("4 chains of NUTS / NumPyro, best way to run 4 × (1,000 + 1,000)", "–", ("nuts-4",), SAME_BUDGET),
    ):
        cells = []
        for problem in PROBLEMS:
            one, other = best(found, problem, ours), best(found, problem, theirs)
            if one is None or other is None:
                cells.append("–")
                continue
            sides = ((one, ours), (other, theirs))
            named = [s + "†" * (not fine) for (s, _, fine), among in sides if len(among) > 1 or not fine]
            cells.append(rate(one[1] / other[1]) + (f" ({', '.join(named)})" if named else ""))
        rows.append(f"| {title} | {target} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n\n† R-hat above 1.01."


def posterior_lines() -> dict[tuple[str, str], dict]:
    """{(problem, method): its line}."""
    return {(line["problem"], line["method"]): line for line in read("mcmc_posteriors")}


def posterior_table(problem: str, columns: dict[str, str], distance: str) -> str:
    """Test metrics, distance to NUTS and convergence of every method."""
    found = posterior_lines()
    rows = [
        f"| {PROBLEMS[problem]} | "
        + " | ".join(columns.values())
        + f" | {distance.replace('_', ' ')} to NUTS | R-hat, "
        "worst | effective draws, least (median) | draws | divergent | seconds |",
        "|---" * (7 + len(columns)) + "|",
    ]
    for method, name in METHODS.items():
        line = found.get((problem, method))
        if line is None:
            continue
        cells = [name, *(f"{line['metrics'][c]:.4f}" for c in columns)]
        halves = f"halves: {line['distance_floor'][distance]:.4f}" if "distance_floor" in line else "–"
        cells.append(halves if method == "nuts" else f"{line['distance'][distance]:.4f}")
        if "rhat_max" in line:
            nested = " (nested)" if line["rhat"] == "nested" else ""
            cells += [f"{line['rhat_max']:.3f}{nested}", f"{line['ess_min']:,.0f} ({line['ess_median']:,.0f})"]
            cells += [" × ".join(f"{n:,}" for n in line["draws"]), str(line["divergences"])]
        else:
            cells += ["–"] * 4
        cells.append(f"{line['seconds']:.0f}" if line["seconds"] >= 10 else f"{line['seconds']:.1f}")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def overlap_table() -> str:
    """How sure each method is where NUTS gives a probability between 0.2 and 0.8."""
    found = posterior_lines()
    names = {
        "confidence": "probability of the more probable class",
        "total": "total entropy",
        "epistemic": "epistemic",
        "log_odds_sd": "sd of the log-odds",
    }
    rows = ["| where (points) | method | " + " | ".join(names.values()) + " |", "|---" * (2 + len(names)) + "|"]
    for area, title in AREAS.items():
        for method, name in METHODS.items():
            line = found.get(("breast-cancer", method), {}).get("areas", {}).get(area)
            if line:
                cells = [f"{line[n][0]:.4f} ± {line[n][1]:.4f}" for n in names]
                rows.append(f"| {title} ({line['points']:,}) | {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def posterior_tables() -> str:
    """Both problems, and the overlap."""
    network = {"error": "error", "nll": "NLL", "brier": "Brier", "ece": "ECE", "auroc": "AUROC"}
    curve = {"rmse": "RMSE", "nll": "NLL", "crps": "CRPS", "coverage_95": "95 % coverage"}
    return "\n\n".join(
        [
            posterior_table("breast-cancer", network, "total_variation"),
            posterior_table("toy-curve", curve, "wasserstein"),
            origin(list(posterior_lines().values()), "posteriors"),
        ]
    )


def origin(lines: list[dict], what: str) -> str:
    """What to run, and where and when it was."""
    commits, where, dates = (", ".join(dict.fromkeys(line[k] for line in lines)) for k in ("commit", "machine", "date"))
    loads = [line["load_before"] for line in lines if "load_before" in line]
    load = f"; load before a run {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    return f"`python benchmarks/mcmc.py {what}`; commits {commits}; {where}; {dates}{load}."


MCMC_TABLES: dict[str, Callable[[], str]] = {
    "mcmc ratios": ratio_table,
    "mcmc speed": speed_table,
    "mcmc posteriors": posterior_tables,
    "mcmc overlap": overlap_table,
}
