"""Write the tables of ``docs/results`` from the figures in ``benchmarks/results``: nothing there is typed by hand.

    python benchmarks/write_results.py

A table is between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` of one of the pages; the text around it is left
alone, and a table that no page has a place for is left out. RESULTS.md is a summary of these pages, written by hand; a
test compares its figures with theirs.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import several_processes
from last_layer_tables import LAST_LAYER_TABLES
from mcmc_tables import MCMC_TABLES
from reliability_tables import RELIABILITY_TABLES
from result_cells import RESULTS, Line, Pick, cell, committed
from scaling_tables import SCALING_TABLES
from trust_tables import TRUST_TABLES

ROOT = Path(__file__).parents[1]

#: Recipe of ``benchmarks/mnist.py`` -> how the table names it.
SMALL = {
    "gaussian": "mean-field, Normal(0, 3)",
    "mixture": "mean-field, scale mixture",
    "deterministic": "mlp (MAP), same architecture and schedule",
}
LARGE = {
    "hidden-layer": "hidden-layer 3×1024, free σ, Normal(0, 1)",
    "variational-dropout": "variational-dropout 3×1024, an α a layer",
    "dropout": "dropout-mlp 3×1024, MC dropout",
    "convnet": "bayesian-convnet, Normal(0, 1)",
    "deterministic-1024": "mlp 3×1024 (MAP)",
}
#: Published RMSE and log-likelihood by data set: MC dropout, PBP, deep ensembles (see the notes below the table).
PUBLISHED = {
    "concrete": ("4.827 ± 0.161 / −2.937 ± 0.025", "5.67 / −3.16", "6.03 / −3.06", 4.827, -2.937),
    "energy": ("0.539 ± 0.014 / −1.211 ± 0.005", "1.80 / −2.04", "2.09 / −1.38", 0.539, -1.211),
    "power-plant": ("4.014 ± 0.037 / −2.808 ± 0.009", "4.12 / −2.84", "4.11 / −2.79", 4.014, -2.808),
    "wine-quality-red": ("0.622 ± 0.008 / −0.928 ± 0.013", "0.64 / −0.97", "0.64 / −0.94", 0.622, -0.928),
}


def mnist_lines(recipe: str) -> list[Line]:
    """The lines of a recipe that were scored on the test set, one a seed (the latest of each)."""
    lines = committed(json.loads((RESULTS / "mnist.json").read_text()))
    latest = {line["seed"]: line for line in lines if line["recipe"] == recipe and not line["validation"]}
    return [latest[seed] for seed in sorted(latest)]


def at_mean(name: str, factor: float = 1) -> Pick:
    """A metric of the network at the mean weights."""
    return lambda m: factor * m["at_mean_weights"][name] if "at_mean_weights" in m else None


def metrics_table(recipes: dict[str, str]) -> str:
    """Test metrics of each recipe."""
    rows = [
        "| recipe | seeds | error % | NLL | ECE (15 bins; noise floor) "
        "| at the mean weights: error %, NLL, ECE | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe, name in recipes.items():
        lines = mnist_lines(recipe)
        if lines:
            point = [cell(lines, at_mean(n, f), form) for n, f, form in MEAN_COLUMNS]
            minutes = statistics.mean(line["seconds"] for line in lines) / 60
            rows.append(
                f"| {name} | {', '.join(str(line['seed']) for line in lines)} "
                f"| {cell(lines, lambda m: 100 * m['error'], '%.2f')} | {cell(lines, lambda m: m['nll'], '%.4f')} "
                f"| {cell(lines, lambda m: m['ece'], '%.4f')} ({cell(lines[:1], lambda m: m['ece_floor'], '%.4f')}) "
                f"| {'–' if '–' in point else ', '.join(point)} | {minutes:.0f} |"
            )
    return "\n".join(rows)


MEAN_COLUMNS = (("error", 100, "%.2f"), ("nll", 1, "%.4f"), ("ece", 1, "%.4f"))


def ood_table(recipes: dict[str, str]) -> str:
    """Mean entropies, and AUROC by total entropy / 1 − max p / mutual information."""
    outside = {"kmnist": "KMNIST", "uniform noise": "uniform noise", "gaussian noise": "Gaussian noise"}
    rows = [
        "| recipe | H, test | " + " | ".join(f"{n}: H | AUROC H / 1 − max p / MI" for n in outside.values()) + " |",
        "|---" * (2 + 2 * len(outside)) + "|",
    ]
    for recipe, name in recipes.items():
        lines = mnist_lines(recipe)
        if not lines:
            continue
        cells = [name, cell(lines, lambda m: m["entropy_inside"], "%.3f")]
        for key in outside:
            cells.append(cell(lines, lambda m, key=key: m[key]["mean_entropy"], "%.2f"))
            scores = ("total_entropy", "max_prob", "mutual_information")
            cells.append(" / ".join(cell(lines, lambda m, key=key, s=s: m[key].get(s), "%.3f") for s in scores))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def commands(recipes: dict[str, str]) -> str:
    """What to run, and what these figures were run at."""
    lines = [line for recipe in recipes for line in mnist_lines(recipe)]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    seeds = " ".join(str(s) for s in sorted({line["seed"] for line in lines}))
    names = " ".join(r for r in recipes if mnist_lines(r))
    return f"`python benchmarks/mnist.py {names} --seed {seeds}`; commits {commits}."


def uci_table() -> str:
    """RMSE and log-likelihood over the splits, beside published ones."""
    found = json.loads((RESULTS / "uci.json").read_text())
    rows = [
        "| data | splits | RMSE | test log-likelihood | 95 % coverage | ΔRMSE to MC dropout | ΔLL to MC dropout "
        "| MC dropout RMSE / LL | PBP | deep ensembles (5) | CPU s a split |",
        "|---" * 11 + "|",
    ]
    for name, (dropout, pbp, ensembles, best_rmse, best_ll) in PUBLISHED.items():
        if name not in found:
            continue
        summary, splits = found[name]["summary"], found[name]["splits"]
        difference = summary["minus MC dropout"]
        rmse, ll = (f"{number(summary[k][0])} ± {summary[k][1]:.3f}" for k in ("rmse", "log_likelihood"))
        rows.append(
            f"| {name} | {len(splits)} | {bold(rmse, summary['rmse'][0] <= best_rmse)} "
            f"| {bold(ll, summary['log_likelihood'][0] >= best_ll)} | {100 * summary['coverage_95'][0]:.1f} % "
            f"| {paired(difference['rmse'])} | {paired(difference['log_likelihood'])} | {dropout} | {pbp} "
            f"| {ensembles} | {statistics.mean(split['cpu_seconds'] for split in splits):.0f} |"
        )
    return "\n".join(rows)


def number(value: float) -> str:
    """With a minus sign that is one."""
    return f"{value:.3f}".replace("-", "−")


def bold(text: str, yes: bool) -> str:
    """**text** where it is the better one."""
    return f"**{text}**" if yes else text


def paired(difference: dict) -> str:
    """A difference and its standard error."""
    mean, error = difference["difference"]
    return f"{number(mean)} ± {error:.3f}" + (" (paired)" if difference["paired"] else "")


def pruning_table() -> str:
    """Test error and NLL after removing a share of the weights."""
    rows = ["| network | weights removed | left | error % | NLL |", "|---|---|---|---|---|"]
    for name, found in json.loads((RESULTS / "pruning.json").read_text()).items():
        for point in found["curve"]:
            error = f"{100 * point['error']:.2f} [{100 * point['error_low']:.2f}, {100 * point['error_high']:.2f}]"
            mark = ", log α > 3" if point["share"] == found["share_removed"] else ""
            rows.append(
                f"| {name} | {100 * point['share']:.4g} %{mark} | {point['weights']:,} | {error} | {point['nll']:.4f} |"
            )
    return "\n".join(rows)


def speed_tables() -> str:
    """A training step as a multiple of the deterministic network's, and the ratios and memory that matter."""
    found = json.loads((RESULTS / "hidden_layer.json").read_text())["cpu"]
    networks = list(found["steps"])
    rows = ["| a training step | " + " | ".join(networks) + " |", "|---" * (1 + len(networks)) + "|"]
    for name in found["steps"][networks[0]]["ms"]:
        each = [found["steps"][n]["ms"].get(name) for n in networks]
        floor = [found["steps"][n]["ms"]["deterministic"]["median"] for n in networks]
        cells = [f"{v['median']:.2f} ms, {v['median'] / f:.2f}" if v else "–" for v, f in zip(each, floor, strict=True)]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    ratios = ["| ratio, median (quartiles) | " + " | ".join(networks) + " |", "|---" * (1 + len(networks)) + "|"]
    for name in found["steps"][networks[0]]["ratios"]:
        each = [found["steps"][n]["ratios"].get(name) for n in networks]
        cells = [f"{v['median']:.2f} ({v['quartiles'][0]:.2f} to {v['quartiles'][1]:.2f})" if v else "–" for v in each]
        ratios.append(f"| {name} | " + " | ".join(cells) + " |")
    held = [
        "| memory of a step | network | held between steps, weights | during a step, activations of every layer |",
        "|---|---|---|---|",
    ]
    for network, by_name in found["memory"].items():
        held += [
            f"| {name} | {network} | {m['held_in_weights']:.1f} | {m['during_in_activations']:.1f} |"
            for name, m in by_name.items()
            if isinstance(m, dict) and "held_in_weights" in m
        ]
    where = f"{found['machine']}, {found['threads']} threads, {found['date']}"
    run = f"`{found['command']}`; commit {found['commit']}, {where}."
    return "\n\n".join("\n".join(part) for part in (rows, ratios, held, [run]))


