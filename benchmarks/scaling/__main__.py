"""How time and memory grow with parameters, rows, batch, draws, chains, classes and features; what processes bring.

    python -m benchmarks.scaling growth                 # one size at a time, each measurement in a process of its own
    python -m benchmarks.scaling asked                  # the same; bytes that were asked for, no times
    python -m benchmarks.scaling growth --subject predict --repeats 3
    python -m benchmarks.scaling processes              # one fit in several processes (needs MNIST)

A measurement is in ``benchmarks/results/scaling.json`` as soon as it is made; a command that is given again makes what
is missing. Inputs and labels are synthetic.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import replace

from benchmarks.provenance import Measurements, add_out, check_tree
from benchmarks.scaling.growth import ALLOCATORS, measure_growth
from benchmarks.scaling.processes import measure_processes, time_fit
from benchmarks.scaling.subjects import SUBJECTS, measure


def run(name: str, settings: str) -> None:
    """One measurement in this process, ``python -m benchmarks.scaling run map {}``: a line of JSON."""
    warnings.simplefilter("ignore")
    some = json.loads(settings)
    found = time_fit(**some) if name == "fit" else measure(name, replace(SUBJECTS[name].sizes, **some))
    if os.environ.get("RANK", "0") == "0":  # of torchrun's processes the first
        print(json.dumps(found))


def main() -> None:
    """Measure a part."""
    if sys.argv[1:2] == ["run"]:
        run(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*ALLOCATORS, "processes"])
    parser.add_argument("--subject", nargs="+", choices=list(SUBJECTS), default=[], help="some of growth's (all)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of every measurement (1)")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="of processes (all there are)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of processes")
    add_out(parser, "scaling.json")
    args = parser.parse_args()
    check_tree(args.out)
    results = Measurements(args.out, args.part)
    if args.part in ALLOCATORS:
        measure_growth(results, args.subject, args.repeats)
    else:
        measure_processes(results, args.cores, args.repeats, args.device)


if __name__ == "__main__":
    main()
