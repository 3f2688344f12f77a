"""Keep the figures of a sweep, or of a run of ``check``, in ``benchmarks/results``, for the tables of the documents.

    python -m bnn_pyro.run sweep benchmarks/accuracy/uci-energy.toml
    python -m benchmarks.keep runs/sweep-uci-energy                 # benchmarks/results/sweep_uci-energy.json
    python -m bnn_pyro.run check --budget full --out runs/check     # the whole zoo: some hours; --resume goes on
    python -m benchmarks.keep runs/check                            # benchmarks/results/checks_full.json

Intervals of single fits, and quantities of single checks, stay in the folder.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.provenance import RESULTS, check_kept, write_json

#: What is kept of a fit, and of the outcome of a check.
FIT = ("recipe", "data", "seed", "split", "seconds")
OUTCOME = ("level", "sentence", "figures", "settings", "check_settings", "seconds")


def of_sweep(found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name of the results file, what it holds) of sweep.json. Raises SystemExit where fits are missing."""
    missing = [fit["name"] for fit in found["fits"] if fit["status"] != "finished"]
    if missing:
        raise SystemExit(f"{len(missing)} fits are not finished, {missing[0]} among them: run the sweep again")
    fits = []
    for fit in found["fits"]:
        metrics = {k: v for k, v in fit["metrics"].items() if not k.endswith(("_low", "_high"))}
        fits.append({**{k: fit[k] for k in FIT}, "metrics": metrics})
    held = {"facts": found["facts"], "spec": found["spec"], "summary": found["summary"], "fits": fits}
    return f"sweep_{found['name']}.json", held


def of_checks(found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The same of check.json."""
    for subject in found["subjects"]:
        subject["outcomes"] = {name: {k: o[k] for k in OUTCOME} for name, o in subject["outcomes"].items()}
    return f"checks_{found['key']['budget']}.json", {"facts": found["facts"], "subjects": found["subjects"]}


def main(argv: list[str] | None = None) -> None:
    """Read, refuse what was made by uncommitted code, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="that `sweep` or `check` wrote")
    folder = parser.parse_args(argv).folder
    path = next((path for name in ("sweep", "check") if (path := folder / f"{name}.json").is_file()), None)
    if path is None:
        parser.error(f"{folder} has neither sweep.json nor check.json")
    found = json.loads(path.read_text())
    check_kept(found["facts"])
    name, held = of_sweep(found) if path.stem == "sweep" else of_checks(found)
    write_json(RESULTS / name, held)
    print(f"wrote {RESULTS / name}")


if __name__ == "__main__":
    main()