def last_layer_speed_tables() -> str:
    """Times and ratios of SGHMC on features and of an ensemble's prediction; memory; what to run."""
    path = RESULTS / "last_layer_speed.json"
    if not path.exists():
        return "Not measured yet: `python benchmarks/last_layer.py speed`."
    found = json.loads(path.read_text())
    threads = list(found["by_threads"])
    heads = [f"{n} thread{'s' if n != '1' else ''}" for n in threads]
    ratios = ["| ratio, median (quartiles) | target | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    times = ["| ms, median | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for part in ("epochs", "prediction"):
        each = [found["by_threads"][n][part] for n in threads]
        for name, first in each[0]["ratios"].items():
            cells = [spread_cell(one["ratios"][name]) for one in each]
            target = "–" if first["target"] is None else f"≤ {first['target']:g}"
            ratios.append(f"| {name} | {target} | " + " | ".join(cells) + " |")
        for name in each[0]["ms"]:
            cells = [f"{one['ms'][name]['median']:,.{0 if one['ms'][name]['median'] >= 100 else 1}f}" for one in each]
            times.append(f"| {name} | " + " | ".join(cells) + " |")
    memory = ["| peak memory beyond what was there before, MB | |", "|---|---|"]
    for title, by_name in (
        ("SGHMC, an epoch", found["sghmc_peak_bytes"]),
        ("prediction", found["by_threads"][threads[0]]["prediction"]["peak_bytes"]),
    ):
        memory += [f"| {title}: {name} | {value / 2**20:.1f} |" for name, value in by_name.items()]
    where = f"{found['machine']}, {found['date']}"
    run = f"`{found['command']}`; commit {found['commit']}, {where}."
    return "\n\n".join("\n".join(part) for part in (ratios, times, memory, [run]))


def spread_cell(value: dict) -> str:
    """A ratio's median and quartiles; small ones with three digits."""
    digits = 3 if value["median"] < 0.5 else 2
    low, high = value["quartiles"]
    return f"{value['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


TABLES: dict[str, Callable[[], str]] = {
    "mnist": lambda: metrics_table(SMALL),
    "mnist ood": lambda: ood_table(SMALL) + "\n\n" + commands(SMALL),
    "hidden layer": lambda: metrics_table(LARGE),
    "hidden layer ood": lambda: ood_table(LARGE) + "\n\n" + commands(LARGE),
    "speed": speed_tables,
    "last layer speed": last_layer_speed_tables,
    "pruning": pruning_table,
    "uci": uci_table,
    "several processes": several_processes.table,
}


#: Those that are written in files of their own.
OTHERS = (LAST_LAYER_TABLES, MCMC_TABLES, TRUST_TABLES, RELIABILITY_TABLES, SCALING_TABLES)


def main() -> None:
    """Replace the tables of every page."""
    tables = functools.reduce(operator.or_, (TABLES, *OTHERS))
    for page in sorted((ROOT / "docs" / "results").glob("*.md")):
        text = page.read_text()
        for name in re.findall(r"<!-- begin (.*?) -->", text):
            begin, end = (f"<!-- {word} {name} -->" for word in ("begin", "end"))
            before, _, after = *text.partition(begin)[:2], text.partition(end)[2]
            text = f"{before}{begin}\n\n{tables.pop(name)()}\n\n{end}{after}"
        page.write_text(text)
    print("tables without a place in docs/results:", ", ".join(tables) or "none")


if __name__ == "__main__":
    main()
