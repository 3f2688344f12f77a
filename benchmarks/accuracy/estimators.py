"""Estimators with scikit-learn's interface on three tables: ours, a Gaussian process, and BdeRegressor.

    python -m benchmarks.accuracy.estimators --bde PYTHON     # of an environment with sklearn-contrib-bde

Inputs and targets are standardised by the training rows for all three. Ours is ``BayesianRegressor("auto")``; the
Gaussian process has a length scale for every input; BdeRegressor has the settings of its README. Each is fitted in a
process of its own, whose seconds are counted, start and compilation included. "as published" is the protocol of bde's
paper (paper/scripts/benchmark.py of its repository) on its split of airfoil; beside it ``mile`` on the same network
with gelu units, at shares of its default length.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.provenance import RESULTS, Measurements, check_tree, source, table

WORKER = """
import sys, numpy as np
data = np.load(sys.argv[2])
x, y, new = data["x"], data["y"], data["new"]
if sys.argv[1].startswith("bde"):
    from bde import BdeRegressor
    from bde.loss import GaussianNLL
    settings = dict(hidden_layers=[16, 16], n_members=8, epochs=200, warmup_steps=5000, n_samples=2000, n_thinning=2,
                    patience=10)
    if sys.argv[1] == "bde, as published":
        settings = dict(hidden_layers=[16] * 4, n_members=10, epochs=1200, warmup_steps=50000, n_samples=1000,
                        n_thinning=10, patience=20)
    model = BdeRegressor(seed=0, loss=GaussianNLL(), validation_split=0.15, lr=1e-3, weight_decay=1e-4, **settings)
    raw = np.asarray(model.fit(x, y).predict(new, raw=True), np.float64)
    raw = raw.reshape(-1, *raw.shape[2:])[::16]
    loc, scale = raw[..., 0], np.logaddexp(0, raw[..., 1]) + 1e-6
elif sys.argv[1] == "process":
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    kernel = ConstantKernel(1.0) * RBF(np.ones(x.shape[1]), (1e-2, 1e3)) + WhiteKernel(0.1, (1e-6, 1e1))
    model = GaussianProcessRegressor(kernel, n_restarts_optimizer=2, random_state=0).fit(x, y)
    loc, scale = (value[None] for value in model.predict(new, return_std=True))
else:
    from bnn_pyro.sklearn import BayesianRegressor
    import bnn_pyro as bp
    model, length = BayesianRegressor("auto"), sys.argv[1].partition("mile, ")[2]
    if length:  # a share of the default length, as auto shortens it
        default = bp.MILE()
        shorter = {key: int(getattr(default, key) * float(length)) for key in ("warmup", "thin", "epochs")}
        model = BayesianRegressor("mean-field", "mile", hidden=[16] * 4, activation="gelu", prior="normal:1",
                                  noise="heteroscedastic", settings=shorter | {"chains": 8})
    model.set_params(random_state=0).fit(x, y)
    components = bp.predict(model.posterior_, new, num_draws=1000).components
    loc, scale = components.loc, components.scale
