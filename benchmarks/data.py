"""Reading tables, and fits on rows that stay in their file: time and memory, as ratios in one run.

    python -m benchmarks.data csv       # 500,000 rows × 50: reading, splitting, standardising beside pandas.read_csv
    python -m benchmarks.data mapped    # an epoch on 2,000,000 rows × 200 in an NPY file, beside one on 20,000

Every measurement is a process of its own, which has loaded and fitted something small before. Memory is the highest
resident set over that before; mapped pages count while they are in it. Files are made under ``--folder``, random by
seed 0, and removed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory import peak, run_apart
from benchmarks.provenance import RESULTS, Measurements, add_out, check_tree, source, table

__all__ = ["TABLES", "main"]

#: Rows and columns of each file; the small one is what is loaded first.
SIZES = {"csv": (500_000, 50), "mapped": (2_000_000, 200), "in memory": (20_000, 200), "small": (2_000, 50)}
#: The network, and a fit of it.
NETWORK, FIT = {"hidden": (50,)}, {"epochs": 1, "batch_size": 512}
GIB, MIB = 2**30, 2**20


def make_csv(path: Path, rows: int, columns: int) -> None:
    """Numbers as pandas writes them; the last column is y."""
    import numpy as np
    import pandas as pd

    generator, names = np.random.default_rng(0), [*(f"x{k}" for k in range(1, columns)), "y"]
    for start in range(0, rows, 50_000):
        frame = pd.DataFrame(generator.standard_normal((min(50_000, rows - start), columns)), columns=names)
        frame.to_csv(path, index=False, header=start == 0, mode="w" if start == 0 else "a")


def make_arrays(folder: Path, rows: int, columns: int) -> Path:
    """x.npy (float32) and y.npy in a new folder: y is the first columns' mean, with noise."""
    import numpy as np

    folder.mkdir()
    generator, y = np.random.default_rng(0), np.empty(rows, np.float32)
    x = np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=np.float32, shape=(rows, columns))
    for start in range(0, rows, 50_000):
        part = generator.standard_normal((min(50_000, rows - start), columns), dtype=np.float32) * 3 + 5
        x[start : start + len(part)] = part
        y[start : start + len(part)] = part[:, :10].mean(1) + generator.standard_normal(len(part), dtype=np.float32)
    x.flush()
    np.save(folder / "y.npy", y)
    return folder / "x.npy"


def work(what: str, path: str, small: str) -> None:
    """Measure one contestant in this process, and print it as JSON."""
    import pandas as pd

    import bnn_pyro as bp

    def fit(data: Any) -> None:
        bp.fit(bp.MeanField(**NETWORK), data, bp.SVI(**FIT), seed=0, device="cpu", progress=False)

    contestants: dict[str, Callable[[str], object]] = {
        "pandas.read_csv": pd.read_csv,
        "load_data": bp.load_data,
        "fit": lambda name: fit(bp.load_data(name)),
    }
    contestants[what](small)
    start, processor = time.perf_counter(), time.process_time()
    with peak() as memory:
        kept = contestants[what](path)
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - processor}
    del kept
    print(json.dumps({**seconds, "resident": memory.resident, "anonymous": memory.anonymous}))


def measure(part: str, folder: Path, rounds: int, out: Path) -> None:
    """Make the files, run the contestants in turn, and remove the files."""
    measurements = Measurements(out, part)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        small, large = Path(place) / "small.csv", Path(place) / "large.csv"
        make_csv(small, *SIZES["small"])
        if part == "csv":
            make_csv(large, *SIZES["csv"])
            contestants = {"pandas.read_csv": large, "load_data": large}
        else:
            contestants = {name: make_arrays(Path(place) / name, *SIZES[name]) for name in ("in memory", "mapped")}
        for _ in range(rounds):
            for name, path in contestants.items():
                what = name if part == "csv" else "fit"
                load, threads = os.getloadavg()[0], dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
                run = run_apart("benchmarks.data", "work", what, str(path), str(small), **threads)
                measurements.add({"contestant": name}, run, load)
                print(name, {key: round(value, 2) for key, value in run.items()}, file=sys.stderr)


def made(part: str) -> str:
    """The table of a part: least time and memory of the runs, and ratios to the first contestant's."""
    lines = Measurements(RESULTS / "data.json", part).lines()
    best = {line["key"]["contestant"]: {k: min(run[k] for run in line["runs"]) for k in ("cpu_seconds", "resident")}
            for line in lines}  # fmt: skip
    rows = [[name, f"{one['cpu_seconds']:.3g}", f"{one['resident'] / MIB:,.0f}"] for name, one in best.items()]
    text = table(["", "CPU seconds", "memory, MiB"], rows)
    if len(best) == 2:
        first, second = best.values()
        seconds, memory = (second[key] / first[key] for key in ("cpu_seconds", "resident"))
        more = (second["resident"] - first["resident"]) / GIB
        figures = {"csv": f"Time {seconds:.2f} times, memory {memory:.2f} times that of pandas.read_csv (asked: 2).",
                   "mapped": f"{more:.2f} GiB more (asked: 0.5)."}  # fmt: skip
        text += f"\n\n{figures[part]}"
    return f"{text}\n\n{source(lines)}"


TABLES = {f"data {part}": lambda part=part: made(part) for part in ("csv", "mapped")}


def main(argv: list[str] | None = None) -> None:
    """Measure one part."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["work"]:
        work(*arguments[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("csv", "mapped"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where files are made (/tmp)")
    parser.add_argument("--rounds", type=int, default=3)
    add_out(parser, "data.json")
    args = parser.parse_args(arguments)
    check_tree(args.out)
    measure(args.part, args.folder, args.rounds, args.out)


if __name__ == "__main__":
    main()
