"""Coverage and width of intervals on the given splits of tables, beside MAPIE's CQR over gradient boosting.

    python -m benchmarks.accuracy.guarantees uci/energy tabular/airfoil --splits 5     # prints Markdown

A fifth of the training rows calibrates and does not train. All is at its defaults, but ``auto`` has one minute. Prints
means over the splits, ± the standard error of the worst third, which the splits share rows of. The head has the band
in which 95 % of such means lie where intervals hold what they promise: of independent beta-binomial counts.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mapie.regression import ConformalizedQuantileRegressor
from sklearn.ensemble import HistGradientBoostingRegressor

import bnn_pyro as bp
from benchmarks.provenance import provenance, table
from bnn_pyro.datasets import data_root

LEVELS = (0.5, 0.8, 0.9, 0.95)
#: Of the first model, (method of ``bp.calibrate``, groups); of the others the method alone.
WAYS = (None, ("absolute", None), ("normalised", None), ("cqr", None), ("local", None), ("normalised", "uncertainty"))
MODELS = (("hidden-layer", "svi"), ("mean-field", "svi"), ("mlp", "ensemble"), ("dropout-mlp", "mc-dropout"),
          ("last-layer", "laplace"), ("auto", None))  # fmt: skip


@dataclass
class Mapie:
    """MAPIE's intervals of the test rows."""

    data: bp.Dataset

    def interval(self, level: float) -> Any:
        """(low, high), each (B,)."""
        boosting = HistGradientBoostingRegressor(loss="quantile", quantile=0.5, random_state=0)
        made, data = ConformalizedQuantileRegressor(boosting, confidence_level=level), self.data
        made.fit(data.x_train.numpy(), data.y_train.numpy()).conformalize(data.x_val.numpy(), data.y_val.numpy())
        return made.predict_interval(data.x_test.numpy())[1][..., 0].T


def contestants(data: bp.Dataset, seed: int) -> dict[str, tuple[Any, np.ndarray]]:
    """{row of the table: (what has intervals of the test rows, their predicted scales)}."""
    found = {}
    train = replace(data, x_val=data.x_val[:0], y_val=data.y_val[:0])  # what calibrates stops no training
    for variant, method in MODELS:
        posterior = bp.fit(variant, train, method, seed=seed, progress=False, minutes=1)
        scale = bp.predict(posterior, data.x_test).total.numpy()
        for way in WAYS if variant == MODELS[0][0] else WAYS[2:3]:
            made = way and bp.calibrate(posterior, data.x_val, data.y_val, way[0], groups=way[1])
            words = f"`{way[0]}`" + (", thirds" if way[1] else "") if way else "not conformal"
            row = f"{', '.join(filter(None, (variant, method)))}: {words}"
            found[row] = bp.predict(made or posterior, data.x_test), scale
    return found | {"MAPIE's CQR, HistGradientBoosting": (Mapie(data), scale)}


def of_split(path: str, split: int) -> tuple[dict[str, list[float]], tuple[int, int]]:
    """{row of the table: coverage by level, in thirds at 90 %, width in sd of y}; how many rows calibrate and test."""
    size = len(bp.load_data(f"{path}.csv", splits=f"{path}.splits.npz", split=split).y_train)
    rows = dict(splits=f"{path}.splits.npz", split=split, seed=split)  # other rows calibrate in every split
    data = bp.load_data(f"{path}.csv", **rows, validation=size // 5)
    y, lines = data.y_test.numpy(), {}
    for row, (predicted, scale) in contestants(data, split).items():
        third = np.argsort(np.argsort(scale)) * 3 // len(y)
        ends = {level: [np.asarray(end) for end in predicted.interval(level)[:2]] for level in LEVELS}
        held = {level: (low <= y) & (y <= high) for level, (low, high) in ends.items()}
        shares = [held[0.9][third == k].mean() for k in range(3)]
        lines[row] = [*(h.mean() for h in held.values()), *shares, np.diff(ends[0.9], axis=0).mean() / y.std()]
    return lines, (len(data.x_val), len(y))


def band(calibrate: int, test: int, splits: int, level: float) -> str:
    """Between which 95 % of means over splits lie, where rows that calibrate and that test are exchangeable."""
    rank, random = np.ceil(level * (calibrate + 1)), np.random.default_rng(0)
    counts = random.binomial(test, random.beta(rank, calibrate + 1 - rank, (20_000, splits)))
    low, high = np.quantile(counts.mean(1) / test, (0.025, 0.975))
    return f"{level:.0%} ({low:.1%} to {high:.1%})"


def main() -> None:
    """A table for each set that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", help="files below BNN_PYRO_DATA, without .csv; FILE.splits.npz beside them")
    parser.add_argument("--splits", type=int, default=5)
    options = parser.parse_args()
    for name in options.sets:
        every, rows = zip(*(of_split(str(data_root() / name), split) for split in range(options.splits)), strict=True)
        head, lines = [band(*rows[0], options.splits, level) for level in LEVELS], []
        for row in every[0]:
            values = np.array([one[row] for one in every])  # (splits, figures)
            mean = values.mean(0)
            worst = 4 + mean[4:7].argmin()
            error = values[:, worst].std(ddof=1) / np.sqrt(options.splits)
            lines.append([row, *(f"{s:.1%}" for s in mean[:4]), f"{mean[worst]:.1%} ± {error:.1%}", f"{mean[7]:.3f}"])
        print(table([f"{name}, {rows[0][0]} calibrate", *head, "worst third at 90%", "width at 90%, sd"], lines))
        of = provenance()
        print(f"\n`{of['command']}`, commit {of['commit']}; {of['machine']}, {of['date'][:10]}.\n", flush=True)


if __name__ == "__main__":
    main()
