"""How time and memory grow with parameters, rows, batch, draws, chains, classes and features; what processes bring.

    python benchmarks/scaling.py growth                 # one size at a time, each measurement in a process of its own
    python benchmarks/scaling.py asked                  # the same; bytes that were asked for, no times
    python benchmarks/scaling.py held                   # large networks where the allocator gives nothing back
    python benchmarks/scaling.py growth --subject predict --repeats 3
    python benchmarks/scaling.py features               # a last layer of ImageNet's shape
    python benchmarks/scaling.py processes              # one fit in several processes (needs MNIST)
    python benchmarks/scaling.py processes --cores 8 --device cuda
    python benchmarks/scaling.py many                   # many fits on an executor
    python benchmarks/scaling.py figures

A measurement is written to ``benchmarks/results/scaling.json`` as soon as it is there; a run that is started again
takes up what is missing. Inputs and labels are synthetic.
"""

from __future__ import annotations

import argparse
import os

from scale.features import measure_features
from scale.growth import ALLOCATORS, measure_growth
from scale.many import measure_many
from scale.processes import measure_processes
from scale.subjects import SUBJECTS
from scaling_figures import draw


def main() -> None:
    """Measure a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*ALLOCATORS, "features", "processes", "many", "figures"])
    parser.add_argument("--subject", nargs="+", choices=list(SUBJECTS), default=[], help="some of growth's (all)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of every measurement (1)")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="of processes and many (all there are)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of processes")
    args = parser.parse_args()
    if args.part in ALLOCATORS:
        measure_growth(args.subject, args.repeats, args.part)
    elif args.part == "features":
        measure_features(args.repeats)
    elif args.part == "processes":
        measure_processes(args.cores, args.repeats, args.device)
    elif args.part == "many":
        measure_many(args.cores, args.repeats)
    else:
        draw()


if __name__ == "__main__":
    main()
