"""Images: coverage of conformal sets, and how many changed rows pass until a monitor alarms.

    python -m benchmarks.accuracy.streams            # prints Markdown, some minutes
    python -m benchmarks.accuracy.streams --sets digits KMNIST MNIST     # coverage by six models

Three convolutional networks on 5,000 images of MNIST; 1,000 others calibrate. A stream is 200 test images, then changed
ones. The martingale of ``bnn_pyro.calibration.shift`` alarms at 100-fold capital, a false-alarm rate of 1 % over the
whole stream whatever the score; a fixed threshold at the first row with a higher score than any calibration row.
"""

import sys
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import betabinom

import bnn_pyro as bp
from benchmarks.provenance import provenance, table
from bnn_pyro.calibration.shift import conformal_p, martingale
from bnn_pyro.datasets import data_root

MODELS = (("auto", None), ("mean-field", "svi"), ("hidden-layer", "svi"), ("mlp", "ensemble"),
          ("dropout-mlp", "mc-dropout"), ("bayesian-convnet", "svi"))  # fmt: skip
LEVELS, STREAMS, BEFORE, AFTER, ALARM = (0.5, 0.8, 0.9, 0.95), 100, 200, 800, np.log(100)


def three_sets() -> None:
    """Shares of test rows whose class is in its `lac` set, by each model on each set."""
    files = (np.load(f"{data_root()}/KMNIST/kmnist-test-{part}.npz")["arr_0"] for part in ("imgs", "labels"))
    sets = {"MNIST": bp.load_data("mnist", limit=3000, validation=1000), "digits": bp.load_data("digits")}
    sets["KMNIST"] = bp.dataset(*files, split=0.7, validation=1000)
    for name, data in ((name, sets[name]) for name in sys.argv[2:]):
        train = replace(data, x_val=data.x_val[:0], y_val=data.y_val[:0])
        y, cal, rows = data.y_test, len(data.x_val), []
        ranks = np.ceil(np.array(LEVELS) * (cal + 1)).astype(int)
        ends = [np.array(betabinom.interval(0.95, len(y), rank, cal + 1 - rank)) / len(y) for rank in ranks]
        for variant, method in MODELS:
            fitted = bp.calibrate(bp.fit(variant, train, method, progress=False), data.x_val, data.y_val, "lac")
            members = [bp.predict(fitted, data.x_test).set(level).members.double() for level in LEVELS]
            held = (f"{m[torch.arange(len(m)), y].mean():.1%}" for m in members)
            rows.append([", ".join(filter(None, (variant, method))), *held, f"{members[2].sum(1).mean():.2f}"])
        head = [f"{level:.0%} ({low:.1%} to {high:.1%})" for level, (low, high) in zip(LEVELS, ends, strict=True)]
        print(table([f"{name}, {cal} calibrate", *head, "classes a set at 90%"], rows), end="\n\n", flush=True)
    print(provenance())


def scores_of(prediction: bp.Prediction, y: torch.Tensor) -> dict[str, np.ndarray]:
    """{score: (B,)}, each higher where a row is less usual."""
    mean = prediction.mean.double()
    known = 1 - mean[torch.arange(len(y)), y]
    scores = {"label: 1 − P(y)": known, "epistemic": prediction.epistemic, "entropy": prediction.total}
    return {name: s.double().numpy() for name, s in (scores | {"1 − largest probability": 1 - mean.amax(1)}).items()}


def rows_until_alarm(known: np.ndarray, stream: np.ndarray, seed: int) -> tuple[float, float]:
    """Where the martingale and the fixed threshold alarm: rows after ``BEFORE``, below 0 a false alarm, inf none."""
    above = martingale(conformal_p(known, stream, seed)) >= ALARM, stream > known.max()
    return tuple(float(a.argmax()) + 1 - BEFORE if a.any() else np.inf for a in above)


def main() -> None:
    """Both tables."""
    data = bp.load_data("mnist", limit=5000, validation=1000)
    x, y = data.x_test, data.y_test
    posterior = bp.fit("convnet", data, bp.Ensemble(members=3, epochs=10, batch_size=128, patience=0), progress=False)
    rows = []
    for method in ("lac", "aps", "raps"):
        prediction = bp.predict(bp.calibrate(posterior, data.x_val, data.y_val, method), x)
        for level in LEVELS:
            members = prediction.set(level).members
            held = members[torch.arange(len(y)), y].double().mean().item()
            rows.append([f"`{method}`", f"{level:.0%}", f"{held:.1%}", f"{members.sum(1).double().mean():.2f}"])
    print(table(["sets of MNIST", "promised", "held of 10,000", "classes a set"], rows), end="\n\n")

    noise = data.schema.standardise(torch.rand(x.shape, generator=torch.Generator().manual_seed(0)))
    changes = {"none": x, "KMNIST": bp.load_inputs("kmnist", data.schema), "half noise": (x + noise) / 2}
    changes["turned by 90°"] = x.rot90(1, (2, 3))
    known, rows = scores_of(bp.predict(posterior, data.x_val), data.y_val), []
    usual = scores_of(bp.predict(posterior, x), y)
    for change, images in changes.items():
        changed = scores_of(bp.predict(posterior, images), y)
        for name in usual:
            found = []
            for seed in range(STREAMS):
                order = np.random.default_rng(seed).permutation(len(y))[: BEFORE + AFTER]
                stream = np.concatenate([usual[name][order[:BEFORE]], changed[name][order[BEFORE:]]])
                found.append(rows_until_alarm(known[name], stream, seed))
            cells = [f"{np.median(a):.0f} ({np.mean(a <= 0):.0%}, {np.isinf(a).mean():.0%})" for a in np.array(found).T]
            rows.append([change, name, *cells])
    print(table(["change", "score", "martingale: median rows (false, never)", "fixed threshold, likewise"], rows))
    print(f"\n{provenance()}")


if __name__ == "__main__":
    three_sets() if "--sets" in sys.argv else main()
