"""Every method at its defaults on small tables, beside a linear model and knowing nothing.

    python -m benchmarks.accuracy.defaults diabetes uci/energy      # prints Markdown; FILE below BNN_PYRO_DATA

Split 0 of a set that has splits, else a random one; two minutes a fit at most, where the method can end early. Numbers
are test NLL, in units of the targets' standard deviation. "failed" is what ``diagnostics.failure`` calls so.
"""

import argparse
from typing import Any

import bnn_pyro as bp
from benchmarks.accuracy.unseen import peer, scores
from benchmarks.provenance import provenance, table
from bnn_pyro.datasets import DATASETS, Dataset, data_root
from bnn_pyro.diagnostics.failures import failure
from bnn_pyro.inference import METHODS

PAIRS = (("mean-field", "svi"), ("hidden-layer", "svi"), ("variational-dropout", "svi"),
         ("sparse-dropout", "svi"), ("mlp", "map"), ("mlp", "ensemble"), ("dropout-mlp", "mc-dropout"),
         ("last-layer", "svi"), ("last-layer", "laplace"), ("last-layer", "nuts"), ("last-layer", "sghmc"),
         ("mean-field", "sghmc"), ("mean-field", "sgld"), ("mean-field", "nuts"), ("mean-field", "chees"),
         ("mean-field", "mile"), ("auto", None))  # fmt: skip


def load(name: str) -> Dataset:
    """A named set, or a file with its splits."""
    if name in DATASETS:
        return bp.load_data(name)
    path = data_root() / f"{name}.csv"
    return bp.load_data(path, target="y", task="regression", splits=path.with_suffix(".splits.npz"))


def fitted(data: Dataset, variant: str, method: str | None) -> tuple[str, dict[str, float]]:
    """(what went wrong, scores of the test rows)."""
    timed = getattr(METHODS.get(method or ""), "timed", False)
    how: dict[str, Any] = {"max_minutes": 2} if timed else {"minutes": 2}
    try:
        posterior = bp.fit(variant, data, method, seed=0, progress=False, **how)
        failed = failure(posterior, data)
        if failed is not None and not failed.finite:
            return "failed", {}
        return "failed" if failed else "", scores(bp.predict(posterior, data.x_test, num_draws=200), data)
    except bp.UserError as error:
        return str(error), {}


def cell(data: Dataset, variant: str, method: str | None, linear: dict[str, float]) -> str:
    """NLL, how many of 100 intervals of 90 % hold, what is wrong."""
    wrong, found = fitted(data, variant, method)
    words = [f"{found['nll']:.2f}", *(f"{found[n]:.0%}" for n in ("coverage_90",) if n in found)] if found else []
    worse = "worse than linear" if found and found["nll_low"] > linear["nll"] else ""
    return ", ".join(filter(None, [*words, wrong, worse]))


def main() -> None:
    """A row for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+")
    sets = parser.parse_args().sets
    data = {name: load(name) for name in sets}
    linear = {name: peer(one, False) for name, one in data.items()}
    rows = [["linear", *(f"{linear[name]['nll']:.2f}" for name in sets)]]
    for variant, method in PAIRS:
        rows.append([" by ".join(filter(None, (variant, method)))])
        for name in sets:
            rows[-1].append(cell(data[name], variant, method, linear[name]))
            print(rows[-1][0], name, rows[-1][-1], flush=True)
    of = provenance()
    print(table(["", *(f"{name} ({len(one.y_train):,} × {one.x_train.shape[1]})" for name, one in data.items())], rows))
    print(f"\n`{of['command']}`, commit {of['commit']}; {of['machine']}, {of['date'][:10]}.\n", flush=True)


if __name__ == "__main__":
    main()
