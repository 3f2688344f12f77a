"""Coverage and width of intervals on tables, beside MAPIE's CQR over gradient boosting.

    python -m benchmarks.accuracy.guarantees uci/energy --splits 20 --times 1 --models auto     # prints Markdown

Four fifths of a given split's training rows train. The others and the test rows, 2,000 at most, are divided at random
again and again into rows that calibrate and rows that test. All is at its defaults, but ``auto`` has one minute. Prints
means; the head has the band in which 95 % of them lie where rows are exchangeable, by simulation of these divisions.
"""

import argparse
import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from mapie.regression import ConformalizedQuantileRegressor
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor

import bnn_pyro as bp
from benchmarks.provenance import provenance, table
from bnn_pyro.datasets import data_root

LEVELS = (0.5, 0.8, 0.9, 0.95)
#: Of hidden-layer, (method of ``bp.calibrate``, groups); of the others the method alone.
WAYS = (None, ("absolute", None), ("normalised", None), ("cqr", None), ("local", None), ("normalised", "uncertainty"))
#: Rows that calibrate and test, at most.
MAX_ROWS = 2000
MODELS = {"hidden-layer": "svi", "mean-field": "svi", "mlp": "ensemble", "dropout-mlp": "mc-dropout",
          "last-layer": "laplace", "auto": None}  # fmt: skip


@dataclass
class Mapie:
    """MAPIE's intervals, of models fitted at once for all divisions."""

    models: dict[float, ConformalizedQuantileRegressor]

    @classmethod
    def fit(cls, data: bp.Dataset) -> Self:
        """One for each level."""
        boosting = HistGradientBoostingRegressor(loss="quantile", quantile=0.5, random_state=0)
        models = {level: ConformalizedQuantileRegressor(boosting, confidence_level=level) for level in LEVELS}
        return cls({level: m.fit(data.x_train.numpy(), data.y_train.numpy()) for level, m in models.items()})

    def intervals(self, x: Tensor, y: Tensor, new: Tensor) -> dict[float, np.ndarray]:
        """{level: (low, high), each (B,)} of new rows, by rows x, y that calibrate."""
        made = {level: copy.deepcopy(m).conformalize(x.numpy(), y.numpy()) for level, m in self.models.items()}
        return {level: m.predict_interval(new.numpy())[1][..., 0].T for level, m in made.items()}


def fits(data: bp.Dataset, x: Tensor, seed: int, models: list[str]) -> dict[str, tuple[Any, np.ndarray]]:
    """{row of the table: ((x, y, new) -> intervals by level, as of :class:`Mapie`; predicted variances of rows x)}."""
    ways: dict[str, Any] = {}
    for variant, method in {name: MODELS[name] for name in models}.items():
        posterior = bp.fit(variant, data, method, seed=seed, progress=False, minutes=1)
        scale = bp.predict(posterior, x).total.numpy()
        for way in WAYS if variant == "hidden-layer" else WAYS[2:3]:
            words = f"`{way[0]}`" + (", thirds" if way[1] else "") if way else "not conformal"
            ways[f"{', '.join(filter(None, (variant, method)))}: {words}"] = partial(intervals, posterior, way), scale
    return ways | {"MAPIE's CQR, HistGradientBoosting": (Mapie.fit(data).intervals, scale)}


def intervals(posterior: Any, way: tuple | None, x: Tensor, y: Tensor, new: Tensor) -> dict[float, np.ndarray]:
    """Of new rows, as of :class:`Mapie`."""
    predicted = bp.predict(posterior if way is None else bp.calibrate(posterior, x, y, way[0], groups=way[1]), new)
    return {level: np.stack([np.asarray(end) for end in predicted.interval(level)[:2]]) for level in LEVELS}


def of_split(path: str, split: int, times: int, models: list[str]) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
    """{row of the table: coverage by level, in thirds at 90 %, width in sd of y}; rows that calibrate, test, all."""
    rows = dict(splits=f"{path}.splits.npz", split=split, seed=split, task="regression")
    size = len(bp.load_data(f"{path}.csv", **rows).y_train)
    data = bp.load_data(f"{path}.csv", **rows, validation=size // 5)
    train = replace(data, x_val=data.x_val[:0], y_val=data.y_val[:0])  # what calibrates stops no training
    x, y = torch.cat([data.x_val, data.x_test]), torch.cat([data.y_val, data.y_test])
    ways, few = fits(train, x, split, models), min(len(data.x_val), len(x[:MAX_ROWS]) // 2)
    lines: dict[str, list[list[float]]] = {row: [] for row in ways}
    for order in divisions(len(x), times, split):
        cal, test = order[:few], order[few:MAX_ROWS]
        true = y[test].numpy()
        for row, (way, scale) in ways.items():
            ends = way(x[cal], y[cal], x[test])
            held = {level: (low <= true) & (true <= high) for level, (low, high) in ends.items()}
            third = np.argsort(np.argsort(scale[test])) * 3 // len(test)
            shares = [held[0.9][third == k].mean() for k in range(3)]
            width = np.diff(ends[0.9], axis=0).mean() / true.std()
            lines[row].append([*(h.mean() for h in held.values()), *shares, width])
    return {row: np.mean(values, 0) for row, values in lines.items()}, (few, len(test), len(x))


def divisions(rows: int, times: int, seed: int) -> list[np.ndarray]:
    """Orders of the rows, the first of which calibrate."""
    random = np.random.default_rng(seed)
    return [random.permutation(rows) for _ in range(times)]


def bands(rows: list[tuple[int, ...]], times: int) -> list[str]:
    """Between which 95 % of the means lie, of scores that are independent of one another."""
    random, means = np.random.default_rng(0), []
    for _ in range(1000):
        cover = []
        for split, (cal, _, every) in enumerate(rows):
            scores = random.random(every)
            for order in divisions(every, times, split):
                ranked, test = np.sort(scores[order[:cal]]), scores[order[cal:MAX_ROWS]]
                ranks = [int(np.ceil(level * (cal + 1))) for level in LEVELS]
                cover.append([(test <= (ranked[rank - 1] if rank <= cal else 1)).mean() for rank in ranks])
        means.append(np.mean(cover, 0))
    ends = np.quantile(means, (0.025, 0.975), axis=0)
    return [f"{level:.0%} ({low:.1%} to {high:.1%})" for level, low, high in zip(LEVELS, *ends, strict=True)]


def main() -> None:
    """A table for each set that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", help="files below BNN_PYRO_DATA, without .csv; FILE.splits.npz beside them")
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--times", type=int, default=20, help="divisions of a split's rows that do not train")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    args = parser.parse_args()
    for name in args.sets:
        path, lines = str(data_root() / name), []
        every, rows = zip(*(of_split(path, k, args.times, args.models) for k in range(args.splits)), strict=True)
        for row in every[0]:
            mean = np.mean([one[row] for one in every], 0)
            lines.append([row, *(f"{s:.1%}" for s in mean[:4]), f"{mean[4:7].min():.1%}", f"{mean[7]:.3f}"])
        head = [f"{name}, {rows[0][0]} calibrate", *bands(rows, args.times), "worst third at 90%", "width at 90%"]
        print(table(head, lines))
        of = provenance()
        print(f"\n`{of['command']}`, commit {of['commit']}; {of['machine']}, {of['date'][:10]}.\n", flush=True)


if __name__ == "__main__":
    main()
