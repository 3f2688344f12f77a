"""The tables of docs/results that say what grows how, and what processes bring, from ``scaling.json``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

from scale.formulae import TEXTS, expected
from scale.growth import SWEEPS
from scale.many import JOBS
from scale.processes import BATCHES, Way
from scale.sizes import Sizes
from scale.store import read
from scale.subjects import SUBJECTS

__all__ = ["SCALING_TABLES", "best", "exponent", "sizes_of", "sweep_lines"]

#: Of one thread and a batch of 128: seconds are told in the unit that suits them.
GROWS = {"width": "weights P", "batch": "batch B", "rows": "rows N", "classes": "classes K", "inputs": "features D",
         "chains": "chains C", "draws": "draws S", "points": "points"}  # fmt: skip


def best(line: dict, figure: str, most: bool = False) -> float:
    """The least of a figure over the runs of a measurement: what others do on the machine only adds to it."""
    return (max if most else min)(run[figure] for run in line["runs"])


def exponent(x: list[float], y: list[float]) -> float:
    """Of the power law through the last two points."""
    return math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])


def _line(part: list[dict], **key: object) -> dict | None:
    return next((one for one in part if one["key"] == key), None)


def sizes_of(line: dict) -> Sizes:
    """All sizes of a measurement of growth."""
    key = line["key"]
    return replace(SUBJECTS[key["subject"]].sizes, **key["fixed"], **{key["grows"]: key["value"]})


def sweep_lines(part: list[dict], subject: str, grows: str, values: tuple[int, ...], fixed: dict) -> list[dict]:
    """The measurements of a sweep, in its order."""
    found = [_line(part, subject=subject, grows=grows, value=value, fixed=fixed) for value in values]
    return [line for line in found if line is not None]


def growth_table() -> str:
    """Seconds and memory of every sweep, and the power of the last factor."""
    found = read()
    rows = [
        "| what | grows | from … to | ms of a | … | power | MB, resident | asked for | by the formula |",
        "|---" * 9 + "|",
    ]
    for sweep in SWEEPS:
        subject, grows, _, fixed = sweep
        lines, asked = (sweep_lines(found.get(part, []), *sweep) for part in ("growth", "asked"))
        if len(lines) < 2:
            continue
        sizes = [sizes_of(line) for line in lines]
        x = [s.weights if grows == "width" else getattr(s, grows) for s in sizes]
        seconds = [best(line, "seconds") for line in lines]
        also = ", ".join(f"{_number(v)} {_spoken(k)}" for k, v in fixed.items() if k != "rows")
        rows.append(
            f"| {SUBJECTS[subject].title}{f' ({also})' if also else ''} | {GROWS[grows]} | {_each(x)} "
            f"| {SUBJECTS[subject].unit} | {' · '.join(_ms(s) for s in seconds)} | {exponent(x, seconds):.2f} "
            f"| {' · '.join(_mb(best(line, 'anonymous')) for line in lines)} "
            f"| {' · '.join(_mb(best(line, 'anonymous')) for line in asked) or '–'} "
            f"| {' · '.join(_mb(expected(subject, s)) for s in sizes)} |"
        )
    return "\n".join(rows) + "\n\n" + _source(found.get("growth", []))


def bytes_table() -> str:
    """Every formula, and how far what was asked for and what was resident are from it."""
    found = read()
    rows = [
        "| bytes besides the data, 4·N·D | | asked for / formula | resident / formula |",
        "|---|---|---|---|",
    ]
    for subject, text in TEXTS.items():
        ratios = [_ratios(found.get(part, []), subject) for part in ("asked", "growth")]
        cells = [f"{min(r):.2f} to {max(r):.2f}" if r else "–" for r in ratios]
        rows.append(f"| {SUBJECTS[subject].title} | {text} | {' | '.join(cells)} |")
    return "\n".join(rows)


def allocator_table() -> str:
    """Steps of large networks where glibc gives memory back after use, and where it does not."""
    found = read()
    rows = [
        "| a step, batch 128 | weights | ms, by default | ms, memory kept | MB, by default | MB, memory kept |",
        "|---" * 6 + "|",
    ]
    for line in found.get("held", []):
        other = _line(found.get("growth", []), **line["key"])
        if other is not None:
            cells = [f"{_ms(best(one, 'seconds'))}" for one in (other, line)]
            cells += [_mb(best(one, "anonymous")) for one in (other, line)]
            title = SUBJECTS[line["key"]["subject"]].title
            rows.append(f"| {title} | {_number(sizes_of(line).weights)} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n\n" + _source(found.get("held", []))


#: Bytes below which a formula is not held against a measurement: code and threads take some, too.
SMALL = 20 * 10**6


def _ratios(part: list[dict], subject: str) -> list[float]:
    """Measured to expected, of the sizes that count."""
    lines = [(line, expected(subject, sizes_of(line))) for line in part if line["key"]["subject"] == subject]
    return [best(line, "anonymous") / formula for line, formula in lines if formula >= SMALL]


def features_table() -> str:
    """Seconds and memory of a last layer of ImageNet's shape."""
    part = read().get("features", [])
    names = {
        "cache": "making the cache, once", "map": "MAP, an epoch", "svi": "SVI, an epoch",
        "sghmc": "SGHMC, 1 chain, an epoch", "predict": "predict, 1,000 rows, 100 draws", "laplace": "Laplace (diag)",
    }  # fmt: skip
    counts = sorted({line["key"]["rows"] for line in part})
    rows = [
        "| 2,048 features, 1,000 classes | " + " | ".join(f"{n:,} rows: s | MB (with the map)" for n in counts)
        + " | power | all 1,281,167 rows, s |",
        "|---" * (3 + 2 * len(counts)) + "|",
    ]  # fmt: skip
    for name, title in names.items():
        lines = [_line(part, method=name, rows=n) for n in counts]
        if not lines or None in lines:
            continue
        if "refused" in lines[0]["runs"][0]:
            rows.append(f"| {title} | refused: {lines[0]['runs'][0]['refused']} |" + " |" * (2 * len(counts) + 1))
            continue
        seconds = [best(line, "seconds") for line in lines]
        cells = [
            f"{s:.1f} | {_mb(best(line, 'anonymous'))} ({_mb(best(line, 'resident'))})"
            for s, line in zip(seconds, lines, strict=True)
        ]
        grows = exponent(counts, seconds) if len(counts) > 1 and name != "predict" else None
        whole = "–" if grows is None else f"{seconds[-1] * 1_281_167 / counts[-1]:,.0f}"
        rows.append(f"| {title} | {' | '.join(cells)} | {'–' if grows is None else f'{grows:.2f}'} | {whole} |")
    return "\n".join(rows) + "\n\n" + _source(part)


