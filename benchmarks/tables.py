"""Write the tables of the documents from the figures in ``benchmarks/results``: nothing in them is typed by hand.

    python -m benchmarks.tables             # those between <!-- begin NAME --> and <!-- end NAME --> in docs/results
    python -m benchmarks.tables --print     # all there are, to the terminal

The text around a table is left alone, and so is a table between markers of another name: one of an earlier protocol,
whose command is given there as it was at its commit.
"""

from __future__ import annotations

import argparse
import re

from benchmarks.accuracy.tables import sweep_tables
from benchmarks.checks.tables import TABLES as CHECKS
from benchmarks.data import TABLES as DATA
from benchmarks.mcmc.tables import TABLES as MCMC
from benchmarks.mutants import TABLES as MUTANTS
from benchmarks.provenance import ROOT
from benchmarks.reliability.tables import TABLES as RELIABILITY
from benchmarks.scaling.tables import TABLES as SCALING
from benchmarks.speed.tables import TABLES as SPEED

MARKERS = re.compile(r"<!-- begin (?P<name>.*?) -->\n.*?<!-- end (?P=name) -->", re.DOTALL)


def main(argv: list[str] | None = None) -> None:
    """Replace the tables of every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print them; change nothing")
    tables = {**sweep_tables(), **CHECKS, **SPEED, **MCMC, **SCALING, **RELIABILITY, **MUTANTS, **DATA}
    if parser.parse_args(argv).print:
        print("\n\n".join(f"{name}\n\n{made()}" for name, made in tables.items()))
        return
    placed: set[str] = set()

    def written(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in tables:
            return found[0]
        placed.add(name)
        return f"<!-- begin {name} -->\n\n{tables[name]()}\n\n<!-- end {name} -->"

    for page in sorted((ROOT / "docs" / "results").glob("*.md")):
        page.write_text(MARKERS.sub(written, page.read_text()))
    print("written:", ", ".join(sorted(placed)) or "none")
    print("without a place in docs/results:", ", ".join(sorted(tables.keys() - placed)) or "none")


if __name__ == "__main__":
    main()
