"""The whole zoo on the bench, and what is kept of it: verdicts, figures and times of every variant and method.

    python benchmarks/trust.py --budget full --out runs/check          (some hours on 2 cores; --resume goes on)
    python benchmarks/trust.py --budget quick --out runs/check-quick

Runs ``python -m bnn_pyro.run check`` and writes ``benchmarks/results/trust_BUDGET.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bnn_pyro.run import main as run

RESULTS = Path(__file__).parent / "results"
#: What is kept of an outcome; its quantities one by one stay in the folder.
KEPT = ("level", "sentence", "figures", "settings", "check_settings", "seconds")


def main() -> int:
    """Check, and keep the figures; also where the run was stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="full")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    options = ["--budget", args.budget, "--seed", args.seed, "--out", str(args.out)]
    code = run(["check", *options, *(["--resume"] if args.resume else [])])
    if not (args.out / "check.json").is_file():
        return code
    found = json.loads((args.out / "check.json").read_text())
    for subject in found["subjects"]:
        subject["outcomes"] = {n: {k: o[k] for k in KEPT} for n, o in subject["outcomes"].items()}
    found["facts"]["command"] = f"python benchmarks/trust.py {' '.join(options)}"
    (RESULTS / f"trust_{args.budget}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