def processes_table() -> str:
    """Rows a second of one fit, one process and several."""
    part = read().get("processes", [])
    if not part:
        return "Not measured yet: `python benchmarks/scaling.py processes`."
    from scale.fits import FITS

    count = max(line["key"]["processes"] for line in part)
    ways = [Way(1, 1), Way(1, count), Way(count, 1), Way(count, 1, averaged=False)]
    rows = [
        f"| rows a second | batch | 1 process, 1 thread | 1 process, {count} threads "
        f"| {count} processes, 1 thread each | to 1 thread | to {count} threads | exchange, of the step "
        f"| MB, 1 process | MB, each of {count} |",
        "|---" * 10 + "|",
    ]
    for name, fitted in FITS.items():
        for batch in BATCHES:
            lines = [_line(part, fit=name, batch=batch, **vars(way), device="cpu") for way in ways]
            if None in lines:
                continue
            one, threads, several, apart = (best(line, "rows_per_second", most=True) for line in lines)
            mb = [_mb(best(lines[i], "memory")) for i in (0, 2)]
            rows.append(
                f"| {fitted.title} | {batch:,} | {one:,.0f} | {threads:,.0f} | {several:,.0f} | {several / one:.2f} "
                f"| {several / threads:.2f} | {100 * max(0.0, 1 - several / apart):.0f} % | {mb[0]} | {mb[1]} |"
            )
    return "\n".join(rows) + "\n\n" + _source(part)


def many_table() -> str:
    """Seconds, overhead and memory of many fits by the ways to run them."""
    part = read().get("many", [])
    rows = ["| job | way | s | to the first way | MB, all processes |", "|---|---|---|---|---|"]
    titles = {
        "fits": "8 mean-field fits of 500 steps", "ensemble": "an ensemble of 4", "chains": "20 × 512 chains of ChEES",
        "overhead": "64 tasks of nothing",
    }  # fmt: skip
    for job, (_, _, names) in JOBS.items():
        lines = [line for name in names for line in part if line["key"]["job"] == job and line["key"]["way"] == name]
        for line in lines:
            seconds = best(line, "seconds")
            more = ""
            if job == "overhead":
                each = 1000 * best(line, "again") / line["key"]["tasks"]
                more = f" (of which {each:.1f} ms a task, the rest start and end)"
            rows.append(
                f"| {titles[job]} | {line['key']['way']} | {seconds:.1f}{more} "
                f"| {best(lines[0], 'seconds') / seconds:.2f} | {_mb(best(line, 'memory'))} |"
            )
    return "\n".join(rows) + "\n\n" + _source(part)


def _source(part: list[dict]) -> str:
    """What to run, and what these figures were run at."""
    runs = [run for line in part for run in line["runs"]]
    if not runs:
        return "Not measured yet: see `python benchmarks/scaling.py --help`."
    commits, commands = (", ".join(dict.fromkeys(run[name] for run in runs)) for name in ("commit", "command"))
    loads = [run["load"] for run in runs]
    return (
        f"`{commands}`; commit {commits}, {runs[-1]['machine']}, {runs[-1]['date'][:10]}; load before a run "
        f"{min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}."
    )


def _each(values: list[float]) -> str:
    return " · ".join(_number(v) for v in values)


def _number(value: float) -> str:
    return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value:,.0f}" if value < 1e5 else f"{value / 1e3:.0f} k"


def _spoken(size: str) -> str:
    return {"memory": "for max_memory in MiB, 0 no bound", "width": "wide"}.get(size, size)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def _mb(value: float) -> str:
    return f"{value / 1e6:,.0f}" if value >= 1e7 else f"{value / 1e6:.1f}"


SCALING_TABLES: dict[str, Callable[[], str]] = {
    "scaling growth": growth_table,
    "scaling bytes": bytes_table,
    "scaling allocator": allocator_table,
    "scaling features": features_table,
    "scaling processes": processes_table,
    "scaling many": many_table,
}
