"""Speed, as ratios of times taken side by side in one run.

    python -m benchmarks.speed main                          # the main figures of this checkout
    python -m benchmarks.speed main --against ../older       # beside those of another one
    python -m benchmarks.speed steps                         # a training step beside other packages' (25 minutes)
    python -m benchmarks.speed steps --sizes 784-400-400-10 --only deterministic hidden-layer --quick
    python -m benchmarks.speed fits                          # to the same ELBO and NLL as other packages (35 minutes)

``pip install -e ".[peers]"`` brings the other packages; those that are not installed are left out. ``--quick`` takes
few rounds and writes nothing. Ctrl-C keeps the rounds that are whole. On a machine that others use too, take
``--threads 1``: threads that wait for each other's turns cost small steps more than anything else here.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler complains about a GPU that is not there

import torch

from benchmarks.provenance import PACKAGES, add_out, check_tree, provenance, write_json
from benchmarks.speed.fits import time_fits
from benchmarks.speed.main_figures import time_main_figures
from benchmarks.speed.steps import CONTESTANTS, SIZES, chosen, problem, time_steps

PARTS = ("main", "steps", "fits")
PEER_PACKAGES = ("bayesian-torch", "tyxe", "torch_blue")


def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fill ``result`` with the part that was asked for."""
    device = torch.device(args.device)
    if args.part == "main":
        time_main_figures(args.against, args.only, args.rounds, result.setdefault("figures", {}))
    elif args.part == "fits":
        for sizes in args.sizes or ["784-400-400-10"]:
            task = replace(problem(sizes, device), rows=10_000)
            time_fits(task, args.only, result.setdefault("fits", {}))
    else:
        result["contestants"] = {}
        for sizes in args.sizes or SIZES:
            names = chosen(args.only, sizes)
            result["contestants"] |= {name: CONTESTANTS[name].note for name in names}
            found = result.setdefault("networks", {}).setdefault(sizes, {})
            time_steps(problem(sizes, device), names, args.rounds, args.steps, found)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--against", type=Path, metavar="PATH", help="main: a checkout to measure beside this one")
    parser.add_argument("--sizes", nargs="+", default=[], metavar="IN-…-OUT", help="steps: networks; fits: one")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="contestants or figures with this in them"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="steps: of a block, at most")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, help="torch's; by default as many as it takes")
    parser.add_argument("--quick", action="store_true", help="few rounds of small sizes; writes nothing")
    add_out(parser, "speed.json")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.steps = min(args.rounds, 2), min(args.steps, 5)
    else:
        check_tree(args.out)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    result: dict[str, Any] = provenance((*PACKAGES, *PEER_PACKAGES)) | {"device": args.device, "interrupted": False}
    try:
        measure(args, result)
    except KeyboardInterrupt:
        result["interrupted"] = True
        print("\ninterrupted; the rounds that are whole are kept")
    if not args.quick:
        content = json.loads(args.out.read_text()) if args.out.exists() else {}
        write_json(args.out, {**content, args.part: result})
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
