"""Coverage of conformal intervals, of all rows and in thirds by predicted scale, on the given splits of UCI sets.

    python benchmarks/accuracy/guarantees.py energy boston concrete

A fifth of the training rows calibrates, a hidden-layer network by SVI trains on the others. Prints Markdown: means over
the splits, ± the standard error of the worst third, which the splits share rows of.
"""

import sys

import numpy as np

import bnn_pyro as bp
from bnn_pyro.datasets import data_root

FILES = {"boston": "bostonHousing"}
#: Name in the table -> method, groups.
WAYS = {
    "predictive, not conformal": None,
    "`absolute`": ("absolute", None),
    "`normalised`": ("normalised", None),
    "`cqr`": ("cqr", None),
    "`local`": ("local", None),
    '`normalised`, `groups="uncertainty"`': ("normalised", "uncertainty"),
}
LEVEL, SPLITS, EPOCHS = 0.9, 20, 300


def of_split(path: str, split: int) -> list[list[float]]:
    """For each way: coverage, coverage in thirds, mean width in standard deviations of the target."""
    size = len(bp.load_data(f"{path}.csv", splits=f"{path}.splits.npz", split=split).y_train)
    rows = dict(splits=f"{path}.splits.npz", split=split, seed=split)  # other rows calibrate in every split
    data = bp.load_data(f"{path}.csv", **rows, validation=size // 5)
    posterior = bp.fit("hidden-layer", data, bp.SVI(epochs=EPOCHS), seed=0, progress=False)
    lines = []
    for way in WAYS.values():
        made = posterior
        if way is not None:
            made = bp.calibrate(posterior, data.x_val, data.y_val, way[0], groups=way[1])
        prediction = bp.predict(made, data.x_test)
        low, high, *_ = prediction.interval(LEVEL)
        covered = ((low <= data.y_test) & (data.y_test <= high)).numpy()
        third = np.argsort(np.argsort(prediction.total.numpy())) * 3 // len(covered)
        shares = [covered[third == k].mean() for k in range(3)]
        lines.append([covered.mean(), *shares, (high - low).mean().item() / data.schema.y_scale])
    return lines


def main() -> None:
    """A table for each set that is named."""
    for name in sys.argv[1:]:
        path = str(data_root() / "uci" / FILES.get(name, name))
        values = np.array([of_split(path, split) for split in range(SPLITS)])  # (splits, ways, figures)
        print(f"\n| {name}: intervals of 90 % | all rows | low scale | middle | high scale | worst, ± | width, sd |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for way, figures in zip(WAYS, values.transpose(1, 0, 2), strict=True):
            mean, worst = figures.mean(0), figures.mean(0)[1:4].argmin()
            error = figures[:, 1 + worst].std(ddof=1) / np.sqrt(SPLITS)
            shares = " | ".join(f"{100 * share:.1f} %" for share in mean[:4])
            print(
                f"| {way} | {shares} | {100 * mean[1 + worst]:.1f} ± {100 * error:.1f} % | {mean[4]:.3f} |", flush=True
            )


if __name__ == "__main__":
    main()
