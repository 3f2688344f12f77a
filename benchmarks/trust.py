"""The zoo on the bench, and what is kept of it: verdicts, figures and times of every variant and method.

    python benchmarks/trust.py --budget full --out runs/trust                    (some hours; go on with the same line)
    python benchmarks/trust.py --budget full --out runs/trust mean-field:nuts mean-field:svi

Runs ``python -m bnn_pyro.run check VARIANT --inference METHOD`` for each, those first that tell most, with the small
networks of the bench, and writes ``benchmarks/results/trust_BUDGET.json`` after each.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bnn_pyro.inference import methods_for
from bnn_pyro.run import main as run
from bnn_pyro.runs.check_subjects import SMALL
from bnn_pyro.zoo import ZOO

RESULTS = Path(__file__).parent / "results"
#: Begun with.
FIRST = ("mean-field:nuts", "mean-field:svi", "last-layer:laplace", "mean-field:chees", "mean-field:sghmc",
         "last-layer:svi", "hidden-layer:svi", "last-layer:nuts", "mean-field:hmc", "mlp:map")  # fmt: skip
#: What is kept of an outcome; its quantities one by one stay in the folder.
KEPT = ("level", "sentence", "figures", "settings", "check_settings", "seconds")


def main() -> None:
    """Check what is not there yet, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="VARIANT:METHOD", help="those alone (all)")
    parser.add_argument("--budget", default="full")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    every = [f"{variant}:{method}" for variant, kind in ZOO.items() for method in methods_for(kind)]
    for subject in args.subjects or [*FIRST, *(s for s in every if s not in FIRST)]:
        variant, _, method = subject.partition(":")
        folder = args.out / f"{variant}-{method}"
        small = [part for setting in SMALL.get(variant, ()) for part in ("--set", setting)]
        options = ["--inference", method, *small, "--budget", args.budget, "--seed", args.seed, "--out", str(folder)]
        there = (folder / "check.json").is_file()
        if run(["check", variant, *options, *(["--resume"] if there else [])]) == 130:
            break
        keep(args.out, args.budget, args.seed)


def keep(out: Path, budget: str, seed: str) -> None:
    """Write the figures of all that was checked so far."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*/check.json"))]
    subjects = []
    for one in found:
        (subject,) = one["subjects"]
        subject["outcomes"] = {name: {k: o[k] for k in KEPT} for name, o in subject["outcomes"].items()}
        subjects.append(subject | {"facts": one["facts"]})
    place = list(ZOO)
    subjects.sort(key=lambda s: (place.index(s["variant"]), methods_for(ZOO[s["variant"]]).index(s["inference"])))
    kept = {"command": f"python benchmarks/trust.py --budget {budget} --seed {seed} --out FOLDER", "subjects": subjects}
    (RESULTS / f"trust_{budget}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
