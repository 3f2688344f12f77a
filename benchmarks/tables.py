"""Write the tables of the documents from the figures in ``benchmarks/results``: nothing in them is typed by hand.

    python -m benchmarks.tables             # those between <!-- begin NAME --> and <!-- end NAME --> in docs
    python -m benchmarks.tables --print     # all there are, to the terminal

The text around a table is left alone, and so is a table between markers of another name: one of an earlier protocol,
whose command is given there as it was at its commit.
"""

from __future__ import annotations

import argparse

from benchmarks.accuracy.estimators import TABLES as ESTIMATORS
from benchmarks.accuracy.tables import sweep_tables
from benchmarks.accuracy.unseen import TABLES as UNSEEN
from benchmarks.checks.tables import TABLES as CHECKS
from benchmarks.data import TABLES as DATA
from benchmarks.mcmc.tables import TABLES as MCMC
from benchmarks.mutants import TABLES as MUTANTS
from benchmarks.provenance import write_tables
from benchmarks.reliability.tables import TABLES as RELIABILITY
from benchmarks.scaling.tables import TABLES as SCALING
from benchmarks.speed.tables import TABLES as SPEED


def main(argv: list[str] | None = None) -> None:
    """Replace the tables of every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print them; change nothing")
    tables = {**sweep_tables(), **CHECKS, **SPEED, **MCMC, **SCALING, **RELIABILITY, **MUTANTS, **DATA, **UNSEEN,
              **ESTIMATORS}  # fmt: skip
    if parser.parse_args(argv).print:
        print("\n\n".join(f"{name}\n\n{made()}" for name, made in tables.items()))
        return
    placed = write_tables(tables)
    print("written:", ", ".join(sorted(placed)) or "none")
    print("without a place in docs:", ", ".join(sorted(tables.keys() - placed)) or "none")


if __name__ == "__main__":
    main()
