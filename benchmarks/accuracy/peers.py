"""scikit-learn's models on the rows of a sweep's fits, and the tables of docs/which-method.md.

    python -m bnn_pyro.run sweep benchmarks/accuracy/uci-development.toml --out runs/which
    python -m benchmarks.accuracy.peers runs/which

A Normal predictive distribution is scored as those of networks are; of gradient boosting, which predicts quantiles, the
CRPS is twice the mean pinball loss at 19 levels. Training rows are those that the networks have, with the validation
rows, which early stopping takes of theirs; inputs and targets are standardised as theirs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge

from benchmarks.provenance import check_kept, table, write_tables
from bnn_pyro import metrics
from bnn_pyro.datasets import Dataset
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.runs.folder import RunFolder

LEVELS = np.arange(0.05, 0.96, 0.05)
#: Heading -> the metric of metrics.json, and how it is written.
COLUMNS = {"NLL": ("nll", "{:.3f}"), "CRPS": ("crps", "{:.3f}"), "95 %": ("coverage_95", "{:.0%}")}


def rows_of(data: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x and standardised y of training and validation rows, x of test rows."""
    x, y = torch.cat([data.x_train, data.x_val]).numpy(), torch.cat([data.y_train, data.y_val]).numpy()
    return x, (y - data.schema.y_shift) / data.schema.y_scale, data.x_test.numpy()


def mixture(loc: np.ndarray, scale: np.ndarray, data: Dataset) -> Mixture:
    """Of S Normal distributions a row, from means and standard deviations (S, B) of standardised targets; float64."""
    loc, scale = (torch.from_numpy(np.asarray(v, np.float64)) * data.schema.y_scale for v in (loc, scale))
    return Mixture(dist.Normal(loc + data.schema.y_shift, scale))


def normal(model: Any, data: Dataset) -> dict[str, float]:
    """Scores of a model that predicts a mean and a standard deviation."""
    x, y, x_test = rows_of(data)
    loc, scale = model.fit(x, y).predict(x_test, return_std=True)
    return metrics.evaluate(mixture(loc[None], scale[None], data), data.y_test.double()).flat()


def gaussian_process(data: Dataset) -> dict[str, float]:
    """RBF with a length scale for every input."""
    width = data.x_train.shape[1]
    kernel = ConstantKernel(1.0) * RBF(np.ones(width), (1e-2, 1e3)) + WhiteKernel(0.1, (1e-6, 1e1))
    return normal(GaussianProcessRegressor(kernel, normalize_y=True, random_state=0), data)


def boosting(data: Dataset) -> dict[str, float]:
    """HistGradientBoosting, one model a quantile, sorted where they cross."""
    x, y, x_test = rows_of(data)
    levels = [*LEVELS, 0.025, 0.975]
    q = [HistGradientBoostingRegressor(loss="quantile", quantile=p, random_state=0).fit(x, y).predict(x_test)
         for p in levels]  # fmt: skip
    low, high = q[-2:]
    y_test = (data.y_test.numpy() - data.schema.y_shift) / data.schema.y_scale
    loss = [np.maximum(p * (y_test - v), (p - 1) * (y_test - v)).mean()
            for p, v in zip(LEVELS, np.sort(q[:-2], 0), strict=True)]  # fmt: skip
    inside = (np.minimum(low, high) <= y_test) & (y_test <= np.maximum(low, high))
    return {"crps": 2 * mean(loss) * data.schema.y_scale, "coverage_95": float(inside.mean())}


PEERS: dict[str, Callable[[Dataset], dict[str, float]]] = {
    "linear (BayesianRidge)": lambda data: normal(BayesianRidge(), data),
    "GaussianProcessRegressor": gaussian_process,
    "HistGradientBoosting, quantiles": boosting,
}


def peers(folder: Path, fits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of scikit-learn's models as sweep.json has of fits, one for each set and split; kept in the folder."""
    path = folder / "peers.json"
    known = json.loads(path.read_text()) if path.is_file() else []
    for fit in {(f["data"], f["split"]): f for f in fits}.values():
        for name, score in PEERS.items():
            key = {"recipe": name, "data": fit["data"], "split": fit["split"], "fingerprint": fit["fingerprint"]}
            if not any(key.items() <= other.items() for other in known):
                data, start = RunFolder.open(folder / fit["name"]).recipe.load(), time.perf_counter()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of bounds that a length scale reaches
                    found = score(data)
                known.append({**key, "metrics": found, "seconds": time.perf_counter() - start})
                path.write_text(json.dumps(known, indent=1))
    return known


def by_data(fits: list[dict[str, Any]], sd: dict[str, float]) -> str:
    """A row for each set and model, in units of the targets' standard deviation."""
    lines = []
    for data in dict.fromkeys(fit["data"] for fit in fits):
        for fit in (f for f in fits if f["data"] == data):
            cells, found, s = [], fit["metrics"], sd[data]
            for name, form in COLUMNS.values():
                shown = {"nll": lambda v, s=s: v - math.log(s), "crps": lambda v, s=s: v / s}.get(name, float)
                ends = [found.get(name + end) for end in ("", "_low", "_high")]
                low_high = "" if None in ends[1:] else f" ({' to '.join(form.format(shown(v)) for v in ends[1:])})"
                cells.append("–" if ends[0] is None else form.format(shown(ends[0])) + low_high)
            lines.append([data, fit["recipe"], *cells, f"{fit['seconds']:.0f}"])
    return table(["data", "model", *COLUMNS, "seconds"], lines)


def ranks(fits: list[dict[str, Any]], sd: dict[str, float], metric: str) -> str:
    """Of every model the mean rank over the sets that all have, and how far it is from auto on the same rows."""
    score = {(f["recipe"], f["data"]): f["metrics"].get(metric) for f in fits}
    names = [n for n in dict.fromkeys(f["recipe"] for f in fits) if any(score.get((n, d)) is not None for d in sd)]
    data = [d for d in sd if all(score.get((n, d)) is not None for n in names)]
    order = {d: sorted(names, key=lambda n, d=d: score[n, d]) for d in data}
    lines = []
    for name in names:
        apart = [(score[name, d] - score["auto", d]) / (1 if metric == "nll" else sd[d]) for d in data]
        worse = f"{sum(v > 0 for v in apart)} of {len(data)}"
        cells = [f"{mean(1 + order[d].index(name) for d in data):.1f}", f"{median(apart):+.3f}", f"{max(apart):+.3f}"]
        lines.append([name, *cells, "" if name == "auto" else worse])
    head = ["model", f"mean rank by {metric.upper()}", f"median of {metric.upper()} − auto's", "largest"]
    return table([*head, "auto is better on"], lines)


def main(argv: list[str] | None = None) -> None:
    """Fit what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the sweep")
    folder = parser.parse_args(argv).folder
    found = json.loads((folder / "sweep.json").read_text())
    check_kept(found["facts"])
    fits = [fit for fit in found["fits"] if fit["status"] == "finished"]
    sd = {f["data"]: RunFolder.open(folder / f["name"]).recipe.load().schema.y_scale for f in fits}
    fits += peers(folder, fits)
    facts = found["facts"]
    origin = f"`{facts['command']}`, commit {facts['commit']}, {facts['machine']}, {facts['finished'][:10]}."
    text = "\n\n".join([ranks(fits, sd, "nll"), ranks(fits, sd, "crps"), by_data(fits, sd), origin])
    write_tables({"which": lambda: text})
    print(text)


if __name__ == "__main__":
    main()