np.savez(sys.argv[3], loc=loc, scale=scale)
"""
#: Name in the table -> what the worker fits.
MODELS = {"BayesianRegressor": "ours", "GaussianProcessRegressor": "process", "BdeRegressor": "bde"}
KEPT = Measurements(RESULTS / "estimators.json", "tables")
PUBLISHED = {"BdeRegressor, as published": "bde, as published"}
PUBLISHED |= {f"mile, {share:g} of its length": f"mile, {share}" for share in (0.02, 0.05, 0.1, 0.2, 1)}
SETS = {"diabetes": {}, "energy": {"target": "y"}, "airfoil": {"target": "y"}}


def run(name: str, model: str, python: str, split: int = 0) -> dict[str, float]:
    """Scores of one model on a given split of a table, or a random one of diabetes."""
    import pyro.distributions as dist

    import bnn_pyro as bp
    from benchmarks.accuracy.peers import mixture, rows_of

    folder = {"energy": "uci", "airfoil": "tabular"}.get(name)
    where = {} if folder is None else {"splits": f"{folder}/{name}.splits.npz", "split": split, "task": "regression"}
    data = bp.load_data(name if folder is None else f"{folder}/{name}.csv", **SETS[name], **where)
    x, y, new = rows_of(data)
    with tempfile.TemporaryDirectory() as scratch:
        rows, out = Path(scratch, "rows.npz"), Path(scratch, "out.npz")
        np.savez(rows, x=x, y=y, new=new)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={os.cpu_count()}"}
        command = [python, "-c", WORKER, model, str(rows), str(out)]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | devices)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
        found = dict(np.load(out))
    prediction, scale = mixture(found["loc"], found["scale"], data), data.schema.y_scale
    scores = bp.metrics.evaluate(prediction, data.y_test.double()).flat()
    names = ("rmse", "nll", "nll_low", "nll_high", "crps", "coverage_90")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    moments = -dist.Normal(prediction.mean, prediction.total.sqrt()).log_prob(data.y_test).mean() - np.log(scale)
    same = {"rmse_standardised": scores["rmse"] / scale, "nll_standardised": float(scores["nll"] - np.log(scale))}
    same["nll_of_moments"] = float(moments)  # as bde's paper has it
    same |= {"rows": len(x), "cpu": round(seconds, 1), "seconds": round(wall, 1)}
    return {key: scores[key] for key in names} | same


def published() -> str:
    """A row for each split and length on airfoil, in standardised units."""
    lines = [line for line in KEPT.lines() if line["key"]["model"] in PUBLISHED]
    lines.sort(key=lambda line: line["key"]["table"])
    rows = [[line["key"]["model"], line["key"]["table"][-1], *(f"{line['runs'][-1][name]:.3f}" for name in
             ("rmse_standardised", "nll_standardised", "nll_of_moments")),
             *(f"{line['runs'][-1][name]:.0f}" for name in ("seconds", "cpu"))] for line in lines]  # fmt: skip
    return f"{table(['model', 'split', 'RMSE', 'NLL', 'NLL of moments', 'seconds', 'CPU s'], rows)}\n\n{source(lines)}"


def page() -> str:
    """A row for each table and model."""
    lines, rows = [line for line in KEPT.lines() if line["key"]["model"] not in PUBLISHED], []
    for line in lines:
        r = line["runs"][-1]
        nll = f"{r['nll']:.3f} ({r['nll_low']:.3f} to {r['nll_high']:.3f})"
        right = [f"{r['rmse']:.3g}", nll, f"{r['crps']:.3g}", f"{r['coverage_90']:.0%}", f"{r['cpu']:.0f}"]
        rows.append([f"{line['key']['table']} ({r['rows']:,})", line["key"]["model"], *right])
    head = ["table (training rows)", "model", "RMSE", "NLL (95 % over rows)", "CRPS", "90 % intervals hold", "CPU s"]
    return f"{table(head, rows)}\n\n{source(lines)}"


def main(argv: list[str] | None = None) -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bde", default=sys.executable, metavar="PYTHON")
    args = parser.parse_args(argv)
    check_tree(KEPT.path)
    every = [*itertools.product(SETS, MODELS.items(), [0]), *(("airfoil", one, 0) for one in PUBLISHED.items())]
    every += [("airfoil", next(iter(PUBLISHED.items())), split) for split in range(1, 5)]  # bde's is split 0
    for name, (label, model), split in every:
        written = f"{name}, split {split}" if label in PUBLISHED else name
        if not KEPT.runs(key := {"table": written, "model": label}):
            scores = run(name, model, args.bde if model.startswith("bde") else sys.executable, split)
            KEPT.add(key, scores, load=os.getloadavg()[0])
            print(name, label, scores)


TABLES = {"estimators": page, "airfoil": published}

if __name__ == "__main__":
    main()
